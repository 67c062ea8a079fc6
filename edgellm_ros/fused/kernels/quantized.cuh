// SPDX-License-Identifier: Apache-2.0
// GEMV with INT4, INT8 or FP8 weights. Integers have the layout of ONNX Runtime's MatMulNBits:
//
//   values [N,K] of BITS, unsigned, k contiguous; of two INT4 values the first is in the low nibble
//   scales [N,K/GROUP] of the model's type
//   zero points [N,K/GROUP] of BITS, each row starts at a byte; if absent, all are half of the range
//   offsets [K/GROUP,N] of the model's type, if there are any; then there are no zero points
//
// The arrays follow one another, each aligned to 256 bytes. weight = (value - zero point) * scale + offset. FLOAT8:
// values are E4M3, scales fp32, without zero points and offsets.
//
// ACT_ORDER (desc_act): rows are sorted by group, and row k multiplies input perm[k]; inv_perm is the inverse. perm
// [K] and inv_perm [K], 16 bits each, follow the other arrays. The kernels that prepare x scatter it by inv_perm.
//
// A warp computes 16 columns on tensor cores: the columns are the 16 rows of operand A, the rows of x the 8 columns
// of B. Per step it reads 128 bytes of each column: two halves of four 16-byte chunks. All k of one mma are in one
// chunk, hence in one quantisation group. x is permuted in smem, so that B fragments have the k of A fragments.
//
// One row of x is converted to integers, and mma.m16n8k32.u8.s8 multiplies the packed weights without unpacking them
// (`DigitAccumulators`). For several rows, and for INT4 with groups of 32, lop3/shift unpacks two weights per
// instruction (`Unpacked`): the bits become a number of the model's type that is linear in the value, in fp16 a
// subnormal. Accumulators of a group are scaled in fp32. For zero points and offsets, each CTA sums x over each
// group once.

#pragma once

#include "gemv.cuh"

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, int BITS_, int GROUP_, bool ZERO_POINTS_,
          bool OFFSETS_, bool FLOAT8_, bool ACT_ORDER_, bool WHOLE_TILES_ = false>
struct QuantizedGemvPlan : StreamK<QuantizedGemvPlan<K_, N_, TILE_, BLOCKS_, ALL_OF_X, BITS_, GROUP_, ZERO_POINTS_,
                                                     OFFSETS_, FLOAT8_, ACT_ORDER_, WHOLE_TILES_>> {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_, BITS = BITS_;
  static constexpr int GROUP = GROUP_ == 0 ? K : GROUP_;  // 0: one scale per column
  static constexpr bool QUANTIZED = true, X_IN_GMEM = false, ZERO_POINTS = ZERO_POINTS_, WHOLE_TILES = WHOLE_TILES_;
  static constexpr bool OFFSETS = OFFSETS_, FLOAT8 = FLOAT8_, ACT_ORDER = ACT_ORDER_;
  static constexpr int WARPS = THREADS / 32, COLUMN_WARPS = TILE / 16, K_WARPS = WARPS / COLUMN_WARPS;
  static constexpr int PIECE = 128 / BITS, HALF = 4 * PIECE,
                       WARP_K = 2 * HALF;                  // k per chunk, per half, per warp and step
  static constexpr int COPIES_EACH = 4;                    // per thread and step
  static constexpr int TILE_K = K_WARPS * WARP_K;          // k per step
  static constexpr int STEPS = (K + TILE_K - 1) / TILE_K;  // per tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = WHOLE_TILES ? (TILES + BLOCKS - 1) / BLOCKS * STEPS : (UNITS + BLOCKS - 1) / BLOCKS;
  static constexpr int X_STEPS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int RING_STEPS = STAGES * COPIES < 3 * COPIES_EACH ? 3 : STAGES * COPIES / COPIES_EACH;
  static constexpr int DEPTH = MOST_UNITS + 1 < RING_STEPS ? MOST_UNITS + 1 : RING_STEPS;
  static constexpr int EARLY =
      QUANTIZED_EARLY < DEPTH - 1 ? QUANTIZED_EARLY : DEPTH - 1;  // steps issued before pdl_wait
  static_assert(COLUMN_WARPS * K_WARPS == WARPS && TILE % 16 == 0);
  static_assert((BITS == 4 || BITS == 8) && GROUP % PIECE == 0 && K % GROUP == 0 && N % 16 == 0);
  static_assert(!FLOAT8 || BITS == 8 && !ZERO_POINTS && !OFFSETS);
  static_assert(!ZERO_POINTS || !OFFSETS);

  // Groups per column, and byte offsets of the arrays.
  static constexpr int GROUPS = K / GROUP, ZERO_BYTES = (GROUPS * BITS + 7) / 8;
  __device__ static constexpr i64 next(i64 bytes) { return (bytes + 255) / 256 * 256; }
  static constexpr i64 SCALES = next((i64)N * K * BITS / 8), ZEROS = SCALES + next((i64)N * GROUPS * (FLOAT8 ? 4 : 2));
  static constexpr i64 OFFSET_ROWS = ZEROS;
  static constexpr i64 PERM = ZEROS + (ZERO_POINTS ? next((i64)N * ZERO_BYTES)
                                       : OFFSETS   ? next((i64)N * GROUPS * 2)
                                                   : 0);

  // A lane loads four scales at once: those of BATCH halves.
  static constexpr int INTERVAL = GROUP < HALF ? GROUP : HALF, INTERVALS = HALF / INTERVAL, BATCH = 4 / INTERVALS;

  // Derived from x, in smem behind the warps' accumulators: digits of one row, or sums of x over the intervals.
  static constexpr bool DIGITS = ROWS == 1 && INTERVALS <= 2 && !FLOAT8;
  static constexpr int HALVES = X_STEPS * TILE_K / HALF, DIGIT_PLACES = BITS == 4 ? 24 : 12;  // per half
  static constexpr int NOTES = FLOAT8   ? 0
                               : DIGITS ? 16 * HALVES * DIGIT_PLACES + 8 * HALVES * INTERVALS
                                        : 4 * HALVES * INTERVALS * ((ROWS + 7) / 8 * 8);  // bytes

  // Until x has become digits it shares smem with the last stage of the ring, which is first filled after that.
  static constexpr int STEP_PLACES = COPIES_EACH * THREADS, RING = (DIGITS ? DEPTH - 1 : DEPTH) * STEP_PLACES;
  static constexpr int X = X_STEPS * TILE_K * ROWS, LEAST_ROOM = DIGITS ? 8 * STEP_PLACES : 0;  // values
  static constexpr int X_ROOM = X > LEAST_ROOM ? X : LEAST_ROOM;
  static constexpr int SMEM_BYTES = 16 * RING + 2 * X_ROOM + 4 * WARPS * 16 * ROWS + NOTES;
  __device__ static uint4* notes(const Smem<QuantizedGemvPlan>& smem) {
    return reinterpret_cast<uint4*>(smem.sums + WARPS * 16 * ROWS);
  }

  // x in smem: blocks of 8 k, rows of a block swizzled against bank conflicts.
  __device__ static constexpr int row_place(int block, int row) {
    if (BITS == 8) return row ^ (ROWS >= 8 ? block % 2 * 4 : 0);
    return row ^ (ROWS >= 8 ? block % 4 * 2 : ROWS == 4 ? block & 2 : 0);
  }
  __device__ static constexpr int x_index(int k, int row) {
    if (DIGITS) return k;
    // INT4: nibble order 0 4 2 6 1 5 3 7
    const int at = k % 8, place = BITS == 8 ? at : at % 2 * 4 + at / 2 % 2 * 2 + at / 4;
    return (k / 8 * ROWS + row_place(k / 8, row)) * 8 + place;
  }
  __device__ static constexpr int x_offset(int k) { return k * ROWS; }  // offset of row k of x
};

// perm_of: the input that row k multiplies; inv_perm_of: the row that multiplies input k.
template <class P>
__device__ inline int perm_of(const u16* weights, int k) {
  if constexpr (P::ACT_ORDER) return (int)load_nc_scalar(weights + P::PERM / 2 + k);
  return k;
}
template <class P>
__device__ inline int inv_perm_of(const u16* weights, int k) {
  if constexpr (P::ACT_ORDER) return (int)load_nc_scalar(weights + P::PERM / 2 + P::K + k);
  return k;
}

// Element type of the scales.
template <bool FLOAT8>
struct ScaleOf {
  using Type = u16;
};
template <>
struct ScaleOf<true> {
  using Type = u32;
};
template <class P>
__device__ inline float to_scale(u32 bits) {
  return P::FLOAT8 ? __uint_as_float(bits) : to_float((u16)bits);
}

// cp.async pipeline of a warp's weights, and prefetch of its columns' scales to registers.
//
// Eight lanes copy the 128 bytes of a column. The chunks of a column are swizzled, so that neither the writes of a
// column nor ldmatrix of one chunk of eight columns have bank conflicts.
template <auto... SIZES>
struct WeightPipeline<QuantizedGemvPlan<SIZES...>> {
  using P = QuantizedGemvPlan<SIZES...>;
  using Scale = typename ScaleOf<P::FLOAT8>::Type;
  static constexpr bool ALIGNED = P::K % P::TILE_K == 0 && P::N % P::TILE == 0;
  static constexpr i64 COLUMN_BYTES = (i64)P::K * P::BITS / 8, STEP_BYTES = P::TILE_K * P::BITS / 8;
  static constexpr int STEP_PLACES = P::STEP_PLACES;
  const unsigned char *weights, *source;
  // ldmatrix address in stage 0: chunks 0 to 3 of columns 0 to 7; for digits, chunks 0 and 1 of all 16 columns.
  const SmemPtr pieces;
  SmemPtr even, odd;  // this lane's cp.async targets in columns 0 to 3 and 8 to 11, and in the others
  int left, step, slot, k, column;
  const Scale* scale_row;         // scales of column g
  const unsigned char* zero_row;  // its zero points
  const u16* offset_column;       // its offsets, every N
  int scale_tile, half;           // position of the next prefetch of scales
  int scales_left;                // steps whose scales are not prefetched yet
  // Prefetched scales of columns g and g + 8 for the next BATCH halves, and the bytes of their zero points or offsets.
  u32 scales[2], zeros[2];
  int shift;

  __device__ WeightPipeline(const u16* weights, uint4* ring, int first, int count)
      : weights(reinterpret_cast<const unsigned char*>(weights)),
        pieces(ring + threadIdx.x / 32 * 128 + read_column() * 8 + (read_piece() ^ threadIdx.x % 8)),
        even(ring + threadIdx.x / 32 * 128 + threadIdx.x % 32 / 8 * 8 + (threadIdx.x % 8 ^ threadIdx.x % 32 / 8)),
        odd(ring + threadIdx.x / 32 * 128 + (threadIdx.x % 32 / 8 + 4) * 8 +
            (threadIdx.x % 8 ^ threadIdx.x % 32 / 8 + 4)),
        left(count),
        step(first % P::STEPS),
        slot(0) {
    const int lane = threadIdx.x % 32;
    k = k_warp() * P::WARP_K + lane % 8 * P::PIECE;
    column = first / P::STEPS * P::TILE + first_column() + lane / 8;
    source = this->weights + column * COLUMN_BYTES + k * P::BITS / 8 + step * STEP_BYTES;
    scale_tile = first / P::STEPS;
    const int first_step = step;
#pragma unroll
    for (int i = 0; i < P::EARLY; ++i) prefetch();
    scales_left = count;
    aim_scales(first_step);
    read_scales();
  }

  // Issue the remaining copies for which the ring has room.
  __device__ void fill() {
#pragma unroll
    for (int i = P::EARLY; i < P::DEPTH - 1; ++i) prefetch();
  }

  __device__ static int first_column() { return threadIdx.x / 32 % P::COLUMN_WARPS * 16; }
  __device__ static int k_warp() { return threadIdx.x / 32 / P::COLUMN_WARPS; }
  __device__ static int read_column() { return threadIdx.x % 8 + (P::DIGITS ? threadIdx.x % 16 / 8 * 8 : 0); }
  __device__ static int read_piece() { return P::DIGITS ? threadIdx.x % 32 / 16 : threadIdx.x % 32 / 8; }
  // Offset from a chunk to the one whose index differs in this bit.
  __device__ static int other_piece(int bit) { return threadIdx.x & bit ? -bit : bit; }

  // Wait for the oldest stage of all lanes, issue the next one, return the stage's ldmatrix address.
  __device__ SmemPtr take() {
    cp_async_wait<P::DEPTH - 2>();
    warp_sync();
    prefetch();
    return pieces.plus(slot * STEP_PLACES);
  }

  // Issue the copies of one step. Always commits a group, even an empty one: cp_async_wait counts groups.
  __device__ void prefetch() {
    if (left > 0) {
      const bool inside = ALIGNED || k + step * P::TILE_K < P::K && column < P::N;
      copy<0>(even, inside), copy<4>(odd, inside), copy<8>(even.plus(64), inside), copy<12>(odd.plus(64), inside);
      source += STEP_BYTES, --left;
      if (++step == P::STEPS) step = 0, column += P::TILE, source += P::TILE * COLUMN_BYTES - P::STEPS * STEP_BYTES;
    }
    cp_async_commit();
    const bool last = ++slot == P::DEPTH;
    const int places = last ? -(P::DEPTH - 1) * STEP_PLACES : STEP_PLACES;
    even.advance(places), odd.advance(places);
    if (last) slot = 0;
  }

  template <int COLUMNS>
  __device__ void copy(SmemPtr target, bool inside) const {
    if constexpr (ALIGNED)
      cp_async_offset<COLUMNS * COLUMN_BYTES>(target, source);
    else
      cp_async(target, source + COLUMNS * COLUMN_BYTES, inside);
  }

  // Set the position from which scales are prefetched: this step of the current tile.
  __device__ void aim_scales(int step) {
    const int column = scale_tile * P::TILE + first_column() + threadIdx.x % 32 / 4;
    const i64 row = column < P::N ? column : 0;
    scale_row = reinterpret_cast<const Scale*>(weights + P::SCALES) + row * P::GROUPS;
    zero_row = weights + P::ZEROS + row * P::ZERO_BYTES;
    offset_column = reinterpret_cast<const u16*>(weights + P::OFFSET_ROWS) + row;
    half = 2 * step;
  }

  // Return scales, with zero points or offsets in the upper halves, and prefetch the following ones.
  __device__ void take_scales(u32 (&taken)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      taken[i] = P::ZERO_POINTS ? scales[i] | (zeros[i] >> shift & (1 << P::BITS) - 1) << 16
                 : P::OFFSETS   ? scales[i] | zeros[i] << 16
                                : scales[i];
    read_scales();
  }

  // Prefetch scales if the CTA needs more; lane t of a column loads those of interval t. Intervals past the end load
  // the last group's scales, which multiply zeros.
  __device__ void read_scales() {
    if (scales_left <= 0) return;
    if (half >= 2 * P::STEPS) ++scale_tile, aim_scales(0);
    const int tile_left = P::STEPS - half / 2, steps = P::BATCH > 2 ? P::BATCH / 2 : 1;
    if (P::BATCH > 1 || half % 2) scales_left -= steps < tile_left ? steps : tile_left;
    const int interval = threadIdx.x % 4, own = half + interval / P::INTERVALS;
    const int k =
        (own / 2 * P::K_WARPS + k_warp()) * P::WARP_K + own % 2 * P::HALF + interval % P::INTERVALS * P::INTERVAL;
    const int at = k < P::K ? k / P::GROUP : P::GROUPS - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = load_nc_scalar(scale_row + at + i * 8 * P::GROUPS);
      if constexpr (P::ZERO_POINTS) zeros[i] = load_nc_scalar(zero_row + at * P::BITS / 8 + i * 8 * P::ZERO_BYTES);
      if constexpr (P::OFFSETS) zeros[i] = load_nc_scalar(offset_column + (i64)at * P::N + i * 8);
    }
    shift = P::BITS == 4 ? at % 2 * 4 : 0, half += P::BATCH;
  }
};

// Unpack a word of weights to pairs of the model's type, in the order of operand A. A weight is FACTOR * number -
// OFFSET; in the second half of the pairs FACTOR / HIGH * number - OFFSET.
template <int BITS, bool FLOAT8>
struct Unpacked {
  static constexpr float FACTOR = BF16 ? 1.0f : 16777216.0f, HIGH = BF16 || BITS == 8 ? 1.0f : 16.0f;
  static constexpr float OFFSET = !BF16 ? 0.0f : BITS == 8 ? -128.0f : 128.0f;
  u32 pairs[16 / BITS];

  __device__ explicit Unpacked(u32 word) {
    if constexpr (BITS == 4) {
      // pairs of values 0 4, 2 6, 1 5, 3 7
#if BF16
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i % 2 * 2 + i / 2] = lop3_and_or(word >> 4 * i, 0x000f000fu, 0x43004300u);
#else
      const u32 shifted = word >> 8;  // the low bits of a subnormal number are an integer times 2^-24
      pairs[0] = word & 0x000f000fu, pairs[1] = shifted & 0x000f000fu;
      pairs[2] = word & 0x00f000f0u, pairs[3] = shifted & 0x00f000f0u;
#endif
    } else {
#if BF16
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - (8388608.0f + 128.0f);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        pairs[i] = __byte_perm(__float_as_uint(values[2 * i]), __float_as_uint(values[2 * i + 1]), 0x7632);
#else
      pairs[0] = __byte_perm(word, 0, 0x4140), pairs[1] = __byte_perm(word, 0, 0x4342);
#endif
    }
  }
};

// E4M3, whose bits are those of a number of the model's type with another exponent bias. fp16 is converted by hardware
// where it can be (HAS_FP8).
template <>
struct Unpacked<8, true> {
  static constexpr float FACTOR = BF16 || HAS_FP8 ? 1.0f : 256.0f, HIGH = 1.0f, OFFSET = 0.0f;
  u32 pairs[2];

  __device__ explicit Unpacked(u32 word) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#if !BF16
      if constexpr (HAS_FP8) {
        pairs[i] = fp8x2_to_fp16x2((u16)(word >> 16 * i));
        continue;
      }
#endif
      const u32 bits = __byte_perm(word, 0, i ? 0x3424 : 0x1404);  // into the upper byte of each half
      constexpr int SHIFT = BF16 ? 4 : 1;
      constexpr u32 SIGNS = 0x80008000u, OTHERS = 0x7f007f00u >> SHIFT;
      pairs[i] = lop3_and_or(bits, SIGNS, bits >> SHIFT & OTHERS);
#if BF16
      pairs[i] = mul_bf16x2(pairs[i], 0x7b807b80u);  // times 2^120: avoids underflow of the accumulators
#endif
    }
  }
};

// Accumulators of one interval: columns g and g + 8, rows 2t and 2t + 1.
template <int BITS, bool FLOAT8>
struct IntervalSums {
  using Numbers = Unpacked<BITS, FLOAT8>;
  float low[4] = {}, high[4] = {};

  // Accumulate one chunk; x: its values of row g.
  __device__ void add(const Numbers& one, const Numbers& other, uint4 x) {
    const u32 first[4] = {one.pairs[0], other.pairs[0], one.pairs[1], other.pairs[1]};
    mma_m16n8k16(low, first, x.x, x.y);
    if constexpr (BITS == 4) {
      const u32 second[4] = {one.pairs[2], other.pairs[2], one.pairs[3], other.pairs[3]};
      mma_m16n8k16(Numbers::HIGH == 1.0f ? low : high, second, x.z, x.w);
    }
  }

  __device__ float total(int i, float zero, float of_x) const {
    const float sum = Numbers::HIGH == 1.0f ? low[i] : low[i] + high[i] * (1.0f / Numbers::HIGH);
    return Numbers::FACTOR * sum - zero * of_x;
  }
};

// What a lane multiplies in half a step: its words of packed weights and its values of x.
template <class P>
struct QuantizedHalf {
  static constexpr int ROW_TILES = (ROWS + 7) / 8;
  u32 low[4], high[4];  // words of columns g and g + 8, per chunk
  uint4 x[ROW_TILES][4];

  static constexpr int X_PLACES = P::HALF * ROWS / 8;  // per half

  // pieces: ldmatrix address; first: this lane's first values of x in the half.
  __device__ void read(SmemPtr pieces, SmemWordPtr first) {
    ldmatrix_x4(low, pieces), ldmatrix_x4(high, pieces.plus(64));
    read_x(first);
  }

  __device__ void read_x(SmemWordPtr first) {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        const SmemWordPtr place = first.plus(piece * (16 / P::BITS) * ROWS + 8 * tile);
        if constexpr (P::BITS == 4) {
          x[tile][piece] = place.read_quad();
        } else {
          const uint2 pair = place.read_pair();
          x[tile][piece] = {pair.x, pair.y, 0, 0};
        }
      }
  }
};

// Reduce over the warps that have the same columns; their sums are in smem.
template <class P, class Epilogue>
__device__ inline void add_warps(const Smem<P>& smem, int tile, bool from_start, Epilogue epilogue) {
  __syncthreads();
  for (int place = threadIdx.x; place < P::TILE * ROWS; place += THREADS) {
    const int at = place % P::TILE, row = place / P::TILE;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < P::K_WARPS; ++w)
      sum += smem.sums[((w * P::COLUMN_WARPS + at / 16) * ROWS + row) * 16 + at % 16];
    epilogue(tile, at, row, sum, from_start);
  }
  __syncthreads();
}

// Accumulators of a tile, and the sums of x for zero points: [intervals,ROWS] in smem.
template <class P>
struct QuantizedAccumulators {
  static constexpr int ROW_TILES = QuantizedHalf<P>::ROW_TILES, PER_INTERVAL = 4 / P::INTERVALS;
  float sums[ROW_TILES][4] = {};

  // Sum x over each interval, on tensor cores too. x_begin: this lane's first values of x.
  __device__ static void prepare(const Smem<P>& smem, SmemWordPtr x_begin) {
    const u32 ones[4] = {in_register(ONES), in_register(ONES), in_register(ONES), in_register(ONES)};
    float* const out = reinterpret_cast<float*>(P::notes(smem));
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int half = threadIdx.x / 32; half < P::HALVES; half += P::WARPS) {
      QuantizedHalf<P> values;
      values.read_x(x_begin.plus(half * QuantizedHalf<P>::X_PLACES));
#pragma unroll
      for (int interval = 0; interval < P::INTERVALS; ++interval)
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) {
          float of_x[4] = {};
#pragma unroll
          for (int piece = interval * PER_INTERVAL; piece < (interval + 1) * PER_INTERVAL; ++piece) {
            mma_m16n8k16(of_x, ones, values.x[tile][piece].x, values.x[tile][piece].y);
            if constexpr (P::BITS == 4) mma_m16n8k16(of_x, ones, values.x[tile][piece].z, values.x[tile][piece].w);
          }
          if (lane >= 4) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i)
            out[((half * P::INTERVALS + interval) * ROW_TILES + tile) * 8 + 2 * lane + i] = of_x[i];
        }
    }
  }

  // Accumulate half a step. scales: of its intervals, in the lanes from `source` on; of_x: sums of x over its
  // intervals.
  __device__ void add(const QuantizedHalf<P>& half, const u32 (&scales)[2], int source, const float* of_x) {
#pragma unroll
    for (int interval = 0; interval < P::INTERVALS; ++interval) {
      IntervalSums<P::BITS, P::FLOAT8> partials[ROW_TILES];
#pragma unroll
      for (int piece = interval * PER_INTERVAL; piece < (interval + 1) * PER_INTERVAL; ++piece) {
        const Unpacked<P::BITS, P::FLOAT8> one(half.low[piece]), other(half.high[piece]);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) partials[tile].add(one, other, half.x[tile][piece]);
      }
      float factors[2], zeros[2], offsets[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 both = __shfl_sync(~0u, scales[i], source + interval);
        factors[i] = to_scale<P>(both), offsets[i] = P::OFFSETS ? to_float((u16)(both >> 16)) : 0.0f;
        zeros[i] = Unpacked<P::BITS, P::FLOAT8>::OFFSET + (P::ZERO_POINTS ? (float)(both >> 16) : 1 << (P::BITS - 1));
      }
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (P::FLOAT8) {
            sums[tile][i] += factors[i / 2] * partials[tile].total(i, 0.0f, 0.0f);
          } else {
            const float x = of_x[(interval * ROW_TILES + tile) * 8 + threadIdx.x % 4 * 2 + i % 2];
            sums[tile][i] += factors[i / 2] * partials[tile].total(i, zeros[i / 2], x);
            if constexpr (P::OFFSETS) sums[tile][i] += offsets[i / 2] * x;
          }
        }
    }
  }

  // Reduce a tile and call the epilogue (see `gemv`).
  template <class Epilogue>
  __device__ void end(const Smem<P>& smem, int tile, bool from_start, Epilogue epilogue) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_tile * 8 + lane % 4 * 2 + i % 2, at = lane / 4 + i / 2 * 8;
        if (row >= ROWS) continue;
        if constexpr (P::K_WARPS == 1)
          epilogue(tile, warp % P::COLUMN_WARPS * 16 + at, row, sums[row_tile][i], from_start);
        else
          smem.sums[(warp * ROWS + row) * 16 + at] = sums[row_tile][i];
      }
    if constexpr (P::K_WARPS > 1) add_warps(smem, tile, from_start, epilogue);
  }
};

// One row: x as base-128 digits, so that integer mma multiplies the packed weights as they are.
//
// Each interval of x is scaled by a power of two to integers of three digits: three columns of B. With INT4, one mma
// multiplies the low nibbles and another 16 times the high ones.
template <class P>
struct DigitAccumulators {
  static constexpr int EACH = 16 / P::BITS;  // values per lane and half step
  float sums[2] = {};                        // columns g and g + 8

  // Scale (a power of two) and scaled sum of x, per interval.
  __device__ static float2* intervals(const Smem<P>& smem) {
    return reinterpret_cast<float2*>(P::notes(smem) + P::HALVES * P::DIGIT_PLACES);
  }

  __device__ static void prepare(const Smem<P>& smem) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int half = threadIdx.x / 32; half < P::HALVES; half += P::WARPS) {
      const u32* const pairs = reinterpret_cast<const u32*>(smem.x + half * P::HALF) + lane * (EACH / 2);
      u16 values[EACH];
      u32 highest = 0;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        values[i] = pairs[i / 2] >> i % 2 * 16;
        highest = (values[i] & 0x7fffu) > highest ? values[i] & 0x7fffu : highest;
      }
      highest = lanes_max<32 / P::INTERVALS>(highest);
      const u32 found = __float_as_uint(to_float((u16)highest)) >> 23, exponent = found > 20 ? found : 20;
      const float units = __uint_as_float(273 - exponent << 23);  // scale: the largest value gets 20 bits
      int total = 0;
      u32 digits[2][3] = {};  // for the low and the high nibbles
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const int value = round_to_int(to_float(values[i]) * units);
        total += value;
        const int low = (value + 64 & 127) - 64, rest = value - low >> 7, middle = (rest + 64 & 127) - 64;
        const int own[3] = {low, middle, rest - middle >> 7};
        const int second = P::BITS == 4 ? i % 2 : 0, shift = (P::BITS == 4 ? i / 2 : i) * 8;
#pragma unroll
        for (int digit = 0; digit < 3; ++digit) digits[second][digit] |= (own[digit] & 255) << shift;
      }
      // Bytes 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3 of each 32, the B fragment of lane t.
      const int byte = 2 * lane, place = byte % 16 / 4 * 16 + byte / 32 * 8 + byte / 16 % 2 * 4 + byte % 4;
      u16* const out = reinterpret_cast<u16*>(P::notes(smem) + half * P::DIGIT_PLACES) + place / 2;
#pragma unroll
      for (int digit = 0; digit < 3; ++digit) {
        out[digit * 32] = (u16)digits[0][digit];
        if constexpr (P::BITS == 4) out[(3 + digit) * 32] = (u16)digits[1][digit];
      }
      total = lanes_sum<32 / P::INTERVALS>(total);
      if (lane % (32 / P::INTERVALS) != 0) continue;
      const float unit = __uint_as_float(highest < (BF16 ? 0x7f80u : 0x7c00u) ? exponent - 19 << 23 : 0x7fffffffu);
      intervals(smem)[half * P::INTERVALS + lane / (32 / P::INTERVALS)] = {unit, (float)total};
    }
  }

  // Address of the digits of this lane's column of B, and the factor of its two columns of D. Columns 3 to 7 have
  // factor 0 and conflict-free addresses.
  struct Lane {
    SmemWordPtr digits;
    float counts[2], zero;

    __device__ explicit Lane(const Smem<P>& smem) : digits(P::notes(smem) + plane() * 4 + threadIdx.x % 4) {
      const int t = threadIdx.x % 4;
      constexpr float UNIT = P::BITS == 4 ? 0.0625f : 1.0f;
      counts[0] = t == 0 ? UNIT : t == 1 ? 16384.0f * UNIT : 0.0f, counts[1] = t == 0 ? 128.0f * UNIT : 0.0f;
      zero = t == 0 ? 1.0f : 0.0f;
    }
    __device__ static int plane() {
      const int column = threadIdx.x % 32 / 4;
      return column < 3 ? column : column % 2;
    }
  };

  // Accumulate a step; half: index of its first half in x. The mma are ordered so that few depend on the one before.
  __device__ void add(const Lane& lane, SmemPtr pieces, int half, const float2* intervals, const u32 (&scales)[2],
                      int source) {
    u32 a[2][2][4];  // A fragments of both halves
    uint4 lower[2], upper[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SmemPtr place = i ? pieces.plus(WeightPipeline<P>::other_piece(4)) : pieces;
      ldmatrix_x4(a[i][0], place), ldmatrix_x4(a[i][1], place.plus(WeightPipeline<P>::other_piece(2)));
      const SmemWordPtr digits = lane.digits.plus((half + i) * P::DIGIT_PLACES);
      lower[i] = digits.read_quad();
      if constexpr (P::BITS == 4) upper[i] = digits.plus(12).read_quad();
    }
    int low[2][P::INTERVALS][4] = {}, high[2][P::INTERVALS][4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int interval = j * P::INTERVALS / 2;
        if constexpr (P::BITS == 4) {
          constexpr u32 LOW = 0x0f0f0f0fu;
          const u32 first[4] = {a[i][j][0] & LOW, a[i][j][1] & LOW, a[i][j][2] & LOW, a[i][j][3] & LOW};
          const u32 second[4] = {a[i][j][0] & ~LOW, a[i][j][1] & ~LOW, a[i][j][2] & ~LOW, a[i][j][3] & ~LOW};
          mma_m16n8k32_u8s8(low[i][interval], first, j ? lower[i].z : lower[i].x, j ? lower[i].w : lower[i].y);
          mma_m16n8k32_u8s8(high[i][interval], second, j ? upper[i].z : upper[i].x, j ? upper[i].w : upper[i].y);
        } else {
          mma_m16n8k32_u8s8(low[i][interval], a[i][j], j ? lower[i].z : lower[i].x, j ? lower[i].w : lower[i].y);
        }
      }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int interval = 0; interval < P::INTERVALS; ++interval) {
        const float2 x = intervals[(half + i) * P::INTERVALS + interval];
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const u32 both = __shfl_sync(~0u, scales[column], source + i * P::INTERVALS + interval);
          const float zero = P::ZERO_POINTS ? (float)(both >> 16) : 1 << (P::BITS - 1);
          float part = -lane.zero * zero * x.y;
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int sum = low[i][interval][2 * column + k];
            part += (float)(P::BITS == 4 ? 16 * sum + high[i][interval][2 * column + k] : sum) * lane.counts[k];
          }
          sums[column] += to_float((u16)both) * x.x * part;
          if constexpr (P::OFFSETS) sums[column] += lane.zero * to_float((u16)(both >> 16)) * (x.x * x.y);
        }
      }
  }

  // See `QuantizedAccumulators`.
  template <class Epilogue>
  __device__ void end(const Smem<P>& smem, int tile, bool from_start, Epilogue epilogue) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sums[j] += __shfl_xor_sync(~0u, sums[j], 1);
      sums[j] += __shfl_xor_sync(~0u, sums[j], 2);
    }
    const int at = lane / 4 + lane % 4 * 8;
    const float sum = lane % 4 ? sums[1] : sums[0];
    if constexpr (P::K_WARPS == 1) {
      if (lane % 4 < 2) epilogue(tile, warp % P::COLUMN_WARPS * 16 + at, 0, sum, from_start);
    } else {
      if (lane % 4 < 2) smem.sums[warp * 16 + at] = sum;
      add_warps(smem, tile, from_start, epilogue);
    }
  }
};

// Call share(tile, step, steps) for the k steps of each tile of this CTA.
template <class P, class Function>
__device__ inline void each_tile(int first, int count, Function share) {
  int step = first % P::STEPS, tile = first / P::STEPS;
  for (; count > 0; ++tile, step = 0) {
    const int steps = P::STEPS - step < count ? P::STEPS - step : count;
    count -= steps;
    share(tile, step, steps);
  }
}

// Run this CTA's work units; the epilogue is that of `gemv`.
template <class P, class Epilogue>
__device__ inline void gemv_quantized(const Smem<P>& smem, WeightPipeline<P>& pipeline, int first, int count,
                                      Epilogue epilogue) {
  constexpr bool ALL = P::X_STEPS == P::STEPS;
  const int lane = threadIdx.x % 32;
  int half = 2 * WeightPipeline<P>::k_warp();  // index of the half in x
  if constexpr (ALL) half += first % P::STEPS * 2 * P::K_WARPS;
  const int first_half = 2 * WeightPipeline<P>::k_warp();
  pipeline.fill();
  if constexpr (P::DIGITS) {
    DigitAccumulators<P>::prepare(smem);
    __syncthreads();
    const typename DigitAccumulators<P>::Lane own(smem);
    const float2* const intervals = DigitAccumulators<P>::intervals(smem);
    each_tile<P>(first, count, [&](int tile, int step, int steps) {
      DigitAccumulators<P> sums;
      while (steps > 0) {
        u32 scales[2];
        pipeline.take_scales(scales);
#pragma unroll 1
        for (int i = 0; i < P::BATCH && steps > 0; i += 2, --steps, half += 2 * P::K_WARPS) {
          sums.add(own, pipeline.take(), half, intervals, scales, (lane & ~3) + i * P::INTERVALS);
        }
      }
      sums.end(smem, tile, step == 0, epilogue);
      if constexpr (ALL) half = first_half;
    });
  } else {
    using Half = QuantizedHalf<P>;
    constexpr int NOTE = P::INTERVALS * Half::ROW_TILES * 8;  // sums of x over the intervals of a half
    const int row = lane / 4 % (ROWS < 8 ? ROWS : 8);
    const SmemWordPtr x(smem.x + P::x_index(lane % 4 * (32 / P::BITS), row));
    const float* const of_x = reinterpret_cast<const float*>(P::notes(smem));
    if constexpr (!P::FLOAT8) QuantizedAccumulators<P>::prepare(smem, x);
    __syncthreads();
    each_tile<P>(first, count, [&](int tile, int step, int steps) {
      QuantizedAccumulators<P> sums;
      while (steps > 0) {
        u32 scales[2];
        if constexpr (P::BATCH > 1) pipeline.take_scales(scales);
#pragma unroll 1
        for (int i = 0; i < P::BATCH && steps > 0; i += 2, --steps, half += 2 * P::K_WARPS) {
          const SmemPtr pieces = pipeline.take();
#pragma unroll 1
          for (int second = 0; second < 2; ++second) {
            if constexpr (P::BATCH == 1) pipeline.take_scales(scales);
            Half values;
            values.read(second ? pieces.plus(WeightPipeline<P>::other_piece(4)) : pieces,
                        x.plus((half + second) * Half::X_PLACES));
            sums.add(values, scales, (lane & ~3) + (P::BATCH == 1 ? 0 : (i + second) * P::INTERVALS),
                     of_x + (half + second) * NOTE);
          }
        }
      }
      sums.end(smem, tile, step == 0, epilogue);
      if constexpr (ALL) half = first_half;
    });
  }
}

// Dispatch on the type of the weights.
template <class P, class Epilogue>
__device__ inline void multiply_any(const Smem<P>& smem, WeightPipeline<P>& pipeline, int first, int count,
                                    Epilogue epilogue) {
  if constexpr (P::QUANTIZED)
    gemv_quantized<P>(smem, pipeline, first, count, epilogue);
  else
    gemv<P>(smem, pipeline, first, count, epilogue);
}
