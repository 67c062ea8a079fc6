// SPDX-License-Identifier: Apache-2.0
// Products of a few rows x with a matrix [K,N], N contiguous, for which memory bandwidth is the limit.
//
// Columns are cut into tiles. A block's threads take 8 columns of a tile each and different k; a block reads K_LANES
// rows of a tile per step. All steps of all tiles are in one order, of which each block takes an equal share, so a tile
// may begin in one block and end in another: each of them has a part of the tile's sums.
// Weights reach shared memory asynchronously, STAGES steps ahead, also across tiles; the first STAGES steps are on
// their way before the kernel waits for the kernels before.
//
// TENSOR_CORES: products are computed on tensor cores. A warp takes 64 columns and 16 k per step, four copies of each thread; the
// weights are the left side of `mma` (16 columns, 16 k), eight rows of x the right side. Otherwise a thread makes one
// copy per step, and multiplies only what it copied itself.
//
// DIRECT: x, which a kernel of its own has written in the order in which the lanes need it, stays in global memory. Each
// warp reads it into registers X_AHEAD steps ahead, so no x takes part of shared memory and no warp waits for others.

constexpr int X_AHEAD = 3;
// Steps of the ring that are on their way at once before the kernel waits. Small kernels run at that time, and all that
// they read would come behind the whole ring.
constexpr int FILLED = STARTS_EARLY && FILLED_AT_ONCE < STAGES ? FILLED_AT_ONCE : STAGES;
constexpr int WARP_COLUMNS = 64, WARP_K = 16;  // of a warp's step on tensor cores
constexpr int COPIES = TENSOR_CORES ? 4 : 1;            // of a thread per step
// x in shared memory: [k,ROWS], with tensor cores [k / 16,ROWS,16]; there, gaps spread writes over the banks.
constexpr int X_GROUP = TENSOR_CORES ? WARP_K : 1, X_STRIDE = X_GROUP * (TENSOR_CORES && ROWS >= 4 ? ROWS + 1 : ROWS);
// Sums of a warp in shared memory: [SUMS_ROWS,TILE], with tensor cores [SUMS_ROWS,64 and a gap], 8 rows after 8.
constexpr int SUMS_ROWS = TENSOR_CORES && ROWS > 8 ? 8 : ROWS, SUMS_STRIDE = WARP_COLUMNS + 4;

// Which units of a plan, the steps of all tiles in one order, a block has.
template <class P>
struct Shares {
  __device__ static constexpr int first_unit(int block) {
    static_assert((u64)P::UNITS * (P::BLOCKS + 1) >> 32 == 0);
    return P::WHOLE ? (u32)block * P::TILES / P::BLOCKS * P::STEPS : (u32)block * P::UNITS / P::BLOCKS;
  }
  __device__ static constexpr int block_of(int unit) { return ((u32)(unit + 1) * P::BLOCKS - 1) / P::UNITS; }
  __device__ static constexpr int first_block(int tile) { return block_of(tile * P::STEPS); }
  __device__ static constexpr int parts(int tile) { return block_of((tile + 1) * P::STEPS - 1) - first_block(tile) + 1; }
  __device__ static constexpr int most_parts() {
    int most = 1;
    for (int tile = 0; tile < P::TILES; ++tile) most = parts(tile) > most ? parts(tile) : most;
    return most;
  }
};

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, bool WHOLE_ = false, bool DIRECT_ = false>
struct Plan : Shares<Plan<K_, N_, TILE_, BLOCKS_, ALL_OF_X, WHOLE_, DIRECT_>> {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_;
  static constexpr bool WHOLE = WHOLE_;  // blocks take whole tiles
  static constexpr bool QUANTIZED = false, ORDERED = false, DIRECT = DIRECT_;
  static constexpr int COLUMN_LANES = TILE / 8, K_LANES = THREADS / COLUMN_LANES * COPIES;
  static constexpr int STEPS = (K + K_LANES - 1) / K_LANES;  // of a tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = WHOLE ? (TILES + BLOCKS - 1) / BLOCKS * STEPS : (UNITS + BLOCKS - 1) / BLOCKS;
  // x of so many steps is in shared memory: of all, or of those of one block that have different k.
  static constexpr int POSITIONS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int RING = STAGES * COPIES * THREADS;             // places
  static constexpr int X = DIRECT ? 0 : POSITIONS * K_LANES / X_GROUP * X_STRIDE;  // values in shared memory
  static constexpr int X_ROOM = X;
  static constexpr int SUMS = THREADS / 32 * SUMS_ROWS * (TENSOR_CORES ? SUMS_STRIDE : TILE);
  static constexpr int SHARED = 16 * RING + 2 * X + 4 * SUMS;
  static_assert(!TENSOR_CORES || TILE % WARP_COLUMNS == 0 && THREADS / 32 % (TILE / WARP_COLUMNS) == 0);
  static_assert(!DIRECT || TENSOR_CORES && K % WARP_K == 0);

  // DIRECT: [k / 16,row / 16] of what 32 lanes have of 16 k and up to 16 rows, up to 8 values of each lane.
  __device__ static constexpr int x_place(int k, int row) {
    if (!DIRECT) return k / X_GROUP * X_STRIDE + row * X_GROUP + k % X_GROUP;
    const int first = (k / WARP_K * ROWS + row / 16 * 16) * WARP_K;
    return first + (row % 8 * 4 + k % WARP_K / 4) * (ROWS > 8 ? 8 : 4) + row / 8 % 2 * 4 + k % 4;
  }
  __device__ static constexpr int x_values(int k) { return k / X_GROUP * X_STRIDE; }  // before this k
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

// The same of 4 columns beside each other, the first of which is a multiple of 4.
template <class P, int PARTS>
__device__ inline void sums_of_parts(float (&sums)[4], const float* parts, int row, int column) {
  const int count = P::parts(column / P::TILE);
  uint4 values[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; ++part)
    values[part] = load(reinterpret_cast<const uint4*>(
        parts + ((i64)(part < count ? part : count - 1) * ROWS + row) * P::N + column));
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = 0;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const u32 words[4] = {values[part].x, values[part].y, values[part].z, values[part].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += part < count ? __uint_as_float(words[i]) : 0.0f;
  }
}

// The threads' shares of a step. With tensor cores, lanes 8 * r to 8 * r + 7 copy 128 bytes of row 4 * copy + r of
// their warp's 16; these lie in shared memory so that neither writing nor reading whole matrices makes lanes wait.
template <class P>
struct Share {
  static constexpr int GROUPS = P::TILE / WARP_COLUMNS;  // warps beside each other in a tile
  int k, column;                                         // of the first copy, in the step
  int writes[COPIES], reads[COPIES];                     // places of copies and of matrices in the step

  __device__ Share() {
    if constexpr (TENSOR_CORES) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, eighth = lane % 8, matrix = lane / 8;
      k = warp / GROUPS * WARP_K + lane / 8, column = warp % GROUPS * WARP_COLUMNS + eighth * 8;
      // In matrices 0 and 1, rows 2t and 2t+1 are k 4t and 4t+1, in 2 and 3 they are 4t+2 and 4t+3; 1 and 3 have the
      // columns right of 0 and 2.
      const int row = eighth / 2 * 4 + eighth % 2 + matrix / 2 * 2;
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        writes[i] = warp * 32 * COPIES + (4 * i + lane / 8) * 8 + (eighth ^ (2 * i + lane / 8 % 2));
        reads[i] = warp * 32 * COPIES + row * 8 + ((2 * i + matrix % 2) ^ eighth);
      }
    } else {
      k = threadIdx.x / P::COLUMN_LANES, column = threadIdx.x % P::COLUMN_LANES * 8;
      writes[0] = reads[0] = threadIdx.x;
    }
  }
};

// The weights of a block on their way to shared memory, in a ring of STAGES steps.
template <class P>
struct Stream {
  // Every copy is inside the matrix; otherwise some threads have none in a tile's last step or in the last tile.
  static constexpr bool ALIGNED = P::K % P::K_LANES == 0 && P::N % P::TILE == 0;
  Share<P> share;
  const u16* source;
  Place place;
  int left, step, slot, column;

  __device__ Stream(const u16* weights, uint4* ring, int first, int count)
      : place(ring), left(count), step(first % P::STEPS), slot(0) {
    column = first / P::STEPS * P::TILE + share.column;
    source = weights + (i64)(share.k + step * P::K_LANES) * P::N + column;
    start_next_kernel();
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      if (i >= FILLED) wait_for_copies<FILLED - 1>();
      next();
    }
  }

  // Wait for the oldest step and return this thread's copy.
  __device__ uint4 take() const {
    wait_for_copies<STAGES - 1>();
    return place.plus(share.reads[0]).read();
  }

  // Wait for the oldest step and read the warp's share of it: left sides of `mma`, 16 columns each.
  __device__ void take(u32 (&weights)[COPIES][4]) const {
    wait_for_copies<STAGES - 1>();
    wait_for_lanes();
#pragma unroll
    for (int i = 0; i < COPIES; ++i) load_matrices(weights[i], place.plus(share.reads[i]));
    wait_for_lanes();
  }

  // Start copies to the places that `take` has read; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (left > 0) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const Place target = place.plus(share.writes[i]);
        if constexpr (ALIGNED)
          copy_async(target, source + (i64)i * 4 * P::N);
        else
          copy_async(target, source + (i64)i * 4 * P::N,
                     share.k + 4 * i + step * P::K_LANES < P::K && column < P::N);
      }
      source += P::K_LANES * P::N, --left;
      if (++step == P::STEPS) step = 0, column += P::TILE, source += P::TILE - (i64)P::STEPS * P::K_LANES * P::N;
    }
    commit_copies();
    const bool last = ++slot == STAGES;
    place.advance((last ? 1 - STAGES : 1) * COPIES * THREADS);
    if (last) slot = 0;
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

// Where a kernel's dynamic shared memory is: ring, x, sums of the warps.
template <class P>
struct Shared {
  uint4* ring;
  u16* x;
  float* sums;  // also for the sums of norms
  const u16* ready;  // DIRECT: x in global memory

  __device__ explicit Shared(uint4* memory, const u16* ready = nullptr)
      : ready(ready),
        ring(memory),
        x(reinterpret_cast<u16*>(memory + P::RING)),
        sums(reinterpret_cast<float*>(x + P::X_ROOM)) {}
};

// A lane's x of a step: of 16 k and rows g, g + 8 and so on, lane 4 * g + t has k 4t to 4t + 3.
constexpr int ROWS_OF_8 = (ROWS + 7) / 8;
struct LaneX {
  uint2 words[ROWS_OF_8];
};

// x of a block's steps, one after the other, in shared memory.
template <class P>
struct SharedX {
  static constexpr int X_STEP = P::K_LANES / X_GROUP * X_STRIDE;
  const u16 *const begin, *now;

  __device__ SharedX(const Shared<P>& shared, int first_x, int step)
      : begin(shared.x + first_x), now(begin + (P::POSITIONS == P::STEPS ? step * X_STEP : 0)) {}

  __device__ LaneX take() {
    LaneX x;
#pragma unroll
    for (int rows = 0; rows < ROWS_OF_8; ++rows)
      x.words[rows] = *reinterpret_cast<const uint2*>(now + rows * 8 * X_GROUP);
    now += X_STEP;
    return x;
  }

  template <class Sums>
  __device__ void add_steps(Sums& sums, Stream<P>& stream, int steps) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      if constexpr (TENSOR_CORES)
        sums.add(stream, take());
      else
        sums.add(stream, now), now += X_STEP;
    }
  }

  __device__ void begin_tile() {
    if constexpr (P::POSITIONS == P::STEPS) now = begin;
  }
};

// The same in global memory.
template <class P>
struct DirectX {
  static constexpr int GROUPS = P::TILE / WARP_COLUMNS, EACH = ROWS > 8 ? 8 : 4;
  static constexpr int STEP = P::K_LANES * ROWS;  // values
  const u16* const begin;
  int step;
  LaneX ahead[X_AHEAD];

  __device__ DirectX(const Shared<P>& shared, int, int step)
      : begin(shared.ready + threadIdx.x / 32 / GROUPS * WARP_K * ROWS + threadIdx.x % 32 % (ROWS < 8 ? 4 * ROWS : 32) * EACH),
        step(step) {
    read_ahead();
  }

  __device__ void read_ahead() {
#pragma unroll
    for (int i = 0; i < X_AHEAD; ++i) ahead[i] = read();
  }

  __device__ LaneX read() {
    const int group = step * (P::K_LANES / WARP_K) + (int)threadIdx.x / 32 / GROUPS;
    const bool inside = P::K % P::K_LANES == 0 || group < P::K / WARP_K;
    const u16* const source = begin + step * STEP;
    LaneX x = {};
    if constexpr (ROWS > 8) {
#pragma unroll
      for (int rows = 0; rows < ROWS_OF_8; rows += 2) {
        const uint4 words = inside ? load(reinterpret_cast<const uint4*>(source + rows * 8 * WARP_K)) : uint4{0, 0, 0, 0};
        x.words[rows] = {words.x, words.y}, x.words[rows + 1] = {words.z, words.w};
      }
    } else if (inside) {
      x.words[0] = load(reinterpret_cast<const uint2*>(source));
    }
    if (++step == P::STEPS) step = 0;
    return x;
  }

  // A register that waits for a read cannot be moved, so each step of X_AHEAD has its own.
  template <class Sums>
  __device__ void add_steps(Sums& sums, Stream<P>& stream, int steps) {
#pragma unroll 1
    for (; steps > 0; steps -= X_AHEAD) {
#pragma unroll
      for (int i = 0; i < X_AHEAD; ++i) {
        if (i > 0 && i >= steps) break;
        sums.add(stream, ahead[i]);
        ahead[i] = read();
      }
    }
  }

  __device__ void begin_tile() { step = 0, read_ahead(); }
};

template <class P, bool>
struct XOf {
  using Type = SharedX<P>;
};
template <class P>
struct XOf<P, true> {
  using Type = DirectX<P>;
};

// A thread's sums of some steps of a tile, without tensor cores. write(out, first row): the warp's sums of SUMS_ROWS rows;
// total(sums, column, row): the sum of all warps, of a row of these.
template <class P>
struct ThreadSums {
  float sums[ROWS][8] = {};

  __device__ static int first_x() { return threadIdx.x / P::COLUMN_LANES * ROWS; }

  __device__ void add(Stream<P>& stream, const u16* x_now) {
    float weights[8], x[ROWS];
    unpack(weights, stream.take());
    read_x(x, x_now);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[row][j] += x[row] * weights[j];
    stream.next();
  }

  __device__ void write(float* out, int) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column_lane = threadIdx.x % P::COLUMN_LANES;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float sum = sums[row][j];
#pragma unroll
        for (int other = P::COLUMN_LANES; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
        if (lane < P::COLUMN_LANES) out[(warp * ROWS + row) * P::TILE + column_lane * 8 + j] = sum;
      }
  }

  __device__ static float total(const float* sums, int column, int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) sum += sums[(w * ROWS + row) * P::TILE + column];
    return sum;
  }
};

// The same with tensor cores. Fewer than 8 rows of x are multiplied several times.
template <class P>
struct MatrixSums {
  static constexpr int GROUPS = Share<P>::GROUPS;
  float sums[ROWS_OF_8][COPIES][4] = {};  // of rows 2t and 2t+1: column 16 * copy + g, then that right of it by 8

  __device__ static int first_x() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp / GROUPS * X_STRIDE + lane / 4 % ROWS * X_GROUP + lane % 4 * 4;
  }

  __device__ void add(Stream<P>& stream, const LaneX& x) {
    u32 weights[COPIES][4];
    stream.take(weights);
    stream.next();
#pragma unroll
    for (int rows = 0; rows < ROWS_OF_8; ++rows)
#pragma unroll
      for (int i = 0; i < COPIES; ++i) mma(sums[rows][i], weights[i], x.words[rows].x, x.words[rows].y);
  }

  __device__ void write(float* out, int first_row) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < COPIES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = lane % 4 * 2 + j % 2, column = 16 * i + j / 2 * 8 + lane / 4;
        if (row < ROWS) out[(warp * SUMS_ROWS + row) * SUMS_STRIDE + column] = sums[first_row / 8][i][j];
      }
  }

  __device__ static float total(const float* sums, int column, int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w += GROUPS)
      sum += sums[((w + column / WARP_COLUMNS) * SUMS_ROWS + row) * SUMS_STRIDE + column % WARP_COLUMNS];
    return sum;
  }
};

template <class P, bool>
struct SumsOf {
  using Type = ThreadSums<P>;
};
template <class P>
struct SumsOf<P, true> {
  using Type = MatrixSums<P>;
};

// Multiply this block's share. `finish(tile, column in the tile, row, sum, whether it includes k = 0)`.
template <class P, class Finish>
__device__ inline void multiply(const Shared<P>& shared, Stream<P>& stream, int first, int count, Finish finish) {
  using Sums = typename SumsOf<P, TENSOR_CORES>::Type;
  constexpr int TILE = P::TILE;
  int step = first % P::STEPS, tile = first / P::STEPS;
  typename XOf<P, P::DIRECT>::Type x(shared, Sums::first_x(), step);
  while (count > 0) {
    const bool from_start = step == 0;
    Sums sums;
    const int steps = P::STEPS - step < count ? P::STEPS - step : count;
    count -= steps;
    x.add_steps(sums, stream, steps);
    if (count > 0) x.begin_tile();
#pragma unroll
    for (int first_row = 0; first_row < ROWS; first_row += SUMS_ROWS) {
      sums.write(shared.sums, first_row);
      __syncthreads();
      for (int place = threadIdx.x; place < TILE * SUMS_ROWS; place += THREADS) {
        const int column = place % TILE, row = place / TILE;
        finish(tile, column, first_row + row, Sums::total(shared.sums, column, row), from_start);
      }
      __syncthreads();
    }
    step = 0, ++tile;
  }
}

// Write x from row `first` on, each value by one thread. value(row, k, place): place counts a thread's values; it is also
// called for values that there are not, with others' row and k, so that reads for several values are on their way at once.
template <class P, class Value>
__device__ inline void fill_x(u16* x, int first, int rows, Value value) {
  constexpr int WIDTH = P::POSITIONS * P::K_LANES, ALL = P::STEPS * P::K_LANES;
  constexpr int COUNT = (WIDTH * ROWS + THREADS - 1) / THREADS, AT_ONCE = COUNT < 4 ? COUNT : 4;
#pragma unroll 1
  for (int base = 0; base < COUNT; base += AT_ONCE) {
    float values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int place = threadIdx.x + (base + i) * THREADS, row = place / WIDTH, k = (first + place % WIDTH) % ALL;
      values[i] = value(row < rows ? row : 0, k < P::K ? k : 0, base + i);
      if (row >= rows || k >= P::K) values[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int place = threadIdx.x + (base + i) * THREADS;
      if (place < WIDTH * ROWS) x[P::x_place(place % WIDTH, place / WIDTH)] = from_float(values[i]);
    }
  }
}

// Copy x from memory in the same order, where a kernel of its own has written it, from row `first` on.
template <class P>
__device__ inline void copy_x(u16* x, const u16* source, int first) {
  constexpr int ALL = P::x_values(P::STEPS * P::K_LANES) / 8, INSIDE = P::x_values(P::K) / 8;
  const int begin = P::x_values(first) / 8;
#pragma unroll 8
  for (int place = threadIdx.x; place < P::X / 8; place += THREADS) {
    const int from = begin + place < ALL ? begin + place : begin + place - ALL;
    reinterpret_cast<uint4*>(x)[place] =
        from < INSIDE ? load(reinterpret_cast<const uint4*>(source) + from) : uint4{0, 0, 0, 0};
  }
}

// Leave a block's part of a product at [part,ROWS,N].
template <class P>
__device__ inline void leave_part(float* parts, int tile, int at, int row, float sum) {
  const int column = tile * P::TILE + at, part = (int)blockIdx.x - P::first_block(tile);
  if (column < P::N) parts[(part * ROWS + row) * P::N + column] = sum;
}
