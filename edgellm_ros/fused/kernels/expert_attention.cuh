// SPDX-License-Identifier: Apache-2.0
// Attention of 16 rows of a trajectory to the filled rows of the language model's KV cache and to the whole
// trajectory.
//
// A CTA has 16 rows and one head. Its warps take tiles of 16 keys round-robin, first those of the cache, then the
// trajectory's. Each keeps its running max and sum, which are combined in a fixed order. Q, K and V go from global
// memory to registers without smem: the order of a head's dimensions in an mma is free, so a lane takes 8 contiguous
// values.

#pragma once

#include "primitives.cuh"

constexpr int TILE_ROWS = 16, TILE_KEYS = 16;
constexpr int ROW_TILES = (HORIZON + TILE_ROWS - 1) / TILE_ROWS;
constexpr int Q_SIZE = HEADS * HEAD_DIM, KV_SIZE = KV_HEADS * HEAD_DIM, QKV_SIZE = Q_SIZE + 2 * KV_SIZE;
constexpr int PARTIALS = HEAD_DIM / 32, COLUMNS = HEAD_DIM / 64;  // chunks of 32 and of 64 values of a head
constexpr int MERGE_PITCH = HEAD_DIM + 16;                        // row pitch of a warp's partial output
constexpr float LOWEST = -1e30f;
constexpr int ATTENTION_SHARED = ATTENTION_WARPS * TILE_ROWS * (4 * MERGE_PITCH + 8);

// A tile of keys and values. Lane 4g + t has values 8t to 8t + 7 of each 32 of the keys g and g + 8, and values 8g to
// 8g + 7 of each 64 of the values 2t, 2t + 1, 2t + 8 and 2t + 9.
struct KeyTile {
  uint4 keys[2][PARTIALS], values[4][COLUMNS];

  // Load rows from `first` on. read(address) returns 8 values; rows: number of rows of `k` and `v`.
  template <class Value, class Read>
  __device__ void load_rows(const Value* k, const Value* v, int stride, int first, int rows, Read read) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + g + 8 * i;
#pragma unroll
      for (int part = 0; part < PARTIALS; ++part)
        keys[i][part] = row < rows ? read(k + (i64)row * stride + 32 * part + 8 * t) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 2 * t + i % 2 + i / 2 * 8;
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
        values[i][column] = row < rows ? read(v + (i64)row * stride + 64 * column + 8 * g) : uint4{0, 0, 0, 0};
    }
  }
};

__device__ inline u32 word(const uint4& bits, int i) {
  return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
}

__device__ inline uint4 bits_of(float a, float b, float c, float d) {
  return {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}

// Pack value i of `first` and of `second`.
__device__ inline u32 join(const uint4& first, const uint4& second, int i) {
  const u32 low = word(first, i / 2), high = word(second, i / 2);
  return i % 2 ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
}

// Online softmax of a warp: for rows g and g + 8 the max, the sum of weights, and the partial output.
struct Seen {
  float highest[2] = {LOWEST, LOWEST}, total[2] = {0, 0}, sums[COLUMNS][8][4] = {};

  // Accumulate the first `count` keys of a tile.
  __device__ void add(const uint4 (&queries)[2][PARTIALS], const KeyTile& tile, int count) {
    const int t = threadIdx.x % 4;
    const float scale = LOG2E * rsqrt_fast(HEAD_DIM);
    float scores[2][4] = {};
#pragma unroll
    for (int part = 0; part < PARTIALS; ++part)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 q[4] = {word(queries[0][part], 2 * half), word(queries[1][part], 2 * half),
                          word(queries[0][part], 2 * half + 1), word(queries[1][part], 2 * half + 1)};
#pragma unroll
        for (int i = 0; i < 2; ++i)
          mma_m16n8k16(scores[i], q, word(tile.keys[i][part], 2 * half), word(tile.keys[i][part], 2 * half + 1));
      }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float high = highest[row];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][2 * row + i % 2];
        score = i / 2 * 8 + 2 * t + i % 2 < count ? score * scale : LOWEST;
        high = fmaxf(high, score);
      }
#pragma unroll
      for (int other = 1; other < 4; other *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, other));
      const float factor = exp2_fast(highest[row] - high);
      highest[row] = high, total[row] *= factor;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][2 * row + i % 2];
        score = exp2_fast(score - high), total[row] += score;
      }
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[column][i][2 * row] *= factor, sums[column][i][2 * row + 1] *= factor;
    }
    const u32 weights[4] = {pack(scores[0][0], scores[0][1]), pack(scores[0][2], scores[0][3]),
                            pack(scores[1][0], scores[1][1]), pack(scores[1][2], scores[1][3])};
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        mma_m16n8k16(sums[column][i], weights, join(tile.values[0][column], tile.values[1][column], i),
                     join(tile.values[2][column], tile.values[3][column], i));
  }

  // Store partial output [16,MERGE_PITCH], max and sum [16] to smem. Lane t has values 16t to 16t + 15 of each 64; a
  // row in smem has the first four values of lanes 0 to 3, then their second four, and so on.
  __device__ void leave(uint4* sum_rows, float2* scales) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int other = 1; other < 4; other *= 2) total[row] += __shfl_xor_sync(~0u, total[row], other);
      if (t == 0) scales[g + 8 * row] = {highest[row], total[row]};
      uint4* const place = sum_rows + (g + 8 * row) * (MERGE_PITCH / 4) + t;
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // values 4 * i to 4 * i + 3 of the lane's 16
          const float (*const own)[4] = sums[column] + i % 2 * 4;
          const int slot = 2 * row + i / 2;
          place[(4 * column + i) * 4] = bits_of(own[0][slot], own[1][slot], own[2][slot], own[3][slot]);
        }
    }
  }
};

// qkv [rows,QKV_SIZE]; keys and values: the sequence's cache, [KV_HEADS,CAPACITY,HEAD_DIM]; out [rows,Q_SIZE].
__device__ inline void decode_attention(const u16* qkv, const i64* kv_length, const CacheValue* keys,
                                        const CacheValue* values, u16* out) {
  DYNAMIC_SMEM(memory);
  const int first = blockIdx.x % ROW_TILES * TILE_ROWS;
  const int head = blockIdx.x / ROW_TILES, kv_head = head / (HEADS / KV_HEADS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int length = (int)kv_length[0];
  const int cached = (length + TILE_KEYS - 1) / TILE_KEYS, tiles = cached + (HORIZON + TILE_KEYS - 1) / TILE_KEYS;
  const u16* const sample = qkv + (i64)blockIdx.y * HORIZON * QKV_SIZE;
  KeyTile tile;
  auto fetch = [&](int i) {
    if (i < cached) {
      const i64 place = (i64)kv_head * CAPACITY * HEAD_DIM;
      tile.load_rows(keys + place, values + place, HEAD_DIM, i * TILE_KEYS, length,
                     [](const CacheValue* address) { return widen(load_nc(address)); });
    } else {
      const u16* const own = sample + Q_SIZE + kv_head * HEAD_DIM;
      tile.load_rows(own, own + KV_SIZE, QKV_SIZE, (i - cached) * TILE_KEYS, HORIZON,
                     [](const u16* address) { return load_cg(reinterpret_cast<const uint4*>(address)); });
    }
  };
  if (warp < cached) fetch(warp);
  pdl_wait();
  uint4 queries[2][PARTIALS];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + g + 8 * i;
#pragma unroll
    for (int part = 0; part < PARTIALS; ++part) {
      const u16* const place = sample + (i64)row * QKV_SIZE + head * HEAD_DIM + 32 * part + 8 * t;
      queries[i][part] = row < HORIZON ? load_cg(reinterpret_cast<const uint4*>(place)) : uint4{0, 0, 0, 0};
    }
  }
  Seen seen;
  for (int i = warp; i < tiles; i += ATTENTION_WARPS) {
    if (i != warp || i >= cached) fetch(i);
    const int left = i < cached ? length - i * TILE_KEYS : HORIZON - (i - cached) * TILE_KEYS;
    seen.add(queries, tile, left);
  }
  constexpr int WARP_SUMS = TILE_ROWS * MERGE_PITCH / 4;  // in uint4
  float2* const scales = reinterpret_cast<float2*>(memory + ATTENTION_WARPS * WARP_SUMS);
  seen.leave(memory + warp * WARP_SUMS, scales + warp * TILE_ROWS);
  __syncthreads();
  for (int place = threadIdx.x; place < TILE_ROWS * HEAD_DIM / 4; place += 32 * ATTENTION_WARPS) {
    const int row = place / (HEAD_DIM / 4), piece = place % (HEAD_DIM / 4);
    float high = LOWEST, sum = 0, result[4] = {};
#pragma unroll
    for (int i = 0; i < ATTENTION_WARPS; ++i) high = fmaxf(high, scales[i * TILE_ROWS + row].x);
#pragma unroll
    for (int i = 0; i < ATTENTION_WARPS; ++i) {
      const float2 scale = scales[i * TILE_ROWS + row];
      const uint4 part = memory[i * WARP_SUMS + row * (MERGE_PITCH / 4) + piece];
      const float factor = exp2_fast(scale.x - high);
      sum += factor * scale.y;
#pragma unroll
      for (int j = 0; j < 4; ++j) result[j] += factor * __uint_as_float(word(part, j));
    }
    if (first + row >= HORIZON) continue;
    const int chunk = piece / 4, column = head * HEAD_DIM + chunk / 4 * 64 + piece % 4 * 16 + chunk % 4 * 4;
    u32* const to = reinterpret_cast<u32*>(out + (i64)(blockIdx.y * HORIZON + first + row) * Q_SIZE + column);
    to[0] = pack(result[0] / sum, result[1] / sum), to[1] = pack(result[2] / sum, result[3] / sum);
  }
}
