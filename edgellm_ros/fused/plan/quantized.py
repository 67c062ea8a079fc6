# SPDX-License-Identifier: Apache-2.0
"""Quantized: the form of a matrix in 4 or 8 bits that the fused kernels multiply."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = {4: (32, 64, 128), 8: (16, 32, 64, 128)}  # rows that may share a scale, by bits
ALIGNMENT = 256  # bytes: values, scales, zero points and offsets each begin at a multiple


@dataclass(frozen=True)
class Quantized:
    """The form of a matrix [K,N] in 4 or 8 bits; `quantized.cuh` has its layout.

    - group: rows that share a scale and a zero point; 0: all rows, with float8
    - zero_points: whether they are stored; else each is half of the range
    - float8: values are E4M3 instead of integers, without zero points and offsets
    - ordered: act-order: rows are sorted by group, and perm tells which input each multiplies
    - offsets: whether a number of the model's type is added to the weights of a group, without zero points
    """

    bits: int
    group: int
    zero_points: bool = False
    float8: bool = False
    ordered: bool = False
    offsets: bool = False

    def unsupported(self) -> str | None:
        """Return why the kernels do not take this form; None if they do."""
        if self.bits not in GROUPS:
            return f"weights have {self.bits} bits"
        if self.float8 and (self.bits != 8 or self.zero_points):
            return "weights are E4M3 with zero points" if self.zero_points else f"E4M3 of {self.bits} bits"
        if self.offsets and (self.float8 or self.zero_points):
            return f"groups have offsets and {'E4M3' if self.float8 else 'zero points'}"
        groups = GROUPS[self.bits]
        if self.group not in groups and not (self.float8 and self.group == 0):
            return f"{self.group} weights of {self.bits} bits share a scale, not one of {groups}"
        return None

    @property
    def plain(self) -> bool:
        """Whether the kernels need few registers: no zero points or offsets, few scales."""
        few = self.group >= 32 if self.bits == 8 else self.group == 128
        return not self.zero_points and not self.offsets and (few or self.float8)

    def parts(self, k: int, n: int) -> tuple[int, ...]:
        """Return the bytes of values, scales, zero points or offsets, perm and inv_perm."""
        groups = k // (self.group or k)
        sizes = [n * k * self.bits // 8, (4 if self.float8 else 2) * n * groups]
        if self.zero_points:
            sizes.append(n * (-(-groups * self.bits // 8)))
        if self.offsets:
            sizes.append(2 * n * groups)
        if self.ordered:
            sizes.append(4 * k)
        return tuple(sizes)
