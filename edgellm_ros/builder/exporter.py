# SPDX-License-Identifier: Apache-2.0
"""Checkpoint in, engine directory out: graphs, embeddings, tokenizer, and a `config.json` that lists them.

Needs no PyTorch and no ONNX Runtime. Graphs are written one tensor at a time, so that a checkpoint may be
larger than memory.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from safetensors.numpy import save

from edgellm_ros.builder.architecture import (
    TextArchitecture,
    expert_architecture,
    read_thinker_config,
    text_architecture,
    vision_architecture,
)
from edgellm_ros.builder.checkpoint import Weights, read_json
from edgellm_ros.builder.flow_expert import build_expert
from edgellm_ros.builder.graph import DTYPES, GraphBuilder
from edgellm_ros.builder.qwen3_omni_text import EMBEDDING, build_llm
from edgellm_ros.builder.qwen3_omni_vision import build_vision
from edgellm_ros.builder.section import Section
from edgellm_ros.builder.vocabulary import (
    generation_defaults,
    read_generation_config,
    special_tokens,
    stop_token_ids,
    write_tokenizer_files,
)
from edgellm_ros.runtime.config import CONFIG_FILE, FORMAT_VERSION, BuilderConfig, EngineConfig, list_files

EMBEDDING_FILE = "embedding.safetensors"


def export(
    checkpoint_dir: str | Path,
    engine_dir: str | Path,
    precision: str = "fp32",
    max_batch_size: int = 4,
    max_input_len: int = 256,
    max_kv_cache_capacity: int = 384,
    max_lora_rank: int = 0,
) -> EngineConfig:
    """Write the engine directory of a dense Qwen3-Omni thinker (Hugging Face format) and its action expert.

    `precision` is the type of weights, activations and KV cache. In every precision norms are computed in
    fp32, and RoPE rows, logits, pixels, time and trajectories are fp32 at the graphs' borders. fp32 and fp16
    run everywhere (ONNX Runtime does most of fp16 on a CPU by way of fp32); bf16 is for GPUs: ONNX Runtime
    has no bf16 kernels for the CPU. Lengths are in tokens.

    `config.json` is removed first and written last, so an interrupted export leaves nothing that looks whole.
    An audio tower in the checkpoint is left out. FileNotFoundError or ValueError, naming file, key and value,
    for a checkpoint that is incomplete or not supported.
    """
    checkpoint, engine = Path(checkpoint_dir), Path(engine_dir)
    if precision not in DTYPES:
        raise ValueError(f"precision must be one of {', '.join(DTYPES)}, got {precision!r}")
    if max_lora_rank != 0:
        raise ValueError(f"max_lora_rank must be 0: engines take no adapters yet, got {max_lora_rank}")
    limits = BuilderConfig(max_batch_size, max_input_len, max_kv_cache_capacity, max_lora_rank)
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"{checkpoint} is not a directory")

    thinker, generation = read_thinker_config(checkpoint), read_generation_config(checkpoint)
    weights = Weights(checkpoint)
    vision = expert = None
    if any(name.startswith("visual.") for name in weights.names()):
        path = checkpoint / "preprocessor_config.json"
        vision = vision_architecture(thinker, Section(read_json(path), str(path)))
    text = text_architecture(thinker, len(vision.config.deepstack_visual_indexes) if vision else 0)
    if max_kv_cache_capacity > text.runner.max_position_embeddings:
        raise ValueError(
            f"max_kv_cache_capacity {max_kv_cache_capacity} exceeds the model's max_position_embeddings "
            f"{text.runner.max_position_embeddings}"
        )
    expert_dir = checkpoint / "action_expert"
    if expert_dir.is_dir():
        expert = expert_architecture(expert_dir / "config.json", text)
    config = EngineConfig(
        format_version=FORMAT_VERSION,
        model_type=thinker.data["model_type"],
        precision=precision,
        llm=text.runner,
        builder=limits,
        vision=vision.config if vision else None,
        audio=None,
        action=expert.config if expert else None,
        special_tokens=special_tokens(thinker, generation),
        stop_token_ids=stop_token_ids(thinker, generation, expert),
        generation=generation_defaults(generation),
        files=(),
    )
    graphs: dict[str, GraphBuilder] = {"llm": build_llm(text, weights, precision, max_kv_cache_capacity)}
    if vision:
        graphs["visual"] = build_vision(vision, weights, precision)
    if expert:
        graphs["action"] = build_expert(expert, Weights(expert_dir), precision, max_kv_cache_capacity)

    _clear(engine)
    files = write_tokenizer_files(checkpoint, engine)
    files.append(_write_embedding(text, weights, precision, engine))
    for part, graph in graphs.items():
        files += [str(path.relative_to(engine)) for path in graph.save(engine / part / "model.onnx")]
    config = dataclasses.replace(config, files=list_files(engine, files))
    config.save(engine)
    return config


def _clear(engine: Path) -> None:
    """Make the directory; remove the graphs of an earlier export and the TensorRT plans made from them."""
    engine.mkdir(parents=True, exist_ok=True)
    (engine / CONFIG_FILE).unlink(missing_ok=True)
    for pattern in ("*/model.onnx", "*/model.onnx.data", "*/*.plan"):
        for path in engine.glob(pattern):
            path.unlink()


def _write_embedding(text: TextArchitecture, weights: Weights, precision: str, engine: Path) -> str:
    """The token embeddings [V,H], which the runtime looks up outside the graphs."""
    weights.require(EMBEDDING, (text.runner.vocab_size, text.runner.hidden_size))
    table = weights.read(EMBEDDING).astype(DTYPES[precision].numpy())
    (engine / EMBEDDING_FILE).write_bytes(save({"embedding": table}))
    return EMBEDDING_FILE
