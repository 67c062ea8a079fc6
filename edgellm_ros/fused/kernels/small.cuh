// SPDX-License-Identifier: Apache-2.0
// GEMM of up to eight rows with matrices that CTAs keep in smem, and RMSNorm by one warp per row, for small draft
// heads. CLUSTER: CTAs over which the columns of a matrix are distributed.

#pragma once

#include "primitives.cuh"

constexpr int WARPS = THREADS / 32, MATRIX_ROWS = 8;
constexpr int X_GAP = 8;                                                // padding of x against bank conflicts
constexpr int SUMS_STRIDE = 20, TILE_SUMS = MATRIX_ROWS * SUMS_STRIDE;  // accumulators of a tile of 16 columns

__device__ constexpr int largest_divisor(int number, int most) {
  while (number % most) --most;
  return most;
}

// GEMM with a matrix [K,N], or with two [K,N / 2] side by side, of which a CTA has the same columns. Tiles of 16
// columns are dealt to the CTAs round-robin. In smem a tile is [K,2] chunks of 8 columns, swizzled for conflict-free
// ldmatrix. STRIDE: row stride of the matrix in global memory.
template <int K_, int N_, int MATRICES_ = 1, int STRIDE = N_>
struct Product {
  static constexpr int K = K_, N = N_, MATRICES = MATRICES_, COLUMNS = N / MATRICES;
  static constexpr int STEPS = K / 16, TILES = (COLUMNS + 15) / 16, SHARE = (TILES + CLUSTER - 1) / CLUSTER;
  static constexpr int OWN = SHARE * MATRICES;                                            // tiles per CTA
  static constexpr int PARTIALS = largest_divisor(STEPS, OWN < WARPS ? WARPS / OWN : 1);  // split-K: warps per tile
  static constexpr int LENGTH = STEPS / PARTIALS, AT_ONCE = largest_divisor(LENGTH, 8);   // k steps per warp
  static constexpr int PLACES = OWN * K * 2, SUMS = OWN * PARTIALS * TILE_SUMS;
  static_assert(K % 16 == 0 && COLUMNS % 8 == 0);

  __device__ static int place(int k, int half) { return 2 * k + (half ^ (k >> 2 & 1)); }
  // First column of a CTA's tile in its matrix.
  __device__ static int first_column(int rank, int tile) { return (rank + tile / MATRICES * CLUSTER) * 16; }

  __device__ static void fetch(uint4* target, const u16* weights, int rank) {
    for (int i = threadIdx.x; i < PLACES; i += THREADS) {
      const int half = i % 2, k = i / 2 % K, tile = i / 2 / K, column = first_column(rank, tile) + 8 * half;
      const u16* const source = weights + (i64)k * STRIDE + tile % MATRICES * COLUMNS + column;
      cp_async(SmemPtr(target + tile * K * 2 + place(k, half)), source, column < COLUMNS);
    }
  }

  // Multiply x [8,stride]; each warp stores its partial sums of a tile.
  __device__ static void gemv(const uint4* weights, const u16* x, int stride, float* sums, int rank) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, matrix = lane / 8, k = lane % 8 + matrix / 2 * 8;
    for (int item = threadIdx.x / 32; item < OWN * PARTIALS; item += WARPS) {
      const int tile = item / PARTIALS, part = item % PARTIALS;
      if (first_column(rank, tile) >= COLUMNS) continue;
      float total[2][4] = {};
      SmemPtr from(const_cast<uint4*>(weights) + (tile * K + part * LENGTH * 16) * 2 + place(k, matrix % 2));
      const u16* row = x + g * stride + 2 * t + part * LENGTH * 16;
#pragma unroll 1
      for (int step = 0; step < LENGTH; step += AT_ONCE, from.advance(32 * AT_ONCE), row += 16 * AT_ONCE) {
        u32 values[AT_ONCE][4], low[AT_ONCE], high[AT_ONCE];  // all loads are issued before the first mma
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          ldmatrix_x4_trans(values[i], from.plus(32 * i));
          low[i] = *reinterpret_cast<const u32*>(row + 16 * i),
          high[i] = *reinterpret_cast<const u32*>(row + 16 * i + 8);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) mma_m16n8k16(total[i % 2], values[i], low[i], high[i]);
      }
      float* const out = sums + item * TILE_SUMS;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[(2 * t + i % 2) * SUMS_STRIDE + i / 2 * 8 + g] = total[0][i] + total[1][i];
    }
  }

  __device__ static float sum_of(const float* sums, int tile, int row, int at) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < PARTIALS; ++part)
      sum += sums[(tile * PARTIALS + part) * TILE_SUMS + row * SUMS_STRIDE + at];
    return sum;
  }

  // The same for four adjacent columns, plus a bias if there is one.
  __device__ static void sums_of(float (&result)[4], const float* sums, int tile, int row, int at, const u16* bias) {
#pragma unroll
    for (int j = 0; j < 4; ++j) result[j] = bias ? to_float(bias[j]) : 0.0f;
#pragma unroll
    for (int part = 0; part < PARTIALS; ++part) {
      const uint4 bits =
          *reinterpret_cast<const uint4*>(sums + (tile * PARTIALS + part) * TILE_SUMS + row * SUMS_STRIDE + at);
      result[0] += __uint_as_float(bits.x), result[1] += __uint_as_float(bits.y);
      result[2] += __uint_as_float(bits.z), result[3] += __uint_as_float(bits.w);
    }
  }

  // Call finish(target CTA, row, column, four sums, those of the other matrix) for every CTA of the cluster and every
  // four of this CTA's columns.
  template <class Epilogue>
  __device__ static void deliver(const float* sums, const u16* bias, int rows, int rank, Epilogue finish) {
    for (int i = threadIdx.x; i < 4 * SHARE * CLUSTER * rows; i += THREADS) {
      const int at = i % 4 * 4, own = i / 4 % SHARE, block = i / 4 / SHARE % CLUSTER, row = i / 4 / SHARE / CLUSTER;
      const int tile = own * MATRICES, column = first_column(rank, tile) + at;
      if (column >= COLUMNS) continue;
      float result[4], other[4];
      sums_of(result, sums, tile, row, at, bias ? bias + column : nullptr);
      if (MATRICES > 1) sums_of(other, sums, tile + 1, row, at, bias ? bias + COLUMNS + column : nullptr);
      finish(block, row, column, result, other);
    }
  }
};

__device__ inline uint4 bits_of(const float (&values)[4]) {
  return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
          __float_as_uint(values[3])};
}

// A row of HIDDEN values that one warp holds: each lane has pairs of values, 32 pairs apart.
struct Row {
  static constexpr int PAIRS = HIDDEN / 2, SHARE = PAIRS / 32;
  float2 values[SHARE];

  __device__ static int pair(int i) { return threadIdx.x % 32 + 32 * i; }

  __device__ void read(const u16* row) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) values[i] = to_floats(reinterpret_cast<const u32*>(row)[pair(i)]);
  }
  // Load what an earlier kernel has written.
  __device__ void read_written(const u16* row) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
      values[i] = to_floats(__float_as_uint(load_cg(reinterpret_cast<const float*>(row) + pair(i))));
  }
  __device__ void read(const float* row) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) values[i] = reinterpret_cast<const float2*>(row)[pair(i)];
  }
  __device__ void round() {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) values[i] = to_floats(bits(i));
  }
  __device__ u32 bits(int i) const { return from_float(values[i].x) | (u32)from_float(values[i].y) << 16; }

  __device__ void normalize(const u16* scales) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) sum += values[i].x * values[i].x + values[i].y * values[i].y;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    const float factor = rsqrt_fast(sum * (1.0f / HIDDEN) + EPSILON);
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const float2 scale = to_floats(reinterpret_cast<const u32*>(scales)[pair(i)]);
      values[i].x *= factor * scale.x, values[i].y *= factor * scale.y;
    }
  }
  __device__ void write(u16* out) const {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) reinterpret_cast<u32*>(out)[pair(i)] = bits(i);
  }
  __device__ void write(float* out) const {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) reinterpret_cast<float2*>(out)[pair(i)] = values[i];
  }
};
