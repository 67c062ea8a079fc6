// SPDX-License-Identifier: Apache-2.0
// Products of a few rows x with weights of 4 or 8 bits. Integers are in the layout of ONNX Runtime's operator MatMulNBits:
//
//   values [N,K] of BITS, unsigned, k contiguous, the first of two values of 4 bits in the low half of a byte
//   scales [N,K/GROUP] of the model's type
//   zero points [N,K/GROUP] of BITS, each row begins at a byte; if there are none, all are half of the range
//
// one after the other, each at the next multiple of 256 bytes. A weight is (value - zero point) * scale. FLOAT8: values are
// E4M3, scales fp32, and there are no zero points.
//
// ORDERED: rows are sorted by group, and row k multiplies input inputs[k]; places is the inverse. inputs [K] and places [K],
// of 16 bits each, are behind the others. The kernels that make x put each input into its place.
//
// A warp multiplies 16 columns with tensor cores, the columns as the 16 rows of A, the rows of x as the 8 columns of B.
// Per step it reads 128 bytes of each column: two halves of four pieces of 16 bytes. All k of one product of matrices are
// in one piece, and so in one group. Which k a slot of the product has is up to the order of x in shared memory.
//
// One row of x becomes integers, and tensor cores multiply the bytes of the weights as they are (`DigitSums`). For several
// rows, and in groups of 32 values of 4 bits, weights are unpacked by one instruction for two values (`Unpacked`): the bits
// of a value become a number of the model's type that is linear in the value, in fp16 a subnormal one. Sums over a group
// are multiplied by its scale in fp32. Each block sums x over each group once, for the zero points.

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, int BITS_, int GROUP_, bool ZERO_POINTS_, bool FLOAT8_,
          bool ORDERED_>
struct QuantizedPlan
    : Shares<QuantizedPlan<K_, N_, TILE_, BLOCKS_, ALL_OF_X, BITS_, GROUP_, ZERO_POINTS_, FLOAT8_, ORDERED_>> {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_, BITS = BITS_;
  static constexpr int GROUP = GROUP_ == 0 ? K : GROUP_;  // 0: a column has one scale
  static constexpr bool QUANTIZED = true, DIRECT = false, ZERO_POINTS = ZERO_POINTS_, WHOLE = false;
  static constexpr bool FLOAT8 = FLOAT8_, ORDERED = ORDERED_;
  static constexpr int WARPS = THREADS / 32, COLUMN_WARPS = TILE / 16, K_WARPS = WARPS / COLUMN_WARPS;
  static constexpr int PIECE = 128 / BITS, HALF = 4 * PIECE, WARP_K = 2 * HALF;  // k of a piece, and of a warp's step
  static constexpr int COPIES_EACH = 4;                         // of a thread in a step
  static constexpr int K_LANES = K_WARPS * WARP_K;              // k of a step
  static constexpr int STEPS = (K + K_LANES - 1) / K_LANES;     // of a tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = (UNITS + BLOCKS - 1) / BLOCKS;
  static constexpr int POSITIONS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int RING_STEPS = STAGES * COPIES < 3 * COPIES_EACH ? 3 : STAGES * COPIES / COPIES_EACH;
  static constexpr int DEPTH = MOST_UNITS + 1 < RING_STEPS ? MOST_UNITS + 1 : RING_STEPS;
  static constexpr int EARLY = QUANTIZED_EARLY < DEPTH - 1 ? QUANTIZED_EARLY : DEPTH - 1;  // steps before x is there
  static_assert(COLUMN_WARPS * K_WARPS == WARPS && TILE % 16 == 0);
  static_assert((BITS == 4 || BITS == 8) && GROUP % 32 == 0 && K % GROUP == 0 && N % 16 == 0);
  static_assert(!FLOAT8 || BITS == 8 && !ZERO_POINTS);

  // Groups of a column, and bytes of the parts.
  static constexpr int GROUPS = K / GROUP, ZERO_BYTES = (GROUPS * BITS + 7) / 8;
  __device__ static constexpr i64 next(i64 bytes) { return (bytes + 255) / 256 * 256; }
  static constexpr i64 SCALES = next((i64)N * K * BITS / 8), ZEROS = SCALES + next((i64)N * GROUPS * (FLOAT8 ? 4 : 2));
  static constexpr i64 INPUTS = ZEROS + (ZERO_POINTS ? next((i64)N * ZERO_BYTES) : 0);

  // A lane reads the scales of four intervals at once, which are those of BATCH halves.
  static constexpr int INTERVAL = GROUP < HALF ? GROUP : HALF, INTERVALS = HALF / INTERVAL, BATCH = 4 / INTERVALS;

  // What is made of x in shared memory, behind the sums of the warps: digits of one row, or sums over the intervals.
  static constexpr bool DIGITS = ROWS == 1 && INTERVALS <= 2 && !FLOAT8;
  static constexpr int HALVES = POSITIONS * K_LANES / HALF, DIGIT_PLACES = BITS == 4 ? 24 : 12;  // of a half
  static constexpr int NOTES = FLOAT8   ? 0
                               : DIGITS ? 16 * HALVES * DIGIT_PLACES + 8 * HALVES * INTERVALS
                                        : 4 * HALVES * INTERVALS * ((ROWS + 7) / 8 * 8);  // bytes

  // x that digits are made of lies in the last step of the ring, which is not used before.
  static constexpr int STEP_PLACES = COPIES_EACH * THREADS, RING = (DIGITS ? DEPTH - 1 : DEPTH) * STEP_PLACES;
  static constexpr int X = POSITIONS * K_LANES * ROWS, LEAST_ROOM = DIGITS ? 8 * STEP_PLACES : 0;  // values
  static constexpr int X_ROOM = X > LEAST_ROOM ? X : LEAST_ROOM;
  static constexpr int SHARED = 16 * RING + 2 * X_ROOM + 4 * WARPS * 16 * ROWS + NOTES;
  __device__ static uint4* notes(const Shared<QuantizedPlan>& shared) {
    return reinterpret_cast<uint4*>(shared.sums + WARPS * 16 * ROWS);
  }

  // x lies in blocks of 8 k, the rows of a block in an order in which lanes read without conflicts.
  __device__ static constexpr int row_place(int block, int row) {
    if (BITS == 8) return row ^ (ROWS >= 8 ? block % 2 * 4 : 0);
    return row ^ (ROWS >= 8 ? block % 4 * 2 : ROWS == 4 ? block & 2 : 0);
  }
  __device__ static constexpr int x_place(int k, int row) {
    if (DIGITS) return k;
    // of 4 bits: 0 4 2 6 1 5 3 7
    const int at = k % 8, place = BITS == 8 ? at : at % 2 * 4 + at / 2 % 2 * 2 + at / 4;
    return (k / 8 * ROWS + row_place(k / 8, row)) * 8 + place;
  }
  __device__ static constexpr int x_values(int k) { return k * ROWS; }  // before this k
};

// The input that row k of a matrix multiplies, and the row that multiplies input k.
template <class P>
__device__ inline int input_of(const u16* weights, int k) {
  if constexpr (P::ORDERED) return (int)read_once(weights + P::INPUTS / 2 + k);
  return k;
}
template <class P>
__device__ inline int place_of(const u16* weights, int k) {
  if constexpr (P::ORDERED) return (int)read_once(weights + P::INPUTS / 2 + P::K + k);
  return k;
}

// The type of a matrix's scales.
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

// The weights of a warp on their way to shared memory, and scales of its columns on their way to registers.
//
// Eight lanes copy the 128 bytes of a column. In shared memory the pieces of each column are in another order, so that
// neither writing a column nor reading one piece of eight columns makes lanes wait.
template <auto... SIZES>
struct Stream<QuantizedPlan<SIZES...>> {
  using P = QuantizedPlan<SIZES...>;
  using Scale = typename ScaleOf<P::FLOAT8>::Type;
  static constexpr bool ALIGNED = P::K % P::K_LANES == 0 && P::N % P::TILE == 0;
  static constexpr i64 COLUMN_BYTES = (i64)P::K * P::BITS / 8, STEP_BYTES = P::K_LANES * P::BITS / 8;
  static constexpr int STEP_PLACES = P::STEP_PLACES;
  const unsigned char *weights, *source;
  // As `read_matrices` takes it, of the first step: pieces 0 to 3 of columns 0 to 7, for digits 0 and 1 of all 16.
  const Place pieces;
  Place even, odd;     // of this lane's copies of columns 0 to 3 and 8 to 11, and of the others
  int left, step, slot, k, column;
  const Scale* scale_row;         // scales of column g
  const unsigned char* zero_row;  // its zero points
  int scale_tile, half;           // scales are read next from this half of a step of this tile on
  int scales_left;                // steps whose scales are not on their way
  // The next BATCH halves have these scales of columns g and g + 8, and zero points in these bytes; they may be on their way.
  u32 scales[2], zeros[2];
  int shift;

  __device__ Stream(const u16* weights, uint4* ring, int first, int count)
      : weights(reinterpret_cast<const unsigned char*>(weights)),
        pieces(ring + threadIdx.x / 32 * 128 + read_column() * 8 + (read_piece() ^ threadIdx.x % 8)),
        even(ring + threadIdx.x / 32 * 128 + threadIdx.x % 32 / 8 * 8 + (threadIdx.x % 8 ^ threadIdx.x % 32 / 8)),
        odd(ring + threadIdx.x / 32 * 128 + (threadIdx.x % 32 / 8 + 4) * 8 + (threadIdx.x % 8 ^ threadIdx.x % 32 / 8 + 4)),
        left(count), step(first % P::STEPS), slot(0) {
    const int lane = threadIdx.x % 32;
    k = k_warp() * P::WARP_K + lane % 8 * P::PIECE;
    column = first / P::STEPS * P::TILE + first_column() + lane / 8;
    source = this->weights + column * COLUMN_BYTES + k * P::BITS / 8 + step * STEP_BYTES;
    scale_tile = first / P::STEPS;
    const int first_step = step;
#pragma unroll
    for (int i = 0; i < P::EARLY; ++i) next();
    scales_left = count;
    aim_scales(first_step);
    read_scales();
  }

  // Start the other copies for which there is room.
  __device__ void fill() {
#pragma unroll
    for (int i = P::EARLY; i < P::DEPTH - 1; ++i) next();
  }

  __device__ static int first_column() { return threadIdx.x / 32 % P::COLUMN_WARPS * 16; }
  __device__ static int k_warp() { return threadIdx.x / 32 / P::COLUMN_WARPS; }
  __device__ static int read_column() { return threadIdx.x % 8 + (P::DIGITS ? threadIdx.x % 16 / 8 * 8 : 0); }
  __device__ static int read_piece() { return P::DIGITS ? threadIdx.x % 32 / 16 : threadIdx.x % 32 / 8; }
  // From the place of a piece to that of the piece whose number differs in this bit.
  __device__ static int other_piece(int bit) { return threadIdx.x & bit ? -bit : bit; }

  // Wait for the oldest step's copies of all lanes, start others, and return the place of the step's pieces.
  __device__ Place take() {
    wait_for_copies<P::DEPTH - 2>();
    wait_for_lanes();
    next();
    return pieces.plus(slot * STEP_PLACES);
  }

  // Start the copies of a step; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (left > 0) {
      const bool inside = ALIGNED || k + step * P::K_LANES < P::K && column < P::N;
      copy<0>(even, inside), copy<4>(odd, inside), copy<8>(even.plus(64), inside), copy<12>(odd.plus(64), inside);
      source += STEP_BYTES, --left;
      if (++step == P::STEPS)
        step = 0, column += P::TILE, source += P::TILE * COLUMN_BYTES - P::STEPS * STEP_BYTES;
    }
    commit_copies();
    const bool last = ++slot == P::DEPTH;
    const int places = last ? -(P::DEPTH - 1) * STEP_PLACES : STEP_PLACES;
    even.advance(places), odd.advance(places);
    if (last) slot = 0;
  }

  template <int COLUMNS>
  __device__ void copy(Place target, bool inside) const {
    if constexpr (ALIGNED)
      copy_async_from<COLUMNS * COLUMN_BYTES>(target, source);
    else
      copy_async(target, source + COLUMNS * COLUMN_BYTES, inside);
  }

  // The next scales are those from a step of the tile on.
  __device__ void aim_scales(int step) {
    const int column = scale_tile * P::TILE + first_column() + threadIdx.x % 32 / 4;
    const i64 row = column < P::N ? column : 0;
    scale_row = reinterpret_cast<const Scale*>(weights + P::SCALES) + row * P::GROUPS;
    zero_row = weights + P::ZEROS + row * P::ZERO_BYTES;
    half = 2 * step;
  }

  // Return scales, with zero points in their upper halves, and start to read those that follow.
  __device__ void take_scales(u32 (&taken)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      taken[i] = P::ZERO_POINTS ? scales[i] | (zeros[i] >> shift & (1 << P::BITS) - 1) << 16 : scales[i];
    read_scales();
  }

  // Start to read scales, if the block needs others; lane t of a column reads those of interval t. Intervals behind the
  // last one, which are multiplied by zeros, have the last one's.
  __device__ void read_scales() {
    if (scales_left <= 0) return;
    if (half >= 2 * P::STEPS) ++scale_tile, aim_scales(0);
    const int tile_left = P::STEPS - half / 2, steps = P::BATCH > 2 ? P::BATCH / 2 : 1;
    if (P::BATCH > 1 || half % 2) scales_left -= steps < tile_left ? steps : tile_left;
    const int interval = threadIdx.x % 4, own = half + interval / P::INTERVALS;
    const int k = (own / 2 * P::K_WARPS + k_warp()) * P::WARP_K + own % 2 * P::HALF + interval % P::INTERVALS * P::INTERVAL;
    const int at = k < P::K ? k / P::GROUP : P::GROUPS - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = read_once(scale_row + at + i * 8 * P::GROUPS);
      if constexpr (P::ZERO_POINTS) zeros[i] = read_once(zero_row + at * P::BITS / 8 + i * 8 * P::ZERO_BYTES);
    }
    shift = P::BITS == 4 ? at % 2 * 4 : 0, half += P::BATCH;
  }
};

// Numbers of the model's type that stand for the values of a word, two in each, as A takes them. A value is
// FACTOR * number - OFFSET; of the second half of the pairs FACTOR / HIGH * number - OFFSET.
template <int BITS, bool FLOAT8>
struct Unpacked {
  static constexpr float FACTOR = BF16 ? 1.0f : 16777216.0f, HIGH = BF16 || BITS == 8 ? 1.0f : 16.0f;
  static constexpr float OFFSET = !BF16 ? 0.0f : BITS == 8 ? -128.0f : 128.0f;
  u32 pairs[16 / BITS];

  __device__ explicit Unpacked(u32 word) {
    if constexpr (BITS == 4) {
      // pairs of the values 0 4, 2 6, 1 5, 3 7
#if BF16
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i % 2 * 2 + i / 2] = masked_or(word >> 4 * i, 0x000f000fu, 0x43004300u);
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

// E4M3. Without hardware for it, the bits of a value are those of a number of the model's type with another exponent.
template <>
struct Unpacked<8, true> {
  static constexpr float FACTOR = BF16 || HAS_FLOAT8 ? 1.0f : 256.0f, HIGH = 1.0f, OFFSET = 0.0f;
  u32 pairs[2];

  __device__ explicit Unpacked(u32 word) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#if !BF16
      if constexpr (HAS_FLOAT8) {
        pairs[i] = halves_of_float8((u16)(word >> 16 * i));
        continue;
      }
#endif
      const u32 bits = __byte_perm(word, 0, i ? 0x3424 : 0x1404);  // in the upper byte of each half
      constexpr int SHIFT = BF16 ? 4 : 1;
      constexpr u32 SIGNS = 0x80008000u, OTHERS = 0x7f007f00u >> SHIFT;
      pairs[i] = masked_or(bits, SIGNS, bits >> SHIFT & OTHERS);
#if BF16
      pairs[i] = multiply_pair(pairs[i], 0x7b807b80u);  // 2^120: sums of products with smaller numbers would be too small
#endif
    }
  }
};

// A warp's sums over an interval, of columns g and g + 8: rows 2t and 2t + 1.
template <int BITS, bool FLOAT8>
struct IntervalSums {
  using Numbers = Unpacked<BITS, FLOAT8>;
  float low[4] = {}, high[4] = {};

  // Add a piece; x: its values of row g.
  __device__ void add(const Numbers& one, const Numbers& other, uint4 x) {
    const u32 first[4] = {one.pairs[0], other.pairs[0], one.pairs[1], other.pairs[1]};
    mma(low, first, x.x, x.y);
    if constexpr (BITS == 4) {
      const u32 second[4] = {one.pairs[2], other.pairs[2], one.pairs[3], other.pairs[3]};
      mma(Numbers::HIGH == 1.0f ? low : high, second, x.z, x.w);
    }
  }

  __device__ float total(int i, float zero, float of_x) const {
    const float sum = Numbers::HIGH == 1.0f ? low[i] : low[i] + high[i] * (1.0f / Numbers::HIGH);
    return Numbers::FACTOR * sum - zero * of_x;
  }
};

// What a lane multiplies in half a step.
template <class P>
struct QuantizedHalf {
  static constexpr int ROW_TILES = (ROWS + 7) / 8;
  u32 low[4], high[4];  // words of columns g and g + 8, by piece
  uint4 x[ROW_TILES][4];

  static constexpr int X_PLACES = P::HALF * ROWS / 8;  // of a half

  // pieces: as `read_matrices` takes them; first: this lane's first values of x in the half.
  __device__ void read(Place pieces, Words first) {
    read_matrices(low, pieces), read_matrices(high, pieces.plus(64));
    read_x(first);
  }

  __device__ void read_x(Words first) {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece)
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        const Words place = first.plus(piece * (16 / P::BITS) * ROWS + 8 * tile);
        if constexpr (P::BITS == 4) {
          x[tile][piece] = place.read_quad();
        } else {
          const uint2 pair = place.read_pair();
          x[tile][piece] = {pair.x, pair.y, 0, 0};
        }
      }
  }
};

// Add the sums of the warps that have the same columns, which are in shared memory.
template <class P, class Finish>
__device__ inline void add_warps(const Shared<P>& shared, int tile, bool from_start, Finish finish) {
  __syncthreads();
  for (int place = threadIdx.x; place < P::TILE * ROWS; place += THREADS) {
    const int at = place % P::TILE, row = place / P::TILE;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < P::K_WARPS; ++w)
      sum += shared.sums[((w * P::COLUMN_WARPS + at / 16) * ROWS + row) * 16 + at % 16];
    finish(tile, at, row, sum, from_start);
  }
  __syncthreads();
}

// A warp's sums over some steps, and the sums of x by which zero points are multiplied: [intervals,ROWS] in shared memory.
template <class P>
struct QuantizedSums {
  static constexpr int ROW_TILES = QuantizedHalf<P>::ROW_TILES, PER_INTERVAL = 4 / P::INTERVALS;
  float sums[ROW_TILES][4] = {};

  // Sum x over each interval, by tensor cores too. x_begin: this lane's first values of x.
  __device__ static void prepare(const Shared<P>& shared, Words x_begin) {
    const u32 ones[4] = {in_register(ONES), in_register(ONES), in_register(ONES), in_register(ONES)};
    float* const out = reinterpret_cast<float*>(P::notes(shared));
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
            mma(of_x, ones, values.x[tile][piece].x, values.x[tile][piece].y);
            if constexpr (P::BITS == 4) mma(of_x, ones, values.x[tile][piece].z, values.x[tile][piece].w);
          }
          if (lane >= 4) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i)
            out[((half * P::INTERVALS + interval) * ROW_TILES + tile) * 8 + 2 * lane + i] = of_x[i];
        }
    }
  }

  // Add half a step. scales: of its intervals, in the lanes from `source` on; of_x: sums of x over its intervals.
  __device__ void add(const QuantizedHalf<P>& half, const u32 (&scales)[2], int source, const float* of_x) {
#pragma unroll
    for (int interval = 0; interval < P::INTERVALS; ++interval) {
      IntervalSums<P::BITS, P::FLOAT8> parts[ROW_TILES];
#pragma unroll
      for (int piece = interval * PER_INTERVAL; piece < (interval + 1) * PER_INTERVAL; ++piece) {
        const Unpacked<P::BITS, P::FLOAT8> one(half.low[piece]), other(half.high[piece]);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) parts[tile].add(one, other, half.x[tile][piece]);
      }
      float factors[2], zeros[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 both = __shfl_sync(~0u, scales[i], source + interval);
        factors[i] = to_scale<P>(both);
        zeros[i] = Unpacked<P::BITS, P::FLOAT8>::OFFSET + (P::ZERO_POINTS ? (float)(both >> 16) : 1 << (P::BITS - 1));
      }
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (P::FLOAT8) {
            sums[tile][i] += factors[i / 2] * parts[tile].total(i, 0.0f, 0.0f);
          } else {
            const float x = of_x[(interval * ROW_TILES + tile) * 8 + threadIdx.x % 4 * 2 + i % 2];
            sums[tile][i] += factors[i / 2] * parts[tile].total(i, zeros[i / 2], x);
          }
        }
    }
  }

  // Pass on the sums of a tile; `multiply` of gemv.cuh tells what `finish` gets.
  template <class Finish>
  __device__ void end(const Shared<P>& shared, int tile, bool from_start, Finish finish) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_tile * 8 + lane % 4 * 2 + i % 2, at = lane / 4 + i / 2 * 8;
        if (row >= ROWS) continue;
        if constexpr (P::K_WARPS == 1)
          finish(tile, warp % P::COLUMN_WARPS * 16 + at, row, sums[row_tile][i], from_start);
        else
          shared.sums[(warp * ROWS + row) * 16 + at] = sums[row_tile][i];
      }
    if constexpr (P::K_WARPS > 1) add_warps(shared, tile, from_start, finish);
  }
};

// One row: x as digits, so that tensor cores multiply the bytes of the weights as they are.
//
// Each interval of x is in units of a power of two, integers of three digits to base 128: three columns of B. Of two
// weights in a byte, tensor cores take the lower one and 16 times the upper one.
template <class P>
struct DigitSums {
  static constexpr int EACH = 16 / P::BITS;  // values of a lane in half a step
  float sums[2] = {};                        // of columns g and g + 8

  // A power of two and the sum of x in such units, of each interval.
  __device__ static float2* intervals(const Shared<P>& shared) {
    return reinterpret_cast<float2*>(P::notes(shared) + P::HALVES * P::DIGIT_PLACES);
  }

  __device__ static void prepare(const Shared<P>& shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int half = threadIdx.x / 32; half < P::HALVES; half += P::WARPS) {
      const u32* const pairs = reinterpret_cast<const u32*>(shared.x + half * P::HALF) + lane * (EACH / 2);
      u16 values[EACH];
      u32 highest = 0;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        values[i] = pairs[i / 2] >> i % 2 * 16;
        highest = (values[i] & 0x7fffu) > highest ? values[i] & 0x7fffu : highest;
      }
      highest = highest_of_lanes<32 / P::INTERVALS>(highest);
      const u32 found = __float_as_uint(to_float((u16)highest)) >> 23, exponent = found > 20 ? found : 20;
      const float units = __uint_as_float(273 - exponent << 23);  // of 1: the largest value has 20 bits
      int total = 0;
      u32 digits[2][3] = {};  // of the first and the second weights of two bytes
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
      // Bytes 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3 of each 32, as lane t takes them.
      const int byte = 2 * lane, place = byte % 16 / 4 * 16 + byte / 32 * 8 + byte / 16 % 2 * 4 + byte % 4;
      u16* const out = reinterpret_cast<u16*>(P::notes(shared) + half * P::DIGIT_PLACES) + place / 2;
#pragma unroll
      for (int digit = 0; digit < 3; ++digit) {
        out[digit * 32] = (u16)digits[0][digit];
        if constexpr (P::BITS == 4) out[(3 + digit) * 32] = (u16)digits[1][digit];
      }
      total = sum_of_lanes<32 / P::INTERVALS>(total);
      if (lane % (32 / P::INTERVALS) != 0) continue;
      const float unit = __uint_as_float(highest < (BF16 ? 0x7f80u : 0x7c00u) ? exponent - 19 << 23 : 0x7fffffffu);
      intervals(shared)[half * P::INTERVALS + lane / (32 / P::INTERVALS)] = {unit, (float)total};
    }
  }

  // Where a lane finds the digits of its column of B, and what its two columns of the product count. Columns 3 to 7, which
  // count nothing, have digits that no lane waits for.
  struct Lane {
    Words digits;
    float counts[2], zero;

    __device__ explicit Lane(const Shared<P>& shared) : digits(P::notes(shared) + plane() * 4 + threadIdx.x % 4) {
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

  // Add a step, whose halves are that many behind the first in shared memory. Products are in an order in which few wait
  // for each other.
  __device__ void add(const Lane& lane, Place pieces, int half, const float2* intervals, const u32 (&scales)[2], int source) {
    u32 a[2][2][4];  // of both halves, as `mma_bytes` takes them
    uint4 lower[2], upper[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Place place = i ? pieces.plus(Stream<P>::other_piece(4)) : pieces;
      read_matrices(a[i][0], place), read_matrices(a[i][1], place.plus(Stream<P>::other_piece(2)));
      const Words digits = lane.digits.plus((half + i) * P::DIGIT_PLACES);
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
          mma_bytes(low[i][interval], first, j ? lower[i].z : lower[i].x, j ? lower[i].w : lower[i].y);
          mma_bytes(high[i][interval], second, j ? upper[i].z : upper[i].x, j ? upper[i].w : upper[i].y);
        } else {
          mma_bytes(low[i][interval], a[i][j], j ? lower[i].z : lower[i].x, j ? lower[i].w : lower[i].y);
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
        }
      }
  }

  // As that of `QuantizedSums`.
  template <class Finish>
  __device__ void end(const Shared<P>& shared, int tile, bool from_start, Finish finish) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sums[j] += __shfl_xor_sync(~0u, sums[j], 1);
      sums[j] += __shfl_xor_sync(~0u, sums[j], 2);
    }
    const int at = lane / 4 + lane % 4 * 8;
    const float sum = lane % 4 ? sums[1] : sums[0];
    if constexpr (P::K_WARPS == 1) {
      if (lane % 4 < 2) finish(tile, warp % P::COLUMN_WARPS * 16 + at, 0, sum, from_start);
    } else {
      if (lane % 4 < 2) shared.sums[warp * 16 + at] = sum;
      add_warps(shared, tile, from_start, finish);
    }
  }
};

// Call share(tile, step, steps) for the steps of each tile that a block has.
template <class P, class Function>
__device__ inline void each_tile(int first, int count, Function share) {
  int step = first % P::STEPS, tile = first / P::STEPS;
  for (; count > 0; ++tile, step = 0) {
    const int steps = P::STEPS - step < count ? P::STEPS - step : count;
    count -= steps;
    share(tile, step, steps);
  }
}

// Multiply this block's share; `multiply` of gemv.cuh tells what `finish` gets.
template <class P, class Finish>
__device__ inline void multiply_quantized(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  constexpr bool ALL = P::POSITIONS == P::STEPS;
  const int lane = threadIdx.x % 32;
  int half = 2 * Stream<P>::k_warp();  // of x in shared memory
  if constexpr (ALL) half += first % P::STEPS * 2 * P::K_WARPS;
  const int first_half = 2 * Stream<P>::k_warp();
  stream.fill();
  if constexpr (P::DIGITS) {
    DigitSums<P>::prepare(shared);
    __syncthreads();
    const typename DigitSums<P>::Lane own(shared);
    const float2* const intervals = DigitSums<P>::intervals(shared);
    each_tile<P>(first, count, [&](int tile, int step, int steps) {
      DigitSums<P> sums;
      while (steps > 0) {
        u32 scales[2];
        stream.take_scales(scales);
#pragma unroll 1
        for (int i = 0; i < P::BATCH && steps > 0; i += 2, --steps, half += 2 * P::K_WARPS) {
          sums.add(own, stream.take(), half, intervals, scales, (lane & ~3) + i * P::INTERVALS);
        }
      }
      sums.end(shared, tile, step == 0, finish);
      if constexpr (ALL) half = first_half;
    });
  } else {
    using Half = QuantizedHalf<P>;
    constexpr int NOTE = P::INTERVALS * Half::ROW_TILES * 8;  // sums of x over a half's intervals
    const int row = lane / 4 % (ROWS < 8 ? ROWS : 8);
    const Words x(shared.x + P::x_place(lane % 4 * (32 / P::BITS), row));
    const float* const of_x = reinterpret_cast<const float*>(P::notes(shared));
    if constexpr (!P::FLOAT8) QuantizedSums<P>::prepare(shared, x);
    __syncthreads();
    each_tile<P>(first, count, [&](int tile, int step, int steps) {
      QuantizedSums<P> sums;
      while (steps > 0) {
        u32 scales[2];
        if constexpr (P::BATCH > 1) stream.take_scales(scales);
#pragma unroll 1
        for (int i = 0; i < P::BATCH && steps > 0; i += 2, --steps, half += 2 * P::K_WARPS) {
          const Place pieces = stream.take();
#pragma unroll 1
          for (int second = 0; second < 2; ++second) {
            if constexpr (P::BATCH == 1) stream.take_scales(scales);
            Half values;
            values.read(second ? pieces.plus(Stream<P>::other_piece(4)) : pieces, x.plus((half + second) * Half::X_PLACES));
            sums.add(values, scales, (lane & ~3) + (P::BATCH == 1 ? 0 : (i + second) * P::INTERVALS),
                     of_x + (half + second) * NOTE);
          }
        }
      }
      sums.end(shared, tile, step == 0, finish);
      if constexpr (ALL) half = first_half;
    });
  }
}

// Multiply this block's share, whatever its weights are.
template <class P, class Finish>
__device__ inline void multiply_any(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  if constexpr (P::QUANTIZED)
    multiply_quantized<P>(shared, stream, first, count, finish);
  else
    multiply<P>(shared, stream, first, count, finish);
}
