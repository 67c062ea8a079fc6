# SPDX-License-Identifier: Apache-2.0
"""ChainPlan: sizes of the kernel that drafts a chain of tokens."""

from __future__ import annotations

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.fused.plan.launch import WARP, Launch
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.plan.small_head import (
    GAP,
    MOST_ROWS,
    THREADS,
    TILE,
    macros,
    sums_bytes,
    unsupported,
)
from edgellm_ros.kernels.capability import EARLY_START

NAME = "draft_chain"
CLUSTERS = EARLY_START  # compute capability from which there are thread block clusters
CLUSTER = 16  # CTAs
HEAD_DIMS = (64, 128)
PHASES = 6  # of a run; at the end of each, CTAs wait for each other


class ChainPlan:
    """Sizes that the kernel is compiled with.

    rows: most accepted tokens before a draft; levels: tokens of a draft. EngineError, with the reason, if the
    kernel does not take the head.
    """

    source = "chain.cu"

    def __init__(
        self, shape: FusedDraftShape, rows: int, levels: int, most_shared: int, cluster: int = CLUSTER
    ) -> None:
        self.shape, self.rows, self.levels, self.cluster = shape, rows, levels, cluster
        problem = self._problem()
        if problem is None:
            self.cached = 1  # KV rows of the cache that a CTA has in smem
            left = most_shared - self.shared_bytes
            if left < 0:
                problem = f"a block needs {self.shared_bytes} bytes of shared memory, and has {most_shared}"
            of_a_block = -(-shape.capacity // (cluster // shape.kv_heads))
            self.cached = min(1 + left // (4 * shape.head_dim), of_a_block)
        if problem is not None:
            raise EngineError(f"no kernel for whole chains: {problem}")

    def _problem(self) -> str | None:
        shape = self.shape
        reason = unsupported(shape)
        if reason is not None:
            return reason
        for problem, text in (
            (shape.head_dim not in HEAD_DIMS, f"head_dim is {shape.head_dim}, not one of {HEAD_DIMS}"),
            (self.cluster % shape.kv_heads != 0, f"{shape.kv_heads} KV heads for {self.cluster} blocks"),
            (self.rows > MOST_ROWS, f"{self.rows} accepted tokens, more than {MOST_ROWS}"),
            (
                min(shape.hidden, shape.inner) < TILE * self.cluster,
                f"sizes of {shape.hidden} and {shape.inner}, less than {TILE} columns for each block",
            ),
        ):
            if problem:
                return text
        return None

    @property
    def new_rows(self) -> int:
        """Rows of the KV cache that a draft writes."""
        return self.rows + self.levels - 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of a CTA's smem; `Memory` in chain.cu has the same fields."""
        shape, rows, cluster = self.shape, self.rows, self.cluster
        hidden, heads, size = shape.hidden, shape.heads, shape.head_dim
        group, warps = heads // shape.kv_heads, THREADS // WARP
        products = [  # rows, columns of a matrix, matrices
            (2 * hidden, shape.qkv_size, 1),
            (shape.q_size, hidden, 1),
            (hidden, shape.inner, 2),
            (shape.inner, hidden, 1),
            (hidden, shape.vocab, 1),
        ]
        tiles = [-(-columns // (TILE * cluster)) * count for _, columns, count in products]
        weights = [2 * TILE * k * own for (k, _, _), own in zip(products, tiles, strict=True)]
        sums = [sums_bytes(k, own) for (k, _, _), own in zip(products, tiles, strict=True)]
        attending = max(rows * group, warps) * (4 * size + 8)
        splits = cluster // shape.kv_heads * rows * heads * (4 * size + 8)
        widths = 2 * hidden + GAP, hidden + GAP, shape.inner + GAP
        rest = 2 * MOST_ROWS * sum(widths) + 4 * shape.vocab
        fields = [
            8 * PHASES + 4 * cluster, *weights, 8 * hidden, _aligned(max(splits, rest)),
            2 * MOST_ROWS * (shape.q_size + GAP),
            8 * rows * hidden, 4 * rows * (group + 2) * size, max(*sums, attending), 4 * rows * group * size,
            4 * self.new_rows * shape.rotary_dim,
        ]  # fmt: skip
        new_and_cached = 4 * size * (self.new_rows + self.cached)
        return _aligned(_aligned(sum(fields)) + new_and_cached + 4 * shape.vocab)

    def launch(self, batch: int, early: bool) -> Launch:
        """Return how the kernel is launched."""
        return Launch(NAME, (self.cluster, batch), THREADS, self.shared_bytes, early, self.cluster)

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of the macros that the kernel is compiled with."""
        shape = self.shape
        return macros(
            shape,
            self.cluster,
            ROWS=self.rows,
            NEW_ROWS=self.new_rows,
            CACHED=self.cached,
            CHAIN_SMEM=self.shared_bytes,
            INNER=shape.inner,
            VOCAB=shape.vocab,
            NORM_BEFORE_RESIDUAL=int(shape.norm_before_residual),
            FEEDS_BACK_NORMED=int(shape.feeds_back_normed_state),
        )


def _aligned(nbytes: int) -> int:
    """Round up to a multiple of 16."""
    return -(-nbytes // 16) * 16
