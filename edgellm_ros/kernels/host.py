# SPDX-License-Identifier: Apache-2.0
"""The kernels in NumPy: for CPU inference, and as the reference for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.action_protocol import DenoisingFactors
from edgellm_ros.kernels.host_pixels import HostPixelKernels
from edgellm_ros.kernels.protocol import (
    EXCLUDED,
    RopeTable,
    RowLimits,
    SamplingState,
    StopState,
)
from edgellm_ros.kernels.random import token_uniform

ALL = slice(None)
# Of the series of the cosine, and of the sine divided by the angle.
COSINE = np.float32(1) / np.array([1, -2, 24, -720, 40320, -3628800], np.float32)
SINE = np.float32(1) / np.array([1, -6, 120, -5040, 362880, -39916800], np.float32)


class HostKernels(HostPixelKernels):
    """The kernels on a CPU; `Kernels` documents the methods."""

    def embed(self, token_ids: Tensor, table: Tensor, multimodal_rows: Tensor, out: Tensor) -> None:
        ids, vocab_size = token_ids.array, table.shape[0]
        is_multimodal = ids >= vocab_size
        if not is_multimodal.any():
            # mode "clip" writes to `out` without a buffer
            np.take(table.array, ids, axis=0, out=out.array, mode="clip")
            return
        np.take(table.array, np.minimum(ids, vocab_size - 1), axis=0, out=out.array, mode="clip")
        out.array[is_multimodal] = multimodal_rows.array[ids[is_multimodal] - vocab_size]

    def deepstack(self, token_ids: Tensor, vocab_size: int, multimodal_rows: Tensor, out: Tensor) -> None:
        is_multimodal = token_ids.array >= vocab_size
        out.array[...] = 0
        out.array[is_multimodal] = multimodal_rows.array[token_ids.array[is_multimodal] - vocab_size]

    def rope_rows(
        self,
        table: RopeTable,
        lengths: Tensor,
        deltas: Tensor,
        cos: Tensor,
        sin: Tensor,
        filled: Tensor | None = None,
    ) -> None:
        tokens = lengths.array[:, None] + np.arange(cos.shape[1])
        write_rope(table, tokens.astype(np.float32) + deltas.array[:, None], cos, sin)
        if filled is not None:
            self.visible_rows(lengths, cos.shape[1], filled)

    def mrope_rows(
        self,
        table: RopeTable,
        positions: Tensor,
        mrope_section: Sequence[int],
        interleaved: bool,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        write_rope(table, positions.array[:, 0], cos, sin)
        for axis in (1, 2) if mrope_section else ():
            first = sum(mrope_section[:axis])
            block = slice(first, first + mrope_section[axis])
            chosen = slice(axis, 3 * mrope_section[axis], 3) if interleaved else block
            write_rope(table, positions.array[:, axis], cos, sin, chosen)

    def causal_mask(self, lengths: Tensor, out: Tensor) -> None:
        _, _, steps, capacity = out.shape
        last_seen = lengths.array[:, None] + np.arange(steps)
        np.less_equal(np.arange(capacity), last_seen[:, None, :, None], out=out.array)

    def visible_rows(self, lengths: Tensor, steps: int, out: Tensor) -> None:
        np.add(lengths.array, steps, out=out.array)

    def copy_cache_rows(
        self,
        source: Tensor,
        source_at: tuple[int, int],
        target: Tensor,
        target_at: tuple[int, int],
        count: int,
    ) -> None:
        sequence, row = source_at
        rows = source.array[:, sequence, :, row : row + count]
        sequence, row = target_at
        target.array[:, sequence, :, row : row + count] = rows

    def copy_cache_ranges(self, source: Tensor, target: Tensor, ranges: Tensor) -> None:
        for source_sequence, source_row, target_sequence, target_row, count in ranges.array.tolist():
            source_at, target_at = (source_sequence, source_row), (target_sequence, target_row)
            self.copy_cache_rows(source, source_at, target, target_at, count)

    def begin_rows(self, starts: Tensor, offsets: Tensor, lengths: Tensor, deltas: Tensor) -> None:
        lengths.array[:] = starts.array
        deltas.array[:] = offsets.array

    def mask_logits(self, logits: Tensor, masks: Tensor) -> None:
        vocab = logits.shape[-1]
        words = masks.shape[-1]
        for row, mask in zip(logits.array.reshape(-1, vocab), masks.array.reshape(-1, words), strict=True):
            missing = ~mask.view(np.uint8)
            if not missing.any():
                continue
            excluded = np.unpackbits(missing, count=vocab, bitorder="little").view(bool) & np.isfinite(row)
            chosen = -excluded.view(np.int8).astype(np.int32)  # all bits of excluded logits
            bits = row.view(np.int32)
            bits ^= (bits ^ np.float32(EXCLUDED).view(np.int32)) & chosen  # no branches: 5 times as fast

    def sample(self, logits: Tensor, state: SamplingState, tokens: Tensor) -> None:
        for row, sampled in enumerate(tokens.array):
            for offset in range(len(sampled)):
                sampled[offset] = sample_row(logits.array[row, offset], state, row, offset)

    def map_tokens(self, tokens: Tensor, vocab_map: Tensor, out: Tensor) -> None:
        np.take(vocab_map.array, tokens.array, out=out.array, mode="clip")
        out.array[tokens.array < 0] = -1

    def count_tokens(self, tokens: Tensor, offered: Tensor, state: StopState, counts: Tensor) -> None:
        tokens_left, trigger_token = state.tokens_left.array, state.trigger_token.array
        stop_ids = state.stop_ids.array.tolist()
        for row, sampled in enumerate(tokens.array.tolist()):
            left = int(tokens_left[row])
            taken = sampled[: max(0, min(int(offered.array[row]), left))]
            left -= len(taken)
            for place, token in enumerate(taken):
                if token >= 0 and token in stop_ids:
                    taken, left = taken[: place + 1], int(token == trigger_token[row])
                    break
            counts.array[row], tokens_left[row] = len(taken), left

    def open_row(
        self,
        row: int,
        rules: Mapping[str, float],
        limits: RowLimits,
        state: SamplingState,
        stop: StopState,
    ) -> None:
        for name, value in rules.items():
            state.rules[name].array[row] = value
        state.position.array[row] = 0
        state.path_limit.array[row] = limits.path_limit
        stop.tokens_left.array[row], stop.trigger_token.array[row] = limits.tokens_left, limits.trigger_token

    def move_row(
        self, source: int, target: int, state: SamplingState, stop: StopState, last_tokens: Tensor
    ) -> None:
        for tensor in (*vars(state).values(), stop.tokens_left, stop.trigger_token, last_tokens):
            tensor.array[target] = tensor.array[source]

    def commit_tokens(
        self, sampled: Tensor, tokens: Tensor, counts: Tensor, state: SamplingState, last_tokens: Tensor
    ) -> None:
        for row, count in enumerate(counts.array.tolist()):
            if count:
                taken = sampled.array[row, :count]
                state.seen.array[row, taken[taken >= 0]] = True
                state.position.array[row] += count
                last_tokens.array[row] = tokens.array[row, count - 1]

    def commit_rows(self, lengths: Tensor, counts: Tensor) -> None:
        lengths.array += counts.array

    def commit_states(self, states: Tensor, next_states: Tensor, first_row: int, counts: Tensor) -> None:
        rows = first_row + np.flatnonzero(counts.array > 0)
        states.array[:, rows] = next_states.array[:, rows]

    def log_probabilities(self, logits: Tensor, tokens: Tensor, top_ids: Tensor, top_values: Tensor) -> None:
        count = top_ids.shape[-1] - 1
        for place in np.ndindex(*tokens.shape):
            scores = logits.array[place].astype(np.float64)
            scores -= scores.max()
            scores -= np.log(np.exp(scores).sum())
            top_ids.array[place][:count] = np.argsort(-scores, kind="stable")[:count]
            top_ids.array[place][count] = tokens.array[place]
            top_values.array[place] = scores[top_ids.array[place]]

    def euler_step(self, x: Tensor, velocity: Tensor, dt: float, time: Tensor, next_time: float) -> None:
        x.array += np.float32(dt) * velocity.array
        time.array[:] = next_time

    def conditioned_step(
        self, x: Tensor, velocity: Tensor, previous: Tensor, factors: Tensor, dt: float, time: Tensor
    ) -> None:
        strength, pull, next_times = factors.array
        step = strength[:, None] * velocity.array + pull[:, None] * (previous.array - x.array)
        x.array += np.float32(dt) * step
        time.array[:] = next_times[: time.size]

    def denoising_step(
        self,
        x: Tensor,
        output: Tensor,
        noise: Tensor | None,
        factors: DenoisingFactors,
        time: Tensor,
        next_time: float,
    ) -> None:
        f = {name: np.float32(value) for name, value in vars(factors).items()}
        clean = (f["of_x"] * x.array + f["of_output"] * output.array) / f["divisor"]
        clean = np.clip(clean, -f["limit"], f["limit"])
        moved = f["clean_share"] * clean + f["x_share"] * x.array + f["output_share"] * output.array
        x.array[:] = moved if noise is None else moved + f["noise_share"] * noise.array
        time.array[:] = next_time


def write_rope(
    table: RopeTable, positions: np.ndarray, cos: Tensor, sin: Tensor, chosen: slice = ALL
) -> None:
    """Write the chosen frequencies of tokens at positions [B,S] f32."""
    floors = np.floor(positions)
    whole = floors.astype(np.int64)
    for source, target in ((table.cos.array, cos.array), (table.sin.array, sin.array)):
        if chosen is ALL:  # mode "clip" writes to `out` without a buffer
            np.take(source, whole, axis=0, out=target, mode="clip")
        else:
            target[..., chosen] = np.take(source[:, chosen], whole, axis=0, mode="clip")
    between = positions != floors
    if between.any():
        beyond = (positions - floors)[between][:, None] * table.frequencies.array[chosen]
        small_cos, small_sin = _series(COSINE, beyond), _series(SINE, beyond) * beyond
        table_cos, table_sin = cos.array[between, chosen], sin.array[between, chosen]
        cos.array[between, chosen] = table_cos * small_cos - table_sin * small_sin
        sin.array[between, chosen] = table_sin * small_cos + table_cos * small_sin


def _series(coefficients: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Compute a series of the squares of angles, in the order of the CUDA kernel."""
    squares, total = angles * angles, coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * squares + coefficient
    return total


def sample_row(
    logits: np.ndarray, state: SamplingState, row: int, offset: int, path: Sequence[int] = ()
) -> int:
    """Sample the token `offset` positions after a sequence's next one.

    Returns -1 if the logits are not finite. logits [V] float32. path: logit indices that count as seen too.
    """
    if not np.isfinite(logits).all():
        return -1
    temperature = float(state.temperature.array[row])
    penalty = float(state.repetition_penalty.array[row])
    if penalty != 1.0:
        seen = state.seen.array[row]
        if path:
            seen = seen.copy()
            seen[list(path)] = True
        logits = np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits)
    if temperature == 0.0:
        return int(np.argmax(logits))
    scores = logits.astype(np.float64)
    top_k = int(state.top_k.array[row])
    order = most_likely(logits, top_k) if 0 < top_k < len(scores) else np.argsort(-scores, kind="stable")
    probabilities = np.exp((scores[order] - scores[order[0]]) / temperature)
    probabilities /= probabilities.sum()
    kept = len(order)  # both filters below keep the first tokens of this order
    top_p, min_p = float(state.top_p.array[row]), float(state.min_p.array[row])
    if top_p < 1.0:
        mass_before = np.cumsum(probabilities) - probabilities
        kept = max(1, int(np.searchsorted(mass_before, top_p)))
    if min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(probabilities >= min_p * probabilities[0])))
    cumulative = np.cumsum(probabilities[:kept])
    uniform = token_uniform(int(state.seed.array[row]), int(state.position.array[row]) + offset)
    place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(order[min(place, kept - 1)])


def row_sampler(logits: np.ndarray, state: SamplingState, row: int) -> Callable[[int, Sequence[int]], int]:
    """Return a function that samples at one of several nodes.

    The function takes a node and the logit indices of its path, and returns an index.

    logits [M,V] float32 of the nodes. The result is that of `sample_row`; without a temperature and a penalty
    all nodes are sampled at once.
    """
    if float(state.temperature.array[row]) or float(state.repetition_penalty.array[row]) != 1.0:
        return lambda node, path: sample_row(logits[node], state, row, len(path), path)
    likeliest = np.where(np.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1).tolist()
    return lambda node, path: likeliest[node]


def most_likely(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the highest of logits [V], in falling order.

    Among equals the lower index comes first. Of V / width groups, `count` have a maximum that reaches the
    count-th highest one. So only logits that reach this one can be among the highest, and few do.
    """
    size = len(logits)
    width = max(1, size // (16 * count))
    groups = size // width
    maxima = logits[: groups * width].reshape(groups, width).max(axis=-1)
    least = np.partition(maxima, groups - count)[groups - count]
    indices = np.flatnonzero(logits >= least)
    return indices[np.argsort(-logits[indices], kind="stable")[:count]]
