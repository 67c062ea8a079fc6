// SPDX-License-Identifier: Apache-2.0
// Ranks of tokens as integers, and their probability mass: for sampling and log-probabilities.

constexpr int THREADS = 1024;  // per block; a histogram has one bin per thread
constexpr int BIN_BITS = 10;
constexpr int WARPS = THREADS / 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float LARGEST_FLOAT = 3.402823466e38f;
constexpr u32 KEY_OF_LOWEST = 0x00800000u;  // order_key(-LARGEST_FLOAT)

// Weights are multiples of 2^-44 of the most likely token's, so that their sums do not depend on the order
// of summation. Up to 2^19 of them fit into 64 bits.
constexpr int WEIGHT_BITS = 44;
constexpr u64 NOT_FINITE = ~0ull;  // in place of a rank
#define NO_NUMBER __uint_as_float(0x7fffffffu)

// Maps a float to an integer of the same order; -0 and 0 are equal.
__device__ inline u32 order_key(float score) {
  const u32 bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float score_of_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Unique ranks of tokens: greater for greater scores, then for smaller ids.
struct Ranks {
  int id_bits;

  __device__ explicit Ranks(i64 vocab) : id_bits(64 - __clzll(vocab - 1)) {}
  __device__ u64 rank(float score, i64 id) const { return (u64)order_key(score) << id_bits | (last_id() - id); }
  __device__ u64 first_of_key(u32 key) const { return (u64)key << id_bits | last_id(); }
  __device__ u64 last_of_key(u32 key) const { return (u64)key << id_bits; }
  __device__ u32 key(u64 rank) const { return rank >> id_bits; }
  __device__ float score(u64 rank) const { return score_of_key(key(rank)); }
  __device__ i64 id(u64 rank) const { return last_id() - (rank & last_id()); }
  __device__ u64 last_id() const { return (1ull << id_bits) - 1; }
};

// log2(e) / temperature as the sum of two floats: weights have an error of 1e-7 at any distance.
struct Scale {
  float high, low;
};

__device__ inline Scale make_scale(float temperature) {
  const double scale = 1.4426950408889634 / (double)temperature;
  if (scale > (double)LARGEST_FLOAT) return {LARGEST_FLOAT, 0.0f};
  const float high = (float)scale;
  return {high, (float)(scale - (double)high)};
}

// Returns 2^(WEIGHT_BITS - x), rounded down, for a distance x = (top - score) * scale < WEIGHT_BITS.
__device__ inline u64 weight(float top, float score, Scale scale) {
  const float distance = top - score;
  const float rest = top - distance;  // distance + error is the exact difference
  const float error = (top - (distance + rest)) + (rest - score);
  const float power = distance * scale.high;
  const float tail = fmaf(distance, scale.high, -power) + (distance * scale.low + error * scale.high);
  const float whole = floorf(power), fraction = exp2f(-((power - whole) + tail));
  return (u64)(fraction * (float)(1ull << WEIGHT_BITS)) >> (int)whole;
}

// Returns the bin of a score's distance from the top. The bins divide 44 binary orders of magnitude (all scores
// with a weight) into equal steps, the nearest first; larger distances give THREADS. Never falls as the score falls.
__device__ inline float distance_bin(float top, float score, float scale) {
  const float bin = (top - score) * scale * ((float)THREADS / WEIGHT_BITS);
  return bin < (float)THREADS ? bin : (float)THREADS;
}

// Returns the least key of the scores in bins 0 .. bin.
__device__ inline u32 least_key_of_bins(u32 top_key, int bin, float scale) {
  const float top = score_of_key(top_key);
  u32 low = KEY_OF_LOWEST, high = top_key;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if ((int)distance_bin(top, score_of_key(middle), scale) <= bin)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Returns the shift for ranks from `low` to `high`: (high - rank) >> shift is one of at most THREADS bins.
__device__ inline int bin_shift(u64 low, u64 high) {
  const int bits = 64 - __clzll(high - low);
  return bits > BIN_BITS ? bits - BIN_BITS : 0;
}

// Calls visit(id, read(id)) for this thread's share of begin .. end-1. Reads BATCH values before the first visit:
// a read takes as long as hundreds of instructions, and the compiler cannot move reads across the sums of a visit.
template <int BATCH = 4, class Read, class Visit>
__device__ inline void visit_tokens(int begin, int end, Read read, Visit visit) {
  for (int first = begin + threadIdx.x; first < end; first += BATCH * THREADS) {
    decltype(read(0)) values[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i * THREADS < end) values[i] = read(first + i * THREADS);
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i * THREADS < end) visit(first + i * THREADS, values[i]);
  }
}

__device__ inline u64 warp_maximum(u64 value) {
  for (int step = 16; step > 0; step /= 2) {
    const u64 other = __shfl_xor_sync(ALL_LANES, value, step);
    value = other > value ? other : value;
  }
  return value;
}

__device__ inline u64 block_maximum(u64 value, u64* warp_values) {
  value = warp_maximum(value);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < WARPS; ++warp) value = warp_values[warp] > value ? warp_values[warp] : value;
  __syncthreads();
  return value;
}

// Returns the maximum of the block to its first warp: faster than to all of them. warp_values may be written again
// after the next barrier.
__device__ inline u64 maximum_in_first_warp(u64 value, u64* warp_values) {
  value = warp_maximum(value);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x < 32 ? warp_maximum(warp_values[threadIdx.x]) : 0;
}

// Likewise the sum.
__device__ inline u64 sum_in_first_warp(u64 value, u64* warp_values) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return 0;
  value = warp_values[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

template <class Number>
__device__ Number block_sum(Number value, Number* warp_values) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = value;
  __syncthreads();
  Number sum = 0;
  for (int warp = 0; warp < WARPS; ++warp) sum += warp_values[warp];
  __syncthreads();
  return sum;
}

// Returns the sum of the values of threads 0 to this one.
template <class Number>
__device__ Number block_sum_through(Number value, Number* warp_values) {
  const int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const Number other = __shfl_up_sync(ALL_LANES, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) warp_values[own_warp] = value;
  __syncthreads();
  for (int warp = 0; warp < own_warp; ++warp) value += warp_values[warp];
  __syncthreads();
  return value;
}
