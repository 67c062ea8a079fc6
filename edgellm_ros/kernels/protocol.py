# SPDX-License-Identifier: Apache-2.0
"""The protocol of the kernels, and the groups of tensors that they take.

Letters in shapes: B sequences, S tokens of each, H hidden size, D head size, C cache capacity, V vocabulary,
L layers of a cache (keys of each layer of the model, then values of each layer), R multimodal rows, P
positions. Token ids and lengths are int64. Positions on the axes of RoPE are float32, because times of videos
may lie between whole positions. The caller provides the output tensors: a kernel allocates nothing on the
device. The result of a row never depends on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.action_protocol import ActionKernels
from edgellm_ros.kernels.bilinear import Placement

# Logit of a token that a mask excludes: finite after any penalty, and its probability is 0.
EXCLUDED = -1e30
# Metadata of a field of `SamplingState` that is a rule: the type of its tensor.
F32, I64, U64 = ({"dtype": np.dtype(kind)} for kind in (np.float32, np.int64, np.uint64))


@dataclass(frozen=True)
class RopeTable:
    """Scaled cosine and sine of RoPE's angle for every whole position and frequency.

    The rows of other positions are computed from those of the whole positions before them.
    """

    cos: Tensor  # [P, D/2] f32
    sin: Tensor  # [P, D/2] f32
    frequencies: Tensor  # [D/2] f32, radians per position


@dataclass(frozen=True)
class SamplingState:
    """Sampling rules and sampling state, one row per sequence.

    The rules [B] are the requests' sampling parameters of the same names, and CUDA kernels have parameters of
    these names.
    """

    temperature: Tensor = field(metadata=F32)  # 0 = the most likely token
    top_k: Tensor = field(metadata=I64)  # 0 = off
    top_p: Tensor = field(metadata=F32)  # 1 = off
    min_p: Tensor = field(metadata=F32)  # 0 = off
    repetition_penalty: Tensor = field(metadata=F32)  # 1 = off
    seed: Tensor = field(metadata=U64)
    position: Tensor  # [B] i64, of the next token in the answer: the number of committed tokens
    path_limit: Tensor  # [B] i64, from 1: most tokens of a path (`TreeKernels.sample_path`)
    seen: Tensor  # [B, V] bool, tokens of the prompt and committed tokens of the answer

    def rows(self, start: int, stop: int) -> SamplingState:
        """Return views of rows start..stop-1."""
        return SamplingState(**{name: tensor.rows(start, stop) for name, tensor in vars(self).items()})

    @property
    def rules(self) -> dict[str, Tensor]:
        """The tensors of RULES by name."""
        return {name: getattr(self, name) for name in RULES}


# The rules of a SamplingState, with the types of their tensors.
RULES: dict[str, np.dtype] = {
    each.name: each.metadata["dtype"] for each in fields(SamplingState) if each.metadata
}


@dataclass(frozen=True)
class StopState:
    """Stop conditions of the sequences of a batch."""

    tokens_left: Tensor  # [B] i64, upper bound on the remaining tokens
    trigger_token: Tensor  # [B] i64, the stop token after which one more step writes its KV row; -1 = none
    stop_ids: Tensor  # [n] i64, n >= 1, tokens that end an answer; -1 = none

    def rows(self, start: int, stop: int) -> StopState:
        """Return views of rows start..stop-1; `stop_ids` is the same for all rows."""
        return StopState(
            self.tokens_left.rows(start, stop), self.trigger_token.rows(start, stop), self.stop_ids
        )


@dataclass(frozen=True)
class RowLimits:
    """Limits of a sequence: values of the tensors of the same names."""

    path_limit: int  # of `SamplingState`
    tokens_left: int  # this one and the next are of `StopState`
    trigger_token: int


@dataclass(frozen=True)
class PatchLayout:
    """How an image is cut into patches: tile by tile, merge block by merge block.

    Sizes are in pixels.
    """

    tile_height: int  # the image's own, if there are no tiles
    tile_width: int
    patch_size: int  # side of a patch
    block_size: int  # side of a merge block; divides the tile's sides


@dataclass(frozen=True)
class SequenceCache:
    """One sequence of a KV cache: views of its memory, no copies."""

    cache: Tensor  # [L,B,Hkv,C,D], of all sequences
    index: int  # of the sequence, along B
    length: Tensor  # [1] i64, committed KV rows
    host_length: int  # the same, as the host knows it; 0 for a row that is not open
    rope_delta: Tensor  # [1] f32; the token at index i of the sequence has position i + rope_delta

    @property
    def keys(self) -> list[Tensor]:
        """Keys of each layer of the model, [1,Hkv,C,D]."""
        return self._layers(0, self.cache.shape[0] // 2)

    @property
    def values(self) -> list[Tensor]:
        """Values of each layer of the model, [1,Hkv,C,D]."""
        return self._layers(self.cache.shape[0] // 2, self.cache.shape[0])

    def _layers(self, start: int, stop: int) -> list[Tensor]:
        batch, *rest = self.cache.shape[1:]
        return [
            self.cache.rows(i, i + 1).view(batch, *rest).rows(self.index, self.index + 1)
            for i in range(start, stop)
        ]


class Kernels(ActionKernels, Protocol):
    """The kernels on one kind of device."""

    def resize(self, image: Tensor, out: Tensor) -> None:
        """Write out [C,h,w] uint8: the channels of image [H,W,C] uint8, resized.

        The weights are bicubic. The bits are those of Pillow's `Image.resize` with `Resampling.BICUBIC`.
        """
        ...

    def place_image(self, image: Tensor, placement: Placement, fill: float, out: Tensor) -> None:
        """Write out [3,S,S] fp32: a resized image from -1 to 1, and `fill` around it.

        image: [H,W,3] uint8. The bits are those of `resized` and `write_placed` (bilinear.py).
        """
        ...

    def cut_patches(self, levels: Tensor, frames: Tensor, layout: PatchLayout, out: Tensor) -> None:
        """Write out [...,C*T*p*p] fp32: the normalised values of the frames' patches.

        frames: [F,C,h,w] uint8. Each patch has C channels of T frames; the last of F <= T frames is repeated.
        levels [C,256] fp32: the normalised value of each of a channel's 256 values. The sides of a frame are
        multiples of the tile's.
        """
        ...

    def embed(self, token_ids: Tensor, table: Tensor, multimodal_rows: Tensor, out: Tensor) -> None:
        """Write out [B,S,H]: the embeddings of tokens, with multimodal rows.

        An id below V takes row `id` of table [V,H], another id takes row `id - V` of multimodal_rows [R,H].
        An id of -1 (the logits were not finite) takes row 0.
        """
        ...

    def deepstack(self, token_ids: Tensor, vocab_size: int, multimodal_rows: Tensor, out: Tensor) -> None:
        """Write out [B,S,H]: a deepstack feature of tokens.

        An id from vocab_size on takes row `id - vocab_size` of multimodal_rows [R,H], another id takes zeros.
        """
        ...

    def rope_rows(
        self,
        table: RopeTable,
        lengths: Tensor,
        deltas: Tensor,
        cos: Tensor,
        sin: Tensor,
        filled: Tensor | None = None,
    ) -> None:
        """Write cos, sin [B,S,D/2] of new text tokens.

        Token i of sequence b has position lengths[b] + i + deltas[b], deltas [B] f32. filled [B]: gets the KV
        rows including the new tokens, as of `visible_rows`.
        """
        ...

    def mrope_rows(
        self,
        table: RopeTable,
        positions: Tensor,
        mrope_section: Sequence[int],
        interleaved: bool,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """Write cos, sin [B,S,D/2] of tokens at positions [B,3,S] (time, height, width).

        The positions are f32.

        Interleaved as in Qwen3, frequency j belongs to height if j % 3 == 1 and j < 3 * mrope_section[1], to
        width if j % 3 == 2 and j < 3 * mrope_section[2], else to time. Otherwise the first mrope_section[0]
        frequencies belong to time, the next mrope_section[1] to height and the others to width, as in
        Qwen2-VL. With an empty mrope_section, all frequencies belong to time.
        """
        ...

    def causal_mask(self, lengths: Tensor, out: Tensor) -> None:
        """Write out [B,1,S,C] bool: the causal mask of new tokens.

        New token i of sequence b attends to KV rows 0 .. lengths[b] + i.
        """
        ...

    def visible_rows(self, lengths: Tensor, steps: int, out: Tensor) -> None:
        """Write out [B] = lengths [B] + steps: the KV rows including the new tokens.

        For engines that apply the causal mask themselves.
        """
        ...

    def copy_cache_rows(
        self,
        source: Tensor,
        source_at: tuple[int, int],
        target: Tensor,
        target_at: tuple[int, int],
        count: int,
    ) -> None:
        """Copy `count` KV rows of one sequence, for every layer and head.

        source [L,B1,Hkv,C1,D]; target [L,B2,Hkv,C2,D]; source_at, target_at: (sequence, first row). Source
        and target rows must not overlap.
        """
        ...

    def copy_cache_ranges(self, source: Tensor, target: Tensor, ranges: Tensor) -> None:
        """Do `copy_cache_rows` for ranges [n,5] int64: source_at, target_at, count."""
        ...

    def begin_rows(self, starts: Tensor, offsets: Tensor, lengths: Tensor, deltas: Tensor) -> None:
        """Write lengths [B] int64 = starts [B], and deltas [B] f32 = offsets [B]."""
        ...

    def mask_logits(self, logits: Tensor, masks: Tensor) -> None:
        """Set the finite logits [B,N,V] of excluded tokens to EXCLUDED.

        masks [B,N,W] uint32, W = V / 32 rounded up: token i of sequence b is excluded after token n if bit
        i % 32 of masks[b, n, i // 32] is 0. Logits that are not finite stay, so that `sample` finds them.
        """
        ...

    def sample(self, logits: Tensor, state: SamplingState, tokens: Tensor) -> None:
        """Sample tokens [B,N] from logits [B,N,V]; -1 where a row of logits is not finite.

        Token n of sequence b has position state.position[b] + n in the answer: its random number depends on
        this position and on the seed. The order is the same as in transformers: repetition penalty (of
        state.seen), temperature, top-k, top-p, min-p. Equally likely tokens rank by id. The most likely token
        is never filtered out. Does not change the state: `commit_tokens` does.
        """
        ...

    def map_tokens(self, tokens: Tensor, vocab_map: Tensor, out: Tensor) -> None:
        """Write out [B,N]: vocab_map[tokens[b,n]], or -1 where tokens [B,N] has -1."""
        ...

    def open_row(
        self,
        row: int,
        rules: Mapping[str, float],
        limits: RowLimits,
        state: SamplingState,
        stop: StopState,
    ) -> None:
        """Begin a sequence in a row of the states.

        Writes its rules, by name, its limits, and position 0. `seen` stays as it is.
        """
        ...

    def move_row(
        self, source: int, target: int, state: SamplingState, stop: StopState, last_tokens: Tensor
    ) -> None:
        """Copy row `source` of the states and of last_tokens [B] over row `target`."""
        ...

    def count_tokens(self, tokens: Tensor, offered: Tensor, state: StopState, counts: Tensor) -> None:
        """Write counts [B]: how many of the offered tokens each sequence accepts.

        offered[b]: how many of tokens [b,N] are offered. A sequence accepts at most tokens_left tokens, and
        none after the first one of stop_ids. tokens_left decreases by the count. After a stop token it
        becomes 0; after the sequence's trigger_token it becomes 1, because one more step writes the KV row of
        that token.
        """
        ...

    def commit_tokens(
        self, sampled: Tensor, tokens: Tensor, counts: Tensor, state: SamplingState, last_tokens: Tensor
    ) -> None:
        """Commit a step's first counts[b] tokens: update state and last_tokens [B].

        Updates `seen` and `position` of the state. sampled [B,N]: logit indices, where -1 is not marked as
        seen; tokens [B,N]: token ids. Rows whose count is 0 do not change.
        """
        ...

    def commit_rows(self, lengths: Tensor, counts: Tensor) -> None:
        """Commit KV rows: lengths [B] += counts [B]."""
        ...

    def commit_states(self, states: Tensor, next_states: Tensor, first_row: int, counts: Tensor) -> None:
        """Commit recurrent states of the rows with a positive count.

        Row first_row + b of next_states is copied if counts[b] is positive.

        states, next_states [L,B,n]: n values for each layer and row; counts [b <= B - first_row].
        """
        ...

    def log_probabilities(self, logits: Tensor, tokens: Tensor, top_ids: Tensor, top_values: Tensor) -> None:
        """Write natural log-probabilities of logits [B,N,V].

        Log-probabilities include neither repetition penalty nor temperature. top_ids, top_values [B,N,K+1]:
        the K most likely tokens in falling order, then `tokens[b,n]`. Rows whose token is -1 have undefined
        contents.
        """
        ...
