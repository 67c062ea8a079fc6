// SPDX-License-Identifier: Apache-2.0
// The kernels of a decode step, compiled for one model, one kind of GPU and one largest number of rows.
//
// qkv -- attention -- o -- gate_up -- down -- (next layer) ... -- lm_head
//
// Each kernel begins with what its inputs need: the norm of the residual stream, the merge of the attention's splits,
// the sums of a product's parts. All blocks repeat that work, which costs less than a kernel of its own.
//
// A row is a token. Rows of several tokens of one sequence, a chain or a tree, take `tree_attention` in place of
// `attention`.

// `multiply`, and what the adapters add to it. finish: as there.
template <class P, class Finish>
__device__ inline void multiply_adapted(const Shared<P>& shared, Stream<P>& stream, int first, int count,
                                        const LoraSums<P>& lora, const Adapters& adapters, int rows, Finish finish) {
  if constexpr (LoraSums<P>::USED) {
    lora.compute(adapters, shared.x, first, count, rows);
    multiply<P>(shared, stream, first, count, [&](int tile, int at, int row, float sum, bool from_start) {
      finish(tile, at, row, sum + lora.of(tile - first / P::STEPS, at, row), from_start);
    });
  } else {
    multiply<P>(shared, stream, first, count, finish);
  }
}

// The next kernel's x is the norm of the residual stream, or of the embeddings before the first layer.
template <class P, class Finish>
__device__ inline void multiply_normed(const u16* weights, const u16* norm, const u16* embeds, i64* residual,
                                       u16* hidden, bool hidden_is_normed, int rows, const Adapters& adapters,
                                       Finish finish) {
  DYNAMIC_SHARED(memory);
  const Shared<P> shared(memory);
  if (blockIdx.x >= P::BLOCKS) {  // fills a multiprocessor that would have no block
    wait_for_kernel_before();
    return;
  }
  const int first = P::first_unit(blockIdx.x), count = P::first_unit(blockIdx.x + 1) - first;
  Stream<P> stream(weights, shared.ring, first, count);
  Normed x;
  x.read_scales(norm);
  wait_for_kernel_before();
  norm_rows(x, residual, embeds, hidden, hidden_is_normed, shared.sums, rows,
            [&](int row) { share_x<P>(shared.x, x, 0, row); });
  for (int i = P::x_place(P::K, 0) + threadIdx.x; i < P::X; i += THREADS) shared.x[i] = 0;
  __syncthreads();
  multiply_adapted<P>(shared, stream, first, count, LoraSums<P>(memory), adapters, rows, finish);
}

// The product with a matrix whose result is added to the residual stream. prepare(): before the kernel waits; fill(k, x):
// write x, of which row k is the first.
template <class P, class Prepare, class Fill>
__device__ inline void multiply_and_add(const u16* weights, const u16* bias, i64* residual, int rows,
                                        const Adapters& adapters, Prepare prepare, Fill fill) {
  DYNAMIC_SHARED(memory);
  const Shared<P> shared(memory);
  if (blockIdx.x >= P::BLOCKS) {  // fills a multiprocessor that would have no block
    wait_for_kernel_before();
    return;
  }
  const int first = P::first_unit(blockIdx.x), count = P::first_unit(blockIdx.x + 1) - first;
  Stream<P> stream(weights, shared.ring, first, count);
  prepare();
  wait_for_kernel_before();
  fill(P::POSITIONS == P::STEPS ? 0 : first % P::STEPS * P::K_LANES, shared.x);
  __syncthreads();
  const auto add = [&](int tile, int at, int row, float sum, bool from_start) {
    const int column = tile * P::TILE + at;
    if (row >= rows || column >= P::N) return;
    add_to_residual(residual + row * P::N + column, bias && from_start ? sum + to_float(bias[column]) : sum);
  };
  multiply_adapted<P>(shared, stream, first, count, LoraSums<P>(memory), adapters, rows, add);
}

#if !JOINED
extern "C" __global__ void __launch_bounds__(THREADS)
    qkv(const u16* weights, const u16* norm, const u16* embeds, i64* residual, float* parts, u16* hidden, i64 rows,
        const Adapter* adapters, i64 tokens) {
  constexpr int KEYS = HEADS * HEAD_DIM, VALUES = KEYS + KV_HEADS * HEAD_DIM;
  multiply_normed<QKV>(weights, norm, embeds, residual, hidden, false, (int)rows, {adapters, (int)tokens, KEYS, VALUES},
                       [&](int tile, int at, int row, float sum, bool) { leave_part<QKV>(parts, tile, at, row, sum); });
}
#endif

extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS)
    attention(const float* parts, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
              const float* sin_table, const i64* position_ids, const i64* kv_length, u16* key_cache, u16* value_cache,
              float* sums, float* scales, i64 window, const u16* next_weights, i64 next_bytes) {
  attend(parts, bias, q_norm, k_norm, cos_table, sin_table, position_ids, kv_length, key_cache, value_cache, sums,
         scales, (int)window, next_weights, (int)next_bytes);
}

#if ROWS > 1
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    tree_attention(const float* parts, const u16* bias, const u16* q_norm, const u16* k_norm, const float* cos_table,
                   const float* sin_table, const i64* position_ids, const i64* kv_length, u16* key_cache,
                   u16* value_cache, float* sums, float* scales, i64 window, const u16* next_weights, i64 next_bytes,
                   const unsigned char* mask, i64 tokens) {
  attend_from_tree(parts, bias, q_norm, k_norm, cos_table, sin_table, position_ids, kv_length, key_cache, value_cache,
                   sums, scales, (int)window, next_weights, (int)next_bytes, mask, (int)tokens);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    o(const u16* weights, const u16* bias, const float* sums, const float* scales, const i64* kv_length, i64* residual,
      i64 window, i64 rows, i64 tokens, const Adapter* adapters) {
  constexpr int WIDTH = O::POSITIONS * O::K_LANES, SPAN = WIDTH / HEAD_DIM + 3, LOCAL = SPAN < HEADS ? SPAN : HEADS;
  constexpr int AT_ONCE = 8;
  struct Merge {
    float shares[ROWS * LOCAL * SPLITS];
    int used[ROWS];
  };
  STATIC_SHARED(Merge, merge);
  multiply_and_add<O>(
      weights, bias, residual, (int)rows, {adapters, (int)tokens, O::N, O::N},
      [&] {
        const int row = threadIdx.x;
        if (row < rows) merge.used[row] = Splits((int)kv_length[row / (int)tokens], (int)window, (int)tokens).used;
        __syncthreads();
      },
      [&](int first, u16* x) {
        // A thread's first values are on their way while the shares of the splits are computed.
        float early[AT_ONCE];
        const int early_row = threadIdx.x / WIDTH, early_k = (first + threadIdx.x % WIDTH) % (O::STEPS * O::K_LANES);
        const int early_used = early_row < rows && early_k < O::K ? merge.used[early_row] : 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
          early[i] = i < early_used ? load(sums + (early_row * SPLITS + i) * O::K + early_k) : 0.0f;
        const int first_head = first / HEAD_DIM;
        split_weights<LOCAL>(merge.shares, scales, merge.used, first_head, (int)rows);
        __syncthreads();
        fill_x<O>(x, first, (int)rows, [&](int row, int k, int place) {
          const float* share = merge.shares + (row * LOCAL + (k / HEAD_DIM + HEADS - first_head) % HEADS) * SPLITS;
          const int used = merge.used[row];
          float sum = 0;
          for (int base = 0; base < used; base += AT_ONCE) {
            float values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
              values[i] = place + base == 0 ? early[i]
                          : base + i < used ? load(sums + (row * SPLITS + base + i) * O::K + k)
                                            : 0.0f;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
              if (base + i < used) sum += share[base + i] * values[i];
          }
          return sum;
        });
      });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_up(const u16* weights, const u16* norm, i64* residual, float* parts, i64 rows, const Adapter* adapters,
            i64 tokens) {
  multiply_normed<GATE_UP>(
      weights, norm, nullptr, residual, nullptr, false, (int)rows, {adapters, (int)tokens, INNER, GATE_UP::N},
      [&](int tile, int at, int row, float sum, bool) { leave_part<GATE_UP>(parts, tile, at, row, sum); });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    down(const u16* weights, const u16* bias, const u16* gate_up_bias, const float* parts, i64* residual, i64 rows,
         const Adapter* adapters, i64 tokens) {
  multiply_and_add<DOWN>(
      weights, bias, residual, (int)rows, {adapters, (int)tokens, DOWN::N, DOWN::N}, [] {},
      [&](int first, u16* x) {
        fill_x<DOWN>(x, first, (int)rows, [&](int row, int k, int) {
          float gate = sum_of_parts<GATE_UP, GATE_UP_PARTS>(parts, row, k);
          float up = sum_of_parts<GATE_UP, GATE_UP_PARTS>(parts, row, INNER + k);
          if (MLP_BIAS) gate += to_float(gate_up_bias[k]), up += to_float(gate_up_bias[INNER + k]);
          return gate * up / (1.0f + exp2_fast(-1.4426950408889634f * gate));
        });
      });
}

#if !JOINED
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_head(const u16* weights, const u16* norm, i64* residual, float* logits, u16* hidden, i64 rows) {
#if TIED
  multiply_table(weights, norm, residual, logits, hidden, (int)rows);
#else
  multiply_normed<LM_HEAD>(weights, norm, nullptr, residual, hidden, true, (int)rows, {},
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
