# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint: graphs, embeddings, tokenizer and `config.json`.

The export needs no PyTorch and no ONNX Runtime. Tensors are written one at a time, so a checkpoint may be
larger than memory. `config.json` lists the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from edgellm_ros.builder.adapters import copy_adapters, read_adapters
from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import read_section
from edgellm_ros.builder.expert_config import ExpertArchitecture, expert_architecture
from edgellm_ros.builder.families import find_family
from edgellm_ros.builder.flow_expert import build_expert
from edgellm_ros.builder.graph import DTYPES, GraphBuilder
from edgellm_ros.builder.lm_head import LMHead
from edgellm_ros.builder.model import LLMOptions, Model
from edgellm_ros.builder.tensorrt_operators import check_operators
from edgellm_ros.builder.vocabulary import (
    VOCAB_MAP,
    generation_defaults,
    read_generation_config,
    read_vocab_map,
    write_tokenizer_files,
)
from edgellm_ros.engine_directory import binding_names
from edgellm_ros.engine_directory.adapter_folder import find_adapters
from edgellm_ros.engine_directory.config import CONFIG_FILE, FORMAT_VERSION, BuilderConfig, EngineConfig
from edgellm_ros.engine_directory.files import list_files

EMBEDDING_FILE = "embedding.safetensors"
LM_HEAD_FILE = "lm_head.safetensors"
EXPERT_FOLDER = "action_expert"
CUDA_VARIANT = "llm/model.cuda.onnx"


def export(
    checkpoint_dir: str | Path,
    engine_dir: str | Path,
    precision: str = "fp32",
    max_batch_size: int = 4,
    max_input_len: int = 320,
    max_kv_cache_capacity: int = 448,
    max_lora_rank: int | None = None,
    hidden_state_layers: Sequence[int] = (),
    lm_head_input: bool = False,
    vocab_map: str | Path | None = None,
) -> EngineConfig:
    """Write the engine directory of a checkpoint in Hugging Face format.

    The checkpoint's `model_type` chooses the family (`builder/families`). Encoders and the action expert are
    optional: the parts that the checkpoint has weights for are exported.

    `precision` is the type of weights, activations and KV cache. In every precision norms are computed in
    fp32, and RoPE rows, logits, pixels, time and trajectories are fp32 inputs and outputs. fp32 and fp16 run
    everywhere (on a CPU, ONNX Runtime computes most of fp16 in fp32); bf16 is for GPUs only. Lengths are in
    tokens.

    max_lora_rank: largest rank of adapters; 0 = no LoRA inputs, None = the largest rank among the adapters in
    the checkpoint's folder `lora`, which are copied unless max_lora_rank is 0.

    hidden_state_layers: layers (from 1) whose hidden states become outputs. lm_head_input: the matrix of the
    LM head becomes an input, so that it can be exchanged (`LLMInferenceRuntime.set_lm_head_weights`).
    vocab_map: file with the only tokens whose logits are computed, see `read_vocab_map`.

    `config.json` is removed first and written last, so that an interrupted export leaves no directory that
    looks complete. FileNotFoundError or ValueError, naming file, key and value, for a checkpoint that is
    incomplete or not supported.
    """
    # 1. Requested options.
    checkpoint, engine = Path(checkpoint_dir), Path(engine_dir)
    if precision not in DTYPES:
        raise ValueError(f"precision must be one of {', '.join(DTYPES)}, got {precision!r}")
    limits = BuilderConfig(
        max_batch_size,
        max_input_len,
        max_kv_cache_capacity,
        max_lora_rank or 0,
        hidden_state_layers=tuple(hidden_state_layers),
        lm_head_input=lm_head_input,
    )
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"{checkpoint}: expected a checkpoint directory, found none")

    # 2. Parts of the checkpoint.
    section, weights = read_section(checkpoint / "config.json"), Weights(checkpoint)
    model = find_family(section).read(checkpoint, section, weights)
    if max_kv_cache_capacity > model.llm.max_position_embeddings:
        raise ValueError(
            f"max_kv_cache_capacity {max_kv_cache_capacity} exceeds the model's {model.position_limit} "
            f"{model.llm.max_position_embeddings}"
        )
    expert = _read_expert(checkpoint, model)
    stops = model.stop_token_ids
    if expert is not None:
        stops = tuple(dict.fromkeys((*stops, expert.future_start_token_id)))
    answers = None
    if vocab_map is not None:
        answers = read_vocab_map(Path(vocab_map), model.llm.vocab_size, stops)
    config = EngineConfig(
        format_version=FORMAT_VERSION,
        model_type=section.data["model_type"],
        precision=precision,
        llm=dataclasses.replace(model.llm, reduced_vocab_size=0 if answers is None else len(answers)),
        builder=limits,
        vision=model.vision,
        audio=model.audio,
        action=expert.config if expert else None,
        special_tokens=model.special_tokens,
        stop_token_ids=stops,
        generation=generation_defaults(read_generation_config(checkpoint)),
        files=(),
    )
    adapters = {} if max_lora_rank == 0 else find_adapters(checkpoint)

    # 3. Graphs; weights are read when the files are written.
    head = LMHead(
        weights,
        model.lm_head,
        vocab_size=model.llm.vocab_size,
        hidden_size=model.llm.hidden_size,
        is_embedding=model.lm_head == model.embedding,
        vocab_map=answers,
        as_input=lm_head_input,
    )
    options = LLMOptions(
        precision, max_kv_cache_capacity, head, bool(adapters or max_lora_rank), limits.hidden_state_layers
    )
    llm = model.build_llm(options)
    inputs = {str(value.name): tuple(value.shape or ()) for value in llm.graph.inputs}
    found = read_adapters(adapters, inputs, max_lora_rank)
    if max_lora_rank is None:
        rank = max((adapter.rank for adapter in found.values()), default=0)
        limits = dataclasses.replace(limits, max_lora_rank=rank)
    graphs: dict[str, GraphBuilder] = {"llm": llm}
    graphs |= {part: build(precision) for part, build in model.encoders.items()}
    if expert is not None:
        expert_weights = Weights(checkpoint / EXPERT_FOLDER)
        graphs["action"] = build_expert(expert, expert_weights, precision, max_kv_cache_capacity)
    for part, graph in graphs.items():
        check_operators(graph.graph, f"{part}/model.onnx")

    # 4. Files.
    _clear(engine)
    files = write_tokenizer_files(checkpoint, engine)
    files.append(_write_embedding(model, weights, precision, engine))
    if answers is not None:
        files.append(_write(engine, f"{VOCAB_MAP}.safetensors", {VOCAB_MAP: answers}))
    if lm_head_input:
        matrix = np.ascontiguousarray(head.read().astype(DTYPES[precision].numpy()))
        files.append(_write(engine, LM_HEAD_FILE, {binding_names.LM_HEAD: matrix}))
    for part, graph in graphs.items():
        files += [str(path.relative_to(engine)) for path in graph.save(engine / part / "model.onnx")]
    if model.build_cuda_llm is not None:
        variant = model.build_cuda_llm(options)
        variant.save_variant(engine / CUDA_VARIANT, engine / "llm" / "model.onnx")
        files.append(CUDA_VARIANT)
    copy_adapters(adapters, engine)
    config = dataclasses.replace(config, builder=limits, files=list_files(engine, files))
    config.save(engine)
    return config


def _read_expert(checkpoint: Path, model: Model) -> ExpertArchitecture | None:
    folder = checkpoint / EXPERT_FOLDER
    return expert_architecture(folder / "config.json", model.llm) if folder.is_dir() else None


def _clear(engine: Path) -> None:
    """Make the engine directory and remove the files of an earlier export.

    These are graphs, the TensorRT plans built from them, and optional files.
    """
    engine.mkdir(parents=True, exist_ok=True)
    (engine / CONFIG_FILE).unlink(missing_ok=True)
    optional = (f"{VOCAB_MAP}.safetensors", LM_HEAD_FILE)
    for pattern in ("*/model.onnx", "*/model.*.onnx", "*/model.onnx.data", "*/*.plan*", *optional):
        for path in engine.glob(pattern):
            path.unlink()


def _write_embedding(model: Model, weights: Weights, precision: str, engine: Path) -> str:
    """Write the embedding table [V,H], which the runtime looks up outside the graphs."""
    weights.require(model.embedding, (model.llm.vocab_size, model.llm.hidden_size))
    table = weights.read(model.embedding).astype(DTYPES[precision].numpy())
    return _write(engine, EMBEDDING_FILE, {"embedding": table})


def _write(engine: Path, name: str, tensors: dict[str, np.ndarray]) -> str:
    (engine / name).write_bytes(save(tensors))
    return name
