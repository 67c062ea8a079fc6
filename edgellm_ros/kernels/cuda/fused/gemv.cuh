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
  static constexpr bool QUANTIZED = false;
  static constexpr int COLUMN_LANES = TILE / 8, K_LANES = THREADS / COLUMN_LANES;
  static constexpr int STEPS = (K + K_LANES - 1) / K_LANES;  // of a tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = WHOLE ? (TILES + BLOCKS - 1) / BLOCKS * STEPS : (UNITS + BLOCKS - 1) / BLOCKS;
  // x of so many steps is in shared memory: of all, or of those of one block that have different k.
  static constexpr int POSITIONS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int RING = STAGES * THREADS, X = POSITIONS * K_LANES * ROWS;  // places, values
  static constexpr int SHARED = 16 * RING + 2 * X + 4 * (THREADS / 32) * TILE * ROWS;

  __device__ static constexpr int x_place(int k, int row) { return k * ROWS + row; }
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

// Sum of a product [parts,ROWS,N] that its blocks left in parts, in the order of k. All parts are read at once.
template <class P, int PARTS>
__device__ inline float sum_of_parts(const float* parts, int row, int column) {
  const int count = P::parts(column / P::TILE);
  float values[PARTS], sum = 0;
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    values[part] = load(parts + ((part < count ? part : count - 1) * ROWS + row) * P::N + column);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) sum += part < count ? values[part] : 0.0f;
  return sum;
}

// The weights of one thread on their way to shared memory, in a ring of STAGES places.
template <class P>
struct Stream {
  // Every copy is inside the matrix; otherwise some threads have none in a tile's last step or in the last tile.
  static constexpr bool ALIGNED = P::K % P::K_LANES == 0 && P::N % P::TILE == 0;
  const u16* source;
  Place place;
  int left, step, slot, k, column;

  __device__ Stream(const u16* weights, uint4* ring, int first, int count)
      : place(ring + threadIdx.x), left(count), step(first % P::STEPS), slot(0) {
    k = threadIdx.x / P::COLUMN_LANES, column = first / P::STEPS * P::TILE + threadIdx.x % P::COLUMN_LANES * 8;
    source = weights + (i64)(k + step * P::K_LANES) * P::N + column;
#pragma unroll
    for (int i = 0; i < STAGES; ++i) next();
  }

  // Wait for the oldest copy and return it.
  __device__ uint4 take() const {
    wait_for_copies<STAGES - 1>();
    return place.read();
  }

  // Start a copy to the place that `take` has read; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (left > 0) {
      if constexpr (ALIGNED)
        copy_async(place, source);
      else
        copy_async(place, source, k + step * P::K_LANES < P::K && column < P::N);
      source += P::K_LANES * P::N, --left;
      if (++step == P::STEPS) step = 0, column += P::TILE, source += P::TILE - (i64)P::STEPS * P::K_LANES * P::N;
    }
    commit_copies();
    const bool last = ++slot == STAGES;
    place.advance(last ? -(STAGES - 1) * THREADS : THREADS);
    if (last) slot = 0;
  }
};

// Write the rows' values of one k.
template <class P, int COUNT>
__device__ inline void write_x(u16* all, int k, const float (&values)[COUNT]) {
  u16* const x = all + P::x_place(k, 0);
  if constexpr (P::QUANTIZED) {
#pragma unroll
    for (int row = 0; row < COUNT; ++row) all[P::x_place(k, row)] = from_float(values[row]);
  } else if constexpr (COUNT == 1) {
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
        x(reinterpret_cast<u16*>(memory + P::RING)),
        sums(reinterpret_cast<float*>(x + P::X)) {}
};

// Multiply this block's share. `finish(tile, column in the tile, row, sum, whether it includes k = 0)`.
template <class P, class Finish>
__device__ inline void multiply(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  constexpr int WARPS = THREADS / 32, TILE = P::TILE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column_lane = threadIdx.x % P::COLUMN_LANES;
  int step = first % P::STEPS, tile = first / P::STEPS;
  const u16* const x_begin = shared.x + threadIdx.x / P::COLUMN_LANES * ROWS;
  const u16* x_now = x_begin + (P::POSITIONS == P::STEPS ? step * P::K_LANES * ROWS : 0);
  while (count > 0) {
    const bool from_start = step == 0;
    float sums[ROWS][8] = {};
    int steps = P::STEPS - step < count ? P::STEPS - step : count;
    count -= steps;
#pragma unroll 1
    for (; steps > 0; --steps, x_now += P::K_LANES * ROWS) {
      float weights[8], x[ROWS];
      unpack(weights, stream.take());
      read_x(x, x_now);
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[row][j] += x[row] * weights[j];
      stream.next();
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float sum = sums[row][j];
#pragma unroll
        for (int other = P::COLUMN_LANES; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (lane < P::COLUMN_LANES) shared.sums[(warp * ROWS + row) * TILE + column_lane * 8 + j] = sum;
      }
    __syncthreads();
    for (int place = threadIdx.x; place < TILE * ROWS; place += THREADS) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += shared.sums[w * ROWS * TILE + place];
      finish(tile, place % TILE, place / TILE, sum, from_start);
    }
    __syncthreads();
    step = 0, ++tile;
    if constexpr (P::POSITIONS == P::STEPS) x_now = x_begin;
  }
}
