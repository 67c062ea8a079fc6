# SPDX-License-Identifier: Apache-2.0
"""Finds out how the weights of a checkpoint are quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.unsupported import METHOD_KEYS, MODELOPT_FILE, QUANTISATION_KEYS
from edgellm_ros.builder.quantization.awq import AwqLayout
from edgellm_ros.builder.quantization.compressed_tensors import CompressedTensorsLayout
from edgellm_ros.builder.quantization.fp8 import BlockFp8Layout, ModelOptLayout
from edgellm_ros.builder.quantization.gguf import GgufLayout
from edgellm_ros.builder.quantization.gptq import GptqLayout
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix
from edgellm_ros.builder.quantization.tensors import Stored


class Layout(Protocol):
    """How a checkpoint stores quantised layers."""

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return a layer's weight; None if not quantised, ValueError if damaged."""


LAYOUTS: dict[str, Callable[[ConfigSection], Layout]] = {
    "awq": AwqLayout,
    "gptq": GptqLayout,
    "compressed-tensors": CompressedTensorsLayout,
    "fp8": BlockFp8Layout,
    "modelopt": ModelOptLayout,
    "gguf": GgufLayout,  # of the folder that is made for such a file
}
SUPPORTED = (
    "AWQ (4 bits), GPTQ (4 and 8 bits), compressed-tensors (4 and 8 bits, FP8), FP8 in blocks, FP8 of Model "
    "Optimizer"
)


def find_layout(config: ConfigSection) -> Layout | None:
    """Return a checkpoint's layout by its `config.json`; None if it is not quantised.

    ValueError names the method if it is not supported.
    """
    for section in config.nested():
        for key in QUANTISATION_KEYS:
            if section.has(key):
                if not isinstance(section.data[key], Mapping):
                    raise section.fail(key, f"not supported; supported are {SUPPORTED}")
                return _layout(section.section(key))
    path = Path(config.where).with_name(MODELOPT_FILE)
    if path.is_file():
        return _layout(read_section(path).section("quantization"))
    return None


def _layout(config: ConfigSection) -> Layout:
    method = config.data.get("quant_method", "modelopt" if config.has("quant_algo") else None)
    if isinstance(method, str) and method in LAYOUTS and (method != "modelopt" or config.has("quant_algo")):
        return LAYOUTS[method](config)
    known = ", ".join(f"{key} {config.data[key]!r}" for key in METHOD_KEYS if config.has(key))
    raise ValueError(
        f"{config.where}: {known or repr(dict(config.data))}: not supported; supported are {SUPPORTED}: "
        "export the checkpoint that was quantised"
    )
