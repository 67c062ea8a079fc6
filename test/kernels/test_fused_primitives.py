# SPDX-License-Identifier: Apache-2.0
"""The primitives of the fused kernels against NumPy.

Without a GPU their double on the host is tested.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC and its bindings are not installed (requirements-test.txt)")

from cuda.core import ProgramOptions

from doubles import fused_on_cpu
from doubles.fused_decoder import TYPES
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.sources import PRIMITIVES, expand
from edgellm_ros.kernels.cuda.compiler import compile_source
from fixtures.on_device import put

# Two warps add the product of their own a [16,16] and b [16,8] to d [16,8] twice.
MULTIPLY = r"""
extern "C" __global__ void multiply(const u32* a, const u16* b, float* d) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  a += warp * 128, b += warp * 128, d += warp * 128;
  const u32 left[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
  const u16* const column = b + g;
  const u32 low = column[16 * t] | (u32)column[16 * t + 8] << 16;
  const u32 high = column[16 * t + 64] | (u32)column[16 * t + 72] << 16;
  float* const upper = d + g * 8 + 2 * t;
  float* const lower = upper + 64;
  float sums[4] = {upper[0], upper[1], lower[0], lower[1]};
  mma_m16n8k16(sums, left, low, high);
  mma_m16n8k16(sums, left, low, high);
  upper[0] = sums[0], upper[1] = sums[1], lower[0] = sums[2], lower[1] = sums[3];
}

// The same of bytes: a [16,32], b [8,32] with signs.
extern "C" __global__ void multiply_bytes(const u32* a, const u32* b, int* d) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  a += warp * 128, b += warp * 64, d += warp * 128;
  const u32 left[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
  int* const upper = d + g * 8 + 2 * t;
  int* const lower = upper + 64;
  int sums[4] = {upper[0], upper[1], lower[0], lower[1]};
  mma_m16n8k32_u8s8(sums, left, b[g * 8 + t], b[g * 8 + t + 4]);
  mma_m16n8k32_u8s8(sums, left, b[g * 8 + t], b[g * 8 + t + 4]);
  upper[0] = sums[0], upper[1] = sums[1], lower[0] = sums[2], lower[1] = sums[3];
}
"""


@dataclass
class Matrices:
    """Parameters of the kernels of MULTIPLY: addresses."""

    a: int
    b: int
    d: int

    def pack(self):
        return (ctypes.c_int64 * 3)(self.a, self.b, self.d)


@pytest.fixture(scope="module")
def program(device):
    """Function that compiles MULTIPLY for the device and a type, once."""

    @functools.cache
    def make(dtype: str):
        macros = [("BF16", str(int(dtype == "bf16")))]
        if device.memory != "cuda":
            return fused_on_cpu.build(MULTIPLY, macros, ("multiply", "multiply_bytes"))
        from edgellm_ros.fused.cuda.program import FusedProgram

        macros.append(("PDL_TRIGGER_FIRST", "0"))
        options = ProgramOptions(arch=device.arch, std="c++17", define_macro=macros)
        return FusedProgram(device, compile_source(device.arch, expand(PRIMITIVES) + MULTIPLY, options))

    return make


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_mma_adds_the_product_of_two_matrices(device, dtype, program):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((2, 16, n)).astype(TYPES[dtype]) for n in (16, 8))
    d = random.standard_normal((2, 16, 8)).astype(np.float32)
    tensors = put(device, a.view(np.uint16)), put(device, b.view(np.uint16)), put(device, d)
    launch = Launch("multiply", (1, 1), 64)
    program(dtype).launch(launch, Matrices(*(tensor.pointer for tensor in tensors)))
    expected = d + 2 * (a.astype(np.float64) @ b.astype(np.float64))
    np.testing.assert_allclose(device.download(tensors[2]), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_mma_bytes_adds_the_product_of_two_matrices(device, program):
    random = np.random.default_rng(0)
    a, b = random.integers(0, 256, (2, 16, 32), np.uint8), random.integers(-128, 128, (2, 8, 32), np.int8)
    d = random.integers(-1000, 1000, (2, 16, 8), np.int32)
    tensors = put(device, a), put(device, b), put(device, d)
    launch, matrices = Launch("multiply_bytes", (1, 1), 64), Matrices(*(tensor.pointer for tensor in tensors))
    program("fp16").launch(launch, matrices)
    expected = d + 2 * (a.astype(np.int32) @ b.astype(np.int32).swapaxes(1, 2))
    np.testing.assert_array_equal(device.download(tensors[2]), expected)
