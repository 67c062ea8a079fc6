# SPDX-License-Identifier: Apache-2.0
"""PrefixReuse: what a batch's prompts reuse, and what is stored of them.

The tokens that are reused need not be computed. KV rows are in the prefix cache, recurrent states in the
snapshots. A prompt of a hybrid model needs both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine_directory.config import MIN_PREFILL, EngineConfig
from edgellm_ros.kernels import Kernels, SequenceCache
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.recurrent_state import RecurrentState
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, Prefix, PrefixCache, RowShape
from edgellm_ros.runtime.prefix.prefix_key import FrameGroup, Key, prefix_keys
from edgellm_ros.runtime.prefix.state_snapshots import StateSnapshots, save_points
from edgellm_ros.runtime.prompt.buckets import pads_prompts

PART_TOKENS = 256  # of prompts that are computed in parts


def tokens_of_runs(config: EngineConfig, device: Device) -> int:
    """Return the most tokens of a row in a run on prompts.

    On a CPU, prompts of hybrid models are always computed in parts, whose number and places decide the last
    bits of the recurrent states: so a prompt beside others has the same numbers as alone. On a GPU, where
    numbers agree up to rounding only, long runs are faster.
    """
    most = config.max_supported_input_length
    in_parts = config.llm.recurrent is not None and not pads_prompts(device)
    return min(most, PART_TOKENS) if in_parts else most


class PrefixReuse:
    """Owns the prefix cache `pages` and, for hybrid models, the `states`.

    `capacity_bytes`: of both together; None = as much as the batch's KV rows and states take. It is divided
    between them as the batch's memory is. `head_cache`: of a draft head, whose rows the pages hold too.
    `run_tokens`: most tokens of a row in a run on prompts.
    `joins_first_prompts`: whether prompts of a batch run together if they reuse nothing.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        config: EngineConfig,
        cache: LinearKVCache,
        recurrent: RecurrentState | None,
        vision: VisionRunner | None,
        capacity_bytes: int | None,
        head_cache: LinearKVCache | None = None,
        joins_first_prompts: bool = False,
    ) -> None:
        self._config = config
        self.run_tokens = tokens_of_runs(config, device)
        self._pads = pads_prompts(device)
        self._joins_first_prompts = joins_first_prompts
        self._videos = vision.videos if vision is not None else None
        self._cache, self._head_cache = cache, head_cache
        state_bytes = recurrent.nbytes if recurrent is not None else 0
        cache_bytes = cache.nbytes + (head_cache.nbytes if head_cache is not None else 0)
        if capacity_bytes is None:
            rows = config.builder.max_batch_size * config.max_kv_cache_capacity
            capacity_bytes = cache_bytes + state_bytes if rows >= PAGE else 0  # none for less than a page
        snapshot_bytes = capacity_bytes * state_bytes // (cache_bytes + state_bytes)
        self.states: StateSnapshots | None = None
        if recurrent is not None:
            self.states = StateSnapshots(device, recurrent, snapshot_bytes)
        head_rows, draft = None, config.draft
        if head_cache is not None and draft is not None:
            heads, size = draft.num_key_value_heads, draft.head_dim
            head_rows = RowShape(draft.num_layers, heads, size, head_cache.dtype)
        self.pages = PrefixCache(
            device,
            kernels,
            layers=config.num_attention_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=cache.dtype,
            capacity_bytes=capacity_bytes - snapshot_bytes,
            head_rows=head_rows,
        )

    def with_keys(self, sequence: GenerationSequence) -> GenerationSequence:
        """Give a prompt the keys of its tokens, from any thread; return it.

        To hash a large image takes milliseconds.
        """
        if self.pages.capacity_bytes and not sequence.prefix_keys:
            sequence.prefix_keys = self._keys(sequence)
        return sequence

    def match(self, sequences: Sequence[GenerationSequence], reuse: bool = True) -> None:
        """Find the longest stored prefix of each prompt; the prefill skips its tokens.

        Also chooses where the prefill saves states: at the prompt's end only, without `reuse`. Prompts that
        are padded, and several that would run together, reuse no text shorter than a page: the chat template
        begins all prompts with the same few tokens.
        """
        if not self.pages.capacity_bytes or not sequences:
            return
        if self.states is not None:
            self.states.begin_batch()
        joins = self._joins_first_prompts and len(sequences) > 1
        least = PAGE if self._pads or joins else 0
        shared = []  # tokens of each prompt that are stored, with or without a state after them
        for sequence in sequences:
            self.with_keys(sequence)
            if reuse:
                sequence.prefix = self.pages.match(sequence.adapter.key, sequence.prefix_keys)
            stored = sequence.prefix.length
            shared.append(stored if _is_worth_a_run(sequence, stored, least) else 0)
            self._end_at_a_state(sequence, stored)
            if not _is_worth_a_run(sequence, sequence.prefix.length, least):
                sequence.prefix = Prefix()
        # Runs are padded to the longest of a row: each row must have slots for it after the reused ones.
        room = self._room(sequences)
        while self.states is not None and any(each.prefix.length > room for each in sequences):
            for sequence in sequences:  # a state cannot be cut to the room
                self._end_at_a_state(sequence, room)
            room = self._room(sequences)
        for sequence in sequences:
            sequence.kv_length = sequence.reused_tokens = min(sequence.prefix.length, room)
        if self.states is not None:
            self._choose_state_points(sequences, shared if reuse else None)

    def load(self, sequence: GenerationSequence, row: int) -> None:
        """Copy the reused prefix of a prompt to its row."""
        cache, head = self._caches(row)
        self.pages.load(sequence.prefix, cache, sequence.reused_tokens, head)
        if self.states is not None and sequence.reused_tokens:
            key, keys = sequence.adapter.key, sequence.prefix_keys
            self.states.load(key, keys, sequence.reused_tokens, row)

    def save_state(self, sequence: GenerationSequence, row: int) -> None:
        """Save the row's recurrent state, if it is due after the tokens computed so far."""
        if self.states is not None and sequence.kv_length in sequence.state_points:
            keys = sequence.prefix_keys[: sequence.kv_length]
            shared = sequence.begins_later_prompts or sequence.kv_length < len(sequence.token_ids)
            self.states.insert(sequence.adapter.key, keys, row, expected=shared)

    def store(self, sequence: GenerationSequence, row: int) -> None:
        """Store the KV rows of a prompt."""
        if sequence.prefix_keys:
            self.pages.insert(sequence.adapter.key, sequence.prefix_keys, *self._caches(row))

    def has_pages(self, sequence: GenerationSequence) -> bool:
        """Return whether all KV rows of a prompt are stored."""
        key, keys = sequence.adapter.key, sequence.prefix_keys
        return bool(keys) and self.pages.stored_length(key, keys) == len(keys)

    def stored_length(self, sequence: GenerationSequence) -> int:
        """Return how many of a prompt's tokens a longer prompt can reuse."""
        key, keys = sequence.adapter.key, sequence.prefix_keys
        if self.states is not None and not self.states.has(key, keys[: self._reusable(len(keys))]):
            return 0
        return self.pages.stored_length(key, keys)

    def pin(self, sequence: GenerationSequence) -> None:
        """Protect a prompt from eviction; all of it must be stored.

        A second call has no effect.
        """
        key, keys = sequence.adapter.key, sequence.prefix_keys
        if self.pages.pin(key, keys) and self.states is not None:
            self.states.pin(key, keys[: self._reusable(len(keys))])

    def unpin(self, sequence: GenerationSequence) -> bool:
        """Undo `pin`; return False if the prompt is not pinned."""
        key, keys = sequence.adapter.key, self._keys(sequence)
        pinned = self.pages.unpin(key, keys)
        if pinned and self.states is not None:
            self.states.pin(key, keys[: self._reusable(len(keys))], -1)
        return pinned

    def remove(self, adapter: str) -> None:
        """Drop the prefixes of an adapter."""
        self.pages.remove(adapter)
        if self.states is not None:
            self.states.remove(adapter)

    def clear(self) -> None:
        """Drop everything."""
        self.pages.clear()
        if self.states is not None:
            self.states.clear()

    def _keys(self, sequence: GenerationSequence) -> list[Key]:
        """Return the keys of a prompt's tokens."""
        return prefix_keys(
            sequence.token_ids,
            sequence.request,
            image_tokens=sequence.image_tokens,
            audio_tokens=sequence.audio_tokens,
            special_tokens=self._config.special_tokens,
            groups=self._frame_groups(sequence),
            video_token_id=self._config.video_token_id,
        )

    def _reusable(self, tokens: int) -> int:
        """Return how many of a stored prompt's tokens longer prompts reuse.

        With a draft head it is one less.
        """
        return tokens if self._head_cache is None else tokens - 1

    def _caches(self, row: int) -> tuple[SequenceCache, SequenceCache | None]:
        """Return a row of the KV cache, and of the draft head's."""
        head = self._head_cache
        return self._cache.sequence(row), head.sequence(row) if head is not None else None

    def _frame_groups(self, sequence: GenerationSequence) -> list[FrameGroup]:
        """Return the groups of frames of a prompt's videos."""
        if self._videos is None:
            return []
        return [
            FrameGroup(
                self._videos.group(video, index),
                layout.grid.rows,
                layout.grid.columns,
                layout.times[index],
            )
            for video, layout in zip(sequence.request.prompt_videos, sequence.videos, strict=True)
            for index in range(layout.grid.groups)
        ]

    def _end_at_a_state(self, sequence: GenerationSequence, longest: int) -> None:
        """Shorten a hybrid model's prefix to one of at most `longest` tokens with a state."""
        if self.states is not None:
            key, keys = sequence.adapter.key, sequence.prefix_keys
            sequence.prefix = self.states.match(key, keys, sequence.prefix, longest)

    def _room(self, sequences: Sequence[GenerationSequence]) -> int:
        new_tokens = max(len(sequence.token_ids) - sequence.prefix.length for sequence in sequences)
        longest_run = min(new_tokens, self.run_tokens)
        return self._cache.capacity - max(MIN_PREFILL, longest_run)

    def _choose_state_points(
        self, sequences: Sequence[GenerationSequence], shared: Sequence[int] | None
    ) -> None:
        assert self.states is not None
        for index, sequence in enumerate(sequences):
            count, points = len(sequence.token_ids), []
            if shared is not None:
                ends = self._encoder_ends(sequence)
                places = self.states.free_places
                points = save_points(count, sequence.reused_tokens, shared[index], ends, places)
            sequence.state_points = [*points, count]
            if sequence.begins_later_prompts:
                sequence.state_points[-1] = self._reusable(count)
        parts = prefill_parts(sequences, self.run_tokens)
        if not fits(parts, self._cache.capacity):
            for sequence in sequences:
                sequence.state_points = sequence.state_points[-1:]

    def _encoder_ends(self, sequence: GenerationSequence) -> list[int]:
        """Return the number of tokens up to the end of each image, sound and video."""
        tokens, ids = self._config.special_tokens, np.asarray(sequence.token_ids)
        ends: list[int] = []
        for placeholder, counts in (
            (tokens.image_token_id, sequence.image_tokens),
            (self._config.video_token_id, [layout.grid.tokens for layout in sequence.videos]),
            (tokens.audio_token_id, sequence.audio_tokens),
        ):
            if counts:
                ends += (np.flatnonzero(ids == placeholder)[np.cumsum(counts) - 1] + 1).tolist()
        return ends


def _is_worth_a_run(sequence: GenerationSequence, length: int, least: int) -> bool:
    """Whether a prompt reuses its first `length` tokens.

    These are at least `least`, or an encoder has made some of them.
    """
    return length >= least or any(isinstance(key, str) for key in sequence.prefix_keys[:length])


def prefill_parts(sequences: Sequence[GenerationSequence], most: int) -> list[list[range]]:
    """Cut the new tokens of prompts into runs of at most `most` tokens.

    Returns each run's tokens [B]. Runs end where states are saved. All prompts end in the last run. A prompt
    with fewer cuts than others has no tokens in the first runs:

      prompt 0   [      ][    ][        ]
      prompt 1           [            ]
      run          0       1       2         prompt 1: nothing, nothing, all

    Of a long piece the first run is the short one. So the last run of a long prompt, padded to that of
    another prompt, needs no more slots of the KV cache than the prompt and one token of its answer.
    """
    cuts = []
    for sequence in sequences:
        first, last = sequence.reused_tokens, len(sequence.token_ids)
        ends = [*(point for point in sequence.state_points if first < point < last), last]
        cut = [first]
        for end in ends:
            start, stops = cut[-1], sorted(range(end, cut[-1], -most))
            if len(stops) > 1:  # a run has at least two tokens
                stops[0] = max(stops[0], start + MIN_PREFILL)
            cut += stops
        cuts.append(cut)
    runs = max(map(len, cuts)) - 1
    padded = [[each[0]] * (runs + 1 - len(each)) + each for each in cuts]
    return [[range(each[run], each[run + 1]) for each in padded] for run in range(runs)]


def fits(parts: Sequence[Sequence[range]], capacity: int) -> bool:
    """Return whether each row of a KV cache has slots for every run's padded tokens."""
    return all(
        max(tokens.start for tokens in run) + max(MIN_PREFILL, *map(len, run)) <= capacity for run in parts
    )
