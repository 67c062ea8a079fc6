// SPDX-License-Identifier: Apache-2.0
// `fc` of a draft head: STATES rows side by side, normalised or not, times a matrix. EAGLE-3 fuses three states of the
// base, MTP projects the embedding of a token and a state.

#include "gemv.cuh"

using FUSE = GemvPlan<STATES * STATE_SIZE, FUSED_SIZE, FUSE_TILE, FUSE_BLOCKS, false>;
static_assert(FUSE::SMEM_BYTES == FUSE_SMEM && FUSE::max_partials() == FUSE_PARTIALS);

// One value for each state, of two the high one is unused; an array would be placed in local memory.
struct Each {
  const u16 *low, *middle, *high;

  __device__ const u16* of(int state) const { return state == 0 ? low : state == 1 ? middle : high; }
};

// Store the factors of the norms to smem [STATES,ROWS].
__device__ inline void find_factors(const Each& states, float* factors, float* sums, int rows) {
  constexpr int WARPS = THREADS / 32;
  for (int row = 0; row < rows; ++row) {
    float squares[STATES];
#pragma unroll
    for (int state = 0; state < STATES; ++state) {
      float square = 0;
      for (int i = threadIdx.x; i < STATE_SIZE; i += THREADS) {
        const float value = to_float(load_cg(states.of(state) + (i64)row * STATE_SIZE + i));
        square += value * value;
      }
#pragma unroll
      for (int other = 16; other > 0; other /= 2) square += __shfl_xor_sync(~0u, square, other);
      if (threadIdx.x % 32 == 0) sums[state * WARPS + threadIdx.x / 32] = square;
    }
    __syncthreads();
#pragma unroll
    for (int state = 0; state < STATES; ++state) {
      squares[state] = 0;
      for (int warp = 0; warp < WARPS; ++warp) squares[state] += sums[state * WARPS + warp];
    }
    if (threadIdx.x < STATES) {
      const float third = squares[STATES - 1];  // of three
      const float all = (squares[0] + squares[1] + (STATES == 3 ? third : 0)) * (1.0f / STATES);
      const float own = threadIdx.x == 0 ? squares[0] : threadIdx.x == 1 ? squares[1] : third;
      factors[threadIdx.x * ROWS + row] = rsqrt_fast((JOINED_NORM ? all : own) * (1.0f / STATE_SIZE) + EPSILON);
    }
    __syncthreads();
  }
}

// States [rows,STATE_SIZE], norms [STATE_SIZE]; one norm of all states side by side is cut into their parts.
extern "C" __global__ void __launch_bounds__(THREADS)
    fuse(const u16* weights, const u16* low, const u16* middle, const u16* high, const u16* low_norm,
         const u16* middle_norm, const u16* high_norm, float* partials, i64 rows) {
  DYNAMIC_SMEM(memory);
  struct Factors {
    float values[STATES * ROWS];
  };
  STATIC_SMEM(Factors, factors);
  const Smem<FUSE> smem(memory);
  const int first = FUSE::first_unit(blockIdx.x), count = FUSE::first_unit(blockIdx.x + 1) - first;
  const Each states = {low, middle, high}, norms = {low_norm, middle_norm, high_norm};
  WeightPipeline<FUSE> pipeline(weights, smem.ring, first, count);
  pdl_wait();
  if (STATE_NORMS || JOINED_NORM) find_factors(states, factors.values, smem.sums, (int)rows);
  fill_x<FUSE>(smem.x, FUSE::X_STEPS == FUSE::STEPS ? 0 : first % FUSE::STEPS * FUSE::TILE_K, (int)rows,
               [&](int row, int k, int) {
                 const int state = k / STATE_SIZE, i = k % STATE_SIZE;
                 const float value = to_float(load_cg(states.of(state) + (i64)row * STATE_SIZE + i));
                 if (!STATE_NORMS && !JOINED_NORM) return value;
                 return value * factors.values[state * ROWS + row] * to_float(norms.of(state)[i]);
               });
  __syncthreads();
  gemv<FUSE>(smem, pipeline, first, count,
             [&](int tile, int at, int row, float sum, bool) { store_partial<FUSE>(partials, tile, at, row, sum); });
}

// Sum the partials, in the model's type. fp16 overflow becomes the largest number: see `Fusion` in the exporter.
extern "C" __global__ void __launch_bounds__(THREADS)
    fused_states(const float* partials, const u16* bias, u16* out, i64 rows) {
  pdl_wait();
  for (int place = blockIdx.x * THREADS + threadIdx.x; place < (int)rows * FUSED_SIZE; place += gridDim.x * THREADS) {
    const int row = place / FUSED_SIZE, column = place % FUSED_SIZE;
    float sum = sum_partials<FUSE, FUSE_PARTIALS>(partials, row, column);
    if (bias) sum += to_float(bias[column]);
    if (!BF16 && sum == sum) sum = fminf(fmaxf(sum, -65504.0f), 65504.0f);
    out[place] = from_float(sum);
  }
}
