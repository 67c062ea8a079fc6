// SPDX-License-Identifier: Apache-2.0
// A library with the fused kernels and one function that launches them by name. fused.inc: the CUDA sources; KERNELS: KERNEL(name) of each.
#include "primitives_on_cpu.h"
#include "kernel_table.h"

#include "fused.inc"

#ifndef KERNELS
#if TENSOR_CORES && ROWS > 1
#define ATTENTION_KERNELS KERNEL(new_rows) KERNEL(tree_attention)
#elif ROWS > 1
#define ATTENTION_KERNELS KERNEL(attention) KERNEL(new_rows) KERNEL(tree_attention)
#else
#define ATTENTION_KERNELS KERNEL(attention)
#endif
#if JOINED  // of a draft head
#define OWN_KERNELS KERNEL(joined_qkv) KERNEL(draft_head)
#else
#define OWN_KERNELS KERNEL(qkv_x) KERNEL(qkv) KERNEL(lm_head_x) KERNEL(lm_head) KERNEL(last_state)
#endif
#define X_KERNELS KERNEL(o_x) KERNEL(gate_up_x) KERNEL(down_x)
#define KERNELS OWN_KERNELS X_KERNELS ATTENTION_KERNELS KERNEL(o) KERNEL(gate_up) KERNEL(down)
#endif
static const KernelTable kernels = {KERNELS};

static thread_local unsigned started;

// 0 when the kernel has run, 1 for an unknown name, 2 for a wrong number of arguments, 3 for too much shared memory.
extern "C" int launch(const char* name, unsigned blocks, unsigned rows, unsigned threads, unsigned shared,
                      unsigned cluster_size, Arguments arguments, int count) {
  const auto kernel = kernels.find(name);
  if (kernel == kernels.end()) return 1;
  const Prepared prepared = kernel->second(arguments, count);
  if (!prepared) return 2;
  if (shared > sizeof fused_on_cpu::shared_memory) return 3;
  const unsigned across = blocks / cluster_size;
  std::vector<fused_on_cpu::Cluster> clusters(across * rows);
  for (auto& each : clusters) each.memory.resize(cluster_size), each.threads = cluster_size * threads;
  started = 0;
  cuda_on_cpu::run_grid({blocks, rows, 1}, threads, cluster_size > 1, [&] {
    using namespace fused_on_cpu;
    if (started++ % threads == 0) {  // the first thread of a block
      ++fused_on_cpu::blocks;
      std::memset(shared_memory, POISON, sizeof shared_memory);
      cluster = &clusters[blockIdx.y * across + blockIdx.x / cluster_size];
      cluster->memory[blockIdx.x % cluster_size] = shared_memory;
    }
    copies.resize(std::max<size_t>(copies.size(), threadIdx.x + 1));
    copies[threadIdx.x] = {};
    prepared();
  });
  return 0;
}
