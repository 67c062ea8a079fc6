// SPDX-License-Identifier: Apache-2.0
// The recurrent mixer of a hybrid model, between its GEMVs in_proj and out_proj: convolution, state, gate.
//
// A gated delta net has for each head, with decay a, strength b and state S [KEY_DIM,VALUE_DIM]:
//   S' = a S + k (b (v - a S^T k))^T        y = S'^T q
// Mamba2, whose B is the key here, C the query, x the value, with step dt:
//   S' = a S + k (dt v)^T                   y = S'^T q + D v
//
// A CTA has MIX_WARPS * 16 columns of a head's state of one sequence. A warp has its 16 columns in registers, loaded
// before pdl_wait: each lane quads of 4 columns, of every K_LANES-th row. As y = a S^T q + (k q) update, one pass over
// the state gives both products, and the next state follows while other CTAs go on.
//
// The norm of y is over several CTAs, so `mix` stores y without it, and the sums of squares; x of out_proj divides.

#pragma once

#include "mixer.cuh"
#include "plans.cuh"

constexpr int MIX_THREADS = 32 * MIX_WARPS, WARP_VALUES = 16, CTA_VALUES = WARP_VALUES * MIX_WARPS;
constexpr int SLICES = VALUE_DIM / CTA_VALUES;  // CTAs of a head
constexpr int LANE_QUADS = STATE_COLUMNS >= WARP_VALUES ? 4 : STATE_COLUMNS / 4, QUADS = 4 / LANE_QUADS;
constexpr int K_LANES = 32 / LANE_QUADS, LANE_KEYS = KEY_DIM / K_LANES;
constexpr int OWN_CHANNELS = 2 * KEY_DIM + CTA_VALUES, SHARE = (OWN_CHANNELS + MIX_THREADS - 1) / MIX_THREADS;
constexpr int MOST_TOKENS = ROWS < CHAIN_TOKENS ? ROWS : CHAIN_TOKENS;  // of a sequence in a step
constexpr int PARTS = VALUES / NORM_GROUPS / WARP_VALUES;               // sums of squares of a group
static_assert(VALUE_DIM % CTA_VALUES == 0 && KEY_DIM % K_LANES == 0 && LANE_QUADS * QUADS == 4);
static_assert(QUADS == 1 || LANE_QUADS == 1, "columns of StateShare");

template <int COUNT>
__device__ inline void add_lanes(float (&sums)[COUNT], int first) {
#pragma unroll
  for (int other = 1; other < 32; other *= 2) {
    if (other < first) continue;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], other);
  }
}

// A lane's share of a warp's 16 columns of a state.
struct StateShare {
  float values[QUADS][LANE_KEYS][4];

  __device__ static int key(int i) { return threadIdx.x % 32 / LANE_QUADS + i * K_LANES; }
  // First of the 4 columns, relative to the warp's.
  __device__ static int column(int quad) { return 4 * (QUADS == 1 ? threadIdx.x % 32 % LANE_QUADS : quad); }
  __device__ static i64 place(i64 head, int first, int quad, int i) {
    const int at = first + column(quad);
    return ((head * (VALUE_DIM / STATE_COLUMNS) + at / STATE_COLUMNS) * KEY_DIM + key(i)) * STATE_COLUMNS +
           at % STATE_COLUMNS;
  }

  __device__ void read(const float* states, i64 head, int first) {
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
      for (int i = 0; i < LANE_KEYS; ++i) {
        const uint4 bits = load_cg(reinterpret_cast<const uint4*>(states + place(head, first, quad, i)));
        values[quad][i][0] = __uint_as_float(bits.x), values[quad][i][1] = __uint_as_float(bits.y);
        values[quad][i][2] = __uint_as_float(bits.z), values[quad][i][3] = __uint_as_float(bits.w);
      }
  }

  __device__ void write(float* states, i64 head, int first) const {
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
      for (int i = 0; i < LANE_KEYS; ++i)
        *reinterpret_cast<uint4*>(states + place(head, first, quad, i)) = {
            __float_as_uint(values[quad][i][0]), __float_as_uint(values[quad][i][1]),
            __float_as_uint(values[quad][i][2]), __float_as_uint(values[quad][i][3])};
  }

  // Sums over all keys of the state times a vector in smem; every lane gets those of its columns.
  __device__ void multiply(float (&sums)[4 * QUADS], const float* vector) const {
#pragma unroll
    for (int i = 0; i < 4 * QUADS; ++i) sums[i] = 0;
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i) {
      const float factor = vector[key(i)];
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[4 * quad + j] += values[quad][i][j] * factor;
    }
    add_lanes(sums, LANE_QUADS);
  }

  // decay S + vector update^T
  __device__ void advance(float decay, const float* vector, const float (&update)[4 * QUADS]) {
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i) {
      const float factor = vector[key(i)];
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
        for (int j = 0; j < 4; ++j) values[quad][i][j] = decay * values[quad][i][j] + factor * update[4 * quad + j];
    }
  }
};

struct MixShared {
  float queries[MOST_TOKENS][KEY_DIM], keys[MOST_TOKENS][KEY_DIM], values[MOST_TOKENS][CTA_VALUES];
  float decays[MOST_TOKENS], steps[MOST_TOKENS];  // steps: strengths of a delta net
  float results[MIX_WARPS][WARP_VALUES];
};

// Values by which a token changes the states, for a later commit; null = they are not wanted.
struct ChainOutputs {
  float *conv_inputs, *keys, *values, *decays, *strengths;  // of all tokens: CHANNELS, KEYS, VALUES, heads, heads
};

__device__ inline void mix_tokens(const float* partials, const float* taps, const float* conv_bias, const float* decay,
                                  const float* dt_bias, const float* skip, const float* norm, const float* conv_states,
                                  const float* states, float* next_conv_states, float* next_states, float* mixed,
                                  float* squares, const ChainOutputs& chain, int tokens) {
  STATIC_SMEM(MixShared, own);
  constexpr int PER_KEY_HEAD = MIXER_HEADS / KEY_HEADS;
  const int slice = blockIdx.x % SLICES, head = blockIdx.x / SLICES, key_head = head / PER_KEY_HEAD;
  const int sequence = blockIdx.y, first_row = sequence * tokens;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_value = slice * CTA_VALUES;                     // of the head
  const int first = first_value + warp * WARP_VALUES;             // column of the head's state
  const bool owns_keys = slice == 0 && head % PER_KEY_HEAD == 0;  // stores what several CTAs compute

  StateShare state;
  state.read(states, (i64)sequence * MIXER_HEADS + head, first);
  // Channels of this thread: queries, then keys, then values.
  int channels[SHARE];
  float windows[SHARE][PAST], factors[SHARE][CONV_KERNEL], biases[SHARE];
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int at = threadIdx.x + i * MIX_THREADS;
    const int channel = at < KEY_DIM       ? FIRST_QUERY + key_head * KEY_DIM + at
                        : at < 2 * KEY_DIM ? FIRST_KEY + key_head * KEY_DIM + at - KEY_DIM
                                           : FIRST_VALUE + head * VALUE_DIM + first_value + at - 2 * KEY_DIM;
    channels[i] = at < OWN_CHANNELS ? channel : 0;
#pragma unroll
    for (int j = 0; j < PAST; ++j)
      windows[i][j] = load_cg(conv_states + ((i64)sequence * CHANNELS + channels[i]) * PAST + j);
#pragma unroll
    for (int j = 0; j < CONV_KERNEL; ++j) factors[i][j] = taps[j * CHANNELS + channels[i]];
    biases[i] = CONV_BIAS ? conv_bias[channels[i]] : 0.0f;
  }
  const float rate = decay[head], offset = dt_bias[head], skipped = DELTA ? 0.0f : skip[head];
  const int value = first + lane % WARP_VALUES;  // of the head, of this lane
  const float scale = norm[DELTA ? value : head * VALUE_DIM + value];
  pdl_wait();

  for (int token = 0; token < tokens; ++token) {
    const int row = first_row + token;
    float inputs[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; ++i)
      inputs[i] = sum_partials<IN_PROJ, IN_PROJ_PARTIALS>(partials, row, FIRST_CHANNEL + channels[i]);
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const int at = threadIdx.x + i * MIX_THREADS;
      if (at >= OWN_CHANNELS) continue;
      float sum = biases[i] + factors[i][PAST] * inputs[i];
#pragma unroll
      for (int j = 0; j < PAST; ++j) sum += factors[i][j] * windows[i][j];
#pragma unroll
      for (int j = 0; j < PAST; ++j) windows[i][j] = j + 1 < PAST ? windows[i][j + 1] : inputs[i];
      float* const out = at < KEY_DIM       ? own.queries[token] + at
                         : at < 2 * KEY_DIM ? own.keys[token] + at - KEY_DIM
                                            : own.values[token] + at - 2 * KEY_DIM;
      *out = silu(sum);
      if (chain.conv_inputs && (at >= 2 * KEY_DIM || owns_keys))
        chain.conv_inputs[(i64)row * CHANNELS + channels[i]] = inputs[i];
    }
  }
  if (threadIdx.x < tokens) {
    const int row = first_row + threadIdx.x;
    float step = softplus(sum_partials<IN_PROJ, IN_PROJ_PARTIALS>(partials, row, FIRST_STEP + head) + offset);
    if (!DELTA) step = fmaxf(step, TIME_STEP_MIN);
    float strength = step;
    if constexpr (DELTA)
      strength = 1.0f / (1.0f + expf(-sum_partials<IN_PROJ, IN_PROJ_PARTIALS>(partials, row, FIRST_STRENGTH + head)));
    own.decays[threadIdx.x] = expf(step * rate), own.steps[threadIdx.x] = strength;
    if (chain.decays && slice == 0) {
      chain.decays[row * MIXER_HEADS + head] = step * rate;
      if (DELTA) chain.strengths[row * MIXER_HEADS + head] = strength;
    }
  }
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int at = threadIdx.x + i * MIX_THREADS;
    if (at >= OWN_CHANNELS || (at < 2 * KEY_DIM && !owns_keys)) continue;
#pragma unroll
    for (int j = 0; j < PAST; ++j)
      next_conv_states[((i64)sequence * CHANNELS + channels[i]) * PAST + j] = windows[i][j];
  }
  __syncthreads();

  for (int token = 0; token < tokens; ++token) {
    const int row = first_row + token;
    const float *const query = own.queries[token], *const key = own.keys[token];
    const float gate = sum_partials<IN_PROJ, IN_PROJ_PARTIALS>(partials, row, FIRST_GATE + head * VALUE_DIM + value);
    float products[3] = {0, 0, 0};  // k q, k k, q q
#pragma unroll
    for (int i = 0; i < KEY_DIM / 32; ++i) {
      const float k = key[lane + 32 * i], q = query[lane + 32 * i];
      products[0] += k * q, products[1] += k * k, products[2] += q * q;
    }
    add_lanes(products, 1);
    const float key_factor = DELTA ? rsqrt_fast(products[1] + UNIT_EPSILON) : 1.0f;
    const float query_factor = DELTA ? rsqrt_fast(products[2] + UNIT_EPSILON) * rsqrt_fast(KEY_DIM) : 1.0f;
    const float fade = own.decays[token], step = own.steps[token];
    float of_query[4 * QUADS], update[4 * QUADS];
    state.multiply(of_query, query);
    if constexpr (DELTA) state.multiply(update, key);
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * quad + j, at = StateShare::column(quad) + j;
        const float given = own.values[token][warp * WARP_VALUES + at];
        update[i] = key_factor * step * (DELTA ? given - fade * key_factor * update[i] : given);
        if (lane / LANE_QUADS == 0)
          own.results[warp][at] = query_factor * (fade * of_query[i] + products[0] * update[i]) + skipped * given;
      }
    state.advance(fade, key, update);
    warp_sync();
    const float y = own.results[warp][lane % WARP_VALUES];
    warp_sync();
    const float gated = DELTA ? y : y * silu(gate);
    float square[1] = {lane < WARP_VALUES ? gated * gated : 0.0f};
    add_lanes(square, 1);
    if (lane < WARP_VALUES) {
      mixed[(i64)row * VALUES + head * VALUE_DIM + value] = gated * scale * (DELTA ? silu(gate) : 1.0f);
      if (lane == 0) squares[(row * MIXER_HEADS + head) * (VALUE_DIM / WARP_VALUES) + first / WARP_VALUES] = square[0];
      if (chain.values) {
        const float given = own.values[token][warp * WARP_VALUES + lane];
        chain.values[(i64)row * VALUES + head * VALUE_DIM + value] = DELTA ? given : step * given;
      }
    }
    if (chain.keys && owns_keys)
      for (int i = threadIdx.x; i < KEY_DIM; i += MIX_THREADS)
        chain.keys[(i64)row * KEYS + key_head * KEY_DIM + i] = key_factor * key[i];
  }
  state.write(next_states, (i64)sequence * MIXER_HEADS + head, first);
}

// 1 / rms of a group of a row, by a warp.
__device__ inline float norm_factor(const float* squares, int row, int group) {
  const float* const from = squares + (row * NORM_GROUPS + group) * PARTS;
  float sum[1] = {0};
#pragma unroll
  for (int i = 0; i < (PARTS + 31) / 32; ++i) {
    const int at = threadIdx.x % 32 + 32 * i;
    sum[0] += at < PARTS ? load_cg(from + at) : 0.0f;
  }
  add_lanes(sum, 1);
  return rsqrt_fast(sum[0] * (1.0f / (VALUES / NORM_GROUPS)) + EPSILON);
}

struct NormFactors {
  float values[ROWS * NORM_GROUPS];

  __device__ void compute(const float* squares, int rows) {
    for (int at = threadIdx.x / 32; at < rows * NORM_GROUPS; at += THREADS / 32) {
      const float factor = norm_factor(squares, at / NORM_GROUPS, at % NORM_GROUPS);
      if (threadIdx.x % 32 == 0) values[at] = factor;
    }
  }
  __device__ float of(int row, int k) const { return values[row * NORM_GROUPS + k / (VALUES / NORM_GROUPS)]; }
};
