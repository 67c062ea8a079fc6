// SPDX-License-Identifier: Apache-2.0
// Runs a grid of blocks on the host.
#pragma once
#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

// A kernel with its arguments.
struct Work {
  void (*run)(const uint64_t* arguments);
  const uint64_t* arguments;
};

// prepare(context) is called before each thread of a block begins; null = nothing to do.
void run_grid(Dim grid, unsigned threads, bool cooperative, Work work, void (*prepare)(void*), void* context);

}  // namespace cuda_on_cpu
