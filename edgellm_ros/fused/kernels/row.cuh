// SPDX-License-Identifier: Apache-2.0
// Rows of many tokens, one per CTA.

#pragma once

#include "primitives.cuh"

__device__ inline uint2 pack(const float (&values)[4]) {
  return {from_floats(values[0], values[1]), from_floats(values[2], values[3])};
}
__device__ inline void unpack(float (&values)[4], uint2 words) {
  const float2 low = to_floats(words.x), high = to_floats(words.y);
  values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
}
__device__ inline void unpack(float (&values)[4], uint4 words) {
  values[0] = __uint_as_float(words.x), values[1] = __uint_as_float(words.y);
  values[2] = __uint_as_float(words.z), values[3] = __uint_as_float(words.w);
}
// Words of four fp16, bf16 or fp32 values.
template <class Words>
__device__ inline void add(float (&values)[4], Words words) {
  float others[4];
  unpack(others, words);
#pragma unroll
  for (int j = 0; j < 4; ++j) values[j] += others[j];
}

// A thread's share of a row of SIZE values that a CTA holds: four values, THREADS quads apart.
template <int SIZE>
struct Row {
  static constexpr int QUADS = SIZE / 4, SHARE = (QUADS + THREADS - 1) / THREADS;
  float values[SHARE][4];

  __device__ static bool inside(int i) { return QUADS % THREADS == 0 || quad(i) < QUADS; }
  __device__ static int quad(int i) { return threadIdx.x + i * THREADS; }

  template <class Function>
  __device__ static void each(Function function) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
      if (inside(i)) function(i);
  }

  __device__ void read(const float* row) {
    each([&](int i) { unpack(values[i], load_cg(reinterpret_cast<const uint4*>(row) + quad(i))); });
  }
  __device__ void read(const u16* row) {
    each([&](int i) { unpack(values[i], load_cg(reinterpret_cast<const uint2*>(row) + quad(i))); });
  }
  // Add a row that may be absent.
  __device__ void add_row(const u16* row) {
    if (row) each([&](int i) { add(values[i], load_cg(reinterpret_cast<const uint2*>(row) + quad(i))); });
  }
  __device__ void write(float* row) const {
    each([&](int i) {
      reinterpret_cast<uint4*>(row)[quad(i)] = {__float_as_uint(values[i][0]), __float_as_uint(values[i][1]),
                                                __float_as_uint(values[i][2]), __float_as_uint(values[i][3])};
    });
  }
  __device__ void write(u16* row) const {
    each([&](int i) { reinterpret_cast<uint2*>(row)[quad(i)] = pack(values[i]); });
  }
};

// Sum over the CTA of each thread's value.
__device__ inline float sum_of_threads(float value, float* sums) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(~0u, value, other);
  __syncthreads();  // the scratch is reused
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) value += sums[warp];
  return value;
}
