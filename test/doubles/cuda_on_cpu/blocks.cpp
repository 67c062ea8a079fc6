// SPDX-License-Identifier: Apache-2.0
#include "blocks.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

__thread Dim threadIdx, blockIdx, blockDim, gridDim;

void __nanosleep(unsigned) {
  std::this_thread::yield();
  cuda_on_cpu::yield();
}

namespace cuda_on_cpu {

__thread Block* block;
__thread bool* second_half;

namespace {

constexpr size_t STACK_BYTES = 32 << 10;

struct Fiber {
  ucontext_t start;  // begins it; from then on jumps, which need no system calls
  jmp_buf place;
  unsigned index = 0;
  bool begun = false, done = false, second_half = false;
};

thread_local jmp_buf scheduler;
thread_local Fiber* running;
thread_local Work work;
thread_local void (*prepare)(void*);
thread_local void* context;

void resume(Fiber& fiber) {
  running = &fiber;
  threadIdx = {fiber.index, 0, 0};
  second_half = &fiber.second_half;
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

void run_fiber() {
  if (prepare) prepare(context);
  work.run(work.arguments);
  running->done = true;
  yield();
}

void run_block(unsigned threads, unsigned seed) {
  std::vector<Fiber> fibers(threads);
  std::vector<Meeting> warps((threads + WARP - 1) / WARP);
  std::vector<uint64_t> slots(warps.size() * WARP * 2);
  Block own{{threads, 0, 0}, warps.data(), slots.data()};
  block = &own;
  for (unsigned i = 0; i < threads; ++i) ++warps[i / WARP].size;
  std::unique_ptr<char[]> stacks(new char[STACK_BYTES * threads]);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
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
      Fiber& fiber = fibers[index];
      if (fiber.done) continue;
      resume(fiber);
      left -= fiber.done;
    }
  }
}

}  // namespace

void yield() {
  if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

void run_grid(Dim grid, unsigned threads, bool cooperative, Work kernel, void (*before)(void*), void* given) {
  static std::atomic<unsigned> launches{1};
  const unsigned seed = 1000003 * launches++;
  auto run = [&](unsigned x, unsigned y) {
    work = kernel;
    prepare = before;
    context = given;
    blockIdx = {x, y, 0};
    gridDim = grid;
    blockDim = {threads, 1, 1};
    run_block(threads, seed + y * grid.x + x);
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

}  // namespace cuda_on_cpu
