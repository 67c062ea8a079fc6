# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint: graphs, embeddings, tokenizer and `config.json`.

The export needs no PyTorch and no ONNX Runtime. Tensors are written one at a time, and large ones in strips,
so that a checkpoint may be larger than memory. `config.json` lists the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from edgellm_ros.builder.adapters import copy_adapters
from edgellm_ros.builder.export_plan import (
    LM_HEAD_FILE,
    ExportOptions,
    ExportPlan,
    plan_export,
)
from edgellm_ros.builder.quantization.search import GroupScales
from edgellm_ros.builder.vocabulary import VOCAB_MAP
from edgellm_ros.engine_directory.config import CONFIG_FILE, EngineConfig
from edgellm_ros.engine_directory.files import D2T_FILE, DRAFT_EMBEDDING_FILE, list_files
from edgellm_ros.engine_directory.fused_draft import FUSED_DRAFT_FILE
from edgellm_ros.engine_directory.fused_expert import FUSED_EXPERT_FILE
from edgellm_ros.engine_directory.fused_model import FUSED_FILE
from edgellm_ros.engine_directory.lora_scales import LORA_SCALES_FILE


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
    draft: str | Path | None = None,
    with_draft: bool = True,
    max_draft_tree_size: int = 64,
    max_verify_tree_size: int = 64,
    quantize: str | None = None,
    group_size: int = 64,
    cpu_int8: bool = False,
    scales: Sequence[GroupScales] = (),
    kv_cache: str | None = None,
    vlm: str | Path | None = None,
    dataset: str | Path | None = None,
) -> EngineConfig:
    """Write the engine directory of a checkpoint in Hugging Face format.

    The checkpoint's `model_type` chooses the family (`builder/families`). Encoders and the action expert are
    optional: the parts that the checkpoint has weights for are exported.

    `precision` is the type of weights, activations and, without `kv_cache`, KV cache. In every precision
    norms are computed in fp32, and RoPE rows, logits, pixels, time and trajectories are fp32 inputs and
    outputs. fp32 and fp16 run everywhere (on a CPU, ONNX Runtime computes most of fp16 in fp32); bf16 is for
    GPUs only. Lengths are in tokens.

    max_lora_rank: largest rank of adapters; 0 = no LoRA inputs, None = the largest rank among the adapters in
    the checkpoint's folder `lora`, which are copied unless max_lora_rank is 0.

    hidden_state_layers: layers (from 1) whose hidden states become outputs. lm_head_input: the matrix of the
    LM head becomes an input, so that it can be exchanged (`LLMInferenceRuntime.set_lm_head_weights`).
    vocab_map: file with the only tokens whose logits are computed, see `read_vocab_map`.

    draft: directory of an EAGLE-3 draft head for this model; None = the checkpoint's folder `draft`, if there
    is one, unless `with_draft` is false. max_draft_tree_size: most drafted tokens of a sequence that the head
    keeps in its KV cache; max_verify_tree_size: most tokens that the model verifies in one run.

    quantize: "int4" or "int8" rounds the weights of the language model's layers to nearest, in groups of
    `group_size` inputs (32, 64 or 128) that share a scale. Embeddings, LM head, encoders, action expert and
    draft head keep `precision`. The weights of a checkpoint that is quantised stay as they are.

    scales: of the inputs of the language model's layers, moved into the weights before and after
    (`builder/calibration.py` finds those with which rounding changes least).

    cpu_int8: the graphs for a CPU multiply in 8 bits (`builder/int8_products.py`), those of encoders and
    draft head too; the other graphs do not change. Needs precision fp32.

    kv_cache: "fp8" stores keys and values as FP8 (E4M3) without scales: values beyond 448 become 448. None =
    in `precision`. TensorRT and draft heads do not support FP8 (docs/engine_directory.md).

    A policy of LeRobot (`type` in `config.json`, see `builder/policies`) becomes an engine that answers with
    actions only. Lengths and options of language models do not apply. vlm: folder with configuration and
    tokenizer of its vision language model; None = the checkpoint's folder `vlm`, or the folder that its
    configuration names. dataset: the folder `meta` of a LeRobot data set, for names, rate and statistics;
    None = the statistics that the checkpoint has.

    All checks come before the first file is written. `config.json` is removed first and written last, so that
    an interrupted export leaves no directory that looks complete. FileNotFoundError or ValueError, naming
    file, key and value, for a checkpoint that is incomplete or not supported.
    """
    options = ExportOptions(
        precision,
        max_batch_size,
        max_input_len,
        max_kv_cache_capacity,
        max_lora_rank,
        tuple(hidden_state_layers),
        lm_head_input,
        vocab_map,
        draft,
        with_draft,
        max_draft_tree_size,
        max_verify_tree_size,
        quantize,
        group_size,
        tuple(scales),
        cpu_int8,
        kv_cache,
        vlm,
        dataset,
    )
    return _write(plan_export(Path(checkpoint_dir), options), Path(engine_dir))


def _write(plan: ExportPlan, engine: Path) -> EngineConfig:
    _clear(engine)
    files = [*plan.texts, *plan.tensors]
    for name, contents in plan.texts.items():
        (engine / name).parent.mkdir(exist_ok=True)
        (engine / name).write_bytes(contents)
    for name, tensor in plan.tensors.items():
        (engine / name).parent.mkdir(exist_ok=True)
        tensor.write(engine / name)
    for path, graph in plan.graphs.items():
        files += [written.relative_to(engine).as_posix() for written in graph.save(engine / path)]
    copy_adapters(plan.adapter_folders, engine)
    config = dataclasses.replace(plan.config, files=list_files(engine, files))
    config.save(engine)
    return config


def _clear(engine: Path) -> None:
    """Make the engine directory and remove the files of an earlier export.

    These are graphs, the TensorRT plans built from them, and optional files.
    """
    engine.mkdir(parents=True, exist_ok=True)
    (engine / CONFIG_FILE).unlink(missing_ok=True)
    tensors = f"{VOCAB_MAP}.safetensors", LM_HEAD_FILE, D2T_FILE, DRAFT_EMBEDDING_FILE
    optional = *tensors, LORA_SCALES_FILE, FUSED_FILE, FUSED_EXPERT_FILE, FUSED_DRAFT_FILE
    endings = (".onnx", ".*.onnx", ".onnx.data", ".*.onnx.data")
    graphs = [f"*/{name}{ending}" for name in ("model", "verify") for ending in endings]
    for pattern in (*graphs, "*/*.plan*", *optional):
        for path in engine.glob(pattern):
            path.unlink()
