// SPDX-License-Identifier: Apache-2.0
// Decode attention (split-KV): one new token per sequence, the visible KV rows split over CTAs.
//
// A CTA has one KV head, up to GROUP of its query heads (GQA), and one split. LANES lanes load a KV row, 8 values
// each (a CacheWord). Each such group of lanes keeps a running max and sum (online softmax), which are combined in a
// fixed order at the end.

#pragma once

#include "plans.cuh"
#include "rope.cuh"

constexpr int HEADS_PER_KV = HEADS / KV_HEADS;
constexpr int GROUPS = (HEADS_PER_KV + 3) / 4, GROUP = (HEADS_PER_KV + GROUPS - 1) / GROUPS;
constexpr int LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;
constexpr int ATTENTION_WARPS = ATTENTION_THREADS / 32, ROW_LANES = ATTENTION_THREADS / LANES;
constexpr int AHEAD = 4;  // KV rows in flight per thread
constexpr float LOWEST = -1e30f;

// The visible KV rows of a sequence and how they are split. length: includes the new rows; most: largest number of
// splits, each of a multiple of 16 rows (tree_attention); 0: SPLITS, of any number of rows (`attention`).
struct KvSplits {
  int begin, end, share, used;

  __device__ KvSplits(int length, int window, int tokens = 1, int most = 0) {
    const int first_end = length - tokens + 1;  // end of the rows that the first token sees
    begin = window > 0 && first_end > window ? first_end - window : 0;
    end = length;
    if (most > 0) begin = begin / 16 * 16;
    const int count = most > 0 ? most : SPLITS, even = (end - begin + count - 1) / count;
    share = even > SPLIT_ROWS ? even : SPLIT_ROWS;
    if (most > 0) share = (share + 15) / 16 * 16;
    used = (end - begin + share - 1) / share;
  }
};

// Sums the QKV partials of a row, from column `first` on.
struct QkvRow {
  const float* partials;
  int row, first;

  __device__ float operator()(int at) const { return sum_partials<QKV, QKV_PARTIALS>(partials, row, first + at); }
};

// Factor of a head's result: sigmoid of the gate, the column `at` after the query.
__device__ inline float gate_of(const float* partials, const u16* bias, int row, int head, int at) {
  const int column = column_of_head(head) + HEAD_DIM + at;
  const float gate =
      sum_partials<QKV, QKV_PARTIALS>(partials, row, column) + (QKV_BIAS ? to_float(bias[column]) : 0.0f);
  return 1.0f / (1.0f + exp2_fast(-LOG2E * gate));
}

#if FP8_CACHE
__device__ inline void unpack(float (&values)[8], CacheWord word) {
  const u32 words[2] = {word.x, word.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = from_cache((u16)(words[i / 2] >> 16 * (i % 2)));
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}
#endif

struct AttentionShared {
  float fresh[GROUP + 2][HEAD_DIM], queries[GROUP][HEAD_DIM];
  CacheWord new_rows[2][HEAD_DIM / 8];  // K and V of the new token, in the cache's type
  float merged[ATTENTION_WARPS][GROUP][HEAD_DIM], scales[ATTENTION_WARPS][GROUP][2];
};

__device__ inline void decode_attention(const float* partials, const u16* bias, const u16* q_norm, const u16* k_norm,
                                        const float* cos_table, const float* sin_table, const i64* position_ids,
                                        const i64* kv_length, CacheValue* key_cache, CacheValue* value_cache,
                                        float* sums, float* scales, int window) {
  static_assert(ATTENTION_WARPS >= GROUP + 2);
  STATIC_SMEM(AttentionShared, own);
  if (blockIdx.x >= KV_HEADS * GROUPS * SPLITS) {  // padding CTA: keeps one CTA per SM
    pdl_wait();
    return;
  }
  const int split = blockIdx.x % SPLITS, group = blockIdx.x / SPLITS % GROUPS, kv_head = blockIdx.x / (SPLITS * GROUPS);
  const int row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_lane = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
  const int heads = HEADS_PER_KV - group * GROUP < GROUP ? HEADS_PER_KV - group * GROUP : GROUP;
  const int first_head = kv_head * HEADS_PER_KV + group * GROUP;
  const KvSplits splits((int)kv_length[row], window);
  const int begin = splits.begin + split * splits.share, last = splits.end - 1;
  const int end = begin + splits.share < splits.end ? begin + splits.share : splits.end;
  const bool owner = begin <= last && last < end;  // of the new KV row
  const i64 cache = ((i64)row * KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
  const bool active = column < HEAD_DIM;

  CacheWord keys[AHEAD], values[AHEAD];
  auto fetch = [&](int base) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int cache_row = base + i * ROW_LANES + row_lane;
      const bool valid = active && cache_row < end && cache_row != last;
      const i64 place = cache + (i64)cache_row * HEAD_DIM + column;
      keys[i] = valid ? load_nc(key_cache + place) : CacheWord{};
      values[i] = valid ? load_nc(value_cache + place) : CacheWord{};
    }
  };
  fetch(begin);
  // one warp per query head, one for K, one for V
  const bool is_query = warp < heads, is_key = owner && warp == GROUP, is_value = owner && warp == GROUP + 1;
  const int from = column_of_head(is_query ? first_head + warp : HEADS + (is_key ? kv_head : KV_HEADS + kv_head));
  RopeHead fresh_head;
  if (is_query || is_key || is_value) {
    const i64 position = position_ids[row] * (ROTARY_DIM / 2);
    fresh_head.prepare(is_query ? q_norm
                       : is_key ? k_norm
                                : nullptr,
                       bias + from, cos_table + position, sin_table + position, !is_value);
  }
  pdl_wait();
  if (split >= splits.used) return;

  if (is_query || is_key || is_value) {
    fresh_head.read(QkvRow{partials, row, from});
    fresh_head.finish(!is_value, own.fresh[warp]);
#pragma unroll
    for (int i = 0; i < RopeHead::ELEMENTS; ++i) {
      const int at = fresh_head.at[i];
      // softmax in base 2: scores carry log2(e)
      if (is_query) {
        own.queries[warp][at] = fresh_head.values[i] * (LOG2E * rsqrt_fast(HEAD_DIM));
        continue;
      }
      const CacheValue bits = to_cache(fresh_head.values[i]);
      reinterpret_cast<CacheValue*>(own.new_rows[is_key ? 0 : 1])[at] = bits;
      if (group == 0) (is_key ? key_cache : value_cache)[cache + (i64)last * HEAD_DIM + at] = bits;
    }
  }
  __syncthreads();

  float q[GROUP][8], result[GROUP][8] = {}, highest[GROUP], total[GROUP];
#pragma unroll
  for (int head = 0; head < GROUP; ++head) {
#pragma unroll
    for (int j = 0; j < 8; ++j) q[head][j] = active && head < heads ? own.queries[head][column + j] : 0.0f;
    highest[head] = LOWEST, total[head] = 0;
  }
  for (int base = begin; base < end; base += AHEAD * ROW_LANES) {
    if (base != begin) fetch(base);
    float scores[AHEAD][GROUP];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int cache_row = base + i * ROW_LANES + row_lane;
      if (owner && cache_row == last && active)
        keys[i] = own.new_rows[0][column / 8], values[i] = own.new_rows[1][column / 8];
      float key[8];
      unpack(key, keys[i]);
#pragma unroll
      for (int head = 0; head < GROUP; ++head) scores[i][head] = dot(q[head], key);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int head = 0; head < GROUP; ++head)
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
          scores[i][head] += __shfl_xor_sync(~0u, scores[i][head], other);
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
      float high = highest[head];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (base + i * ROW_LANES + row_lane < end) high = fmaxf(high, scores[i][head]);
      const float factor = exp2_fast(highest[head] - high);
      highest[head] = high, total[head] *= factor;
#pragma unroll
      for (int j = 0; j < 8; ++j) result[head][j] *= factor;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      float value[8];
      unpack(value, values[i]);
      const bool inside = base + i * ROW_LANES + row_lane < end;
#pragma unroll
      for (int head = 0; head < GROUP; ++head) {
        const float weight = inside ? exp2_fast(scores[i][head] - highest[head]) : 0.0f;
        total[head] += weight;
#pragma unroll
        for (int j = 0; j < 8; ++j) result[head][j] += weight * value[j];
      }
    }
  }

#pragma unroll
  for (int head = 0; head < GROUP; ++head) {
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) {
      const float high = fmaxf(highest[head], __shfl_xor_sync(~0u, highest[head], other));
      const float factor = exp2_fast(highest[head] - high);
      total[head] *= factor;
      total[head] += __shfl_xor_sync(~0u, total[head], other);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        result[head][j] *= factor;
        result[head][j] += __shfl_xor_sync(~0u, result[head][j], other);
      }
      highest[head] = high;
    }
    if (lane < LANES && active)
#pragma unroll
      for (int j = 0; j < 8; ++j) own.merged[warp][head][column + j] = result[head][j];
    if (lane == 0) own.scales[warp][head][0] = highest[head], own.scales[warp][head][1] = total[head];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < heads * HEAD_DIM; at += ATTENTION_THREADS) {
    const int head = at / HEAD_DIM, dim = at % HEAD_DIM;
    float high = LOWEST, sum = 0, value = 0;
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; ++w) high = fmaxf(high, own.scales[w][head][0]);
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; ++w) {
      const float factor = exp2_fast(own.scales[w][head][0] - high);
      sum += factor * own.scales[w][head][1], value += factor * own.merged[w][head][dim];
    }
    const int place = (row * SPLITS + split) * HEADS + first_head + head;
    sums[place * HEAD_DIM + dim] = value;
    if (dim == 0) scales[2 * place] = high, scales[2 * place + 1] = sum;
  }
}

// Weight of this lane's split in the combined output. scale: max and sum of the split.
__device__ inline float split_scale(float2 scale, bool used) {
  float high = used ? scale.x : LOWEST;
#pragma unroll
  for (int other = 16; other > 0; other /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, other));
  const float weight = used ? exp2_fast(scale.x - high) : 0.0f;
  float sum = used ? weight * scale.y : 0.0f;
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  return weight / sum;
}

// Weights of all splits for some heads, in smem [ROWS,LOCAL,SPLITS], from head `first` on.
template <int LOCAL>
__device__ inline void split_scales(float* weights, const float* scales, const int* used_splits, int first, int rows) {
  constexpr int WARPS = THREADS / 32, AT_ONCE = ROWS == 1 ? 1 : 4;
  const int lane = threadIdx.x % 32;
  for (int begin = threadIdx.x / 32; begin < rows * LOCAL; begin += WARPS * AT_ONCE) {
    float2 found[AT_ONCE];
    bool used[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int place = begin + i * WARPS < rows * LOCAL ? begin + i * WARPS : begin;
      const int row = place / LOCAL, head = (first + place % LOCAL) % HEADS;
      used[i] = lane < used_splits[row];
      found[i] =
          load_cg(reinterpret_cast<const float2*>(scales) + (row * SPLITS + (used[i] ? lane : 0)) * HEADS + head);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float weight = split_scale(found[i], used[i]);
      if (lane < SPLITS && begin + i * WARPS < rows * LOCAL) weights[(begin + i * WARPS) * SPLITS + lane] = weight;
    }
  }
}
