// SPDX-License-Identifier: Apache-2.0
#define BF16 0  // of the header's functions, which are not used here
#include "clusters.h"

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace fused_on_cpu {

__thread uint4* shared_memory;
__thread unsigned blocks;

namespace {

struct Copy {
  uint4* target;
  const void* source;
  bool valid;
};

// Copies of one thread of a block, in groups; a new launch begins without any.
struct Copies {
  std::vector<std::vector<Copy>> groups{{}};
  size_t finished = 0;
};
thread_local std::vector<Copies> copies;
thread_local std::vector<uint4> memory(SHARED_BYTES / sizeof(uint4));
thread_local unsigned started = 0;  // threads of the block

struct Cluster {
  std::vector<uint4*> memory;  // of each block, once it has begun
  unsigned threads = 0;        // of all blocks
  std::atomic<unsigned> arrived{0};
  std::atomic<unsigned long> held{0};
};

struct Clusters {
  unsigned size;
  std::vector<Cluster> all;
};

thread_local Cluster* cluster;
thread_local std::vector<unsigned long> mbarrier;  // meetings that had been held when a thread arrived
std::mutex arrivals_mutex;

void begin_thread(void* context) {
  if (started == 0) {
    ++blocks;
    shared_memory = memory.data();
    memset(shared_memory, POISON, SHARED_BYTES);
    auto& clusters = *static_cast<Clusters*>(context);
    cluster = &clusters.all[blockIdx.y * (gridDim.x / clusters.size) + blockIdx.x / clusters.size];
    cluster->memory[blockIdx.x % clusters.size] = shared_memory;
  }
  started = (started + 1) % blockDim.x;
  if (copies.size() <= threadIdx.x) copies.resize(threadIdx.x + 1);
  copies[threadIdx.x] = {};
}

}  // namespace

void run_grid(Dim grid, unsigned threads, unsigned cluster_size, cuda_on_cpu::Work work) {
  Clusters clusters{cluster_size, std::vector<Cluster>(grid.x / cluster_size * grid.y)};
  for (Cluster& each : clusters.all) each.memory.resize(cluster_size), each.threads = cluster_size * threads;
  cuda_on_cpu::run_grid(grid, threads, cluster_size > 1, work, begin_thread, &clusters);
}

uint4* memory_in_cluster(int block) { return cluster->memory[block]; }

void wait_for_other_blocks() {
  if (threadIdx.x == 0) std::this_thread::yield();
  cuda_on_cpu::yield();
}

void lock_arrivals() { arrivals_mutex.lock(); }
void unlock_arrivals() { arrivals_mutex.unlock(); }

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

void cp_async(SmemPtr target, const void* source, bool valid) {
  fused_on_cpu::copies[threadIdx.x].groups.back().push_back({target.memory, source, valid});
}
void cp_async_commit() { fused_on_cpu::copies[threadIdx.x].groups.emplace_back(); }

void cluster_arrive() {
  using namespace fused_on_cpu;
  if (mbarrier.size() <= threadIdx.x) mbarrier.resize(threadIdx.x + 1);
  mbarrier[threadIdx.x] = cluster->held;
  if (++cluster->arrived == cluster->threads) cluster->arrived = 0, ++cluster->held;
}
void cluster_wait() {
  while (fused_on_cpu::cluster->held == fused_on_cpu::mbarrier[threadIdx.x]) fused_on_cpu::wait_for_other_blocks();
}
