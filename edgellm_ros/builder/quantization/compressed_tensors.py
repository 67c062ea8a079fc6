# SPDX-License-Identifier: Apache-2.0
"""The layouts of compressed-tensors: packed integers, INT8 and FP8.

llm-compressor and vLLM use them. Activations that the config would quantise stay in the precision of the
engine.

Sources: compressed-tensors, compressors/quantized_compressors/{pack_quantized,naive_quantized}.py and
quantization/quant_args.py.
"""

from __future__ import annotations

import math

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.quantization.fp8 import read_block
from edgellm_ros.builder.quantization.matrix import INT4, INT8, QuantizedMatrix
from edgellm_ros.builder.quantization.scaled import Block, scaled_matrix
from edgellm_ros.builder.quantization.tensors import (
    FLOAT_TYPES,
    Stored,
    floats,
    group_order,
    need,
    need_matrix,
    signed,
    unpack,
    zeros_or_none,
)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
STRATEGIES = ("tensor", "channel", "group", "block")


class CompressedTensorsLayout:
    """Reads the layers of a checkpoint with quant_method `compressed-tensors`."""

    def __init__(self, config: ConfigSection) -> None:
        config.one_of("format", list(FORMATS), default="pack-quantized")
        for key in ("sparsity_config", "transform_config"):
            given = config.data.get(key)
            if given and not (isinstance(given, dict) and given.get("format", "") == "dense"):
                raise config.fail(key, "not supported")
        groups = config.section("config_groups")
        if not groups.data:
            raise config.fail("config_groups", "expected at least one group of layers")
        self._bits: list[int] = []
        self._groups_of: list[int] = []
        self._block: Block | None = None
        for name in groups.data:
            self._read(groups.section(name).section("weights"))

    def _read(self, weights: ConfigSection) -> None:
        """Read how the weights of one group of layers are quantised."""
        kind = weights.one_of("type", ["int", "float"], default="int")
        bits = weights.one_of("num_bits", [4, 8] if kind == "int" else [8], default=8)
        strategy = weights.one_of("strategy", [*STRATEGIES, None])
        if bits not in self._bits:
            self._bits.append(bits)
        if strategy == "block":
            self._block = read_block(weights, "block_structure")
        size = weights.integer("group_size", -1)
        if size > 0 and strategy in ("group", None) and size not in self._groups_of:
            self._groups_of.append(size)

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return the weight of a layer; None if it is not quantised."""
        if f"{module}.weight_packed" in tensors:
            return self._packed(tensors, module)
        return scaled_matrix(tensors, module, "weight_scale", self._block, tuple(self._groups_of))

    def _packed(self, tensors: Stored, module: str) -> QuantizedMatrix:
        packed = need_matrix(tensors, f"{module}.weight_packed", ["I32"])
        shape = need(tensors, f"{module}.weight_shape", ["I64", "I32"], (2,))
        fan_out, fan_in = (int(size) for size in shape.read())
        bits = self._bits_of(packed, fan_out, fan_in)
        scales = need_matrix(tensors, f"{module}.weight_scale", FLOAT_TYPES)
        group = self._group(scales, fan_out, fan_in)
        groups = fan_in // group
        zeros = None
        if f"{module}.weight_zero_point" in tensors:
            zeros = _zeros(tensors, f"{module}.weight_zero_point", bits, fan_out, groups)
        order = None
        if f"{module}.weight_g_idx" in tensors:
            index = need(tensors, f"{module}.weight_g_idx", ["I32", "I64"], (fan_in,))
            order = None if (index.read() == -1).all() else group_order(index, groups, group)

        def values() -> np.ndarray:
            rows = signed(unpack(packed.read(), bits, axis=1)[:, :fan_in], bits).T
            return rows if order is None else rows[order]

        return QuantizedMatrix(
            fan_in=fan_in,
            fan_out=fan_out,
            dtype=INT4 if bits == 4 else INT8,
            group=group,
            values=values,
            scales=lambda: floats(scales).T,
            zeros=zeros,
            order=order,
        )

    def _bits_of(self, packed: StoredTensor, fan_out: int, fan_in: int) -> int:
        for bits in self._bits:
            if packed.shape == (fan_out, math.ceil(fan_in * bits / 32)):
                return bits
        expected = " or ".join(str([fan_out, math.ceil(fan_in * bits / 32)]) for bits in self._bits)
        raise ValueError(
            f"{packed.file}: tensor {packed.name!r} has shape {list(packed.shape)}, expected {expected} for "
            f"weight_shape {[fan_out, fan_in]} and {' or '.join(map(str, self._bits))} bits"
        )

    def _group(self, scales: StoredTensor, fan_out: int, fan_in: int) -> int:
        for size in (*self._groups_of, fan_in):
            if fan_in % size == 0 and scales.shape == (fan_out, fan_in // size):
                return size
        expected = [f"[{fan_out}, 1]"]
        expected += [f"[{fan_out}, {fan_in / size:g}] for groups of {size}" for size in self._groups_of]
        raise ValueError(
            f"{scales.file}: tensor {scales.name!r} has shape {list(scales.shape)}, expected "
            f"{' or '.join(expected)}"
        )


def _zeros(tensors: Stored, name: str, bits: int, fan_out: int, groups: int) -> np.ndarray | None:
    """Read zero points [K/group,N], packed along the outputs.

    Older versions store one INT8 each.
    """
    if tensors[name].dtype == "I8":
        return zeros_or_none(need(tensors, name, ["I8"], (fan_out, groups)).read().T)
    shape = math.ceil(fan_out * bits / 32), groups
    packed = need(tensors, name, ["I32", "I8"], shape, f"{bits} bits").read()
    return zeros_or_none(signed(unpack(packed, bits, axis=0)[:fan_out], bits).T)
