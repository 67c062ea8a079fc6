// SPDX-License-Identifier: Apache-2.0
// Runs a grid of the fused kernels on the host.
#pragma once
#include "blocks.h"
#include "primitives_on_cpu.h"

namespace fused_on_cpu {

// cluster_size: number of blocks that run at once and write to each other's smem.
void run_grid(Dim grid, unsigned threads, unsigned cluster_size, cuda_on_cpu::Work work);

}  // namespace fused_on_cpu
