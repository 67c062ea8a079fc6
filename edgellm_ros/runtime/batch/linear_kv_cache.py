# SPDX-License-Identifier: Apache-2.0
"""LinearKVCache: keys and values of every layer, C slots per row of the batch.

One tensor [L, max batch, Hkv, C, D]: keys of each layer, then values of each layer; C = capacity in tokens.
The slots 0 .. length-1 of a row are committed; later slots hold stale values, and no token attends to them.
An engine writes new KV rows to the first slots that are not committed, and `commit` makes them part of the
sequence.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.choices import FP8
from edgellm_ros.kernels import Kernels, SequenceCache, TreeKernels
from edgellm_ros.runtime.batch.sequence import GenerationSequence

OLDEST_FLOAT8 = 89  # compute capability of the first GPUs with FP8


def check_cache_type(device: Device, cache_type: str) -> None:
    """Raise EngineError if a GPU lacks the type of an engine's KV cache."""
    if cache_type != FP8 or not device.arch:
        return
    from edgellm_ros.kernels.capability import compute_capability

    if compute_capability(device.arch) < OLDEST_FLOAT8:
        raise EngineError(
            f"an FP8 KV cache needs a GPU of sm_{OLDEST_FLOAT8} or later, not {device.description}; export "
            "without --kv-cache"
        )


class LinearKVCache:
    """Owns the cache's memory and, on the device, the committed length of every row."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        *,
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
        self._slots = device.zeros((2 * layers, max_batch_size, kv_heads, capacity, head_dim), dtype)
        self._lengths = device.zeros((max_batch_size,), np.int64)
        self._deltas = device.zeros((max_batch_size,), np.float32)
        self._sequences: dict[int, GenerationSequence] = {}  # by row; their `kv_length` is the host's copy
        inputs = [names.key_cache(i) for i in range(layers)] + [names.value_cache(i) for i in range(layers)]
        outputs = [names.present_key(i) for i in range(layers)]
        outputs += [names.present_value(i) for i in range(layers)]
        shape = (max_batch_size, kv_heads, capacity, head_dim)
        # an input, the output that is bound to the same memory, and that memory
        self._bindings = [
            (inputs[i], outputs[i], self._slots.rows(i, i + 1).view(*shape)) for i in range(2 * layers)
        ]

    @property
    def nbytes(self) -> int:
        """Size of all keys and values in bytes."""
        return self._slots.size * self.dtype.itemsize

    def lengths(self, rows: range) -> Tensor:
        """Return the committed lengths of rows [B] int64: the slots of their next KV rows."""
        return self._lengths.rows(rows.start, rows.stop)

    def rope_deltas(self, rows: range) -> Tensor:
        """Return [B] float32: the token in slot i of a row has position i + delta."""
        return self._deltas.rows(rows.start, rows.stop)

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Begin a sequence; the caller fills its first `kv_length` slots.

        The first run on its prompt writes length and delta on the device (`begin_rows`).
        """
        self._sequences[row] = sequence

    def begin_rows(self, rows: range, starts: Tensor, deltas: Tensor) -> None:
        """Queue the write of rows' lengths [B] int64 and deltas [B] float32."""
        self._kernels.begin_rows(starts, deltas, self.lengths(rows), self.rope_deltas(rows))

    def move(self, source: int, target: int) -> None:
        """Copy a row's committed slots and its length to another row."""
        self._sequences[target] = sequence = self._sequences[source]
        for tensor in (self._lengths, self._deltas):
            self._device.copy(tensor.rows(target, target + 1), tensor.rows(source, source + 1))
        slots, count = self._slots, sequence.kv_length
        self._kernels.copy_cache_rows(slots, (source, 0), slots, (target, 0), count)

    def close(self, row: int) -> None:
        """End a row: set its length to 0."""
        del self._sequences[row]
        self._device.fill_zero(self._lengths.rows(row, row + 1))

    def host_length(self, row: int) -> int:
        """Return the committed length of a row, without queued steps; 0 for a closed one."""
        return self._sequences[row].kv_length if row in self._sequences else 0

    def commit(self, counts: Tensor) -> None:
        """Queue the commit of the next counts[b] slots of row b; counts [B] int64."""
        self.commit_rows(range(counts.shape[0]), counts)

    def commit_rows(self, rows: range, counts: Tensor) -> None:
        """Queue `commit` for the given rows."""
        self._kernels.commit_rows(self.lengths(rows), counts)

    def move_path(self, kernels: TreeKernels, path: Tensor, counts: Tensor) -> None:
        """Queue the move of accepted nodes of a tree to the slots that `commit` commits.

        path [B,D]: nodes, in slots after the committed ones; the first counts[b] of row b are accepted.
        """
        kernels.move_cache_rows(self._slots, 0, self.lengths(range(path.shape[0])), path, counts)

    def bindings(self, rows: range) -> dict[str, Tensor]:
        """Return the rows' slots by binding name; each output has the memory of its input."""
        tensors = {}
        for input_name, output_name, slots in self._bindings:
            tensors[input_name] = tensors[output_name] = slots.rows(rows.start, rows.stop)
        return tensors

    def sequence(self, row: int) -> SequenceCache:
        """Return the cache of one row.

        No step that commits slots of an open row may be queued.
        """
        one = range(row, row + 1)
        length = self.host_length(row)
        return SequenceCache(self._slots, row, self.lengths(one), length, self.rope_deltas(one))

    def clear_row(self, row: int) -> None:
        """Zero the slots of one row."""
        for _, _, slots in self._bindings:
            self._device.fill_zero(slots.rows(row, row + 1))

    def clear(self) -> None:
        """Zero all slots: NaN in a masked slot would enter a sum as 0 x NaN."""
        self._device.fill_zero(self._slots)
