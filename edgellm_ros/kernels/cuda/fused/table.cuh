// SPDX-License-Identifier: Apache-2.0
// Logits with the embedding table [V,H] as the matrix: each warp multiplies whole rows of the table, 256 values per
// step, STAGES steps ahead.

struct Table {
  static constexpr int STEPS = (HIDDEN + 255) / 256, WIDTH = 256 * STEPS, WARPS = THREADS / 32;
  static constexpr int SHARED = 16 * STAGES * THREADS + 2 * WIDTH * ROWS + 4 * WARPS * ROWS;

  __device__ static int first_token(int block) { return (int)((i64)block * VOCAB / LM_HEAD_BLOCKS); }
};

__device__ inline void multiply_table(const u16* table, const u16* norm, i64* residual, float* logits, u16* hidden,
                                      int rows) {
  DYNAMIC_SHARED(memory);
  if (blockIdx.x >= LM_HEAD_BLOCKS) {
    wait_for_kernel_before();
    return;
  }
  u16* x = reinterpret_cast<u16*>(memory + STAGES * THREADS);  // [ROWS,WIDTH]
  float* sums = reinterpret_cast<float*>(x + Table::WIDTH * ROWS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = Table::first_token(blockIdx.x) + warp, end = Table::first_token(blockIdx.x + 1);
  Place place(memory + threadIdx.x);
  const u16* source = table + (i64)first * HIDDEN + lane * 8;
  int token_ahead = first, step_ahead = 0, slot = 0;
  auto next = [&] {
    if (token_ahead < end) {
      if constexpr (HIDDEN % 256 == 0)
        copy_async(place, source);
      else
        copy_async(place, source, step_ahead * 256 + lane * 8 < HIDDEN);
      source += 256;
      if (++step_ahead == Table::STEPS) {
        step_ahead = 0, token_ahead += Table::WARPS, source += Table::WARPS * HIDDEN - Table::WIDTH;
      }
    }
    commit_copies();
    const bool last = ++slot == STAGES;
    place.advance(last ? -(STAGES - 1) * THREADS : THREADS);
    if (last) slot = 0;
  };
#pragma unroll
  for (int i = 0; i < STAGES; ++i) next();
  {
    Normed values;
    values.read_scales(norm);
    wait_for_kernel_before();
    values.read(residual, nullptr, rows);
    values.normalize(sums);
    if (hidden && blockIdx.x == 0) values.write(hidden, rows);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int i = 0; i < Normed::SHARE; ++i)
        if (Normed::inside(i))
          reinterpret_cast<u32*>(x + row * Table::WIDTH)[Normed::pair(i)] =
              from_float(values.values[row][i].x) | (u32)from_float(values.values[row][i].y) << 16;
    for (int i = HIDDEN + threadIdx.x; i < Table::WIDTH; i += THREADS)
#pragma unroll
      for (int row = 0; row < ROWS; ++row) x[row * Table::WIDTH + i] = 0;
  }
  __syncthreads();
  for (int token = first; token < end; token += Table::WARPS) {
    float logit[ROWS] = {};
    for (int step = 0; step < Table::STEPS; ++step) {
      wait_for_copies<STAGES - 1>();
      float weights[8];
      unpack(weights, place.read());
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float values[8];
        unpack(values, *reinterpret_cast<const uint4*>(x + row * Table::WIDTH + step * 256 + lane * 8));
        logit[row] += dot(weights, values);
      }
      next();
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) logit[row] += __shfl_xor_sync(~0u, logit[row], other);
      if (lane == row && row < rows) logits[(i64)row * VOCAB + token] = logit[row];
    }
  }
}
