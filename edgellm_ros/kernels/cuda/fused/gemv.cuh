// SPDX-License-Identifier: Apache-2.0
// Products of a few rows x with a matrix [K,N], N contiguous, for which memory bandwidth is the limit.
//
// Columns are cut into tiles. A block's threads take 8 columns of a tile each and different k; a block reads
// THREADS / (TILE / 8) rows of a tile per step. All steps of all tiles are in one order, of which each block takes an
// equal share, so a tile may begin in one block and end in another: each of them has a part of the tile's sums.
// Weights reach shared memory asynchronously, STAGES steps ahead, also across tiles; the first STAGES steps are on
// their way before the kernel waits for the kernels before. A thread reads only what it copied itself.

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, bool WHOLE_ = false>
struct Plan {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_;
  static constexpr bool WHOLE = WHOLE_;  // blocks take whole tiles
  static constexpr int COLUMN_LANES = TILE / 8, K_LANES = THREADS / COLUMN_LANES;
  static constexpr int STEPS = (K + K_LANES - 1) / K_LANES;  // of a tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = WHOLE ? (TILES + BLOCKS - 1) / BLOCKS * STEPS : (UNITS + BLOCKS - 1) / BLOCKS;
  // x of so many steps is in shared memory: of all, or of those of one block that have different k.
  static constexpr int POSITIONS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int SHARED = 16 * STAGES * THREADS + 2 * POSITIONS * K_LANES * ROWS + 4 * (THREADS / 32) * TILE * ROWS;

  __device__ static constexpr int first_unit(int block) {
    return WHOLE ? (int)((i64)block * TILES / BLOCKS) * STEPS : (int)((i64)block * UNITS / BLOCKS);
  }
  __device__ static constexpr int block_of(int unit) { return (int)(((i64)(unit + 1) * BLOCKS - 1) / UNITS); }
  __device__ static constexpr int first_block(int tile) { return block_of(tile * STEPS); }
  __device__ static constexpr int parts(int tile) { return block_of((tile + 1) * STEPS - 1) - first_block(tile) + 1; }
  __device__ static constexpr int most_parts() {
    int most = 1;
    for (int tile = 0; tile < TILES; ++tile) most = parts(tile) > most ? parts(tile) : most;
    return most;
  }
};

// Sums of a product [parts,ROWS,N] that its blocks left in parts, summed in the order of k.
template <class P, int PARTS>
__device__ inline float sum_of_parts(const float* parts, int row, int column) {
  const int count = P::parts(column / P::TILE);
  float sum = 0;
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    if (part < count) sum += load(parts + (part * ROWS + row) * P::N + column);
  return sum;
}

// The weights of one thread on their way to shared memory.
template <class P>
struct Stream {
  const u16* weights;
  uint4* ring;  // this thread's slots, THREADS apart
  int left, step, tile, slot;

  __device__ Stream(const u16* weights, uint4* ring, int first, int count)
      : weights(weights), ring(ring + threadIdx.x), left(count), step(first % P::STEPS), tile(first / P::STEPS), slot(0) {}

  // Start the next copy; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (left > 0) {
      const int k = step * P::K_LANES + threadIdx.x / P::COLUMN_LANES;
      const int column = tile * P::TILE + threadIdx.x % P::COLUMN_LANES * 8;
      const bool valid = k < P::K && column < P::N;
      const u16* source = weights + (valid ? (size_t)((u32)k * P::N + column) : 0);
      copy_async(ring + slot * THREADS, source, valid);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      --left;
      if (++step == P::STEPS) step = 0, ++tile;
    }
    commit_copies();
  }
};

template <int COUNT>
__device__ inline void write_x(u16* x, const float (&values)[COUNT]) {
  if constexpr (COUNT == 1) {
    x[0] = from_float(values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i)
      reinterpret_cast<u32*>(x)[i] = from_float(values[2 * i]) | (u32)from_float(values[2 * i + 1]) << 16;
  }
}

template <int COUNT>
__device__ inline void read_x(float (&values)[COUNT], const u16* x) {
  if constexpr (COUNT == 1) {
    values[0] = to_float(x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const float2 pair = to_floats(reinterpret_cast<const u32*>(x)[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
}

__device__ inline void unpack(float (&values)[8], uint4 bits) {
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

__device__ inline float dot(const float (&a)[8], const float (&b)[8]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += a[j] * b[j];
  return sum;
}

// Where a kernel's dynamic shared memory is: ring, x [POSITIONS * K_LANES, ROWS], sums of the warps.
template <class P>
struct Shared {
  uint4* ring;
  u16* x;
  float* sums;  // [warps,ROWS,TILE], also for the sums of norms

  __device__ explicit Shared(uint4* memory)
      : ring(memory),
        x(reinterpret_cast<u16*>(memory + STAGES * THREADS)),
        sums(reinterpret_cast<float*>(x + P::POSITIONS * P::K_LANES * ROWS)) {}
};

// Multiply this block's share. `finish(tile, column in the tile, row, sum, whether it includes k = 0)`.
template <class P, class Finish>
__device__ inline void multiply(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  constexpr int WARPS = THREADS / 32, TILE = P::TILE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int k_lane = threadIdx.x / P::COLUMN_LANES, column_lane = threadIdx.x % P::COLUMN_LANES;
  const uint4* ring = shared.ring + threadIdx.x;
  float sums[ROWS][8] = {};
  int step = first % P::STEPS, tile = first / P::STEPS, slot = 0, position = P::POSITIONS == P::STEPS ? step : 0;
  bool from_start = step == 0;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<STAGES - 1>();
    float weights[8], x[ROWS];
    unpack(weights, ring[slot * THREADS]);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    read_x(x, shared.x + (position * P::K_LANES + k_lane) * ROWS);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[row][j] += x[row] * weights[j];
    stream.next();
    if (++position == P::POSITIONS) position = 0;
    if (++step < P::STEPS && i + 1 < count) continue;

#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float sum = sums[row][j];
#pragma unroll
        for (int other = P::COLUMN_LANES; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (lane < P::COLUMN_LANES) shared.sums[(warp * ROWS + row) * TILE + column_lane * 8 + j] = sum;
        sums[row][j] = 0;
      }
    __syncthreads();
    for (int place = threadIdx.x; place < TILE * ROWS; place += THREADS) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += shared.sums[w * ROWS * TILE + place];
      finish(tile, place % TILE, place / TILE, sum, from_start);
    }
    __syncthreads();
    step = 0, ++tile, from_start = true;
  }
}
