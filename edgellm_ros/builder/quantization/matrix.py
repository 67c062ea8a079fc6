# SPDX-License-Identifier: Apache-2.0
"""A linear layer's weight in 4 or 8 bits, whatever the layout of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

INT4, INT8, FLOAT8 = ir.DataType.INT4, ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN
QUANTIZED = (INT4, INT8, FLOAT8)
Read = Callable[[], np.ndarray]


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedMatrix:
    """A matrix [K,N] in 4 or 8 bits, with a scale per group of rows in each column.

    With q = k // group, the weight of input order[k] is (values[k, n] - zeros[q, n]) * scales[q, n], plus
    offsets[q, n] if there are offsets.
    Integers are signed: unsigned ones are stored with half their range subtracted, as are their zero points.
    Large arrays are read when the graph is written.
    """

    fan_in: int  # K
    fan_out: int  # N
    dtype: ir.DataType  # INT4, INT8 or FLOAT8E4M3FN
    group: int  # rows that share a scale; divides K
    values: Read  # [K,N], of `dtype` or of int8
    scales: Read  # [K/group,N] fp32
    zeros: np.ndarray | None = None  # [K/group,N] int8; None = 0
    offsets: Read | None = None  # [K/group,N] fp32; None = 0
    order: np.ndarray | None = None  # [K]: the input that each row multiplies; None = 0, 1, 2, ...

    def __post_init__(self) -> None:
        if self.group < 1 or self.fan_in % self.group:
            raise ValueError(f"a group must divide the {self.fan_in} inputs, got {self.group}")

    @property
    def groups(self) -> int:
        return self.fan_in // self.group

    def dequantized(self) -> np.ndarray:
        """Compute the weight [K,N] in fp32, rows in the order of the inputs."""
        values = self.values().astype(np.float32).reshape(self.groups, self.group, self.fan_out)
        if self.zeros is not None:
            values = values - self.zeros[:, None].astype(np.float32)
        values = values * self.scales()[:, None]
        if self.offsets is not None:
            values = values + self.offsets()[:, None]
        rows = values.reshape(self.fan_in, self.fan_out)
        if self.order is None:
            return rows
        weight = np.empty_like(rows)
        weight[self.order] = rows
        return weight

    def in_groups_of(self, group: int) -> QuantizedMatrix:
        """Return the same matrix with smaller groups; `group` divides the present one."""
        times, scales, offsets = self.group // group, self.scales, self.offsets
        if times == 1:
            return self
        zeros = None if self.zeros is None else np.repeat(self.zeros, times, axis=0)
        return QuantizedMatrix(
            fan_in=self.fan_in,
            fan_out=self.fan_out,
            dtype=self.dtype,
            group=group,
            values=self.values,
            scales=lambda: np.repeat(scales(), times, axis=0),
            zeros=zeros,
            offsets=None if offsets is None else lambda: np.repeat(offsets(), times, axis=0),
            order=self.order,
        )

    def values_in(self, dtype: ir.DataType) -> np.ndarray:
        """Return the values [K,N], integers of 4 bits as int8 if `dtype` has 8 bits."""
        values = self.values()
        return values if dtype == self.dtype else values.astype(np.int8)

    def added_offsets(self) -> np.ndarray:
        """Compute what is added to the values times their scales: [K/group,N] fp32."""
        added = np.zeros((self.groups, self.fan_out), np.float32)
        if self.offsets is not None:
            added = self.offsets()
        return added if self.zeros is None else added - self.zeros.astype(np.float32) * self.scales()


def join(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix | None:
    """Join matrices of the same inputs side by side.

    None if they have no layout in common. Integers of 4 and of 8 bits become 8 bits, and all parts get the
    smallest of their groups.
    """
    first, group = parts[0], min(part.group for part in parts)
    types = {part.dtype for part in parts}
    for part in parts:
        if part.fan_in != first.fan_in or part.group % group or not _equal(part.order, first.order):
            return None
    if len(types) > 1 and not types <= {INT4, INT8}:
        return None
    parts, joined = [part.in_groups_of(group) for part in parts], first.dtype if len(types) == 1 else INT8
    zeros = None
    if any(part.zeros is not None for part in parts):
        none = np.zeros((parts[0].groups, 1), np.int8)
        given = [none.repeat(part.fan_out, 1) if part.zeros is None else part.zeros for part in parts]
        zeros = np.concatenate(given, axis=1)
    return QuantizedMatrix(
        fan_in=first.fan_in,
        fan_out=sum(part.fan_out for part in parts),
        dtype=joined,
        group=group,
        values=lambda: np.concatenate([part.values_in(joined) for part in parts], axis=1),
        scales=lambda: np.concatenate([part.scales() for part in parts], axis=1),
        zeros=zeros,
        offsets=_joined_offsets(parts),
        order=first.order,
    )


def _joined_offsets(parts: Sequence[QuantizedMatrix]) -> Read | None:
    if all(part.offsets is None for part in parts):
        return None

    def read() -> np.ndarray:
        none = np.zeros((parts[0].groups, 1), np.float32)
        given = [none.repeat(p.fan_out, 1) if p.offsets is None else p.offsets() for p in parts]
        return np.concatenate(given, axis=1)

    return read


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)
