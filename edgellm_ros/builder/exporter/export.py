# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint: graphs, embeddings, tokenizer and `config.json`.

The export needs no PyTorch and no ONNX Runtime. Tensors are written one at a time, and large ones in strips,
so that a checkpoint may be larger than memory. `config.json` lists the files.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from edgellm_ros.builder.config.vocabulary import VOCAB_MAP
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import ExportPlan, plan_export
from edgellm_ros.builder.exporter.tensor_files import EMBEDDING_FILE, LM_HEAD_FILE
from edgellm_ros.builder.weights.adapters import copy_adapters
from edgellm_ros.builder.weights.unread_weights import listed
from edgellm_ros.engine_directory.adapters.lora_scales import LORA_SCALES_FILE
from edgellm_ros.engine_directory.config import CONFIG_FILE, EngineConfig
from edgellm_ros.engine_directory.files import D2T_FILE, DRAFT_EMBEDDING_FILE, list_files
from edgellm_ros.engine_directory.navigation import guidance_problem, navigation_problem
from edgellm_ros.fused.description.decoder import FUSED_FILE
from edgellm_ros.fused.description.draft import FUSED_DRAFT_FILE
from edgellm_ros.fused.description.expert import FUSED_EXPERT_FILE
from edgellm_ros.fused.description.vision import FUSED_VISION_FILE

logger = logging.getLogger(__name__)


def export(
    checkpoint_dir: str | Path,
    engine_dir: str | Path,
    options: ExportOptions | None = None,
    **changes: Any,
) -> EngineConfig:
    """Write the engine directory of a checkpoint in Hugging Face format.

    The checkpoint's `model_type` chooses the family (`builder/families`). Encoders and the action expert are
    optional: the parts that the checkpoint has weights for are exported. A policy of LeRobot (`type` in
    `config.json`, see `builder/policies`) becomes an engine that answers with actions only; lengths and
    options of language models do not apply to it.

    options: None = the defaults; changes: fields of `ExportOptions` that replace those of `options`.

    All checks come before the first file is written. `config.json` is removed first and written last, so that
    an interrupted export leaves no directory that looks complete. Weights that no graph has, such as a head
    of several tokens (`mtp.*`), are logged in one line, and so is a batch that is too small for guidance by
    instructions of navigation. FileNotFoundError or ValueError, naming file, key and value, for a checkpoint
    that is incomplete or not supported.
    """
    options = dataclasses.replace(options or ExportOptions(), **changes)
    plan = plan_export(Path(checkpoint_dir), options)
    if plan.unread:
        logger.warning("%s: %s", checkpoint_dir, listed(plan.unread))
    if not navigation_problem(plan.config) and (problem := guidance_problem(plan.config)):
        logger.warning("%s: %s", engine_dir, problem)
    return _write(plan, Path(engine_dir))


def _write(plan: ExportPlan, engine: Path) -> EngineConfig:
    clear_engine(engine)
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


def clear_engine(engine: Path) -> None:
    """Make the engine directory and remove the files of an earlier export.

    Removed are graphs, the TensorRT plans built from them, and optional files.
    """
    engine.mkdir(parents=True, exist_ok=True)
    (engine / CONFIG_FILE).unlink(missing_ok=True)
    # Runtimes map tables of embeddings: a new export leaves them their file.
    tensors = EMBEDDING_FILE, f"{VOCAB_MAP}.safetensors", LM_HEAD_FILE, D2T_FILE, DRAFT_EMBEDDING_FILE
    optional = *tensors, LORA_SCALES_FILE, FUSED_FILE, FUSED_EXPERT_FILE, FUSED_DRAFT_FILE, FUSED_VISION_FILE
    endings = (".onnx", ".*.onnx", ".onnx.data", ".*.onnx.data")
    graphs = [f"*/{name}{ending}" for name in ("model", "verify", "modulation") for ending in endings]
    of_builds = "*/.*.onnx", "*/.*.onnx.data"  # left by a build that was killed
    for pattern in (*graphs, "*/*.plan*", *of_builds, *optional):
        for path in engine.glob(pattern):
            path.unlink()
