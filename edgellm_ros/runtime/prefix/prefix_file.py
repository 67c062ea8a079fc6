# SPDX-License-Identifier: Apache-2.0
"""Prefix cache file: safetensors with the KV rows, JSON in its header.

  pool_i [pages, Hkv, PAGE, D]   layer i of the pool: keys of each layer of the model, then values
  __metadata__["prefix_cache"]   {"format_version", "engine", "pages": [an _Entry for each], "sha256"}

A page comes after its parent; `parent` is the number of that page, null for the first page of a prompt.
`sha256` covers the pages and the pools: without it, a damaged row would silently change every prompt that
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

FORMAT_VERSION = 2
METADATA = "prefix_cache"


def save_prefix_cache(path: str | Path, cache: PrefixCache, device: Device, engine: str) -> None:
    """Write all pages to a file, atomically.

    `engine`: fingerprint of the engine that computed the pages. OSError if the file cannot be written.
    """
    path = Path(path)
    pages = list(cache.pages())
    numbers: dict[Page | None, int] = {page: number for number, (_, page) in enumerate(pages)}
    entries = [
        asdict(_Entry(adapter, numbers.get(page.parent), list(page.keys), page.last_used))
        for adapter, page in pages
    ]
    places = [page.place for _, page in pages]
    tensors = [device.download(layer)[0, places] for layer in _layers(cache)]
    description = {
        "format_version": FORMAT_VERSION,
        "engine": engine,
        "pages": entries,
        "sha256": _digest(entries, tensors),
    }
    pools = {f"pool_{i}": tensor for i, tensor in enumerate(tensors)}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        save_file(pools, partial, {METADATA: json.dumps(description)})
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def load_prefix_cache(path: str | Path, cache: PrefixCache, device: Device, engine: str) -> int:
    """Replace a cache's pages by a file's; return the number of loaded pages.

    Loads the most recently used pages if the cache has no room for all. FileNotFoundError, or ValueError for
    a file that is damaged or was made for another engine: then the cache is unchanged. EngineError if the
    rows cannot be copied to the device: then the cache is empty.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    try:
        with safe_open(path, framework="numpy") as file:
            description = json.loads((file.metadata() or {})[METADATA])
            found = description["engine"], description["format_version"]
            if found == (engine, FORMAT_VERSION):
                tensors = [file.get_tensor(f"pool_{i}") for i in range(cache.pool.shape[0])]
                entries = [_Entry(**entry) for entry in description["pages"]]
                digest = description["sha256"]
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path}: not a readable prefix cache: {error}") from None
    if found != (engine, FORMAT_VERSION):
        raise ValueError(
            f"{path}: saved by another engine or in another format (engine {found[0]}, format {found[1]}; "
            f"this is engine {engine}, format {FORMAT_VERSION}): save the prefix cache again"
        )
    _check(path, entries, tensors, cache)
    if digest != _digest(description["pages"], tensors):
        raise ValueError(f"{path}: damaged: the SHA-256 of the contents is not {digest}")
    try:
        return _fill(entries, tensors, cache, device)
    except BaseException:
        cache.clear()  # the rows of its pages are incomplete
        raise


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
    shape = (len(entries), *cache.pool.shape[2:])
    for tensor in tensors:
        if (tensor.shape, tensor.dtype) != (shape, cache.pool.dtype):
            raise ValueError(f"{path}: damaged: expected tensors {list(shape)}, got {list(tensor.shape)}")
    for number, entry in enumerate(entries):
        parent = entry.parent
        if (
            not entry.has_types()
            or not 0 < len(entry.keys) <= PAGE
            or not (parent is None or (0 <= parent < number and entry.fits(entries[parent])))
        ):
            raise ValueError(f"{path}: damaged: page {number} does not fit the others")


def _fill(entries: list[_Entry], tensors: list[np.ndarray], cache: PrefixCache, device: Device) -> int:
    """Load the most recently used pages that fit the cache; return their number.

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
        rows[0, places] = tensor[numbers]
        device.upload(layer, rows)
    return len(numbers)


def _layers(cache: PrefixCache) -> list[Tensor]:
    """Return the layers of the pool, [1, pages, Hkv, PAGE, D] each."""
    return [cache.pool.rows(i, i + 1) for i in range(cache.pool.shape[0])]


def _digest(entries: list[dict[str, Any]], tensors: Sequence[np.ndarray]) -> str:
    """Return the SHA-256 of the pages' descriptions and rows, hexadecimal."""
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def engine_fingerprint(config: EngineConfig) -> str:
    """Return 32 hexadecimal digits that identify an engine's configuration and files."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:32]
