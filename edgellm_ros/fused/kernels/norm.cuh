// SPDX-License-Identifier: Apache-2.0
// RMSNorm of rows of the residual stream.

#pragma once

#include "fixed_point.cuh"
#include "quantized.cuh"

// A thread's share of COUNT rows: pairs of values, THREADS pairs apart.
template <int COUNT>
struct NormedRows {
  static constexpr int AT_ONCE = COUNT;
  static constexpr int PAIRS = HIDDEN / 2, SHARE = (PAIRS + THREADS - 1) / THREADS;
  u32 scales[SHARE];
  float2 values[COUNT][SHARE];

  __device__ static bool inside(int i) { return PAIRS % THREADS == 0 || threadIdx.x + i * THREADS < PAIRS; }
  __device__ static int pair(int i) { return threadIdx.x + i * THREADS; }

  // Call function(row, i) for valid rows and pairs; the others are zero.
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

  // Load the norm's weights, which do not depend on earlier kernels.
  __device__ void read_scales(const u16* norm) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) scales[i] = inside(i) ? reinterpret_cast<const u32*>(norm)[pair(i)] : 0;
  }

  // Load rows from `first` on from the residual stream, or from the embeddings if there are any; these also
  // initialise the residual stream if `begins`, unless it is null.
  __device__ void read_or_begin(i64* residual, const u16* embeds, int first, int rows, bool begins) {
    read(residual, embeds, first, rows, [](int row) { return row; });
    if (embeds && residual && begins) begin(residual, first, rows);
  }

  // Load rows row_place(first), row_place(first + 1), ... All loads are issued before the first use.
  template <class RowPlace>
  __device__ void read(const i64* residual, const u16* embeds, int first, int rows, RowPlace row_place) {
    if (embeds) {
      const u32* const pairs = reinterpret_cast<const u32*>(embeds);
      each(first, rows,
           [&](int row, int i) { values[row][i] = to_floats(pairs[row_place(first + row) * PAIRS + pair(i)]); });
    } else {
      const longlong2* const pairs = reinterpret_cast<const longlong2*>(residual);
      longlong2 fixed[COUNT][SHARE] = {};
      each(first, rows,
           [&](int row, int i) { fixed[row][i] = load_cg(pairs + row_place(first + row) * PAIRS + pair(i)); });
#pragma unroll
      for (int row = 0; row < COUNT; ++row)
#pragma unroll
        for (int i = 0; i < SHARE; ++i) values[row][i] = {from_fixed(fixed[row][i].x), from_fixed(fixed[row][i].y)};
    }
  }

  // Initialise the residual stream with the values.
  __device__ void begin(i64* residual, int first, int rows) const {
#pragma unroll
    for (int row = 0; row < AT_ONCE; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        if (first + row < rows && inside(i))
          reinterpret_cast<longlong2*>(residual)[(first + row) * PAIRS + pair(i)] = {to_fixed(values[row][i].x),
                                                                                     to_fixed(values[row][i].y)};
  }

  // Normalise in place. sums: scratch in smem, [warps,ROWS].
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

  // A pair in the model's type.
  __device__ u32 bits(int row, int i) const {
    return from_float(values[row][i].x) | (u32)from_float(values[row][i].y) << 16;
  }

  // Store the values in the model's type; row stride H.
  __device__ void write(u16* out, int first, int rows) const {
#pragma unroll
    for (int row = 0; row < COUNT; ++row)
#pragma unroll
      for (int i = 0; i < SHARE; ++i)
        if (first + row < rows && inside(i))
          reinterpret_cast<u32*>(out)[(first + row) * PAIRS + pair(i)] = bits(row, i);
  }
};

// As many rows as fit in registers.
__device__ constexpr int rows_at_once(int share) {
  const int limit = share < 32 ? 32 / share : 1;
  return ROWS <= limit ? ROWS : limit >= 8 ? 8 : limit >= 4 ? 4 : limit >= 2 ? 2 : 1;
}
using Normed = NormedRows<rows_at_once(NormedRows<1>::SHARE)>;

// inv_perm of a thread's values (act-order), which does not depend on earlier kernels.
template <class P>
struct InversePermutation {
  u32 pairs[P::ACT_ORDER ? Normed::SHARE : 1];

  __device__ void read(const u16* weights) {
    if constexpr (P::ACT_ORDER) {
      const u32* const from = reinterpret_cast<const u32*>(weights + P::PERM / 2 + P::K);
#pragma unroll
      for (int i = 0; i < Normed::SHARE; ++i) pairs[i] = Normed::inside(i) ? load_nc_scalar(from + Normed::pair(i)) : 0;
    }
  }
};

// Store the values as x of a GEMV, from `k` and row `first` on; places: inv_perm.
template <class P, int COUNT>
__device__ inline void share_x(u16* out, const NormedRows<COUNT>& x, int k, int first,
                               const InversePermutation<P>& places = {}) {
#pragma unroll
  for (int i = 0; i < Normed::SHARE; ++i) {
    if (!Normed::inside(i)) continue;
    const int at = k + 2 * Normed::pair(i);
    if constexpr (P::QUANTIZED) {
#pragma unroll
      for (int row = 0; row < COUNT; ++row) {
        const u32 bits = x.bits(row, i);
        out[P::x_index(P::ACT_ORDER ? places.pairs[i] & 0xffff : at, first + row)] = (u16)bits;
        out[P::x_index(P::ACT_ORDER ? places.pairs[i] >> 16 : at + 1, first + row)] = bits >> 16;
      }
    } else if constexpr (P::x_index(1, 0) == P::x_index(0, 0) + 1) {
#pragma unroll
      for (int row = 0; row < COUNT; ++row) *reinterpret_cast<u32*>(out + P::x_index(at, first + row)) = x.bits(row, i);
    } else {
      float low[COUNT], high[COUNT];
#pragma unroll
      for (int row = 0; row < COUNT; ++row) low[row] = x.values[row][i].x, high[row] = x.values[row][i].y;
      write_x(out + P::x_index(at, first), low);
      write_x(out + P::x_index(at + 1, first), high);
    }
  }
}

// RMSNorm of all rows, after pdl_wait. prepared: with the norm's weights loaded; sums: scratch in smem, [warps,ROWS];
// hidden: optional output of the values before or after the norm, stored by one CTA; write(row) stores the rows from
// `row` on as x.
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

// Prep kernel: each CTA normalises one row to global memory, in the layout of P's x.
template <class P>
__device__ inline void norm_row(const u16* norm, i64* residual, const u16* embeds, u16* hidden, bool hidden_is_normed,
                                u16* x, int rows, const u16* weights = nullptr) {
  struct Sums {
    float values[THREADS / 32 * ROWS];
  };
  STATIC_SMEM(Sums, sums);
  const int row = blockIdx.x;
  NormedRows<1> values;
  values.read_scales(norm);
  InversePermutation<P> places;
  places.read(weights);
  pdl_wait();
  values.read_or_begin(residual, embeds, row, rows, true);
  if (hidden && !hidden_is_normed) values.write(hidden, row, rows);
  values.normalize(sums.values, row);
  if (hidden && hidden_is_normed) values.write(hidden, row, rows);
  share_x<P>(x, values, 0, row, places);
}
