// SPDX-License-Identifier: Apache-2.0
// The kernels of a decode step, compiled for one model, one kind of GPU and one largest number of rows.
//
// qkv -- attention -- o_x -- o -- gate_up -- down -- (next layer) ... -- lm_head
//
// Each kernel begins with what its inputs need: the norm of the residual stream, the sums of a product's parts. All
// blocks repeat that work, which costs less than a kernel of its own, unless there are many rows: then qkv_x, gate_up_x,
// down_x and lm_head_x make x [rows] of the product that follows. o_x merges the attention's splits; `o` does so itself
// without tensor cores, with quantised weights, and for one row of a small model.
//
// A row is a token. Several tokens of one sequence, a chain or a tree, and many rows take new_rows and tree_attention in
// place of `attention`; batches of single tokens take batch_attention, where it has room beside blocks of products.

// Multiply this block's share, and add what the adapters add to it. finish: as of `multiply`.
template <class P, class Finish>
__device__ inline void multiply_adapted(const Shared<P>& shared, Stream<P>& stream, int first, int count,
                                        const LoraSums<P>& lora, const Adapters& adapters, int rows, Finish finish) {
  if constexpr (LoraSums<P>::USED) {
    const u16* inputs = nullptr;
    if constexpr (P::ORDERED) inputs = reinterpret_cast<const u16*>(stream.weights + P::INPUTS);
    lora.compute(adapters, shared.x, first, count, rows, inputs);
    multiply_any<P>(shared, stream, first, count, [&](int tile, int at, int row, float sum, bool from_start) {
      finish(tile, at, row, sum + lora.of(tile - first / P::STEPS, at, row), from_start);
    });
  } else {
    multiply_any<P>(shared, stream, first, count, finish);
  }
}

// The next kernel's x is the norm of the residual stream, or of the embeddings before the first layer. ready: x of a
// kernel of its own.
template <class P, bool READY, class Finish>
__device__ inline void multiply_normed(const u16* weights, const u16* norm, const u16* embeds, i64* residual,
                                       u16* hidden, bool hidden_is_normed, const u16* ready, int rows,
                                       const Adapters& adapters, Finish finish) {
  DYNAMIC_SHARED(memory);
  const Shared<P> shared(memory, ready);
  if (blockIdx.x >= P::BLOCKS) {  // fills a multiprocessor that would have no block
    wait_for_kernel_before();
    return;
  }
  const int first = P::first_unit(blockIdx.x), count = P::first_unit(blockIdx.x + 1) - first;
  Stream<P> stream(weights, shared.ring, first, count);
  if constexpr (P::DIRECT) {
    wait_for_kernel_before();
  } else if constexpr (READY) {
    wait_for_kernel_before();
    copy_x<P>(shared.x, ready, P::POSITIONS == P::STEPS ? 0 : first % P::STEPS * P::K_LANES);
  } else {
    Normed x;
    x.read_scales(norm);
    Places<P> places;
    places.read(weights);
    wait_for_kernel_before();
    norm_rows(x, residual, embeds, hidden, hidden_is_normed, shared.sums, rows,
              [&](int row) { share_x<P>(shared.x, x, 0, row, places); });
    for (int i = P::x_place(P::K, 0) + threadIdx.x; i < P::X; i += THREADS) shared.x[i] = 0;
  }
  if constexpr (!P::DIRECT) __syncthreads();
  multiply_adapted<P>(shared, stream, first, count, LoraSums<P>(memory), adapters, rows, finish);
}

// The product with a matrix whose result is added to the residual stream. ready: x of a kernel of its own; otherwise
// prepare() comes before the kernel waits, and fill(k, x) writes x, of which row k is the first.
template <class P, bool READY, class Prepare, class Fill>
__device__ inline void multiply_and_add(const u16* weights, const u16* bias, i64* residual, const u16* ready, int rows,
                                        const Adapters& adapters, Prepare prepare, Fill fill) {
  DYNAMIC_SHARED(memory);
  const Shared<P> shared(memory, ready);
  if (blockIdx.x >= P::BLOCKS) {  // fills a multiprocessor that would have no block
    wait_for_kernel_before();
    return;
  }
  const int first = P::first_unit(blockIdx.x), count = P::first_unit(blockIdx.x + 1) - first;
  Stream<P> stream(weights, shared.ring, first, count);
  if constexpr (!READY) prepare();
  wait_for_kernel_before();
  if constexpr (!P::DIRECT) {
    const int first_k = P::POSITIONS == P::STEPS ? 0 : first % P::STEPS * P::K_LANES;
    if constexpr (READY)
      copy_x<P>(shared.x, ready, first_k);
    else
      fill(first_k, shared.x);
    __syncthreads();
  }
  const auto add = [&](int tile, int at, int row, float sum, bool from_start) {
    const int column = tile * P::TILE + at;
    if (row >= rows || column >= P::N) return;
    add_to_residual(residual + row * P::N + column, bias && from_start ? sum + to_float(bias[column]) : sum);
  };
  multiply_adapted<P>(shared, stream, first, count, LoraSums<P>(memory), adapters, rows, add);
}

#if !JOINED
extern "C" __global__ void __launch_bounds__(THREADS)
    qkv_x(const u16* norm, const u16* embeds, i64* residual, u16* hidden, u16* x, i64 rows, const u16* weights) {
  norm_row<QKV>(norm, residual, embeds, hidden, false, x, (int)rows, weights);
}

extern "C" __global__ void PRODUCT_LIMITS
    qkv(const u16* weights, const u16* norm, const u16* embeds, i64* residual, float* parts, u16* hidden, const u16* x,
        i64 rows, const Adapter* adapters, i64 tokens) {
  constexpr int KEYS = HEADS * HEAD_DIM, VALUES = KEYS + KV_HEADS * HEAD_DIM;
  multiply_normed<QKV, QKV_X>(
      weights, norm, embeds, residual, hidden, false, x, (int)rows, {adapters, (int)tokens, KEYS, VALUES},
      [&](int tile, int at, int row, float sum, bool) { leave_part<QKV>(parts, tile, at, row, sum); });
}
#endif

#if ATTENDS_BY_ROW
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention(const float* parts, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
              const float* sin_table, const i64* position_ids, const i64* kv_length, CacheValue* key_cache, CacheValue* value_cache,
              float* sums, float* scales, i64 window) {
  attend(parts, bias, q_norm, k_norm, cos_table, sin_table, position_ids, kv_length, key_cache, value_cache, sums,
         scales, (int)window);
}
#endif

#if ROWS > 1
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS)
    new_rows(const float* parts, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
             const float* sin_table, const i64* position_ids, const i64* kv_length, CacheValue* key_cache, CacheValue* value_cache,
             u16* queries, i64 tokens) {
  make_new_rows(parts, bias, q_norm, k_norm, cos_table, sin_table, position_ids, kv_length, key_cache, value_cache,
                queries, (int)tokens);
}

extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    tree_attention(const u16* queries, const i64* kv_length, CacheValue* key_cache, CacheValue* value_cache, float* sums,
                   float* scales, i64 window, const unsigned char* mask, i64 tokens, i64 splits) {
  attend_from_tree<QUERIES, false>(queries, {}, kv_length, key_cache, value_cache, sums, scales, (int)window, mask,
                                   (int)tokens, (int)splits);
}
#endif

#if ATTENDS_IN_BATCH
extern "C" __global__ void BATCH_ATTENTION_LIMITS
    batch_attention(const float* parts, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
                    const float* sin_table, const i64* position_ids, const i64* kv_length, CacheValue* key_cache,
                    CacheValue* value_cache, float* sums, float* scales, i64 window, i64 splits) {
  attend_from_tree<8, true>(nullptr, {parts, bias, q_norm, k_norm, cos_table, sin_table, position_ids}, kv_length,
                            key_cache, value_cache, sums, scales, (int)window, nullptr, 1, (int)splits);
}
#endif

// A warp merges the splits of one head of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    o_x(const float* sums, const float* scales, const i64* kv_length, u16* x, i64 window, i64 tokens, i64 splits,
        const u16* weights) {
  static_assert(O_X || !O::ORDERED);  // blocks of `o` have only the heads that their own rows multiply
  constexpr int AT_ONCE = 8, ELEMENTS = HEAD_DIM / 32;
  const int lane = threadIdx.x % 32, head = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, row = blockIdx.y;
  const int used = Splits((int)kv_length[row / (int)tokens], (int)window, (int)tokens, (int)splits).used;
  wait_for_kernel_before();
  if (head >= HEADS) return;
  const float2 scale = load(reinterpret_cast<const float2*>(scales) + (row * SPLITS + (lane < used ? lane : 0)) * HEADS + head);
  const float* const from = sums + row * SPLITS * O::K + head * HEAD_DIM + lane;
  float values[AT_ONCE][ELEMENTS], result[ELEMENTS] = {};
  auto fetch = [&](int base) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j)
        values[i][j] = load(from + (base + i < used ? base + i : used - 1) * O::K + 32 * j);
  };
  fetch(0);
  const float weight = split_weight(scale, lane < used);
  for (int base = 0; base < used; base += AT_ONCE) {
    if (base > 0) fetch(base);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float share = __shfl_sync(~0u, weight, base + i);  // zero where there is no split
#pragma unroll
      for (int j = 0; j < ELEMENTS; ++j) result[j] += share * values[i][j];
    }
  }
#pragma unroll
  for (int j = 0; j < ELEMENTS; ++j)
    x[O::x_place(place_of<O>(weights, head * HEAD_DIM + lane + 32 * j), row)] = from_float(result[j]);
}

extern "C" __global__ void PRODUCT_LIMITS
    o(const u16* weights, const u16* bias, const float* sums, const float* scales, const i64* kv_length, i64* residual,
      const u16* ready, i64 window, i64 rows, i64 tokens, i64 splits, const Adapter* adapters) {
  constexpr int WIDTH = O::POSITIONS * O::K_LANES, SPAN = WIDTH / HEAD_DIM + 3, LOCAL = SPAN < HEADS ? SPAN : HEADS;
  constexpr int AT_ONCE = 8;
  struct Merge {
    float shares[ROWS * LOCAL * SPLITS];
    int used[ROWS];
  };
  STATIC_SHARED(Merge, merge);
  multiply_and_add<O, O_X>(
      weights, bias, residual, ready, (int)rows, {adapters, (int)tokens, O::N, O::N},
      [&] {
        const int row = threadIdx.x;
        if (row < rows)
          merge.used[row] = Splits((int)kv_length[row / (int)tokens], (int)window, (int)tokens, (int)splits).used;
        __syncthreads();
      },
      [&](int first, u16* x) {
        // A thread's first values are on their way while the shares of the splits are computed.
        float early[AT_ONCE];
        const int early_row = threadIdx.x / WIDTH, early_k = (first + threadIdx.x % WIDTH) % (O::STEPS * O::K_LANES);
        const int early_used = ROWS == 1 && early_row == 0 && early_k < O::K ? merge.used[0] : 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
          early[i] = i < early_used ? load(sums + (early_row * SPLITS + i) * O::K + early_k) : 0.0f;
        const int first_head = first / HEAD_DIM;
        split_weights<LOCAL>(merge.shares, scales, merge.used, first_head, (int)rows);
        __syncthreads();
        auto share = [&](int row, int k) {
          return merge.shares + (row * LOCAL + (k / HEAD_DIM + HEADS - first_head) % HEADS) * SPLITS;
        };
        int most = 0;
        for (int row = 0; row < rows; ++row) most = merge.used[row] > most ? merge.used[row] : most;
        if (ROWS > 1 && most <= AT_ONCE) {
          // Splits that there are not count nothing.
          fill_x<O>(x, first, (int)rows, [&](int row, int k, int) {
            const float* const shares = share(row, k);
            const int last = merge.used[row] - 1;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < (AT_ONCE < SPLITS ? AT_ONCE : SPLITS); ++i)
              sum += shares[i] * load(sums + (row * SPLITS + (i < last ? i : last)) * O::K + k);
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
                          : base + i < used              ? load(sums + (row * SPLITS + base + i) * O::K + k)
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
    gate_up_x(const u16* norm, i64* residual, u16* x, i64 rows, const u16* weights) {
  norm_row<GATE_UP>(norm, residual, nullptr, nullptr, false, x, (int)rows, weights);
}

extern "C" __global__ void PRODUCT_LIMITS
    gate_up(const u16* weights, const u16* norm, i64* residual, float* parts, const u16* x, i64 rows,
            const Adapter* adapters, i64 tokens) {
  multiply_normed<GATE_UP, GATE_UP_X>(
      weights, norm, nullptr, residual, nullptr, false, x, (int)rows, {adapters, (int)tokens, INNER, GATE_UP::N},
      [&](int tile, int at, int row, float sum, bool) { leave_part<GATE_UP>(parts, tile, at, row, sum); });
}

__device__ inline float gated(float gate, float up, const u16* bias, int k) {
  if (MLP_BIAS) gate += to_float(bias[k]), up += to_float(bias[INNER + k]);
  return gate * up / (1.0f + exp2_fast(-1.4426950408889634f * gate));
}
__device__ inline float gated(const float* parts, const u16* bias, int row, int k) {
  return gated(sum_of_parts<GATE_UP, GATE_UP_PARTS>(parts, row, k),
               sum_of_parts<GATE_UP, GATE_UP_PARTS>(parts, row, INNER + k), bias, k);
}
// 4 values from k on, a multiple of 4.
__device__ inline void gated(float (&values)[4], const float* parts, const u16* bias, int row, int k) {
  float gates[4], ups[4];
  sums_of_parts<GATE_UP, GATE_UP_PARTS>(gates, parts, row, k);
  sums_of_parts<GATE_UP, GATE_UP_PARTS>(ups, parts, row, INNER + k);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = gated(gates[i], ups[i], bias, k + i);
}

// A thread makes 4 values of one row.
extern "C" __global__ void __launch_bounds__(THREADS)
    down_x(const u16* bias, const float* parts, u16* x, const u16* weights) {
  const int row = blockIdx.y, k = 4 * (blockIdx.x * THREADS + threadIdx.x);
  wait_for_kernel_before();
  if (k >= INNER) return;
  float values[4];
  gated(values, parts, bias, row, k);
  if constexpr (TENSOR_CORES && !DOWN::QUANTIZED) {
    write_x(x + DOWN::x_place(k, row), values);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[DOWN::x_place(place_of<DOWN>(weights, k + i), row)] = from_float(values[i]);
  }
}

extern "C" __global__ void PRODUCT_LIMITS
    down(const u16* weights, const u16* bias, const u16* gate_up_bias, const float* parts, i64* residual, const u16* ready,
         i64 rows, const Adapter* adapters, i64 tokens) {
  multiply_and_add<DOWN, DOWN_X>(
      weights, bias, residual, ready, (int)rows, {adapters, (int)tokens, DOWN::N, DOWN::N}, [] {},
      [&](int first, u16* x) {
        fill_x<DOWN>(x, first, (int)rows, [&](int row, int k, int) {
          return gated(parts, gate_up_bias, row, input_of<DOWN>(weights, k));
        });
      });
}

#if !JOINED
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_head_x(const u16* norm, i64* residual, u16* hidden, u16* x, i64 rows) {
#if TIED
  norm_row<Table>(norm, residual, nullptr, hidden, true, x, (int)rows);
#else
  norm_row<LM_HEAD>(norm, residual, nullptr, hidden, true, x, (int)rows);
#endif
}

extern "C" __global__ void PRODUCT_LIMITS
    lm_head(const u16* weights, const u16* norm, i64* residual, float* logits, u16* hidden, const u16* x, i64 rows) {
#if TIED
  multiply_table(weights, norm, residual, logits, hidden, x, (int)rows);
#else
  multiply_normed<LM_HEAD, LM_HEAD_X>(weights, norm, nullptr, residual, hidden, true, x, (int)rows, {},
                                      [&](int tile, int at, int row, float sum, bool) {
                                        const int column = tile * LM_HEAD::TILE + at;
                                        if (row < rows && column < VOCAB) logits[(i64)row * VOCAB + column] = sum;
                                      });
#endif
}

// Write the residual stream after the last layer in the model's type, for a draft head.
extern "C" __global__ void __launch_bounds__(THREADS) last_state(const i64* residual, u16* out, i64 rows) {
  wait_for_kernel_before();
  const int pairs = (int)rows * HIDDEN / 2;
  for (int place = blockIdx.x * THREADS + threadIdx.x; place < pairs; place += gridDim.x * THREADS) {
    const longlong2 pair = load(reinterpret_cast<const longlong2*>(residual) + place);
    reinterpret_cast<u32*>(out)[place] = from_float(from_fixed(pair.x)) | (u32)from_float(from_fixed(pair.y)) << 16;
  }
}
#endif
