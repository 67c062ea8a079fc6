# SPDX-License-Identifier: Apache-2.0
"""FusedChain: a draft head's chain of tokens, as one launch of a kernel.

The kernel runs on a cluster of blocks.
"""

from __future__ import annotations

from typing import Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.chain_protocol import ChainDraft
from edgellm_ros.kernels.cuda.compiler import EARLY_START, compute_capability
from edgellm_ros.kernels.cuda.fused.decoder import Compile, compiler_for
from edgellm_ros.kernels.cuda.fused.draft import FusedDraftShape
from edgellm_ros.kernels.cuda.fused.plan import WARP, Launch
from edgellm_ros.kernels.cuda.fused.small_head import (
    GAP,
    MOST_ROWS,
    SOURCE,
    THREADS,
    TILE,
    macros,
    sums_bytes,
    unsupported,
)
from edgellm_ros.kernels.cuda.fused.weights import FusedWeights
from edgellm_ros.kernels.tree_protocol import check_tree_size

NAME = "draft_chain"
FILES = ("../rope.cuh", SOURCE, "chain.cu")
CLUSTERS = EARLY_START  # compute capability from which blocks can share their shared memory
CLUSTER = 16  # blocks
HEAD_DIMS = (64, 128)
PHASES = 6  # of a run, in which blocks wait for each other


class ChainPlan:
    """Sizes that the kernel is compiled with.

    They are for drafts of so many levels after so many accepted tokens. EngineError, with the reason, if the
    kernel does not take the head.
    """

    files = FILES

    def __init__(
        self, shape: FusedDraftShape, rows: int, levels: int, most_shared: int, cluster: int = CLUSTER
    ) -> None:
        self.shape, self.rows, self.levels, self.cluster = shape, rows, levels, cluster
        problem = self._problem()
        if problem is None:
            self.cached = 1  # rows of the KV cache in shared memory
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
        """Bytes of a block's shared memory; `Memory` in chain.cu has the same fields."""
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
            CHAIN_SHARED=self.shared_bytes,
            INNER=shape.inner,
            VOCAB=shape.vocab,
            NORM_BEFORE_RESIDUAL=int(shape.norm_before_residual),
            FEEDS_BACK_NORMED=int(shape.feeds_back_normed_state),
        )


class FusedChain:
    """Drafts of chains with one head on one device.

    - rows: most accepted tokens of a round; levels: tokens of a draft
    - compile, device: as of `FusedDecoder`

    EngineError, with the reason, if device or head are not supported.
    """

    def __init__(
        self,
        device: Any,
        shape: FusedDraftShape,
        weights: FusedWeights,
        rows: int,
        levels: int,
        compile: Compile | None = None,
        cluster: int = CLUSTER,
    ) -> None:
        if compute_capability(device.arch) < CLUSTERS:
            raise EngineError(f"no kernel for whole chains: {device.arch} has no clusters of blocks")
        self.plan = ChainPlan(shape, rows, levels, device.most_shared_memory, cluster)
        self._weights = weights
        self._program = (compile or compiler_for(device))(self.plan)
        self.max_batch = self._program.most_clusters(self.plan.launch(1, False))
        if not self.max_batch:
            raise EngineError(f"no kernel for whole chains: no room for {cluster} blocks at once")

    def run(self, draft: ChainDraft) -> None:
        """Queue a draft of at most `max_batch` sequences; see `ChainDrafter`."""
        weights, layer = self._weights, self._weights.layers[0]
        table, tree, rope = draft.table, draft.tree, draft.rope
        batch, rows = draft.tokens.shape
        check_tree_size(table, tree)
        if (rows, table.levels, table.top_k) != (self.plan.rows, self.plan.levels, 1):
            raise EngineError(
                f"a draft of {table.levels} levels with {table.top_k} candidates after {rows} tokens; the "
                f"kernel is for {self.plan.levels} levels with one after {self.plan.rows}"
            )
        self._program.launch(
            self.plan.launch(batch, True),
            layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm, layer.o, layer.o_bias, layer.gate_up,
            layer.gate_up_bias, layer.down, layer.down_bias, weights.lm_head, layer.input_norm,
            layer.state_norm, layer.post_norm, weights.norm, draft.embedding.pointer,
            draft.embedding.shape[0], 0 if draft.token_of_logit is None else draft.token_of_logit.pointer,
            rope.cos.pointer, rope.sin.pointer, rope.frequencies.pointer, rope.cos.shape[0],
            draft.lengths.pointer, draft.deltas.pointer, draft.caches["key_cache_0"].pointer,
            draft.caches["value_cache_0"].pointer, draft.tokens.pointer, draft.counts.pointer,
            draft.states.pointer, draft.newest.pointer, table.tokens.pointer, table.scores.pointer,
            table.parents.pointer, table.nodes.pointer, table.levels, draft.last_tokens.pointer,
            tree.tokens.pointer, tree.parents.pointer, tree.depths.pointer, tree.size,
        )  # fmt: skip


def _aligned(nbytes: int) -> int:
    """Round up to a multiple of 16."""
    return -(-nbytes // 16) * 16
