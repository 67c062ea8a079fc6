// SPDX-License-Identifier: Apache-2.0
// Bias, norm and RoPE of the queries and keys of new tokens.

#pragma once

#include "primitives.cuh"

// Columns of a head of qkv: queries, each with its gate beside it if there is one, keys, values.
__device__ constexpr int column_of_head(int head) {
  return head < HEADS ? head * (1 + ATTENTION_GATE) * HEAD_DIM : (head + ATTENTION_GATE * HEADS) * HEAD_DIM;
}

// A head of the new token, per warp: bias, q/k norm, RoPE. Lane l has the values l, l + 32, ...
struct RopeHead {
  static constexpr int ELEMENTS = HEAD_DIM / 32;
  int at[ELEMENTS], other[ELEMENTS];  // index of a value in the head, and of its RoPE partner
  float values[ELEMENTS], scale[ELEMENTS], cos[ELEMENTS], sin[ELEMENTS], bias[ELEMENTS];

  // Load what does not depend on earlier kernels. norm: null for V; bias: of the head.
  __device__ void prepare(const u16* norm, const u16* head_bias, const float* cos_row, const float* sin_row,
                          bool rotate) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      at[i] = other[i] = threadIdx.x % 32 + 32 * i;
      bias[i] = QKV_BIAS ? to_float(head_bias[at[i]]) : 0.0f;
      scale[i] = QK_NORM && norm ? to_float(norm[at[i]]) : 1.0f;
      cos[i] = 1, sin[i] = 0;
      if (!rotate || at[i] >= ROTARY_DIM) continue;
      const bool second = ROPE_INTERLEAVED ? at[i] % 2 : at[i] >= ROTARY_DIM / 2;
      const int pair = ROPE_INTERLEAVED ? at[i] / 2 : second ? at[i] - ROTARY_DIM / 2 : at[i];
      other[i] = ROPE_INTERLEAVED ? at[i] ^ 1 : second ? pair : at[i] + ROTARY_DIM / 2;
      cos[i] = cos_row[pair], sin[i] = second ? sin_row[pair] : -sin_row[pair];
    }
  }

  // value(i): the value `i` of the head, without bias.
  template <class Value>
  __device__ void read(Value value) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) values[i] = value(at[i]) + bias[i];
  }

  // Normalise and rotate. place: scratch of the warp, [D].
  __device__ void finish(bool norm, float* place) {
    if (QK_NORM && norm) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) sum += values[i] * values[i];
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      const float factor = rsqrt_fast(sum * (1.0f / HEAD_DIM) + EPSILON);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) values[i] *= factor * scale[i];
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) place[at[i]] = values[i];
    warp_sync();
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) values[i] = values[i] * cos[i] + place[other[i]] * sin[i];
  }
};
