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
// one group: values less zero points are exact in half precision, the scale multiplies sums in fp32. Which k a slot of the
// product has is up to the order of x in shared memory.

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, int BITS_, int GROUP_, bool ZERO_POINTS_>
struct QuantizedPlan {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_, BITS = BITS_, GROUP = GROUP_;
  static constexpr bool QUANTIZED = true, ZERO_POINTS = ZERO_POINTS_;
  static constexpr int WARPS = THREADS / 32, COLUMN_WARPS = TILE / 16, K_WARPS = WARPS / COLUMN_WARPS;
  static constexpr int PIECE = 128 / BITS, WARP_K = 4 * PIECE;  // k of a piece, and of a warp's step
  static constexpr int K_LANES = K_WARPS * WARP_K;              // k of a step
  static constexpr int STEPS = (K + K_LANES - 1) / K_LANES;     // of a tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = (UNITS + BLOCKS - 1) / BLOCKS;
  static constexpr int POSITIONS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int DEPTH = STAGES * COPIES < 6 ? 3 : STAGES * COPIES / 2;  // steps in the ring, two copies of a thread each
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
    return row ^ (ROWS >= 8 ? 2 * block & 6 : ROWS == 4 ? block & 2 : 0);
  }
  __device__ static constexpr int x_place(int k, int row) {
    const int at = k % 8, place = BITS == 8 ? at : at < 4 ? 2 * at : 2 * at - 7;
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
  const unsigned char *weights, *source;
  uint4* const ring;  // this lane's place for copies
  int left, step, slot, k, column;
  u32 scales[2];  // of columns g and g + 8: scale, zero point in the upper half

  __device__ Stream(const u16* weights, uint4* ring, int first, int count)
      : weights(reinterpret_cast<const unsigned char*>(weights)),
        ring(ring + threadIdx.x / 32 * 64 + threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4),
        left(count), step(first % P::STEPS), slot(0) {
    const int warp = threadIdx.x / 32;
    k = (warp / P::COLUMN_WARPS * 4 + (int)threadIdx.x % 4) * P::PIECE;
    column = first / P::STEPS * P::TILE + warp % P::COLUMN_WARPS * 16 + threadIdx.x % 32 / 4;
    source = this->weights + column * COLUMN_BYTES + k * P::BITS / 8 + step * STEP_BYTES;
    read_scales(first / P::STEPS, step);
#pragma unroll
    for (int i = 0; i < P::DEPTH - 1; ++i) next();
  }

  // Wait for the oldest step's copies of all lanes, start others, and return the number of the step's slot.
  __device__ int take() {
    wait_for_copies<P::DEPTH - 2>();
    wait_for_lanes();
    next();
    return slot;
  }

  // Start the copies of a step; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (left > 0) {
      const Place target(ring + slot * 2 * THREADS), other(ring + slot * 2 * THREADS + 32);
      if constexpr (ALIGNED) {
        copy_async(target, source);
        copy_async(other, source + 8 * COLUMN_BYTES);
      } else {
        const bool inside = k + step * P::K_LANES < P::K && column < P::N;
        copy_async(target, source, inside);
        copy_async(other, source + 8 * COLUMN_BYTES, inside);
      }
      source += STEP_BYTES, --left;
      if (++step == P::STEPS)
        step = 0, column += P::TILE, source += P::TILE * COLUMN_BYTES - P::STEPS * STEP_BYTES;
    }
    commit_copies();
    slot = slot + 1 < P::DEPTH ? slot + 1 : 0;
  }

  // Start to read scales for BATCH steps; lane t of a column has those of interval t. Places outside of the matrix, which
  // are multiplied by zeros, have any others.
  __device__ void read_scales(int tile, int step) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, interval = lane % 4;
    step += interval / P::INTERVALS;
    const int k = (step * P::K_WARPS + warp / P::COLUMN_WARPS) * P::WARP_K + interval % P::INTERVALS * P::INTERVAL;
    const int group = k < P::K ? k / P::GROUP : 0;
    int column = tile * P::TILE + warp % P::COLUMN_WARPS * 16 + lane / 4;
    if (column + 8 >= P::N) column = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i64 at = column + 8 * i;
      u32 value = read_once(reinterpret_cast<const u16*>(weights + P::SCALES) + at * P::GROUPS + group);
      if constexpr (P::ZERO_POINTS) {
        const u32 byte = read_once(weights + P::ZEROS + at * P::ZERO_BYTES + group * P::BITS / 8);
        value |= (P::BITS == 8 ? byte : byte >> group % 2 * 4 & 15) << 16;
      }
      scales[i] = value;
    }
  }
};

// Values of 16 bits that stand for a word's weights in A: values less the zero point, two in each.
template <class P>
struct Unpacked {
  u32 pairs[16 / P::BITS];

  // zero: zero point
  __device__ Unpacked(u32 word, u32 zero) {
    if constexpr (P::BITS == 4) {
      // the values i and i + 4 in the low bits of numbers with steps of 1 or 1/16
#if BF16
      const u32 offset = 0xc300c300u | zero * 0x10001u;  // -(128 + zero)
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = multiply_add(word >> 4 * i & 0x000f000fu | 0x43004300u, ONES, offset);
#else
      const u32 low = 0xe400e400u | zero * 0x10001u, high = 0xd400d400u | zero * 0x100010u;  // -(1024 + zero), -(64 + zero)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 shifted = word >> 8 * i;
        pairs[2 * i] = multiply_add(shifted & 0x000f000fu | 0x64006400u, ONES, low);
        pairs[2 * i + 1] = multiply_add(shifted & 0x00f000f0u | 0x64006400u, 0x2c002c00u, high);  // times 1/16
      }
#endif
    } else {
#if BF16
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - (8388608.0f + zero);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        pairs[i] = __byte_perm(__float_as_uint(values[2 * i]), __float_as_uint(values[2 * i + 1]), 0x7632);
#else
      const u32 offset = 0xe400e400u | zero * 0x10001u;
      pairs[0] = multiply_add(__byte_perm(word, 0x64646464u, 0x4140), ONES, offset);
      pairs[1] = multiply_add(__byte_perm(word, 0x64646464u, 0x4342), ONES, offset);
#endif
    }
  }
};

// Multiply this block's share; `multiply` of gemv.cuh tells what `finish` gets.
template <class P, class Finish>
__device__ inline void multiply_quantized(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  constexpr int ROW_TILES = (ROWS + 7) / 8, PER_INTERVAL = 4 / P::INTERVALS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column_warp = warp % P::COLUMN_WARPS, k_warp = warp / P::COLUMN_WARPS;
  const u32* const ring = reinterpret_cast<const u32*>(shared.ring + warp * 64 + g) + t;
  const u16* const x_begin = shared.x + k_warp * P::WARP_K * ROWS;
  int step = first % P::STEPS, tile = first / P::STEPS;
  const u16* x_now = x_begin + (P::POSITIONS == P::STEPS ? step * P::K_LANES * ROWS : 0);
  while (count > 0) {
    const bool from_start = step == 0;
    const int end = P::STEPS - step < count ? P::STEPS : step + count;
    count -= end - step;
    float sums[ROW_TILES][4] = {};
    while (step < end) {
      const u32 scales[2] = {stream.scales[0], stream.scales[1]};
      const bool last = step + P::BATCH >= end;
      stream.read_scales(last ? tile + 1 : tile, last ? 0 : step + P::BATCH);
#pragma unroll 1
      for (int i = 0; i < P::BATCH && step < end; ++i, ++step, x_now += P::K_LANES * ROWS) {
        const u32* const words = ring + stream.take() * 8 * THREADS;
#pragma unroll
        for (int interval = 0; interval < P::INTERVALS; ++interval) {
          u32 zeros[2];
          float factors[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const u32 both = __shfl_sync(~0u, scales[half], lane & ~3 | i * P::INTERVALS + interval);
            factors[half] = to_float((u16)both), zeros[half] = P::ZERO_POINTS ? both >> 16 : 1u << (P::BITS - 1);
          }
          float parts[ROW_TILES][4] = {};
#pragma unroll
          for (int piece = interval * PER_INTERVAL; piece < (interval + 1) * PER_INTERVAL; ++piece) {
            const Unpacked<P> low(words[32 * piece], zeros[0]), high(words[32 * piece + 128], zeros[1]);
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
              const int row = row_tile * 8 + g % (ROWS < 8 ? ROWS : 8), k = (4 * piece + t) * (32 / P::BITS);
              const u16* const x = x_now + P::x_place(k, row);
              if constexpr (P::BITS == 4) {
                const uint4 values = *reinterpret_cast<const uint4*>(x);
                const u32 first_a[4] = {low.pairs[0], high.pairs[0], low.pairs[1], high.pairs[1]};
                const u32 second_a[4] = {low.pairs[2], high.pairs[2], low.pairs[3], high.pairs[3]};
                mma(parts[row_tile], first_a, values.x, values.y);
                mma(parts[row_tile], second_a, values.z, values.w);
              } else {
                const uint2 values = *reinterpret_cast<const uint2*>(x);
                const u32 a[4] = {low.pairs[0], high.pairs[0], low.pairs[1], high.pairs[1]};
                mma(parts[row_tile], a, values.x, values.y);
              }
            }
          }
#pragma unroll
          for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[row_tile][i] += factors[i / 2] * parts[row_tile][i];
        }
      }
    }
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_tile * 8 + 2 * t + i % 2, at = g + i / 2 * 8;
        if (row >= ROWS) continue;
        if constexpr (P::K_WARPS == 1)
          finish(tile, column_warp * 16 + at, row, sums[row_tile][i], from_start);
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
    step = 0, ++tile;
    if constexpr (P::POSITIONS == P::STEPS) x_now = x_begin;
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
