# SPDX-License-Identifier: Apache-2.0
"""Checkpoint in, engine directory out: graphs, embeddings, tokenizer, and a `config.json` that lists them.

Needs no PyTorch and no ONNX Runtime. Graphs are written one tensor at a time, so that a checkpoint may be
larger than memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from edgellm_ros.builder.adapters import copy_adapters, read_adapters
from edgellm_ros.builder.architecture import (
    TextArchitecture,
    audio_architecture,
    expert_architecture,
    read_thinker_config,
    text_architecture,
    vision_architecture,
)
from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.builder.flow_expert import build_expert
from edgellm_ros.builder.graph import DTYPES, GraphBuilder
from edgellm_ros.builder.lm_head import LM_HEAD, LMHead
from edgellm_ros.builder.qwen3_omni_audio import build_audio
from edgellm_ros.builder.qwen3_omni_text import EMBEDDING, build_llm
from edgellm_ros.builder.qwen3_omni_text_cuda import build_cuda_llm
from edgellm_ros.builder.qwen3_omni_vision import build_vision
from edgellm_ros.builder.tensorrt_operators import check_operators
from edgellm_ros.builder.vocabulary import (
    VOCAB_MAP,
    generation_defaults,
    read_generation_config,
    read_vocab_map,
    special_tokens,
    stop_token_ids,
    write_tokenizer_files,
)
from edgellm_ros.engine_directory.config import CONFIG_FILE, FORMAT_VERSION, BuilderConfig, EngineConfig
from edgellm_ros.engine_directory.files import list_files
from edgellm_ros.engine_directory.schema import read_json
from edgellm_ros.runtime.lora import find_adapters

EMBEDDING_FILE = "embedding.safetensors"
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
    """Write the engine directory of a dense Qwen3-Omni thinker (Hugging Face format) and its action expert.

    Encoders and the expert are optional: what the checkpoint has weights for is exported.

    `precision` is the type of weights, activations and KV cache. In every precision norms are computed in
    fp32, and RoPE rows, logits, pixels, time and trajectories are fp32 at the graphs' borders. fp32 and fp16
    run everywhere (ONNX Runtime does most of fp16 on a CPU by way of fp32); bf16 is for GPUs: ONNX Runtime
    has no bf16 kernels for the CPU. Lengths are in tokens.

    max_lora_rank: largest rank of adapters, 0 makes a graph that takes none; None = what the adapters in the
    checkpoint's folder `lora` need. They are copied, unless it is 0.

    hidden_state_layers: layers from 1 whose hidden states the language model puts out too. lm_head_input: its
    last matrix becomes an input, so that it can be exchanged (`LLMInferenceRuntime.set_lm_head_weights`).
    vocab_map: see `read_vocab_map`; logits are only computed for these tokens.

    `config.json` is removed first and written last, so an interrupted export leaves nothing that looks whole.
    FileNotFoundError or ValueError, naming file, key and value,
    for a checkpoint that is incomplete or not supported.
    """
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
        raise FileNotFoundError(f"{checkpoint} is not a directory")

    thinker, generation = read_thinker_config(checkpoint), read_generation_config(checkpoint)
    weights = Weights(checkpoint)
    vision = audio = expert = None
    if weights.has_module("visual"):
        vision = vision_architecture(thinker, _preprocessor_config(checkpoint))
    if weights.has_module("audio_tower"):
        audio = audio_architecture(thinker, _preprocessor_config(checkpoint))
    text = text_architecture(thinker, len(vision.config.deepstack_visual_indexes) if vision else 0)
    if max_kv_cache_capacity > text.runner.max_position_embeddings:
        raise ValueError(
            f"max_kv_cache_capacity {max_kv_cache_capacity} exceeds the model's max_position_embeddings "
            f"{text.runner.max_position_embeddings}"
        )
    expert_dir = checkpoint / "action_expert"
    if expert_dir.is_dir():
        expert = expert_architecture(expert_dir / "config.json", text)
    stops = stop_token_ids(thinker, generation, expert)
    answers = None
    if vocab_map is not None:
        answers = read_vocab_map(Path(vocab_map), text.runner.vocab_size, stops)
        reduced = dataclasses.replace(text.runner, reduced_vocab_size=len(answers))
        text = dataclasses.replace(text, runner=reduced)
    config = EngineConfig(
        format_version=FORMAT_VERSION,
        model_type=thinker.data["model_type"],
        precision=precision,
        llm=text.runner,
        builder=limits,
        vision=vision.config if vision else None,
        audio=audio.config if audio else None,
        action=expert.config if expert else None,
        special_tokens=special_tokens(thinker, generation),
        stop_token_ids=stops,
        generation=generation_defaults(generation),
        files=(),
    )
    head = LMHead(text, weights, answers, lm_head_input)
    adapters = {} if max_lora_rank == 0 else find_adapters(checkpoint)
    llm_parts = {
        "architecture": text,
        "weights": weights,
        "precision": precision,
        "capacity": max_kv_cache_capacity,
        "head": head,
        "lora": bool(adapters or max_lora_rank),
        "hidden_state_layers": limits.hidden_state_layers,
    }
    llm = build_llm(**llm_parts)
    inputs = {str(value.name): tuple(value.shape or ()) for value in llm.graph.inputs}
    found = read_adapters(adapters, inputs, max_lora_rank)
    if max_lora_rank is None:
        rank = max((adapter.rank for adapter in found.values()), default=0)
        limits = dataclasses.replace(limits, max_lora_rank=rank)
    graphs: dict[str, GraphBuilder] = {"llm": llm}
    if vision:
        graphs["visual"] = build_vision(vision, weights, precision)
    if audio:
        graphs["audio"] = build_audio(audio, weights, precision)
    if expert:
        graphs["action"] = build_expert(expert, Weights(expert_dir), precision, max_kv_cache_capacity)

    for part, graph in graphs.items():
        check_operators(graph.graph, f"{part}/model.onnx")

    _clear(engine)
    files = write_tokenizer_files(checkpoint, engine)
    files.append(_write_embedding(text, weights, precision, engine))
    if answers is not None:
        files.append(_write(engine, f"{VOCAB_MAP}.safetensors", {VOCAB_MAP: answers}))
    if lm_head_input:
        matrix = np.ascontiguousarray(head.read().astype(DTYPES[precision].numpy()))
        files.append(_write(engine, "lm_head.safetensors", {LM_HEAD: matrix}))
    for part, graph in graphs.items():
        files += [str(path.relative_to(engine)) for path in graph.save(engine / part / "model.onnx")]
    variant = build_cuda_llm(**llm_parts).save_variant(engine / CUDA_VARIANT, engine / "llm" / "model.onnx")
    files.append(str(variant.relative_to(engine)))
    copy_adapters(adapters, engine)
    config = dataclasses.replace(config, builder=limits, files=list_files(engine, files))
    config.save(engine)
    return config


def _preprocessor_config(checkpoint: Path) -> ConfigSection:
    path = checkpoint / "preprocessor_config.json"
    return ConfigSection(read_json(path), str(path))


def _clear(engine: Path) -> None:
    """Make the directory; remove the graphs of an earlier export and the TensorRT plans made from them."""
    engine.mkdir(parents=True, exist_ok=True)
    (engine / CONFIG_FILE).unlink(missing_ok=True)
    optional = (f"{VOCAB_MAP}.safetensors", "lm_head.safetensors")
    for pattern in ("*/model.onnx", "*/model.*.onnx", "*/model.onnx.data", "*/*.plan", *optional):
        for path in engine.glob(pattern):
            path.unlink()


def _write_embedding(text: TextArchitecture, weights: Weights, precision: str, engine: Path) -> str:
    """The token embeddings [V,H], which the runtime looks up outside the graphs."""
    weights.require(EMBEDDING, (text.runner.vocab_size, text.runner.hidden_size))
    table = weights.read(EMBEDDING).astype(DTYPES[precision].numpy())
    return _write(engine, EMBEDDING_FILE, {"embedding": table})


def _write(engine: Path, name: str, tensors: dict[str, np.ndarray]) -> str:
    (engine / name).write_bytes(save(tensors))
    return name
