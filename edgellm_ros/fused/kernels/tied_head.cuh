// SPDX-License-Identifier: Apache-2.0
// LM head tied to the embedding table [V,H]. Each warp computes whole rows of the table, STAGES steps of cp.async
// ahead: one row at a time, 256 values per step; with tensor cores 16 rows, 64 values of each per step.

#pragma once

#include "gemv.cuh"
#include "norm.cuh"

struct TiedHead {
  static constexpr bool QUANTIZED = false, ACT_ORDER = false;
  static constexpr int TOKENS = TENSOR_CORES ? 16 : 1, STEP = TENSOR_CORES ? 64 : 256;
  static constexpr int STEPS = (HIDDEN + STEP - 1) / STEP, WIDTH = STEP * STEPS, WARPS = THREADS / 32;
  static constexpr int GROUPS = (VOCAB + TOKENS - 1) / TOKENS;
  static constexpr int RING = STAGES * COPIES * THREADS, X = TENSOR_CORES ? WIDTH / X_GROUP * X_STRIDE : WIDTH * ROWS;
  static constexpr int SMEM_BYTES = 16 * RING + 2 * X + 4 * WARPS * ROWS;

  // As in gemv.cuh with tensor cores; else [ROWS,WIDTH].
  __device__ static constexpr int x_index(int k, int row) {
    return TENSOR_CORES ? k / X_GROUP * X_STRIDE + row * X_GROUP + k % X_GROUP : row * WIDTH + k;
  }

  __device__ static int first_group(int block) { return (int)((i64)block * GROUPS / LM_HEAD_BLOCKS); }
};

// cp.async pipeline of one warp. With tensor cores, lanes 8r to 8r + 7 copy 128 bytes of row 4 * copy + r.
struct TiedHeadPipeline {
  const u16* source;
  SmemPtr place;
  int group, end, step = 0, slot = 0;

  __device__ TiedHeadPipeline(const u16* table, uint4* ring, int first, int end) : place(ring), group(first), end(end) {
    source = table + (i64)first * TiedHead::TOKENS * HIDDEN;
    source += TENSOR_CORES ? lane() / 8 * HIDDEN + lane() % 8 * 8 : lane() * 8;
    place.advance(warp() * 32 * COPIES);
    pdl_trigger();
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      if (i >= PREFETCHED) cp_async_wait<PREFETCHED - 1>();
      prefetch();
    }
  }

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }

  // Swizzled slot of a chunk of 8 values: neither writes nor reads have bank conflicts.
  __device__ static int smem_index(int token, int chunk) { return token * 8 + (chunk ^ token % 2 * 4); }

  // The values that this lane copied.
  __device__ uint4 read() const { return place.plus(lane()).read(); }
  // 8 values of one of 16 rows, with tensor cores.
  __device__ uint4 read(int token, int chunk) const { return place.plus(smem_index(token, chunk)).read(); }

  // Issue the copies of the next step. Always commits a group, even an empty one: cp_async_wait counts groups.
  __device__ void prefetch() {
    if (group < end) {
      if constexpr (TENSOR_CORES) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
          const int token = 4 * i + lane() / 8;
          const SmemPtr target = place.plus(smem_index(token, lane() % 8));
          if constexpr (VOCAB % TiedHead::TOKENS == 0)
            cp_async(target, source + i * 4 * HIDDEN);
          else
            cp_async(target, source + i * 4 * HIDDEN, group * TiedHead::TOKENS + token < VOCAB);
        }
      } else if constexpr (HIDDEN % TiedHead::STEP == 0) {
        cp_async(place.plus(lane()), source);
      } else {
        cp_async(place.plus(lane()), source, step * TiedHead::STEP + lane() * 8 < HIDDEN);
      }
      source += TiedHead::STEP;
      if (++step == TiedHead::STEPS)
        step = 0, group += TiedHead::WARPS,
        source += (i64)TiedHead::WARPS * TiedHead::TOKENS * HIDDEN - TiedHead::WIDTH;
    }
    cp_async_commit();
    const bool last = ++slot == STAGES;
    place.advance((last ? 1 - STAGES : 1) * COPIES * THREADS);
    if (last) slot = 0;
  }
};

// Logits of a warp's rows, one row at a time.
__device__ inline void tied_head_rows(TiedHeadPipeline& pipeline, int first, int end, const u16* x, float* logits,
                                      int rows) {
  const int lane = TiedHeadPipeline::lane();
  for (int token = first; token < end; token += TiedHead::WARPS) {
    float logit[ROWS] = {};
    for (int step = 0; step < TiedHead::STEPS; ++step) {
      cp_async_wait<STAGES - 1>();
      float weights[8];
      unpack(weights, pipeline.read());
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float values[8];
        unpack(values, *reinterpret_cast<const uint4*>(x + TiedHead::x_index(step * 256 + lane * 8, row)));
        logit[row] += dot(weights, values);
      }
      pipeline.prefetch();
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) logit[row] += __shfl_xor_sync(~0u, logit[row], other);
      if (lane == row && row < rows) logits[(i64)row * VOCAB + token] = logit[row];
    }
  }
}

// Logits on tensor cores, 16 rows at a time. The k of one mma are those of chunks 0 to 3 or 4 to 7.
__device__ inline void tied_head_mma(TiedHeadPipeline& pipeline, int first, int end, const u16* x, float* logits,
                                     int rows) {
  constexpr int HALVES = (ROWS + 7) / 8;
  const int g = TiedHeadPipeline::lane() / 4, t = TiedHeadPipeline::lane() % 4;
  for (int group = first; group < end; group += TiedHead::WARPS) {
    float sums[HALVES][4] = {};
    for (int step = 0; step < TiedHead::STEPS; ++step) {
      cp_async_wait<STAGES - 1>();
      warp_sync();
      uint4 upper[2], lower[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) upper[i] = pipeline.read(g, 4 * i + t), lower[i] = pipeline.read(g + 8, 4 * i + t);
      warp_sync();
      pipeline.prefetch();
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int k = step * TiedHead::STEP + i * 32 + t * 8;
          const uint4 values = *reinterpret_cast<const uint4*>(x + TiedHead::x_index(k, half * 8 + g % ROWS));
          mma_m16n8k16(sums[half], {upper[i].x, lower[i].x, upper[i].y, lower[i].y}, values.x, values.y);
          mma_m16n8k16(sums[half], {upper[i].z, lower[i].z, upper[i].w, lower[i].w}, values.z, values.w);
        }
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = half * 8 + 2 * t + j % 2, token = group * TiedHead::TOKENS + j / 2 * 8 + g;
        if (row < rows && row < ROWS && token < VOCAB) logits[(i64)row * VOCAB + token] = sums[half][j];
      }
  }
}

__device__ inline void tied_head(const u16* table, const u16* norm, i64* residual, float* logits, u16* hidden,
                                 const u16* ready, int rows) {
  DYNAMIC_SMEM(memory);
  if (blockIdx.x >= LM_HEAD_BLOCKS) {
    pdl_wait();
    return;
  }
  u16* x = reinterpret_cast<u16*>(memory + TiedHead::RING);
  float* sums = reinterpret_cast<float*>(x + TiedHead::X);
  const int first = TiedHead::first_group(blockIdx.x) + TiedHeadPipeline::warp(),
            end = TiedHead::first_group(blockIdx.x + 1);
  TiedHeadPipeline pipeline(table, memory, first, end);
  if constexpr (LM_HEAD_PREPARED) {
    pdl_wait();
    for (int i = threadIdx.x; i < TiedHead::X / 8; i += THREADS)
      reinterpret_cast<uint4*>(x)[i] = load_cg(reinterpret_cast<const uint4*>(ready) + i);
  } else {
    Normed values;
    values.read_scales(norm);
    pdl_wait();
    norm_rows(values, residual, nullptr, hidden, true, sums, rows,
              [&](int row) { share_x<TiedHead>(x, values, 0, row); });
  }
  if constexpr (TiedHead::WIDTH > HIDDEN)
    for (int i = HIDDEN + threadIdx.x; i < TiedHead::WIDTH; i += THREADS)
#pragma unroll
      for (int row = 0; row < ROWS; ++row) x[TiedHead::x_index(i, row)] = 0;
  __syncthreads();
  if constexpr (TENSOR_CORES)
    tied_head_mma(pipeline, first, end, x, logits, rows);
  else
    tied_head_rows(pipeline, first, end, x, logits, rows);
}
