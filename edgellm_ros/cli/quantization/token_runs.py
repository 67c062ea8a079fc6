# SPDX-License-Identifier: Apache-2.0
"""Runs a language model's graph over prompts and an engine's earlier answers.

A run has inputs for each token (embeddings with encoder rows, RoPE rows, deepstack rows), and an empty cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.builder.checkpoint.safetensors_file import read_header
from edgellm_ros.builder.graph.graph import DTYPES
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.files import graph_path
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.rope import make_rope_table
from edgellm_ros.runtime.request import LLMGenerationRequest

TokenInputs = dict[str, np.ndarray]  # [1,S,...] by name
FLOAT8 = 17  # ONNX's number for E4M3
FOR_EACH_TOKEN = ("inputs_embeds", "rope_cos", "rope_sin", "deepstack_embeds_")


@dataclass(frozen=True, eq=False)
class TokenRun:
    """A prompt and the answer that an engine gave."""

    inputs: TokenInputs
    answer: tuple[int, ...]  # token ids

    @property
    def tokens(self) -> int:
        """Return the number of tokens of prompt and answer, without the last one.

        Nothing follows the last one.
        """
        return self.inputs["inputs_embeds"].shape[1]


def record_runs(engine: Path, requests: Mapping[str, LLMGenerationRequest]) -> list[TokenRun]:
    """Answer requests on the CPU one by one and keep the language model's inputs.

    requests: by their names in errors. ValueError, before the first answer, for a request that the engine
    refuses.
    """
    runs = []
    with LLMInferenceRuntime(engine, prefix_cache_bytes=0, drafting=None) as runtime:  # a run for each token
        for name, request in requests.items():
            try:
                runtime.pipeline.prepare([request], 0)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        seen: list[TokenInputs] = []

        def keep(tensors: Mapping[str, Tensor]) -> None:
            count = tensors["inputs_embeds"].shape[1]
            found = {
                name: tensor.array for name, tensor in tensors.items() if name.startswith(FOR_EACH_TOKEN)
            }
            seen.append(
                # A table of an engine with lengths begins with the rows of the run's tokens.
                {
                    name: (rows if rows.ndim == 3 else rows[None, :count]).copy()
                    for name, rows in found.items()
                }
            )

        runtime.pipeline.runner.prefill_executor.observe(keep)
        for request in requests.values():
            answer = runtime.handle_request(request).token_ids
            inputs = {name: np.concatenate([each[name] for each in seen], axis=1) for name in seen[0]}
            runs.append(TokenRun(inputs, tuple(answer)))
            seen.clear()
    return runs


def open_graph(engine: Path) -> Any:
    """Open a session of the language model's graph that a CPU runs."""
    path = engine / graph_path("llm")
    variant = path.with_suffix(".cpu.onnx")
    return open_session(variant if variant.is_file() else path)


def text_inputs(engine: Path, token_ids: Sequence[int]) -> TokenInputs:
    """Make the inputs of tokens of a text."""
    config = EngineConfig.load(engine)
    dtype = np.dtype(DTYPES[config.precision].numpy())
    embedding = read_header(engine / "embedding.safetensors")["embedding"].read()
    count = len(token_ids)
    table = make_rope_table(config.llm.rope, count, CpuDevice())
    return {
        "inputs_embeds": embedding[np.array(token_ids)].astype(dtype)[None],
        "rope_cos": np.asarray(table.cos.array)[None, :count],
        "rope_sin": np.asarray(table.sin.array)[None, :count],
    }


def run_graph(session: Any, engine: Path, inputs: TokenInputs, outputs: Sequence[str]) -> list[np.ndarray]:
    """Run an engine's language model graph over a sequence; return these outputs."""
    config = EngineConfig.load(engine)
    count, capacity = inputs["inputs_embeds"].shape[1], config.builder.max_kv_cache_capacity
    given: dict[str, Any] = {
        **inputs,
        "kv_write_index": np.zeros(1, np.int64),
        "attention_mask": (np.arange(capacity) <= np.arange(count)[:, None])[None, None],
        "last_token_ids": np.arange(count)[None],
        "valid_tokens": np.array([count]),
    }
    taken = {node.name for node in session.get_inputs()}
    if "kv_length" in taken:
        given |= {"kv_length": np.array([count]), "position_ids": np.arange(count)[None]}
        for name in taken & {"rope_cos", "rope_sin"}:
            given[name] = np.pad(inputs[name][0], ((0, capacity - count), (0, 0)))
    if config.builder.lm_head_input:
        given["lm_head.weight"] = read_header(engine / "lm_head.safetensors")["lm_head.weight"].read()
    for node in session.get_inputs():
        if node.name not in given:
            sizes = {"B": 1, "S": count}
            shape = [size if isinstance(size, int) else sizes.get(size, 0) for size in node.shape]
            given[node.name] = _zeros(shape, node.type)
    return session.run(list(outputs), {name: given[name] for name in taken})


def _zeros(shape: Sequence[int], kind: str) -> Any:
    """Make zeros of a type of ONNX Runtime."""
    if kind == "tensor(float8e4m3fn)":
        from onnxruntime import OrtValue

        return OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint8), FLOAT8)
    return np.zeros(shape, {"tensor(float)": np.float32, "tensor(float16)": np.float16}[kind])
