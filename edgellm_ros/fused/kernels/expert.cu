// SPDX-License-Identifier: Apache-2.0
// Kernels of an Euler step of the action expert, compiled for one expert, GPU architecture and tile of rows.
//
// qkv -- attention -- o -- gate_up -- down -- (next layer) ... -- finish
//
// A row is a step of a trajectory; the samples follow each other. The residual stream is fp32 [rows,HIDDEN]; a CTA of
// `o` and `down` adds to a tile of it that no other CTA reads or writes.

#include "expert_product.cuh"
#include "expert_attention.cuh"

constexpr int INNER_TILE = 32, HIDDEN_TILE = 32;
using QKV = Product<HIDDEN, QKV_SIZE, HEAD_DIM>;
using O = Product<Q_SIZE, HIDDEN, HIDDEN_TILE>;
using GATE_UP = Product<HIDDEN, 2 * INNER, 2 * INNER_TILE>;
using DOWN = Product<INNER, HIDDEN, HIDDEN_TILE>;

#define CHECK_PRODUCT(NAME) static_assert(NAME::SMEM_BYTES == NAME##_SMEM && NAME::THREADS == NAME##_THREADS, #NAME)
CHECK_PRODUCT(QKV);
CHECK_PRODUCT(O);
CHECK_PRODUCT(GATE_UP);
CHECK_PRODUCT(DOWN);
static_assert(ATTENTION_SHARED == ATTENTION_BYTES);

// Q, K, V of all heads, after q/k norm and RoPE, [rows,QKV_SIZE]. A CTA has one head. The first layer initialises the
// residual stream: trajectory [rows,ACTIONS] times in_weights plus time_row [HIDDEN]; null in other layers. The first
// *clean steps of each trajectory use clean_time_row; null: all use time_row.
extern "C" __global__ void __launch_bounds__(QKV::THREADS)
    qkv(const u16* weights, const u16* norm, const u16* q_norm, const u16* k_norm, const float* cos_rows,
        const float* sin_rows, float* residual, u16* out, const float* trajectory, const u16* in_weights,
        const float* time_row, const i64* clean, const float* clean_time_row, i64 rows) {
  DYNAMIC_SMEM(smem);
  const Memory<QKV> memory(smem);
  const int head = blockIdx.x, first = blockIdx.y * ROWS;
  WarpWeights<QKV> pipeline(weights, memory, head * HEAD_DIM + memory.group * 16);
  Norm normed(norm);
  pdl_wait();
  write_normed(memory, normed, first, (int)rows, [&](Norm& x, int row) {
    float* const stored = residual + (i64)row * HIDDEN;
    if (!trajectory) return x.read(stored);
    const bool is_clean = clean && row % HORIZON < *clean;
    const float2* const time = reinterpret_cast<const float2*>(is_clean ? clean_time_row : time_row);
#pragma unroll
    for (int i = 0; i < Norm::PAIRS; ++i) {
      const int pair = x.lane + 32 * i;
      float2 sum = time[pair];
#pragma unroll
      for (int action = 0; action < ACTIONS; ++action) {
        const float value = load_cg(trajectory + (i64)row * ACTIONS + action);
        const float2 weight = to_floats(reinterpret_cast<const u32*>(in_weights)[action * (HIDDEN / 2) + pair]);
        sum.x += value * weight.x, sum.y += value * weight.y;
      }
      x.values[i] = sum;
      if (head == 0) reinterpret_cast<float2*>(stored)[pair] = sum;
    }
  });
  gemv(memory, pipeline);

  constexpr int VALUES = HEAD_DIM / 32;
  const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS;
  for (int row = threadIdx.x / 32; row < ROWS && first + row < rows; row += QKV::THREADS / 32) {
    float values[VALUES], sum = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      values[i] = memory.total(row, memory.lane + 32 * i);
      sum += values[i] * values[i];
    }
    if (!is_value) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      const float factor = rsqrt_fast(sum * (1.0f / HEAD_DIM) + EPSILON);
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        const int column = memory.lane + 32 * i;
        values[i] *= factor * to_float((is_query ? q_norm : k_norm)[column]);
        *memory.sum(row, column) = values[i];
      }
      warp_sync();
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        const int column = memory.lane + 32 * i;
        if (column >= ROTARY_DIM) continue;
        const bool second = column >= ROTARY_DIM / 2;
        const int pair = second ? column - ROTARY_DIM / 2 : column;
        const int place = (first + row) % HORIZON * (ROTARY_DIM / 2) + pair;
        const float other = *memory.sum(row, second ? pair : column + ROTARY_DIM / 2);
        values[i] = values[i] * cos_rows[place] + (second ? other : -other) * sin_rows[place];
      }
    }
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
      out[(i64)(first + row) * QKV_SIZE + head * HEAD_DIM + memory.lane + 32 * i] = from_float(values[i]);
  }
}

extern "C" __global__ void __launch_bounds__(32 * ATTENTION_WARPS)
    attention(const u16* qkv, const i64* kv_length, const CacheValue* keys, const CacheValue* values, u16* out) {
  decode_attention(qkv, kv_length, keys, values, out);
}

// Add x [rows,K] times the weights to the residual stream.
template <class P>
__device__ inline void gemv_to_residual(const u16* weights, const u16* x, float* residual, int rows) {
  DYNAMIC_SMEM(smem);
  const Memory<P> memory(smem);
  constexpr int SHARE = (ROWS * P::TILE + P::THREADS - 1) / P::THREADS;
  const int column = blockIdx.x * P::TILE, first = blockIdx.y * ROWS;
  WarpWeights<P> pipeline(weights, memory, column + memory.group * 16);
  pdl_wait();
  float before[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int place = threadIdx.x + i * P::THREADS, row = first + place / P::TILE;
    const bool valid = place < ROWS * P::TILE && row < rows;
    before[i] = valid ? load_cg(residual + (i64)row * HIDDEN + column + place % P::TILE) : 0.0f;
  }
  copy_x(memory, x, first, rows);
  gemv(memory, pipeline);
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int place = threadIdx.x + i * P::THREADS, row = place / P::TILE, at = place % P::TILE;
    if (place < ROWS * P::TILE && first + row < rows)
      residual[(i64)(first + row) * HIDDEN + column + at] = before[i] + memory.total(row, at);
  }
}

extern "C" __global__ void __launch_bounds__(O::THREADS)
    o(const u16* weights, const u16* x, float* residual, i64 rows) {
  gemv_to_residual<O>(weights, x, residual, (int)rows);
}

// SiLU(gate) * up, [rows,INNER]. A CTA has the same columns of gate and up.
extern "C" __global__ void __launch_bounds__(GATE_UP::THREADS)
    gate_up(const u16* weights, const u16* norm, const float* residual, u16* out, i64 rows) {
  DYNAMIC_SMEM(smem);
  const Memory<GATE_UP> memory(smem);
  const int column = blockIdx.x * INNER_TILE, first = blockIdx.y * ROWS, at = memory.group * 16;
  WarpWeights<GATE_UP> pipeline(weights, memory, column + (at < INNER_TILE ? at : INNER + at - INNER_TILE));
  Norm normed(norm);
  pdl_wait();
  write_normed(memory, normed, first, (int)rows, [&](Norm& x, int row) { x.read(residual + (i64)row * HIDDEN); });
  gemv(memory, pipeline);
  for (int place = threadIdx.x; place < ROWS * INNER_TILE; place += GATE_UP::THREADS) {
    const int row = place / INNER_TILE, at = place % INNER_TILE;
    if (first + row >= rows) break;
    const float gate = memory.total(row, at), up = memory.total(row, INNER_TILE + at);
    const float value = gate * up / (1.0f + exp2_fast(-LOG2E * gate));
    out[(i64)(first + row) * INNER + column + at] = from_float(value);
  }
}

extern "C" __global__ void __launch_bounds__(DOWN::THREADS)
    down(const u16* weights, const u16* x, float* residual, i64 rows) {
  gemv_to_residual<DOWN>(weights, x, residual, (int)rows);
}

// The velocity, and the trajectory after the step. A warp has a row; step: the bits of a float. factors [3,HORIZON]:
// strength and pull of each row towards previous [HORIZON,ACTIONS], as in `Kernels.conditioned_step`; null: plain
// Euler step.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
    finish(const u16* weights, const u16* bias, const u16* norm, const float* residual, float* trajectory, i64 step,
           const float* previous, const float* factors, i64 rows) {
  const int row = blockIdx.x * (FINISH_THREADS / 32) + threadIdx.x / 32;
  Norm x(norm);
  float columns[ACTIONS][Norm::PAIRS][2], biases[ACTIONS];
#pragma unroll
  for (int action = 0; action < ACTIONS; ++action) {
    biases[action] = to_float(bias[action]);
#pragma unroll
    for (int i = 0; i < Norm::PAIRS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        columns[action][i][j] = to_float(weights[(2 * (x.lane + 32 * i) + j) * ACTIONS + action]);
  }
  pdl_wait();
  if (row >= rows) return;
  x.read(residual + (i64)row * HIDDEN);
  x.normalize();
#pragma unroll
  for (int action = 0; action < ACTIONS; ++action) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Norm::PAIRS; ++i)
      sum += x.values[i].x * columns[action][i][0] + x.values[i].y * columns[action][i][1];
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    float* const place = trajectory + (i64)row * ACTIONS + action;
    if (x.lane == 0) {
      const float before = load_cg(place);
      float moved = sum + biases[action];
      if (factors) {
        const int at = row % HORIZON;
        moved = factors[at] * moved + factors[HORIZON + at] * (previous[at * ACTIONS + action] - before);
      }
      *place = before + __uint_as_float((u32)step) * moved;
    }
  }
}
