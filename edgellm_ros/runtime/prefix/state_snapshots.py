# SPDX-License-Identifier: Apache-2.0
"""StateSnapshots: recurrent states after stored prompts, for requests with the same prefix.

The KV rows of a prefix can be cut at any token, a recurrent state cannot: it is the state after exactly the
tokens that made it. So the state is saved at the end of each prompt, and a prompt of a hybrid model reuses
the longest stored prefix that ends where a state was saved:

  stored   [system prompt] S        [system prompt, question, ...] S
  prompt   [system prompt | other question]           reuses up to the first S

Results with a reused state and without agree up to rounding, because the tokens are cut into other chunks.
Memory is a fixed pool; the least recently used state makes room for a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, Prefix
from edgellm_ros.runtime.prefix.prefix_key import Key


class States(Protocol):
    """The states of a batch's rows (`RecurrentState`)."""

    committed: list[Tensor]  # [L,B,n] each

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        ...

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
    last_used: int


class StateSnapshots:
    """Owns the pool: two tensors [L,places,n], as `RecurrentState` has them.

    `capacity_bytes`: upper limit of the pool's size; below one state nothing is stored.
    """

    def __init__(self, device: Device, state: States, capacity_bytes: int) -> None:
        self._state = state
        places = capacity_bytes // state.row_bytes
        self._pool = [
            device.zeros((tensor.shape[0], places, tensor.shape[2]), tensor.dtype)
            for tensor in state.committed
        ]
        self._places = places
        self.clear()

    def __len__(self) -> int:
        """Return the number of stored states."""
        return len(self._snapshots)

    def clear(self) -> None:
        """Drop all states."""
        self._snapshots: list[Snapshot] = []
        self._free = list(reversed(range(self._places)))
        self._clock = 0

    def remove(self, adapter: str) -> None:
        """Drop all states of an adapter."""
        for snapshot in [each for each in self._snapshots if each.adapter == adapter]:
            self._drop(snapshot)

    def match(self, adapter: str, keys: Sequence[Key], prefix: Prefix) -> Prefix:
        """Shorten the stored prefix of a prompt to the longest one with a saved state."""
        snapshot = self._find(adapter, keys, prefix.length)
        if snapshot is None:
            return Prefix()
        length = len(snapshot.keys)
        return Prefix(prefix.pages[: -(-length // PAGE)], length)

    def has(self, adapter: str, keys: Sequence[Key]) -> bool:
        """Return whether the state after exactly these tokens is stored."""
        snapshot = self._find(adapter, keys, len(keys))
        return snapshot is not None and len(snapshot.keys) == len(keys)

    def load(self, adapter: str, keys: Sequence[Key], length: int, row: int) -> None:
        """Copy the state after a prompt's first `length` tokens, which `match` has found, to a row."""
        snapshot = self._find(adapter, keys, length)
        assert snapshot is not None
        assert len(snapshot.keys) == length
        self._state.load(row, self._pool, snapshot.place)

    def insert(self, adapter: str, keys: Sequence[Key], row: int) -> None:
        """Store the state of a row whose tokens are `keys`, unless it is stored already."""
        if not keys or not self._places or self.has(adapter, keys):
            return
        if not self._free:
            self._drop(min(self._snapshots, key=lambda each: each.last_used))
        place = self._free.pop()
        self._state.save(row, self._pool, place)
        self._clock += 1
        self._snapshots.append(Snapshot(adapter, tuple(keys), place, self._clock))

    def _find(self, adapter: str, keys: Sequence[Key], longest: int) -> Snapshot | None:
        found = [
            each
            for each in self._snapshots
            if each.adapter == adapter
            and len(each.keys) <= longest
            and each.keys == tuple(keys[: len(each.keys)])
        ]
        best = max(found, key=lambda each: len(each.keys), default=None)
        if best is not None:
            self._clock += 1
            best.last_used = self._clock
        return best

    def _drop(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._free.append(snapshot.place)
