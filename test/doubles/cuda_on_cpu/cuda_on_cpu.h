// SPDX-License-Identifier: Apache-2.0
// As much of CUDA C++ as our kernels use, for a host compiler: tests run the kernels without a GPU.
//
// Each thread of a block is a fiber that runs until it waits for others; the fibers of a block take turns in a
// random order within one thread of the host. Blocks of a cooperative launch run at once, each in a thread of its
// own, others one after the other.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __maxnreg__(...)

struct uchar1 { unsigned char x; };
struct ushort1 { unsigned short x; };
struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

struct Dim { unsigned x, y, z; };
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 32 << 10;

struct Meeting {  // of the threads that wait for each other
  unsigned size = 0, arrived = 0;
  unsigned long held = 0;
};

struct Fiber {
  ucontext_t start;  // begins it; from then on jumps, which need no system calls
  jmp_buf place;
  unsigned index = 0;
  bool begun = false, done = false, odd = false;  // odd: which half of the warp's slots is written next
};

struct Block {
  std::function<void()> kernel;
  std::vector<Fiber> fibers;
  Meeting all;
  std::vector<Meeting> warps;
  std::vector<uint64_t> slots;  // of each warp, twice one for each lane
  jmp_buf scheduler;
  Fiber* running = nullptr;
};

inline thread_local Block* block;

inline void yield() {
  if (!_setjmp(block->running->place)) _longjmp(block->scheduler, 1);
}

inline void resume(Fiber& fiber) {
  block->running = &fiber;
  if (_setjmp(block->scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

inline void meet(Meeting& meeting) {
  const unsigned long meetings = meeting.held;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    ++meeting.held;
  }
  while (meeting.held == meetings) yield();
}

inline void run_fiber() {
  block->kernel();
  block->running->done = true;
  yield();
}

inline void run_block(unsigned threads, const std::function<void()>& kernel, unsigned seed) {
  Block own;
  block = &own;
  own.kernel = kernel;
  own.fibers.resize(threads);
  own.all.size = threads;
  own.warps.resize((threads + WARP - 1) / WARP);
  own.slots.resize(own.warps.size() * WARP * 2);
  for (unsigned i = 0; i < threads; ++i) ++own.warps[i / WARP].size;
  std::unique_ptr<char[]> stacks(new char[STACK_BYTES * threads]);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = own.fibers[i];
    fiber.index = i;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = &stacks[STACK_BYTES * i];
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }
  std::vector<unsigned> turns(threads);
  std::iota(turns.begin(), turns.end(), 0u);
  std::shuffle(turns.begin(), turns.end(), std::minstd_rand(seed));
  for (unsigned left = threads; left > 0;) {
    for (unsigned index : turns) {
      Fiber& fiber = own.fibers[index];
      if (fiber.done) continue;
      threadIdx = {index, 0, 0};
      resume(fiber);
      left -= fiber.done;
    }
  }
}

inline void run_grid(Dim grid, unsigned threads, bool cooperative, const std::function<void()>& kernel) {
  static std::atomic<unsigned> launches{1};
  const unsigned seed = 1000003 * launches++;
  auto run = [&](unsigned x, unsigned y) {
    blockIdx = {x, y, 0};
    gridDim = grid;
    blockDim = {threads, 1, 1};
    run_block(threads, kernel, seed + y * grid.x + x);
  };
  std::vector<std::thread> running;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x)
      if (cooperative)
        running.emplace_back(run, x, y);
      else
        run(x, y);
  for (auto& thread : running) thread.join();
}

// What the lane `from` of this warp has as its value; all lanes call it together.
template <class T>
T exchange(T value, unsigned from) {
  Fiber& fiber = *block->running;
  const unsigned warp = fiber.index / WARP;
  uint64_t* slots = &block->slots[(2 * warp + fiber.odd) * WARP];
  fiber.odd = !fiber.odd;
  std::memcpy(&slots[fiber.index % WARP], &value, sizeof(T));
  meet(block->warps[warp]);
  std::memcpy(&value, &slots[from], sizeof(T));
  return value;
}

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::meet(cuda_on_cpu::block->all); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __nanosleep(unsigned) {
  std::this_thread::yield();
  cuda_on_cpu::yield();
}

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
  while (old < value &&
         !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
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
