// SPDX-License-Identifier: Apache-2.0
// A library with the fused kernels and one function that launches them by name. fused.inc: the CUDA sources.
#include "primitives_on_cpu.h"

#include <map>
#include <string>

#include "fused.inc"

using Arguments = const uint64_t*;
using Prepared = std::function<void()>;

template <class... A, size_t... I>
Prepared prepare(void (*kernel)(A...), Arguments arguments, std::index_sequence<I...>) {
  return [=] { kernel(cuda_on_cpu::same_bits<A>(arguments[I])...); };
}

// Nothing if the number of arguments is not the kernel's.
template <class... A>
Prepared prepare(void (*kernel)(A...), Arguments arguments, int count) {
  return count == sizeof...(A) ? prepare(kernel, arguments, std::index_sequence_for<A...>{}) : Prepared{};
}

#define KERNEL(name) {#name, [](Arguments arguments, int count) { return prepare(name, arguments, count); }},

static const std::map<std::string, std::function<Prepared(Arguments, int)>> kernels = {
    KERNEL(qkv) KERNEL(attention) KERNEL(o) KERNEL(gate_up) KERNEL(down) KERNEL(lm_head)};

// 0 when the kernel has run, 1 for an unknown name, 2 for a wrong number of arguments, 3 for too much shared memory.
extern "C" int launch(const char* name, unsigned blocks, unsigned rows, unsigned threads, unsigned shared,
                      Arguments arguments, int count) {
  const auto kernel = kernels.find(name);
  if (kernel == kernels.end()) return 1;
  const Prepared prepared = kernel->second(arguments, count);
  if (!prepared) return 2;
  if (shared > sizeof fused_on_cpu::shared_memory) return 3;
  unsigned started = 0;
  cuda_on_cpu::run_grid({blocks, rows, 1}, threads, false, [&] {
    using namespace fused_on_cpu;
    if (started++ % threads == 0) {  // the first thread of a block
      ++fused_on_cpu::blocks;
      std::memset(shared_memory, POISON, sizeof shared_memory);
    }
    copies.resize(std::max<size_t>(copies.size(), threadIdx.x + 1));
    copies[threadIdx.x] = {};
    prepared();
  });
  return 0;
}
