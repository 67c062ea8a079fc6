# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: keys and values of prompts that were computed before, for requests that begin alike.

A prompt is cut into pages of PAGE tokens. Pages form a tree for each adapter: what prompts have in common is
kept once, and the way from the root to a page is the prompt up to there.

  adapter ""   [system prompt 0..31] -- [32..63] -+- [64..95: ... image A] -- [96..110]
                                                  +- [64..95: ... image B]

A new request takes over the longest beginning that it shares with any way in the tree, token by token, also
into the middle of a page. Memory is a fixed pool of pages; the page that was used least recently, and that no
other page stands on, makes room for a new one.

Bits: keys and values of a token depend on the tokens before it and, on a CPU, on nothing else, neither on
what follows nor on how many tokens are computed at once (OnnxRuntimeBackend), so a prompt that begins with
rows from here goes on with the very bits that it would have computed; on a GPU it may round otherwise. Rows
of generated tokens are never kept: a decode step computes them with other last bits than a prefill would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.kernels import Kernels, SequenceCache
from edgellm_ros.runtime.prefix.prefix_key import Key

PAGE = 32  # tokens; half as many cost more calls, twice as many more copies of what is shared only in part

NO_KEY = -1  # of no token


@dataclass(eq=False)
class Page:
    """The rows of up to PAGE tokens, `keys`, at `place` in the pool. Only full pages have `children`.

    A root has no place and no tokens.
    """

    place: int
    keys: tuple[Key, ...]
    parent: Page | None
    children: list[Page] = field(default_factory=list)
    last_used: int = 0

    def shared(self, keys: Sequence[Key]) -> int:
        """How many of its tokens stand at the beginning of `keys`."""
        count = 0
        for mine, other in zip(self.keys, keys, strict=False):
            if mine != other:
                break
            count += 1
        return count


@dataclass(frozen=True, eq=False)
class Prefix:
    """The beginning of a prompt that is there already: its first `length` tokens lie in these pages."""

    pages: tuple[Page, ...] = ()
    length: int = 0


class PrefixCache:
    """Owns the `pool` [L, pages, Hkv, PAGE, D], laid out as the KV cache is, and the trees.

    `capacity_bytes`: how large the pool may be; 0 keeps nothing. ValueError if it is negative or smaller than
    one page.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: np.dtype,
        capacity_bytes: int,
    ) -> None:
        self.page_bytes = 2 * layers * kv_heads * PAGE * head_dim * np.dtype(dtype).itemsize
        if capacity_bytes < 0 or 0 < capacity_bytes < self.page_bytes:
            raise ValueError(
                f"the prefix cache must have 0 or at least {self.page_bytes} bytes, got {capacity_bytes}"
            )
        self._kernels = kernels
        pages = capacity_bytes // self.page_bytes
        self.pool = device.zeros((2 * layers, pages, kv_heads, PAGE, head_dim), dtype)
        self.clear()

    @property
    def capacity_bytes(self) -> int:
        return self.pool.shape[1] * self.page_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - len(self._free) * self.page_bytes

    def clear(self) -> None:
        """Forget everything."""
        self._roots: dict[str, Page] = {}
        self._free = list(reversed(range(self.pool.shape[1])))
        self._clock = 0

    def remove(self, adapter: str) -> None:
        """Forget an adapter's prompts."""
        self._free += [page.place for name, page in self.pages() if name == adapter]
        self._roots.pop(adapter, None)

    def match(self, adapter: str, keys: Sequence[Key]) -> Prefix:
        """The longest beginning of a prompt that is there, without its last token: that must be computed."""
        self._clock += 1
        node, pages, length = self._roots.get(adapter), [], 0
        while node is not None and node.children:
            page = max(node.children, key=lambda page: page.shared(keys[length : length + PAGE]))
            shared = page.shared(keys[length : length + PAGE])
            if not shared:
                break
            page.last_used = self._clock
            pages.append(page)
            length += shared
            node = page if shared == PAGE else None
        length = min(length, len(keys) - 1)
        return Prefix(tuple(pages[: -(-length // PAGE)]), length)

    def kept(self, adapter: str, keys: Sequence[Key]) -> int:
        """How many tokens of a prompt are there, its last one included."""
        return self.match(adapter, [*keys, NO_KEY]).length

    def load(self, prefix: Prefix, cache: SequenceCache, length: int) -> None:
        """Copy the first `length` tokens of a prefix to the beginning of a sequence's cache."""
        for index, page in enumerate(prefix.pages[: -(-length // PAGE)]):
            start = index * PAGE
            count = min(PAGE, length - start)
            target_at = (cache.index, start)
            self._kernels.copy_cache_rows(self.pool, (page.place, 0), cache.cache, target_at, count)

    def insert(self, adapter: str, keys: Sequence[Key], cache: SequenceCache) -> None:
        """Keep a prompt, whose rows are the first len(keys) of a sequence's cache.

        What is there already is not copied again. Keeps the beginning only where there is no room for more.
        """
        self._clock += 1
        node = self._roots.setdefault(adapter, Page(-1, (), None))
        for start in range(0, len(keys), PAGE):
            chunk = tuple(keys[start : start + PAGE])
            page = next((p for p in node.children if p.shared(chunk) in (len(chunk), len(p.keys))), None)
            if page is None:
                page = self._new_page(node)
                if page is None:
                    break
            page.last_used = self._clock
            present = len(page.keys)
            if present < len(chunk):
                page.keys = chunk
                source_at, target_at = (cache.index, start + present), (page.place, present)
                count = len(chunk) - present
                self._kernels.copy_cache_rows(cache.cache, source_at, self.pool, target_at, count)
            node = page
        self._roots = {name: root for name, root in self._roots.items() if root.children}

    def pages(self) -> Iterator[tuple[str, Page]]:
        """Every page with its adapter, each after the one that it stands on."""
        for adapter, root in self._roots.items():
            waiting = list(root.children)
            while waiting:
                page = waiting.pop()
                yield adapter, page
                waiting += page.children

    def add_page(self, adapter: str, parent: Page | None, keys: tuple[Key, ...], last_used: int) -> Page:
        """Take a page into the tree, above `parent` or at the root; there must be a free one.

        Its rows in the pool are the caller's to fill.
        """
        parent = parent or self._roots.setdefault(adapter, Page(-1, (), None))
        page = Page(self._free.pop(), keys, parent, last_used=last_used)
        parent.children.append(page)
        self._clock = max(self._clock, last_used)
        return page

    def _new_page(self, parent: Page) -> Page | None:
        """An empty page above `parent`, if need be in the place of the one that was used least recently."""
        if not self._free:
            leaves = (page for _, page in self.pages() if not page.children and page is not parent)
            oldest = min(leaves, key=lambda page: page.last_used, default=None)
            if oldest is None or oldest.parent is None or oldest.last_used == self._clock:
                return None  # all other leaf pages belong to the prompt that is being stored
            oldest.parent.children.remove(oldest)
            self._free.append(oldest.place)
        page = Page(self._free.pop(), (), parent)
        parent.children.append(page)
        return page
