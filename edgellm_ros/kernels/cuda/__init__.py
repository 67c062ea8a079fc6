# SPDX-License-Identifier: Apache-2.0
"""The kernels in CUDA C++, compiled for the GPU of this machine on first use."""

from __future__ import annotations

from typing import Any

from edgellm_ros.kernels.cuda.compiler import TREE_KERNELS, cached_kernels
from edgellm_ros.kernels.cuda.kernels import CudaKernels
from edgellm_ros.kernels.cuda.program import CudaProgram
from edgellm_ros.kernels.cuda.tree_kernels import CudaTreeKernels


def load_cuda_kernels(device: Any, early: bool = False) -> CudaKernels:
    """Load the kernels for a `CudaDevice`, compiled or from the cache.

    early: see `CudaProgram`.
    """
    program = CudaProgram(device, cached_kernels(device.arch), early)
    device.fill_kernel = program.function("fill")
    return CudaKernels(device, program)


def load_cuda_tree_kernels(device: Any, early: bool = False) -> CudaTreeKernels:
    """Load the kernels of speculative decoding in the same way."""
    program = CudaProgram(device, cached_kernels(device.arch, files=TREE_KERNELS), early)
    return CudaTreeKernels(device, program)
