# SPDX-License-Identifier: Apache-2.0
"""Recognises kinds of checkpoints that no family supports, to name them in errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.engine_directory.schema import read_json

# Numbers of experts in the configs of Qwen; Mixtral and gpt-oss; DeepSeek and Nemotron; Ernie.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
QUANTISATION_KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"  # of NVIDIA's Model Optimizer
METHOD_KEYS = ("quant_method", "quant_algo", "bits", "fmt")


def find_experts(config: ConfigSection) -> str:
    """Describe the experts of an unsupported model; "" if it is dense."""
    for section in config.nested():
        for key in EXPERT_KEYS:
            count = section.data.get(key)
            if type(count) is int and count > 1:
                return str(section.mixture_of_experts(key, "models are supported"))
    return ""


def refuse_quantised(config: ConfigSection) -> None:
    """Raise ValueError that names the method for a checkpoint with quantised weights.

    `config` is the checkpoint's `config.json`.
    """
    for section in config.nested():
        for key in QUANTISATION_KEYS:
            if section.has(key):
                raise _quantised(f"{section.where}: {key}", section.data[key])
    path = Path(config.where).with_name(MODELOPT_FILE)
    if path.is_file():
        raise _quantised(f"{path}: quantization", read_json(path).get("quantization"))


def _quantised(where: str, method: object) -> ValueError:
    values = method if isinstance(method, Mapping) else {}
    known = ", ".join(f"{name} {values[name]!r}" for name in METHOD_KEYS if values.get(name) is not None)
    return ValueError(
        f"{where}: {known or repr(method)}: quantised weights are not supported; supported are F16, BF16 and "
        "F32: export the checkpoint that was quantised"
    )
