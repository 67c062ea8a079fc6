# SPDX-License-Identifier: Apache-2.0
"""A prefix cache on disk: one safetensors file with the pages' rows, and in its header as JSON what they are.

  pool_i [pages, Hkv, PAGE, D]   layer i of the pool: keys of each layer of the model, then values
  __metadata__["prefix_cache"]   {"format_version", "engine", "pages": [an _Entry for each], "sha256"}

A page stands after the one that it stands on; `parent` is that one's number, null for the first of a prompt.
`sha256` is of the pages and the pools: a damaged row would go unseen into every prompt that reuses it.
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
    """Write all pages. `engine` identifies whose they are. The file appears complete or not at all.

    OSError where it cannot be written.
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
    """Fill a cache with a file's pages, in place of its own; returns how many found room.

    FileNotFoundError, or ValueError for a file that is damaged or was made for another engine: then the cache
    stays as it was. EngineError if the rows cannot be copied to the device: then it is empty.
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
            f"{path}: made for another engine or by another version (engine {found[0]}, format {found[1]}; "
            f"this is engine {engine}, format {FORMAT_VERSION}): save it again"
        )
    _check(path, entries, tensors, cache)
    if digest != _digest(description["pages"], tensors):
        raise ValueError(f"{path}: damaged: its SHA-256 is not {digest}")
    try:
        return _fill(entries, tensors, cache, device)
    except BaseException:
        cache.clear()  # of pages whose rows are not there
        raise


@dataclass(frozen=True)
class _Entry:
    """What the header says of one page."""

    adapter: str
    parent: int | None
    keys: list[Key]
    last_used: int

    def has_types(self) -> bool:
        """Whether the values are what the annotations say: JSON may hold anything."""
        return (
            type(self.adapter) is str
            and type(self.parent) in (int, type(None))
            and type(self.keys) is list
            and all(type(key) in (int, str) for key in self.keys)
            and type(self.last_used) is int
        )

    def stands_on(self, below: _Entry) -> bool:
        return len(below.keys) == PAGE and below.adapter == self.adapter and below.last_used >= self.last_used


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
            or not (parent is None or (0 <= parent < number and entry.stands_on(entries[parent])))
        ):
            raise ValueError(f"{path}: damaged: page {number} does not fit the others")


def _fill(entries: list[_Entry], tensors: list[np.ndarray], cache: PrefixCache, device: Device) -> int:
    """The pages used last for which there is room. A page is used whenever one that stands on it is."""
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
    """The pool layer by layer, [1, pages, Hkv, PAGE, D]: no more than one at a time has a host copy."""
    return [cache.pool.rows(i, i + 1) for i in range(cache.pool.shape[0])]


def _digest(entries: list[dict[str, Any]], tensors: Sequence[np.ndarray]) -> str:
    """SHA-256 of what a file says of its pages and of their rows, hexadecimal."""
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    for tensor in tensors:
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def engine_fingerprint(config: EngineConfig) -> str:
    """Tells engines apart: the same for the same configuration and files, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:32]
