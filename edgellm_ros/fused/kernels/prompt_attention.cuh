// SPDX-License-Identifier: Apache-2.0
// Attention of the tokens of prompts on tensor cores: causal, over the filled rows of the KV cache (FlashAttention-2).
//
// A CTA has one KV head, QUERY_TILE queries (token x query heads of the KV head, GQA) and one split of the visible KV
// rows. A warp has Q_TILES times 16 queries: S = Q K^T and O = P V, with P in the registers in which S was computed.
// K and V come through smem in tiles of KV_ROWS rows, two of each in flight; a warp reads them once for all its
// queries. combine_prompt combines the splits. With TREES the new tokens of a sequence are a tree, whose mask tells
// which rows each of them sees. With ATTENDS_TO_ALL there is no cache: keys and values are in qkv, and a sequence's
// tokens see all of it (the patches of an image or tile).

#pragma once

#include "primitives.cuh"

constexpr int QUERY_SIZE = (1 + ATTENTION_GATE) * HEAD_DIM;  // of a head, with its gate beside it if there is one
constexpr int HEADS_PER_KV = HEADS / KV_HEADS, QKV_SIZE = HEADS * QUERY_SIZE + 2 * KV_HEADS * HEAD_DIM;
constexpr int ROW_CHUNKS = HEAD_DIM / 8, HEAD_STEPS = (HEAD_DIM + 15) / 16;
constexpr int STRIDE = 2 * HEAD_STEPS + 1;  // chunks of a row in smem; odd: no bank conflicts of ldmatrix
constexpr int KV_STRIDE = ATTENDS_TO_ALL ? QKV_SIZE : HEAD_DIM;
constexpr float LOWEST = -1e30f;
static_assert(HEAD_DIM % 8 == 0);

// TILES: of 16 queries of a warp. KV: rows of a tile of keys or values.
template <int TILES, int KV>
struct Form {
  static constexpr int Q_TILES = TILES, KV_ROWS = KV, WARP_QUERIES = 16 * TILES;
  static constexpr int QUERY_TILE = ATTENTION_THREADS / 32 * WARP_QUERIES;
  static_assert(KV % 16 == 0);

  uint4 queries[QUERY_TILE][STRIDE], keys[2][KV][STRIDE], values[2][KV][STRIDE];  // smem of a CTA
};

// A tile of queries of a sequence, the KV rows that it sees, and how they are split: a split has whole tiles of KV
// rows. length: of the KV rows with the new tokens.
template <class F>
struct QueryTile {
  static constexpr int QUERY_TILE = F::QUERY_TILE, KV_ROWS = F::KV_ROWS;
  int tokens, kv_head, first_query, queries, first_new, begin, end, share, used;

  __device__ QueryTile(int tile, int kv_head, int length, int window, int tokens, int splits)
      : tokens(tokens), kv_head(kv_head), first_query(tile * QUERY_TILE), first_new(length - tokens) {
    const int left = tokens * HEADS_PER_KV - first_query;
    queries = left < QUERY_TILE ? left : QUERY_TILE;
    const int first_end = TREES ? first_new + 1 : end_of(0);
    begin = window > 0 && first_end > window ? (first_end - window) / KV_ROWS * KV_ROWS : 0;
    end = TREES ? length : end_of(queries - 1);
    const int tiles = (end - begin + KV_ROWS - 1) / KV_ROWS, even = (tiles + splits - 1) / splits;
    share = KV_ROWS * (even > SPLIT_TILES ? even : SPLIT_TILES);
    used = (end - begin + share - 1) / share;
  }
  __device__ int token_of(int query) const { return (first_query + query) / HEADS_PER_KV; }
  // Number of KV rows up to the token of a query.
  __device__ int end_of(int query) const { return ATTENDS_TO_ALL ? tokens : first_new + token_of(query) + 1; }
  // Position of a tree's token and 1: the rows before the tree, and those of the tree that it sees.
  __device__ int end_in_tree(int query, const unsigned char* mask) const {
    int seen = 0;
    for (int i = 0; i < tokens; ++i) seen += mask[(i64)token_of(query) * CAPACITY + first_new + i] != 0;
    return first_new + seen;
  }
  // Place of a query in [rows,HEADS].
  __device__ i64 place_of(int query, int sequence) const {
    const int head = (first_query + query) % HEADS_PER_KV;
    return ((i64)sequence * tokens + token_of(query)) * HEADS + kv_head * HEADS_PER_KV + head;
  }
  // Place of a query in the scratch [sequences,tiles,KV_HEADS,splits,QUERY_TILE].
  __device__ i64 scratch_of(int query, int sequence, int split, int splits) const {
    return ((((i64)sequence * tiles_of(tokens) + first_query / QUERY_TILE) * KV_HEADS + kv_head) * splits + split) *
               QUERY_TILE +
           query;
  }
  __device__ static int tiles_of(int tokens) { return (tokens * HEADS_PER_KV + QUERY_TILE - 1) / QUERY_TILE; }
};

// Two values of a head's result, times the sigmoids of their gates if there are any. place: of the head in
// [rows,HEADS]; at: of the first value in the head.
__device__ inline u32 gated_pair(float low, float high, const u16* qkv, i64 place, int at) {
  if constexpr (ATTENTION_GATE) {
    const u16* const gates = qkv + place / HEADS * QKV_SIZE + place % HEADS * QUERY_SIZE + HEAD_DIM + at;
    const float2 gate = to_floats(load_cg(reinterpret_cast<const u32*>(gates)));
    low /= 1.0f + exp2_fast(-LOG2E * gate.x), high /= 1.0f + exp2_fast(-LOG2E * gate.y);
  }
  return from_floats(low, high);
}

// Copy rows base .. base + KV_ROWS - 1 of a head of the cache to smem; zero from `end` on.
template <int KV_ROWS>
__device__ inline void copy_kv_tile(uint4* tile, const CacheValue* rows, int base, int end) {
  const SmemPtr target(tile);
#pragma unroll
  for (int i = threadIdx.x; i < KV_ROWS * ROW_CHUNKS; i += ATTENTION_THREADS) {
    const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
    const bool valid = base + row < end;
    const CacheValue* const source = rows + (i64)(valid ? base + row : base) * KV_STRIDE + 8 * chunk;
#if FP8_CACHE
    tile[row * STRIDE + chunk] = valid ? widen(load_cg(reinterpret_cast<const CacheWord*>(source))) : uint4{};
#else
    cp_async(target.plus(row * STRIDE + chunk), source, valid);
#endif
  }
}

// Grid [tiles * KV_HEADS * splits, sequences], after pdl_wait. qkv [rows,QKV_SIZE] has the rotated queries; length: KV
// rows with the new tokens. Of queries with several splits, sums [..,D] and scales (maximum, sum of weights) go to the
// scratch, otherwise the result to out [rows,HEADS,D]. mask [sequences,tokens,CAPACITY] of trees.
template <class F>
__device__ inline void attend_prompt(const u16* qkv, int length, const CacheValue* key_cache,
                                     const CacheValue* value_cache, u16* out, float* sums, float2* scales, int window,
                                     int tokens, int splits, const unsigned char* mask) {
  constexpr int Q_TILES = F::Q_TILES, KV_ROWS = F::KV_ROWS, WARP_QUERIES = F::WARP_QUERIES;
  constexpr int SCORES = KV_ROWS / 8, STEPS = HEAD_STEPS, PARTS = 2 * Q_TILES;
  constexpr bool QUERIES_IN_REGISTERS = HEAD_DIM * Q_TILES <= 128;
  DYNAMIC_SMEM(memory);
  F& own = *reinterpret_cast<F*>(memory);
  const int split = blockIdx.x % splits, kv_head = blockIdx.x / splits % KV_HEADS, sequence = blockIdx.y;
  // The last tokens see the most rows, so they begin first.
  const int tile = QueryTile<F>::tiles_of(tokens) - 1 - blockIdx.x / (splits * KV_HEADS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const QueryTile<F> rows(tile, kv_head, length, window, tokens, splits);
  if (split >= rows.used) return;
  const int from = rows.begin + split * rows.share;
  const int to = from + rows.share < rows.end ? from + rows.share : rows.end;
  const i64 cache = ATTENDS_TO_ALL ? (i64)sequence * tokens * KV_STRIDE + kv_head * HEAD_DIM
                                   : ((i64)sequence * KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
  if constexpr (STRIDE > ROW_CHUNKS + 1)  // dimensions beyond the head's are zero
    for (int i = threadIdx.x; i < F::QUERY_TILE + 4 * KV_ROWS; i += ATTENTION_THREADS)
      own.queries[0][i * STRIDE + ROW_CHUNKS] = {};

  const SmemPtr query_tile(own.queries[0]);
  for (int i = threadIdx.x; i < F::QUERY_TILE * ROW_CHUNKS; i += ATTENTION_THREADS) {
    const int query = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
    const i64 place = rows.place_of(query < rows.queries ? query : 0, sequence);
    const u16* const source = qkv + place / HEADS * QKV_SIZE + place % HEADS * QUERY_SIZE + 8 * chunk;
    cp_async(query_tile.plus(query * STRIDE + chunk), source, query < rows.queries);
  }
  copy_kv_tile<KV_ROWS>(own.keys[0][0], key_cache + cache, from, to);
  copy_kv_tile<KV_ROWS>(own.values[0][0], value_cache + cache, from, to);
  cp_async_commit();

  // Of this lane's queries g, g + 8, ... of the warp: the rows that they see, maximum and sum.
  int ends[PARTS];
  float highest[PARTS], total[PARTS] = {};
  const auto known = [&](int query) { return query < rows.queries ? query : rows.queries - 1; };
  const unsigned char* marks[PARTS];  // of this lane's queries: the rows that they see
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int query = known(WARP_QUERIES * warp + g + 8 * part);
    highest[part] = LOWEST;
    if constexpr (TREES) {
      const unsigned char* const tree = mask + (i64)sequence * tokens * CAPACITY;
      marks[part] = tree + (i64)rows.token_of(query) * CAPACITY;
      ends[part] = window > 0 ? rows.end_in_tree(query, tree) : 0;
    } else {
      ends[part] = rows.end_of(query);
    }
  }
  const int warp_end = rows.end_of(known(WARP_QUERIES * warp)), last_end = rows.end;
  float result[Q_TILES][2 * STEPS][4] = {};
  u32 query_words[Q_TILES][QUERIES_IN_REGISTERS ? STEPS : 1][4];
  const SmemPtr query_rows(own.queries[WARP_QUERIES * warp + lane % 16] + lane / 16);
  const int key_row = lane / 16 * 8 + lane % 8, value_row = lane % 16;
  const SmemPtr key_rows(own.keys[0][key_row] + lane / 8 % 2), value_rows(own.values[0][value_row] + lane / 16);
  const float scale = LOG2E * rsqrt_fast(HEAD_DIM);

  for (int base = from, stage = 0; base < to; base += KV_ROWS, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (QUERIES_IN_REGISTERS && base == from)
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int tile = 0; tile < Q_TILES; ++tile)
          ldmatrix_x4(query_words[tile][QUERIES_IN_REGISTERS ? k : 0], query_rows.plus(16 * tile * STRIDE + 2 * k));
    if (base + KV_ROWS < to) {
      copy_kv_tile<KV_ROWS>(own.keys[stage ^ 1][0], key_cache + cache, base + KV_ROWS, to);
      copy_kv_tile<KV_ROWS>(own.values[stage ^ 1][0], value_cache + cache, base + KV_ROWS, to);
      cp_async_commit();
    }
    if (ATTENDS_TO_ALL && WARP_QUERIES * warp >= rows.queries) continue;  // a warp without queries only copies
    float scores[Q_TILES][SCORES][4] = {};
    const SmemPtr keys = key_rows.plus(stage * KV_ROWS * STRIDE);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      u32 query[Q_TILES][4];
#pragma unroll
      for (int tile = 0; tile < Q_TILES; ++tile)
        if constexpr (QUERIES_IN_REGISTERS)
#pragma unroll
          for (int i = 0; i < 4; ++i) query[tile][i] = query_words[tile][k][i];
        else
          ldmatrix_x4(query[tile], query_rows.plus(16 * tile * STRIDE + 2 * k));
#pragma unroll
      for (int pair = 0; pair < SCORES / 2; ++pair) {
        u32 key[4];
        ldmatrix_x4(key, keys.plus(16 * pair * STRIDE + 2 * k));
#pragma unroll
        for (int tile = 0; tile < Q_TILES; ++tile) {
          mma_m16n8k16(scores[tile][2 * pair], query[tile], key[0], key[1]);
          mma_m16n8k16(scores[tile][2 * pair + 1], query[tile], key[2], key[3]);
        }
      }
    }
    const bool all = !TREES && base + KV_ROWS <= warp_end && (window <= 0 || base >= last_end - window);
    if (!all)
#pragma unroll
      for (int tile = 0; tile < Q_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < SCORES; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int part = 2 * tile + j / 2, row = base + 8 * i + 2 * t + j % 2, end = ends[part];
            const bool seen = row < to && (TREES ? marks[part][row] != 0 : row < end);
            if (!seen || window > 0 && row < end - window) scores[tile][i][j] = LOWEST;
          }
    u32 weights[Q_TILES][SCORES / 2][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int tile = part / 2, half = part % 2;
      float high = highest[part];
#pragma unroll
      for (int i = 0; i < SCORES; ++i)
        high = fmaxf(high, fmaxf(scores[tile][i][2 * half], scores[tile][i][2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      // Nothing visible yet: weights are 0, without the difference of two huge numbers.
      const float factor = exp2_fast((highest[part] - high) * scale), shift = high == LOWEST ? 0.0f : high * scale;
      highest[part] = high, total[part] *= factor;
#pragma unroll
      for (int i = 0; i < SCORES; ++i) {
        const float first = exp2_fast(scores[tile][i][2 * half] * scale - shift);
        const float second = exp2_fast(scores[tile][i][2 * half + 1] * scale - shift);
        total[part] += first + second;
        weights[tile][i / 2][i % 2 * 2 + half] = from_floats(first, second);
      }
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) result[tile][i][2 * half] *= factor, result[tile][i][2 * half + 1] *= factor;
    }
    const SmemPtr values = value_rows.plus(stage * KV_ROWS * STRIDE);
#pragma unroll
    for (int pair = 0; pair < SCORES / 2; ++pair)
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        u32 value[4];
        ldmatrix_x4_trans(value, values.plus(16 * pair * STRIDE + 2 * k));
#pragma unroll
        for (int tile = 0; tile < Q_TILES; ++tile) {
          mma_m16n8k16(result[tile][2 * k], weights[tile][pair], value[0], value[1]);
          mma_m16n8k16(result[tile][2 * k + 1], weights[tile][pair], value[2], value[3]);
        }
      }
  }

#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    total[part] += __shfl_xor_sync(~0u, total[part], 1);
    total[part] += __shfl_xor_sync(~0u, total[part], 2);
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int query = WARP_QUERIES * warp + g + 8 * part, half = part % 2;
    const auto& own_result = result[part / 2];
    if (query >= rows.queries) continue;
    if (rows.used == 1) {
      const float share = 1.0f / total[part];
      const i64 place = rows.place_of(query, sequence);
      u32* const words = reinterpret_cast<u32*>(out + place * HEAD_DIM) + t;
#pragma unroll
      for (int i = 0; i < ROW_CHUNKS; ++i) {
        const float low = share * own_result[i][2 * half], high = share * own_result[i][2 * half + 1];
        words[4 * i] = gated_pair(low, high, qkv, place, 8 * i + 2 * t);
      }
      continue;
    }
    const i64 place = rows.scratch_of(query, sequence, split, splits);
    float2* const pairs = reinterpret_cast<float2*>(sums + place * HEAD_DIM) + t;
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; ++i) pairs[4 * i] = {own_result[i][2 * half], own_result[i][2 * half + 1]};
    if (t == 0) scales[place] = {highest[part] * scale, total[part]};
  }
}

// A warp combines the splits of a head of a token. Grid [tokens * HEADS / warps, sequences].
template <class F>
__device__ inline void combine_prompt_splits(const u16* qkv, const float* sums, const float2* scales,
                                             const i64* kv_length, u16* out, int window, int tokens, int behind,
                                             int splits) {
  constexpr int PAIRS = HEAD_DIM / 2, SHARE = (PAIRS + 31) / 32;
  const int lane = threadIdx.x % 32, place = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, sequence = blockIdx.y;
  pdl_wait();
  if (place >= tokens * HEADS) return;
  const int head = place % HEADS, query = place / HEADS * HEADS_PER_KV + head % HEADS_PER_KV;
  const QueryTile<F> rows(query / F::QUERY_TILE, head / HEADS_PER_KV, (int)kv_length[sequence] - behind, window, tokens,
                          splits);
  if (rows.used == 1) return;
  const i64 first = rows.scratch_of(query % F::QUERY_TILE, sequence, 0, splits);
  const float2 scale = load_cg(scales + first + (lane < rows.used ? lane : 0) * F::QUERY_TILE);
  float high = lane < rows.used ? scale.x : LOWEST;
#pragma unroll
  for (int other = 16; other > 0; other /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, other));
  const float weight = lane < rows.used ? exp2_fast(scale.x - high) : 0.0f;
  float sum = weight * scale.y;
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  float2 result[SHARE] = {};
#pragma unroll 4
  for (int split = 0; split < rows.used; ++split) {
    const float share = __shfl_sync(~0u, weight, split);
    const float2* const pairs = reinterpret_cast<const float2*>(sums + (first + split * F::QUERY_TILE) * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      if (PAIRS % 32 && lane + 32 * i >= PAIRS) continue;
      const float2 pair = load_cg(pairs + lane + 32 * i);
      result[i].x += share * pair.x, result[i].y += share * pair.y;
    }
  }
  const i64 all = (i64)sequence * tokens * HEADS + place;
  u32* const words = reinterpret_cast<u32*>(out + all * HEAD_DIM);
#pragma unroll
  for (int i = 0; i < SHARE; ++i)
    if (PAIRS % 32 == 0 || lane + 32 * i < PAIRS)
      words[lane + 32 * i] = gated_pair(result[i].x / sum, result[i].y / sum, qkv, all, 2 * (lane + 32 * i));
}
