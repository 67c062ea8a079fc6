// SPDX-License-Identifier: Apache-2.0
// Products of ROWS rows x with a matrix [K,N], N contiguous, on tensor cores.
//
// A block has a tile of columns, ROWS rows and all of k. A warp has 16 columns and every SPLIT-th step of 16 k. It
// copies the weights of its steps to a ring of its own in shared memory, as many steps ahead as the ring holds, and the
// first ones before the kernel waits for the kernel before. The sums of warps with the same columns are added in a
// fixed order.

template <int K_, int N_, int TILE_>
struct Product {
  static constexpr int K = K_, N = N_, TILE = TILE_;
  static constexpr int GROUPS = TILE / 16, SPLIT = WARPS > GROUPS ? WARPS / GROUPS : 1;
  static constexpr int THREADS = 32 * GROUPS * SPLIT;
  static constexpr int STEPS = K / 16, MOST_STEPS = (STEPS + SPLIT - 1) / SPLIT;  // of all warps, of one
  static constexpr int RING = MOST_STEPS < STAGES ? MOST_STEPS : STAGES;
  static constexpr int PITCH = K + 8;  // of x, so that the rows of 8 lanes are in different banks
  static constexpr int RING_BYTES = 512 * RING, SUMS_BYTES = 80 * ROWS;
  static constexpr int REGION = (RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES) + 64;  // bytes of a warp
  static constexpr int SHARED = GROUPS * SPLIT * REGION + 2 * ROWS * PITCH;
  static_assert(K % 16 == 0 && TILE % 16 == 0);
};

// Where a kernel's shared memory is: a region for each warp, with its ring and later its sums, then x.
template <class P>
struct Memory {
  uint4* regions;
  u16* x;  // [ROWS,PITCH]
  int lane, group, split;

  __device__ explicit Memory(uint4* memory)
      : regions(memory), x(reinterpret_cast<u16*>(memory + P::GROUPS * P::SPLIT * P::REGION / 16)) {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32, group = warp % P::GROUPS, split = warp / P::GROUPS;
  }
  __device__ uint4* region() const { return regions + threadIdx.x / 32 * (P::REGION / 16); }

  // Sums of the warp's own columns, [ROWS,20], of which 16 are used.
  __device__ float* sums() const { return reinterpret_cast<float*>(region()); }

  // Where the sum of the first warp with a column is.
  __device__ float* sum(int row, int column) const {
    return reinterpret_cast<float*>(regions) + column / 16 * (P::REGION / 4) + row * 20 + column % 16;
  }

  // Sum of all warps with a column.
  __device__ float total(int row, int column) const {
    const float* const place = sum(row, column);
    float result = 0;
#pragma unroll
    for (int i = 0; i < P::SPLIT; ++i) result += place[i * P::GROUPS * (P::REGION / 4)];
    return result;
  }
};

// The weights of one warp on their way to its ring: a step is a matrix [16,16], of which a lane copies half a row.
template <class P>
struct WarpWeights {
  const u16* source;
  Place to, from;
  int steps, left, to_slot, from_slot;

  // Where half a row of a step is. Rows 4 to 7 and 12 to 15 have their halves exchanged, for the banks.
  __device__ static int place(int row, int half) { return 2 * row + (half ^ (row / 4 & 1)); }

  // column: the first one of the warp.
  __device__ WarpWeights(const u16* weights, const Memory<P>& memory, int column)
      : to(memory.region() + place(memory.lane / 2, memory.lane % 2)),
        from(memory.region() + place(memory.lane % 8 + memory.lane / 16 * 8, memory.lane / 8 % 2)),
        to_slot(0),
        from_slot(0) {
    source = weights + (i64)(16 * memory.split + memory.lane / 2) * P::N + column + memory.lane % 2 * 8;
    steps = left = (P::STEPS - memory.split + P::SPLIT - 1) / P::SPLIT;
#pragma unroll
    for (int i = 0; i < P::RING; ++i) next();
  }

  // Start the next copy; always ends a group, so that groups can be counted.
  __device__ void next() {
    if (left > 0) {
      copy_async(to, source);
      source += (i64)16 * P::SPLIT * P::N, --left;
    }
    commit_copies();
    advance(to, to_slot);
  }

  // Wait for the oldest step and read it.
  __device__ void take(u32 (&matrix)[4]) {
    wait_for_copies<P::RING - 1>();
    wait_for_lanes();
    load_matrices(matrix, from);
    advance(from, from_slot);
  }

  __device__ static void advance(Place& place, int& slot) {
    const bool last = ++slot == P::RING;
    place.advance(last ? -32 * (P::RING - 1) : 32);
    if (last) slot = 0;
  }
};

// Multiply x, and leave the sums of each warp in its region.
template <class P>
__device__ inline void multiply(const Memory<P>& memory, WarpWeights<P>& weights) {
  constexpr int TILES = ROWS / 8;  // of rows
  const int g = memory.lane / 4, t = memory.lane % 4;
  float sums[TILES][4] = {};
  const u16* x = memory.x + g * P::PITCH + 2 * t + 16 * memory.split;
#pragma unroll 4
  for (int left = weights.steps; left > 0; --left, x += 16 * P::SPLIT) {
    u32 matrix[4];
    weights.take(matrix);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const u32* const pairs = reinterpret_cast<const u32*>(x + 8 * i * P::PITCH);
      mma(sums[i], matrix, pairs[0], pairs[4]);
    }
    weights.next();
  }
  wait_for_lanes();
  float* const own = memory.sums();
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) own[(8 * i + 2 * t + j % 2) * 20 + g + j / 2 * 8] = sums[i][j];
  __syncthreads();
}

// Two values in the model's type.
__device__ inline u32 pack(float low, float high) { return from_float(low) | (u32)from_float(high) << 16; }

// Copy rows [rows,K] of a product before to x; zeros after the last row.
template <class P>
__device__ inline void copy_x(const Memory<P>& memory, const u16* source, int first, int rows) {
  constexpr int PIECES = P::K / 8;
  for (int i = threadIdx.x; i < ROWS * PIECES; i += P::THREADS) {
    const int row = i / PIECES, column = i % PIECES * 8;
    const bool valid = first + row < rows;
    const Place place(reinterpret_cast<uint4*>(memory.x + row * P::PITCH + column));
    copy_async(place, source + (valid ? (i64)(first + row) * P::K + column : 0), valid);
  }
  commit_copies();
  wait_for_copies<0>();
  __syncthreads();
}

// RMSNorm of rows of the residual stream. A warp has a row, a lane every 32nd pair of its values.
struct Norm {
  static constexpr int PAIRS = HIDDEN / 64;
  u32 scales[PAIRS];
  float2 values[PAIRS];
  int lane;

  // Read the scales, which depend on no other kernel.
  __device__ explicit Norm(const u16* norm) : lane(threadIdx.x % 32) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) scales[i] = reinterpret_cast<const u32*>(norm)[lane + 32 * i];
  }

  __device__ void read(const float* row) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) values[i] = load(reinterpret_cast<const float2*>(row) + lane + 32 * i);
  }

  __device__ void normalize() {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum += values[i].x * values[i].x + values[i].y * values[i].y;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    const float factor = rsqrt_fast(sum * (1.0f / HIDDEN) + EPSILON);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float2 scale = to_floats(scales[i]);
      values[i].x *= factor * scale.x, values[i].y *= factor * scale.y;
    }
  }
};

// Write the norm of rows to x. read(norm, row): read a row that there is.
template <class P, class Read>
__device__ inline void write_normed(const Memory<P>& memory, Norm& norm, int first, int rows, Read read) {
  for (int row = threadIdx.x / 32; row < ROWS; row += P::THREADS / 32) {
    u32* const pairs = reinterpret_cast<u32*>(memory.x + row * P::PITCH);
    const bool valid = first + row < rows;
    if (valid) read(norm, first + row), norm.normalize();
#pragma unroll
    for (int i = 0; i < Norm::PAIRS; ++i)
      pairs[norm.lane + 32 * i] = valid ? pack(norm.values[i].x, norm.values[i].y) : 0u;
  }
  __syncthreads();
}
