# SPDX-License-Identifier: Apache-2.0
"""The recurrent states in a prefix cache file (prefix_file.py).

  state_i [L, states, n]   tensor i of the states' pool
  "states"                 in the file's description: a StateEntry for each

A state belongs to a page: it is the state after this page's first `tokens` tokens, and those of all pages
before it. A state whose rows are not stored is of no use and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, Page, PrefixCache
from edgellm_ros.runtime.prefix.prefix_key import Key
from edgellm_ros.runtime.prefix.state_snapshots import StateSnapshots


@dataclass(frozen=True)
class StateEntry:
    """The file's description of one state."""

    page: int  # number of the page of its last token
    tokens: int  # of that page, up to its last token
    last_used: tuple[int, bool]  # as in `Snapshot`

    @classmethod
    def read(cls, page: object, tokens: object, last_used: object) -> StateEntry | None:
        """Check values that were read from JSON; None if one has another type."""
        if type(page) is not int or type(tokens) is not int:
            return None
        if not isinstance(last_used, list) or [type(value) for value in last_used] != [int, bool]:
            return None
        return cls(page, tokens, (last_used[0], last_used[1]))


def stored_states(
    cache: PrefixCache, states: StateSnapshots | None, numbers: Mapping[Page, int], device: Device
) -> tuple[list[StateEntry], list[np.ndarray]]:
    """Return the states of stored prefixes: their entries, and tensors [L,states,n].

    numbers: of each page in the file.
    """
    if states is None:
        return [], []
    entries, places = [], []
    for snapshot in states:
        found = cache.find(snapshot.adapter, snapshot.keys)
        if found.length == len(snapshot.keys):
            tokens = found.length - PAGE * (len(found.pages) - 1)
            entries.append(StateEntry(numbers[found.pages[-1]], tokens, snapshot.last_used))
            places.append(snapshot.place)
    return entries, [device.download(tensor)[:, places] for tensor in states.pool]


def fill_states(
    states: StateSnapshots,
    entries: Sequence[StateEntry],
    tensors: Sequence[np.ndarray],
    pages: Mapping[int, tuple[str, Page]],
    device: Device,
) -> None:
    """Replace the states by the states of a file that fit.

    The most recently used states come first. pages: the loaded pages with their adapters, by number; other
    states are left out.
    """
    states.clear()
    loaded = [number for number, entry in enumerate(entries) if entry.page in pages]
    loaded.sort(key=lambda number: entries[number].last_used, reverse=True)
    loaded = loaded[: states.places]
    places = []
    for number in loaded:
        entry = entries[number]
        adapter, page = pages[entry.page]
        keys = (*_keys_before(page), *page.keys[: entry.tokens])
        places.append(states.add(adapter, keys, entry.last_used).place)
    for pool, tensor in zip(states.pool, tensors, strict=True):
        values = np.zeros(pool.shape, pool.dtype)
        values[:, places] = tensor[:, loaded]
        device.upload(pool, values)


def _keys_before(page: Page) -> list[Key]:
    """Return the keys of all pages before a page."""
    before: list[tuple[Key, ...]] = []
    while page.parent is not None:
        page = page.parent
        before.insert(0, page.keys)
    return [key for keys in before for key in keys]
