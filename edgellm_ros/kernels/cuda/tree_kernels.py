# SPDX-License-Identifier: Apache-2.0
"""The kernels of speculative decoding on CUDA tensors.

Here are their arguments and launch sizes.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.launches import (
    CudaLaunches,
    check_float32,
    check_logits,
    of_table,
    row_bytes,
    widest_unit,
)
from edgellm_ros.kernels.cuda.layout import (
    SAMPLE_THREADS,
    SELECT_THREADS,
    STATE_COLUMNS,
    STATE_THREADS,
    TOP_SHARE,
)
from edgellm_ros.kernels.protocol import RopeTable, SamplingState
from edgellm_ros.kernels.tree_protocol import (
    MOST_CANDIDATES,
    MOST_TABLE_ENTRIES,
    MOST_TREE_NODES,
    ChainInputs,
    DraftInputs,
    DraftTable,
    DraftTree,
    check_candidates,
    check_chain,
    check_level,
    check_tree_size,
)

MASK_THREADS = 128
LEVEL_THREADS = 256
HALF = np.dtype(np.float16)


class CudaTreeKernels(CudaLaunches):
    """The kernels of speculative decoding on a GPU.

    `TreeKernels` documents the methods.
    """

    def add_candidates(
        self, logits: Tensor, token_of_logit: Tensor | None, table: DraftTable, level: int
    ) -> None:
        batch, count, vocab = logits.shape
        check_candidates(table, level, count, vocab)
        is_half = logits.dtype == HALF
        if not is_half:
            check_logits(logits, vocab)
        _check_table(table)
        rows, blocks = batch * count, -(-vocab // TOP_SHARE)
        if not rows:
            return
        self._launch(
            "add_candidates_half" if is_half else "add_candidates", (blocks, rows), SAMPLE_THREADS,
            logits=logits, vocab=vocab, token_of_logit=token_of_logit, tokens=table.tokens,
            scores=table.scores, parents=table.parents, nodes=table.nodes, nodes_per_sequence=count,
            top_k=table.top_k, entries=table.scores.shape[1], levels=table.levels, level=level,
            arrived=self._zeroed_scratch("arrived", 4 * rows),
            work=self._zeroed_scratch("candidates", 8 * rows * blocks * (1 + table.top_k)),
        )  # fmt: skip

    def begin_accepted(
        self,
        tokens: Tensor,
        counts: Tensor,
        embedding: Tensor,
        rope: RopeTable,
        lengths: Tensor,
        deltas: Tensor,
        newest: Tensor,
        out: DraftInputs,
    ) -> None:
        check_float32(rope.cos, rope.sin, rope.frequencies, deltas, out.cos, out.sin)
        batch, count = tokens.shape
        width, row, capacity = _widths(embedding, out)
        if tokens.size:
            self._launch(
                f"begin_accepted_{width}", (batch * count,), LEVEL_THREADS,
                tokens=tokens, counts=counts, count=count, embedding=embedding, vocab=embedding.shape[0],
                row_units=row // width, **of_table(rope), lengths=lengths, deltas=deltas, newest=newest,
                embeds=out.embeds, cos=out.cos, sin=out.sin, mask=out.mask, mask_units=capacity // width,
                filled=out.filled,
            )  # fmt: skip

    def begin_level(
        self,
        table: DraftTable,
        level: int,
        states: Tensor,
        newest: Tensor,
        embedding: Tensor,
        rope: RopeTable,
        lengths: Tensor,
        deltas: Tensor,
        parents: Tensor,
        out: DraftInputs,
    ) -> None:
        check_level(table, level)
        _check_table(table)
        check_float32(rope.cos, rope.sin, rope.frequencies, deltas, out.cos, out.sin)
        batch, top_k, _ = out.embeds.shape
        width, row, capacity = _widths(embedding, out, states, parents)
        if batch:
            self._launch(
                f"begin_level_{width}", (batch * top_k,), LEVEL_THREADS,
                tokens=table.tokens, scores=table.scores, nodes=table.nodes, top_k=top_k,
                entries=table.scores.shape[1], levels=table.levels, level=level, states=states,
                state_rows=states.shape[1], newest=newest, embedding=embedding, vocab=embedding.shape[0],
                row_units=row // width, **of_table(rope), lengths=lengths, deltas=deltas,
                embeds=out.embeds, parents=parents, cos=out.cos, sin=out.sin, mask=out.mask,
                mask_units=capacity // width, write_index=out.write_index, filled=out.filled,
            )  # fmt: skip

    def select_tree(self, table: DraftTable, last_tokens: Tensor, tree: DraftTree) -> None:
        check_tree_size(table, tree)
        _check_table(table)
        if tree.tokens.size:
            self._launch(
                "select_tree", (tree.tokens.shape[0],), SELECT_THREADS,
                table_tokens=table.tokens, table_scores=table.scores, table_parents=table.parents,
                entries=table.scores.shape[1], top_k=table.top_k, last_tokens=last_tokens,
                tokens=tree.tokens, parents=tree.parents, depths=tree.depths, size=tree.size,
            )  # fmt: skip

    def tree_mask(self, tree: DraftTree, lengths: Tensor, out: Tensor) -> None:
        _check_tree(tree)
        batch, _, size, capacity = out.shape
        width = widest_unit(capacity, out)
        if out.size:
            self._launch(
                f"tree_mask_{width}", (batch * size,), MASK_THREADS,
                out=out, parents=tree.parents, lengths=lengths, size=size, units=capacity // width,
            )  # fmt: skip

    def tree_rope_rows(
        self, table: RopeTable, lengths: Tensor, deltas: Tensor, depths: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        check_float32(table.cos, table.sin, table.frequencies, deltas, cos, sin)
        self._by_element(
            "tree_rope_rows", cos.size,
            cos=cos, sin=sin, **of_table(table), lengths=lengths, deltas=deltas, depths=depths,
            batch=cos.shape[0], steps=cos.shape[1],
        )  # fmt: skip

    def sample_path(
        self,
        logits: Tensor,
        state: SamplingState,
        tree: DraftTree,
        vocab_map: Tensor | None,
        sampled: Tensor,
        tokens: Tensor,
        path: Tensor,
        offered: Tensor,
    ) -> None:
        batch, size, vocab = logits.shape
        _check_tree(tree)
        check_logits(logits, state.seen.shape[-1])
        if not batch:
            return
        blocks = self._sampling_blocks(batch, vocab)
        self._launch(
            "sample_path", (blocks, batch), SAMPLE_THREADS,
            logits=logits, vocab=vocab, **state.rules, positions=state.position,
            path_limits=state.path_limit, seen=state.seen, tree_tokens=tree.tokens,
            tree_parents=tree.parents, size=size, vocab_map=vocab_map, sampled=sampled, tokens=tokens,
            path=path, offered=offered, most=path.shape[1], scratch=self._sampling_scratch(batch),
            cooperative=blocks > 1,
        )  # fmt: skip

    def move_cache_rows(
        self, cache: Tensor, first_row: int, lengths: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        layers, batch, heads, capacity, _ = cache.shape
        row = row_bytes(cache)
        width = widest_unit(row, cache)
        units = row // width
        self._by_element(
            f"move_cache_rows_{width}", layers * counts.size * heads * units,
            cache=cache, lengths=lengths, path=path, counts=counts, layers=layers, batch=batch,
            heads=heads, capacity=capacity, units=units, first_row=first_row, rows=counts.size,
            path_width=path.shape[1],
        )  # fmt: skip

    def take_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        row = row_bytes(out)
        width = widest_unit(row, source, out)
        self._by_token(
            f"take_rows_{width}", index, row // width,
            out=out, source=source, index=index, places=index.size, places_per_sequence=index.shape[1],
            rows=source.shape[1], units=row // width,
        )  # fmt: skip

    def take_accepted(
        self,
        tokens: Tensor,
        states: Tensor,
        path: Tensor,
        counts: Tensor,
        out_tokens: Tensor,
        out_states: Tensor,
        out_counts: Tensor,
        lengths: Tensor,
    ) -> None:
        row = row_bytes(out_states)
        width = widest_unit(row, states, out_states)
        self._by_token(
            f"take_accepted_{width}", path, row // width,
            out=out_states, source=states, index=path, places=path.size, places_per_sequence=path.shape[1],
            rows=states.shape[1], units=row // width, tokens=tokens, out_tokens=out_tokens, counts=counts,
            out_counts=out_counts, lengths=lengths,
        )  # fmt: skip

    def put_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        row = row_bytes(source)
        width = widest_unit(row, source, out)
        self._by_token(
            f"put_rows_{width}", index, row // width,
            out=out, source=source, index=index, places=index.size, places_per_sequence=index.shape[1],
            rows=out.shape[1], units=row // width,
        )  # fmt: skip

    def find_continuation(
        self, history: Tensor, lengths: Tensor, most_ngram: int, least_ngram: int, tree: DraftTree
    ) -> None:
        if tree.tokens.size:
            self._launch(
                "find_continuation", (tree.tokens.shape[0],), SAMPLE_THREADS,
                histories=history, lengths=lengths, capacity=history.shape[1], most_ngram=most_ngram,
                least_ngram=least_ngram, tokens=tree.tokens, parents=tree.parents, depths=tree.depths,
                size=tree.size,
            )  # fmt: skip

    def append_history(self, tokens: Tensor, counts: Tensor, lengths: Tensor, history: Tensor) -> None:
        self._by_element(
            "append_history", tokens.size,
            tokens=tokens, counts=counts, lengths=lengths, history=history, batch=tokens.shape[0],
            width=tokens.shape[1], capacity=history.shape[1],
        )  # fmt: skip

    def advance_states(self, states: Tensor, inputs: ChainInputs, tokens: int, counts: Tensor) -> None:
        layers, batch, groups, key_dim, columns = states.shape
        keys, strengths = inputs.keys, inputs.strengths
        check_float32(states, keys, inputs.values, inputs.decays, *([] if strengths is None else [strengths]))
        check_chain(tokens)
        if states.size and counts.size:
            self._launch(
                "advance_states", (groups * -(-columns // STATE_COLUMNS), layers * counts.size),
                STATE_THREADS,
                states=states, keys=keys, values=inputs.values, decays=inputs.decays, strengths=strengths,
                counts=counts, batch=batch, rows=counts.size, tokens=tokens, heads=inputs.decays.shape[-1],
                key_heads=keys.shape[-1] // key_dim, key_dim=key_dim, groups=groups, columns=columns,
            )  # fmt: skip

    def advance_windows(self, windows: Tensor, inputs: Tensor, tokens: int, counts: Tensor) -> None:
        layers, batch, channels, past = windows.shape
        check_float32(windows, inputs)
        check_chain(tokens)
        self._by_element(
            "advance_windows", layers * counts.size * channels,
            windows=windows, inputs=inputs, counts=counts, layers=layers, batch=batch, rows=counts.size,
            tokens=tokens, channels=channels, past=past,
        )  # fmt: skip


def _widths(embedding: Tensor, out: DraftInputs, *states: Tensor) -> tuple[int, int, int]:
    """Return the unit of moves, and the bytes of a row of states and of the mask.

    Those of the mask are 0 if there is none.
    """
    row, capacity = row_bytes(embedding), 0
    width = widest_unit(row, embedding, out.embeds, *states)
    if out.mask is not None:
        capacity = out.mask.shape[3]
        width = min(width, widest_unit(capacity, out.mask))
    return width, row, capacity


def _check_table(table: DraftTable) -> None:
    """Raise ValueError for a table that is too large for the kernels' shared memory."""
    check_float32(table.scores)
    if table.top_k > MOST_CANDIDATES or table.levels > MOST_TREE_NODES:
        raise ValueError(
            f"a draft of {table.levels} levels with {table.top_k} candidates for each node; "
            f"expected at most {MOST_TREE_NODES} levels and {MOST_CANDIDATES} candidates"
        )
    if table.scores.shape[1] > MOST_TABLE_ENTRIES:
        raise ValueError(f"a table of {table.scores.shape[1]} entries, expected at most {MOST_TABLE_ENTRIES}")


def _check_tree(tree: DraftTree) -> None:
    """Raise ValueError for a tree that is too large for the kernels' shared memory."""
    if tree.size > MOST_TREE_NODES:
        raise ValueError(f"a tree of {tree.size} nodes, expected at most {MOST_TREE_NODES}")
