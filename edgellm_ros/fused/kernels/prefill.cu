// SPDX-License-Identifier: Apache-2.0
// Prefill: the tokens of prompts through all layers, compiled for one model and GPU architecture.
//
// norm_tokens -- (qkv) -- rope_tokens -- prompt_attention -- combine_prompt -- (o) -- norm_tokens -- (gate_up) --
// activate -- (down) --
//
// In recurrent layers of a hybrid: norm_tokens -- (in_proj) -- prompt_mixer.cu -- (out_proj) --
//
// Products with the weights are a library's (`FusedPrefill`). The residual stream is fp32 [rows,H]: `o` and `down` add
// to it. A row is a token; the rows of a sequence follow each other. Values between the kernels are of the model's
// type.

#include "fixed_point.cuh"
#include "prompt_attention.cuh"
#include "rope.cuh"
#include "row.cuh"

using StreamRow = Row<HIDDEN>;
using PromptForm = Form<1, KV_TILE>;
static_assert(sizeof(PromptForm) == PROMPT_ATTENTION_SMEM);
constexpr int GATE_UP_SIZE = (SQUARED_RELU ? 1 : 2) * INNER;

// A CTA has a row: residual += bias + deepstack; x = RMSNorm(residual). embeds: the row begins with them, in the first
// layer. Any of bias, deepstack, hidden (before deepstack), state (after deepstack) and x may be absent.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_tokens(const u16* norm, const u16* embeds, const u16* bias, const u16* deepstack, float* residual, u16* hidden,
                u16* state, u16* x) {
  struct Sums {
    float values[THREADS / 32];
  };
  STATIC_SMEM(Sums, sums);
  const i64 first = (i64)blockIdx.x * HIDDEN;
  uint2 scales[StreamRow::SHARE];
  if (x) StreamRow::each([&](int i) { scales[i] = reinterpret_cast<const uint2*>(norm)[StreamRow::quad(i)]; });
  pdl_wait();
  StreamRow row;
  if (embeds)
    row.read(embeds + first);
  else
    row.read(residual + first);
  row.add_row(bias);
  if (hidden) row.write(hidden + first);
  row.add_row(deepstack ? deepstack + first : nullptr);
  if (state) row.write(state + first);
  if (embeds || bias || deepstack) row.write(residual + first);
  if (!x) return;
  float sum = 0;
  StreamRow::each([&](int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += row.values[i][j] * row.values[i][j];
  });
  const float factor = rsqrt_fast(sum_of_threads(sum, sums.values) * (1.0f / HIDDEN) + EPSILON);
  StreamRow::each([&](int i) {
    float scale[4];
    unpack(scale, scales[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) row.values[i][j] *= factor * scale[j];
  });
  row.write(x + first);
}

// A warp has ROPE_HEADS heads of a row of qkv [rows,QKV_SIZE]: bias, norm and RoPE; queries stay there, keys and values
// go to the cache. kv_length includes the new tokens and `behind` rows after them.
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_tokens(u16* qkv, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
                const float* sin_table, const i64* position_ids, const i64* kv_length, CacheValue* key_cache,
                CacheValue* value_cache, i64 tokens, i64 stride, i64 behind) {
  constexpr int WARPS = THREADS / 32, ALL = HEADS + 2 * KV_HEADS;
  struct Places {
    float values[WARPS][HEAD_DIM];
  };
  STATIC_SMEM(Places, places);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
  const int first = blockIdx.x * ROPE_HEADS * WARPS + warp;
  const int sequence = row / (int)tokens, token = row % (int)tokens;
  u16* const from = qkv + (i64)row * QKV_SIZE;
  pdl_wait();
  u16 raw[ROPE_HEADS][RopeHead::ELEMENTS];  // of all heads before the first is used
#pragma unroll
  for (int each = 0; each < ROPE_HEADS; ++each)
#pragma unroll
    for (int i = 0; i < RopeHead::ELEMENTS; ++i) {
      const int head = first + each * WARPS;
      raw[each][i] = load_cg(from + column_of_head(head < ALL ? head : 0) + lane + 32 * i);
    }
  const i64 position = ROTARY_DIM ? position_ids[sequence * stride + token] * (ROTARY_DIM / 2) : 0;
  const i64 slot = kv_length[sequence] - behind - tokens + token;
#pragma unroll
  for (int each = 0; each < ROPE_HEADS; ++each) {
    const int head = first + each * WARPS;
    if (head >= ALL) return;
    const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS;
    RopeHead fresh;
    fresh.prepare(is_query   ? q_norm
                  : is_value ? nullptr
                             : k_norm,
                  bias + column_of_head(head), cos_table + position, sin_table + position, !is_value);
#pragma unroll
    for (int i = 0; i < RopeHead::ELEMENTS; ++i) fresh.values[i] = to_float(raw[each][i]) + fresh.bias[i];
    warp_sync();  // the scratch is reused
    fresh.finish(!is_value, places.values[warp]);
    if (is_query) {
#pragma unroll
      for (int i = 0; i < RopeHead::ELEMENTS; ++i)
        from[column_of_head(head) + fresh.at[i]] = from_float(fresh.values[i]);
      continue;
    }
    const i64 place = ((i64)sequence * KV_HEADS + (head - HEADS) % KV_HEADS) * CAPACITY + slot;
    CacheValue* const out = (is_value ? value_cache : key_cache) + place * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < RopeHead::ELEMENTS; ++i) out[fresh.at[i]] = to_cache(fresh.values[i]);
  }
}

extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    prompt_attention(const u16* qkv, const i64* kv_length, const CacheValue* key_cache, const CacheValue* value_cache,
                     u16* out, float* sums, float* scales, i64 window, i64 tokens, i64 behind, i64 splits,
                     const unsigned char* mask) {
  pdl_wait();
  const int length = (int)(kv_length[blockIdx.y] - behind);
  attend_prompt<PromptForm>(qkv, length, key_cache, value_cache, out, sums, reinterpret_cast<float2*>(scales),
                            (int)window, (int)tokens, (int)splits, mask);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    combine_prompt(const u16* qkv, const float* sums, const float* scales, const i64* kv_length, u16* out, i64 window,
                   i64 tokens, i64 behind, i64 splits) {
  combine_prompt_splits<PromptForm>(qkv, sums, reinterpret_cast<const float2*>(scales), kv_length, out, (int)window,
                                    (int)tokens, (int)behind, (int)splits);
}

__device__ inline void unpack(float (&values)[8], uint4 words) {
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats(pairs[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

// SiLU(gate) * up, or the square of a ReLU: gate_up [rows,GATE_UP_SIZE] to x [rows,INNER]. A thread has eight values of
// ACTIVATE_ROWS rows, all of which it loads before it computes.
extern "C" __global__ void __launch_bounds__(THREADS) activate(const u16* gate_up, const u16* bias, u16* x, i64 rows) {
  constexpr int WORDS = INNER / 8;
  const int place = blockIdx.x * THREADS + threadIdx.x;
  const i64 first = (i64)blockIdx.y * ACTIVATE_ROWS;
  pdl_wait();
  if (place >= WORDS) return;
  uint4 gates[ACTIVATE_ROWS], ups[ACTIVATE_ROWS];
#pragma unroll
  for (int i = 0; i < ACTIVATE_ROWS; ++i) {
    const i64 row = first + i < rows ? first + i : first;
    const uint4* const source = reinterpret_cast<const uint4*>(gate_up + row * GATE_UP_SIZE) + place;
    gates[i] = load_cg(source), ups[i] = SQUARED_RELU ? uint4{} : load_cg(source + WORDS);
  }
  float gate_bias[8] = {}, up_bias[8] = {};
  if (MLP_BIAS) unpack(gate_bias, reinterpret_cast<const uint4*>(bias)[place]);
  if (MLP_BIAS && !SQUARED_RELU) unpack(up_bias, reinterpret_cast<const uint4*>(bias)[WORDS + place]);
#pragma unroll
  for (int i = 0; i < ACTIVATE_ROWS; ++i) {
    if (first + i >= rows) return;
    float gate[8], up[8];
    unpack(gate, gates[i]), unpack(up, ups[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      gate[j] += gate_bias[j], up[j] += up_bias[j];
      const float rectified = fmaxf(gate[j], 0.0f);
      gate[j] = SQUARED_RELU ? rectified * rectified : gate[j] / (1.0f + exp2_fast(-LOG2E * gate[j])) * up[j];
    }
    reinterpret_cast<uint4*>(x + (first + i) * INNER)[place] = {
        from_floats(gate[0], gate[1]), from_floats(gate[2], gate[3]), from_floats(gate[4], gate[5]),
        from_floats(gate[6], gate[7])};
  }
}

// x [rows,width] and the residual stream of the last token of each sequence, side by side. A sequence has `tokens`
// rows, from its token `first` on; one whose last token is not among them is left out.
extern "C" __global__ void __launch_bounds__(THREADS)
    keep_last(const u16* x, const float* residual, const i64* last_token_ids, u16* last_x, float* last_residual,
              i64 width, i64 tokens, i64 first) {
  pdl_wait();
  const i64 token = last_token_ids[blockIdx.x] - first, from = blockIdx.x * tokens + token;
  if (token < 0 || token >= tokens) return;
  StreamRow row;
  row.read(residual + from * HIDDEN);
  row.write(last_residual + (i64)blockIdx.x * HIDDEN);
  const uint4* const source = reinterpret_cast<const uint4*>(x + from * width);
  for (int i = threadIdx.x; i < width / 8; i += THREADS)
    reinterpret_cast<uint4*>(last_x + blockIdx.x * width)[i] = load_cg(source + i);
}

// The residual stream of the last token of each sequence, to that of decode steps, whose kernels compute logits. A
// sequence has `tokens` tokens here, from its token `first` on; one whose last token is not here is left as it is.
// residual has `each` rows of a sequence: all, or its last token's.
extern "C" __global__ void __launch_bounds__(THREADS)
    last_tokens(const float* residual, const u16* bias, const u16* deepstack, const i64* last_token_ids, i64* stream,
                i64 tokens, i64 first, i64 each) {
  pdl_wait();
  const i64 token = last_token_ids[blockIdx.x] - first;
  if (token < 0 || token >= tokens) return;
  StreamRow row;
  row.read(residual + (blockIdx.x * each + (each == tokens ? token : 0)) * HIDDEN);
  row.add_row(bias);
  row.add_row(deepstack ? deepstack + (blockIdx.x * tokens + token) * HIDDEN : nullptr);
  StreamRow::each([&](int i) {
    longlong2* const out = reinterpret_cast<longlong2*>(stream + (i64)blockIdx.x * HIDDEN) + 2 * StreamRow::quad(i);
    out[0] = {to_fixed(row.values[i][0]), to_fixed(row.values[i][1])};
    out[1] = {to_fixed(row.values[i][2]), to_fixed(row.values[i][3])};
  });
}

#if FUSED_SIZE
// A CTA has a row: three states of the base side by side to x [rows,3 * HIDDEN], normalised or not, for a draft head.
// fused [rows,FUSED_SIZE] begins with the bias, to which the product is added.
extern "C" __global__ void __launch_bounds__(THREADS)
    join_states(const u16* low, const u16* middle, const u16* high, const u16* low_norm, const u16* middle_norm,
                const u16* high_norm, const u16* bias, u16* x, float* fused) {
  struct Sums {
    float values[THREADS / 32];
  };
  STATIC_SMEM(Sums, sums);
  const i64 first = (i64)blockIdx.x * HIDDEN;
  pdl_wait();
  StreamRow rows[3];
  rows[0].read(low + first), rows[1].read(middle + first), rows[2].read(high + first);
  float squares[3] = {};
  if (STATE_NORMS || JOINED_NORM)
#pragma unroll
    for (int state = 0; state < 3; ++state) {
      StreamRow::each([&](int i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) squares[state] += rows[state].values[i][j] * rows[state].values[i][j];
      });
      squares[state] = sum_of_threads(squares[state], sums.values);
    }
  const float all = (squares[0] + squares[1] + squares[2]) * (1.0f / 3);
#pragma unroll
  for (int state = 0; state < 3; ++state) {
    if (STATE_NORMS || JOINED_NORM) {
      const u16* const norm = state == 0 ? low_norm : state == 1 ? middle_norm : high_norm;
      const float factor = rsqrt_fast((JOINED_NORM ? all : squares[state]) * (1.0f / HIDDEN) + FUSION_EPSILON);
      StreamRow::each([&](int i) {
        float scale[4];
        unpack(scale, reinterpret_cast<const uint2*>(norm)[StreamRow::quad(i)]);
#pragma unroll
        for (int j = 0; j < 4; ++j) rows[state].values[i][j] *= factor * scale[j];
      });
    }
    rows[state].write(x + 3 * first + state * HIDDEN);
  }
  for (int i = threadIdx.x; i < FUSED_SIZE; i += THREADS)
    fused[(i64)blockIdx.x * FUSED_SIZE + i] = bias ? to_float(bias[i]) : 0.0f;
}

// fused [rows,FUSED_SIZE] in the model's type; in fp16, values beyond the range become its largest ones.
extern "C" __global__ void __launch_bounds__(THREADS) round_states(const float* fused, u16* out) {
  pdl_wait();
  const i64 first = (i64)blockIdx.x * FUSED_SIZE;
  for (int i = threadIdx.x; i < FUSED_SIZE; i += THREADS) {
    const float value = load_cg(fused + first + i);
    out[first + i] = from_float(BF16 ? value : fminf(fmaxf(value, -65504.0f), 65504.0f));
  }
}
#endif
