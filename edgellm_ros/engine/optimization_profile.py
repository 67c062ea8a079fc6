# SPDX-License-Identifier: Apache-2.0
"""Optimization profiles: the shapes that a TensorRT plan is built for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Smallest, tuned and largest size of a dimension."""

    low: int
    tuned: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.tuned <= self.high:
            raise ValueError(f"a range needs 1 <= {self.low} <= {self.tuned} <= {self.high}")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class Profile:
    """One optimization profile of a graph."""

    name: str  # such as "decode"
    ranges: Mapping[str, Range]  # by the dimension's symbol
    lengths_vary: bool = False  # sequence lengths differ from run to run: too many shapes to compile for each

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{symbol} {sizes}' for symbol, sizes in self.ranges.items())})"
