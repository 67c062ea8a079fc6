# SPDX-License-Identifier: Apache-2.0
"""Measures what quantisation cost.

The logits of an engine are compared with those of the checkpoint's own weights, and so is its perplexity on a
text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgellm_ros.builder.exporter.export import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.cli.quantization.perplexity import (
    TEXT,
    log_probabilities,
    perplexity,
    predictions,
    report_chunks,
)
from edgellm_ros.cli.quantization.token_runs import TokenRun, open_graph, record_runs, run_graph, text_inputs
from edgellm_ros.cli.requests.calibration_requests import ANSWER_TOKENS, GREEDY
from edgellm_ros.runtime.request import LLMGenerationRequest

TEXTS = (
    "What do you see in front of you?",
    "Drive to the red box behind the table and wait there.",
    "How many people are in the room, and what are they doing?",
    "Explain in two sentences why a robot should slow down near people.",
)
PROMPTS = {text: LLMGenerationRequest(text, sampling=GREEDY) for text in TEXTS}


@dataclass(frozen=True)
class QuantizationCost:
    """Logits of an engine beside those that it had before its weights were rounded.

    The tokens are those of prompts and of the answers that the engine gave before.
    """

    prompts: int
    tokens: int
    relative_error: float  # norm of the differences over that of the logits, less the mean of each token
    largest_difference: float
    kl_divergence: float  # mean over tokens, in nats
    same_choice: float  # share of tokens after which both find the same token most likely
    same_answers: float  # share of prompts with the same answer, greedily
    predictions: int = 0  # tokens of a text that are predicted for the perplexity
    perplexity_before: float | None = None  # on the text; None = there is none to predict
    perplexity_after: float | None = None

    def __str__(self) -> str:
        of_logits = (
            f"logits of {self.tokens} tokens of {self.prompts} prompts and their answers: relative error "
            f"{self.relative_error:.2%}, largest difference {self.largest_difference:.3g}, KL divergence "
            f"{self.kl_divergence:.2g} nats; the same most likely token after {self.same_choice:.1%}, the "
            f"same answer of {ANSWER_TOKENS} tokens to {self.same_answers:.0%} of the prompts"
        )
        if not self.predictions:
            return of_logits
        return (
            f"{of_logits}; perplexity of {self.predictions} tokens of a text {self.perplexity_before:.4g} "
            f"before, {self.perplexity_after:.4g} after"
        )


def measure_costs(
    checkpoint: str | Path,
    engines: Sequence[str | Path],
    options: ExportOptions,
    requests: Mapping[str, LLMGenerationRequest] = PROMPTS,
    text: str = TEXT,
) -> list[QuantizationCost]:
    """Compare quantised engines with one of the same checkpoint that is not.

    options: of the other engine, which is written to a temporary directory beside the first; requests: by
    their names in errors; text: for the perplexity. All run on the CPU.
    """
    engines = [Path(engine) for engine in engines]
    with unrounded_engine(checkpoint, engines[0], options) as reference:
        return compare_engines(reference, engines, requests, text)


@contextmanager
def unrounded_engine(checkpoint: str | Path, beside: Path, options: ExportOptions) -> Iterator[Path]:
    """Export a checkpoint to a temporary directory beside an engine."""
    with tempfile.TemporaryDirectory(dir=beside.absolute().parent, prefix=".unquantized-") as folder:
        export(checkpoint, folder, options, with_draft=False)
        yield Path(folder)


def compare_engines(
    reference: Path,
    engines: Sequence[Path],
    requests: Mapping[str, LLMGenerationRequest],
    text: str = TEXT,
) -> list[QuantizationCost]:
    """Compare engines with a reference engine on the CPU.

    All are of one checkpoint and precision.
    """
    runs = record_runs(reference, requests)
    references = _run(reference, runs)
    chunks = report_chunks(reference, text)
    before = perplexity(reference, chunks) if chunks else None
    costs = []
    for engine in engines:
        same = [a.answer == b.answer for a, b in zip(runs, record_runs(engine, requests), strict=True)]
        cost = _compare(references, _run(engine, runs), same)
        after = perplexity(engine, chunks) if chunks else None
        costs.append(
            replace(cost, predictions=predictions(chunks), perplexity_before=before, perplexity_after=after)
        )
    return costs


def logits(engine: Path, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Compute the logits [S,V] after each token of each sequence.

    The graph is the one that a CPU runs.
    """
    return _run(engine, [TokenRun(text_inputs(engine, tokens), ()) for tokens in sequences])


def _run(engine: Path, runs: Sequence[TokenRun]) -> list[np.ndarray]:
    session = open_graph(engine)
    return [run_graph(session, engine, run.inputs, ["logits"])[0][0].astype(np.float64) for run in runs]


def _compare(
    references: Sequence[np.ndarray], found: Sequence[np.ndarray], same_answers: Sequence[bool]
) -> QuantizationCost:
    one, other = np.concatenate(references), np.concatenate(found)
    centred = one - one.mean(-1, keepdims=True)
    difference = other - one
    logs = [log_probabilities(rows) for rows in (one, other)]
    divergence = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    difference_centred = difference - difference.mean(-1, keepdims=True)
    return QuantizationCost(
        prompts=len(references),
        tokens=len(one),
        relative_error=float(np.linalg.norm(difference_centred) / np.linalg.norm(centred)),
        largest_difference=float(np.abs(difference).max()),
        kl_divergence=float(divergence.mean()),
        same_choice=float((one.argmax(-1) == other.argmax(-1)).mean()),
        same_answers=float(np.mean(same_answers)),
    )
