# SPDX-License-Identifier: Apache-2.0
"""ProductPlan: the tiles of a GEMV, and the stream-K work units of each CTA."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgellm_ros.fused.plan.launch import WARP
from edgellm_ros.fused.plan.quantized import Quantized

COPY = 16  # bytes of one cp.async: 8 values
# With tensor cores: cp.async per thread and step; rows and padded columns of a warp's accumulators in smem.
COPIES, SUMS_ROWS, SUMS_STRIDE = 4, 8, 68
COLUMNS = 16  # per warp, of quantised weights
PIECES = 8  # cp.async per column and step of a warp, of quantised weights
FEWEST_STEPS = 3  # stages of the cp.async ring of quantised weights
RESERVED = 1 << 10  # bytes of smem that the driver reserves in each CTA


@dataclass(frozen=True)
class ProductPlan:
    """Tiles, CTAs and smem of one GEMV [rows,k] times [k,n].

    `GemvPlan` in gemv.cuh computes the same.
    """

    k: int
    n: int
    tile: int
    threads: int
    stages: int
    rows: int
    most_blocks: int
    all_of_x: bool
    whole_tiles: bool = False
    mma: bool = False
    lora_rank: int = 0  # largest rank of adapters
    x_in_gmem: bool = False  # x stays in global memory

    @property
    def tile_k(self) -> int:
        """Rows of the matrix in a k step."""
        return self.threads * 8 // self.tile * (COPIES if self.mma else 1)

    @property
    def steps(self) -> int:
        """Number of k steps of a tile."""
        return -(-self.k // self.tile_k)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.n // self.tile)

    @property
    def units(self) -> int:
        """Number of work units: the k steps of all tiles."""
        return self.tiles * self.steps

    @property
    def blocks(self) -> int:
        """Number of CTAs, each with at least one work unit."""
        return min(self.most_blocks, self.tiles if self.whole_tiles else self.units)

    @property
    def partials(self) -> int:
        """Largest number of partials of a tile: of CTAs that share it."""
        return max(
            self._block_of((tile + 1) * self.steps - 1) - self._block_of(tile * self.steps) + 1
            for tile in range(self.tiles)
        )

    @property
    def most_units(self) -> int:
        """Largest number of work units of a CTA."""
        if self.whole_tiles:
            return -(-self.tiles // self.blocks) * self.steps
        return -(-self.units // self.blocks)

    @property
    def width(self) -> int:
        """Values of a row of x that a CTA has in smem."""
        all_of_x = self.all_of_x or self.most_units > self.steps
        return self.tile_k * (self.steps if all_of_x else self.most_units)

    @property
    def shared_bytes(self) -> int:
        """Bytes of a CTA's smem: cp.async ring, x, accumulators, and those of LoRA."""
        x = 0 if self.x_in_gmem else x_bytes(self.width, self.rows, self.mma)
        return self.ring + x + self.sums + self.lora

    @property
    def lora(self) -> int:
        """Bytes of x A and (x A) B of the LoRA adapters."""
        if not self.lora_rank:
            return 0
        tiles = (self.most_units + self.steps - 2) // self.steps + 1
        return 4 * self.rows * (max(self.threads // 4, 3 * self.lora_rank) + tiles * self.tile)

    @property
    def ring(self) -> int:
        """Bytes of the cp.async ring."""
        return ring_bytes(self.stages, self.threads, self.mma)

    @property
    def sums(self) -> int:
        """Bytes of the warps' accumulators."""
        row = SUMS_STRIDE * min(self.rows, SUMS_ROWS) if self.mma else self.tile * self.rows
        return 4 * self.threads // WARP * row

    def _block_of(self, unit: int) -> int:
        return ((unit + 1) * self.blocks - 1) // self.units


def ring_bytes(stages: int, threads: int, mma: bool) -> int:
    """Return the bytes of a CTA's cp.async ring."""
    return COPY * stages * threads * (COPIES if mma else 1)


def x_bytes(width: int, rows: int, mma: bool) -> int:
    """Return the bytes of x in smem; `x_index` in gemv.cuh has the layout."""
    return 2 * width * (rows + 1 if mma and rows >= 4 else rows)


@dataclass(frozen=True)
class QuantizedProductPlan(ProductPlan):
    """Tiles, CTAs and smem of a GEMV with quantised weights.

    `QuantizedGemvPlan` in quantized.cuh computes the same.
    """

    form: Quantized = field(default_factory=lambda: Quantized(4, 128))

    @property
    def tile_k(self) -> int:
        k_warps = self.threads // WARP * COLUMNS // self.tile
        return k_warps * PIECES * 8 * COPY // self.form.bits

    @property
    def shared_bytes(self) -> int:
        step = COPY * PIECES * COLUMNS * self.threads // WARP
        steps = max(FEWEST_STEPS, self.ring // step)
        steps = min(steps, self.most_units + 1)
        sums = 4 * self.threads // WARP * COLUMNS * self.rows
        x = 2 * self.width * self.rows
        if self._digits:
            steps, x = steps - 1, max(x, step)
        return step * steps + x + sums + self._of_x + self.lora

    @property
    def _half(self) -> int:
        return PIECES // 2 * 8 * COPY // self.form.bits

    @property
    def _digits(self) -> bool:
        """Whether x becomes base-128 digits; `QuantizedGemvPlan::DIGITS`."""
        return self.rows == 1 and not self.form.float8 and self._half <= 2 * self.form.group

    @property
    def _of_x(self) -> int:
        """Bytes of x's digits, or of its sums over groups; `QuantizedGemvPlan::NOTES`."""
        if self.form.float8:
            return 0
        halves, intervals = self.width // self._half, self._half // min(self.form.group, self._half)
        if self._digits:
            return COPY * halves * (24 if self.form.bits == 4 else 12) + 8 * halves * intervals
        return 4 * halves * intervals * -(-self.rows // 8) * 8


def product_macros(prefix: str, plan: ProductPlan) -> dict[str, object]:
    """Return the macros' names and values of a product."""
    form = plan.form if isinstance(plan, QuantizedProductPlan) else None
    values = {
        "TILE": plan.tile,
        "BLOCKS": plan.blocks,
        "X_IN_GMEM": int(plan.x_in_gmem),
        "SMEM": plan.shared_bytes,
        "PARTIALS": plan.partials,
        "TILE_K": plan.tile_k,
        "BITS": 16 if form is None else form.bits,
        "GROUP": 0 if form is None else form.group,
        "ZERO_POINTS": str(form is not None and form.zero_points).lower(),
        "OFFSETS": str(form is not None and form.offsets).lower(),
        "FLOAT8": str(form is not None and form.float8).lower(),
        "ACT_ORDER": str(form is not None and form.ordered).lower(),
    }
    return {f"{prefix}_{name}": value for name, value in values.items()}
