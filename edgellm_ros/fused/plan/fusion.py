# SPDX-License-Identifier: Apache-2.0
"""FusionPlan: sizes of the kernels of a draft head's `fc`."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.plan.product import RESERVED, ProductPlan
from edgellm_ros.fused.plan.shape import DTYPES

TILE = 64  # columns of a tile
MMA_ROWS = 4  # the fewest rows whose products are computed on tensor cores


@dataclass(frozen=True)
class FusionShape:
    """Sizes and switches of a fusion.

    - state_size, fused_size: hidden sizes of the base and of the head
    - states: rows side by side: three states of the base, or an embedding and a state
    - state_norms: an RMSNorm of each state; joined_norm: one of all three side by side. Not both
    """

    dtype: str  # "fp16" or "bf16"
    state_size: int
    fused_size: int
    epsilon: float = 1e-6
    state_norms: bool = False
    joined_norm: bool = False
    max_rows: int = 1
    states: int = 3

    def unsupported(self) -> str | None:
        """Return why the kernels do not take this shape; None if they do."""
        for problem, text in (
            (self.dtype not in DTYPES, f"weights are {self.dtype}, not {' or '.join(DTYPES)}"),
            (
                self.state_size % 64 != 0 or self.fused_size % 64 != 0,
                f"the hidden sizes {self.state_size} and {self.fused_size} are not multiples of 64",
            ),
        ):
            if problem:
                return text
        return None


class FusionPlan:
    """Sizes that the kernels of a fusion are compiled with, for up to `rows` rows."""

    source = "fusion.cu"

    def __init__(
        self, shape: FusionShape, rows: int, multiprocessors: int, most_shared: int, threads: int = 256
    ) -> None:
        self.shape, self.rows, self._threads = shape, rows, threads
        self.mma = rows >= MMA_ROWS
        inputs, stages = shape.states * shape.state_size, 2 if self.mma else 6
        # With more CTAs each has less of x in smem; of two CTAs on an SM, one runs while the other starts.
        for limit in (most_shared // 2, most_shared):
            for blocks_each in (2, 4, 8, 16, 32):
                sizes = inputs, shape.fused_size, TILE, threads, stages, rows, blocks_each * multiprocessors
                self.product = ProductPlan(*sizes, all_of_x=False, mma=self.mma)
                if self.product.shared_bytes <= limit - RESERVED:
                    return
        raise EngineError(f"the fusion needs more than {most_shared} bytes of shared memory")

    def launches(self, early: bool, first: bool = False) -> tuple[Launch, Launch]:
        """Return how the two kernels are launched.

        early: whether a kernel may start before the previous one has ended (PDL); first: whether they begin a
        run, so that the first one must not start early.
        """
        product, threads = self.product, self._threads
        values = self.rows * self.shape.fused_size
        return (
            Launch("fuse", (product.blocks, 1), threads, product.shared_bytes, early and not first),
            Launch("fused_states", (min(product.blocks, -(-values // threads)), 1), threads, 0, early),
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the GEMV's partials."""
        return 4 * self.product.partials * self.rows * self.shape.fused_size

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        shape, product = self.shape, self.product
        values = {
            "BF16": int(shape.dtype == "bf16"),
            "ROWS": self.rows,
            "TENSOR_CORES": int(self.mma),
            "THREADS": product.threads,
            "STAGES": product.stages,
            "PREFETCH_STEPS": product.stages,
            "PDL_TRIGGER_FIRST": 1,
            "STATES": shape.states,
            "STATE_SIZE": shape.state_size,
            "FUSED_SIZE": shape.fused_size,
            "STATE_NORMS": int(shape.state_norms),
            "JOINED_NORM": int(shape.joined_norm),
            "EPSILON": f"{float(shape.epsilon)!r}f",
            "FUSE_TILE": product.tile,
            "FUSE_BLOCKS": product.blocks,
            "FUSE_SMEM": product.shared_bytes,
            "FUSE_PARTIALS": product.partials,
        }
        return [(name, str(value)) for name, value in values.items()]
