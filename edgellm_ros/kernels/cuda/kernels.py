# SPDX-License-Identifier: Apache-2.0
"""The kernels on CUDA tensors: their arguments and launch sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.engine.device import on_device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.launches import (
    WIDEST,
    CudaLaunches,
    check_float32,
    check_logits,
    lowest_bit,
    row_bytes,
    widest_unit,
)
from edgellm_ros.kernels.cuda.layout import MOST_LOGPROBS, SAMPLE_THREADS
from edgellm_ros.kernels.protocol import EXCLUDED, PatchLayout, RopeTable, SamplingState, StopState
from edgellm_ros.kernels.resampling import bicubic_weights, height_first

MAX_CACHED_WEIGHTS = 32


@dataclass(frozen=True)
class ResizeWeights:
    """Weights of `bicubic_weights` on the device."""

    first: Tensor
    weights: Tensor

    @property
    def taps(self) -> int:
        """Return the number of weights of a pixel."""
        return self.weights.shape[1]


class CudaKernels(CudaLaunches):
    """The kernels on a GPU; `Kernels` documents the methods."""

    def __init__(self, device: Any, program: Any) -> None:
        super().__init__(device, program)
        self._half_resized = device.empty((0,), np.uint8)  # an image resized in one direction
        self._resizing: OrderedDict[tuple[int, int], ResizeWeights] = OrderedDict()  # by both sizes

    def resize(self, image: Tensor, out: Tensor) -> None:
        (height, width, channels), (_, out_height, out_width) = image.shape, out.shape
        across, down = self._weights(width, out_width), self._weights(height, out_height)
        if height_first((height, width), (out_height, out_width)):
            between = self._between(out_height * width * channels)
            self._resize_height(between, image, down, 1, height, out_height, width * channels)
            self._resize_width(out, between, across, channels, out_height, width, out_width)
        else:
            between = self._between(channels * height * out_width)
            self._resize_width(between, image, across, channels, height, width, out_width)
            self._resize_height(out, between, down, channels, height, out_height, out_width)

    def _resize_width(
        self, out: Tensor, image: Tensor, weights: ResizeWeights, channels: int, height: int, *widths: int
    ) -> None:
        self._by_element(
            "resize_width", channels * height * widths[1],
            out.pointer, image.pointer, weights.first.pointer, weights.weights.pointer,
            channels, height, *widths, weights.taps,
        )  # fmt: skip

    def _resize_height(
        self, out: Tensor, planes: Tensor, weights: ResizeWeights, count: int, height: int, *sizes: int
    ) -> None:
        self._by_element(
            "resize_height", count * sizes[0] * sizes[1],
            out.pointer, planes.pointer, weights.first.pointer, weights.weights.pointer,
            count, height, *sizes, weights.taps,
        )  # fmt: skip

    def cut_patches(self, levels: Tensor, frames: Tensor, layout: PatchLayout, out: Tensor) -> None:
        check_float32(levels, out)
        count, channels, height, width = frames.shape
        repeated = out.shape[-1] // (channels * layout.patch_size**2)
        self._by_element(
            "cut_patches", out.size,
            out.pointer, levels.pointer, frames.pointer, out.size, count, repeated, channels, height, width,
            layout.tile_height, layout.tile_width, layout.patch_size, layout.block_size // layout.patch_size,
        )  # fmt: skip

    def embed(self, token_ids: Tensor, table: Tensor, multimodal_rows: Tensor, out: Tensor) -> None:
        row = row_bytes(out)
        width = widest_unit(row, table, multimodal_rows, out)
        self._by_token(
            f"embed_{width}", token_ids, row // width,
            out.pointer, token_ids.pointer, table.pointer, multimodal_rows.pointer,
            token_ids.size, table.shape[0], multimodal_rows.shape[0], row // width,
        )  # fmt: skip

    def deepstack(self, token_ids: Tensor, vocab_size: int, multimodal_rows: Tensor, out: Tensor) -> None:
        row = row_bytes(out)
        width = widest_unit(row, multimodal_rows, out)
        self._by_token(
            f"deepstack_{width}", token_ids, row // width,
            out.pointer, token_ids.pointer, multimodal_rows.pointer,
            token_ids.size, vocab_size, multimodal_rows.shape[0], row // width,
        )  # fmt: skip

    def rope_rows(
        self,
        table: RopeTable,
        lengths: Tensor,
        deltas: Tensor,
        cos: Tensor,
        sin: Tensor,
        filled: Tensor | None = None,
    ) -> None:
        check_float32(table.cos, table.sin, table.frequencies, deltas, cos, sin)
        self._by_element(
            "rope_rows", cos.size,
            cos.pointer, sin.pointer, table.cos.pointer, table.sin.pointer, table.frequencies.pointer,
            lengths.pointer, deltas.pointer, cos.shape[0], cos.shape[1], *table.cos.shape,
            0 if filled is None else filled.pointer,
        )  # fmt: skip
        if filled is not None and not cos.size:  # without a launch
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
        check_float32(table.cos, table.sin, table.frequencies, positions, cos, sin)
        time, height, width = mrope_section or (cos.shape[2], 0, 0)
        self._by_element(
            "mrope_rows", cos.size,
            cos.pointer, sin.pointer, table.cos.pointer, table.sin.pointer, table.frequencies.pointer,
            positions.pointer, cos.shape[0], cos.shape[1], *table.cos.shape,
            time, height, width, int(interleaved),
        )  # fmt: skip

    def causal_mask(self, lengths: Tensor, out: Tensor) -> None:
        batch, _, steps, capacity = out.shape
        width = widest_unit(capacity, out)
        self._by_element(
            f"causal_mask_{width}", out.size // width,
            out.pointer, lengths.pointer, batch, steps, capacity // width,
        )  # fmt: skip

    def visible_rows(self, lengths: Tensor, steps: int, out: Tensor) -> None:
        self._by_element("visible_rows", out.size, out.pointer, lengths.pointer, out.size, steps)

    def copy_cache_rows(
        self,
        source: Tensor,
        source_at: tuple[int, int],
        target: Tensor,
        target_at: tuple[int, int],
        count: int,
    ) -> None:
        layers, _, heads, _, _ = source.shape
        row = row_bytes(source)
        addresses, strides = [], []
        for cache, (sequence, first) in ((target, target_at), (source, source_at)):
            _, batch, _, capacity, _ = cache.shape
            addresses.append(cache.pointer + (sequence * heads * capacity + first) * row)
            strides += [batch * heads * capacity * row, capacity * row]
        width = lowest_bit(WIDEST, row, *addresses)
        self._by_plane(
            f"copy_cache_rows_{width}", layers * heads, count * row // width,
            *addresses, layers, heads, *(stride // width for stride in strides), count * row // width,
        )  # fmt: skip

    def mask_logits(self, logits: Tensor, masks: Tensor) -> None:
        check_float32(logits)
        vocab, words = logits.shape[-1], masks.shape[-1]
        if masks.size * vocab != logits.size * words or words * 32 < vocab:
            raise ValueError(f"the masks of {logits!r} must have a bit for each logit, got {masks!r}")
        self._by_element(
            "mask_logits", logits.size,
            logits.pointer, masks.pointer, logits.size, vocab, words, EXCLUDED,
        )  # fmt: skip

    def sample(self, logits: Tensor, state: SamplingState, tokens: Tensor) -> None:
        rows, vocab = tokens.size, logits.shape[-1]
        check_logits(logits, state.seen.shape[-1])
        if not rows:
            return
        blocks = self._sampling_blocks(rows, vocab)
        self._program.launch(
            "sample", (blocks, rows), SAMPLE_THREADS,
            logits.pointer, vocab, state.temperature.pointer, state.top_k.pointer, state.top_p.pointer,
            state.min_p.pointer, state.repetition_penalty.pointer, state.seed.pointer, state.position.pointer,
            state.seen.pointer, tokens.pointer, tokens.shape[1], self._sampling_scratch(rows),
            cooperative=blocks > 1,
        )  # fmt: skip

    def map_tokens(self, tokens: Tensor, vocab_map: Tensor, out: Tensor) -> None:
        self._by_element(
            "map_tokens", out.size,
            out.pointer, tokens.pointer, vocab_map.pointer, out.size, vocab_map.size,
        )  # fmt: skip

    def count_tokens(self, tokens: Tensor, offered: Tensor, state: StopState, counts: Tensor) -> None:
        self._by_element(
            "count_tokens", counts.size,
            tokens.pointer, offered.pointer, state.tokens_left.pointer, state.trigger_token.pointer,
            state.stop_ids.pointer, state.stop_ids.size, counts.pointer, *tokens.shape,
        )  # fmt: skip

    def commit_tokens(
        self, sampled: Tensor, tokens: Tensor, counts: Tensor, state: SamplingState, last_tokens: Tensor
    ) -> None:
        self._by_element(
            "commit_tokens", counts.size,
            sampled.pointer, tokens.pointer, counts.pointer, state.position.pointer, state.seen.pointer,
            last_tokens.pointer, *tokens.shape, state.seen.shape[1],
        )  # fmt: skip

    def commit_rows(self, lengths: Tensor, counts: Tensor) -> None:
        self._by_element("commit_rows", lengths.size, lengths.pointer, counts.pointer, lengths.size)

    def commit_states(self, states: Tensor, next_states: Tensor, first_row: int, counts: Tensor) -> None:
        layers, batch, _ = states.shape
        row, rows = row_bytes(states), counts.size
        width = widest_unit(row, states, next_states)
        self._by_plane(
            f"commit_states_{width}", layers * rows, row // width,
            states.pointer, next_states.pointer, counts.pointer, layers, batch, first_row, rows, row // width,
        )  # fmt: skip

    def log_probabilities(self, logits: Tensor, tokens: Tensor, top_ids: Tensor, top_values: Tensor) -> None:
        rows, vocab, width = tokens.size, logits.shape[-1], top_ids.shape[-1]
        check_logits(logits, vocab)
        most = min(vocab, MOST_LOGPROBS)
        if not 0 <= width - 1 <= most:
            raise ValueError(f"{width - 1} most likely tokens requested, expected at most {most}")
        if rows:
            self._program.launch(
                "log_probabilities", (rows,), SAMPLE_THREADS,
                logits.pointer, vocab, tokens.pointer, top_ids.pointer, top_values.pointer, width,
            )  # fmt: skip

    def euler_step(self, x: Tensor, velocity: Tensor, dt: float, time: Tensor, next_time: float) -> None:
        check_float32(x, velocity, time)
        self._by_element(
            "euler_step", x.size,
            x.pointer, velocity.pointer, x.size, float(dt), time.pointer, time.size, float(next_time),
        )  # fmt: skip

    def conditioned_step(
        self, x: Tensor, velocity: Tensor, previous: Tensor, factors: Tensor, dt: float, time: Tensor
    ) -> None:
        check_float32(x, velocity, previous, factors, time)
        self._by_element(
            "conditioned_step", x.size,
            x.pointer, velocity.pointer, previous.pointer, factors.pointer, x.size, *previous.shape,
            float(dt), time.pointer, time.size,
        )  # fmt: skip

    def _between(self, size: int) -> Tensor:
        if self._half_resized.size < size:
            self._half_resized = self._device.empty((size,), np.uint8)
        return self._half_resized

    def _weights(self, size: int, out_size: int) -> ResizeWeights:
        """Return the weights of a direction on the device; a camera always needs the same."""
        key = size, out_size
        if key in self._resizing:
            self._resizing.move_to_end(key)
            return self._resizing[key]
        arrays = bicubic_weights(size, out_size)
        self._resizing[key] = found = ResizeWeights(*(on_device(self._device, array) for array in arrays))
        if len(self._resizing) > MAX_CACHED_WEIGHTS:
            self._resizing.popitem(last=False)
        return found
