// SPDX-License-Identifier: Apache-2.0
// First kernel of an EAGLE-3 head's run, and the last kernel of every draft head's:
//
// joined_qkv -- attention -- o -- gate_up -- down -- (qkv of the next layer) ... -- draft_head
//
// x of EAGLE-3's first layer has 2H values per token: the norm of the embedding, then the norm of the state. The
// residual stream begins with the state. An MTP head begins with the kernels of fusion.cu and `qkv`.

#include "decoder.cu"

#if JOINED

extern "C" __global__ void __launch_bounds__(THREADS)
    joined_qkv(const u16* weights, const u16* embed_norm, const u16* state_norm, const u16* embeds, const u16* states,
               i64* residual, float* partials, i64 begins_normed, i64 rows) {
  DYNAMIC_SMEM(memory);
  const Smem<QKV> smem(memory);
  if (blockIdx.x >= QKV::BLOCKS) {  // padding CTA: keeps one CTA per SM
    pdl_wait();
    return;
  }
  const int first = QKV::first_unit(blockIdx.x), count = QKV::first_unit(blockIdx.x + 1) - first;
  WeightPipeline<QKV> pipeline(weights, smem.ring, first, count);
  Normed x;
  x.read_scales(embed_norm);
  pdl_wait();
  norm_rows(x, nullptr, embeds, nullptr, false, smem.sums, (int)rows,
            [&](int row) { share_x<QKV>(smem.x, x, 0, row); });
  x.read_scales(state_norm);
  float* const sums = smem.sums + THREADS / 32 * ROWS;  // the scratch of the embeddings may still be read
  norm_rows(x, begins_normed ? nullptr : residual, states, nullptr, false, sums, (int)rows, [&](int row) {
    if (begins_normed && blockIdx.x == 0) x.begin(residual, row, (int)rows);
    share_x<QKV>(smem.x, x, HIDDEN, row);
  });
  for (int i = QKV::x_index(QKV::K, 0) + threadIdx.x; i < QKV::X; i += THREADS) smem.x[i] = 0;
  __syncthreads();
  gemv<QKV>(smem, pipeline, first, count,
            [&](int tile, int at, int row, float sum, bool) { store_partial<QKV>(partials, tile, at, row, sum); });
}

#endif

// Store rows of the residual stream in the model's type, normalised or not. The last CTAs do so: padding CTAs have no
// work units. sums: scratch in smem, [warps].
__device__ inline void write_states(const i64* residual, const Normed& norm, u16* states, int rows, bool normed,
                                    float* sums) {
  for (int row = gridDim.x - 1 - blockIdx.x; row < rows; row += gridDim.x) {
    float2 values[Normed::SHARE];
    float factor = 1, square = 0;
#pragma unroll
    for (int i = 0; i < Normed::SHARE; ++i) {
      values[i] = {0, 0};
      if (!Normed::inside(i)) continue;
      const longlong2 value =
          load_cg(reinterpret_cast<const longlong2*>(residual) + (i64)row * Normed::PAIRS + Normed::pair(i));
      values[i] = {from_fixed(value.x), from_fixed(value.y)};
      square += values[i].x * values[i].x + values[i].y * values[i].y;
    }
    if (normed) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) square += __shfl_xor_sync(~0u, square, other);
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
      __syncthreads();
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < THREADS / 32; ++warp) sum += sums[warp];
      factor = rsqrt_fast(sum * (1.0f / HIDDEN) + EPSILON);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < Normed::SHARE; ++i) {
      if (!Normed::inside(i)) continue;
      const float2 scale = to_floats(norm.scales[i]);
      const float low = normed ? values[i].x * factor * scale.x : values[i].x;
      const float high = normed ? values[i].y * factor * scale.y : values[i].y;
      reinterpret_cast<u32*>(states)[(i64)row * Normed::PAIRS + Normed::pair(i)] =
          from_float(low) | (u32)from_float(high) << 16;
    }
  }
}

// Logits of the `chosen` tokens of each sequence that last_token_ids names, and the states [batch,tokens,H] of all.
extern "C" __global__ void __launch_bounds__(THREADS)
    draft_head(const u16* weights, const u16* norm, i64* residual, const i64* last_token_ids, float* logits,
               u16* states, i64 batch, i64 tokens, i64 chosen, i64 normed_states) {
  DYNAMIC_SMEM(memory);
  const Smem<LM_HEAD> smem(memory);
  const bool fills = blockIdx.x >= LM_HEAD::BLOCKS;
  const int first = fills ? 0 : LM_HEAD::first_unit(blockIdx.x);
  const int count = fills ? 0 : LM_HEAD::first_unit(blockIdx.x + 1) - first, rows = (int)(batch * chosen);
  WeightPipeline<LM_HEAD> pipeline(weights, smem.ring, first, count);
  Normed x;
  x.read_scales(norm);
  pdl_wait();
  write_states(residual, x, states, (int)(batch * tokens), normed_states, smem.sums);
  if (fills) return;
#pragma unroll 1
  for (int group = 0; group < ROWS; group += Normed::AT_ONCE) {
    x.read(residual, nullptr, group, rows, [&](int row) {
      const i64 id = last_token_ids[row];
      return row / (int)chosen * (int)tokens + (int)(id < 0 ? 0 : id < tokens ? id : tokens - 1);
    });
    x.normalize(smem.sums, group);
    share_x<LM_HEAD>(smem.x, x, 0, group);
  }
  for (int i = LM_HEAD::x_index(LM_HEAD::K, 0) + threadIdx.x; i < LM_HEAD::X; i += THREADS) smem.x[i] = 0;
  __syncthreads();
  gemv<LM_HEAD>(smem, pipeline, first, count, [&](int tile, int at, int row, float sum, bool) {
    const int column = tile * LM_HEAD::TILE + at;
    if (row < rows && column < VOCAB) logits[(i64)row * VOCAB + column] = sum;
  });
}
