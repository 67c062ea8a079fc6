// SPDX-License-Identifier: Apache-2.0
// Kernels of a decode step, compiled for one model, GPU architecture and maximum number of rows.
//
// qkv -- attention -- combine_splits -- o --+
// in_proj -- mix -------------- out_proj ---+-- gate_up -- down -- (next layer) ... -- lm_head
//
// A layer has attention, or the recurrent mixer of a hybrid model (`recurrent.cuh`), or neither.
//
// Each kernel computes its own input x: RMSNorm of the residual stream, or the sum of the previous GEMV's partials.
// Every CTA repeats that, which is cheaper than another kernel, unless there are many rows: then prep_qkv,
// prep_in_proj, prep_out_proj, prep_gate_up, prep_down and prep_lm_head compute x [rows,K] once. combine_splits
// combines the splits of the attention and multiplies by the gates; without gates `o` does so itself without tensor
// cores, with quantised weights, and for one row of a small model.
//
// A row is a token. Several tokens per sequence (a chain or a tree) and many rows run rope_append_kv and
// tree_attention in place of `attention`; batches of single tokens run batch_attention, if a CTA of it fits on an SM
// beside a CTA of a GEMV.

#include "gemv.cuh"
#include "quantized.cuh"
#include "lora.cuh"
#include "norm.cuh"
#include "tied_head.cuh"
#include "plans.cuh"
#include "attention.cuh"
#include "tree_attention.cuh"
#if MIXER
#include "recurrent.cuh"
#endif

// GEMV plus LoRA: run this CTA's work units and add (x A) B of each row's adapter.
template <class P, class Epilogue>
__device__ inline void gemv_with_lora(const Smem<P>& smem, WeightPipeline<P>& pipeline, int first, int count,
                                      const LoraAccumulators<P>& lora, const Adapters& adapters, int rows,
                                      Epilogue epilogue) {
  if constexpr (LoraAccumulators<P>::USED) {
    const u16* inputs = nullptr;
    if constexpr (P::ACT_ORDER) inputs = reinterpret_cast<const u16*>(pipeline.weights + P::PERM);
    lora.compute(adapters, smem.x, first, count, rows, inputs);
    multiply_any<P>(smem, pipeline, first, count, [&](int tile, int at, int row, float sum, bool from_start) {
      epilogue(tile, at, row, sum + lora.of(tile - first / P::STEPS, at, row), from_start);
    });
  } else {
    multiply_any<P>(smem, pipeline, first, count, epilogue);
  }
}

// GEMV whose x is the RMSNorm of the residual stream, or of the embeddings in the first layer. ready: x from a prep
// kernel, if READY.
template <class P, bool READY, class Epilogue>
__device__ inline void gemv_of_norm(const u16* weights, const u16* norm, const u16* embeds, i64* residual, u16* hidden,
                                    bool hidden_is_normed, const u16* ready, int rows, const Adapters& adapters,
                                    Epilogue epilogue) {
  DYNAMIC_SMEM(memory);
  const Smem<P> smem(memory, ready);
  if (blockIdx.x >= P::BLOCKS) {  // padding CTA: keeps one CTA per SM
    pdl_wait();
    return;
  }
  const int first = P::first_unit(blockIdx.x), count = P::first_unit(blockIdx.x + 1) - first;
  WeightPipeline<P> pipeline(weights, smem.ring, first, count);
  if constexpr (P::X_IN_GMEM) {
    pdl_wait();
  } else if constexpr (READY) {
    pdl_wait();
    copy_x<P>(smem.x, ready, P::X_STEPS == P::STEPS ? 0 : first % P::STEPS * P::TILE_K);
  } else {
    Normed x;
    x.read_scales(norm);
    InversePermutation<P> places;
    places.read(weights);
    pdl_wait();
    norm_rows(x, residual, embeds, hidden, hidden_is_normed, smem.sums, rows,
              [&](int row) { share_x<P>(smem.x, x, 0, row, places); });
    for (int i = P::x_index(P::K, 0) + threadIdx.x; i < P::X; i += THREADS) smem.x[i] = 0;
  }
  if constexpr (!P::X_IN_GMEM) __syncthreads();
  gemv_with_lora<P>(smem, pipeline, first, count, LoraAccumulators<P>(memory), adapters, rows, epilogue);
}

// GEMV whose result is added to the residual stream. ready: x from a prep kernel, if READY; otherwise prepare() runs
// before pdl_wait, and fill(k, x) stores x from `k` on.
template <class P, bool READY, class Prepare, class Fill>
__device__ inline void gemv_to_residual(const u16* weights, const u16* bias, i64* residual, const u16* ready, int rows,
                                        const Adapters& adapters, Prepare prepare, Fill fill) {
  DYNAMIC_SMEM(memory);
  const Smem<P> smem(memory, ready);
  if (blockIdx.x >= P::BLOCKS) {  // padding CTA: keeps one CTA per SM
    pdl_wait();
    return;
  }
  const int first = P::first_unit(blockIdx.x), count = P::first_unit(blockIdx.x + 1) - first;
  WeightPipeline<P> pipeline(weights, smem.ring, first, count);
  if constexpr (!READY) prepare();
  pdl_wait();
  if constexpr (!P::X_IN_GMEM) {
    const int first_k = P::X_STEPS == P::STEPS ? 0 : first % P::STEPS * P::TILE_K;
    if constexpr (READY)
      copy_x<P>(smem.x, ready, first_k);
    else
      fill(first_k, smem.x);
    __syncthreads();
  }
  const auto add = [&](int tile, int at, int row, float sum, bool from_start) {
    const int column = tile * P::TILE + at;
    if (row >= rows || column >= P::N) return;
    add_to_residual(residual + row * P::N + column, bias && from_start ? sum + to_float(bias[column]) : sum);
  };
  gemv_with_lora<P>(smem, pipeline, first, count, LoraAccumulators<P>(memory), adapters, rows, add);
}

#if !JOINED
extern "C" __global__ void __launch_bounds__(THREADS)
    prep_qkv(const u16* norm, const u16* embeds, i64* residual, u16* hidden, u16* x, i64 rows, const u16* weights) {
  norm_row<QKV>(norm, residual, embeds, hidden, false, x, (int)rows, weights);
}

extern "C" __global__ void GEMV_LAUNCH_BOUNDS qkv(const u16* weights, const u16* norm, const u16* embeds, i64* residual,
                                                  float* partials, u16* hidden, const u16* x, i64 rows,
                                                  const Adapter* adapters, i64 tokens) {
  constexpr int KEYS = HEADS * HEAD_DIM, VALUES = KEYS + KV_HEADS * HEAD_DIM;
  gemv_of_norm<QKV, QKV_PREPARED>(
      weights, norm, embeds, residual, hidden, false, x, (int)rows, {adapters, (int)tokens, KEYS, VALUES},
      [&](int tile, int at, int row, float sum, bool) { store_partial<QKV>(partials, tile, at, row, sum); });
}
#endif

#if MIXER
extern "C" __global__ void __launch_bounds__(THREADS)
    prep_in_proj(const u16* norm, const u16* embeds, i64* residual, u16* hidden, u16* x, i64 rows, const u16* weights) {
  norm_row<IN_PROJ>(norm, residual, embeds, hidden, false, x, (int)rows, weights);
}

extern "C" __global__ void GEMV_LAUNCH_BOUNDS in_proj(const u16* weights, const u16* norm, const u16* embeds,
                                                      i64* residual, float* partials, u16* hidden, const u16* x,
                                                      i64 rows) {
  gemv_of_norm<IN_PROJ, IN_PROJ_PREPARED>(
      weights, norm, embeds, residual, hidden, false, x, (int)rows, {},
      [&](int tile, int at, int row, float sum, bool) { store_partial<IN_PROJ>(partials, tile, at, row, sum); });
}

extern "C" __global__ void __launch_bounds__(MIX_THREADS)
    mix(const float* partials, const float* taps, const float* conv_bias, const float* decay, const float* dt_bias,
        const float* skip, const float* norm, const float* conv_states, const float* states, float* next_conv_states,
        float* next_states, float* mixed, float* squares, float* conv_inputs, float* keys, float* values, float* decays,
        float* strengths, i64 tokens) {
  mix_tokens(partials, taps, conv_bias, decay, dt_bias, skip, norm, conv_states, states, next_conv_states, next_states,
             mixed, squares, {conv_inputs, keys, values, decays, strengths}, (int)tokens);
}

// A CTA has a group of the norm of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    prep_out_proj(const float* mixed, const float* squares, u16* x, const u16* weights) {
  constexpr int SIZE = VALUES / NORM_GROUPS;
  const int group = blockIdx.x, row = blockIdx.y;
  pdl_wait();
  const float factor = norm_factor(squares, row, group);
  for (int at = threadIdx.x; at < SIZE; at += THREADS) {
    const int k = group * SIZE + at;
    x[OUT_PROJ::x_index(inv_perm_of<OUT_PROJ>(weights, k), row)] =
        from_float(factor * load_cg(mixed + row * VALUES + k));
  }
}

extern "C" __global__ void GEMV_LAUNCH_BOUNDS out_proj(const u16* weights, const float* mixed, const float* squares,
                                                       i64* residual, const u16* ready, i64 rows) {
  constexpr int WIDTH = OUT_PROJ::X_STEPS * OUT_PROJ::TILE_K, COUNT = (WIDTH * ROWS + THREADS - 1) / THREADS;
  STATIC_SMEM(NormFactors, factors);
  gemv_to_residual<OUT_PROJ, OUT_PROJ_PREPARED>(
      weights, nullptr, residual, ready, (int)rows, {}, [] {},
      [&](int first, u16* x) {
        // Values are prefetched while the norm's factors are computed, if a thread has few.
        constexpr int AHEAD = COUNT <= 4 ? COUNT : 1;
        float ahead[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int place = threadIdx.x + i * THREADS, row = place / WIDTH;
          const int k = (first + place % WIDTH) % (OUT_PROJ::STEPS * OUT_PROJ::TILE_K);
          const bool inside = row < rows && k < VALUES;
          ahead[i] = load_cg(mixed + (inside ? row * VALUES + perm_of<OUT_PROJ>(weights, k) : 0));
        }
        factors.compute(squares, (int)rows);
        __syncthreads();
        fill_x<OUT_PROJ>(x, first, (int)rows, [&](int row, int k, int i) {
          k = perm_of<OUT_PROJ>(weights, k);
          if constexpr (COUNT <= 4) return factors.of(row, k) * ahead[i];
          return factors.of(row, k) * load_cg(mixed + row * VALUES + k);
        });
      });
}
#endif

#if ATTENDS_BY_ROW
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention(const float* partials, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
              const float* sin_table, const i64* position_ids, const i64* kv_length, CacheValue* key_cache,
              CacheValue* value_cache, float* partial_out, float* max_and_sum, i64 window) {
  decode_attention(partials, bias, q_norm, k_norm, cos_table, sin_table, position_ids, kv_length, key_cache,
                   value_cache, partial_out, max_and_sum, (int)window);
}
#endif

#if ROWS > 1
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS)
    rope_append_kv(const float* partials, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
                   const float* sin_table, const i64* position_ids, const i64* kv_length, CacheValue* key_cache,
                   CacheValue* value_cache, u16* queries, i64 tokens) {
  rope_append(partials, bias, q_norm, k_norm, cos_table, sin_table, position_ids, kv_length, key_cache, value_cache,
              queries, (int)tokens);
}

extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    tree_attention(const u16* queries, const i64* kv_length, CacheValue* key_cache, CacheValue* value_cache,
                   float* partial_out, float* max_and_sum, i64 window, const unsigned char* mask, i64 tokens,
                   i64 splits) {
  tree_attention_of<QUERIES, false>(queries, {}, kv_length, key_cache, value_cache, partial_out, max_and_sum,
                                    (int)window, mask, (int)tokens, (int)splits);
}
#endif

#if ATTENDS_IN_BATCH
extern "C" __global__ void BATCH_ATTENTION_LAUNCH_BOUNDS
batch_attention(const float* partials, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
                const float* sin_table, const i64* position_ids, const i64* kv_length, CacheValue* key_cache,
                CacheValue* value_cache, float* partial_out, float* max_and_sum, i64 window, i64 splits) {
  tree_attention_of<8, true>(nullptr, {partials, bias, q_norm, k_norm, cos_table, sin_table, position_ids}, kv_length,
                             key_cache, value_cache, partial_out, max_and_sum, (int)window, nullptr, 1, (int)splits);
}
#endif

// A warp combines the splits of one head of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine_splits(const float* partial_out, const float* max_and_sum, const i64* kv_length, u16* x, i64 window,
                   i64 tokens, i64 splits, const u16* weights, const float* partials, const u16* bias) {
  // CTAs of `o` have only the heads of their own k range, and no gates.
  static_assert(O_PREPARED || !O::ACT_ORDER && !ATTENTION_GATE);
  constexpr int AT_ONCE = 8, ELEMENTS = HEAD_DIM / 32;
  const int lane = threadIdx.x % 32, head = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, row = blockIdx.y;
  const int used = KvSplits((int)kv_length[row / (int)tokens], (int)window, (int)tokens, (int)splits).used;
  pdl_wait();
  if (head >= HEADS) return;
  const float2 scale =
      load_cg(reinterpret_cast<const float2*>(max_and_sum) + (row * SPLITS + (lane < used ? lane : 0)) * HEADS + head);
  const float* const from = partial_out + row * SPLITS * O::K + head * HEAD_DIM + lane;
  float values[AT_ONCE][ELEMENTS], result[ELEMENTS] = {};
  auto fetch = [&](int base) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j)
        values[i][j] = load_cg(from + (base + i < used ? base + i : used - 1) * O::K + 32 * j);
  };
  fetch(0);
  float gates[ELEMENTS];
#pragma unroll
  for (int j = 0; j < ELEMENTS; ++j)
    gates[j] = ATTENTION_GATE ? gate_of(partials, bias, row, head, lane + 32 * j) : 1.0f;
  const float weight = split_scale(scale, lane < used);
  for (int base = 0; base < used; base += AT_ONCE) {
    if (base > 0) fetch(base);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float share = __shfl_sync(~0u, weight, base + i);  // 0 for out-of-range splits
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) result[j] += share * values[i][j];
    }
  }
#pragma unroll
  for (int j = 0; j < ELEMENTS; ++j)
    x[O::x_index(inv_perm_of<O>(weights, head * HEAD_DIM + lane + 32 * j), row)] = from_float(gates[j] * result[j]);
}

extern "C" __global__ void GEMV_LAUNCH_BOUNDS o(const u16* weights, const u16* bias, const float* partial_out,
                                                const float* max_and_sum, const i64* kv_length, i64* residual,
                                                const u16* ready, i64 window, i64 rows, i64 tokens, i64 splits,
                                                const Adapter* adapters) {
  constexpr int WIDTH = O::X_STEPS * O::TILE_K, SPAN = WIDTH / HEAD_DIM + 3, LOCAL = SPAN < HEADS ? SPAN : HEADS;
  constexpr int AT_ONCE = 8;
  struct Merge {
    float shares[ROWS * LOCAL * SPLITS];
    int used[ROWS];
  };
  STATIC_SMEM(Merge, merge);
  gemv_to_residual<O, O_PREPARED>(
      weights, bias, residual, ready, (int)rows, {adapters, (int)tokens, O::N, O::N},
      [&] {
        const int row = threadIdx.x;
        if (row < rows)
          merge.used[row] = KvSplits((int)kv_length[row / (int)tokens], (int)window, (int)tokens, (int)splits).used;
        __syncthreads();
      },
      [&](int first, u16* x) {
        // Prefetch a thread's first values while the weights of the splits are computed.
        float early[AT_ONCE];
        const int early_row = threadIdx.x / WIDTH, early_k = (first + threadIdx.x % WIDTH) % (O::STEPS * O::TILE_K);
        const int early_used = ROWS == 1 && early_row == 0 && early_k < O::K ? merge.used[0] : 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
          early[i] = i < early_used ? load_cg(partial_out + (early_row * SPLITS + i) * O::K + early_k) : 0.0f;
        const int first_head = first / HEAD_DIM;
        split_scales<LOCAL>(merge.shares, max_and_sum, merge.used, first_head, (int)rows);
        __syncthreads();
        auto share = [&](int row, int k) {
          return merge.shares + (row * LOCAL + (k / HEAD_DIM + HEADS - first_head) % HEADS) * SPLITS;
        };
        int most = 0;
        for (int row = 0; row < rows; ++row) most = merge.used[row] > most ? merge.used[row] : most;
        if (ROWS > 1 && most <= AT_ONCE) {
          // Out-of-range splits have weight 0.
          fill_x<O>(x, first, (int)rows, [&](int row, int k, int) {
            const float* const shares = share(row, k);
            const int last = merge.used[row] - 1;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < (AT_ONCE < SPLITS ? AT_ONCE : SPLITS); ++i)
              sum += shares[i] * load_cg(partial_out + (row * SPLITS + (i < last ? i : last)) * O::K + k);
            return sum;
          });
          return;
        }
        fill_x<O>(x, first, (int)rows, [&](int row, int k, int place) {
          const float* const shares = share(row, k);
          const int used = merge.used[row];
          float sum = 0;
          for (int base = 0; base < used; base += AT_ONCE) {
            float values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
              values[i] = ROWS == 1 && place + base == 0 ? early[i]
                          : base + i < used              ? load_cg(partial_out + (row * SPLITS + base + i) * O::K + k)
                                                         : 0.0f;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
              if (base + i < used) sum += shares[base + i] * values[i];
          }
          return sum;
        });
      });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prep_gate_up(const u16* norm, i64* residual, u16* x, i64 rows, const u16* weights) {
  norm_row<GATE_UP>(norm, residual, nullptr, nullptr, false, x, (int)rows, weights);
}

extern "C" __global__ void GEMV_LAUNCH_BOUNDS gate_up(const u16* weights, const u16* norm, i64* residual,
                                                      float* partials, const u16* x, i64 rows, const Adapter* adapters,
                                                      i64 tokens) {
  gemv_of_norm<GATE_UP, GATE_UP_PREPARED>(
      weights, norm, nullptr, residual, nullptr, false, x, (int)rows, {adapters, (int)tokens, INNER, GATE_UP::N},
      [&](int tile, int at, int row, float sum, bool) { store_partial<GATE_UP>(partials, tile, at, row, sum); });
}

__device__ inline float gated(float gate, float up, const u16* bias, int k) {
  if (SQUARED_RELU) {
    up = fmaxf(MLP_BIAS ? up + to_float(bias[k]) : up, 0.0f);
    return up * up;
  }
  if (MLP_BIAS) gate += to_float(bias[k]), up += to_float(bias[INNER + k]);
  return gate * up / (1.0f + exp2_fast(-LOG2E * gate));
}
__device__ inline float gated(const float* partials, const u16* bias, int row, int k) {
  const float first = sum_partials<GATE_UP, GATE_UP_PARTIALS>(partials, row, k);
  if constexpr (SQUARED_RELU) return gated(0, first, bias, k);
  return gated(first, sum_partials<GATE_UP, GATE_UP_PARTIALS>(partials, row, INNER + k), bias, k);
}
// 4 values from k on, k a multiple of 4.
__device__ inline void gated(float (&values)[4], const float* partials, const u16* bias, int row, int k) {
  float gates[4], ups[4];
  sum_partials4<GATE_UP, GATE_UP_PARTIALS>(gates, partials, row, k);
  sum_partials4<GATE_UP, GATE_UP_PARTIALS>(ups, partials, row, SQUARED_RELU ? k : INNER + k);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = gated(gates[i], ups[i], bias, k + i);
}

// A thread computes 4 values of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    prep_down(const u16* bias, const float* partials, u16* x, const u16* weights) {
  const int row = blockIdx.y, k = 4 * (blockIdx.x * THREADS + threadIdx.x);
  pdl_wait();
  if (k >= INNER) return;
  float values[4];
  gated(values, partials, bias, row, k);
  if constexpr (TENSOR_CORES && !DOWN::QUANTIZED) {
    write_x(x + DOWN::x_index(k, row), values);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[DOWN::x_index(inv_perm_of<DOWN>(weights, k + i), row)] = from_float(values[i]);
  }
}

extern "C" __global__ void GEMV_LAUNCH_BOUNDS down(const u16* weights, const u16* bias, const u16* gate_up_bias,
                                                   const float* partials, i64* residual, const u16* ready, i64 rows,
                                                   const Adapter* adapters, i64 tokens) {
  gemv_to_residual<DOWN, DOWN_PREPARED>(
      weights, bias, residual, ready, (int)rows, {adapters, (int)tokens, DOWN::N, DOWN::N}, [] {},
      [&](int first, u16* x) {
        fill_x<DOWN>(x, first, (int)rows, [&](int row, int k, int) {
          return gated(partials, gate_up_bias, row, perm_of<DOWN>(weights, k));
        });
      });
}

#if !DRAFTS
extern "C" __global__ void __launch_bounds__(THREADS)
    prep_lm_head(const u16* norm, i64* residual, u16* hidden, u16* x, i64 rows) {
#if TIED
  norm_row<TiedHead>(norm, residual, nullptr, hidden, true, x, (int)rows);
#else
  norm_row<LM_HEAD>(norm, residual, nullptr, hidden, true, x, (int)rows);
#endif
}

extern "C" __global__ void GEMV_LAUNCH_BOUNDS lm_head(const u16* weights, const u16* norm, i64* residual, float* logits,
                                                      u16* hidden, const u16* x, i64 rows) {
#if TIED
  tied_head(weights, norm, residual, logits, hidden, x, (int)rows);
#else
  gemv_of_norm<LM_HEAD, LM_HEAD_PREPARED>(weights, norm, nullptr, residual, hidden, true, x, (int)rows, {},
                                          [&](int tile, int at, int row, float sum, bool) {
                                            const int column = tile * LM_HEAD::TILE + at;
                                            if (row < rows && column < VOCAB) logits[(i64)row * VOCAB + column] = sum;
                                          });
#endif
}

// Store the residual stream after the last layer in the model's type, for a draft head.
extern "C" __global__ void __launch_bounds__(THREADS) last_state(const i64* residual, u16* out, i64 rows) {
  pdl_wait();
  const int pairs = (int)rows * HIDDEN / 2;
  for (int place = blockIdx.x * THREADS + threadIdx.x; place < pairs; place += gridDim.x * THREADS) {
    const longlong2 pair = load_cg(reinterpret_cast<const longlong2*>(residual) + place);
    reinterpret_cast<u32*>(out)[place] = from_float(from_fixed(pair.x)) | (u32)from_float(from_fixed(pair.y)) << 16;
  }
}
#endif
