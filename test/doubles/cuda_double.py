# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels without a GPU: their sources, compiled for the host.

Tensors are in host memory, without `array` as on a GPU. Tests with this double show what the kernels
compute and whether their barriers are right, not how fast the kernels are.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from doubles.host_compiler import BLOCKS, FOLDERS, build_library
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.kernels import CudaKernels
from edgellm_ros.kernels.cuda.tree_kernels import CudaTreeKernels
from fixtures.device_under_test import Side


class DoubleDevice:
    """Host memory in tensors without `array`; new memory is filled with 0xA5."""

    name = "cuda"
    memory = "cuda"
    stream = None
    runs_beside = False
    short_parts = True
    max_queued_steps = 0

    def __init__(self, multiprocessors: int) -> None:
        self.multiprocessors = multiprocessors
        self._host = CpuDevice()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        made = self._host.empty(shape, dtype)
        made.array.reshape(-1).view(np.uint8)[...] = 0xA5
        return Tensor(made.pointer, made.shape, made.dtype, made.owner)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        tensor = self.empty(shape, dtype)
        self.fill_zero(tensor)
        return tensor

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        self._host.upload(_with_array(target), source)

    def download(self, source: Tensor) -> np.ndarray:
        return self._host.download(_with_array(source))

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._host.copy(_with_array(target), _with_array(source))

    def fill_zero(self, target: Tensor) -> None:
        self._host.fill_zero(_with_array(target))

    def copy_to_host(self, source: Tensor) -> Any:
        return self._host.copy_to_host(_with_array(source))

    def capture(self, record: Callable[[], None]) -> None:
        return None

    def synchronize(self) -> None:
        pass


class DoubleProgram:
    """CudaProgram on the host: `launch` returns when the kernel has ended."""

    def __init__(self, library: Path) -> None:
        self._launch = ctypes.CDLL(str(library)).launch

    def launch(
        self, name: str, grid: tuple[int, ...], threads: int, *arguments: Any, cooperative: bool = False
    ):
        packed = b"".join(
            struct.pack("<d" if isinstance(value, float) else "<q", value) for value in arguments
        )
        blocks, rows = (*grid, 1)[:2]
        status = self._launch(name.encode(), blocks, rows, threads, int(cooperative), packed, len(arguments))
        assert status == 0, f"{name} with {len(arguments)} arguments: {status}"


def build() -> DoubleProgram:
    """Return all kernels, compiled."""
    from edgellm_ros.kernels.cuda.compiler import KERNELS, TREE_KERNELS, macros, source

    kernels = source(tuple(dict.fromkeys(KERNELS + TREE_KERNELS)))
    options = ["-O2", "-ffp-contract=off", *(f"-D{name}={value}" for name, value in macros())]
    return DoubleProgram(build_library(FOLDERS[0] / "launch.cpp", kernels, (BLOCKS,), options))


def double_side(program: DoubleProgram, multiprocessors: int) -> Side:
    device = DoubleDevice(multiprocessors)
    return Side(device, CudaKernels(device, program), CudaTreeKernels(device, program))


def _with_array(tensor: Tensor) -> Tensor:
    nbytes = tensor.size * tensor.dtype.itemsize
    raw = (ctypes.c_uint8 * max(1, nbytes)).from_address(tensor.pointer)
    array = np.frombuffer(raw, np.uint8)[:nbytes].view(tensor.dtype).reshape(tensor.shape)
    return Tensor(tensor.pointer, tensor.shape, tensor.dtype, tensor.owner, array)
