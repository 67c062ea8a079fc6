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

// One thread's share of some rows of x: pairs of values, THREADS pairs apart.
struct Normed {
  static constexpr int PAIRS = HIDDEN / 2, SHARE = (PAIRS + THREADS - 1) / THREADS;
  // Rows at once: as many as have room in registers.
  static constexpr int LIMIT = SHARE < 32 ? 32 / SHARE : 1;
  static constexpr int AT_ONCE = ROWS <= LIMIT ? ROWS : LIMIT >= 8 ? 8 : LIMIT >= 4 ? 4 : LIMIT >= 2 ? 2 : 1;
  u32 scales[SHARE];
  float2 values[AT_ONCE][SHARE];

  __device__ static bool inside(int i) { return PAIRS % THREADS == 0 || threadIdx.x + i * THREADS < PAIRS; }
  __device__ static int pair(int i) { return threadIdx.x + i * THREADS; }

  // Read the norm's scales, which depend on no other kernel.
  __device__ void read_scales(const u16* norm) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) scales[i] = inside(i) ? reinterpret_cast<const u32*>(norm)[pair(i)] : 0;
  }

  // Read rows from `first` on from the residual stream; if there are embeddings, read these and begin the residual
  // stream, unless it is null.
  __device__ void read(i64* residual, const u16* embeds, int first, int rows) {
    read(residual, embeds, first, rows, [](int row) { return row; });
    if (embeds && residual && blockIdx.x == 0) begin(residual, first, rows);
  }

  // Read rows place(first), place(first + 1) and so on.
  template <class RowPlace>
  __device__ void read(const i64* residual, const u16* embeds, int first, int rows, RowPlace row_place) {
#pragma unroll
    for (int row = 0; row < AT_ONCE; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        values[row][i] = {0, 0};
        if (first + row >= rows || !inside(i)) continue;
        const int place = row_place(first + row) * PAIRS + pair(i);
        const longlong2* pairs = reinterpret_cast<const longlong2*>(residual);
        if (embeds) {
          values[row][i] = to_floats(reinterpret_cast<const u32*>(embeds)[place]);
        } else {
          const longlong2 value = load(pairs + place);
          values[row][i] = {from_fixed(value.x), from_fixed(value.y)};
        }
      }
  }

  // Begin the residual stream with the values.
  __device__ void begin(i64* residual, int first, int rows) const {
#pragma unroll
    for (int row = 0; row < AT_ONCE; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        if (first + row < rows && inside(i))
          reinterpret_cast<longlong2*>(residual)[(first + row) * PAIRS + pair(i)] = {to_fixed(values[row][i].x),
                                                                                     to_fixed(values[row][i].y)};
  }

  // Replace the values by their norm. sums: shared memory of [warps,ROWS].
  __device__ void normalize(float* sums, int first) {
    constexpr int WARPS = THREADS / 32;
#pragma unroll
    for (int row = 0; row < AT_ONCE; ++row) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SHARE; ++i) sum += values[row][i].x * values[row][i].x + values[row][i].y * values[row][i].y;
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32 * ROWS + first + row] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < AT_ONCE; ++row) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp * ROWS + first + row];
      const float factor = rsqrt_fast(sum * (1.0f / HIDDEN) + EPSILON);
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        const float2 scale = to_floats(scales[i]);
        values[row][i].x *= factor * scale.x, values[row][i].y *= factor * scale.y;
      }
    }
  }

  // Both values of a pair in the model's type.
  __device__ u32 bits(int row, int i) const {
    return from_float(values[row][i].x) | (u32)from_float(values[row][i].y) << 16;
  }

  // Write the values in the model's type; the stride of rows is H.
  __device__ void write(u16* out, int first, int rows) const {
#pragma unroll
    for (int row = 0; row < AT_ONCE; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        if (first + row < rows && inside(i))
          reinterpret_cast<u32*>(out)[(first + row) * PAIRS + pair(i)] = bits(row, i);
  }
};

// Write the values to shared memory as x of a product, from k and row on.
template <class P>
__device__ inline void share_x(u16* shared, const Normed& x, int k, int first) {
#pragma unroll
  for (int i = 0; i < Normed::SHARE; ++i) {
    if (!Normed::inside(i)) continue;
    if constexpr (P::QUANTIZED) {
#pragma unroll
      for (int row = 0; row < Normed::AT_ONCE; ++row) {
        const u32 bits = x.bits(row, i);
        shared[P::x_place(k + 2 * Normed::pair(i), first + row)] = (u16)bits;
        shared[P::x_place(k + 2 * Normed::pair(i) + 1, first + row)] = bits >> 16;
      }
    } else if constexpr (TENSOR_CORES) {
#pragma unroll
      for (int row = 0; row < Normed::AT_ONCE; ++row)
        *reinterpret_cast<u32*>(shared + P::x_place(k + 2 * Normed::pair(i), first + row)) = x.bits(row, i);
    } else {
      float low[Normed::AT_ONCE], high[Normed::AT_ONCE];
#pragma unroll
      for (int row = 0; row < Normed::AT_ONCE; ++row) low[row] = x.values[row][i].x, high[row] = x.values[row][i].y;
      write_x(shared + P::x_place(k + 2 * Normed::pair(i), first), low);
      write_x(shared + P::x_place(k + 2 * Normed::pair(i) + 1, first), high);
    }
  }
}

// Write the norm of all rows, after the kernel before has ended. prepared: has the scales; sums: shared memory of
// [warps,ROWS]; hidden: an output of the values before or after the norm, written by one block; write(first of the rows at hand).
template <class Write>
__device__ inline void norm_rows(Normed& prepared, i64* residual, const u16* embeds, u16* hidden, bool hidden_is_normed,
                                 float* sums, int rows, Write write) {
#pragma unroll 1
  for (int first = 0; first < ROWS; first += Normed::AT_ONCE) {
    prepared.read(residual, embeds, first, rows);
    if (hidden && !hidden_is_normed && blockIdx.x == 0) prepared.write(hidden, first, rows);
    prepared.normalize(sums, first);
    if (hidden && hidden_is_normed && blockIdx.x == 0) prepared.write(hidden, first, rows);
    write(first);
  }
}
