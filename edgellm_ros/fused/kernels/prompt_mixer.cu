// SPDX-License-Identifier: Apache-2.0
// The recurrent mixers of prompts, between in_proj and out_proj, in chunks of tokens on tensor cores:
//
// convolve_tokens -- prepare_chunks -- scan_chunks -- gate_tokens
//
// Tokens i of a chunk, with the sums G of their log decays from the chunk's begin and the state S before it, of a gated
// delta net (Yang et al., Gated Delta Networks, 2024) with strengths b:
//   A_ij = b_i (k_i k_j) exp(G_i - G_j), j < i      T = (1 + A)^-1      W = T diag(b exp(G)) K      U = T diag(b) V
//   P_ij = (q_i k_j) exp(G_i - G_j), j <= i         N = U - W S         Y = diag(exp(G)) Q S + P N
//   S' = exp(G_last) S + (diag(exp(G_last - G)) K)^T N
// Mamba2 (Dao and Gu, Transformers are SSMs, 2024) has N = U = diag(dt) X, with B as K and C as Q.
//
// Only N depends on S. So prepare_chunks computes the other matrices of all chunks at once, and scan_chunks goes from
// chunk to chunk with S in registers, in fp32. Tokens after a sequence's valid ones change no state, not by a bit:
// their log decays, strengths and steps are 0.

#include "mixer.cuh"
#include "row.cuh"

constexpr int CHUNK = 64, CHUNK_WARPS = CHUNK / 16, BLOCKS = CHUNK / 16;  // 16 x 16 blocks of a chunk's matrices
constexpr int KEY_STEPS = KEY_DIM / 16, VALUE_STEPS = VALUE_DIM / 16;
constexpr int KEY_STRIDE = KEY_DIM / 8 + 1, VALUE_STRIDE = VALUE_DIM / 8 + 1;  // chunks of 16 bytes; odd
constexpr int FLOAT_STRIDE = CHUNK + 4;
constexpr int CONV_TOKENS = 8, CONV_VALUES = 128;  // tokens of a warp; its channels, if they are values
constexpr int CONV_UNITS = 2 * KEY_HEADS + (VALUES + CONV_VALUES - 1) / CONV_VALUES;
static_assert(THREADS == 32 * CHUNK_WARPS && KEY_DIM % 32 == 0 && VALUE_DIM % SCAN_COLUMNS == 0);
static_assert(SCAN_COLUMNS % 16 == 0);

// Operands on tensor cores are of the model's type. Those of Mamba2 have no bound, so they are bf16.
constexpr bool OWN_TYPE = DELTA || BF16;
__device__ inline u32 pack_pair(float low, float high) {
  return OWN_TYPE ? from_floats(low, high) : bf16_from_floats(low, high);
}
__device__ inline float2 unpack_pair(u32 pair) { return OWN_TYPE ? to_floats(pair) : bf16_to_floats(pair); }
__device__ inline void mma(float (&sums)[4], const uint4& a, u32 b0, u32 b1) {
  const u32 words[4] = {a.x, a.y, a.z, a.w};
  if constexpr (OWN_TYPE)
    mma_m16n8k16(sums, words, b0, b1);
  else
    mma_m16n8k16_bf16(sums, words, b0, b1);
}
__device__ inline float query_scale() { return DELTA ? rsqrt_fast(KEY_DIM) : 1.0f; }

// Operands of a head's chunk in global memory, in fragment order: a uint4 of each lane is what it has of 16 x 16
// values of an operand A of mma.m16n8k16, or of two tiles of the result.
struct ChunkOperands {
  static constexpr int W = 0, Q = W + (DELTA ? BLOCKS * KEY_STEPS : 0), K = Q + BLOCKS * KEY_STEPS,
                       P = K + BLOCKS * KEY_STEPS, U = P + BLOCKS * BLOCKS, SUMS = U + BLOCKS * VALUE_STEPS;
  static constexpr int PLACES = 32 * SUMS + CHUNK / 4;  // the last are the sums of log decays, in powers of two
  uint4* own;

  __device__ ChunkOperands(const u16* operands, int sequence, int chunks, int chunk, int head)
      : own(const_cast<uint4*>(reinterpret_cast<const uint4*>(operands)) +
            (((i64)sequence * chunks + chunk) * MIXER_HEADS + head) * PLACES) {}
  // Of this lane: step `step` of row or column block `block` of an operand with `steps` of these.
  __device__ uint4* at(int operand, int block, int steps, int step) const {
    return own + 32 * (operand + block * steps + step) + threadIdx.x % 32;
  }
  __device__ float* sums() const { return reinterpret_cast<float*>(own + 32 * SUMS); }
};
static_assert(16 * ChunkOperands::PLACES == CHUNK_OPERAND_BYTES);

// EACH adjacent channels per lane.
template <int EACH>
__device__ inline void read_channels(float (&values)[EACH], const u16* from) {
  if constexpr (EACH == 4)
    unpack(values, load_cg(reinterpret_cast<const uint2*>(from)));
  else
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] = to_float(load_cg(from + i));
}

// The convolution of CONV_TOKENS tokens, from `token` on, in EACH channels from `channel` on. valid: tokens that count,
// whose last inputs are the next state. units: whether a warp's channels are a vector that becomes a unit vector.
template <int EACH>
__device__ inline void convolve(const u16* projected, const float* taps, const float* conv_bias, const float* states,
                                float* next_states, u16* convolved, int sequence, int tokens, int token, int valid,
                                int channel, bool units) {
  float inputs[CONV_TOKENS + PAST][EACH], factors[CONV_KERNEL][EACH], biases[EACH];
  const i64 state = ((i64)sequence * CHANNELS + channel) * PAST, first = (i64)sequence * tokens;
#pragma unroll
  for (int i = 0; i < CONV_TOKENS + PAST; ++i) {
    const int at = token + i - PAST;
    if (at >= 0) {
      read_channels(inputs[i], projected + (first + (at < tokens ? at : 0)) * IN_PROJ_SIZE + FIRST_CHANNEL + channel);
      continue;
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) inputs[i][j] = load_cg(states + state + j * PAST + PAST + at);
  }
#pragma unroll
  for (int i = 0; i < CONV_KERNEL; ++i)
#pragma unroll
    for (int j = 0; j < EACH; ++j) factors[i][j] = taps[i * CHANNELS + channel + j];
#pragma unroll
  for (int j = 0; j < EACH; ++j) biases[j] = CONV_BIAS ? conv_bias[channel + j] : 0.0f;
#pragma unroll
  for (int i = 0; i < CONV_TOKENS + PAST; ++i) {
    const int place = token + i - valid;  // in the next state
    if (place < 0 || place >= PAST || (i < PAST && token > 0)) continue;
#pragma unroll
    for (int j = 0; j < EACH; ++j) next_states[state + j * PAST + place] = inputs[i][j];
  }
#pragma unroll
  for (int i = 0; i < CONV_TOKENS; ++i) {
    float sums[EACH], square = 0;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      sums[j] = biases[j];
#pragma unroll
      for (int k = 0; k < CONV_KERNEL; ++k) sums[j] += factors[k][j] * inputs[i + k][j];
      sums[j] = silu(sums[j]);
      square += sums[j] * sums[j];
    }
    if (units) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) square += __shfl_xor_sync(~0u, square, other);
      const float factor = rsqrt_fast(square + UNIT_EPSILON);
#pragma unroll
      for (int j = 0; j < EACH; ++j) sums[j] *= factor;
    }
    if (token + i >= tokens) return;
    u16* const out = convolved + (first + token + i) * CHANNELS + channel;
    if constexpr (EACH == 4)
      *reinterpret_cast<uint2*>(out) = {pack_pair(sums[0], sums[1]), pack_pair(sums[2], sums[3])};
    else
#pragma unroll
      for (int j = 0; j < EACH; ++j) out[j] = (u16)pack_pair(sums[j], 0.0f);
  }
}

// Number of this run's tokens of a sequence that count; first: tokens of earlier runs.
__device__ inline int valid_of(const i64* valid_tokens, int sequence, i64 first, i64 tokens) {
  return (int)clamp(valid_tokens[sequence] - first, 0, tokens);
}

// Convolution and SiLU of projected [rows,IN_PROJ_SIZE] to convolved [rows,CHANNELS]; a delta net's queries and keys
// become unit vectors. A warp has CONV_TOKENS tokens of a head's queries or keys, or of CONV_VALUES values.
extern "C" __global__ void __launch_bounds__(THREADS)
    convolve_tokens(const u16* projected, const float* taps, const float* conv_bias, const float* conv_states,
                    float* next_conv_states, const i64* valid_tokens, u16* convolved, i64 tokens, i64 first) {
  constexpr int GROUPS = (CONV_UNITS + CHUNK_WARPS - 1) / CHUNK_WARPS;
  const int unit = blockIdx.x % GROUPS * CHUNK_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x / GROUPS * CONV_TOKENS, sequence = blockIdx.y;
  pdl_wait();
  if (unit >= CONV_UNITS) return;
  const int valid = valid_of(valid_tokens, sequence, first, tokens);
  const bool is_key = unit < 2 * KEY_HEADS;
  const int begin = unit < KEY_HEADS ? FIRST_QUERY : FIRST_KEY, value = (unit - 2 * KEY_HEADS) * CONV_VALUES + 4 * lane;
  if (is_key)
    convolve<KEY_DIM / 32>(projected, taps, conv_bias, conv_states, next_conv_states, convolved, sequence, (int)tokens,
                           token, valid, begin + unit % KEY_HEADS * KEY_DIM + lane * (KEY_DIM / 32), DELTA);
  else if (value < VALUES)
    convolve<4>(projected, taps, conv_bias, conv_states, next_conv_states, convolved, sequence, (int)tokens, token,
                valid, FIRST_VALUE + value, false);
}

struct ChunkTiles {
  uint4 queries[CHUNK][KEY_STRIDE], keys[CHUNK][KEY_STRIDE], values[CHUNK][VALUE_STRIDE];
  float products[CHUNK][FLOAT_STRIDE], inverse[CHUNK][FLOAT_STRIDE];  // A and T; only of delta nets
  float logs[CHUNK], sums[CHUNK], strengths[CHUNK], decayed[CHUNK];   // strengths: steps of Mamba2
};
static_assert(sizeof(ChunkTiles) == CHUNK_SMEM);

// Copy `left` rows of CHUNK to smem, WIDTH values each; the others are zero.
template <int WIDTH>
__device__ inline void copy_chunk(uint4* tile, const u16* rows, int left) {
  constexpr int ROW_CHUNKS = WIDTH / 8;
  const SmemPtr target(tile);
  for (int i = threadIdx.x; i < CHUNK * ROW_CHUNKS; i += THREADS) {
    const int row = i / ROW_CHUNKS, place = i % ROW_CHUNKS;
    const bool valid = row < left;
    cp_async(target.plus(row * (ROW_CHUNKS + 1) + place), rows + (i64)(valid ? row : 0) * CHANNELS + 8 * place, valid);
  }
}

__device__ inline uint4 as_uint4(const u32 (&words)[4]) { return {words[0], words[1], words[2], words[3]}; }

// inverse [CHUNK,CHUNK] of 1 + products, both lower triangular, by blocks of 16: those on the diagonal by substitution,
// a warp each; then T_ij = -T_ii sum of A_ik T_kj, the further from the diagonal the later.
__device__ inline void invert(ChunkTiles& own) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, base = 16 * warp;
  if (lane < 16) {
    float column[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      column[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) column[i] -= own.products[base + i][base + j] * column[j];
      own.inverse[base + i][base + lane] = column[i];
    }
  }
  const int row = lane / 2, first = lane % 2 * 8;
  for (int distance = 1; distance < BLOCKS; ++distance) {
    __syncthreads();
    if (warp + distance >= BLOCKS) continue;
    const int i = warp + distance, j = warp;
    float sums[8] = {}, result[8] = {};
    for (int k = 16 * j; k < 16 * i; ++k) {
      const float factor = own.products[16 * i + row][k];
#pragma unroll
      for (int c = 0; c < 8; ++c) sums[c] += factor * own.inverse[k][16 * j + first + c];
    }
    float* const out = own.inverse[16 * i + row] + 16 * j + first;
#pragma unroll
    for (int c = 0; c < 8; ++c) out[c] = sums[c];
    warp_sync();
#pragma unroll 4
    for (int k = 0; k < 16; ++k) {
      const float factor = own.inverse[16 * i + row][16 * i + k];
#pragma unroll
      for (int c = 0; c < 8; ++c) result[c] -= factor * own.inverse[16 * i + k][16 * j + first + c];
    }
    warp_sync();
#pragma unroll
    for (int c = 0; c < 8; ++c) out[c] = result[c];
  }
  __syncthreads();
}

// T diag(factors) times a tile of STEPS * 16 columns, to `operand` in fragment order.
template <int STEPS>
__device__ inline void multiply_inverse(const ChunkTiles& own, const float* factors, uint4* tile,
                                        const ChunkOperands& operands, int operand) {
  constexpr int STRIDE = 2 * STEPS + 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const SmemPtr rows(tile + lane % 16 * STRIDE + lane / 16);
  float result[2 * STEPS][4] = {};
  for (int k = 0; k <= warp; ++k) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 16 * k + 2 * t + i / 2 * 8;
      const float* const from = own.inverse[16 * warp + g + i % 2 * 8] + column;
      words[i] = pack_pair(from[0] * factors[column], from[1] * factors[column + 1]);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 column[4];
      ldmatrix_x4_trans(column, rows.plus(16 * k * STRIDE + 2 * step));
      mma(result[2 * step], as_uint4(words), column[0], column[1]);
      mma(result[2 * step + 1], as_uint4(words), column[2], column[3]);
    }
  }
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const float (&left)[4] = result[2 * step], (&right)[4] = result[2 * step + 1];
    *operands.at(operand, warp, STEPS, step) = {pack_pair(left[0], left[1]), pack_pair(left[2], left[3]),
                                                pack_pair(right[0], right[1]), pack_pair(right[2], right[3])};
  }
}

// The operands of a chunk of a head. Grid [chunks * MIXER_HEADS, sequences]; a warp has 16 tokens.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare_chunks(const u16* projected, const u16* convolved, const float* decay, const float* dt_bias,
                   const i64* valid_tokens, u16* operands, i64 tokens, i64 first) {
  DYNAMIC_SMEM(memory);
  ChunkTiles& own = *reinterpret_cast<ChunkTiles*>(memory);
  const int head = blockIdx.x % MIXER_HEADS, chunk = blockIdx.x / MIXER_HEADS, sequence = blockIdx.y;
  const int key_head = head / (MIXER_HEADS / KEY_HEADS), begin = chunk * CHUNK, left = (int)tokens - begin;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const i64 row = sequence * tokens + begin;
  const ChunkOperands out(operands, sequence, gridDim.x / MIXER_HEADS, chunk, head);
  pdl_wait();
  const u16* const rows = convolved + row * CHANNELS;
  copy_chunk<KEY_DIM>(own.queries[0], rows + FIRST_QUERY + key_head * KEY_DIM, left);
  copy_chunk<KEY_DIM>(own.keys[0], rows + FIRST_KEY + key_head * KEY_DIM, left);
  copy_chunk<VALUE_DIM>(own.values[0], rows + FIRST_VALUE + head * VALUE_DIM, left);
  cp_async_commit();
  const int token = threadIdx.x;
  if (token < CHUNK) {
    const bool counts = begin + token < valid_of(valid_tokens, sequence, first, tokens);
    const u16* const from = projected + (row + (counts ? token : 0)) * IN_PROJ_SIZE;
    float step = softplus(to_float(load_cg(from + FIRST_STEP + head)) + dt_bias[head]);
    if (!DELTA) step = fmaxf(step, TIME_STEP_MIN);
    const float strength =
        DELTA ? 1.0f / (1.0f + exp2_fast(-LOG2E * to_float(load_cg(from + FIRST_STRENGTH + head)))) : step;
    own.logs[token] = counts ? LOG2E * step * decay[head] : 0.0f;
    own.strengths[token] = counts ? strength : 0.0f;
  }
  __syncthreads();
  if (token < CHUNK) {
    float sum = 0;
#pragma unroll 16
    for (int i = 0; i < CHUNK; ++i) sum += i <= token ? own.logs[i] : 0.0f;
    own.sums[token] = sum, own.decayed[token] = own.strengths[token] * exp2_fast(sum);
    out.sums()[token] = sum;
  }
  cp_async_wait<0>();
  __syncthreads();

  // Q, P and A: this warp's 16 tokens beside those up to its last.
  const SmemPtr own_rows(own.keys[16 * warp + lane % 16] + lane / 16);
  const SmemPtr query_rows(own.queries[16 * warp + lane % 16] + lane / 16);
  const SmemPtr key_rows(own.keys[lane / 16 * 8 + lane % 8] + lane / 8 % 2);
  uint4 queries[KEY_STEPS], keys[KEY_STEPS];
#pragma unroll
  for (int step = 0; step < KEY_STEPS; ++step) {
    u32 words[4];
    ldmatrix_x4(words, query_rows.plus(2 * step));
    *out.at(ChunkOperands::Q, warp, KEY_STEPS, step) = queries[step] = as_uint4(words);
    ldmatrix_x4(words, own_rows.plus(2 * step));
    keys[step] = as_uint4(words);
  }
  for (int block = 0; block <= warp; ++block) {
    float of_queries[2][4] = {}, of_keys[2][4] = {};
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
      u32 words[4];
      ldmatrix_x4(words, key_rows.plus(16 * block * KEY_STRIDE + 2 * step));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        mma(of_queries[tile], queries[step], words[2 * tile], words[2 * tile + 1]);
        if (DELTA) mma(of_keys[tile], keys[step], words[2 * tile], words[2 * tile + 1]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int to = 16 * warp + g + i / 2 * 8, from = 16 * block + 8 * tile + 2 * t + i % 2;
        const float decayed = from <= to ? exp2_fast(own.sums[to] - own.sums[from]) : 0.0f;
        of_queries[tile][i] *= query_scale() * decayed;
        if (DELTA) own.products[to][from] = from < to ? own.strengths[to] * decayed * of_keys[tile][i] : 0.0f;
      }
    *out.at(ChunkOperands::P, warp, BLOCKS, block) = {
        pack_pair(of_queries[0][0], of_queries[0][1]), pack_pair(of_queries[0][2], of_queries[0][3]),
        pack_pair(of_queries[1][0], of_queries[1][1]), pack_pair(of_queries[1][2], of_queries[1][3])};
  }

  // K, with its tokens' decays up to the chunk's end, as the operand A whose rows are keys.
  const SmemPtr key_columns(own.keys[lane / 16 * 8 + lane % 8] + lane / 8 % 2);
  const float last = own.sums[CHUNK - 1];
  for (int step = warp; step < KEY_STEPS; step += CHUNK_WARPS)
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      u32 words[4];
      ldmatrix_x4_trans(words, key_columns.plus(16 * block * KEY_STRIDE + 2 * step));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * block + 2 * t + i / 2 * 8;
        const float2 pair = unpack_pair(words[i]);
        words[i] = pack_pair(pair.x * exp2_fast(last - own.sums[at]), pair.y * exp2_fast(last - own.sums[at + 1]));
      }
      *out.at(ChunkOperands::K, step, BLOCKS, block) = as_uint4(words);
    }

  if constexpr (DELTA) {
    warp_sync();  // a warp inverts the block of A that it has computed
    invert(own);
    multiply_inverse<KEY_STEPS>(own, own.decayed, own.keys[0], out, ChunkOperands::W);
    multiply_inverse<VALUE_STEPS>(own, own.strengths, own.values[0], out, ChunkOperands::U);
  } else {
    const SmemPtr value_rows(own.values[16 * warp + lane % 16] + lane / 16);
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step) {
      u32 words[4];
      ldmatrix_x4(words, value_rows.plus(2 * step));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = own.strengths[16 * warp + g + i % 2 * 8];
        const float2 pair = unpack_pair(words[i]);
        words[i] = pack_pair(factor * pair.x, factor * pair.y);
      }
      *out.at(ChunkOperands::U, warp, VALUE_STEPS, step) = as_uint4(words);
    }
  }
}

// From chunk to chunk: results y [rows,VALUES] fp32, and the next states. A CTA has SCAN_COLUMNS columns of a head's
// state; grid [MIXER_HEADS * VALUE_DIM / SCAN_COLUMNS, sequences]. A warp has 16 tokens of a chunk, and every fourth 16
// keys of the state, from its own number on. states and next_states may be the same.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    scan_chunks(const u16* operands, const float* states, float* next_states, float* y, i64 tokens) {
  constexpr int PAIRS = SCAN_COLUMNS / 16, STRIDE = 2 * PAIRS + 1,
                OWN_STEPS = (KEY_STEPS + CHUNK_WARPS - 1) / CHUNK_WARPS;
  struct ScanTiles {
    uint4 state[KEY_DIM][STRIDE], added[CHUNK][STRIDE];
  };
  STATIC_SMEM(ScanTiles, own);
  constexpr int SLICES = VALUE_DIM / SCAN_COLUMNS;
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, sequence = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunks = ((int)tokens + CHUNK - 1) / CHUNK;
  // Of this lane: the values (key, column) and (key, column + 1) of a state.
  const auto place = [&](int step, int half, int tile) {
    const int key = 16 * (warp + CHUNK_WARPS * step) + g + 8 * half, column = slice * SCAN_COLUMNS + 8 * tile + 2 * t;
    const i64 group = ((i64)sequence * MIXER_HEADS + head) * (VALUE_DIM / STATE_COLUMNS) + column / STATE_COLUMNS;
    return (group * KEY_DIM + key) * STATE_COLUMNS + column % STATE_COLUMNS;
  };
  const auto has = [&](int step) { return KEY_STEPS % CHUNK_WARPS == 0 || warp + CHUNK_WARPS * step < KEY_STEPS; };
  pdl_wait();
  float state[OWN_STEPS][2 * PAIRS][4] = {};
#pragma unroll
  for (int step = 0; step < OWN_STEPS; ++step)
#pragma unroll
    for (int tile = 0; tile < 2 * PAIRS; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!has(step)) continue;
        const float2 pair = load_cg(reinterpret_cast<const float2*>(states + place(step, half, tile)));
        state[step][tile][2 * half] = pair.x, state[step][tile][2 * half + 1] = pair.y;
      }
  uint4 w[DELTA ? KEY_STEPS : 1], q[KEY_STEPS];
  const auto fetch = [&](int chunk) {
    const ChunkOperands from(operands, sequence, chunks, chunk, head);
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
      if constexpr (DELTA) w[step] = load_cg(from.at(ChunkOperands::W, warp, KEY_STEPS, step));
      q[step] = load_cg(from.at(ChunkOperands::Q, warp, KEY_STEPS, step));
    }
  };
  fetch(0);
  const SmemPtr state_rows(own.state[lane % 16] + lane / 16), added_rows(own.added[lane % 16] + lane / 16);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const ChunkOperands from(operands, sequence, chunks, chunk, head);
    uint4 p[BLOCKS], k[OWN_STEPS][BLOCKS], u[PAIRS];
    float sums[2];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
      u[pair] = load_cg(from.at(ChunkOperands::U, warp, VALUE_STEPS, slice * PAIRS + pair));
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] = load_cg(from.sums() + 16 * warp + g + 8 * half);
    const float last = load_cg(from.sums() + CHUNK - 1);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      p[block] = block <= warp ? load_cg(from.at(ChunkOperands::P, warp, BLOCKS, block)) : uint4{};
#pragma unroll
      for (int step = 0; step < OWN_STEPS; ++step)
        if (has(step)) k[step][block] = load_cg(from.at(ChunkOperands::K, warp + CHUNK_WARPS * step, BLOCKS, block));
    }
#pragma unroll
    for (int step = 0; step < OWN_STEPS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!has(step)) continue;
        u32* const row = reinterpret_cast<u32*>(own.state[16 * (warp + CHUNK_WARPS * step) + g + 8 * half]) + t;
#pragma unroll
        for (int tile = 0; tile < 2 * PAIRS; ++tile)
          row[4 * tile] = pack_pair(state[step][tile][2 * half], state[step][tile][2 * half + 1]);
      }
    __syncthreads();
    float of_w[2 * PAIRS][4] = {}, result[2 * PAIRS][4] = {};
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        u32 columns[4];
        ldmatrix_x4_trans(columns, state_rows.plus(16 * step * STRIDE + 2 * pair));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (DELTA) mma(of_w[2 * pair + half], w[step], columns[2 * half], columns[2 * half + 1]);
          mma(result[2 * pair + half], q[step], columns[2 * half], columns[2 * half + 1]);
        }
      }
    if (chunk + 1 < chunks) fetch(chunk + 1);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const u32 words[4] = {u[pair].x, u[pair].y, u[pair].z, u[pair].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // rows g and g + 8, of two tiles
        const int tile = 2 * pair + i / 2, half = i % 2;
        const float2 given = unpack_pair(words[i]);
        reinterpret_cast<u32*>(own.added[16 * warp + g + 8 * half])[4 * tile + t] =
            pack_pair(given.x - of_w[tile][2 * half], given.y - of_w[tile][2 * half + 1]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2 * PAIRS; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) result[tile][i] *= query_scale() * exp2_fast(sums[i / 2]);
    const float decayed = exp2_fast(last);
#pragma unroll
    for (int step = 0; step < OWN_STEPS; ++step)
#pragma unroll
      for (int tile = 0; tile < 2 * PAIRS; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[step][tile][i] *= decayed;
    __syncthreads();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        u32 columns[4];
        ldmatrix_x4_trans(columns, added_rows.plus(16 * block * STRIDE + 2 * pair));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (block <= warp) mma(result[2 * pair + half], p[block], columns[2 * half], columns[2 * half + 1]);
#pragma unroll
          for (int step = 0; step < OWN_STEPS; ++step)
            if (has(step)) mma(state[step][2 * pair + half], k[step][block], columns[2 * half], columns[2 * half + 1]);
        }
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = chunk * CHUNK + 16 * warp + g + 8 * half;
      if (token >= tokens) continue;
      float* const row = y + (sequence * tokens + token) * VALUES + head * VALUE_DIM + slice * SCAN_COLUMNS + 2 * t;
#pragma unroll
      for (int tile = 0; tile < 2 * PAIRS; ++tile)
        *reinterpret_cast<float2*>(row + 8 * tile) = {result[tile][2 * half], result[tile][2 * half + 1]};
    }
  }
#pragma unroll
  for (int step = 0; step < OWN_STEPS; ++step)
#pragma unroll
    for (int tile = 0; tile < 2 * PAIRS; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (has(step))
          *reinterpret_cast<float2*>(next_states + place(step, half, tile)) = {state[step][tile][2 * half],
                                                                               state[step][tile][2 * half + 1]};
}

// Norm and gate of y [rows,VALUES], to x of out_proj; Mamba2 adds skip times its values and norms what is gated. A warp
// has a norm group of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    gate_tokens(const u16* projected, const u16* convolved, const float* y, const float* norm, const float* skip,
                u16* x) {
  constexpr int WIDTH = VALUES / NORM_GROUPS, QUADS = WIDTH / 4, SHARE = (QUADS + 31) / 32;
  const int group = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 row = blockIdx.y;
  pdl_wait();
  if (group >= NORM_GROUPS) return;
  float values[SHARE][4], gates[SHARE][4], sum = 0;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int at = group * WIDTH + 4 * (lane + 32 * i);
    const bool inside = QUADS % 32 == 0 || lane + 32 * i < QUADS;
#pragma unroll
    for (int j = 0; j < 4; ++j) values[i][j] = gates[i][j] = 0;
    if (!inside) continue;
    unpack(values[i], load_cg(reinterpret_cast<const uint4*>(y + row * VALUES + at)));
    unpack(gates[i], load_cg(reinterpret_cast<const uint2*>(projected + row * IN_PROJ_SIZE + FIRST_GATE + at)));
    float given[4] = {};
    if constexpr (!DELTA) {
      const uint2 pairs = load_cg(reinterpret_cast<const uint2*>(convolved + row * CHANNELS + FIRST_VALUE + at));
      const float2 low = unpack_pair(pairs.x), high = unpack_pair(pairs.y);
      given[0] = low.x, given[1] = low.y, given[2] = high.x, given[3] = high.y;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      gates[i][j] = silu(gates[i][j]);
      if constexpr (!DELTA) values[i][j] = (values[i][j] + skip[at / VALUE_DIM] * given[j]) * gates[i][j];
      sum += values[i][j] * values[i][j];
    }
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  const float factor = rsqrt_fast(sum * (1.0f / WIDTH) + EPSILON);
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const int at = group * WIDTH + 4 * (lane + 32 * i);
    if (QUADS % 32 != 0 && lane + 32 * i >= QUADS) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      values[i][j] *= factor * norm[DELTA ? at % VALUE_DIM + j : at + j] * (DELTA ? gates[i][j] : 1.0f);
    *reinterpret_cast<uint2*>(x + row * VALUES + at) = pack(values[i]);
  }
}
