# SPDX-License-Identifier: Apache-2.0
"""Prefix cache file: safetensors with KV rows and states, JSON in its header.

  pool_i [pages, Hkv, PAGE, D]   layer i of the pool: keys of each layer of the model, then values; then the
                                  same of a draft head; FP8 as U8, because safetensors reads no FP8 with NumPy
  state_i [L, states, n]         recurrent states of a hybrid model (state_file.py)
  __metadata__["prefix_cache"]   {"format_version", "engine", "pages": [an _Entry for each],
                                  "states": [a StateEntry for each], "sha256"}

A page comes after its parent; `parent` is the number of that page, null for the first page of a prompt.
`sha256` covers pages, states and tensors: without it, a damaged row would silently change every prompt that
reuses the row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.schema import to_dict
from edgellm_ros.runtime.prefix.prefix_cache import PAGE, Page, PrefixCache
from edgellm_ros.runtime.prefix.prefix_key import Key
from edgellm_ros.runtime.prefix.state_file import StateEntry, fill_states, stored_states
from edgellm_ros.runtime.prefix.state_snapshots import StateSnapshots
from edgellm_ros.strict_json import parse_json

FORMAT_VERSION = 3
METADATA = "prefix_cache"


def save_prefix_cache(
    path: str | Path,
    cache: PrefixCache,
    device: Device,
    engine: str,
    states: StateSnapshots | None = None,
) -> None:
    """Write all pages, and the states of hybrid models, to a file, atomically.

    `engine`: fingerprint of the engine that computed them. OSError if the file cannot be written.
    """
    path = Path(path)
    pages = list(cache.pages())
    numbers = {page: number for number, (_, page) in enumerate(pages)}
    entries = [
        asdict(_Entry(adapter, _number(page.parent, numbers), list(page.keys), page.last_used))
        for adapter, page in pages
    ]
    places = [page.place for _, page in pages]
    rows = [device.download(layer)[0, places].view(_stored(layer)) for layer in _layers(cache)]
    state_entries, values = stored_states(cache, states, numbers, device)
    contents = {"pages": entries, "states": [asdict(entry) for entry in state_entries]}
    description = {
        "format_version": FORMAT_VERSION,
        "engine": engine,
        **contents,
        "sha256": _digest(contents, [*rows, *values]),
    }
    pools = {f"pool_{i}": tensor for i, tensor in enumerate(rows)}
    pools |= {f"state_{i}": np.ascontiguousarray(tensor) for i, tensor in enumerate(values)}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        save_file(pools, partial, {METADATA: json.dumps(description)})
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def load_prefix_cache(
    path: str | Path,
    cache: PrefixCache,
    device: Device,
    engine: str,
    states: StateSnapshots | None = None,
) -> int:
    """Replace a cache's pages and states by a file's; return the number of pages.

    Loads the most recently used pages if there is no room for all; the number is that of the loaded ones.
    FileNotFoundError, or ValueError for a file that is damaged or was made for another engine: then the cache
    is unchanged. EngineError if the rows cannot be copied to the device: then the cache is empty.
    """
    path = Path(path)
    pools = states.pool if states is not None else []
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    try:
        with safe_open(path, framework="numpy") as file:
            description = parse_json((file.metadata() or {})[METADATA])
            found = description["engine"], description["format_version"]
            if found == (engine, FORMAT_VERSION):
                rows = [file.get_tensor(f"pool_{i}") for i in range(len(_layers(cache)))]
                values = [file.get_tensor(f"state_{i}") for i in range(len(pools))]
                entries = [_Entry(**entry) for entry in description["pages"]]
                state_entries = [StateEntry.read(**entry) for entry in description["states"]]
                digest = description["sha256"]
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a readable prefix cache: {error}") from None
    if found != (engine, FORMAT_VERSION):
        raise ValueError(
            f"{path}: saved by another engine or in another format (engine {found[0]}, format {found[1]}; "
            f"this is engine {engine}, format {FORMAT_VERSION}): save the prefix cache again"
        )
    _check(path, entries, rows, cache)
    checked = _checked_states(path, state_entries, values, entries, pools)
    contents = {name: description[name] for name in ("pages", "states")}
    if digest != _digest(contents, [*rows, *values]):
        raise ValueError(f"{path}: damaged: the SHA-256 of the contents is not {digest}")
    try:
        pages = _fill(entries, rows, cache, device)
        if states is not None:
            adapted = {number: (entries[number].adapter, page) for number, page in pages.items()}
            fill_states(states, checked, values, adapted, device)
    except BaseException:
        cache.clear()  # the rows of its pages are incomplete
        if states is not None:
            states.clear()
        raise
    return len(pages)


def _number(page: Page | None, numbers: dict[Page, int]) -> int | None:
    return None if page is None else numbers.get(page)


@dataclass(frozen=True)
class _Entry:
    """The header's description of one page."""

    adapter: str  # `LoraAdapter.key`
    parent: int | None  # number of the page before; None for the first page of a prompt
    keys: list[Key]  # of the page's tokens
    last_used: int  # time of the last use, by the clock of the saved cache

    def has_types(self) -> bool:
        """Return whether the values have the annotated types: JSON does not guarantee it."""
        return (
            type(self.adapter) is str
            and type(self.parent) in (int, type(None))
            and type(self.keys) is list
            and all(type(key) in (int, str) for key in self.keys)
            and type(self.last_used) is int
        )

    def fits(self, parent: _Entry) -> bool:
        same_adapter = parent.adapter == self.adapter
        return same_adapter and len(parent.keys) == PAGE and parent.last_used >= self.last_used


def _check(path: Path, entries: list[_Entry], tensors: list[np.ndarray], cache: PrefixCache) -> None:
    for tensor, layer in zip(tensors, _layers(cache), strict=True):
        shape = (len(entries), *layer.shape[2:])
        if (tensor.shape, tensor.dtype) != (shape, _stored(layer)):
            raise ValueError(f"{path}: damaged: expected tensors {list(shape)}, got {list(tensor.shape)}")
    for number, entry in enumerate(entries):
        parent = entry.parent
        if (
            not entry.has_types()
            or not 0 < len(entry.keys) <= PAGE
            or not (parent is None or (0 <= parent < number and entry.fits(entries[parent])))
        ):
            raise ValueError(f"{path}: damaged: page {number} does not fit the others")


def _checked_states(
    path: Path,
    states: list[StateEntry | None],
    tensors: list[np.ndarray],
    pages: list[_Entry],
    pools: list[Tensor],
) -> list[StateEntry]:
    """Return a file's states.

    ValueError for one that does not fit its page or its tensors.
    """
    checked = [
        state
        for state in states
        if state and 0 <= state.page < len(pages) and 0 < state.tokens <= len(pages[state.page].keys)
    ]
    if len(checked) < len(states):
        raise ValueError(f"{path}: damaged: a recurrent state does not fit the pages")
    for tensor, pool in zip(tensors, pools, strict=True):
        shape = (pool.shape[0], len(checked), pool.shape[2])
        if (tensor.shape, tensor.dtype) != (shape, pool.dtype):
            raise ValueError(f"{path}: damaged: expected tensors {list(shape)}, got {list(tensor.shape)}")
    return checked


def _fill(
    entries: list[_Entry], tensors: list[np.ndarray], cache: PrefixCache, device: Device
) -> dict[int, Page]:
    """Load the most recently used pages that fit the cache; return them by number.

    The use of a page counts as a use of its parent too, so a loaded page's parent is always loaded.
    """
    by_use = sorted(range(len(entries)), key=lambda number: (-entries[number].last_used, number))
    cache.clear()
    pages: dict[int, Page] = {}
    for number in by_use[: cache.capacity_bytes // cache.page_bytes]:
        entry = entries[number]
        parent = None if entry.parent is None else pages[entry.parent]
        pages[number] = cache.add_page(entry.adapter, parent, tuple(entry.keys), entry.last_used)
    numbers, places = list(pages), [page.place for page in pages.values()]
    for layer, tensor in zip(_layers(cache), tensors, strict=True):
        rows = np.zeros(layer.shape, layer.dtype)
        rows[0, places] = tensor[numbers].view(layer.dtype)
        device.upload(layer, rows)
    return pages


def _layers(cache: PrefixCache) -> list[Tensor]:
    """Return the layers of the pools, [1, pages, Hkv, PAGE, D] each."""
    pools = [pool for pool in (cache.pool, cache.head_pool) if pool is not None]
    return [pool.rows(i, i + 1) for pool in pools for i in range(pool.shape[0])]


def _stored(layer: Tensor) -> np.dtype:
    """Return the type that a layer's rows have in a file."""
    return np.dtype(np.uint8) if layer.dtype.itemsize == 1 else layer.dtype


def _digest(contents: dict[str, Any], tensors: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 of the descriptions and tensors, hexadecimal."""
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def engine_fingerprint(config: EngineConfig, has_draft_rows: bool = False) -> str:
    """Return 32 hexadecimal digits that identify an engine's configuration and files.

    "+draft" follows them if pages hold rows of the draft head.
    """
    digits = hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:32]
    return digits + ("+draft" if has_draft_rows else "")
