# SPDX-License-Identifier: Apache-2.0
"""Measures what quantisation cost: logits of an engine beside those of the checkpoint's own weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.builder.exporter import export
from edgellm_ros.builder.graph import DTYPES
from edgellm_ros.builder.safetensors_file import read_header
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.onnxruntime_session import open_session
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import graph_path
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.rope import make_rope_table
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

PROMPTS = (
    "What do you see in front of you?",
    "Drive to the red box behind the table and wait there.",
    "How many people are in the room, and what are they doing?",
    "Explain in two sentences why a robot should slow down near people.",
)
ANSWER_TOKENS = 32
FLOAT8 = 17  # ONNX's number for E4M3


@dataclass(frozen=True)
class QuantizationCost:
    """Logits of an engine beside those of the same engine before its weights were rounded.

    The tokens are those of prompts and of the answers that the engine gave before.
    """

    prompts: int
    tokens: int
    relative_error: float  # norm of the differences over that of the logits, less the mean of each token
    largest_difference: float
    kl_divergence: float  # mean over tokens, in nats
    same_choice: float  # share of tokens after which both find the same token most likely
    same_answers: float  # share of prompts with the same answer, greedily

    def __str__(self) -> str:
        return (
            f"logits of {self.tokens} tokens of {self.prompts} prompts and their answers: relative error "
            f"{self.relative_error:.2%}, largest difference {self.largest_difference:.3g}, KL divergence "
            f"{self.kl_divergence:.2g} nats; the same most likely token after {self.same_choice:.1%}, the "
            f"same answer of {ANSWER_TOKENS} tokens to {self.same_answers:.0%} of the prompts"
        )


def measure_cost(
    checkpoint: str | Path, engine: str | Path, options: Mapping[str, Any], prompts: Sequence[str] = PROMPTS
) -> QuantizationCost:
    """Compare a quantised engine with one of the same checkpoint that is not.

    options: those of `export` for the other engine, which is written to a temporary directory beside
    `engine`. Both run on the CPU.
    """
    with tempfile.TemporaryDirectory(dir=Path(engine).absolute().parent, prefix=".unquantized-") as folder:
        export(checkpoint, folder, **{**options, "with_draft": False})
        tokens, answers = _answers(Path(folder), prompts)
        references = logits(Path(folder), tokens)
    found_answers = _answers(Path(engine), prompts)[1]
    return _compare(references, logits(Path(engine), tokens), answers, found_answers)


def _answers(engine: Path, prompts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Answer prompts greedily; returns the tokens of prompts with answers, and of answers."""
    tokens, answers = [], []
    with LLMInferenceRuntime(engine) as runtime:
        for prompt in prompts:
            request = LLMGenerationRequest(prompt, sampling=SamplingParams(max_tokens=ANSWER_TOKENS))
            answers.append(list(runtime.handle_request(request).token_ids))
            tokens.append([*runtime.base_model_input_token_ids[0], *answers[-1]])
    return tokens, answers


def logits(engine: Path, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Compute the logits [S,V] after each token of each sequence, with the graph that a CPU runs."""
    config = EngineConfig.load(engine)
    dtype = np.dtype(DTYPES[config.precision].numpy())
    path = engine / graph_path("llm")
    variant = path.with_suffix(".cpu.onnx")
    session = open_session(variant if variant.is_file() else path)
    embedding = read_header(engine / "embedding.safetensors")["embedding"].read()
    found = []
    for tokens in sequences:
        feeds = _feeds(session, config, embedding[np.array(tokens)].astype(dtype), engine)
        found.append(session.run(["logits"], feeds)[0][0].astype(np.float64))
    return found


def _feeds(session: Any, config: EngineConfig, embeds: np.ndarray, engine: Path) -> dict[str, np.ndarray]:
    """Make the inputs of a run over one sequence [S,H], with all other state empty."""
    count, capacity = len(embeds), config.builder.max_kv_cache_capacity
    table = make_rope_table(config.llm.rope, count, CpuDevice())
    given = {
        "inputs_embeds": embeds[None],
        "rope_cos": np.asarray(table.cos.array)[None, :count],
        "rope_sin": np.asarray(table.sin.array)[None, :count],
        "kv_write_index": np.zeros(1, np.int64),
        "attention_mask": (np.arange(capacity) <= np.arange(count)[:, None])[None, None],
        "last_token_ids": np.arange(count)[None],
        "valid_tokens": np.array([count]),
    }
    if config.builder.lm_head_input:
        given["lm_head.weight"] = read_header(engine / "lm_head.safetensors")["lm_head.weight"].read()
    for node in session.get_inputs():
        if node.name not in given:
            sizes = {"B": 1, "S": count}
            shape = [size if isinstance(size, int) else sizes.get(size, 0) for size in node.shape]
            given[node.name] = _zeros(shape, node.type)
    return {node.name: given[node.name] for node in session.get_inputs()}


def _zeros(shape: Sequence[int], kind: str) -> Any:
    """Make zeros of a type of ONNX Runtime."""
    if kind == "tensor(float8e4m3fn)":
        from onnxruntime import OrtValue

        return OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint8), FLOAT8)
    return np.zeros(shape, {"tensor(float)": np.float32, "tensor(float16)": np.float16}[kind])


def _compare(
    references: Sequence[np.ndarray],
    found: Sequence[np.ndarray],
    answers: Sequence[Sequence[int]],
    found_answers: Sequence[Sequence[int]],
) -> QuantizationCost:
    one, other = np.concatenate(references), np.concatenate(found)
    centred = one - one.mean(-1, keepdims=True)
    difference = other - one
    logs = [rows - _log_sum(rows) for rows in (one, other)]
    divergence = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    difference_centred = difference - difference.mean(-1, keepdims=True)
    return QuantizationCost(
        prompts=len(references),
        tokens=len(one),
        relative_error=float(np.linalg.norm(difference_centred) / np.linalg.norm(centred)),
        largest_difference=float(np.abs(difference).max()),
        kl_divergence=float(divergence.mean()),
        same_choice=float((one.argmax(-1) == other.argmax(-1)).mean()),
        same_answers=float(np.mean([a == b for a, b in zip(answers, found_answers, strict=True)])),
    )


def _log_sum(rows: np.ndarray) -> np.ndarray:
    top = rows.max(-1, keepdims=True)
    return top + np.log(np.exp(rows - top).sum(-1, keepdims=True))
