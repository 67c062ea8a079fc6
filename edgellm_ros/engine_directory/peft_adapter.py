# SPDX-License-Identifier: Apache-2.0
"""Reads a LoRA adapter in PEFT's format.

The files are `adapter_config.json` and `adapter_model.safetensors`. Engines support plain LoRA on linear
layers of the language model; other adapters are an error that names the key. Each key of the configuration is
read, known to concern training only, or required to be empty.

PEFT: github.com/huggingface/peft, `LoraConfig` and `LoraLayer.update_layer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from edgellm_ros.engine_directory.lora_inputs import engine_module
from edgellm_ros.engine_directory.schema import read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

UNDERSTOOD = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"
}  # fmt: skip
# These keys concern training only.
FOR_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters", "task_type"
}  # fmt: skip
# Initialisations that do not change the base model's weights; others (PiSSA, OLoRA, LoftQ ...) do.
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
FLOAT_DTYPES = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32, "F64": np.float64}

_TENSOR = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """An adapter in the engine's layout, module by module.

    A module computes y = x W + (x A) B. The scaling (alpha / r, or alpha / sqrt(r)) is part of B.
    """

    rank: int  # the largest r
    # Engine module ("model.layers.0.mlp.up_proj") -> A [K, r], B [r, N], float32.
    weights: dict[str, tuple[np.ndarray, np.ndarray]]


def read_peft_adapter(
    directory: str | Path, targets: Mapping[str, tuple[int, int]], max_rank: int
) -> PeftAdapter:
    """Read and check an adapter for an engine.

    targets: modules that may be adapted, with their sizes (K, N). FileNotFoundError for missing files;
    ValueError, which names file, key and value, for an adapter that is damaged, of another kind or for
    another model.
    """
    root = Path(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a directory, expected a PEFT adapter ({CONFIG_FILE})")
    config = _Config.read(root / CONFIG_FILE)
    path = root / WEIGHTS_FILE
    matrices = _pairs(path, _read_tensors(path))
    _check_targets(path, [module for module, _ in matrices], targets)
    weights = {}
    for (module, name), (a, b) in matrices.items():
        rank, scaling = config.rank_and_scaling(name)
        fan_in, fan_out = targets[module]
        for matrix, array, shape in (("A", a, (rank, fan_in)), ("B", b, (fan_out, rank))):
            if array.shape != shape:
                raise ValueError(
                    f"{path}: lora_{matrix} of {name} is {list(array.shape)}, but by rank and engine it must "
                    f"be {list(shape)}: an adapter of another model?"
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


@dataclass(frozen=True)
class _Config:
    """`adapter_config.json`: ranks and scalings."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, path: Path) -> _Config:
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found, expected a PEFT adapter")
        data = read_json(path)

        def fail(key: str, expected: str) -> ValueError:
            return ValueError(f"{path}: {key} {data.get(key)!r}: {expected}")

        if data.get("peft_type") != "LORA":
            raise fail("peft_type", "supported is LORA")
        if data.get("bias", "none") != "none":
            raise fail("bias", "supported is 'none'")
        if data.get("init_lora_weights", True) not in PLAIN_STARTS:
            raise fail(
                "init_lora_weights",
                "it changes the base model's weights; save the adapter converted to plain LoRA "
                "(PEFT: path_initial_model_for_weight_conversion)",
            )
        for key, value in data.items():
            if value and key not in UNDERSTOOD and key not in FOR_TRAINING:
                raise fail(key, "not supported, only plain LoRA is")
        for key, kind in (("rank_pattern", int), ("alpha_pattern", (int, float))):
            pattern = data.get(key) or {}
            if not isinstance(pattern, dict) or not all(_positive(v, kind) for v in pattern.values()):
                raise fail(key, "expected an object of positive numbers")
            for expression in pattern:
                _compile(path, key, expression)
        if not _positive(data.get("r"), int):
            raise fail("r", "expected a positive integer")
        if not _positive(data.get("lora_alpha"), (int, float)):
            raise fail("lora_alpha", "expected a positive number")
        if not isinstance(data.get("use_rslora", False), bool):
            raise fail("use_rslora", "expected true or false")
        return cls(
            path,
            data["r"],
            float(data["lora_alpha"]),
            data.get("use_rslora", False),
            data.get("rank_pattern") or {},
            data.get("alpha_pattern") or {},
        )

    def rank_and_scaling(self, name: str) -> tuple[int, float]:
        """Choose rank and scaling of the module `name` as PEFT does.

        The first matching pattern decides.
        """
        rank = self._choose("rank_pattern", name, self.rank)
        alpha = self._choose("alpha_pattern", name, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rslora else rank)

    def _choose(self, key: str, name: str, default: Any) -> Any:
        for expression, value in getattr(self, key).items():
            if _compile(self.path, key, expression).match(name):
                return value
        return default


def _positive(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


def _compile(path: Path, key: str, expression: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({expression})$")
    except re.error as error:
        raise ValueError(f"{path}: {key} {expression!r}: not a regular expression: {error}") from None


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


def _pairs(
    path: Path, tensors: Mapping[str, np.ndarray]
) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """Pair the matrices of each module, sorted by module.

    (engine module, PEFT's name of it) -> lora_A [r, K], lora_B [N, r].
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
