# SPDX-License-Identifier: Apache-2.0
"""The blocks of GGUF files: 4 or 8 bits in groups of 16 or 32, with offsets."""

from __future__ import annotations

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.gguf.tensors import GgufTensor
from edgellm_ros.builder.quantization.matrix import INT4, INT8, QuantizedMatrix
from edgellm_ros.builder.quantization.tensors import Stored


class GgufLayout:
    """Reads the layers of a GGUF file."""

    def __init__(self, config: ConfigSection) -> None:
        del config

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return the weight of a layer; None if it is not quantised.

        A matrix whose columns do not stay together in groups becomes floats.
        """
        return stored_blocks(tensors.get(f"{module}.weight")) if ".layers." in module else None


def stored_blocks(tensor: StoredTensor | None) -> QuantizedMatrix | None:
    """Return a quantised matrix [K,N] of a GGUF file; None for another tensor."""
    if not isinstance(tensor, GgufTensor) or tensor.type.unpack is None or len(tensor.shape) != 2:
        return None
    if not tensor.has_whole_groups:
        return None
    kind = tensor.type
    fan_out, fan_in = tensor.shape

    def values() -> np.ndarray:
        codes = tensor.codes().values
        return (codes.view(np.int8) - np.int8(kind.centre)).T

    def offsets() -> np.ndarray:
        codes = tensor.codes()
        assert codes.minima is not None
        return (codes.minima + np.float32(kind.centre) * codes.scales).T

    return QuantizedMatrix(
        fan_in=fan_in,
        fan_out=fan_out,
        dtype=INT4 if kind.bits == 4 else INT8,
        group=kind.group,
        values=values,
        scales=lambda: tensor.codes().scales.T,
        offsets=offsets if kind.has_minima else None,
    )
