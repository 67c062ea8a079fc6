# SPDX-License-Identifier: Apache-2.0
"""The layout of AutoAWQ: 4 bits, packed along outputs, always with zero points.

Sources: AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.quantization.matrix import INT4, QuantizedMatrix
from edgellm_ros.builder.quantization.tensors import (
    FLOAT_TYPES,
    Stored,
    floats,
    group_size,
    need,
    need_matrix,
    signed,
    unpack,
    zeros_or_none,
)

BITS = 4
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of each of 8 outputs in its word, in units of 4 bits


class AwqLayout:
    """Reads the layers of a checkpoint with quant_method `awq`."""

    def __init__(self, config: ConfigSection) -> None:
        config.one_of("bits", [BITS])
        version = config.data.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise config.fail("version", "supported: gemm")
        self._group, self._where = config.integer("group_size"), f"{config.where}: group_size"

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return the weight of a layer; None if it is not quantised."""
        if f"{module}.qweight" not in tensors:
            return None
        packed = need_matrix(tensors, f"{module}.qweight", ["I32"])
        fan_in, words = packed.shape
        fan_out = words * len(PLACES)
        group = group_size(packed, fan_in, self._group, self._where)
        groups, why = fan_in // group, f"groups of {group}"
        zeros = need(tensors, f"{module}.qzeros", ["I32"], (groups, words), why)
        scales = need(tensors, f"{module}.scales", FLOAT_TYPES, (groups, fan_out), why)
        return QuantizedMatrix(
            fan_in=fan_in,
            fan_out=fan_out,
            dtype=INT4,
            group=group,
            values=lambda: _unpacked(packed.read()),
            scales=lambda: floats(scales),
            zeros=zeros_or_none(_unpacked(zeros.read())),
        )


def _unpacked(words: np.ndarray) -> np.ndarray:
    """Unpack signed integers [rows, words] -> [rows, outputs]."""
    values = unpack(words, BITS, axis=1).reshape(len(words), -1, len(PLACES))
    return signed(values[:, :, PLACES].reshape(len(words), -1), BITS)
