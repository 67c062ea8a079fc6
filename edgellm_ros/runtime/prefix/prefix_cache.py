# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: KV rows of earlier prompts, for requests with the same prefix.

A prompt is split into pages of PAGE tokens. The pages of each adapter form a tree: prompts share the pages of
their common prefix, and the path from the root to a page is the prompt up to the end of this page.

  adapter ""   [system prompt 0..31] -- [32..63] -+- [64..95: ... image A] -- [96..110]
                                                  +- [64..95: ... image B]

A new request reuses the longest prefix that it shares with any path of the tree. Prefixes are compared token
by token, so a reused prefix may end in the middle of a page. Memory is a fixed pool of pages; the least
recently used leaf page makes room for a new page, unless it is pinned.

Bits: on a CPU, the keys and values of a token depend only on this token and the tokens before it. Neither
later tokens nor the number of tokens per run change them (OnnxRuntimeBackend). So a prompt gets the same bits
with reused rows as with computed rows; on a GPU the rounding may differ. The cache never stores rows of
generated tokens: their last bits differ between a decode step and a prefill.

A draft head has KV rows of its own, which a page holds too. The head's row p is of the tokens p and p + 1, so
that it is stored with token p + 1: then all that a page holds depends on its tokens and those before only.
For the same reason a prefix of n stored tokens gives n - 1 rows of both caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels, SequenceCache
from edgellm_ros.runtime.prefix.prefix_key import Key

# Rows of one sequence: sequence and first row of the source, the same of the target, and their number.
RowRange = tuple[int, int, int, int, int]
PAGE = 32  # tokens; smaller pages need more calls, larger ones more copies of partly shared pages


@dataclass(eq=False)
class Page:
    """The KV rows of up to PAGE consecutive tokens of a prompt."""

    place: int  # index in the pool; -1 for a root
    keys: tuple[Key, ...]  # of the tokens; empty for a root
    parent: Page | None  # the page before; None for a root
    children: list[Page] = field(default_factory=list)  # pages after this one; only a full page has children
    last_used: int = 0  # time of the last use, by the clock of the cache
    pins: int = 0  # number of pinned prompts that have the page

    def shared(self, keys: Sequence[Key]) -> int:
        """Return the length of the common prefix of the page's keys and `keys`."""
        count = len(self.keys)
        if self.keys == tuple(keys[:count]):
            return count
        count = 0
        for mine, other in zip(self.keys, keys, strict=False):
            if mine != other:
                break
            count += 1
        return count


@dataclass(frozen=True, eq=False)
class Prefix:
    """The stored prefix of a prompt."""

    pages: tuple[Page, ...] = ()  # in the order of the prompt
    length: int = 0  # tokens of the prompt that the pages hold


@dataclass(frozen=True)
class RowShape:
    """The KV rows of a token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * PAGE * self.head_dim * np.dtype(self.dtype).itemsize

    def pool(self, device: Device, pages: int) -> Tensor:
        """Allocate a pool [L, pages, Hkv, PAGE, D]."""
        return device.zeros((2 * self.layers, pages, self.kv_heads, PAGE, self.head_dim), self.dtype)


class PrefixCache:
    """Owns the trees and the `pool` of pages.

    The pool [L, pages, Hkv, PAGE, D] has the layout of the KV cache. `capacity_bytes`: upper limit of the
    pool's size; 0 = store nothing. `head_rows`: of a draft head; then there is a `head_pool` too. ValueError
    if `capacity_bytes` is negative or smaller than one page.
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
        head_rows: RowShape | None = None,
    ) -> None:
        rows = RowShape(layers, kv_heads, head_dim, np.dtype(dtype))
        self.page_bytes = rows.page_bytes + (head_rows.page_bytes if head_rows is not None else 0)
        if capacity_bytes < 0 or 0 < capacity_bytes < self.page_bytes:
            raise ValueError(
                f"the prefix cache must have 0 or at least {self.page_bytes} bytes, got {capacity_bytes}"
            )
        self._device, self._kernels = device, kernels
        pages = capacity_bytes // self.page_bytes
        self.pool = rows.pool(device, pages)
        self.head_pool = head_rows.pool(device, pages) if head_rows is not None else None
        self._ranges = device.empty((2 * pages, 5), np.int64)  # of one call's copies
        self.clear()

    @property
    def capacity_bytes(self) -> int:
        return self.pool.shape[1] * self.page_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - len(self._free) * self.page_bytes

    def clear(self) -> None:
        """Drop all pages."""
        self._roots: dict[str, Page] = {}
        self._pinned: dict[tuple[str, tuple[Key, ...]], Prefix] = {}
        self._free = list(reversed(range(self.pool.shape[1])))
        self._clock = 0

    def remove(self, adapter: str) -> None:
        """Drop all pages of an adapter."""
        self._free += [page.place for name, page in self.pages() if name == adapter]
        self._roots.pop(adapter, None)
        self._pinned = {prompt: found for prompt, found in self._pinned.items() if prompt[0] != adapter}

    @property
    def pinned_bytes(self) -> int:
        """Size of the pages that cannot be evicted."""
        return sum(page.pins > 0 for _, page in self.pages()) * self.page_bytes

    def pin(self, adapter: str, keys: Sequence[Key]) -> bool:
        """Protect the pages of a stored prompt from eviction.

        Returns False if the prompt is pinned already.
        """
        prompt = adapter, tuple(keys)
        if prompt in self._pinned:
            return False
        self._pinned[prompt] = found = self.find(adapter, keys)
        for page in found.pages:
            page.pins += 1
        return True

    def unpin(self, adapter: str, keys: Sequence[Key]) -> bool:
        """Undo `pin`; return False if the prompt is not pinned."""
        found = self._pinned.pop((adapter, tuple(keys)), None)
        for page in found.pages if found is not None else ():
            page.pins -= 1
        return found is not None

    def match(self, adapter: str, keys: Sequence[Key]) -> Prefix:
        """Find the longest stored prefix of a prompt.

        The prefix never includes the prompt's last token, because the prefill must compute its logits.
        """
        found = self._use(adapter, keys)
        if self.head_pool is not None:
            return Prefix(found.pages, max(0, found.length - 1))
        length = min(found.length, len(keys) - 1)
        return Prefix(found.pages[: -(-length // PAGE)], length)

    def find(self, adapter: str, keys: Sequence[Key]) -> Prefix:
        """Find the longest stored prefix; its pages do not count as used.

        The last token is included.
        """
        node, pages, length = self._roots.get(adapter), [], 0
        while node is not None and node.children:
            page = max(node.children, key=lambda page: page.shared(keys[length : length + PAGE]))
            shared = page.shared(keys[length : length + PAGE])
            if not shared:
                break
            pages.append(page)
            length += shared
            node = page if shared == PAGE else None
        return Prefix(tuple(pages), length)

    def stored_length(self, adapter: str, keys: Sequence[Key]) -> int:
        """Return the length of the longest stored prefix, the last token included."""
        return self._use(adapter, keys).length

    def load(
        self, prefix: Prefix, cache: SequenceCache, length: int, head: SequenceCache | None = None
    ) -> None:
        """Copy the KV rows of a prefix's first `length` tokens to a sequence.

        head: the same sequence of the draft head's cache.
        """
        rows, head_rows = [], []
        for index, page in enumerate(prefix.pages[: -(-length // PAGE)]):
            start = index * PAGE
            rows.append((page.place, 0, cache.index, start, min(PAGE, length - start)))
        if head is not None:
            for index, page in enumerate(prefix.pages):
                tokens = range(max(1, index * PAGE), min(index * PAGE + PAGE, length + 1))
                if tokens:
                    first = tokens.start
                    head_rows.append((page.place, first % PAGE, head.index, first - 1, len(tokens)))
        self._copy(
            (self.pool, cache.cache, rows), (self.head_pool, None if head is None else head.cache, head_rows)
        )

    def insert(
        self, adapter: str, keys: Sequence[Key], cache: SequenceCache, head: SequenceCache | None = None
    ) -> None:
        """Store a prompt: the first len(keys) KV rows of a sequence.

        Rows that are already stored are not copied again. If the pool has no room for the whole prompt, only
        a prefix is stored.
        """
        self._clock += 1
        rows, head_rows = [], []
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
                count = len(chunk) - present
                rows.append((cache.index, start + present, page.place, present, count))
                tokens = range(max(1, start + present), start + len(chunk))
                if head is not None and tokens:
                    first = tokens.start
                    head_rows.append((head.index, first - 1, page.place, first % PAGE, len(tokens)))
            node = page
        self._copy(
            (cache.cache, self.pool, rows), (None if head is None else head.cache, self.head_pool, head_rows)
        )
        self._roots = {name: root for name, root in self._roots.items() if root.children}

    def pages(self) -> Iterator[tuple[str, Page]]:
        """Iterate over all pages with their adapters; a page comes after its parent."""
        for adapter, root in self._roots.items():
            waiting = list(root.children)
            while waiting:
                page = waiting.pop()
                yield adapter, page
                waiting += page.children

    def add_page(self, adapter: str, parent: Page | None, keys: tuple[Key, ...], last_used: int) -> Page:
        """Add a page below `parent`, None = the root; the pool must have a free page.

        The caller fills the page's rows in the pool.
        """
        parent = parent or self._roots.setdefault(adapter, Page(-1, (), None))
        page = Page(self._free.pop(), keys, parent, last_used=last_used)
        parent.children.append(page)
        self._clock = max(self._clock, last_used)
        return page

    def _copy(self, *copies: tuple[Tensor | None, Tensor | None, list[RowRange]]) -> None:
        """Copy ranges from a source to a target for each of `copies`, with one upload."""
        ranges = [each for *_, of_copy in copies for each in of_copy]
        if not ranges:
            return
        self._device.upload(self._ranges.rows(0, len(ranges)), np.array(ranges, np.int64))
        start = 0
        for source, target, of_copy in copies:
            stop = start + len(of_copy)
            if of_copy and source is not None and target is not None:
                self._kernels.copy_cache_ranges(source, target, self._ranges.rows(start, stop))
            start = stop

    def _use(self, adapter: str, keys: Sequence[Key]) -> Prefix:
        """Find the longest stored prefix; its pages count as used.

        The last token is included.
        """
        self._clock += 1
        found = self.find(adapter, keys)
        for page in found.pages:
            page.last_used = self._clock
        return found

    def _new_page(self, parent: Page) -> Page | None:
        """Add an empty page below `parent`.

        If the pool is full, the least recently used leaf page that is not pinned is evicted. None if no page
        can be evicted.
        """
        if not self._free:
            leaves = (
                page for _, page in self.pages() if not page.children and not page.pins and page is not parent
            )
            oldest = min(leaves, key=lambda page: page.last_used, default=None)
            if oldest is None or oldest.parent is None or oldest.last_used == self._clock:
                return None  # all other leaf pages belong to the prompt that is being stored
            oldest.parent.children.remove(oldest)
            self._free.append(oldest.place)
        page = Page(self._free.pop(), (), parent)
        parent.children.append(page)
        return page
