// SPDX-License-Identifier: Apache-2.0
// The residual stream, and RMSNorm of its rows.
//
// The residual stream is in fixed point [rows,H]: blocks add their parts of a product with integer atomics, whose
// result does not depend on the order.

constexpr float FIXED_UNITS = 1073741824.0f;  // 2^30 per 1: steps of 9.3e-10
constexpr float FIXED_LIMIT = 4194304.0f;     // of what is added; sums may be twice as large
// Added in place of NaN, infinity and what is too large. A multiple of it is hardly ever in the range of sums, so a sum
// with such a part is NaN again.
constexpr i64 BROKEN = 0x2545f4914f6cdd1d;

__device__ inline i64 to_fixed(float value) {
  return fabsf(value) < FIXED_LIMIT ? round_to_integer(value * FIXED_UNITS) : BROKEN;
}
__device__ inline float from_fixed(i64 value) {
  constexpr i64 LIMIT = (i64)(2 * FIXED_LIMIT) * (i64)FIXED_UNITS;
  return -LIMIT < value && value < LIMIT ? (float)value * (1.0f / FIXED_UNITS) : __uint_as_float(0x7fffffff);
}

__device__ inline void add_to_residual(i64* residual, float value) {
  atomicAdd(reinterpret_cast<u64*>(residual), (u64)to_fixed(value));
}

// One thread's share of the rows of x: pairs of values, THREADS pairs apart.
struct Normed {
  static constexpr int PAIRS = HIDDEN / 2, SHARE = (PAIRS + THREADS - 1) / THREADS;
  u32 scales[SHARE];
  float2 values[ROWS][SHARE];

  __device__ static bool inside(int i) { return PAIRS % THREADS == 0 || threadIdx.x + i * THREADS < PAIRS; }
  __device__ static int pair(int i) { return threadIdx.x + i * THREADS; }

  // Read the norm's scales, which depend on no other kernel.
  __device__ void read_scales(const u16* norm) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) scales[i] = inside(i) ? reinterpret_cast<const u32*>(norm)[pair(i)] : 0;
  }

  // Read rows from the residual stream; if there are embeddings, read these and begin the residual stream, unless null.
  __device__ void read(i64* residual, const u16* embeds, int rows) {
    read(residual, embeds, rows, [](int row) { return row; });
  }

  // The same of the rows place(0), place(1), ...
  template <class RowPlace>
  __device__ void read(i64* residual, const u16* embeds, int rows, RowPlace row_place) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        values[row][i] = {0, 0};
        if (row >= rows || !inside(i)) continue;
        const int place = row_place(row) * PAIRS + pair(i);
        const longlong2* pairs = reinterpret_cast<const longlong2*>(residual);
        if (embeds) {
          values[row][i] = to_floats(reinterpret_cast<const u32*>(embeds)[place]);
        } else {
          const longlong2 value = load(pairs + place);
          values[row][i] = {from_fixed(value.x), from_fixed(value.y)};
        }
      }
    if (embeds && residual && blockIdx.x == 0) begin(residual, rows);
  }

  // Begin the residual stream with the values.
  __device__ void begin(i64* residual, int rows) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        if (row < rows && inside(i))
          reinterpret_cast<longlong2*>(residual)[row * PAIRS + pair(i)] = {to_fixed(values[row][i].x),
                                                                            to_fixed(values[row][i].y)};
  }

  // Replace the values by their norm. sums: shared memory of [warps,ROWS].
  __device__ void normalize(float* sums) {
    constexpr int WARPS = THREADS / 32;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SHARE; ++i) sum += values[row][i].x * values[row][i].x + values[row][i].y * values[row][i].y;
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32 * ROWS + row] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp * ROWS + row];
      const float factor = rsqrt_fast(sum * (1.0f / HIDDEN) + EPSILON);
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        const float2 scale = to_floats(scales[i]);
        values[row][i].x *= factor * scale.x, values[row][i].y *= factor * scale.y;
      }
    }
  }

  // Write the values in the model's type; the stride of rows is H.
  __device__ void write(u16* out, int rows) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        if (row < rows && inside(i))
          reinterpret_cast<u32*>(out)[row * PAIRS + pair(i)] =
              from_float(values[row][i].x) | (u32)from_float(values[row][i].y) << 16;
  }
};
