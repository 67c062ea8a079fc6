// SPDX-License-Identifier: Apache-2.0
// Products of a few rows x with weights of 4 or 8 bits, in the layout of ONNX Runtime's operator MatMulNBits:
//
//   values [N,K] of BITS, unsigned, k contiguous, the first of two values of 4 bits in the low half of a byte
//   scales [N,K/GROUP] of the model's type
//   zero points [N,K/GROUP] of BITS, each row begins at a byte; if there are none, all are half of the range
//
// one after the other, each at the next multiple of 256 bytes. A weight is (value - zero point) * scale.
//
// A warp multiplies 16 columns with tensor cores, the columns as the 16 rows of A, the rows of x as the 8 columns of B.
// Per step it reads 128 bytes of each column: two halves of four pieces of 16 bytes. All k of one product of matrices are
// in one piece, and so in one group. Which k a slot of the product has is up to the order of x in shared memory.
//
// Unpacking is one instruction for two values (`Unpacked`): the bits of a value become a number of the model's type that
// is linear in the value, in fp16 a subnormal one. Sums are in fp32; those of x over each group, by which zero points are
// multiplied, are computed by tensor cores too.

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, int BITS_, int GROUP_, bool ZERO_POINTS_>
struct QuantizedPlan
    : Shares<QuantizedPlan<K_, N_, TILE_, BLOCKS_, ALL_OF_X, BITS_, GROUP_, ZERO_POINTS_>> {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_, BITS = BITS_, GROUP = GROUP_;
  static constexpr bool QUANTIZED = true, DIRECT = false, ZERO_POINTS = ZERO_POINTS_, WHOLE = false;
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
  static constexpr int RING = COPIES_EACH * DEPTH * THREADS;  // places
  static constexpr int X = POSITIONS * K_LANES * ROWS;
  static constexpr int SHARED = 16 * RING + 2 * X + 4 * WARPS * 16 * ROWS;
  static_assert(COLUMN_WARPS * K_WARPS == WARPS && TILE % 16 == 0);
  static_assert((BITS == 4 || BITS == 8) && GROUP % 32 == 0 && K % GROUP == 0 && N % 16 == 0);

  // Groups of a column, and bytes of the parts.
  static constexpr int GROUPS = K / GROUP, ZERO_BYTES = (GROUPS * BITS + 7) / 8;
  __device__ static constexpr i64 next(i64 bytes) { return (bytes + 255) / 256 * 256; }
  static constexpr i64 SCALES = next((i64)N * K * BITS / 8), ZEROS = SCALES + next((i64)N * GROUPS * 2);

  // A lane reads the scales of four intervals at once, which are those of BATCH halves.
  static constexpr int INTERVAL = GROUP < HALF ? GROUP : HALF, INTERVALS = HALF / INTERVAL, BATCH = 4 / INTERVALS;

  // x lies in blocks of 8 k, the rows of a block in an order in which lanes read without conflicts.
  __device__ static constexpr int row_place(int block, int row) {
    if (BITS == 8) return row ^ (ROWS >= 8 ? block % 2 * 4 : 0);
    return row ^ (ROWS >= 8 ? block % 4 * 2 : ROWS == 4 ? block & 2 : 0);
  }
  __device__ static constexpr int x_place(int k, int row) {
    // of 4 bits: 0 4 2 6 1 5 3 7
    const int at = k % 8, place = BITS == 8 ? at : at % 2 * 4 + at / 2 % 2 * 2 + at / 4;
    return (k / 8 * ROWS + row_place(k / 8, row)) * 8 + place;
  }
};

// The weights of a warp on their way to shared memory, and scales of its columns on their way to registers.
//
// Eight lanes copy the 128 bytes of a column. In shared memory the pieces of each column are in another order, so that
// neither writing a column nor reading one piece of eight columns makes lanes wait.
template <auto... SIZES>
struct Stream<QuantizedPlan<SIZES...>> {
  using P = QuantizedPlan<SIZES...>;
  static constexpr bool ALIGNED = P::K % P::K_LANES == 0 && P::N % P::TILE == 0;
  static constexpr i64 COLUMN_BYTES = (i64)P::K * P::BITS / 8, STEP_BYTES = P::K_LANES * P::BITS / 8;
  static constexpr int STEP_PLACES = P::COPIES_EACH * THREADS;
  const unsigned char *weights, *source;
  const Place pieces;  // as `read_matrices` takes it: pieces 0 to 3 of columns 0 to 7 of the first step
  Place even, odd;     // of this lane's copies of columns 0 to 3 and 8 to 11, and of the others
  int left, step, slot, k, column;
  const u16* scale_row;           // scales of column g
  const unsigned char* zero_row;  // its zero points
  int half;                       // scales are read next from this half of a step of the tile on
  // The next BATCH halves have these scales of columns g and g + 8, and zero points in these bytes; they may be on their way.
  u32 scales[2], zeros[2];
  int shift;

  __device__ Stream(const u16* weights, uint4* ring, int first, int count)
      : weights(reinterpret_cast<const unsigned char*>(weights)),
        pieces(ring + threadIdx.x / 32 * 128 + threadIdx.x % 8 * 8 + (threadIdx.x % 32 / 8 ^ threadIdx.x % 8)),
        even(ring + threadIdx.x / 32 * 128 + threadIdx.x % 32 / 8 * 8 + (threadIdx.x % 8 ^ threadIdx.x % 32 / 8)),
        odd(ring + threadIdx.x / 32 * 128 + (threadIdx.x % 32 / 8 + 4) * 8 + (threadIdx.x % 8 ^ threadIdx.x % 32 / 8 + 4)),
        left(count), step(first % P::STEPS), slot(0) {
    const int lane = threadIdx.x % 32;
    k = k_warp() * P::WARP_K + lane % 8 * P::PIECE;
    column = first / P::STEPS * P::TILE + first_column() + lane / 8;
    source = this->weights + column * COLUMN_BYTES + k * P::BITS / 8 + step * STEP_BYTES;
    aim_scales(first / P::STEPS, step);
    read_scales();
#pragma unroll
    for (int i = 0; i < P::DEPTH - 1; ++i) next();
  }

  __device__ static int first_column() { return threadIdx.x / 32 % P::COLUMN_WARPS * 16; }
  __device__ static int k_warp() { return threadIdx.x / 32 / P::COLUMN_WARPS; }

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

  // The next scales are those from a step of a tile on.
  __device__ void aim_scales(int tile, int step) {
    const int column = tile * P::TILE + first_column() + threadIdx.x % 32 / 4;
    const i64 row = column < P::N ? column : 0;
    scale_row = reinterpret_cast<const u16*>(weights + P::SCALES) + row * P::GROUPS;
    zero_row = weights + P::ZEROS + row * P::ZERO_BYTES;
    half = 2 * step;
  }

  // Return scales, with zero points in their upper halves, and start to read those that follow.
  __device__ void take_scales(u32 (&taken)[2], int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      taken[i] = P::ZERO_POINTS ? scales[i] | (zeros[i] >> shift & (1 << P::BITS) - 1) << 16 : scales[i];
    if (half >= 2 * P::STEPS) aim_scales(tile + 1, 0);
    read_scales();
  }

  // Start to read scales; lane t of a column reads those of interval t. Intervals behind the last one, which are
  // multiplied by zeros, have the last one's.
  __device__ void read_scales() {
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
template <int BITS>
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

// A warp's sums over an interval, of columns g and g + 8: rows 2t and 2t + 1.
template <int BITS>
struct IntervalSums {
  using Numbers = Unpacked<BITS>;
  float low[4] = {}, high[4] = {}, of_x[4] = {};

  // Add a piece; x: its values of row g; ones: A of ones.
  __device__ void add(const Numbers& one, const Numbers& other, uint4 x, const u32 (&ones)[4]) {
    const u32 first[4] = {one.pairs[0], other.pairs[0], one.pairs[1], other.pairs[1]};
    mma(low, first, x.x, x.y);
    mma(of_x, ones, x.x, x.y);
    if constexpr (BITS == 4) {
      const u32 second[4] = {one.pairs[2], other.pairs[2], one.pairs[3], other.pairs[3]};
      mma(Numbers::HIGH == 1.0f ? low : high, second, x.z, x.w);
      mma(of_x, ones, x.z, x.w);
    }
  }

  __device__ float total(int i, float zero) const {
    const float sum = Numbers::HIGH == 1.0f ? low[i] : low[i] + high[i] * (1.0f / Numbers::HIGH);
    return Numbers::FACTOR * sum - zero * of_x[i];
  }
};

// What a lane multiplies in half a step.
template <class P>
struct QuantizedHalf {
  static constexpr int ROW_TILES = (ROWS + 7) / 8;
  u32 low[4], high[4];  // words of columns g and g + 8, by piece
  uint4 x[ROW_TILES][4];

  // pieces: as `read_matrices` takes them; first: this lane's first values of x in the half.
  __device__ void read(Place pieces, Words first) {
    read_matrices(low, pieces), read_matrices(high, pieces.plus(64));
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

// A warp's sums over some steps.
template <class P>
struct QuantizedSums {
  static constexpr int ROW_TILES = QuantizedHalf<P>::ROW_TILES, PER_INTERVAL = 4 / P::INTERVALS;
  const u32 ones[4] = {in_register(ONES), in_register(ONES), in_register(ONES), in_register(ONES)};
  float sums[ROW_TILES][4] = {};

  // Add half a step. scales: of its intervals, in the lanes from `source` on.
  __device__ void add(const QuantizedHalf<P>& half, const u32 (&scales)[2], int source) {
#pragma unroll
    for (int interval = 0; interval < P::INTERVALS; ++interval) {
      IntervalSums<P::BITS> parts[ROW_TILES];
#pragma unroll
      for (int piece = interval * PER_INTERVAL; piece < (interval + 1) * PER_INTERVAL; ++piece) {
        const Unpacked<P::BITS> one(half.low[piece]), other(half.high[piece]);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) parts[tile].add(one, other, half.x[tile][piece], ones);
      }
      float factors[2], zeros[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 both = __shfl_sync(~0u, scales[i], source + interval);
        factors[i] = to_float((u16)both);
        zeros[i] = Unpacked<P::BITS>::OFFSET + (P::ZERO_POINTS ? (float)(both >> 16) : 1 << (P::BITS - 1));
      }
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] += factors[i / 2] * parts[tile].total(i, zeros[i / 2]);
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
    if constexpr (P::K_WARPS > 1) {
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
  }
};

// Multiply this block's share; `multiply` of gemv.cuh tells what `finish` gets.
template <class P, class Finish>
__device__ inline void multiply_quantized(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  constexpr int X_PLACES = P::K_LANES * ROWS / 8, X_HALF = P::HALF * ROWS / 8;  // of a step, of its first half
  const int lane = threadIdx.x % 32, row = lane / 4 % (ROWS < 8 ? ROWS : 8);
  const int k = Stream<P>::k_warp() * P::WARP_K + lane % 4 * (32 / P::BITS);
  const int swap = (lane % 8 & 4 ? -4 : 4);  // from a place of pieces 0 to 3 to that of pieces 4 to 7
  const Words x_begin(shared.x + P::x_place(k, row));
  int step = first % P::STEPS, tile = first / P::STEPS;
  Words x = x_begin.plus(P::POSITIONS == P::STEPS ? step * X_PLACES : 0);
  for (; count > 0; ++tile, step = 0) {
    const bool from_start = step == 0;
    int steps = P::STEPS - step < count ? P::STEPS - step : count;
    count -= steps;
    QuantizedSums<P> sums;
    while (steps > 0) {
      u32 scales[2];
      if constexpr (P::BATCH > 1) stream.take_scales(scales, tile);
#pragma unroll 1
      for (int i = 0; i < P::BATCH && steps > 0; i += 2, --steps, x = x.plus(X_PLACES)) {
        const Place pieces = stream.take();
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          if constexpr (P::BATCH == 1) stream.take_scales(scales, tile);
          QuantizedHalf<P> values;
          values.read(half ? pieces.plus(swap) : pieces, half ? x.plus(X_HALF) : x);
          sums.add(values, scales, (lane & ~3) + (P::BATCH == 1 ? 0 : (i + half) * P::INTERVALS));
        }
      }
    }
    sums.end(shared, tile, from_start, finish);
    if constexpr (P::POSITIONS == P::STEPS) x = x_begin;
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
