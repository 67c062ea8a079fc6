// SPDX-License-Identifier: Apache-2.0
// GEMV for 1 to 16 rows: x [ROWS,K] times weights [K,N] (N contiguous), bound by memory bandwidth.
//
// Stream-K: the flattened (tile, k step) iteration space is split evenly over the CTAs, so a tile may begin in one
// CTA and end in another. Each CTA stores its partial sum of such a tile; the consumer adds the partials in the order
// of k.
// Weights go to smem by cp.async, STAGES steps ahead, also across tiles. The first steps are issued before pdl_wait:
// weights do not depend on earlier kernels.
//
// TENSOR_CORES: a warp computes 64 columns x 16 k per step, four cp.async of 16 bytes per thread. The weights are
// operand A of mma.m16n8k16 (16 columns x 16 k), eight rows of x operand B. Without tensor cores a thread copies 16
// bytes per step and multiplies only what it copied itself, so no barrier is needed.
//
// X_IN_GMEM: x was written by a prep kernel in the order in which lanes read it, and stays in global memory. Each
// warp reads its B fragments into registers X_PREFETCH steps ahead: no smem for x, no barrier.

#pragma once

#include "primitives.cuh"

constexpr int X_PREFETCH = 3;
// cp.async groups in flight at once before pdl_wait. Not the whole ring: the loads of the small kernels that still run
// would queue behind it.
constexpr int PREFETCHED = HAS_PDL && PREFETCH_STEPS < STAGES ? PREFETCH_STEPS : STAGES;
constexpr int WARP_COLUMNS = 64, WARP_K = 16;  // per warp and step, with tensor cores
constexpr int COPIES = TENSOR_CORES ? 4 : 1;   // cp.async of 16 bytes per thread and step
// x in smem: [k,ROWS]; with tensor cores [k / 16,ROWS,16], padded against bank conflicts.
constexpr int X_GROUP = TENSOR_CORES ? WARP_K : 1, X_STRIDE = X_GROUP * (TENSOR_CORES && ROWS >= 4 ? ROWS + 1 : ROWS);
// Accumulators of a warp in smem: [SUMS_ROWS,TILE]; with tensor cores [SUMS_ROWS,64 + padding], eight rows at a time.
constexpr int SUMS_ROWS = TENSOR_CORES && ROWS > 8 ? 8 : ROWS, SUMS_STRIDE = WARP_COLUMNS + 4;

// Stream-K scheduling: the work units (k steps of all tiles, flattened) of each CTA.
template <class P>
struct StreamK {
  __device__ static constexpr int first_unit(int block) {
    static_assert((u64)P::UNITS * (P::BLOCKS + 1) >> 32 == 0);
    return P::WHOLE_TILES ? (u32)block * P::TILES / P::BLOCKS * P::STEPS : (u32)block * P::UNITS / P::BLOCKS;
  }
  __device__ static constexpr int block_of(int unit) { return ((u32)(unit + 1) * P::BLOCKS - 1) / P::UNITS; }
  __device__ static constexpr int first_block(int tile) { return block_of(tile * P::STEPS); }
  __device__ static constexpr int partials(int tile) {
    return block_of((tile + 1) * P::STEPS - 1) - first_block(tile) + 1;
  }
  __device__ static constexpr int max_partials() {
    int most = 1;
    for (int tile = 0; tile < P::TILES; ++tile) most = partials(tile) > most ? partials(tile) : most;
    return most;
  }
};

template <int K_, int N_, int TILE_, int BLOCKS_, bool ALL_OF_X, bool WHOLE_TILES_ = false, bool X_IN_GMEM_ = false>
struct GemvPlan : StreamK<GemvPlan<K_, N_, TILE_, BLOCKS_, ALL_OF_X, WHOLE_TILES_, X_IN_GMEM_>> {
  static constexpr int K = K_, N = N_, TILE = TILE_, BLOCKS = BLOCKS_;
  static constexpr bool WHOLE_TILES = WHOLE_TILES_;  // CTAs get whole tiles, so there are no partials
  static constexpr bool QUANTIZED = false, ACT_ORDER = false, X_IN_GMEM = X_IN_GMEM_;
  static constexpr int COLUMN_LANES = TILE / 8, TILE_K = THREADS / COLUMN_LANES * COPIES;
  static constexpr int STEPS = (K + TILE_K - 1) / TILE_K;  // per tile
  static constexpr int TILES = (N + TILE - 1) / TILE, UNITS = TILES * STEPS;
  static constexpr int MOST_UNITS = WHOLE_TILES ? (TILES + BLOCKS - 1) / BLOCKS * STEPS : (UNITS + BLOCKS - 1) / BLOCKS;
  // k steps whose x is resident in smem: all of a tile's, or those that one CTA needs.
  static constexpr int X_STEPS = ALL_OF_X || MOST_UNITS > STEPS ? STEPS : MOST_UNITS;
  static constexpr int RING = STAGES * COPIES * THREADS;                           // 16-byte slots
  static constexpr int X = X_IN_GMEM ? 0 : X_STEPS * TILE_K / X_GROUP * X_STRIDE;  // values of x in smem
  static constexpr int X_ROOM = X;
  static constexpr int SUMS = THREADS / 32 * SUMS_ROWS * (TENSOR_CORES ? SUMS_STRIDE : TILE);
  static constexpr int SMEM_BYTES = 16 * RING + 2 * X + 4 * SUMS;
  static_assert(!TENSOR_CORES || TILE % WARP_COLUMNS == 0 && THREADS / 32 % (TILE / WARP_COLUMNS) == 0,
                "with tensor cores a tile has whole warps of 64 columns");
  static_assert(!X_IN_GMEM || TENSOR_CORES && K % WARP_K == 0);

  // X_IN_GMEM: fragment order [k / 16,row / 16,lane]: up to 8 values of a lane for 16 k and up to 16 rows.
  __device__ static constexpr int x_index(int k, int row) {
    if (!X_IN_GMEM) return k / X_GROUP * X_STRIDE + row * X_GROUP + k % X_GROUP;
    const int first = (k / WARP_K * ROWS + row / 16 * 16) * WARP_K;
    return first + (row % 8 * 4 + k % WARP_K / 4) * (ROWS > 8 ? 8 : 4) + row / 8 % 2 * 4 + k % 4;
  }
  __device__ static constexpr int x_offset(int k) { return k / X_GROUP * X_STRIDE; }  // offset of row k of x
};

// Sum the partials [partials,ROWS,N] of one output in the order of k. All loads are issued before the first add.
template <class P, int PARTIALS>
__device__ inline float sum_partials(const float* partials, int row, int column) {
  const int count = P::partials(column / P::TILE);
  float values[PARTIALS], sum = 0;
#pragma unroll
  for (int part = 0; part < PARTIALS; ++part)
    values[part] = load_cg(partials + ((part < count ? part : count - 1) * ROWS + row) * P::N + column);
#pragma unroll
  for (int part = 0; part < PARTIALS; ++part) sum += part < count ? values[part] : 0.0f;
  return sum;
}

// The same for 4 adjacent columns, the first a multiple of 4.
template <class P, int PARTIALS>
__device__ inline void sum_partials4(float (&sums)[4], const float* partials, int row, int column) {
  const int count = P::partials(column / P::TILE);
  uint4 values[PARTIALS];
#pragma unroll
  for (int part = 0; part < PARTIALS; ++part)
    values[part] = load_cg(reinterpret_cast<const uint4*>(
        partials + ((i64)(part < count ? part : count - 1) * ROWS + row) * P::N + column));
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = 0;
#pragma unroll
  for (int part = 0; part < PARTIALS; ++part) {
    const u32 words[4] = {values[part].x, values[part].y, values[part].z, values[part].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += part < count ? __uint_as_float(words[i]) : 0.0f;
  }
}

// Thread mapping of a step. With tensor cores, lanes 8r to 8r + 7 copy 128 bytes of row 4 * copy + r of their warp's
// 16 rows, swizzled so that neither the writes nor ldmatrix have bank conflicts.
template <class P>
struct ThreadMap {
  static constexpr int GROUPS = P::TILE / WARP_COLUMNS;  // warps side by side in a tile
  int k, column;                                         // of the first copy, relative to the step
  int writes[COPIES], reads[COPIES];                     // slots of the copies and of the ldmatrix rows

  __device__ ThreadMap() {
    if constexpr (TENSOR_CORES) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, eighth = lane % 8, matrix = lane / 8;
      k = warp / GROUPS * WARP_K + lane / 8, column = warp % GROUPS * WARP_COLUMNS + eighth * 8;
      // Matrices 0 and 1: rows 2t, 2t+1 are k 4t, 4t+1; matrices 2 and 3: k 4t+2, 4t+3. Matrices 1 and 3 are the
      // columns to the right of 0 and 2.
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

// cp.async pipeline of a CTA's weights: a ring of STAGES k steps in smem.
template <class P>
struct WeightPipeline {
  // Whether every copy is in bounds; otherwise copies of the last k step or tile are predicated.
  static constexpr bool ALIGNED = P::K % P::TILE_K == 0 && P::N % P::TILE == 0;
  ThreadMap<P> map;
  const u16* source;
  SmemPtr place;
  int left, step, slot, column;

  __device__ WeightPipeline(const u16* weights, uint4* ring, int first, int count)
      : place(ring), left(count), step(first % P::STEPS), slot(0) {
    column = first / P::STEPS * P::TILE + map.column;
    source = weights + (i64)(map.k + step * P::TILE_K) * P::N + column;
    pdl_trigger();
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      if (i >= PREFETCHED) cp_async_wait<PREFETCHED - 1>();
      prefetch();
    }
  }

  // Wait for the oldest stage; return this thread's 16 bytes.
  __device__ uint4 take() const {
    cp_async_wait<STAGES - 1>();
    return place.plus(map.reads[0]).read();
  }

  // Wait for the oldest stage; load the warp's A fragments of mma.m16n8k16, 16 columns each.
  __device__ void take(u32 (&weights)[COPIES][4]) const {
    cp_async_wait<STAGES - 1>();
    warp_sync();
#pragma unroll
    for (int i = 0; i < COPIES; ++i) ldmatrix_x4_trans(weights[i], place.plus(map.reads[i]));
    warp_sync();
  }

  // Issue the copies of the next step into the stage that was read last. Always commits a group, even an empty one:
  // cp_async_wait counts groups.
  __device__ void prefetch() {
    if (left > 0) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const SmemPtr target = place.plus(map.writes[i]);
        if constexpr (ALIGNED)
          cp_async(target, source + (i64)i * 4 * P::N);
        else
          cp_async(target, source + (i64)i * 4 * P::N, map.k + 4 * i + step * P::TILE_K < P::K && column < P::N);
      }
      source += P::TILE_K * P::N, --left;
      if (++step == P::STEPS) step = 0, column += P::TILE, source += P::TILE - (i64)P::STEPS * P::TILE_K * P::N;
    }
    cp_async_commit();
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

// Layout of a kernel's dynamic smem: ring, x, accumulators of the warps.
template <class P>
struct Smem {
  uint4* ring;
  u16* x;
  float* sums;       // also scratch of RMSNorm
  const u16* ready;  // x in global memory, if X_IN_GMEM

  __device__ explicit Smem(uint4* memory, const u16* ready = nullptr)
      : ready(ready),
        ring(memory),
        x(reinterpret_cast<u16*>(memory + P::RING)),
        sums(reinterpret_cast<float*>(x + P::X_ROOM)) {}
};

// B fragments of a step (16 k): lane 4g + t has k 4t to 4t + 3 of rows g, g + 8, ...
constexpr int ROWS_OF_8 = (ROWS + 7) / 8;
struct XFragment {
  uint2 words[ROWS_OF_8];
};

// x of a CTA's steps in smem.
template <class P>
struct XInSmem {
  static constexpr int X_STEP = P::TILE_K / X_GROUP * X_STRIDE;
  const u16 *const begin, *now;

  __device__ XInSmem(const Smem<P>& smem, int first_x, int step)
      : begin(smem.x + first_x), now(begin + (P::X_STEPS == P::STEPS ? step * X_STEP : 0)) {}

  __device__ XFragment take() {
    XFragment x;
#pragma unroll
    for (int rows = 0; rows < ROWS_OF_8; ++rows)
      x.words[rows] = *reinterpret_cast<const uint2*>(now + rows * 8 * X_GROUP);
    now += X_STEP;
    return x;
  }

  template <class Sums>
  __device__ void add_steps(Sums& sums, WeightPipeline<P>& pipeline, int steps) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      if constexpr (TENSOR_CORES)
        sums.add(pipeline, take());
      else
        sums.add(pipeline, now), now += X_STEP;
    }
  }

  __device__ void begin_tile() {
    if constexpr (P::X_STEPS == P::STEPS) now = begin;
  }
};

// x of a CTA's steps in global memory (X_IN_GMEM), prefetched to registers.
template <class P>
struct XInGmem {
  static constexpr int GROUPS = P::TILE / WARP_COLUMNS, EACH = ROWS > 8 ? 8 : 4;
  static constexpr int STEP = P::TILE_K * ROWS;  // values
  const u16* const begin;
  int step;
  XFragment ahead[X_PREFETCH];

  __device__ XInGmem(const Smem<P>& smem, int, int step)
      : begin(smem.ready + threadIdx.x / 32 / GROUPS * WARP_K * ROWS +
              threadIdx.x % 32 % (ROWS < 8 ? 4 * ROWS : 32) * EACH),
        step(step) {
    read_ahead();
  }

  __device__ void read_ahead() {
#pragma unroll
    for (int i = 0; i < X_PREFETCH; ++i) ahead[i] = read();
  }

  __device__ XFragment read() {
    const int group = step * (P::TILE_K / WARP_K) + (int)threadIdx.x / 32 / GROUPS;
    const bool inside = P::K % P::TILE_K == 0 || group < P::K / WARP_K;
    const u16* const source = begin + step * STEP;
    XFragment x = {};
    if constexpr (ROWS > 8) {
#pragma unroll
      for (int rows = 0; rows < ROWS_OF_8; rows += 2) {
        const uint4 words =
            inside ? load_cg(reinterpret_cast<const uint4*>(source + rows * 8 * WARP_K)) : uint4{0, 0, 0, 0};
        x.words[rows] = {words.x, words.y}, x.words[rows + 1] = {words.z, words.w};
      }
    } else if (inside) {
      x.words[0] = load_cg(reinterpret_cast<const uint2*>(source));
    }
    if (++step == P::STEPS) step = 0;
    return x;
  }

  // Unrolled by X_PREFETCH, so that each prefetched fragment keeps its own registers while its load is in flight.
  template <class Sums>
  __device__ void add_steps(Sums& sums, WeightPipeline<P>& pipeline, int steps) {
#pragma unroll 1
    for (; steps > 0; steps -= X_PREFETCH) {
#pragma unroll
      for (int i = 0; i < X_PREFETCH; ++i) {
        if (i > 0 && i >= steps) break;
        sums.add(pipeline, ahead[i]);
        ahead[i] = read();
      }
    }
  }

  __device__ void begin_tile() { step = 0, read_ahead(); }
};

template <class P, bool>
struct XSource {
  using Type = XInSmem<P>;
};
template <class P>
struct XSource<P, true> {
  using Type = XInGmem<P>;
};

// Accumulators without tensor cores. write(out, first row): the warp's sums of SUMS_ROWS rows, reduced over lanes.
// total(sums, column, row): the sum over the warps.
template <class P>
struct ThreadAccumulators {
  float sums[ROWS][8] = {};

  __device__ static int first_x() { return threadIdx.x / P::COLUMN_LANES * ROWS; }

  __device__ void add(WeightPipeline<P>& pipeline, const u16* x_now) {
    float weights[8], x[ROWS];
    unpack(weights, pipeline.take());
    read_x(x, x_now);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[row][j] += x[row] * weights[j];
    pipeline.prefetch();
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

// Accumulators of mma.m16n8k16. With fewer than 8 rows, B repeats them.
template <class P>
struct MmaAccumulators {
  static constexpr int GROUPS = ThreadMap<P>::GROUPS;
  float sums[ROWS_OF_8][COPIES][4] = {};  // rows 2t, 2t+1 of column 16 * copy + g, then of column + 8

  __device__ static int first_x() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return warp / GROUPS * X_STRIDE + lane / 4 % ROWS * X_GROUP + lane % 4 * 4;
  }

  __device__ void add(WeightPipeline<P>& pipeline, const XFragment& x) {
    u32 weights[COPIES][4];
    pipeline.take(weights);
    pipeline.prefetch();
#pragma unroll
    for (int rows = 0; rows < ROWS_OF_8; ++rows)
#pragma unroll
      for (int i = 0; i < COPIES; ++i) mma_m16n8k16(sums[rows][i], weights[i], x.words[rows].x, x.words[rows].y);
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
struct Accumulators {
  using Type = ThreadAccumulators<P>;
};
template <class P>
struct Accumulators<P, true> {
  using Type = MmaAccumulators<P>;
};

// Run this CTA's work units. epilogue(tile, column in the tile, row, sum, whether the sum includes k = 0) is called
// once per output of each tile.
template <class P, class Epilogue>
__device__ inline void gemv(const Smem<P>& smem, WeightPipeline<P>& pipeline, int first, int count, Epilogue epilogue) {
  using Sums = typename Accumulators<P, TENSOR_CORES>::Type;
  constexpr int TILE = P::TILE;
  int step = first % P::STEPS, tile = first / P::STEPS;
  typename XSource<P, P::X_IN_GMEM>::Type x(smem, Sums::first_x(), step);
  while (count > 0) {
    const bool from_start = step == 0;
    Sums sums;
    const int steps = P::STEPS - step < count ? P::STEPS - step : count;
    count -= steps;
    x.add_steps(sums, pipeline, steps);
    if (count > 0) x.begin_tile();
#pragma unroll
    for (int first_row = 0; first_row < ROWS; first_row += SUMS_ROWS) {
      sums.write(smem.sums, first_row);
      __syncthreads();
      for (int place = threadIdx.x; place < TILE * SUMS_ROWS; place += THREADS) {
        const int column = place % TILE, row = place / TILE;
        epilogue(tile, column, first_row + row, Sums::total(smem.sums, column, row), from_start);
      }
      __syncthreads();
    }
    step = 0, ++tile;
  }
}

// Fill x in smem from k = `first` on. value(row, k, i) returns the thread's i-th value. An out-of-range row or k is
// passed as 0 and its value replaced by 0, so that no branch keeps several loads from being in flight.
template <class P, class Value>
__device__ inline void fill_x(u16* x, int first, int rows, Value value) {
  constexpr int WIDTH = P::X_STEPS * P::TILE_K, ALL = P::STEPS * P::TILE_K;
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
      if (place < WIDTH * ROWS) x[P::x_index(place % WIDTH, place / WIDTH)] = from_float(values[i]);
    }
  }
}

// Copy x from k = `first` on from global memory, where a prep kernel wrote it in smem order.
template <class P>
__device__ inline void copy_x(u16* x, const u16* source, int first) {
  constexpr int ALL = P::x_offset(P::STEPS * P::TILE_K) / 8, INSIDE = P::x_offset(P::K) / 8;
  static_assert(P::X_STEPS == P::STEPS || P::x_offset(P::TILE_K) % 8 == 0, "x of a step begins at a whole chunk");
  const int begin = P::x_offset(first) / 8;
#pragma unroll 8
  for (int place = threadIdx.x; place < P::X / 8; place += THREADS) {
    const int from = begin + place < ALL ? begin + place : begin + place - ALL;
    reinterpret_cast<uint4*>(x)[place] =
        from < INSIDE ? load_cg(reinterpret_cast<const uint4*>(source) + from) : uint4{0, 0, 0, 0};
  }
}

// Store this CTA's partial at [partial,ROWS,N].
template <class P>
__device__ inline void store_partial(float* partials, int tile, int at, int row, float sum) {
  const int column = tile * P::TILE + at, part = (int)blockIdx.x - P::first_block(tile);
  if (column < P::N) partials[(part * ROWS + row) * P::N + column] = sum;
}
