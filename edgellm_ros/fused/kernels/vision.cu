// SPDX-License-Identifier: Apache-2.0
// The vision tower of Qwen3-VL or InternVL, compiled for one tower and GPU architecture.
//
// Qwen3-VL: begin_patches -- (patch_embed) -- blocks -- norm_patches -- (first) -- activate_merged -- (second)
// InternVL: begin_tiles   -- (patch_embed) -- blocks -- norm_merged  -- (first) -- activate_merged -- (second)
//
// a block: norm_patches -- (qkv) -- rope_patches -- patch_attention -- (proj) -- norm_patches -- (fc1) -- (fc2)
//
// Products with the weights are a library's (`FusedVision`): that of fc1 ends with bias and GELU, that of second, and
// of qkv where there is no rope_patches, with the bias. The residual stream is fp32 [patches,H]: patch_embed, proj and
// fc2 add to it, without the biases of proj and fc2. A norm adds the sum of those before it, fp32 [H], to what it
// reads. Patches are in merge order: MERGED / H of them, side by side, become one row of embeddings. Those of InternVL
// are in tiles: a tile's rows, the first its class token, attend to each other.

#include "prompt_attention.cuh"
#include "row.cuh"

constexpr int HALF = HEAD_DIM / 2;
using PatchForm = Form<WARP_TILES, KV_TILE>;
static_assert(sizeof(PatchForm) == PROMPT_ATTENTION_SMEM);
static_assert(HIDDEN == HEADS * HEAD_DIM && HEAD_DIM % 4 == 0 && MERGED % HIDDEN == 0);

// A CTA has a patch: its pixels in the model's type, and the residual stream, which begins with the bias of patch_embed
// and with four points of the learned position grid [points,H].
extern "C" __global__ void __launch_bounds__(THREADS)
    begin_patches(const float* pixels, const u16* bias, const u16* grid, const i64* index, const float* weight, u16* x,
                  float* residual, i64 patches) {
  const i64 patch = blockIdx.x;
  pdl_wait();
  for (int i = threadIdx.x; i < PATCH_SIZE; i += THREADS)
    x[patch * PATCH_SIZE + i] = from_float(pixels[patch * PATCH_SIZE + i]);
  Row<HIDDEN> row, point;
  row.read(bias);
#pragma unroll
  for (int corner = 0; corner < 4; ++corner) {
    const float share = weight[corner * patches + patch];
    point.read(grid + index[corner * patches + patch] * HIDDEN);
    row.each([&](int i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) row.values[i][j] += share * point.values[i][j];
    });
  }
  row.write(residual + patch * HIDDEN);
}

// A CTA has a row of a tile of `tokens`: its pixels in the model's type, zeros for the class token, and the residual
// stream, which begins with the tile's positions [tokens,H].
extern "C" __global__ void __launch_bounds__(THREADS)
    begin_tiles(const float* pixels, const u16* positions, u16* x, float* residual, i64 tokens) {
  const i64 place = blockIdx.x, tile = place / tokens, token = place % tokens;
  const float* const patch = pixels + (place - tile - 1) * PATCH_SIZE;  // of every token but the first
  pdl_wait();
  for (int i = threadIdx.x; i < PATCH_SIZE; i += THREADS)
    x[place * PATCH_SIZE + i] = token ? from_float(patch[i]) : (u16)0;
  Row<HIDDEN> row;
  row.read(positions + token * HIDDEN);
  row.write(residual + place * HIDDEN);
}

// LayerNorm of a row to x.
template <int SIZE>
__device__ inline void layer_norm(Row<SIZE>& row, const u16* norm, const u16* shift, float epsilon, u16* x) {
  struct Sums {
    float values[THREADS / 32];
  };
  STATIC_SMEM(Sums, sums);
  float sum = 0, squares = 0;
  row.each([&](int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += row.values[i][j];
  });
  const float mean = sum_of_threads(sum, sums.values) * (1.0f / SIZE);
  row.each([&](int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) row.values[i][j] -= mean, squares += row.values[i][j] * row.values[i][j];
  });
  const float factor = rsqrt_fast(sum_of_threads(squares, sums.values) * (1.0f / SIZE) + epsilon);
  row.each([&](int i) {
    float scale[4], offset[4];
    unpack(scale, reinterpret_cast<const uint2*>(norm)[row.quad(i)]);
    unpack(offset, reinterpret_cast<const uint2*>(shift)[row.quad(i)]);
#pragma unroll
    for (int j = 0; j < 4; ++j) row.values[i][j] = factor * row.values[i][j] * scale[j] + offset[j];
  });
  row.write(x);
}

// A row is residual + bias [H], of one patch or of several side by side.
template <int SIZE>
__device__ inline void read_biased(Row<SIZE>& row, const float* residual, const float* bias) {
  row.read(residual);
  row.each([&](int i) { add(row.values[i], reinterpret_cast<const uint4*>(bias)[row.quad(i) % (HIDDEN / 4)]); });
}

// A CTA has a patch: x = LayerNorm(residual + bias).
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_patches(const u16* norm, const u16* shift, const float* bias, const float* residual, u16* x) {
  const i64 first = (i64)blockIdx.x * HIDDEN;
  pdl_wait();
  Row<HIDDEN> row;
  read_biased(row, residual + first, bias);
  layer_norm(row, norm, shift, EPSILON, x + first);
}

// A CTA has the patches of a row of embeddings: x = LayerNorm(residual + bias), over all of them. tile_rows: such rows
// of a tile, whose first row is a class token; 0 = there are no tiles.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_merged(const u16* norm, const u16* shift, const float* bias, const float* residual, u16* x, i64 tile_rows) {
  const i64 place = blockIdx.x, class_tokens = tile_rows ? place / tile_rows + 1 : 0;
  pdl_wait();
  Row<MERGED> row;
  read_biased(row, residual + place * MERGED + class_tokens * HIDDEN, bias);
  layer_norm(row, norm, shift, MERGER_EPSILON, x + place * MERGED);
}

// A CTA has a row of qkv [patches,3H]: bias, and RoPE of queries and keys. A thread has two values of each half of a
// head, which are rotated together.
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_patches(u16* qkv, const u16* bias, const float* cos_rows, const float* sin_rows) {
  constexpr int PAIRS = HALF / 2, ALL = 3 * HEADS * PAIRS;
  u32* const row = reinterpret_cast<u32*>(qkv + (i64)blockIdx.x * QKV_SIZE);
  const u32* const shifts = reinterpret_cast<const u32*>(bias);
  const i64 angle = (i64)blockIdx.x * HALF;
  pdl_wait();
#pragma unroll 4
  for (int i = threadIdx.x; i < ALL; i += THREADS) {
    const int head = i / PAIRS, at = i % PAIRS, first = head * HALF + at, second = first + PAIRS;
    float2 low = to_floats(row[first]), high = to_floats(row[second]);
    const float2 low_bias = to_floats(shifts[first]), high_bias = to_floats(shifts[second]);
    low.x += low_bias.x, low.y += low_bias.y, high.x += high_bias.x, high.y += high_bias.y;
    if (head < 2 * HEADS) {
      const float2 cos = reinterpret_cast<const float2*>(cos_rows + angle)[at];
      const float2 sin = reinterpret_cast<const float2*>(sin_rows + angle)[at];
      const float2 before = low;
      low = {low.x * cos.x - high.x * sin.x, low.y * cos.y - high.y * sin.y};
      high = {high.x * cos.x + before.x * sin.x, high.y * cos.y + before.y * sin.y};
    }
    row[first] = from_floats(low.x, low.y);
    row[second] = from_floats(high.x, high.y);
  }
}

extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    patch_attention(const u16* qkv, u16* out, i64 tokens) {
  pdl_wait();
  attend_prompt<PatchForm>(qkv, (int)tokens, qkv + HIDDEN, qkv + 2 * HIDDEN, out, nullptr, nullptr, 0, (int)tokens, 1,
                           nullptr);
}

__device__ inline float gelu_erf(float value) { return 0.5f * value * (1.0f + erff(value * 0.7071067812f)); }

// values [rows,RAISED] = GELU(values + bias); a thread has four values of a row.
extern "C" __global__ void __launch_bounds__(THREADS) activate_merged(u16* values, const u16* bias) {
  const int quad = blockIdx.x * THREADS + threadIdx.x;
  pdl_wait();
  if (quad >= RAISED / 4) return;
  uint2* const place = reinterpret_cast<uint2*>(values + (i64)blockIdx.y * RAISED) + quad;
  float four[4];
  unpack(four, load_cg(place));
  add(four, reinterpret_cast<const uint2*>(bias)[quad]);
#pragma unroll
  for (int j = 0; j < 4; ++j) four[j] = gelu_erf(four[j]);
  *place = pack(four);
}
