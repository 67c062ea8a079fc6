# SPDX-License-Identifier: Apache-2.0
"""Tokens of running answers while requests with pictures join the batch.

Measures
--------
The time between two tokens of running answers while newcomers with a picture each arrive: with the vision
encoder beside the steps (`beside`, as a runtime does on a CPU) and between two steps (`between`). Also the
newcomers' time to the first token, the tokens per second of all, and the processor time per token.

Conditions
----------
--talkers requests without a picture want --tokens tokens each. --newcomers requests arrive meanwhile, one
every --gap seconds, each with a new picture of random pixels, and want --short tokens. The model has the
sizes of --shape, random weights, and no stop token. Both ways take turns in one process, each with a runtime
of its own, after a round that is not measured. Nothing is reused. The answers of both ways must be the same
(fp32).

Examples
--------
    python -m benchmarks.newcomers
    python -m benchmarks.newcomers --shape internvl3-1b,num_hidden_layers=8,vision.num_hidden_layers=6 --gap 5

Last JSON line: the conditions, and `ways` with medians over the rounds: `between_tokens` of the talkers and
`first_token` of the newcomers in seconds (median and p90), `longest_gap` between two tokens of a talker,
`tokens_per_second`, `cpu_seconds_per_token`.

"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.prompt_lengths import random_words
from benchmarks.published_models import parse_model
from benchmarks.random_checkpoint import write_checkpoint
from edgellm_ros.builder import export
from edgellm_ros.cli.arguments import integer, number
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

SHAPE = (  # an image takes as long as ten steps or more
    "internvl3-1b,num_hidden_layers=2,hidden_size=224,intermediate_size=512,"
    "vision.num_hidden_layers=2,vision.hidden_size=256,vision.intermediate_size=1024"
)
MOST_INPUT = 512  # tokens of a prompt
WORDS = 8  # of a prompt


class OneAtATime(CpuDevice):
    """A CPU on which encoders run between two steps."""

    runs_beside = False


WAYS = {"between": OneAtATime, "beside": CpuDevice}


@dataclass
class Answer:
    """When the tokens of an answer came, in seconds."""

    start: float = 0.0
    arrived: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def ask(self, runtime: LLMInferenceRuntime, request: LLMGenerationRequest) -> None:
        """Submit a request, and wait for its answer."""

        def note(tokens: int) -> None:
            if tokens > len(self.arrived):
                self.arrived.append(time.perf_counter())

        self.start = time.perf_counter()
        handle = runtime.submit(replace(request, on_progress=lambda progress: note(progress.tokens)))
        self.tokens = handle.result().token_ids


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    options: dict[str, Any] = {"prefix_cache_bytes": 0}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        engine, sizes = _engine(args, Path(temporary))
        runtimes = {
            way: stack.enter_context(LLMInferenceRuntime(engine, device(), **options))
            for way, device in WAYS.items()
        }
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for index in range(args.rounds + 1):
            answers = {}
            for way in sorted(WAYS, reverse=index % 2 == 1):
                figures, answers[way] = _play(runtimes[way], args, index)
                if index:
                    found[way].append(figures)
            if answers["beside"] != answers["between"]:
                raise ValueError("the answers of both ways are not the same")
        machine = common.machine(runtimes["beside"].pipeline.device)
    return common.finish(
        "newcomers",
        changes={**sizes, **options},
        **machine,
        **vars(args),
        ways={way: _medians(figures) for way, figures in found.items()},
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default=SHAPE, help="of a published model (default: %(default)s)")
    parser.add_argument(
        "--image", type=common.numbers(int), default=[448, 448], help="height,width (default: 448,448)"
    )
    parser.add_argument("--talkers", type=integer(1), default=2, help="(default: %(default)s)")
    parser.add_argument("--newcomers", type=integer(1), default=6, help="(default: %(default)s)")
    parser.add_argument("--gap", type=number(0.0, 100.0), default=0.5, help="seconds (default: %(default)s)")
    parser.add_argument("--tokens", type=integer(2), default=200, help="of a talker (default: %(default)s)")
    parser.add_argument("--short", type=integer(1), default=4, help="of a newcomer (default: %(default)s)")
    parser.add_argument("--rounds", type=integer(1), default=3, help="of both ways (default: %(default)s)")
    return parser.parse_args(arguments)


def _engine(args: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Export an engine with rows for the talkers and two newcomers."""
    checkpoint = write_checkpoint(folder / "checkpoint", parse_model(args.shape), "fp32")
    sizes = {
        "max_batch_size": args.talkers + 2,
        "max_input_len": MOST_INPUT,
        "max_kv_cache_capacity": MOST_INPUT + args.tokens,
    }
    export(checkpoint, folder / "engine", precision="fp32", **sizes)
    return folder / "engine", sizes


def _play(
    runtime: LLMInferenceRuntime, args: argparse.Namespace, seed: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Answer talkers and newcomers once; return the figures and the answers."""
    rng = np.random.default_rng(seed)
    talkers = [_request(rng, args.tokens) for _ in range(args.talkers)]
    newcomers = [_request(rng, args.short, args.image) for _ in range(args.newcomers)]
    answers = [Answer() for _ in (*talkers, *newcomers)]
    threads = [
        threading.Thread(target=answer.ask, args=(runtime, request))
        for answer, request in zip(answers, (*talkers, *newcomers), strict=True)
    ]
    start, cpu = time.perf_counter(), time.process_time()
    for index, thread in enumerate(threads):
        if index >= args.talkers:
            time.sleep(args.gap)
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    talking, joining = answers[: args.talkers], answers[args.talkers :]
    between = [after - before for each in talking for before, after in pairwise(each.arrived)]
    tokens = sum(len(each.tokens) for each in answers)
    figures = {
        "between_tokens": common.spread(between),
        "longest_gap": max(between),
        "first_token": common.spread([each.arrived[0] - each.start for each in joining]),
        "tokens_per_second": tokens / seconds,
        "cpu_seconds_per_token": cpu / tokens,
    }
    return figures, [each.tokens for each in answers]


def _request(rng: np.random.Generator, tokens: int, image: list[int] | None = None) -> LLMGenerationRequest:
    """Make a request with random words, and a picture of size `image`."""
    images = () if image is None else (rng.integers(0, 256, (*image, 3), np.uint8),)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    return LLMGenerationRequest(random_words(rng, WORDS), images=images, sampling=sampling)


def _medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of figures over the rounds."""
    return {
        name: _medians([each[name] for each in rounds])
        if isinstance(first, dict)
        else statistics.median(each[name] for each in rounds)
        for name, first in rounds[0].items()
    }


if __name__ == "__main__":
    main()
