# SPDX-License-Identifier: Apache-2.0
"""Launch sizes, scratch memory and checks that all CUDA kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.layout import MAX_BLOCKS_PER_ROW, MAX_VOCAB, ROW_SCRATCH_BYTES
from edgellm_ros.kernels.cuda.signatures import in_order
from edgellm_ros.kernels.protocol import RopeTable

WIDEST = 16  # bytes that one thread moves with one instruction
THREADS = 256  # per block, by default
MAX_BLOCKS = 1 << 20  # per launch; with more work, each block loops
MAX_PLANES = 1 << 15  # along a grid's second axis
SHARE = 4096  # tokens of the vocabulary per block in sampling
FLOAT32 = np.dtype(np.float32)


class CudaLaunches:
    """Launches of the kernels of a program on a device's stream.

    device: a `CudaDevice`; program: an object with the method `launch` of `CudaProgram`.
    """

    def __init__(self, device: Any, program: Any) -> None:
        self._device = device
        self._program = program
        # Recorded graphs use the scratch memory of their recording, so none of it is freed before self.
        self._scratch: dict[str, list[Tensor]] = {}

    def _launch(
        self, name: str, grid: tuple[int, ...], threads: int, /, cooperative: bool = False, **parameters: Any
    ) -> None:
        """Launch a kernel with its parameters by name.

        A tensor is passed by its address, None as 0.
        """
        self._queue(name, grid, threads, parameters, cooperative)

    def _by_token(self, name: str, token_ids: Tensor, units: int, /, **parameters: Any) -> None:
        """Launch a block per token, with a thread per unit of its row."""
        if token_ids.size and units:
            grid = (min(token_ids.size, MAX_BLOCKS),)
            self._queue(name, grid, min(THREADS, -(-units // 32) * 32), parameters)

    def _by_plane(self, name: str, planes: int, units: int, /, **parameters: Any) -> None:
        """Launch blocks per plane, with a thread per unit."""
        if planes and units:
            grid = (min(-(-units // THREADS), MAX_BLOCKS), min(planes, MAX_PLANES))
            self._queue(name, grid, THREADS, parameters)

    def _by_element(self, name: str, elements: int, /, **parameters: Any) -> None:
        """Launch a thread per element."""
        if elements:
            self._queue(name, (min(-(-elements // THREADS), MAX_BLOCKS),), THREADS, parameters)

    def _queue(
        self,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        parameters: Mapping[str, Any],
        cooperative: bool = False,
    ) -> None:
        values = [
            value.pointer if isinstance(value, Tensor) else 0 if value is None else value
            for value in in_order(name, parameters)
        ]
        self._program.launch(name, grid, threads, *values, cooperative=cooperative)

    def _sampling_blocks(self, rows: int, vocab: int) -> int:
        """Return the number of blocks for each row of logits; all of them can run at once."""
        return max(1, min(self._device.multiprocessors // rows, -(-vocab // SHARE), MAX_BLOCKS_PER_ROW))

    def _sampling_scratch(self, rows: int) -> int:
        """Return the address of the samplers' scratch memory for so many rows."""
        return self._zeroed_scratch("sampling", max(8, rows) * ROW_SCRATCH_BYTES)

    def _zeroed_scratch(self, name: str, nbytes: int) -> int:
        """Return the address of scratch memory that is zero before the first launch."""
        made = self._scratch.setdefault(name, [])
        if not made or made[-1].size < nbytes:
            made.append(self._device.zeros((2 * nbytes,), np.uint8))
        return made[-1].pointer


def row_bytes(tensor: Tensor) -> int:
    """Return the number of bytes along the last axis."""
    return tensor.shape[-1] * tensor.dtype.itemsize


def widest_unit(nbytes: int, *tensors: Tensor) -> int:
    """Return the widest unit in bytes, 1 to 16, that divides row sizes and addresses."""
    return lowest_bit(WIDEST, nbytes, *(tensor.pointer for tensor in tensors))


def lowest_bit(*numbers: int) -> int:
    """Return the largest power of two that divides all numbers."""
    union = 0
    for number in numbers:
        union |= number
    return union & -union


def check_float32(*tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are float32."""
    for tensor in tensors:
        if tensor.dtype != FLOAT32:
            raise ValueError(f"the CUDA kernel takes float32, got {tensor!r}")


def check_logits(logits: Tensor, vocab: int) -> None:
    """Raise ValueError unless logits are float32 of so many tokens."""
    check_float32(logits)
    if logits.shape[-1] != vocab or not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"logits must have {vocab} tokens, at most {MAX_VOCAB}, got {logits.shape[-1]}")


def of_table(table: RopeTable) -> dict[str, Any]:
    """Return the parameters of kernels that read a table of RoPE rows."""
    positions, frequencies = table.cos.shape
    return {
        "cos_table": table.cos,
        "sin_table": table.sin,
        "radians": table.frequencies,
        "positions": positions,
        "frequencies": frequencies,
    }
