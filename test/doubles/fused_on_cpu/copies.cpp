// SPDX-License-Identifier: Apache-2.0
#define BF16 0  // of the header's functions, which are not used here
#include "primitives_on_cpu.h"

#include <vector>

namespace fused_on_cpu {

__thread uint4* shared_memory;
__thread unsigned blocks;

namespace {

struct Copy { uint4* target; const void* source; bool valid; };

// Copies of one thread of a block, in groups; a new launch begins without any.
struct Copies {
  std::vector<std::vector<Copy>> groups{{}};
  size_t finished = 0;
};
thread_local std::vector<Copies> copies;
thread_local std::vector<uint4> memory(SHARED_BYTES / sizeof(uint4));
thread_local unsigned started = 0;  // threads of the block

}  // namespace

void begin_thread() {
  if (started == 0) {
    ++blocks;
    shared_memory = memory.data();
    memset(shared_memory, POISON, SHARED_BYTES);
  }
  started = (started + 1) % blockDim.x;
  if (copies.size() <= threadIdx.x) copies.resize(threadIdx.x + 1);
  copies[threadIdx.x] = {};
}

void finish_copies(int groups) {
  Copies& own = copies[threadIdx.x];
  const size_t committed = own.groups.size() - 1;
  for (; own.finished + groups < committed; ++own.finished)
    for (const Copy& copy : own.groups[own.finished]) {
      *copy.target = uint4{0, 0, 0, 0};
      if (copy.valid) memcpy(copy.target, copy.source, sizeof(uint4));
    }
}

}  // namespace fused_on_cpu

void copy_async(Place target, const void* source, bool valid) {
  fused_on_cpu::copies[threadIdx.x].groups.back().push_back({target.memory, source, valid});
}
void commit_copies() { fused_on_cpu::copies[threadIdx.x].groups.emplace_back(); }
