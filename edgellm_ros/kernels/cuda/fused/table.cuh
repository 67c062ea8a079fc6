// SPDX-License-Identifier: Apache-2.0
// Logits with the embedding table [V,H] as the matrix. Each warp takes whole rows of the table, STAGES steps ahead: one
// row at a time, 256 values per step, or with tensor cores 16 rows at a time, 64 values of each per step.

struct Table {
  static constexpr bool QUANTIZED = false, ORDERED = false;
  static constexpr int TOKENS = TENSOR_CORES ? 16 : 1, STEP = TENSOR_CORES ? 64 : 256;
  static constexpr int STEPS = (HIDDEN + STEP - 1) / STEP, WIDTH = STEP * STEPS, WARPS = THREADS / 32;
  static constexpr int GROUPS = (VOCAB + TOKENS - 1) / TOKENS;
  static constexpr int RING = STAGES * COPIES * THREADS, X = TENSOR_CORES ? WIDTH / X_GROUP * X_STRIDE : WIDTH * ROWS;
  static constexpr int SHARED = 16 * RING + 2 * X + 4 * WARPS * ROWS;

  // As in products, or [ROWS,WIDTH].
  __device__ static constexpr int x_place(int k, int row) {
    return TENSOR_CORES ? k / X_GROUP * X_STRIDE + row * X_GROUP + k % X_GROUP : row * WIDTH + k;
  }

  __device__ static int first_group(int block) { return (int)((i64)block * GROUPS / LM_HEAD_BLOCKS); }
};

// The rows of one warp on their way to shared memory, in a ring of STAGES steps. With tensor cores, lanes 8 * r to
// 8 * r + 7 copy 128 bytes of row 4 * copy + r.
struct TableStream {
  const u16* source;
  Place place;
  int group, end, step = 0, slot = 0;

  __device__ TableStream(const u16* table, uint4* ring, int first, int end) : place(ring), group(first), end(end) {
    source = table + (i64)first * Table::TOKENS * HIDDEN;
    source += TENSOR_CORES ? lane() / 8 * HIDDEN + lane() % 8 * 8 : lane() * 8;
    place.advance(warp() * 32 * COPIES);
    start_next_kernel();
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      if (i >= FILLED) wait_for_copies<FILLED - 1>();
      next();
    }
  }

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }

  // The place of a chunk of 8 values with tensor cores: neither writing nor reading makes lanes wait.
  __device__ static int place_of(int token, int chunk) { return token * 8 + (chunk ^ token % 2 * 4); }

  // The row's values that this lane copied.
  __device__ uint4 read() const { return place.plus(lane()).read(); }
  // 8 values of one of 16 rows, with tensor cores.
  __device__ uint4 read(int token, int chunk) const { return place.plus(place_of(token, chunk)).read(); }

  // Start copies to the places that have been read; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (group < end) {
      if constexpr (TENSOR_CORES) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
          const int token = 4 * i + lane() / 8;
          const Place target = place.plus(place_of(token, lane() % 8));
          if constexpr (VOCAB % Table::TOKENS == 0)
            copy_async(target, source + i * 4 * HIDDEN);
          else
            copy_async(target, source + i * 4 * HIDDEN, group * Table::TOKENS + token < VOCAB);
        }
      } else if constexpr (HIDDEN % Table::STEP == 0) {
        copy_async(place.plus(lane()), source);
      } else {
        copy_async(place.plus(lane()), source, step * Table::STEP + lane() * 8 < HIDDEN);
      }
      source += Table::STEP;
      if (++step == Table::STEPS)
        step = 0, group += Table::WARPS, source += (i64)Table::WARPS * Table::TOKENS * HIDDEN - Table::WIDTH;
    }
    commit_copies();
    const bool last = ++slot == STAGES;
    place.advance((last ? 1 - STAGES : 1) * COPIES * THREADS);
    if (last) slot = 0;
  }
};

// Logits of a warp's rows of the table, one row at a time.
__device__ inline void multiply_rows(TableStream& stream, int first, int end, const u16* x, float* logits, int rows) {
  const int lane = TableStream::lane();
  for (int token = first; token < end; token += Table::WARPS) {
    float logit[ROWS] = {};
    for (int step = 0; step < Table::STEPS; ++step) {
      wait_for_copies<STAGES - 1>();
      float weights[8];
      unpack(weights, stream.read());
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float values[8];
        unpack(values, *reinterpret_cast<const uint4*>(x + Table::x_place(step * 256 + lane * 8, row)));
        logit[row] += dot(weights, values);
      }
      stream.next();
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) logit[row] += __shfl_xor_sync(~0u, logit[row], other);
      if (lane == row && row < rows) logits[(i64)row * VOCAB + token] = logit[row];
    }
  }
}

// The same on tensor cores, 16 rows at a time. The k of one product are those of the chunks 0 to 3 or 4 to 7.
__device__ inline void multiply_groups(TableStream& stream, int first, int end, const u16* x, float* logits, int rows) {
  constexpr int HALVES = (ROWS + 7) / 8;
  const int g = TableStream::lane() / 4, t = TableStream::lane() % 4;
  for (int group = first; group < end; group += Table::WARPS) {
    float sums[HALVES][4] = {};
    for (int step = 0; step < Table::STEPS; ++step) {
      wait_for_copies<STAGES - 1>();
      wait_for_lanes();
      uint4 upper[2], lower[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) upper[i] = stream.read(g, 4 * i + t), lower[i] = stream.read(g + 8, 4 * i + t);
      wait_for_lanes();
      stream.next();
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          const int k = step * Table::STEP + i * 32 + t * 8;
          const uint4 values = *reinterpret_cast<const uint4*>(x + Table::x_place(k, half * 8 + g % ROWS));
          mma(sums[half], {upper[i].x, lower[i].x, upper[i].y, lower[i].y}, values.x, values.y);
          mma(sums[half], {upper[i].z, lower[i].z, upper[i].w, lower[i].w}, values.z, values.w);
        }
    }
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = half * 8 + 2 * t + j % 2, token = group * Table::TOKENS + j / 2 * 8 + g;
        if (row < rows && row < ROWS && token < VOCAB) logits[(i64)row * VOCAB + token] = sums[half][j];
      }
  }
}

__device__ inline void multiply_table(const u16* table, const u16* norm, i64* residual, float* logits, u16* hidden,
                                      const u16* ready, int rows) {
  DYNAMIC_SHARED(memory);
  if (blockIdx.x >= LM_HEAD_BLOCKS) {
    wait_for_kernel_before();
    return;
  }
  u16* x = reinterpret_cast<u16*>(memory + Table::RING);
  float* sums = reinterpret_cast<float*>(x + Table::X);
  const int first = Table::first_group(blockIdx.x) + TableStream::warp(), end = Table::first_group(blockIdx.x + 1);
  TableStream stream(table, memory, first, end);
  if constexpr (LM_HEAD_X) {
    wait_for_kernel_before();
    for (int i = threadIdx.x; i < Table::X / 8; i += THREADS)
      reinterpret_cast<uint4*>(x)[i] = load(reinterpret_cast<const uint4*>(ready) + i);
  } else {
    Normed values;
    values.read_scales(norm);
    wait_for_kernel_before();
    norm_rows(values, residual, nullptr, hidden, true, sums, rows,
              [&](int row) { share_x<Table>(x, values, 0, row); });
  }
  if constexpr (Table::WIDTH > HIDDEN)
    for (int i = HIDDEN + threadIdx.x; i < Table::WIDTH; i += THREADS)
#pragma unroll
      for (int row = 0; row < ROWS; ++row) x[Table::x_place(i, row)] = 0;
  __syncthreads();
  if constexpr (TENSOR_CORES)
    multiply_groups(stream, first, end, x, logits, rows);
  else
    multiply_rows(stream, first, end, x, logits, rows);
}
