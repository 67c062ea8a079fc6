# SPDX-License-Identifier: Apache-2.0
"""Reads a LoRA adapter of PEFT, or one converted for TensorRT Edge-LLM.

A directory has `adapter_config.json` and `adapter_model.safetensors`; `adapter_source.py` tells where a file
has its configuration. Engines support plain LoRA on linear layers of the language model; other adapters are
an error that names the key.

Tensors of PEFT are lora_A [r, K] and lora_B [N, r] under `base_model.model.`, and the scaling is in the
configuration. Those of `tensorrt-edgellm-process-lora` are lora_A [K, r] and lora_B [r, N] without this
prefix, and the scaling is in lora_B.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from edgellm_ros.engine_directory.adapters.adapter_source import PREFIX, find_source, header_config
from edgellm_ros.engine_directory.adapters.lora_inputs import engine_module
from edgellm_ros.engine_directory.adapters.peft_config import LoraConfig

FLOAT_DTYPES = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32, "F64": np.float64}

_TENSOR = re.compile(r"(?P<path>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """An adapter in the engine's layout, module by module.

    A module computes y = x W + (x A) B. The scaling (alpha / r, or alpha / sqrt(r)) is part of B.
    """

    rank: int  # the largest r
    # Engine module ("model.layers.0.mlp.up_proj") -> A [K, r], B [r, N], float32.
    weights: dict[str, tuple[np.ndarray, np.ndarray]]


def read_adapter(path: str | Path, targets: Mapping[str, tuple[int, int]], max_rank: int) -> PeftAdapter:
    """Read and check an adapter for an engine.

    path: a directory or a `.safetensors` file. targets: modules that may be adapted, with their sizes (K, N).
    FileNotFoundError for missing files; ValueError, which names file, key and value, for an adapter that is
    damaged, of another kind or for another model.
    """
    source = find_source(Path(path))
    config = None if source.config is None else LoraConfig.load(source.config)
    path = source.weights
    tensors = _read_tensors(path)
    if config is None and not any(name.startswith(PREFIX) for name in tensors):
        tensors = {name: array.T for name, array in tensors.items()}  # converted: the scaling is in B
    else:
        config = config or header_config(path)
        tensors = {_without_prefix(path, name): array for name, array in tensors.items()}
    matrices = _pairs(path, tensors)
    _check_targets(path, [module for module, _ in matrices], targets)
    weights, step = {}, 1 if config is not None else -1  # dimensions of a converted file are turned round
    for (module, name), (a, b) in matrices.items():
        rank, scaling = config.rank_and_scaling(name) if config is not None else (_rows(a), 1.0)
        fan_in, fan_out = targets[module]
        for matrix, array, shape in (("A", a, (rank, fan_in)), ("B", b, (fan_out, rank))):
            if array.shape != shape:
                stored, expected = (list(each[::step]) for each in (array.shape, shape))
                raise ValueError(
                    f"{path}: lora_{matrix} of {name} is {stored}, but by rank and engine it must be "
                    f"{expected}: an adapter of another model?"
                )
        if rank > max_rank:
            raise ValueError(
                f"{path}: {name} has rank {rank}; this engine supports at most {max_rank} (max_lora_rank)"
            )
        a, b = (np.ascontiguousarray(array.T, np.float32) for array in (a, b))
        weights[module] = a, b * np.float32(scaling)
        if not all(np.isfinite(array).all() for array in weights[module]):
            raise ValueError(f"{path}: {name} has values that are not finite")
    return PeftAdapter(max(a.shape[1] for a, _ in weights.values()), weights)


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        pickled = path.with_name("adapter_model.bin").is_file()
        hint = "; adapter_model.bin is not read, save the adapter as safetensors" if pickled else ""
        raise FileNotFoundError(f"{path} not found{hint}")
    try:
        entries = deserialize(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or cut short: {error}") from None
    if not entries:
        raise ValueError(f"{path}: no tensors")
    return {name: _to_array(path, name, entry) for name, entry in entries}


def _to_array(path: Path, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    if entry["dtype"] not in FLOAT_DTYPES:
        supported = ", ".join(FLOAT_DTYPES)
        raise ValueError(f"{path}: tensor {name!r} has dtype {entry['dtype']}; supported: {supported}")
    array = np.frombuffer(entry["data"], FLOAT_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _rows(array: np.ndarray) -> int:
    return array.shape[0] if array.ndim else 0


def _without_prefix(path: Path, name: str) -> str:
    """Return the name that a tensor has in the model.

    ValueError for a tensor without PEFT's prefix.
    """
    if not name.startswith(PREFIX):
        raise ValueError(f"{path}: tensor {name!r} is not one of PEFT, which begin with {PREFIX}")
    return name.removeprefix(PREFIX)


def _pairs(
    path: Path, tensors: Mapping[str, np.ndarray]
) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """Pair the matrices of each module, sorted by module.

    (engine module, the model's name of it) -> lora_A [r, K], lora_B [N, r].
    """
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for key, array in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise ValueError(
                f"{path}: tensor {key!r} is not the lora_A or lora_B of a linear layer, as plain LoRA has it"
            )
        name = match["path"]
        found.setdefault((engine_module(name), name), {})[match["matrix"]] = array
    for (_, name), pair in found.items():
        for matrix in "AB":
            if matrix not in pair:
                raise ValueError(f"{path}: lora_{matrix} of {name} is missing")
    return {place: (found[place]["A"], found[place]["B"]) for place in sorted(found)}


def _check_targets(path: Path, modules: list[str], targets: Mapping[str, tuple[int, int]]) -> None:
    unknown = [module for module in modules if module not in targets]
    if unknown:
        patterns = sorted({re.sub(r"\d+", "*", module) for module in targets})
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"{path}: this engine has no LoRA inputs for {', '.join(unknown[:3])}{more}; it has them for "
            f"{', '.join(patterns) or 'no module'}"
        )
    if len(set(modules)) < len(modules):
        raise ValueError(f"{path}: a module has more than one adapter")
