# SPDX-License-Identifier: Apache-2.0
"""The kernels on CUDA tensors: their arguments and launch sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.engine.device import on_device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.bilinear import LEVEL, Placement, line_scale
from edgellm_ros.kernels.cuda.action_kernels import CudaActionKernels
from edgellm_ros.kernels.cuda.launches import (
    WIDEST,
    check_float32,
    check_logits,
    lowest_bit,
    of_table,
    row_bytes,
    widest_unit,
)
from edgellm_ros.kernels.cuda.layout import MOST_LOGPROBS, SAMPLE_THREADS
from edgellm_ros.kernels.protocol import (
    EXCLUDED,
    RULES,
    PatchLayout,
    RopeTable,
    RowLimits,
    SamplingState,
    StopState,
)
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


class CudaKernels(CudaActionKernels):
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
            self._resize_height(between, image, down, (1, height, out_height, width * channels))
            self._resize_width(out, between, across, (channels, out_height, width, out_width))
        else:
            between = self._between(channels * height * out_width)
            self._resize_width(between, image, across, (channels, height, width, out_width))
            self._resize_height(out, between, down, (channels, height, out_height, out_width))

    def _resize_width(
        self, out: Tensor, image: Tensor, weights: ResizeWeights, sizes: tuple[int, int, int, int]
    ) -> None:
        channels, height, width, out_width = sizes
        self._by_element(
            "resize_width", channels * height * out_width,
            out=out, image=image, first=weights.first, weights=weights.weights, channels=channels,
            height=height, width=width, out_width=out_width, taps=weights.taps,
        )  # fmt: skip

    def _resize_height(
        self, out: Tensor, planes: Tensor, weights: ResizeWeights, sizes: tuple[int, int, int, int]
    ) -> None:
        count, height, out_height, width = sizes
        self._by_element(
            "resize_height", count * out_height * width,
            out=out, planes=planes, first=weights.first, weights=weights.weights, count=count,
            height=height, out_height=out_height, width=width, taps=weights.taps,
        )  # fmt: skip

    def place_image(self, image: Tensor, placement: Placement, fill: float, out: Tensor) -> None:
        check_float32(out)
        height, width, _ = image.shape
        self._by_element(
            "place_image", out.size,
            out=out, image=image, side=out.shape[-1], height=height, width=width,
            row_scale=float(line_scale(height, placement.rows)),
            column_scale=float(line_scale(width, placement.columns)),
            level=LEVEL, fill=float(fill), **vars(placement),
        )  # fmt: skip

    def cut_patches(self, levels: Tensor, frames: Tensor, layout: PatchLayout, out: Tensor) -> None:
        check_float32(levels, out)
        count, channels, height, width = frames.shape
        repeated = out.shape[-1] // (channels * layout.patch_size**2)
        self._by_element(
            "cut_patches", out.size,
            out=out, levels=levels, pixels=frames, size=out.size, frames=count, repeated=repeated,
            channels=channels, height=height, width=width, tile_height=layout.tile_height,
            tile_width=layout.tile_width, patch=layout.patch_size,
            merge=layout.block_size // layout.patch_size,
        )  # fmt: skip

    def embed(self, token_ids: Tensor, table: Tensor, multimodal_rows: Tensor, out: Tensor) -> None:
        row = row_bytes(out)
        width = widest_unit(row, table, multimodal_rows, out)
        self._by_token(
            f"embed_{width}", token_ids, row // width,
            out=out, ids=token_ids, table=table, multimodal=multimodal_rows, tokens=token_ids.size,
            vocab=table.shape[0], multimodal_count=multimodal_rows.shape[0], units=row // width,
        )  # fmt: skip

    def deepstack(self, token_ids: Tensor, vocab_size: int, multimodal_rows: Tensor, out: Tensor) -> None:
        row = row_bytes(out)
        width = widest_unit(row, multimodal_rows, out)
        self._by_token(
            f"deepstack_{width}", token_ids, row // width,
            out=out, ids=token_ids, multimodal=multimodal_rows, tokens=token_ids.size, vocab=vocab_size,
            multimodal_count=multimodal_rows.shape[0], units=row // width,
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
            cos=cos, sin=sin, **of_table(table), lengths=lengths, deltas=deltas, batch=cos.shape[0],
            steps=cos.shape[1], filled=filled,
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
            cos=cos, sin=sin, cos_table=table.cos, sin_table=table.sin, radians=table.frequencies,
            positions=positions, batch=cos.shape[0], steps=cos.shape[1],
            table_positions=table.cos.shape[0], frequencies=table.cos.shape[1], time=time, height=height,
            width=width, interleaved=int(interleaved),
        )  # fmt: skip

    def causal_mask(self, lengths: Tensor, out: Tensor) -> None:
        batch, _, steps, capacity = out.shape
        width = widest_unit(capacity, out)
        self._by_element(
            f"causal_mask_{width}", out.size // width,
            out=out, lengths=lengths, batch=batch, steps=steps, units=capacity // width,
        )  # fmt: skip

    def visible_rows(self, lengths: Tensor, steps: int, out: Tensor) -> None:
        self._by_element("visible_rows", out.size, out=out, lengths=lengths, batch=out.size, steps=steps)

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
        addresses: list[int] = []
        strides: dict[str, int] = {}
        for name, cache, (sequence, first) in (("target", target, target_at), ("source", source, source_at)):
            _, batch, _, capacity, _ = cache.shape
            addresses.append(cache.pointer + (sequence * heads * capacity + first) * row)
            strides |= {f"{name}_layer_stride": batch * heads * capacity * row}
            strides |= {f"{name}_head_stride": capacity * row}
        width = lowest_bit(WIDEST, row, *addresses)
        self._by_plane(
            f"copy_cache_rows_{width}", layers * heads, count * row // width,
            target=addresses[0], source=addresses[1], layers=layers, heads=heads,
            units=count * row // width, **{name: stride // width for name, stride in strides.items()},
        )  # fmt: skip

    def copy_cache_ranges(self, source: Tensor, target: Tensor, ranges: Tensor) -> None:
        (layers, sequences, heads, capacity, _), count = source.shape, ranges.shape[0]
        row = row_bytes(source)
        width = widest_unit(row, source, target)
        most = min(capacity, target.shape[3])  # rows of a range
        self._by_plane(
            f"copy_cache_ranges_{width}", count * layers * heads, most * row // width,
            target=target, source=source, ranges=ranges, count=count, layers=layers, heads=heads,
            source_sequences=sequences, source_capacity=capacity, target_sequences=target.shape[1],
            target_capacity=target.shape[3], row_units=row // width,
        )  # fmt: skip

    def begin_rows(self, starts: Tensor, offsets: Tensor, lengths: Tensor, deltas: Tensor) -> None:
        check_float32(offsets, deltas)
        self._by_element(
            "begin_rows", lengths.size,
            lengths=lengths, deltas=deltas, starts=starts, offsets=offsets, batch=lengths.size,
        )  # fmt: skip

    def mask_logits(self, logits: Tensor, masks: Tensor) -> None:
        check_float32(logits)
        vocab, words = logits.shape[-1], masks.shape[-1]
        if masks.size * vocab != logits.size * words or words * 32 < vocab:
            raise ValueError(f"the masks of {logits!r} must have a bit for each logit, got {masks!r}")
        self._by_element(
            "mask_logits", logits.size,
            logits=logits, masks=masks, size=logits.size, vocab=vocab, words=words, excluded=EXCLUDED,
        )  # fmt: skip

    def sample(self, logits: Tensor, state: SamplingState, tokens: Tensor) -> None:
        rows, vocab = tokens.size, logits.shape[-1]
        check_logits(logits, state.seen.shape[-1])
        if not rows:
            return
        blocks = self._sampling_blocks(rows, vocab)
        self._launch(
            "sample", (blocks, rows), SAMPLE_THREADS,
            logits=logits, vocab=vocab, **state.rules, positions=state.position, seen=state.seen,
            tokens=tokens, tokens_per_sequence=tokens.shape[1], scratch=self._sampling_scratch(rows),
            cooperative=blocks > 1,
        )  # fmt: skip

    def map_tokens(self, tokens: Tensor, vocab_map: Tensor, out: Tensor) -> None:
        self._by_element(
            "map_tokens", out.size,
            out=out, tokens=tokens, vocab_map=vocab_map, batch=out.size, map_size=vocab_map.size,
        )  # fmt: skip

    def count_tokens(self, tokens: Tensor, offered: Tensor, state: StopState, counts: Tensor) -> None:
        self._by_element(
            "count_tokens", counts.size,
            tokens=tokens, offered=offered, tokens_left=state.tokens_left,
            trigger_token=state.trigger_token, stop_ids=state.stop_ids, stop_count=state.stop_ids.size,
            counts=counts, batch=tokens.shape[0], width=tokens.shape[1],
        )  # fmt: skip

    def open_row(
        self,
        row: int,
        rules: Mapping[str, float],
        limits: RowLimits,
        state: SamplingState,
        stop: StopState,
    ) -> None:
        given = {name: RULES[name].type(value).item() for name, value in rules.items()}
        given["seed"] = int(np.uint64(given["seed"]).astype(np.int64))  # the same bits
        self._by_element(
            "open_row", 1,
            **state.rules, positions=state.position, path_limit=state.path_limit,
            tokens_left=stop.tokens_left, trigger_token=stop.trigger_token, row=row,
            **{f"new_{name}": value for name, value in (given | vars(limits)).items()},
        )  # fmt: skip

    def move_row(
        self, source: int, target: int, state: SamplingState, stop: StopState, last_tokens: Tensor
    ) -> None:
        self._by_element(
            "move_row", state.seen.shape[1],
            **state.rules, positions=state.position, path_limit=state.path_limit, seen=state.seen,
            tokens_left=stop.tokens_left, trigger_token=stop.trigger_token, last_tokens=last_tokens,
            source=source, target=target, vocab=state.seen.shape[1],
        )  # fmt: skip

    def commit_tokens(
        self, sampled: Tensor, tokens: Tensor, counts: Tensor, state: SamplingState, last_tokens: Tensor
    ) -> None:
        self._by_element(
            "commit_tokens", counts.size,
            sampled=sampled, tokens=tokens, counts=counts, positions=state.position, seen=state.seen,
            last_tokens=last_tokens, batch=tokens.shape[0], width=tokens.shape[1],
            vocab=state.seen.shape[1],
        )  # fmt: skip

    def commit_rows(self, lengths: Tensor, counts: Tensor) -> None:
        self._by_element("commit_rows", lengths.size, lengths=lengths, counts=counts, batch=lengths.size)

    def commit_states(self, states: Tensor, next_states: Tensor, first_row: int, counts: Tensor) -> None:
        layers, batch, _ = states.shape
        row, rows = row_bytes(states), counts.size
        width = widest_unit(row, states, next_states)
        self._by_plane(
            f"commit_states_{width}", layers * rows, row // width,
            states=states, next_states=next_states, counts=counts, layers=layers, batch=batch,
            first_row=first_row, rows=rows, units=row // width,
        )  # fmt: skip

    def log_probabilities(self, logits: Tensor, tokens: Tensor, top_ids: Tensor, top_values: Tensor) -> None:
        rows, vocab, width = tokens.size, logits.shape[-1], top_ids.shape[-1]
        check_logits(logits, vocab)
        most = min(vocab, MOST_LOGPROBS)
        if not 0 <= width - 1 <= most:
            raise ValueError(f"{width - 1} most likely tokens requested, expected at most {most}")
        if rows:
            self._launch(
                "log_probabilities", (rows,), SAMPLE_THREADS,
                all_logits=logits, vocab=vocab, tokens=tokens, top_ids=top_ids, top_values=top_values,
                width=width,
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
