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
template <int COUNT>
struct NormedRows {
  static constexpr int AT_ONCE = COUNT;
  static constexpr int PAIRS = HIDDEN / 2, SHARE = (PAIRS + THREADS - 1) / THREADS;
  u32 scales[SHARE];
  float2 values[COUNT][SHARE];

  __device__ static bool inside(int i) { return PAIRS % THREADS == 0 || threadIdx.x + i * THREADS < PAIRS; }
  __device__ static int pair(int i) { return threadIdx.x + i * THREADS; }

  // Call function(row, share) for rows and pairs that there are; values of others are zeros.
  template <class Function>
  __device__ void each(int first, int rows, Function function) {
#pragma unroll
    for (int row = 0; row < COUNT; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
        values[row][i] = {0, 0};
        if (first + row < rows && inside(i)) function(row, i);
      }
  }

  // Read the norm's scales, which depend on no other kernel.
  __device__ void read_scales(const u16* norm) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) scales[i] = inside(i) ? reinterpret_cast<const u32*>(norm)[pair(i)] : 0;
  }

  // Read rows from `first` on from the residual stream; if there are embeddings, read these, and begin the residual
  // stream, unless it is null, if this block shall do so.
  __device__ void read_or_begin(i64* residual, const u16* embeds, int first, int rows, bool begins) {
    read(residual, embeds, first, rows, [](int row) { return row; });
    if (embeds && residual && begins) begin(residual, first, rows);
  }

  // Read rows place(first), place(first + 1) and so on. All reads are on their way before one of them is waited for.
  template <class RowPlace>
  __device__ void read(const i64* residual, const u16* embeds, int first, int rows, RowPlace row_place) {
    if (embeds) {
      const u32* const pairs = reinterpret_cast<const u32*>(embeds);
      each(first, rows, [&](int row, int i) { values[row][i] = to_floats(pairs[row_place(first + row) * PAIRS + pair(i)]); });
    } else {
      const longlong2* const pairs = reinterpret_cast<const longlong2*>(residual);
      longlong2 fixed[COUNT][SHARE] = {};
      each(first, rows, [&](int row, int i) { fixed[row][i] = load(pairs + row_place(first + row) * PAIRS + pair(i)); });
#pragma unroll
      for (int row = 0; row < COUNT; ++row)
#pragma unroll
        for (int i = 0; i < SHARE; ++i) values[row][i] = {from_fixed(fixed[row][i].x), from_fixed(fixed[row][i].y)};
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
    for (int row = 0; row < COUNT; ++row) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < SHARE; ++i) sum += values[row][i].x * values[row][i].x + values[row][i].y * values[row][i].y;
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32 * ROWS + first + row] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < COUNT; ++row) {
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
    for (int row = 0; row < COUNT; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        if (first + row < rows && inside(i))
          reinterpret_cast<u32*>(out)[(first + row) * PAIRS + pair(i)] = bits(row, i);
  }
};

// As many rows as have room in registers.
__device__ constexpr int rows_at_once(int share) {
  const int limit = share < 32 ? 32 / share : 1;
  return ROWS <= limit ? ROWS : limit >= 8 ? 8 : limit >= 4 ? 4 : limit >= 2 ? 2 : 1;
}
using Normed = NormedRows<rows_at_once(NormedRows<1>::SHARE)>;

// The places of a thread's values in x of an ordered matrix, which depend on no other kernel.
template <class P>
struct Places {
  u32 pairs[P::ORDERED ? Normed::SHARE : 1];

  __device__ void read(const u16* weights) {
    if constexpr (P::ORDERED) {
      const u32* const from = reinterpret_cast<const u32*>(weights + P::INPUTS / 2 + P::K);
#pragma unroll
      for (int i = 0; i < Normed::SHARE; ++i) pairs[i] = Normed::inside(i) ? read_once(from + Normed::pair(i)) : 0;
    }
  }
};

// Write the values as x of a product, from k and row on; places: of an ordered matrix.
template <class P, int COUNT>
__device__ inline void share_x(u16* out, const NormedRows<COUNT>& x, int k, int first, const Places<P>& places = {}) {
#pragma unroll
  for (int i = 0; i < Normed::SHARE; ++i) {
    if (!Normed::inside(i)) continue;
    const int at = k + 2 * Normed::pair(i);
    if constexpr (P::QUANTIZED) {
#pragma unroll
      for (int row = 0; row < COUNT; ++row) {
        const u32 bits = x.bits(row, i);
        out[P::x_place(P::ORDERED ? places.pairs[i] & 0xffff : at, first + row)] = (u16)bits;
        out[P::x_place(P::ORDERED ? places.pairs[i] >> 16 : at + 1, first + row)] = bits >> 16;
      }
    } else if constexpr (P::x_place(1, 0) == P::x_place(0, 0) + 1) {
#pragma unroll
      for (int row = 0; row < COUNT; ++row)
        *reinterpret_cast<u32*>(out + P::x_place(at, first + row)) = x.bits(row, i);
    } else {
      float low[COUNT], high[COUNT];
#pragma unroll
      for (int row = 0; row < COUNT; ++row) low[row] = x.values[row][i].x, high[row] = x.values[row][i].y;
      write_x(out + P::x_place(at, first), low);
      write_x(out + P::x_place(at + 1, first), high);
    }
  }
}

// Write the norm of all rows, after the kernel before has ended. prepared: has the scales; sums: shared memory of
// [warps,ROWS]; hidden: an output of the values before or after the norm, written by one block; write(first of the rows
// at hand).
template <class Write>
__device__ inline void norm_rows(Normed& prepared, i64* residual, const u16* embeds, u16* hidden, bool hidden_is_normed,
                                 float* sums, int rows, Write write) {
#pragma unroll 1
  for (int first = 0; first < ROWS; first += Normed::AT_ONCE) {
    prepared.read_or_begin(residual, embeds, first, rows, blockIdx.x == 0);
    if (hidden && !hidden_is_normed && blockIdx.x == 0) prepared.write(hidden, first, rows);
    prepared.normalize(sums, first);
    if (hidden && hidden_is_normed && blockIdx.x == 0) prepared.write(hidden, first, rows);
    write(first);
  }
}

// A kernel of its own for the same: each block norms one row, to memory in the order of P's x.
template <class P>
__device__ inline void norm_row(const u16* norm, i64* residual, const u16* embeds, u16* hidden, bool hidden_is_normed,
                                u16* x, int rows, const u16* weights = nullptr) {
  struct Sums {
    float values[THREADS / 32 * ROWS];
  };
  STATIC_SHARED(Sums, sums);
  const int row = blockIdx.x;
  NormedRows<1> values;
  values.read_scales(norm);
  Places<P> places;
  places.read(weights);
  wait_for_kernel_before();
  values.read_or_begin(residual, embeds, row, rows, true);
  if (hidden && !hidden_is_normed) values.write(hidden, row, rows);
  values.normalize(sums.values, row);
  if (hidden && hidden_is_normed) values.write(hidden, row, rows);
  share_x<P>(x, values, 0, row, places);
}
