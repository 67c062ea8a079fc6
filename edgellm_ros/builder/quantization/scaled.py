# SPDX-License-Identifier: Apache-2.0
"""Layers with a weight [N,K] stored as INT8 or FP8 (E4M3) and scales beside it.

A scale is for the whole weight, for each output, for groups of inputs, or for blocks of outputs and inputs.
Each becomes a scale for groups of inputs of one output.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from edgellm_ros.builder.checkpoint.safetensors_file import StoredTensor
from edgellm_ros.builder.quantization.matrix import FLOAT8, INT8, QuantizedMatrix
from edgellm_ros.builder.quantization.tensors import (
    FLOAT_TYPES,
    Stored,
    floats,
    need,
    need_matrix,
    zeros_or_none,
)

TYPES = {"I8": INT8, "F8_E4M3": FLOAT8}
Block = tuple[int, int]  # outputs and inputs that share a scale


def scaled_matrix(
    tensors: Stored, module: str, scale: str, block: Block | None = None, groups_of: tuple[int, ...] = ()
) -> QuantizedMatrix | None:
    """Return the weight of a layer; None if it is not in 8 bits.

    scale: the name of the scales' tensor in the module; block: of blocks, if the config has any; groups_of:
    the group sizes of the config.
    """
    weight = tensors.get(f"{module}.weight")
    if weight is None or weight.dtype not in TYPES:
        return None
    need_matrix(tensors, weight.name, list(TYPES))
    fan_out, fan_in = weight.shape
    scales = need(tensors, f"{module}.{scale}", FLOAT_TYPES)
    group, spread = _spread(scales, fan_out, fan_in, block, groups_of)
    zeros = None
    if f"{module}.weight_zero_point" in tensors:
        points = need(tensors, f"{module}.weight_zero_point", ["I8"], scales.shape, f"{scales.name!r}")
        zeros = zeros_or_none(spread(points.read()))
    return QuantizedMatrix(
        fan_in=fan_in,
        fan_out=fan_out,
        dtype=TYPES[weight.dtype],
        group=group,
        values=lambda: weight.read().T,
        scales=lambda: spread(floats(scales)),
        zeros=zeros,
    )


def _spread(
    scales: StoredTensor, fan_out: int, fan_in: int, block: Block | None, groups_of: tuple[int, ...]
) -> tuple[int, Callable[[np.ndarray], np.ndarray]]:
    """Return the group size, and a function that spreads stored scales to [K/group,N]."""
    shape = scales.shape
    if math.prod(shape) == 1:
        return fan_in, lambda stored: np.broadcast_to(stored.reshape(1, 1), (1, fan_out))
    if shape in ((fan_out,), (fan_out, 1)):
        return fan_in, lambda stored: stored.reshape(1, fan_out)
    if block is not None and shape == (-(-fan_out // block[0]), -(-fan_in // block[1])):
        group = math.gcd(block[1], fan_in)
        rows = np.arange(fan_in // group) * group // block[1]
        columns = np.arange(fan_out) // block[0]
        return group, lambda stored: stored[columns][:, rows].T
    for size in groups_of:
        if fan_in % size == 0 and shape == (fan_out, fan_in // size):
            return size, lambda stored: stored.T
    expected = ["[1]", f"[{fan_out}, 1]"]
    if block is not None:
        expected.append(f"[{-(-fan_out // block[0])}, {-(-fan_in // block[1])}] for blocks of {list(block)}")
    expected += [f"[{fan_out}, {fan_in // size}] for groups of {size}" for size in groups_of]
    raise ValueError(
        f"{scales.file}: tensor {scales.name!r} has shape {list(shape)}, expected {' or '.join(expected)}"
    )
