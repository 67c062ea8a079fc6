// SPDX-License-Identifier: Apache-2.0
// Attention on tensor cores, for several tokens per sequence (a chain or a tree) or a batch of single tokens.
//
// rope_append_kv computes queries, keys and values from the QKV partials; in batch_attention a CTA does so itself. A
// CTA has one KV head, one split of the KV rows, and QUERIES queries: token x query heads of the KV head (GQA). A
// warp takes CACHE_ROWS rows of the split at a time, ATTENTION_WARPS apart. S = Q K^T: 16 queries x 8 KV rows; O^T =
// V^T P^T: 16 dimensions x 8 queries, so that P stays in the registers in which S was computed. K and V fragments are
// loaded from global memory as stored: the order of the dimensions in an mma is free, and V^T is packed from pairs of
// KV rows in registers.

#pragma once

#include "attention.cuh"

constexpr int QUERIES = HEAD_DIM <= 128 ? 16 : 8;
constexpr int CACHE_ROWS = 16;
constexpr int KEY_CHUNKS = HEAD_DIM / 32;           // a lane loads 8 dimensions of a row per chunk
constexpr int VALUE_CHUNKS = (HEAD_DIM + 63) / 64;  // likewise, of four rows
constexpr bool EARLY_VALUES = HEAD_DIM <= 128;      // prefetch V while S is computed

// MERGED: queries that are combined at once; MADE: heads of the new row that the CTA computes.
template <int QUERIES, int MERGED, int MADE>
struct TreeShared {
  union {
    uint4 queries[QUERIES][HEAD_DIM / 8 + (HEAD_DIM % 64 ? 0 : 4)];
    float sums[ATTENTION_WARPS][MERGED][64 * VALUE_CHUNKS + 8];
  };
  float scales[ATTENTION_WARPS][QUERIES][2];
  int ends[ROWS];  // position of each token + 1
  float made[MADE ? MADE : 1][HEAD_DIM];
  CacheWord new_row[2][MADE ? HEAD_DIM / 8 : 1];  // K and V
};

// Inputs from which a CTA computes the new row itself.
struct NewRows {
  const float* partials;
  const u16 *bias, *q_norm, *k_norm;
  const float *cos_table, *sin_table;
  const i64* position_ids;
};

// The new tokens of a sequence, and the KV rows that each sees.
struct Tree {
  const unsigned char* mask;  // [tokens,CAPACITY]; null: a chain, causal
  int tokens, length;

  __device__ int end(int token) const {
    int seen = token + 1;
    if (mask) {
      seen = 0;
      for (int other = 0; other < tokens; ++other) seen += mask[(i64)token * CAPACITY + length - tokens + other] != 0;
    }
    return length - tokens + seen;
  }
};

// One warp per head of a row: queries to [rows,HEADS,D], keys and values to the cache.
__device__ inline void rope_append(const float* partials, const u16* bias, const u16* q_norm, const u16* k_norm,
                                   const float* cos_table, const float* sin_table, const i64* position_ids,
                                   const i64* kv_length, CacheValue* key_cache, CacheValue* value_cache, u16* queries,
                                   int tokens) {
  struct InversePermutation {
    float values[ATTENTION_WARPS][HEAD_DIM];
  };
  STATIC_SMEM(InversePermutation, places);
  const int warp = threadIdx.x / 32, head = blockIdx.x * ATTENTION_WARPS + warp, row = blockIdx.y;
  const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS, valid = head < HEADS + 2 * KV_HEADS;
  const int sequence = row / tokens, kv_head = (head - HEADS) % KV_HEADS;
  RopeHead fresh;
  i64 slot = 0;
  if (valid) {
    const i64 position = position_ids[row] * (ROTARY_DIM / 2);
    slot = ((i64)sequence * KV_HEADS + kv_head) * CAPACITY + kv_length[sequence] - tokens + row % tokens;
    fresh.prepare(is_query   ? q_norm
                  : is_value ? nullptr
                             : k_norm,
                  bias + column_of_head(head), cos_table + position, sin_table + position, !is_value);
  }
  pdl_wait();
  if (!valid) return;
  fresh.read(QkvRow{partials, row, column_of_head(head)});
  fresh.finish(!is_value, places.values[warp]);
#if FP8_CACHE
  if (is_query) {
    u16* const out = queries + (row * HEADS + head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < RopeHead::ELEMENTS; ++i) out[fresh.at[i]] = from_float(fresh.values[i]);
    return;
  }
  CacheValue* const out = (is_value ? value_cache : key_cache) + slot * HEAD_DIM;
#else
  u16* const out =
      is_query ? queries + (row * HEADS + head) * HEAD_DIM : (is_value ? value_cache : key_cache) + slot * HEAD_DIM;
#endif
#pragma unroll
  for (int i = 0; i < RopeHead::ELEMENTS; ++i) out[fresh.at[i]] = to_cache(fresh.values[i]);
}

// Pack the lower (upper) halves of two words.
__device__ inline u32 lower_halves(u32 first, u32 second) { return (first & 0xffffu) | second << 16; }
__device__ inline u32 upper_halves(u32 first, u32 second) { return first >> 16 | (second & 0xffff0000u); }

// MAKES: one new token per sequence, whose query, key and value the CTA computes.
template <int QUERIES, bool MAKES>
__device__ inline void tree_attention_of(const u16* all_queries, const NewRows& made, const i64* kv_length,
                                         CacheValue* key_cache, CacheValue* value_cache, float* sums, float* scales,
                                         int window, const unsigned char* mask, int tokens, int most_splits) {
  constexpr int HALVES = QUERIES / 8, MERGED = ATTENTION_WARPS <= 4 ? QUERIES : QUERIES / 2;
  using Own = TreeShared<QUERIES, MERGED, MAKES ? HEADS_PER_KV + 2 : 0>;
  static_assert(!MAKES || HEADS_PER_KV + 2 <= ATTENTION_WARPS && HEADS_PER_KV <= QUERIES);
  STATIC_SMEM(Own, own);
  const int tiles = (tokens * HEADS_PER_KV + QUERIES - 1) / QUERIES;
  const int tile = blockIdx.x % tiles, kv_head = blockIdx.x / tiles % KV_HEADS, split = blockIdx.x / (tiles * KV_HEADS);
  const int sequence = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_query = tile * QUERIES, left = tokens * HEADS_PER_KV - first_query;
  const int queries = left < QUERIES ? left : QUERIES;
  Tree tree{mask ? mask + (i64)sequence * tokens * CAPACITY : nullptr, tokens, (int)kv_length[sequence]};
  const KvSplits splits(tree.length, window, tokens, most_splits);
  const int begin = splits.begin + split * splits.share, first_new = tree.length - tokens;
  const int end = begin + splits.share < splits.end ? begin + splits.share : splits.end;
  const int old_end = end < first_new ? end : first_new;
  const i64 cache = ((i64)sequence * KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;

  CacheWord keys[2][KEY_CHUNKS], values[VALUE_CHUNKS][4];
  auto fetch_keys = [&](int base) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int chunk = 0; chunk < KEY_CHUNKS; ++chunk) {
        const int row = base + 8 * i + g;
        keys[i][chunk] =
            row < old_end ? load_nc(key_cache + cache + (i64)row * HEAD_DIM + 32 * chunk + 8 * t) : CacheWord{};
      }
  };
  auto fetch_values = [&](int base) {
#pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = base + i / 2 * 8 + 2 * t + i % 2, column = 64 * chunk + 8 * g;
        const bool valid = row < old_end && (HEAD_DIM % 64 == 0 || column < HEAD_DIM);
        values[chunk][i] = valid ? load_nc(value_cache + cache + (i64)row * HEAD_DIM + column) : CacheWord{};
      }
  };
  // The same for rows that the previous kernel, or this CTA, has written.
  auto fetch_new_keys = [&](int base) {
    if (base + CACHE_ROWS <= first_new) return;
    if constexpr (MAKES) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int chunk = 0; chunk < KEY_CHUNKS; ++chunk)
          if (base + 8 * i + g == first_new) keys[i][chunk] = own.new_row[0][4 * chunk + t];
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = base + 8 * i + g;
      if (row < first_new || row >= end) continue;
      const CacheValue* const source = key_cache + cache + (i64)row * HEAD_DIM + 8 * t;
#pragma unroll
      for (int chunk = 0; chunk < KEY_CHUNKS; ++chunk)
        keys[i][chunk] = load_cg(reinterpret_cast<const CacheWord*>(source + 32 * chunk));
    }
  };
  auto fetch_new_values = [&](int base) {
    if (base + CACHE_ROWS <= first_new) return;
    if constexpr (MAKES) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk)
          if (base + i / 2 * 8 + 2 * t + i % 2 == first_new && (HEAD_DIM % 64 == 0 || 64 * chunk + 8 * g < HEAD_DIM))
            values[chunk][i] = own.new_row[1][8 * chunk + g];
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = base + i / 2 * 8 + 2 * t + i % 2;
      if (row < first_new || row >= end) continue;
      const CacheValue* const source = value_cache + cache + (i64)row * HEAD_DIM + 8 * g;
#pragma unroll
      for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk)
        if (HEAD_DIM % 64 == 0 || 64 * chunk + 8 * g < HEAD_DIM)
          values[chunk][i] = load_cg(reinterpret_cast<const CacheWord*>(source + 64 * chunk));
    }
  };
  // Mask bits of this lane's queries g, g + 8 and of its KV rows: two in each half of CACHE_ROWS.
  const unsigned char* masks[HALVES];
  int tokens_of[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int index = g + 8 * half < queries ? g + 8 * half : queries - 1;
    tokens_of[half] = (first_query + index) / HEADS_PER_KV;
    masks[half] = tree.mask ? tree.mask + (i64)tokens_of[half] * CAPACITY : nullptr;
  }
  u16 marks[HALVES][2];
  auto fetch_marks = [&](int base) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = base + 8 * i + 2 * t;
        marks[half][i] = 0;
        if (!tree.mask || row >= end) continue;
        if constexpr (CAPACITY % 2 == 0)
          marks[half][i] = *reinterpret_cast<const u16*>(masks[half] + row);
        else
          marks[half][i] = masks[half][row] | (row + 1 < end ? masks[half][row + 1] << 8 : 0);
      }
  };
  fetch_keys(begin + warp * CACHE_ROWS);
  if constexpr (EARLY_VALUES) fetch_values(begin + warp * CACHE_ROWS);
  fetch_marks(begin + warp * CACHE_ROWS);

  if (split < splits.used && threadIdx.x < tokens) own.ends[threadIdx.x] = tree.end(threadIdx.x);
  // one warp per query head, one for K, one for V
  const bool owner = first_new < end, is_query = warp < HEADS_PER_KV, is_key = warp == HEADS_PER_KV;
  const bool makes = MAKES && (is_query || owner && warp < HEADS_PER_KV + 2);
  const int from = column_of_head(is_query ? kv_head * HEADS_PER_KV + warp : HEADS + (is_key ? 0 : KV_HEADS) + kv_head);
  RopeHead fresh;
  if (makes) {
    const i64 position = made.position_ids[sequence] * (ROTARY_DIM / 2);
    fresh.prepare(is_query ? made.q_norm
                  : is_key ? made.k_norm
                           : nullptr,
                  made.bias + from, made.cos_table + position, made.sin_table + position, is_query || is_key);
  }
  pdl_wait();
  if (split >= splits.used) return;
  if constexpr (MAKES) {
    if (makes) {
      fresh.read(QkvRow{made.partials, sequence, from});
      fresh.finish(is_query || is_key, own.made[warp]);
      CacheValue* const out = (is_key ? key_cache : value_cache) + cache + (i64)first_new * HEAD_DIM;
#pragma unroll
      for (int i = 0; i < RopeHead::ELEMENTS; ++i) {
        const int at = fresh.at[i];
        if (is_query) {
          reinterpret_cast<u16*>(own.queries[warp])[at] = from_float(fresh.values[i]);
          continue;
        }
        const CacheValue bits = to_cache(fresh.values[i]);
        reinterpret_cast<CacheValue*>(own.new_row[is_key ? 0 : 1])[at] = bits;
        out[at] = bits;
      }
    }
    __syncthreads();
  }
  fetch_new_keys(begin + warp * CACHE_ROWS);
  if constexpr (EARLY_VALUES) fetch_new_values(begin + warp * CACHE_ROWS);
  if constexpr (!MAKES) {
    for (int i = threadIdx.x; i < queries * HEAD_DIM / 8; i += ATTENTION_THREADS) {
      const int query = first_query + i / (HEAD_DIM / 8), token = query / HEADS_PER_KV;
      const int head = kv_head * HEADS_PER_KV + query % HEADS_PER_KV, row = sequence * tokens + token;
      const uint4* const source = reinterpret_cast<const uint4*>(all_queries + (row * HEADS + head) * HEAD_DIM);
      own.queries[i / (HEAD_DIM / 8)][i % (HEAD_DIM / 8)] = load_cg(source + i % (HEAD_DIM / 8));
    }
    __syncthreads();
  }

  int ends[HALVES];
  float highest[HALVES], total[HALVES];
#pragma unroll
  for (int half = 0; half < HALVES; ++half)
    ends[half] = own.ends[tokens_of[half]], highest[half] = LOWEST, total[half] = 0;
  float result[HALVES][VALUE_CHUNKS][4][4] = {};  // accumulators of O^T

  for (int base = begin + warp * CACHE_ROWS; base < end; base += ATTENTION_WARPS * CACHE_ROWS) {
    const int next = base + ATTENTION_WARPS * CACHE_ROWS;
    bool visible[HALVES][2][2];
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = base + 8 * i + 2 * t + j;
          const bool seen = tree.mask ? marks[half][i] >> 8 * j & 0xff : row < ends[half];
          visible[half][i][j] = seen && row < end && (window <= 0 || row >= ends[half] - window);
        }
    float scores[2][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; ++chunk) {
      u32 first[4] = {}, second[4] = {};
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const uint4 words = own.queries[g + 8 * half][4 * chunk + t];
        first[half] = words.x, first[half + 2] = words.y, second[half] = words.z, second[half + 2] = words.w;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 key = widen(keys[i][chunk]);
        mma_m16n8k16(scores[i], first, key.x, key.y);
        mma_m16n8k16(scores[i], second, key.z, key.w);
      }
    }
    if (next < end) fetch_keys(next), fetch_new_keys(next), fetch_marks(next);

    u32 weights[HALVES][2];
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float high = highest[half];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[i][2 * half + j];
          score *= LOG2E * rsqrt_fast(HEAD_DIM);
          if (visible[half][i][j]) high = fmaxf(high, score);
        }
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float factor = exp2_fast(highest[half] - high);
      highest[half] = high, total[half] *= factor;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float share[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          share[j] = visible[half][i][j] ? exp2_fast(scores[i][2 * half + j] - high) : 0.0f;
          total[half] += share[j];
        }
        weights[half][i] = from_float(share[0]) | (u32)from_float(share[1]) << 16;
      }
      // rescale factors of queries 2t and 2t + 1
      const float factors[2] = {__shfl_sync(~0u, factor, 8 * t), __shfl_sync(~0u, factor, 8 * t + 4)};
#pragma unroll
      for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) result[half][chunk][j][e] *= factors[e % 2];
    }
    if constexpr (!EARLY_VALUES) fetch_values(base), fetch_new_values(base);
#pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk) {
      u32 words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 value = widen(values[chunk][i]);
        words[i][0] = value.x, words[i][1] = value.y, words[i][2] = value.z, words[i][3] = value.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 pairs[4] = {lower_halves(words[0][j], words[1][j]), upper_halves(words[0][j], words[1][j]),
                              lower_halves(words[2][j], words[3][j]), upper_halves(words[2][j], words[3][j])};
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
          mma_m16n8k16(result[half][chunk][j], pairs, weights[half][0], weights[half][1]);
      }
    }
    if constexpr (EARLY_VALUES)
      if (next < end) fetch_values(next), fetch_new_values(next);
  }

  // Warps that had rows store their partial outputs, MERGED queries at a time.
  const int busy = (end - begin + CACHE_ROWS - 1) / CACHE_ROWS;
  const int warps = busy < ATTENTION_WARPS ? busy : ATTENTION_WARPS;
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    total[half] += __shfl_xor_sync(~0u, total[half], 1);
    total[half] += __shfl_xor_sync(~0u, total[half], 2);
    if (t == 0) {
      own.scales[warp][g + 8 * half][0] = highest[half];
      own.scales[warp][g + 8 * half][1] = total[half];
    }
  }
  const auto out_of = [&](int index) {
    const int query = first_query + index, row = sequence * tokens + query / HEADS_PER_KV;
    return (row * SPLITS + split) * HEADS + kv_head * HEADS_PER_KV + query % HEADS_PER_KV;
  };
#pragma unroll
  for (int round = 0; round < QUERIES / MERGED; ++round) {
    __syncthreads();  // the scratch is reused
    if (round == 0 && threadIdx.x < queries) {
      // Replace each warp's max by its weight in the combined output.
      const int index = threadIdx.x;
      float high = LOWEST, sum = 0;
#pragma unroll
      for (int w = 0; w < ATTENTION_WARPS; ++w)
        if (w < warps) high = fmaxf(high, own.scales[w][index][0]);
#pragma unroll
      for (int w = 0; w < ATTENTION_WARPS; ++w)
        if (w < warps) {
          const float factor = exp2_fast(own.scales[w][index][0] - high);
          sum += factor * own.scales[w][index][1], own.scales[w][index][0] = factor;
        }
      reinterpret_cast<float2*>(scales)[out_of(index)] = {high, sum};
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int index = 8 * half + 2 * t + e;
        if (warp >= warps || index / MERGED != round) continue;
        float* const place = own.sums[warp][index % MERGED];
#pragma unroll
        for (int chunk = 0; chunk < VALUE_CHUNKS; ++chunk)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            reinterpret_cast<float2*>(place + 64 * chunk)[8 * j + g] = {result[half][chunk][j][e],
                                                                        result[half][chunk][j][e + 2]};
      }
    __syncthreads();
    const int here = queries - round * MERGED < MERGED ? queries - round * MERGED : MERGED;
#pragma unroll 4
    for (int at = threadIdx.x; at < here * HEAD_DIM / 2; at += ATTENTION_THREADS) {
      const int index = round * MERGED + at / (HEAD_DIM / 2), dim = at % (HEAD_DIM / 2) * 2;
      const int place = dim / 64 * 64 + dim % 8 / 2 * 16 + dim % 64 / 8 * 2;
      float2 value = {0, 0};
#pragma unroll
      for (int w = 0; w < ATTENTION_WARPS; ++w)
        if (w < warps) {
          const float factor = own.scales[w][index][0];
          const float2 share = *reinterpret_cast<const float2*>(own.sums[w][index % MERGED] + place);
          value.x += factor * share.x, value.y += factor * share.y;
        }
      *reinterpret_cast<float2*>(sums + out_of(index) * HEAD_DIM + dim) = value;
    }
  }
}
