// SPDX-License-Identifier: Apache-2.0
// LoRA: (x A) B of each row's own adapter, added to the GEMVs of a step.
//
// A CTA computes the share of its own work units: x times the rows of A in its k range, times the columns of B in its
// tiles. So it needs nothing from other CTAs, and its weights stay in flight meanwhile. x A is fp32.

#pragma once

#include "quantized.cuh"

constexpr bool LORA = LORA_RANK > 0;

// The adapter of one sequence for one GEMV: A [K,n*rank], B [n*rank,N] of n linear layers side by side; rank 0: none.
struct Adapter {
  const u16 *a, *b;
  i64 rank;
};

// The adapters of a GEMV, and the columns at which its second and third linear layer begin.
struct Adapters {
  const Adapter* sequences;
  int tokens;  // rows per sequence
  int second, third;

  __device__ int layer_of(int column) const { return (column >= second) + (column >= third); }
};

template <class P>
struct LoraAccumulators {
  static constexpr bool USED = LORA && !P::WHOLE_TILES;
  static constexpr int WARPS = THREADS / 32, TILES = (P::MOST_UNITS + P::STEPS - 2) / P::STEPS + 1;
  static constexpr int LOW = WARPS * 8 > 3 * LORA_RANK ? WARPS * 8 : 3 * LORA_RANK;  // partials of x A per row
  static constexpr int BYTES = USED ? 4 * ROWS * (LOW + TILES * P::TILE) : 0;
  float *low, *sums;  // [ROWS,LOW], [tiles,ROWS,TILE]

  __device__ explicit LoraAccumulators(uint4* memory) : low(reinterpret_cast<float*>(memory) + P::SMEM_BYTES / 4) {
    sums = low + ROWS * LOW;
  }

  // x: as in `gemv`; inputs: perm (act-order).
  __device__ void compute(const Adapters& adapters, const u16* x, int first, int count, int rows,
                          const u16* inputs) const {
    if constexpr (USED) {
      const int layers = 1 + adapters.layer_of(P::N - 1);
      int unit = first;
#pragma unroll 1
      for (int part = 0; unit < first + count; ++part) {
        const int tile = unit / P::STEPS, step = unit % P::STEPS, left = first + count - unit;
        const int steps = P::STEPS - step < left ? P::STEPS - step : left, k = step * P::TILE_K;
        const int place = (P::X_STEPS == P::STEPS ? step : unit - first) * P::TILE_K;
        const int width = P::K - k < steps * P::TILE_K ? P::K - k : steps * P::TILE_K;
        const int last = tile * P::TILE + P::TILE < P::N ? tile * P::TILE + P::TILE - 1 : P::N - 1;
        const int low_layer = adapters.layer_of(tile * P::TILE), used = adapters.layer_of(last) - low_layer + 1;
#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
          const Adapter adapter = adapters.sequences[row / adapters.tokens];
          const int rank = (int)adapter.rank, stride = layers * rank;
          const u16* a = adapter.a + (P::ACT_ORDER ? 0 : (i64)k * stride) + low_layer * rank;
          if (rank % 8 == 0)
            multiply_a<8>(low + row * LOW, a, stride, used * rank, x, place, width, row, inputs + k);
          else
            multiply_a<1>(low + row * LOW, a, stride, used * rank, x, place, width, row, inputs + k);
        }
        __syncthreads();
        for (int at = threadIdx.x; at < P::TILE * ROWS; at += THREADS) {
          const int row = at / P::TILE, column = tile * P::TILE + at % P::TILE;
          float sum = 0;
          if (row < rows && column < P::N) {
            const Adapter adapter = adapters.sequences[row / adapters.tokens];
            const int rank = (int)adapter.rank, layer = adapters.layer_of(column);
            sum = multiply_b(low + row * LOW + (layer - low_layer) * rank, used * rank,
                             adapter.b + (i64)layer * rank * P::N + column, rank);
          }
          sums[part * ROWS * P::TILE + at] = sum;
        }
        __syncthreads();
        unit += steps;
      }
    }
  }

  __device__ float of(int part, int column, int row) const { return sums[(part * ROWS + row) * P::TILE + column]; }

 private:
  __device__ static int groups(int columns) { return columns % 8 == 0 ? columns / 8 : columns; }
  __device__ static int slices(int columns) {
    const int count = groups(columns);
    return count && WARPS > count ? WARPS / count : 1;
  }

  // Store x A as partials [slices,columns]; each warp takes COUNT columns and a slice of k.
  template <int COUNT>
  __device__ static void multiply_a(float* out, const u16* a, int stride, int columns, const u16* x, int place,
                                    int width, int row, const u16* inputs) {
    const int groups = columns / COUNT, slices = LoraAccumulators::slices(columns), lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = threadIdx.x / 32; item < groups * slices; item += WARPS) {
      const int first = item % groups * COUNT, slice = item / groups;
      float sums[COUNT] = {};
#pragma unroll 4
      for (int i = slice * 32 + lane; i < width; i += slices * 32) {
        const float value = to_float(x[P::x_index(place + i, row)]);
        const u16* from = a + (i64)(P::ACT_ORDER ? inputs[i] : i) * stride + first;
        if constexpr (COUNT == 8) {
          float values[8];
          unpack(values, *reinterpret_cast<const uint4*>(from));
#pragma unroll
          for (int j = 0; j < 8; ++j) sums[j] += value * values[j];
        } else {
          sums[0] += value * to_float(*from);
        }
      }
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], other);
        if (lane == 0) out[slice * columns + first + j] = sums[j];
      }
    }
  }

  // One column of (x A) B. columns: row stride of the partials of x A.
  __device__ static float multiply_b(const float* low, int columns, const u16* b, int rank) {
    const int slices = LoraAccumulators::slices(columns);
    float sum = 0;
#pragma unroll 4
    for (int j = 0; j < rank; ++j) {
      const float weight = to_float(b[(i64)j * P::N]);
      float value = 0;
      for (int slice = 0; slice < slices; ++slice) value += low[slice * columns + j];
      sum += value * weight;
    }
    return sum;
  }
};
