// SPDX-License-Identifier: Apache-2.0
// KV rows of a prompt for the cache of a draft head with one layer. Nothing else of the head's run on a prompt is
// used, so only K and V are computed.
//
// A CTA has eight tokens and K or V of one KV head. Its columns of the weights are in smem.

#include "small.cuh"

constexpr int QKV_SIZE = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
using Columns = Product<2 * HIDDEN, HEAD_DIM, 1, QKV_SIZE>;
static_assert(WARPS == MATRIX_ROWS && CLUSTER == 1);

struct Memory {
  uint4 weights[Columns::PLACES];
  u16 x[MATRIX_ROWS][2 * HIDDEN + X_GAP];
  float sums[Columns::SUMS];
  float made[MATRIX_ROWS][HEAD_DIM];
};
static_assert(sizeof(Memory) == PROMPT_SMEM);

// Grid [tokens / 8, batch * 2 * KV_HEADS]; embeds and states [batch,tokens,HIDDEN], embeds one token ahead of states;
// cos and sin [batch * tokens,ROTARY_DIM / 2]. Token i goes to slot lengths + i.
extern "C" __global__ void __launch_bounds__(THREADS)
    draft_prompt(const u16* qkv, const u16* qkv_bias, const u16* k_norm, const u16* embed_norm, const u16* state_norm,
                 const u16* embeds, const u16* states, const float* cos_table, const float* sin_table,
                 const i64* lengths, u16* key_cache, u16* value_cache, i64 tokens) {
  constexpr int ELEMENTS = HEAD_DIM / 32, HALF = ROTARY_DIM / 2;
  DYNAMIC_SMEM(memory);
  Memory& own = *reinterpret_cast<Memory*>(memory);
  const int sequence = blockIdx.y / (2 * KV_HEADS), head = blockIdx.y % (2 * KV_HEADS), kv_head = head % KV_HEADS;
  const int first = (HEADS + head) * HEAD_DIM, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x * MATRIX_ROWS + warp;
  const bool is_value = head >= KV_HEADS;
  Columns::fetch(own.weights, qkv + first, 0);
  cp_async_commit();
  pdl_wait();
  const i64 row = sequence * tokens + token, slot = load_cg(lengths + sequence) + token;
  if (token < (int)tokens) {
    Row x;
    x.read_written(embeds + row * HIDDEN);
    x.normalize(embed_norm);
    x.write(own.x[warp]);
    x.read_written(states + row * HIDDEN);
    x.normalize(state_norm);
    x.write(own.x[warp] + HIDDEN);
  }
  cp_async_wait<0>();
  __syncthreads();
  Columns::gemv(own.weights, own.x[0], 2 * HIDDEN + X_GAP, own.sums, 0);
  __syncthreads();
  if (token >= (int)tokens || slot >= CAPACITY) return;
  float values[ELEMENTS], square = 0;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    const int at = lane + 32 * i;
    values[i] = Columns::sum_of(own.sums, at / 16, warp, at % 16) + (QKV_BIAS ? to_float(qkv_bias[first + at]) : 0.0f);
    square += values[i] * values[i];
  }
  if (QK_NORM && !is_value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) square += __shfl_xor_sync(~0u, square, other);
    const float factor = rsqrt_fast(square * (1.0f / HEAD_DIM) + EPSILON);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) values[i] *= factor * to_float(k_norm[lane + 32 * i]);
  }
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) own.made[warp][lane + 32 * i] = values[i];
  warp_sync();
  u16* const out =
      (is_value ? value_cache : key_cache) + (((i64)sequence * KV_HEADS + kv_head) * CAPACITY + slot) * HEAD_DIM;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    const int at = lane + 32 * i, pair = at < HALF ? at : at - HALF;
    float value = values[i];
    if (!is_value && at < ROTARY_DIM) {
      const float cos = load_cg(cos_table + row * HALF + pair), sin = load_cg(sin_table + row * HALF + pair);
      value = value * cos + own.made[warp][at < HALF ? at + HALF : pair] * (at < HALF ? -sin : sin);
    }
    out[at] = from_float(value);
  }
}
