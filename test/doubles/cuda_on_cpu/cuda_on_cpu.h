// SPDX-License-Identifier: Apache-2.0
// As much of CUDA C++ as our kernels use, for a host compiler: tests run the kernels without a GPU.
//
// Each thread of a block is a fiber that runs until it waits for others; the fibers of a block take turns in a
// random order within one thread of the host. Blocks of a cooperative launch run at once, each in a thread of its
// own, others one after the other. `blocks.cpp` has what runs them, which is compiled once for all kernels; this
// file and the kernels are compiled without C++'s library, whose headers take longer than a kernel.
#pragma once
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __host__
#define __device__
#define __global__
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct uchar1 {
  unsigned char x;
};
struct ushort1 {
  unsigned short x;
};
struct uint1 {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct Dim {
  unsigned x, y, z;
};
extern __thread Dim threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr unsigned WARP = 32;

struct Meeting {  // of the threads that wait for each other
  unsigned size, arrived;
  unsigned long held;
};

struct Block {
  Meeting all;
  Meeting* warps;
  uint64_t* slots;  // of each warp, twice one for each lane
};

extern __thread Block* block;
extern __thread bool* second_half;  // of the running thread: which half of the warp's slots is written next

void yield();

inline void meet(Meeting& meeting) {
  const unsigned long meetings = meeting.held;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    ++meeting.held;
  }
  while (meeting.held == meetings) yield();
}

// What the lane `from` of this warp has as its value; all lanes call it together.
template <class T>
T exchange(T value, unsigned from) {
  const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint64_t* slots = &block->slots[(2 * warp + *second_half) * WARP];
  *second_half = !*second_half;
  memcpy(&slots[lane], &value, sizeof(T));
  meet(block->warps[warp]);
  memcpy(&value, &slots[from], sizeof(T));
  return value;
}

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::meet(cuda_on_cpu::block->all); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __nanosleep(unsigned);

template <class T>
T __shfl_sync(unsigned, T value, unsigned from) {
  return cuda_on_cpu::exchange(value, from);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int step) {
  return cuda_on_cpu::exchange(value, threadIdx.x % cuda_on_cpu::WARP ^ step);
}

template <class T>
T __shfl_up_sync(unsigned, T value, unsigned step) {
  const unsigned lane = threadIdx.x % cuda_on_cpu::WARP;
  return cuda_on_cpu::exchange(value, lane >= step ? lane - step : lane);
}

template <class T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicMax(T* address, T value) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

template <class T>
T __ldcg(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clzll(long long value) { return value ? __builtin_clzll(value) : 64; }
inline unsigned __float_as_uint(float value) { return cuda_on_cpu::same_bits<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return cuda_on_cpu::same_bits<float>(value); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned __int128)a * b >> 64;
}
inline float __double2float_ru(double value) {
  const float nearest = (float)value;
  return nearest < value ? nextafterf(nearest, INFINITY) : nearest;
}
