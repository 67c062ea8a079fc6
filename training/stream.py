# SPDX-License-Identifier: Apache-2.0
"""Endless samples, made by worker processes in shared memory.

Workers fill slots, which are chunks of rows of every field. The trainer takes full slots and returns them.
Workers use NumPy and never import PyTorch.
"""

from __future__ import annotations

import multiprocessing as mp
import queue
from collections.abc import Callable, Iterator

import cv2
import numpy as np

Fields = dict[str, tuple[tuple[int, ...], type]]  # shape of one row and dtype, by name
Chunk = dict[str, np.ndarray]
CHUNK = 32  # samples


def new_chunk(fields: Fields, size: int) -> Chunk:
    """Make a chunk of zeros with rows of every field."""
    return {name: np.zeros((size, *shape), dtype) for name, (shape, dtype) in fields.items()}


def slots_for(capacity: int, most: int, chunk: int = CHUNK) -> int:
    """Return the number of slots for a buffer of `capacity` samples.

    At most `most`. A slot that the buffer cannot hold would be filled with samples that are never used.
    """
    return max(2, min(most, capacity // chunk))


class SampleStream:
    """Worker processes that fill chunks.

    Each worker calls `make_writer(seed)`, which returns the function that writes a sample into row i of a
    chunk. Start the stream before CUDA is initialised, because workers are forked.
    """

    def __init__(
        self,
        fields: Fields,
        make_writer: Callable[[int], Callable[[Chunk, int], None]],
        workers: int,
        chunk: int = CHUNK,
        slots: int = 192,
        seed: int = 0,
    ):
        context = mp.get_context("fork")
        self._buffers = []
        for _ in range(slots):
            rows = {}
            for name, (shape, dtype) in fields.items():
                count = chunk * int(np.prod(shape, dtype=np.int64))
                raw = context.RawArray("b", count * np.dtype(dtype).itemsize)
                rows[name] = np.frombuffer(raw, dtype).reshape(chunk, *shape)
            self._buffers.append(rows)
        self._free, self._full = context.SimpleQueue(), context.Queue()
        for slot in range(slots):
            self._free.put(slot)
        self._processes = [
            context.Process(target=self._work, args=(make_writer, seed * 10_000 + i, chunk), daemon=True)
            for i in range(workers)
        ]
        threads = cv2.getNumThreads()
        cv2.setNumThreads(1)  # ends OpenCV's threads, for which a fork would wait forever
        for process in self._processes:
            process.start()
        cv2.setNumThreads(threads)

    def _work(self, make_writer: Callable, seed: int, chunk: int) -> None:
        write = make_writer(seed)
        while True:
            slot = self._free.get()
            for i in range(chunk):
                write(self._buffers[slot], i)
            self._full.put(slot)

    def take(self, wait: bool, most: int | None = None) -> Iterator[Chunk]:
        """Yield the full chunks, at least one if `wait`, at most `most` of them.

        A chunk is valid until the next one is requested. RuntimeError if a worker has ended.
        """
        count = 0
        while (wait and count == 0) or not self._full.empty():
            if count == most:
                return
            count += 1
            slot = self._next_full()
            yield self._buffers[slot]
            self._free.put(slot)

    def _next_full(self) -> int:
        while True:
            try:
                return self._full.get(timeout=1.0)
            except queue.Empty:
                codes = [p.exitcode for p in self._processes if p.exitcode is not None]
                if codes:
                    raise RuntimeError(
                        f"{len(codes)} of {len(self._processes)} workers ended, exit codes {codes}"
                    ) from None

    def close(self) -> None:
        """Stop the workers."""
        for process in self._processes:
            process.terminate()
