#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write what an editor needs to open a fused kernel as it is compiled.

NVRTC gets the plan of a program as macros. They are written to a header, and the flags for clangd beside it:

    python tools/kernel_config.py                                  # the names of all programs
    python tools/kernel_config.py "qwen3-1.7b, 1 rows" edgellm_ros/fused/kernels
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from kernel_digests import programs  # noqa: E402

HEADER = "config.h"
# What CUDA's headers declare, as far as the kernels use it: clangd finds them without a CUDA toolkit.
DECLARATIONS = """\
#pragma once
#define __global__ __attribute__((global))
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __maxnreg__(registers)
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };
struct uint3 { unsigned x, y, z; };
extern const __device__ uint3 threadIdx, blockIdx, blockDim, gridDim;
__device__ void __syncthreads();
__device__ void __syncwarp(unsigned mask = ~0u);
template <class T> __device__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32);
template <class T> __device__ T __shfl_xor_sync(unsigned mask, T value, int lane, int width = 32);
template <class T> __device__ T __reduce_max_sync(unsigned mask, T value);
template <class T> __device__ T __reduce_add_sync(unsigned mask, T value);
__device__ unsigned __ballot_sync(unsigned mask, int value);
__device__ int __any_sync(unsigned mask, int value);
__device__ int __all_sync(unsigned mask, int value);
__device__ unsigned long long atomicAdd(unsigned long long* address, unsigned long long value);
__device__ float __uint_as_float(unsigned bits);
__device__ unsigned __float_as_uint(float value);
__device__ long long __float2ll_rn(float value);
__device__ int __float2int_rn(float value);
__device__ unsigned __byte_perm(unsigned low, unsigned high, unsigned selector);
__device__ int __popc(unsigned value);
__device__ int __clz(int value);
__device__ int __ffs(int value);
__device__ float fmaxf(float a, float b);
__device__ float fminf(float a, float b);
__device__ float fabsf(float value);
__device__ float floorf(float value);
__device__ float logf(float value);
__device__ float expf(float value);
__device__ float __fdividef(float a, float b);
__device__ float sqrtf(float value);
"""
FLAGS = ("-xcuda", "--cuda-device-only", "--cuda-gpu-arch=sm_90", "-nocudainc", "-nocudalib", "-std=c++17")


def header(plan: Any) -> str:
    """Return the macros of a plan as a header."""
    return "".join(f"#define {name} {value}\n" for name, value in plan.macros())


def main() -> None:
    """Write the header and `compile_flags.txt`, or list the programs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    args = parser.parse_args()
    plans = dict(programs())
    if args.program not in plans:
        sys.exit("programs: " + "; ".join(plans))
    plan = plans[args.program]
    (args.folder / HEADER).write_text(DECLARATIONS + header(plan))
    flags = [*FLAGS, f"-include{(args.folder / HEADER).resolve()}"]
    (args.folder / "compile_flags.txt").write_text("\n".join(flags) + "\n")
    print(f"{args.program}: open {plan.source}")


if __name__ == "__main__":
    main()
