# SPDX-License-Identifier: Apache-2.0
"""Quantised matrices in NumPy, in the layout that the fused kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from edgellm_ros.fused.plan.quantized import ALIGNMENT, Quantized

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [K,N] whose elements are (values - zeros) * scales + offsets.

    Integers and zeros are unsigned; values of E4M3 are in uint8 too, without zeros.
    """

    form: Quantized
    values: np.ndarray  # [K,N] uint8
    scales: np.ndarray  # [K/group,N], of the model's type; fp32 for E4M3
    zeros: np.ndarray  # [K/group,N] uint8
    inputs: np.ndarray  # [K]: the input that each row multiplies
    offsets: np.ndarray | None = None  # [K/group,N], of the model's type

    @classmethod
    def random(
        cls, random: np.random.Generator, form: Quantized, shape: tuple[int, ...], dtype: np.dtype
    ) -> QuantizedMatrix:
        """Make a matrix whose products with numbers of size 1 have size 1."""
        k, n = shape
        top, groups = 1 << form.bits, (k // (form.group or k), n)
        inputs = random.permutation(k) if form.ordered else np.arange(k)
        if form.float8:
            scales = (random.uniform(0.5, 1.5, groups) / k**0.5).astype(np.float32)
            values = random.standard_normal(shape).astype(FLOAT8).view(np.uint8)
            return cls(form, values, scales, np.zeros(groups, np.uint8), inputs)
        offsets = (random.uniform(-2, 2, groups) / k**0.5).astype(dtype) if form.offsets else None
        zeros = np.full(groups, top // 2, np.uint8)
        if form.zero_points:
            zeros = random.integers(0, top, groups, np.uint8)
        size = top / 3 if form.zero_points else top / 12**0.5
        signs = random.choice((-1, 1), groups) if form.bits == 4 else 1  # `--quantize int4` has both
        scales = (signs * random.uniform(0.5, 1.5, groups) / size / k**0.5).astype(dtype)
        return cls(form, random.integers(0, top, shape, np.uint8), scales, zeros, inputs, offsets)

    @classmethod
    def read(
        cls, contents: np.ndarray, form: Quantized, shape: tuple[int, ...], dtype: np.dtype
    ) -> QuantizedMatrix:
        """Read a matrix [K,N] from bytes."""
        k, n = shape
        groups = k // (form.group or k)
        parts, start = [], 0
        for nbytes in form.parts(k, n):
            parts.append(contents[start : start + nbytes])
            start += -(-nbytes // ALIGNMENT) * ALIGNMENT
        inputs = parts.pop().view(np.uint16)[:k].astype(np.int64) if form.ordered else np.arange(k)
        offsets = parts.pop().view(dtype).reshape(groups, n) if form.offsets else None
        parts = [part.reshape(n, -1) for part in parts]
        zeros = np.full((groups, n), 1 << form.bits - 1, np.uint8)
        if form.zero_points:
            zeros = unpacked(parts[2], form.bits)[:, :groups].T
        if form.float8:
            zeros = np.zeros((groups, n), np.uint8)
        scales = parts[1].view(np.dtype(np.float32) if form.float8 else dtype).T
        return cls(form, unpacked(parts[0], form.bits).T, scales, zeros, inputs, offsets)

    def contents(self) -> np.ndarray:
        """Return the bytes of the matrix."""
        arrays = [packed(self.values.T, self.form.bits), np.ascontiguousarray(self.scales.T)]
        if self.form.zero_points:
            arrays.append(packed(self.zeros.T, self.form.bits))
        if self.offsets is not None:
            arrays.append(self.offsets)
        if self.form.ordered:
            arrays.append(np.concatenate([self.inputs, np.argsort(self.inputs)]).astype(np.uint16))
        raw = [array.view(np.uint8).reshape(-1) for array in arrays]
        return np.concatenate([np.pad(each, (0, -each.size % ALIGNMENT)) for each in raw])

    def dequantized(self) -> np.ndarray:
        """Compute the matrix in float64, rows in the order of the inputs."""
        group = self.form.group or len(self.values)
        values = self.values.view(FLOAT8) if self.form.float8 else self.values
        differences = values.astype(np.float64) - np.repeat(self.zeros, group, axis=0)
        rows = differences * np.repeat(self.scales.astype(np.float64), group, axis=0)
        if self.offsets is not None:
            rows += np.repeat(self.offsets.astype(np.float64), group, axis=0)
        weight = np.empty_like(rows)
        weight[self.inputs] = rows
        return weight


def packed(rows: np.ndarray, bits: int) -> np.ndarray:
    """Pack integers along the last axis.

    The first of two integers of 4 bits is in the low half of a byte.
    """
    if bits == 8:
        return np.ascontiguousarray(rows)
    rows = np.pad(rows, [(0, 0), (0, rows.shape[1] % 2)])
    return rows[:, 0::2] | rows[:, 1::2] << 4


def unpacked(rows: np.ndarray, bits: int) -> np.ndarray:
    """Unpack integers that `packed` packed."""
    if bits == 8:
        return rows
    return np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)
