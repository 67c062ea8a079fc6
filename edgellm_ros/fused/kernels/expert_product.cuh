// SPDX-License-Identifier: Apache-2.0
// GEMM of x [ROWS,K] with a matrix [K,N], N contiguous, on tensor cores.
//
// A CTA has a tile of columns, ROWS rows and all of k. Split-K within the CTA: a warp has 16 columns and every
// SPLIT-th step of 16 k. It copies its weights to a cp.async ring of its own, as many steps ahead as the ring holds,
// the first ones before pdl_wait. Warps with the same columns are reduced in a fixed order.

#pragma once

#include "primitives.cuh"

template <int K_, int N_, int TILE_>
struct Product {
  static constexpr int K = K_, N = N_, TILE = TILE_;
  static constexpr int GROUPS = TILE / 16, SPLIT = WARPS > GROUPS ? WARPS / GROUPS : 1;
  static constexpr int THREADS = 32 * GROUPS * SPLIT;
  static constexpr int STEPS = K / 16, MOST_STEPS = (STEPS + SPLIT - 1) / SPLIT;  // k steps: of all warps, of one
  static constexpr int RING = MOST_STEPS < STAGES ? MOST_STEPS : STAGES;
  static constexpr int PITCH = K + 8;  // row pitch of x: 8 rows in different banks
  static constexpr int RING_BYTES = 512 * RING, SUMS_BYTES = 80 * ROWS;
  static constexpr int REGION = (RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES) + 64;  // bytes per warp
  static constexpr int SMEM_BYTES = GROUPS * SPLIT * REGION + 2 * ROWS * PITCH;
  static_assert(K % 16 == 0 && TILE % 16 == 0);
};

// Layout of a kernel's smem: a region per warp, its ring and later its accumulators, then x.
template <class P>
struct Memory {
  uint4* regions;
  u16* x;  // [ROWS,PITCH]
  int lane, group, split;

  __device__ explicit Memory(uint4* memory)
      : regions(memory), x(reinterpret_cast<u16*>(memory + P::GROUPS * P::SPLIT * P::REGION / 16)) {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32, group = warp % P::GROUPS, split = warp / P::GROUPS;
  }
  __device__ uint4* region() const { return regions + threadIdx.x / 32 * (P::REGION / 16); }

  // Accumulators of the warp's columns, [ROWS,20], 16 used.
  __device__ float* sums() const { return reinterpret_cast<float*>(region()); }

  // Address of the accumulator of the first warp with a column.
  __device__ float* sum(int row, int column) const {
    return reinterpret_cast<float*>(regions) + column / 16 * (P::REGION / 4) + row * 20 + column % 16;
  }

  // Reduce a column over its warps.
  __device__ float total(int row, int column) const {
    const float* const place = sum(row, column);
    float result = 0;
#pragma unroll
    for (int i = 0; i < P::SPLIT; ++i) result += place[i * P::GROUPS * (P::REGION / 4)];
    return result;
  }
};

// cp.async pipeline of one warp: a step is a matrix [16,16], of which a lane copies half a row.
template <class P>
struct WarpWeights {
  const u16* source;
  SmemPtr to, from;
  int steps, left, to_slot, from_slot;

  // Slot of half a row of a step. Rows 4 to 7 and 12 to 15 have their halves swapped, against bank conflicts.
  __device__ static int place(int row, int half) { return 2 * row + (half ^ (row / 4 & 1)); }

  // column: the warp's first one.
  __device__ WarpWeights(const u16* weights, const Memory<P>& memory, int column)
      : to(memory.region() + place(memory.lane / 2, memory.lane % 2)),
        from(memory.region() + place(memory.lane % 8 + memory.lane / 16 * 8, memory.lane / 8 % 2)),
        to_slot(0),
        from_slot(0) {
    source = weights + (i64)(16 * memory.split + memory.lane / 2) * P::N + column + memory.lane % 2 * 8;
    steps = left = (P::STEPS - memory.split + P::SPLIT - 1) / P::SPLIT;
#pragma unroll
    for (int i = 0; i < P::RING; ++i) next();
  }

  // Issue the next copy. Always commits a group, even an empty one: cp_async_wait counts groups.
  __device__ void next() {
    if (left > 0) {
      cp_async(to, source);
      source += (i64)16 * P::SPLIT * P::N, --left;
    }
    cp_async_commit();
    advance(to, to_slot);
  }

  // Wait for the oldest stage and load it.
  __device__ void take(u32 (&matrix)[4]) {
    cp_async_wait<P::RING - 1>();
    warp_sync();
    ldmatrix_x4_trans(matrix, from);
    advance(from, from_slot);
  }

  __device__ static void advance(SmemPtr& place, int& slot) {
    const bool last = ++slot == P::RING;
    place.advance(last ? -32 * (P::RING - 1) : 32);
    if (last) slot = 0;
  }
};

// Multiply x, and store the accumulators of each warp to its region.
template <class P>
__device__ inline void gemv(const Memory<P>& memory, WarpWeights<P>& weights) {
  constexpr int TILES = ROWS / 8;  // tiles of 8 rows
  const int g = memory.lane / 4, t = memory.lane % 4;
  float sums[TILES][4] = {};
  const u16* x = memory.x + g * P::PITCH + 2 * t + 16 * memory.split;
#pragma unroll 4
  for (int left = weights.steps; left > 0; --left, x += 16 * P::SPLIT) {
    u32 matrix[4];
    weights.take(matrix);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const u32* const pairs = reinterpret_cast<const u32*>(x + 8 * i * P::PITCH);
      mma_m16n8k16(sums[i], matrix, pairs[0], pairs[4]);
    }
    weights.next();
  }
  warp_sync();
  float* const own = memory.sums();
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) own[(8 * i + 2 * t + j % 2) * 20 + g + j / 2 * 8] = sums[i][j];
  __syncthreads();
}

// Two values in the model's type.
__device__ inline u32 pack(float low, float high) { return from_float(low) | (u32)from_float(high) << 16; }

// Copy rows [rows,K] of the previous kernel's output to x; zeros after the last row.
template <class P>
__device__ inline void copy_x(const Memory<P>& memory, const u16* source, int first, int rows) {
  constexpr int PIECES = P::K / 8;
  for (int i = threadIdx.x; i < ROWS * PIECES; i += P::THREADS) {
    const int row = i / PIECES, column = i % PIECES * 8;
    const bool valid = first + row < rows;
    const SmemPtr place(reinterpret_cast<uint4*>(memory.x + row * P::PITCH + column));
    cp_async(place, source + (valid ? (i64)(first + row) * P::K + column : 0), valid);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

// RMSNorm of rows of the residual stream. A warp has a row, a lane every 32nd pair of its values.
struct Norm {
  static constexpr int PAIRS = HIDDEN / 64;
  u32 scales[PAIRS];
  float2 values[PAIRS];
  int lane;

  // Load the norm's weights, which do not depend on earlier kernels.
  __device__ explicit Norm(const u16* norm) : lane(threadIdx.x % 32) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) scales[i] = reinterpret_cast<const u32*>(norm)[lane + 32 * i];
  }

  __device__ void read(const float* row) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) values[i] = load_cg(reinterpret_cast<const float2*>(row) + lane + 32 * i);
  }

  __device__ void normalize() {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum += values[i].x * values[i].x + values[i].y * values[i].y;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    const float factor = rsqrt_fast(sum * (1.0f / HIDDEN) + EPSILON);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float2 scale = to_floats(scales[i]);
      values[i].x *= factor * scale.x, values[i].y *= factor * scale.y;
    }
  }
};

// Store the norm of rows to x. read(norm, row): loads a valid row.
template <class P, class Read>
__device__ inline void write_normed(const Memory<P>& memory, Norm& norm, int first, int rows, Read read) {
  for (int row = threadIdx.x / 32; row < ROWS; row += P::THREADS / 32) {
    u32* const pairs = reinterpret_cast<u32*>(memory.x + row * P::PITCH);
    const bool valid = first + row < rows;
    if (valid) read(norm, first + row), norm.normalize();
#pragma unroll
    for (int i = 0; i < Norm::PAIRS; ++i)
      pairs[norm.lane + 32 * i] = valid ? pack(norm.values[i].x, norm.values[i].y) : 0u;
  }
  __syncthreads();
}
