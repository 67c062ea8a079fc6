# SPDX-License-Identifier: Apache-2.0
"""The layout of AutoGPTQ and GPTQModel: 4 or 8 bits, packed along the inputs.

With act-order (`desc_act`) the groups are of inputs in another order than the layer's, which `g_idx` gives.
A file of version 1 (`checkpoint_format` "gptq") stores each zero point less 1, a file of version 2
("gptq_v2") as it is. Files whose config claims the wrong version exist: if all zero points of symmetric
weights are the middle of the range in one version, that version is the file's.

Sources: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; GPTQModel, gptqmodel/utils/model.py.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.quantization.matrix import INT4, INT8, QuantizedMatrix
from edgellm_ros.builder.quantization.tensors import (
    FLOAT_TYPES,
    Stored,
    floats,
    group_order,
    group_size,
    need,
    need_matrix,
    signed,
    unpack,
    zeros_or_none,
)

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point


class GptqLayout:
    """Reads the layers of a checkpoint with quant_method `gptq`."""

    def __init__(self, config: ConfigSection) -> None:
        self._bits = config.one_of("bits", [4, 8])
        self._step = VERSIONS[config.one_of("checkpoint_format", list(VERSIONS), default="gptq")]
        self._symmetric = config.flag("sym", False)
        self._group, self._where = config.integer("group_size"), f"{config.where}: group_size"
        dynamic = config.data.get("dynamic") or {}
        if not isinstance(dynamic, dict) or any(not key.startswith("-:") for key in dynamic):
            raise config.fail("dynamic", "settings of single layers are not supported")

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return the weight of a layer; None if it is not quantised."""
        if f"{module}.qweight" not in tensors:
            return None
        bits, each = self._bits, 32 // self._bits
        packed = need_matrix(tensors, f"{module}.qweight", ["I32"])
        fan_in, fan_out = packed.shape[0] * each, packed.shape[1]
        group = group_size(packed, fan_in, self._group, self._where)
        groups, why = fan_in // group, f"groups of {group} and {bits} bits"
        scales = need(tensors, f"{module}.scales", FLOAT_TYPES, (groups, fan_out), why)
        shape = groups, -(-fan_out // each)
        stored = need(tensors, f"{module}.qzeros", ["I32"], shape, why)
        order = None
        if f"{module}.g_idx" in tensors:
            index = need(tensors, f"{module}.g_idx", ["I32", "I64"], (fan_in,))
            order = group_order(index, groups, group)

        def values() -> np.ndarray:
            rows = signed(unpack(packed.read(), bits, axis=0), bits)
            return rows if order is None else rows[order]

        return QuantizedMatrix(
            fan_in=fan_in,
            fan_out=fan_out,
            dtype=INT4 if bits == 4 else INT8,
            group=group,
            values=values,
            scales=lambda: floats(scales),
            zeros=self._zeros(unpack(stored.read(), bits, axis=1)[:, :fan_out]),
            order=order,
        )

    def _zeros(self, stored: np.ndarray) -> np.ndarray | None:
        """Compute signed zero points of stored ones."""
        middle, top = 1 << (self._bits - 1), (1 << self._bits) - 1
        if self._symmetric and ((stored == middle).all() or (stored == middle - 1).all()):
            return None
        zeros = (stored + np.uint8(self._step)) & np.uint8(top)
        return zeros_or_none(signed(zeros, self._bits))
