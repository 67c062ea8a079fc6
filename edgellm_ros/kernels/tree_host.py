# SPDX-License-Identifier: Apache-2.0
"""The kernels of speculative decoding in NumPy.

The kernels are for the CPU, and the reference for CUDA.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.host import most_likely, row_sampler, write_rope
from edgellm_ros.kernels.protocol import RopeTable, SamplingState
from edgellm_ros.kernels.tree_protocol import (
    ChainInputs,
    DraftInputs,
    DraftTable,
    DraftTree,
    check_candidates,
    check_chain,
    check_level,
    check_tree_size,
    entries,
)


class HostTreeKernels:
    """The kernels on a CPU; `TreeKernels` documents the methods.

    Chains (K = 1), the default on a CPU, take shorter ways to the same results: their entries are in the
    order of their scores, and every entry is the parent of the next one.
    """

    def add_candidates(
        self, logits: Tensor, token_of_logit: Tensor | None, table: DraftTable, level: int
    ) -> None:
        check_candidates(table, level, logits.shape[1], logits.shape[2])
        batch, count, _ = logits.shape
        all_values = logits.array.astype(np.float32, copy=False)
        top_k, start = table.top_k, entries(table.top_k, level - 1)
        if level == 1:
            table.tokens.array[:, 0], table.scores.array[:, 0], table.parents.array[:, 0] = -1, 0, -1
            parents = np.zeros((batch, 1), np.int64)
        else:
            parents = table.nodes.array[:, level - 2]
        log_masses = _log_masses(all_values)
        if top_k == 1:
            likeliest = all_values[:, 0].argmax(axis=-1)
            sums = np.take_along_axis(table.scores.array, parents, axis=-1).astype(np.float64) - log_masses
            best = np.where(np.isfinite(log_masses), sums, -np.inf)[:, 0].astype(np.float32)
            drafted = likeliest if token_of_logit is None else token_of_logit.array[likeliest]
            table.tokens.array[:, start] = np.where(best > -np.inf, drafted, -1)
            table.scores.array[:, start], table.parents.array[:, start] = best, parents[:, 0]
            return
        for row, node in np.ndindex(batch, count):
            parent = parents[row, node]
            above = np.float64(table.scores.array[row, parent])
            values, log_mass = all_values[row, node], log_masses[row, node]
            if np.isfinite(log_mass):
                ids = most_likely(values, top_k)
                own = values[ids].astype(np.float64) - float(values[ids[0]]) - log_mass
                with np.errstate(over="ignore"):
                    scores = (above + own).astype(np.float32)
            else:
                ids, scores = np.zeros(top_k, np.int64), np.full(top_k, -np.inf, np.float32)
            tokens = ids if token_of_logit is None else token_of_logit.array[ids]
            place = slice(start + node * top_k, start + (node + 1) * top_k)
            table.tokens.array[row, place] = np.where(scores > -np.inf, tokens, -1)
            table.scores.array[row, place] = scores
            table.parents.array[row, place] = parent

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
        count = tokens.shape[1]
        newest.array[:, 0] = np.clip(counts.array - 1, 0, count - 1)
        np.take(embedding.array, tokens.array, axis=0, out=out.embeds.array, mode="clip")
        slots = lengths.array[:, None] + np.arange(count)
        write_rope(rope, slots.astype(np.float32) + deltas.array[:, None], out.cos, out.sin)
        if out.filled is not None:
            out.filled.array[...] = lengths.array + count
        if out.mask is not None:
            out.mask.array[:, 0] = np.arange(out.mask.shape[3]) <= slots[..., None]

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
        top_k, own = table.top_k, np.arange(table.top_k)
        start, stop = entries(top_k, level - 1), entries(top_k, level)
        tokens, order = table.tokens.array[:, start:stop], np.zeros((len(lengths.array), 1), np.int64)
        if top_k > 1:
            order = np.argsort(-table.scores.array[:, start:stop], axis=-1, kind="stable")[:, :top_k]
            tokens = np.take_along_axis(tokens, order, axis=-1)
        table.nodes.array[:, level - 1] = start + order
        np.take(embedding.array, tokens, axis=0, out=out.embeds.array, mode="clip")
        places = np.broadcast_to(newest.array, order.shape) if level == 1 else order // top_k
        if top_k == 1 and level > 1:
            np.copyto(parents.array, states.array)
        else:
            for rows, above, taken in zip(states.array, places, parents.array, strict=True):
                np.take(rows, above, axis=0, out=taken, mode="clip")
        positions = (lengths.array + level - 1).astype(np.float32) + deltas.array
        write_rope(rope, np.repeat(positions[:, None], top_k, axis=1), out.cos, out.sin)
        if out.write_index is not None:
            out.write_index.array[...] = lengths.array + (level - 1) * top_k
        if out.filled is not None:
            out.filled.array[...] = lengths.array + level * top_k
        if out.mask is None:
            return
        if top_k == 1:
            shown = lengths.array[:, None, None] + level
            np.less(np.arange(out.mask.shape[3]), shown, out=out.mask.array[:, 0])
            return
        for row, length in enumerate(lengths.array.tolist()):
            mask, above = out.mask.array[row, 0], own
            mask[:, :length], mask[:, length:] = True, False
            for upper in range(level, 0, -1):
                slots = length + (upper - 1) * top_k + above
                inside = slots < mask.shape[1]
                mask[own[inside], slots[inside]] = True
                nodes = table.nodes.array[row, upper - 1, above]
                above = (nodes - entries(top_k, upper - 1)) // top_k

    def select_tree(self, table: DraftTable, last_tokens: Tensor, tree: DraftTree) -> None:
        check_tree_size(table, tree)
        if table.top_k == 1:
            tree.tokens.array[:, 0], tree.tokens.array[:, 1:] = (
                last_tokens.array, table.tokens.array[:, 1 : tree.size],
            )  # fmt: skip
            tree.parents.array[...] = np.arange(-1, tree.size - 1)
            tree.depths.array[...] = np.arange(tree.size)
            return
        order = np.argsort(-table.scores.array[:, 1:], axis=-1, kind="stable")[:, : tree.size - 1]
        chosen = np.sort(order, axis=-1) + 1
        tree.tokens.array[:, 0], tree.parents.array[:, 0], tree.depths.array[:, 0] = (
            last_tokens.array, -1, 0,
        )  # fmt: skip
        tree.tokens.array[:, 1:] = np.take_along_axis(table.tokens.array, chosen, axis=-1)
        # the root is node 0, so an entry's node is one more than its place among the chosen ones
        above = np.take_along_axis(table.parents.array, chosen, axis=-1)
        for row, (entries_above, own) in enumerate(zip(above, chosen, strict=True)):
            nodes = np.searchsorted(own, entries_above) + 1
            tree.parents.array[row, 1:] = np.where(entries_above == 0, 0, nodes)
        top_k = table.top_k
        tree.depths.array[:, 1:] = np.where(chosen <= top_k, 1, 2 + (chosen - 1 - top_k) // top_k**2)

    def tree_mask(self, tree: DraftTree, lengths: Tensor, out: Tensor) -> None:
        size = tree.size
        for row, length in enumerate(lengths.array.tolist()):
            mask = out.array[row, 0]
            if (tree.depths.array[row] == np.arange(size)).all():
                np.less(np.arange(mask.shape[1]), length + 1 + np.arange(size)[:, None], out=mask)
                continue
            mask[:, :length], mask[:, length:] = True, False
            # each product doubles the distance up to which ancestors are marked
            marks = np.eye(size, dtype=np.float32)
            marks[np.arange(1, size), tree.parents.array[row, 1:]] = 1
            distance, deepest = 1, int(tree.depths.array[row].max())
            while distance < deepest:
                marks = np.minimum(marks @ marks, 1)
                distance *= 2
            slots = mask[:, length : length + size]
            slots[...] = marks[:, : slots.shape[1]]

    def tree_rope_rows(
        self, table: RopeTable, lengths: Tensor, deltas: Tensor, depths: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        tokens = lengths.array[:, None] + depths.array
        write_rope(table, tokens.astype(np.float32) + deltas.array[:, None], cos, sin)

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
        batch, most = path.shape
        for row in range(batch):
            limit = min(most, int(state.path_limit.array[row]))
            above, drafted = tree.parents.array[row].tolist(), tree.tokens.array[row].tolist()
            children: dict[tuple[int, int], int] = {}  # by parent and token, the first one counts
            for node, key in enumerate(zip(above, drafted, strict=True)):
                children.setdefault(key, node)
            sample = row_sampler(logits.array[row], state, row)
            indices: list[int] = []
            ids: list[int] = []
            nodes = [0]
            while True:
                index = sample(nodes[-1], indices)
                token = index if index < 0 or vocab_map is None else int(vocab_map.array[index])
                indices.append(index)
                ids.append(token)
                if index < 0 or len(ids) >= limit:
                    break
                child = children.get((nodes[-1], token))
                if child is None:
                    break
                nodes.append(child)
            count = len(ids)
            for out, values, rest in ((sampled, indices, -1), (tokens, ids, -1), (path, nodes, nodes[-1])):
                out.array[row, :count], out.array[row, count:] = values, rest
            offered.array[row] = count

    def move_cache_rows(
        self, cache: Tensor, first_row: int, lengths: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        capacity = cache.shape[3]
        for row, (length, count) in enumerate(
            zip(lengths.array.tolist(), counts.array.tolist(), strict=True)
        ):
            source = length + path.array[row, :count]
            target = length + np.arange(count)
            moved = (source != target) & (source < capacity)
            if not moved.any():
                continue
            rows = cache.array[:, first_row + row]
            rows[:, :, target[moved]] = rows[:, :, source[moved]]

    def take_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        for rows, places, taken in zip(source.array, index.array, out.array, strict=True):
            np.take(rows, places, axis=0, out=taken, mode="clip")

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
        for row, count in enumerate(counts.array.tolist()):
            if count == 0:
                lengths.array[row] -= out_counts.array[row]
                continue
            np.take(states.array[row], path.array[row], axis=0, out=out_states.array[row], mode="clip")
            out_tokens.array[row], out_counts.array[row] = tokens.array[row], count

    def put_rows(self, source: Tensor, index: Tensor, out: Tensor) -> None:
        for rows, places, target in zip(source.array, index.array, out.array, strict=True):
            known = (places >= 0) & (places < len(target))
            target[places[known]] = rows[known]

    def find_continuation(
        self, history: Tensor, lengths: Tensor, most_ngram: int, least_ngram: int, tree: DraftTree
    ) -> None:
        capacity = history.shape[1]
        tree.parents.array[...] = np.arange(-1, tree.size - 1)
        tree.depths.array[...] = np.arange(tree.size)
        for row, newest in enumerate(lengths.array.tolist()):
            chain = tree.tokens.array[row]
            chain[...] = -1
            if not 0 <= newest < capacity:
                continue
            entry = history.array[row, : newest + 1]
            chain[0] = entry[newest]
            end = _earlier_occurrence(entry, most_ngram, least_ngram)
            if end >= 0:
                chain[1:] = entry[end + 1 + np.arange(tree.size - 1) % (newest - end)]

    def append_history(self, tokens: Tensor, counts: Tensor, lengths: Tensor, history: Tensor) -> None:
        capacity = history.shape[1]
        for row, count in enumerate(counts.array.tolist()):
            places = int(lengths.array[row]) - count + 1 + np.arange(count)
            inside = (places >= 0) & (places < capacity)
            history.array[row, places[inside]] = tokens.array[row, :count][inside]

    def advance_states(self, states: Tensor, inputs: ChainInputs, tokens: int, counts: Tensor) -> None:
        check_chain(tokens)
        rows = len(counts.array)
        keys, values, decays = (
            _written(x, rows, tokens) for x in (inputs.keys, inputs.values, inputs.decays)
        )
        strengths = None if inputs.strengths is None else _written(inputs.strengths, rows, tokens)
        for row, count in enumerate(counts.array.tolist()):
            for layer in range(len(states.array) if count else 0):
                at = layer, row, slice(count)
                own = None if strengths is None else strengths[at]
                _advance_state(states.array[layer, row], keys[at], values[at], decays[at], own)

    def advance_windows(self, windows: Tensor, inputs: Tensor, tokens: int, counts: Tensor) -> None:
        check_chain(tokens)
        past = windows.shape[3]
        new = _written(inputs, len(counts.array), tokens).transpose(0, 1, 3, 2)
        for row, count in enumerate(counts.array.tolist()):
            window = windows.array[:, row]
            window[...] = np.concatenate([window, new[:, row, :, :count]], axis=-1)[..., -past:]


def _written(inputs: Tensor, rows: int, tokens: int) -> np.ndarray:
    """Return what a run wrote [L,rows,tokens,width] to a tensor of `ChainInputs`."""
    layers, width = inputs.shape[0], inputs.shape[-1]
    flat = inputs.array.reshape(layers, -1)[:, : rows * tokens * width]
    return flat.reshape(layers, rows, tokens, width)


def _advance_state(
    state: np.ndarray, keys: np.ndarray, values: np.ndarray, decays: np.ndarray, strengths: np.ndarray | None
) -> None:
    """Change the state [groups,dk,columns] of one layer and row.

    keys [tokens,...], and so on.
    """
    (tokens, heads), (_, key_dim, columns) = decays.shape, state.shape
    state = state.reshape(heads, -1, key_dim, columns)
    k = keys.reshape(tokens, -1, key_dim).transpose(1, 0, 2)  # [heads,tokens,dk]
    k = np.repeat(k, heads // len(k), axis=0)
    updates = values.reshape(tokens, heads, -1, columns).transpose(1, 2, 0, 3)  # [heads,parts,tokens,columns]
    logs = np.cumsum(decays, axis=0).T  # [heads,tokens]
    if strengths is not None:
        known = (k[:, None] @ state) * np.exp(logs)[:, None, :, None]
        strength = strengths.T[:, None, :, None]
        updates = strength * (updates - known)
        between = np.exp(np.minimum(logs[:, :, None] - logs[:, None], 0))
        products = k @ k.transpose(0, 2, 1) * between * strengths.T[:, :, None]
        for token in range(1, tokens):
            before = products[:, token, :token], updates[:, :, :token]
            updates[:, :, token] -= np.einsum("ht,hptc->hpc", *before)
    faded = k * np.exp(logs[:, -1:] - logs)[..., None]
    state *= np.exp(logs[:, -1])[:, None, None, None]
    state += faded.transpose(0, 2, 1)[:, None] @ updates


def _log_masses(logits: np.ndarray) -> np.ndarray:
    """Return log(sum(exp(logits - max))) of rows [B,R,V] as float64.

    The result is NaN where a row is not finite.
    """
    highest, lowest = logits.max(axis=-1), logits.min(axis=-1)
    finite = np.isfinite(highest) & np.isfinite(lowest)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        distances = logits - highest[..., None]
        masses = np.exp(distances, out=distances).sum(axis=-1)
        return np.where(finite, np.log(masses.astype(np.float64)), np.nan)


def _earlier_occurrence(entry: np.ndarray, most_ngram: int, least_ngram: int) -> int:
    """Return the last entry of the longest earlier occurrence of the newest tokens.

    Of several, the latest counts. -1: there is none.
    """
    newest = len(entry) - 1
    ends = np.arange(least_ngram - 1, newest)
    found = -1
    for back in range(most_ngram):
        token = entry[newest - back] if back <= newest else -1
        ends = ends[ends >= back]
        ends = ends[entry[ends - back] == token] if token >= 0 else ends[:0]
        if not len(ends):
            break
        if back + 1 >= least_ngram:
            found = int(ends[-1])
    return found
