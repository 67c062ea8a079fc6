# SPDX-License-Identifier: Apache-2.0
"""StateSnapshots: states after stored prompts, for requests with the same prefix.

The states are recurrent ones. The KV rows of a prefix can be cut at any token, a recurrent state cannot: it
is the state after exactly the tokens that made it. So a prompt of a hybrid model reuses the longest stored
prefix that ends where a state was saved (`save_points` chooses where):

  stored   [system prompt] S        [system prompt, question, ...] S
  prompt   [system prompt | other question]           reuses up to the first S

Results with a reused state and without agree up to rounding, because the tokens are cut into other chunks.
Memory is a fixed pool. The least recently used state makes room for a new one; a state that was saved in the
last batch counts as older than one that was reused in it; otherwise a large batch would replace the states
that its prompts share. A pinned state is not replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, Prefix
from edgellm_ros.runtime.prefix.prefix_key import Key

SPACING = 512  # tokens between states of a long prompt; in a run of 512, reading the weights costs little


class States(Protocol):
    """The states of a batch's rows (`RecurrentState`)."""

    committed: list[Tensor]  # [L,B,n] each

    @property
    def row_bytes(self) -> int: ...

    def save(self, row: int, pool: list[Tensor], place: int) -> None:
        """Copy a row to a place of a pool [L,places,n] of each tensor."""
        ...

    def load(self, row: int, pool: list[Tensor], place: int) -> None:
        """Copy a place of a pool to a row."""
        ...


@dataclass(eq=False)
class Snapshot:
    """The state after the tokens `keys` of a prompt."""

    adapter: str
    keys: tuple[Key, ...]
    place: int  # index in the pool
    last_used: tuple[int, bool]  # number of the batch, and whether it was more than saved
    pins: int = 0  # number of pinned prompts that need it


class StateSnapshots:
    """Owns the `pool`: two tensors [L,places,n], as `RecurrentState` has them.

    `capacity_bytes`: upper limit of the pool's size; below one state nothing is stored.
    """

    def __init__(self, device: Device, state: States, capacity_bytes: int) -> None:
        self._state = state
        self.places = capacity_bytes // state.row_bytes
        self.pool = [
            device.zeros((tensor.shape[0], self.places, tensor.shape[2]), tensor.dtype)
            for tensor in state.committed
        ]
        self.clear()

    def __len__(self) -> int:
        """Return the number of stored states."""
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        """Iterate over the stored states, the least recently used first."""
        return iter(sorted(self._snapshots, key=lambda each: each.last_used))

    def clear(self) -> None:
        """Drop all states."""
        self._snapshots: list[Snapshot] = []
        self._free = list(reversed(range(self.places)))
        self._batch = 0

    def remove(self, adapter: str) -> None:
        """Drop all states of an adapter."""
        for snapshot in [each for each in self._snapshots if each.adapter == adapter]:
            self._drop(snapshot)

    def begin_batch(self) -> None:
        """Begin a batch: states that it uses get the same time of last use."""
        self._batch += 1

    def match(self, adapter: str, keys: Sequence[Key], prefix: Prefix, longest: int | None = None) -> Prefix:
        """Shorten the stored prefix of a prompt to the longest one with a saved state.

        `longest`: maximum length of the prefix in tokens; None = no limit.
        """
        limit = prefix.length if longest is None else min(longest, prefix.length)
        snapshot = self._find(adapter, keys, limit)
        if snapshot is None:
            return Prefix()
        snapshot.last_used = self._batch, True
        length = len(snapshot.keys)
        # and the page of the token after them, with which the last row of a draft head is stored
        return Prefix(prefix.pages[: length // PAGE + 1], length)

    def has(self, adapter: str, keys: Sequence[Key]) -> bool:
        """Return whether the state after exactly these tokens is stored."""
        snapshot = self._find(adapter, keys, len(keys))
        return snapshot is not None and len(snapshot.keys) == len(keys)

    @property
    def free_places(self) -> int:
        """Number of places without a pinned state."""
        return self.places - sum(each.pins > 0 for each in self._snapshots)

    def pin(self, adapter: str, keys: Sequence[Key], count: int = 1) -> None:
        """Protect the stored state after exactly these tokens; count -1 undoes this."""
        snapshot = self._find(adapter, keys, len(keys))
        assert snapshot is not None
        assert len(snapshot.keys) == len(keys)
        snapshot.pins += count

    def load(self, adapter: str, keys: Sequence[Key], length: int, row: int) -> None:
        """Copy the state after a prompt's first `length` tokens to a row.

        `match` has found the state.
        """
        snapshot = self._find(adapter, keys, length)
        assert snapshot is not None
        assert len(snapshot.keys) == length
        self._state.load(row, self.pool, snapshot.place)

    def insert(self, adapter: str, keys: Sequence[Key], row: int, expected: bool = False) -> None:
        """Store the state after the tokens `keys`, unless it is stored already.

        The state is not stored if all places are pinned. `expected`: whether later prompts are known to begin
        with these tokens; then it counts as used.
        """
        if not keys or not self.places or self.has(adapter, keys):
            return
        if not self._free:
            droppable = [each for each in self._snapshots if not each.pins]
            if not droppable:
                return
            self._drop(min(droppable, key=lambda each: each.last_used))
        snapshot = self.add(adapter, tuple(keys), (self._batch, expected))
        self._state.save(row, self.pool, snapshot.place)

    def add(self, adapter: str, keys: tuple[Key, ...], last_used: tuple[int, bool]) -> Snapshot:
        """Reserve a place for a state, which the caller writes; one place must be free."""
        snapshot = Snapshot(adapter, keys, self._free.pop(), last_used)
        self._snapshots.append(snapshot)
        self._batch = max(self._batch, last_used[0])
        return snapshot

    def _find(self, adapter: str, keys: Sequence[Key], longest: int) -> Snapshot | None:
        found = [
            each
            for each in self._snapshots
            if each.adapter == adapter
            and len(each.keys) <= longest
            and each.keys == tuple(keys[: len(each.keys)])
        ]
        return max(found, key=lambda each: len(each.keys), default=None)

    def _drop(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._free.append(snapshot.place)


def save_points(
    tokens: int, computed_from: int, shared: int, encoder_ends: Sequence[int], places: int
) -> list[int]:
    """Choose after how many tokens of a prompt its state is saved, before its end.

    - computed_from: tokens that are reused; the prompt is computed from there on
    - shared: tokens that an earlier prompt has too, with or without a state after them
    - encoder_ends: the number of tokens up to the end of each image and sound
    - places: size of the pool

    Each point costs a run of the language model. One is where the prompt diverges from an earlier one, as
    later prompts probably will: at the last end of a page, image or sound before the first token that
    differs. (Later prompts may diverge a few tokens earlier; and an image is encoded again unless all its
    rows are reused.) Others are SPACING tokens apart, or further if they would take more than a quarter of
    the pool; the last one is not close to the end, where the state is saved anyway.
    """
    if places < 2:  # the state at the prompt's end would replace any other
        return []
    candidates = [shared // PAGE * PAGE, *(end for end in encoder_ends if end <= shared)]
    branch = max(candidates)
    points = {branch} if branch - computed_from >= PAGE else set()
    quarter, spacing = places // 4, SPACING
    if quarter:
        spacing *= max(1, -(-((tokens - 1) // SPACING - computed_from // SPACING) // quarter))
        points |= set(range(spacing, tokens - SPACING // 4, spacing))
    return sorted(point for point in points if computed_from < point < tokens)
