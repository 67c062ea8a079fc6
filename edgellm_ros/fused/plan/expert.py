# SPDX-License-Identifier: Apache-2.0
"""ExpertPlan: CTAs and smem of the action expert's kernels.

A plan is for one GPU and one tile of rows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.expert_shape import ExpertShape
from edgellm_ros.fused.plan.launch import WARP, Launch

KERNELS = ("qkv", "attention", "o", "gate_up", "down", "finish")
ROW_TILES = (8, 16, 32)  # the kernels of each are compiled when an engine is loaded
HIDDEN_TILE = INNER_TILE = 32  # columns per CTA of `o` and `down`, and of `gate_up`'s result
QUERY_TILE = 16  # rows per CTA of the attention


@dataclass(frozen=True)
class ExpertTuning:
    """Sizes that change the time of a step, and its results in rounding only.

    - warps: per CTA of a GEMM
    - stages: k steps in a warp's cp.async ring
    - attention_warps: per CTA of the attention; half as many for heads of 128
    - finish_threads: per CTA of the last kernel
    - row_tile: rows per CTA of a GEMM; 0 = the fewest with at most two CTAs per SM
    - early_start, trigger_first: as in Tuning
    """

    warps: int = 16
    stages: int = 8
    attention_warps: int = 16
    finish_threads: int = 256
    row_tile: int = 0
    early_start: bool = True
    trigger_first: bool = False


@dataclass(frozen=True)
class TilePlan:
    """Tile, warps and smem of a CTA of a GEMM [rows,k] times [k,n].

    `Product` in expert_product.cuh computes the same.
    """

    k: int
    n: int
    tile: int
    warps: int
    stages: int
    row_tile: int

    @property
    def split(self) -> int:
        """Split-K: number of warps that share the k of a column."""
        return max(1, self.warps // (self.tile // 16))

    @property
    def threads(self) -> int:
        """Number of threads of a CTA."""
        return WARP * self.tile // 16 * self.split

    @property
    def blocks(self) -> int:
        """Number of CTAs along the columns."""
        return self.n // self.tile

    @property
    def shared_bytes(self) -> int:
        """Bytes of a CTA's smem: cp.async rings or accumulators of the warps, and x."""
        most_steps = -(-self.k // 16 // self.split)
        region = max(512 * min(self.stages, most_steps), 80 * self.row_tile) + 64
        return self.threads // WARP * region + 2 * self.row_tile * (self.k + 8)


class ExpertPlan:
    """All sizes that kernels for one shape, GPU and tile of rows are compiled with.

    EngineError if a CTA needs more smem than there is.
    """

    source = "expert.cu"

    def __init__(self, shape: ExpertShape, row_tile: int, most_shared: int, tuning: ExpertTuning) -> None:
        self.shape, self.row_tile, self.tuning = shape, row_tile, tuning
        self.attention_warps = max(1, tuning.attention_warps * 64 // shape.head_dim)
        self.products: dict[str, TilePlan] = {}
        fitting = (stages for stages in range(tuning.stages, 0, -1) if self._cut(stages) <= most_shared)
        self.stages = next(fitting, 0)
        if not self.stages:
            raise EngineError(
                f"the fused kernels need {self._cut(1)} bytes of shared memory, the GPU has {most_shared}"
            )

    def _cut(self, stages: int) -> int:
        """Tile the GEMMs; return the most bytes of smem that a CTA of any kernel needs."""
        shape, tuning, rows = self.shape, self.tuning, self.row_tile
        sizes = {
            "qkv": (shape.hidden, shape.qkv_size, shape.head_dim),
            "o": (shape.q_size, shape.hidden, HIDDEN_TILE),
            "gate_up": (shape.hidden, 2 * shape.inner, 2 * INNER_TILE),
            "down": (shape.inner, shape.hidden, HIDDEN_TILE),
        }
        self.products = {name: TilePlan(*size, tuning.warps, stages, rows) for name, size in sizes.items()}
        return max(self.attention_bytes, *(plan.shared_bytes for plan in self.products.values()))

    @property
    def attention_bytes(self) -> int:
        """Bytes of smem of a CTA of the attention: each warp's output, max and sum."""
        return self.attention_warps * QUERY_TILE * (4 * (self.shape.head_dim + 16) + 8)

    def launch(self, name: str, samples: int, early: bool) -> Launch:
        """Return the launch of a kernel for a number of samples."""
        shape, rows = self.shape, samples * self.shape.horizon
        if name == "attention":
            grid = -(-shape.horizon // QUERY_TILE) * shape.heads, samples
            return Launch(name, grid, WARP * self.attention_warps, self.attention_bytes, early)
        if name == "finish":
            threads = self.tuning.finish_threads
            return Launch(name, (-(-rows // (threads // WARP)), 1), threads, 0, early)
        plan = self.products[name]
        return Launch(name, (plan.blocks, -(-rows // self.row_tile)), plan.threads, plan.shared_bytes, early)

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        shape, tuning = self.shape, self.tuning
        values: dict[str, object] = {
            "BF16": int(shape.dtype == "bf16"),
            "FP8_CACHE": int(shape.fp8_cache),
            "PDL_TRIGGER_FIRST": int(tuning.trigger_first),
            "ROWS": self.row_tile,
            "WARPS": tuning.warps,
            "STAGES": self.stages,
            "ATTENTION_WARPS": self.attention_warps,
            "ATTENTION_BYTES": self.attention_bytes,
            "FINISH_THREADS": tuning.finish_threads,
            "HIDDEN": shape.hidden,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "INNER": shape.inner,
            "ROTARY_DIM": shape.rotary_dim,
            "CAPACITY": shape.capacity,
            "HORIZON": shape.horizon,
            "ACTIONS": shape.actions,
            "EPSILON": f"{float(shape.epsilon)!r}f",
        }
        for name, plan in self.products.items():
            values |= {f"{name.upper()}_SMEM": plan.shared_bytes, f"{name.upper()}_THREADS": plan.threads}
        return [(name, str(value)) for name, value in values.items()]


def plan_samples(
    shape: ExpertShape, samples: int, multiprocessors: int, most_shared: int, tuning: ExpertTuning
) -> ExpertPlan:
    """Return the plan for a number of samples.

    The tile of rows is the smallest with which a GEMM has at most two CTAs per SM, or a smaller one that fits
    into smem. EngineError if none fits.
    """
    columns = max(shape.qkv_size // shape.head_dim, shape.inner // INNER_TILE)
    wanted = tuning.row_tile or next(
        (
            row_tile
            for row_tile in ROW_TILES
            if columns * -(-samples * shape.horizon // row_tile) <= 2 * multiprocessors
        ),
        ROW_TILES[-1],
    )
    for row_tile in reversed(ROW_TILES):
        if row_tile <= wanted:
            with suppress(EngineError):
                return ExpertPlan(shape, row_tile, most_shared, tuning)
    return ExpertPlan(shape, ROW_TILES[0], most_shared, tuning)
