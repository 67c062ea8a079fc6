# SPDX-License-Identifier: Apache-2.0
"""FusedFusion: kernels of a draft head's fusion of base states.

They follow those of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.cuda.fused.plan import RESERVED, Launch, ProductPlan
from edgellm_ros.kernels.cuda.fused.shape import DTYPES

FILES = ("gemv.cuh", "fusion.cu")
STATES = 3  # of a token, from three layers of the base
TILE = 64  # columns of a tile
MMA_ROWS = 4  # the fewest rows whose products are computed on tensor cores


@dataclass(frozen=True)
class FusionShape:
    """Sizes and switches of a fusion.

    - state_size: hidden size of the base; fused_size: that of the head
    - state_norms: an RMSNorm of each state; joined_norm: one of all three side by side; at most one of both
    """

    dtype: str  # "fp16" or "bf16"
    state_size: int
    fused_size: int
    epsilon: float = 1e-6
    state_norms: bool = False
    joined_norm: bool = False
    max_rows: int = 1

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


@dataclass(frozen=True)
class FusionWeights:
    """Addresses of the weights of a fusion, multiples of 16 bytes; 0 = there is none.

    owners: objects that keep the memory alive.
    """

    fc: int  # [3*state_size,fused_size]
    bias: int = 0  # [fused_size]
    norms: tuple[int, int, int] = (0, 0, 0)  # [state_size] each, or the thirds of a joined norm
    owners: tuple[Any, ...] = field(default=(), compare=False, repr=False)


class FusionPlan:
    """Sizes that the kernels of a fusion are compiled with, for up to so many rows."""

    files = FILES

    def __init__(
        self, shape: FusionShape, rows: int, multiprocessors: int, most_shared: int, threads: int = 256
    ) -> None:
        self.shape, self.rows, self._threads = shape, rows, threads
        self.mma = rows >= MMA_ROWS
        inputs, stages = STATES * shape.state_size, 2 if self.mma else 6
        # More blocks have smaller shares of x; two on a multiprocessor hide each other's beginning.
        for limit in (most_shared // 2, most_shared):
            for blocks_each in (2, 4, 8, 16, 32):
                sizes = inputs, shape.fused_size, TILE, threads, stages, rows, blocks_each * multiprocessors
                self.product = ProductPlan(*sizes, all_of_x=False, mma=self.mma)
                if self.product.shared_bytes <= limit - RESERVED:
                    return
        raise EngineError(f"the fusion needs more than {most_shared} bytes of shared memory")

    def launches(self, early: bool) -> tuple[Launch, Launch]:
        """Return how the two kernels are launched."""
        product, threads = self.product, self._threads
        values = self.rows * self.shape.fused_size
        return (
            Launch("fuse", (product.blocks, 1), threads, product.shared_bytes, early),
            Launch("fused_states", (min(product.blocks, -(-values // threads)), 1), threads, 0, early),
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the product's parts."""
        return 4 * self.product.parts * self.rows * self.shape.fused_size

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernels are compiled with."""
        shape, product = self.shape, self.product
        values = {
            "BF16": int(shape.dtype == "bf16"),
            "ROWS": self.rows,
            "TENSOR_CORES": int(self.mma),
            "THREADS": product.threads,
            "STAGES": product.stages,
            "FILLED_AT_ONCE": product.stages,
            "TRIGGER_FIRST": 1,
            "STATE_SIZE": shape.state_size,
            "FUSED_SIZE": shape.fused_size,
            "STATE_NORMS": int(shape.state_norms),
            "JOINED_NORM": int(shape.joined_norm),
            "EPSILON": f"{float(shape.epsilon)!r}f",
            "FUSE_TILE": product.tile,
            "FUSE_BLOCKS": product.blocks,
            "FUSE_SHARED": product.shared_bytes,
            "FUSE_PARTS": product.parts,
        }
        return [(name, str(value)) for name, value in values.items()]


class FusedFusion:
    """The fusion of one draft head on one device.

    compile: makes a program of a plan, an object with the method `launch` of `FusedProgram`.
    """

    def __init__(
        self,
        device: Any,
        shape: FusionShape,
        weights: FusionWeights,
        compile: Callable[[FusionPlan], Any],
        threads: int = 256,
    ) -> None:
        self._shape, self._weights = shape, weights
        self._variants: dict[int, tuple[FusionPlan, Any]] = {}  # by number of rows
        rows = 1
        while rows < 2 * shape.max_rows:
            plan = FusionPlan(shape, rows, device.multiprocessors, device.most_shared_memory, threads)
            self._variants[rows] = plan, compile(plan)
            rows *= 2
        nbytes = max(plan.scratch_bytes for plan, _ in self._variants.values())
        self._parts = device.empty((nbytes,), np.uint8)

    def launches(
        self, states: Sequence[int], out: int, rows: int, early: bool
    ) -> Iterator[tuple[Any, Launch, tuple[int, ...]]]:
        """Yield program, kernel and arguments of each launch.

        states: addresses of three tensors [rows,state_size]; out: that of [rows,fused_size]. early: whether
        the kernels may start before those before them have ended.
        """
        plan, program = next(each for size, each in self._variants.items() if size >= rows)
        weights, (fuse, finish) = self._weights, plan.launches(early)
        parts = self._parts.pointer
        yield program, fuse, (weights.fc, *states, *weights.norms, parts, rows)
        yield program, finish, (parts, weights.bias, out, rows)
