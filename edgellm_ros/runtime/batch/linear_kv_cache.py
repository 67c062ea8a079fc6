# SPDX-License-Identifier: Apache-2.0
"""LinearKVCache: keys and values of every layer, one stretch of rows per sequence.

One tensor [L, max batch, Hkv, C, D]: keys of each layer, then values of each; C = capacity in tokens.
Sequence b has rows 0 .. length[b]-1; what lies beyond is left over from before and is never looked at.
Engines write new rows in place; a row counts from when it is committed. In decode steps the device counts by
itself (`advance`), and the host follows when it knows what the step was for (`count_step`).

Active sequences are the first ones. When one ends, those after it move up, and it stands behind them, where
it can still be read:

  a  b  c  d |        b ends:  a  c  d | b        a ends:  c  d | a  b
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels, SequenceCache, StopState


class LinearKVCache:
    """Owns the cache's memory and the lengths of its sequences, on the device and on the host alike."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        layers: int,
        max_batch_size: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: np.dtype,
    ) -> None:
        self.capacity = capacity
        self.dtype = dtype
        self.max_batch_size = max_batch_size
        self._device = device
        self._kernels = kernels
        self._rows = device.zeros((2 * layers, max_batch_size, kv_heads, capacity, head_dim), dtype)
        self._device_lengths = device.zeros((max_batch_size,), np.int64)
        self._device_deltas = device.zeros((max_batch_size,), np.int64)
        self._host_lengths: list[int] = []  # of the active sequences
        self._host_deltas: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self._rows.size * self.dtype.itemsize

    @property
    def active_batch_size(self) -> int:
        return len(self._host_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Committed rows per active sequence, on the host, [B] int64."""
        return np.array(self._host_lengths, np.int64)

    @property
    def device_lengths(self) -> Tensor:
        """The same, on the device: also where an engine writes its next row."""
        return self._device_lengths.rows(0, self.active_batch_size)

    @property
    def device_rope_deltas(self) -> Tensor:
        """[B] int64: a token at sequence index i stands at position i + delta."""
        return self._device_deltas.rows(0, self.active_batch_size)

    def reset_for_new_sequences(self, reuse_lengths: Sequence[int], rope_deltas: Sequence[int]) -> None:
        """Begin a batch of len(reuse_lengths) sequences of which so many rows are there already."""
        if not 1 <= len(reuse_lengths) <= self.max_batch_size:
            raise ValueError(f"{len(reuse_lengths)} sequences, the cache holds 1 to {self.max_batch_size}")
        self._host_lengths = [int(length) for length in reuse_lengths]
        self._host_deltas = [int(delta) for delta in rope_deltas]
        self._upload()

    def commit_sequence_length(self, increments: np.ndarray) -> None:
        """Count the rows that were just written: increments [B] int64 (0 leaves a sequence as it is)."""
        for row, increment in enumerate(increments):
            self._host_lengths[row] += int(increment)
        if max(self._host_lengths) > self.capacity:
            raise ValueError(f"sequences of {self.lengths} tokens exceed the capacity {self.capacity}")
        self._upload()

    def advance(self, state: StopState) -> None:
        """Count, on the device only, the row that a decode step has written for each active sequence."""
        self._kernels.advance(self.device_lengths, state)

    def count_step(self, counts: Sequence[bool]) -> None:
        """Count it on the host too, for the active sequences that the step was for."""
        for row, counted in enumerate(counts):
            self._host_lengths[row] += counted

    def evict(self, index: int) -> None:
        """Go on without this sequence: the active ones after it move up by one, in the same order.

        It can be read at its new place, behind the active ones, until the next reset. The device's lengths
        are the host's from then on. ValueError if the sequence is not active.
        """
        last = self.active_batch_size - 1
        if not 0 <= index <= last:
            raise ValueError(f"sequence {index} is not among the {self.active_batch_size} that are active")
        if index < last:
            longest = max(self._host_lengths[index:])
            self._kernels.rotate_sequences(self._rows, index, last, longest)
            for values in (self._host_lengths, self._host_deltas):
                values.append(values.pop(index))
        self._upload()
        self._host_lengths.pop()
        self._host_deltas.pop()

    def bindings(self) -> dict[str, Tensor]:
        """The active sequences' rows under an LLM engine's names; outputs are the inputs' memory."""
        tensors = {}
        layers, _, *rest = self._rows.shape
        for i in range(layers):
            rows = self._rows.rows(i, i + 1).view(self.active_batch_size, *rest)
            kind, number = ("key", i) if i < layers // 2 else ("value", i - layers // 2)
            tensors[f"{kind}_cache_{number}"] = tensors[f"present_{kind}_{number}"] = rows
        return tensors

    def sequence(self, row: int) -> SequenceCache:
        """The cache of one sequence, active or not any more."""
        return SequenceCache(
            self._rows,
            row,
            self._device_lengths.rows(row, row + 1),
            self._device_deltas.rows(row, row + 1),
        )

    def _upload(self) -> None:
        self._device.upload(self.device_lengths, np.array(self._host_lengths, np.int64))
        self._device.upload(self.device_rope_deltas, np.array(self._host_deltas, np.int64))

    def clear(self) -> None:
        """Zero everything. After numbers that are not finite: masked rows still enter a sum as 0 x NaN."""
        self._device.fill_zero(self._rows)
