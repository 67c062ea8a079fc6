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
// Per step it reads four pieces of 16 bytes of each column. All k of one product of matrices are in one piece, and so in
// one group. Which k a slot of the product has is up to the order of x in shared memory.
//
// Unpacking is one instruction for two values (`Unpacked`): the bits of a value become a number of the model's type that
// is linear in the value, in fp16 a subnormal one. Sums are in fp32; those of x over each group, by which zero points are
// multiplied, are computed by tensor cores too.

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, int BITS_, int GROUP_, bool ZERO_POINTS_>
struct QuantizedPlan {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_, BITS = BITS_, GROUP = GROUP_;
  static constexpr bool QUANTIZED = true, ZERO_POINTS = ZERO_POINTS_, WHOLE = false;
  static constexpr int WARPS = THREADS / 32, COLUMN_WARPS = TILE / 16, K_WARPS = WARPS / COLUMN_WARPS;
  static constexpr int PIECE = 128 / BITS, WARP_K = 4 * PIECE;  // k of a piece, and of a warp's step
  static constexpr int K_LANES = K_WARPS * WARP_K;              // k of a step
  static constexpr int STEPS = (K + K_LANES - 1) / K_LANES;     // of a tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = (UNITS + BLOCKS - 1) / BLOCKS;
  static constexpr int POSITIONS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int RING_STEPS = STAGES * COPIES < 6 ? 3 : STAGES * COPIES / 2;  // two copies of a thread each
  static constexpr int DEPTH = MOST_UNITS + 1 < RING_STEPS ? MOST_UNITS + 1 : RING_STEPS;
  static constexpr int RING = 2 * DEPTH * THREADS;           // places
  static constexpr int X = POSITIONS * K_LANES * ROWS;
  static constexpr int SHARED = 16 * RING + 2 * X + 4 * WARPS * 16 * ROWS;
  static_assert(COLUMN_WARPS * K_WARPS == WARPS && TILE % 16 == 0);
  static_assert((BITS == 4 || BITS == 8) && GROUP % 32 == 0 && K % GROUP == 0 && N % 16 == 0);

  // Groups of a column, and bytes of the parts.
  static constexpr int GROUPS = K / GROUP, ZERO_BYTES = (GROUPS * BITS + 7) / 8;
  __device__ static constexpr i64 next(i64 bytes) { return (bytes + 255) / 256 * 256; }
  static constexpr i64 SCALES = next((i64)N * K * BITS / 8), ZEROS = SCALES + next((i64)N * GROUPS * 2);

  // A lane reads the scales of four intervals at once, which are those of BATCH steps.
  static constexpr int INTERVAL = GROUP < WARP_K ? GROUP : WARP_K, INTERVALS = WARP_K / INTERVAL, BATCH = 4 / INTERVALS;

  __device__ static constexpr int first_unit(int block) { return (int)((i64)block * UNITS / BLOCKS); }
  __device__ static constexpr int block_of(int unit) { return (int)(((i64)(unit + 1) * BLOCKS - 1) / UNITS); }
  __device__ static constexpr int first_block(int tile) { return block_of(tile * STEPS); }
  __device__ static constexpr int parts(int tile) { return block_of((tile + 1) * STEPS - 1) - first_block(tile) + 1; }
  __device__ static constexpr int most_parts() {
    int most = 1;
    for (int tile = 0; tile < TILES; ++tile) most = parts(tile) > most ? parts(tile) : most;
    return most;
  }

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
// A lane copies pieces for others: lane 4 * g + t copies piece t of columns g and g + 8 of the warp, and reads word t of
// every piece of these columns.
template <auto... SIZES>
struct Stream<QuantizedPlan<SIZES...>> {
  using P = QuantizedPlan<SIZES...>;
  static constexpr bool ALIGNED = P::K % P::K_LANES == 0 && P::N % P::TILE == 0;
  static constexpr i64 COLUMN_BYTES = (i64)P::K * P::BITS / 8, STEP_BYTES = P::K_LANES * P::BITS / 8;
  static constexpr int STEP_PLACES = 2 * THREADS;
  const unsigned char *weights, *source;
  const Words words;  // this lane's first word of the first step
  Place place;
  int left, step, slot, k, column;
  const u16* scale_row;                // scales of column g
  const unsigned char* zero_row;       // its zero points
  int group;                           // of this lane's interval of the next scales
  u32 scales[2];                       // of columns g and g + 8: scale, zero point in the upper half

  __device__ Stream(const u16* weights, uint4* ring, int first, int count)
      : weights(reinterpret_cast<const unsigned char*>(weights)),
        words(reinterpret_cast<u32*>(ring + threadIdx.x / 32 * 64 + threadIdx.x % 32 / 4) + threadIdx.x % 4),
        place(ring + threadIdx.x / 32 * 64 + threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4),
        left(count), step(first % P::STEPS), slot(0) {
    k = (k_warp() * 4 + (int)threadIdx.x % 4) * P::PIECE;
    column = first / P::STEPS * P::TILE + column_in_tile();
    source = this->weights + column * COLUMN_BYTES + k * P::BITS / 8 + step * STEP_BYTES;
    aim_scales(first / P::STEPS, step);
    read_scales();
#pragma unroll
    for (int i = 0; i < P::DEPTH - 1; ++i) next();
  }

  __device__ static int column_in_tile() { return threadIdx.x / 32 % P::COLUMN_WARPS * 16 + threadIdx.x % 32 / 4; }
  __device__ static int k_warp() { return threadIdx.x / 32 / P::COLUMN_WARPS; }

  // Wait for the oldest step's copies of all lanes, start others, and return this lane's first word of the step.
  __device__ Words take() {
    wait_for_copies<P::DEPTH - 2>();
    wait_for_lanes();
    next();
    return words.plus(slot * STEP_PLACES);
  }

  // Start the copies of a step; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (left > 0) {
      if constexpr (ALIGNED) {
        copy_async(place, source);
        copy_async_at<32, 8 * COLUMN_BYTES>(place, source);
      } else {
        const bool inside = k + step * P::K_LANES < P::K && column < P::N;
        copy_async(place, source, inside);
        copy_async(place.plus(32), source + 8 * COLUMN_BYTES, inside);
      }
      source += STEP_BYTES, --left;
      if (++step == P::STEPS)
        step = 0, column += P::TILE, source += P::TILE * COLUMN_BYTES - P::STEPS * STEP_BYTES;
    }
    commit_copies();
    const bool last = ++slot == P::DEPTH;
    place.advance(last ? -(P::DEPTH - 1) * STEP_PLACES : STEP_PLACES);
    if (last) slot = 0;
  }

  // The next scales are those of BATCH steps from `step` on; lane t of a column has those of interval t.
  __device__ void aim_scales(int tile, int step) {
    const int interval = threadIdx.x % 4;
    step += interval / P::INTERVALS;
    group = ((step * P::K_WARPS + k_warp()) * P::WARP_K + interval % P::INTERVALS * P::INTERVAL) / P::GROUP;
    const int column = tile * P::TILE + column_in_tile();
    const i64 row = column < P::N ? column : 0;
    scale_row = reinterpret_cast<const u16*>(weights + P::SCALES) + row * P::GROUPS;
    zero_row = weights + P::ZEROS + row * P::ZERO_BYTES;
  }

  // Start to read scales. Intervals behind the last one, which are multiplied by zeros, have the last one's.
  __device__ void read_scales() {
    const int at = group < P::GROUPS ? group : P::GROUPS - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = read_once(scale_row + at + i * 8 * P::GROUPS);
      if constexpr (P::ZERO_POINTS) {
        const u32 byte = read_once(zero_row + at * P::BITS / 8 + i * 8 * P::ZERO_BYTES);
        scales[i] |= (P::BITS == 8 ? byte : byte >> at % 2 * 4 & 15) << 16;
      }
    }
    group += P::BATCH * P::K_LANES / P::GROUP;
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
  float low[4] = {}, high[4] = {}, of_x[2][4] = {};

  // Add a piece; x: its values of row g.
  __device__ void add(const Numbers& one, const Numbers& other, uint4 x) {
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    const u32 first[4] = {one.pairs[0], other.pairs[0], one.pairs[1], other.pairs[1]};
    mma(low, first, x.x, x.y);
    mma(of_x[0], ones, x.x, x.y);
    if constexpr (BITS == 4) {
      const u32 second[4] = {one.pairs[2], other.pairs[2], one.pairs[3], other.pairs[3]};
      mma(Numbers::HIGH == 1.0f ? low : high, second, x.z, x.w);
      mma(of_x[1], ones, x.z, x.w);
    }
  }

  __device__ float total(int i, float zero) const {
    const float sum = Numbers::HIGH == 1.0f ? low[i] : low[i] + high[i] * (1.0f / Numbers::HIGH);
    return Numbers::FACTOR * sum - zero * (of_x[0][i] + of_x[1][i]);
  }
};

// What a lane multiplies in a step.
template <class P>
struct QuantizedStep {
  static constexpr int ROW_TILES = (ROWS + 7) / 8;
  u32 low[4], high[4];  // words of columns g and g + 8, by piece
  uint4 x[ROW_TILES][4];

  // words, first: this lane's first word and first values of x in the step.
  __device__ void read(Words words, Words first) {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      low[piece] = words.read(8 * piece), high[piece] = words.read(8 * piece + 32);
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
  }
};

// A warp's sums over some steps.
template <class P>
struct QuantizedSums {
  static constexpr int ROW_TILES = QuantizedStep<P>::ROW_TILES, PER_INTERVAL = 4 / P::INTERVALS;
  float sums[ROW_TILES][4] = {};

  // Add a step. scales: of its intervals, in the lanes from `source` on.
  __device__ void add(const QuantizedStep<P>& step, const u32 (&scales)[2], int source) {
#pragma unroll
    for (int interval = 0; interval < P::INTERVALS; ++interval) {
      float factors[2], zeros[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 both = __shfl_sync(~0u, scales[half], source + interval);
        factors[half] = to_float((u16)both);
        zeros[half] = Unpacked<P::BITS>::OFFSET + (P::ZERO_POINTS ? (float)(both >> 16) : 1 << (P::BITS - 1));
      }
      IntervalSums<P::BITS> parts[ROW_TILES];
#pragma unroll
      for (int piece = interval * PER_INTERVAL; piece < (interval + 1) * PER_INTERVAL; ++piece) {
        const Unpacked<P::BITS> one(step.low[piece]), other(step.high[piece]);
#pragma unroll
        for (int tile = 0; tile < ROW_TILES; ++tile) parts[tile].add(one, other, step.x[tile][piece]);
      }
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] += factors[i / 2] * parts[tile].total(i, zeros[i / 2]);
    }
  }

  // Hand out the sums of a tile; `multiply` of gemv.cuh tells what `finish` gets.
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

// Multiply this block's share. A lane reads a step's values while it multiplies those of the step before.
template <class P, class Finish>
__device__ inline void multiply_quantized(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  constexpr int X_PLACES = P::K_LANES * ROWS / 8;  // of a step
  const int lane = threadIdx.x % 32, row = lane / 4 % (ROWS < 8 ? ROWS : 8);
  const int k = Stream<P>::k_warp() * P::WARP_K + lane % 4 * (32 / P::BITS);
  const Words x_begin(shared.x + P::x_place(k, row));
  int step = first % P::STEPS, tile = first / P::STEPS, ahead = step, of_batch = P::BATCH;
  Words x = x_begin.plus(P::POSITIONS == P::STEPS ? step * X_PLACES : 0);
  auto read = [&](QuantizedStep<P>& values) {
    values.read(stream.take(), x);
    x = x.plus(X_PLACES);
    if (P::POSITIONS == P::STEPS && ++ahead == P::STEPS) ahead = 0, x = x_begin;
  };
  QuantizedStep<P> values;
  if constexpr (QUANTIZED_AHEAD) read(values);
  bool from_start = step == 0;
  u32 scales[2];
  QuantizedSums<P> sums;
#pragma unroll 1
  for (; count > 0; --count) {
    if (of_batch == P::BATCH) {
      scales[0] = stream.scales[0], scales[1] = stream.scales[1], of_batch = 0;
      if (step + P::BATCH >= P::STEPS) stream.aim_scales(tile + 1, 0);
      stream.read_scales();
    }
    const int source = (lane & ~3) + of_batch++ * P::INTERVALS;
    if constexpr (QUANTIZED_AHEAD) {
      const QuantizedStep<P> now = values;
      if (count > 1) read(values);
      sums.add(now, scales, source);
    } else {
      read(values);
      sums.add(values, scales, source);
    }
    if (++step == P::STEPS || count == 1) {
      sums.end(shared, tile++, from_start, finish);
      sums = {}, step = 0, from_start = true, of_batch = P::BATCH;
    }
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
