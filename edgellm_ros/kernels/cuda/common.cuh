// SPDX-License-Identifier: Apache-2.0
// Types and helpers of all kernels. The files of this folder are compiled as one program that begins with this
// file. No CUDA headers are needed: NVRTC's wheel is enough.

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Rows are moved as bytes, in the widest units that their addresses and lengths allow. A kernel that moves rows
// is compiled once per width; the caller selects one.
#define FOR_EACH_WIDTH(KERNEL) KERNEL(1, uchar1) KERNEL(2, ushort1) KERNEL(4, uint1) KERNEL(8, uint2) KERNEL(16, uint4)

__device__ inline i64 clamp(i64 value, i64 low, i64 high) { return value < low ? low : value > high ? high : value; }

__device__ inline i64 first_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

__device__ inline i64 index_stride() { return (i64)gridDim.x * blockDim.x; }

// Let the next kernel start, and wait until the kernel before has ended and its writes can be read. Every kernel begins
// with this, because it may start early (`CudaProgram`).
__device__ inline void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
