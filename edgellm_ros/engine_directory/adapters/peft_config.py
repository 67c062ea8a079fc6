# SPDX-License-Identifier: Apache-2.0
"""Ranks and scalings of a LoRA adapter, as PEFT's `adapter_config.json` has them.

Each key is read, known to concern training only, or required to be empty.

PEFT: github.com/huggingface/peft, `LoraConfig` and `LoraLayer.update_layer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_ros.echo import printable, quoted
from edgellm_ros.engine_directory.schema import read_json

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


@dataclass(frozen=True)
class LoraConfig:
    """Ranks and scalings of an adapter, from `adapter_config.json`."""

    where: str  # the file, for errors
    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def load(cls, path: Path) -> LoraConfig:
        """Read a file; FileNotFoundError or ValueError."""
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found, expected a PEFT adapter")
        return cls.of(str(path), read_json(path))

    @classmethod
    def of(cls, where: str, data: Mapping[str, Any]) -> LoraConfig:
        """Check the keys of a configuration.

        ValueError, with `where`, for what is not plain LoRA.
        """

        def fail(key: str, expected: str) -> ValueError:
            return ValueError(f"{where}: {printable(key)} {quoted(data.get(key))}: {expected}")

        if data.get("peft_type") != "LORA":
            raise fail("peft_type", "supported is LORA")
        if data.get("bias", "none") != "none":
            raise fail("bias", "supported is 'none'")
        if not _is_plain_start(data.get("init_lora_weights", True)):
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
                _compile(where, key, expression)
        if not _positive(data.get("r"), int):
            raise fail("r", "expected a positive integer")
        if not _positive(data.get("lora_alpha"), (int, float)):
            raise fail("lora_alpha", "expected a positive number")
        if not isinstance(data.get("use_rslora", False), bool):
            raise fail("use_rslora", "expected true or false")
        return cls(
            where,
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
            if _compile(self.where, key, expression).match(name):
                return value
        return default


def _is_plain_start(start: Any) -> bool:
    return not isinstance(start, (dict, list)) and start in PLAIN_STARTS


def _positive(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


def _compile(where: str, key: str, expression: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({expression})$")
    except re.error as error:
        raise ValueError(f"{where}: {key} {quoted(expression)}: not a regular expression: {error}") from None
