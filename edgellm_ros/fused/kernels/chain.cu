// SPDX-License-Identifier: Apache-2.0
// A chain of drafted tokens in one kernel: a draft head's run on the accepted tokens of a sequence, then one run per
// drafted token.
//
// A cluster of CLUSTER CTAs has one sequence. Each CTA keeps its columns of all weights in smem, where they arrive
// while the previous kernel still runs; all CTAs have the residual stream of all rows. A run has six phases. At the
// end of each, a CTA sends its results to the CTAs that need them (st.async to distributed smem) and waits for theirs
// (mbarrier):
//
// qkv -- attention to a split of the cache -- o -- gate_up -- down -- lm_head
//
// Every CTA receives from every other CTA in each phase except the last (ChainPlan refuses a head that has no columns
// for some of them), so no CTA is more than one phase ahead. The target of a phase's st.async is memory that no CTA
// reads in that phase or the one before.
// Rows of x are operand B of mma.m16n8k16, up to 8, so a run on 8 tokens takes as many mma as a run on one.

#include "primitives.cuh"
#include "../../kernels/cuda/rope.cuh"
#include "small.cuh"

constexpr int GROUP = HEADS / KV_HEADS, SPLITS = CLUSTER / KV_HEADS;
constexpr int Q_SIZE = HEADS * HEAD_DIM, KV_SIZE = KV_HEADS * HEAD_DIM, QKV_SIZE = Q_SIZE + 2 * KV_SIZE;
constexpr int OWN_HEADS = GROUP + 2, OWN_SIZE = OWN_HEADS * HEAD_DIM;   // Q, K, V of a KV head
constexpr int LANES = HEAD_DIM / 8, ROW_LANES = 32 / LANES, AHEAD = 4;  // of the attention
constexpr int ATTENDING = ROWS * GROUP > WARPS ? ROWS* GROUP : WARPS;   // partial outputs of the warps
constexpr float LOWEST = -1e30f;
static_assert(ROWS <= MATRIX_ROWS && WARPS >= MATRIX_ROWS && CLUSTER % KV_HEADS == 0 &&
              (HEAD_DIM == 64 || HEAD_DIM == 128));

using QKV = Product<2 * HIDDEN, QKV_SIZE>;
using O = Product<Q_SIZE, HIDDEN>;
using GATE_UP = Product<HIDDEN, 2 * INNER, 2>;
using DOWN = Product<INNER, HIDDEN>;
using LM_HEAD = Product<HIDDEN, VOCAB>;

__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int MOST_SUMS = larger(larger(larger(QKV::SUMS, O::SUMS), larger(GATE_UP::SUMS, DOWN::SUMS)),
                                 larger(LM_HEAD::SUMS, ATTENDING*(HEAD_DIM + 2)));

struct alignas(8) Scale {
  float highest, total;
};

enum Phase { QKV_MADE, ATTENDED, O_ADDED, INNER_MADE, DOWN_ADDED, LOGITS_MADE, PHASES };

// Smem of a CTA. st_async of other CTAs writes turns, splits, rest.inner, rest.logits, residual and made.
struct Memory {
  Mbarrier mbarrier[PHASES];
  u32 turns[CLUSTER];  // each written by a CTA that has read x in its QKV GEMV
  uint4 qkv_weights[QKV::PLACES], o_weights[O::PLACES], gate_up_weights[GATE_UP::PLACES];
  uint4 down_weights[DOWN::PLACES], lm_head_weights[LM_HEAD::PLACES];
  u16 norms[4][HIDDEN];  // embedding, state, post-attention, final
  union {
    struct {  // from the end of the attention to the start of `o`
      uint4 values[SPLITS][ROWS][HEADS][HEAD_DIM / 4];
      Scale scales[SPLITS][ROWS][HEADS];
    } splits;
    struct {
      u16 x[MATRIX_ROWS][2 * HIDDEN + X_GAP];
      u16 normed[MATRIX_ROWS][HIDDEN + X_GAP];
      u16 inner[MATRIX_ROWS][INNER + X_GAP];
      float logits[VOCAB];
    } rest;
  };
  u16 attended[MATRIX_ROWS][Q_SIZE + X_GAP];
  float residual[2][ROWS][HIDDEN];  // before and after the layer; between attention and feed-forward
  float made[ROWS][OWN_SIZE];       // Q, K, V of the CTA's KV head
  union {
    float sums[MOST_SUMS];
    struct {
      float values[ATTENDING][HEAD_DIM];
      Scale scales[ATTENDING];
    } attending;
  };
  float queries[ROWS][GROUP][HEAD_DIM];
  float cos[NEW_ROWS][ROTARY_DIM / 2], sin[NEW_ROWS][ROTARY_DIM / 2];
  uint4 new_keys[NEW_ROWS][LANES], new_values[NEW_ROWS][LANES];
  uint4 keys[CACHED][LANES], values[CACHED][LANES];  // the first KV rows of the CTA's split
  int token_of_logit[VOCAB];
};
static_assert(sizeof(Memory) == CHAIN_SMEM);

// Wait for everything that other CTAs send in a phase of a level.
__device__ inline void receive(Memory& own, Phase phase, int bytes, int level) {
  if (threadIdx.x == 0) own.mbarrier[phase].expect((u32)bytes);
  own.mbarrier[phase].wait(level - 1);
}

// Start a row: x is the norms of an embedding and of a state, the residual stream is the state.
__device__ inline void begin_embedding(Memory& own, int row, const u16* embedding) {
  Row embed;
  embed.read(embedding);
  embed.normalize(own.norms[0]);
  embed.write(own.rest.x[row]);
}
__device__ inline void begin_state(Memory& own, int row, Row& state) {
  if (!NORM_BEFORE_RESIDUAL) state.write(own.residual[0][row]);
  state.normalize(own.norms[1]);
  if (NORM_BEFORE_RESIDUAL) state.write(own.residual[0][row]);
  state.write(own.rest.x[row] + HIDDEN);
}

// q/k norm and RoPE of the CTA's KV head; first: the new KV row of row 0.
__device__ inline void make_heads(Memory& own, const u16* q_norm, const u16* k_norm, int rows, int first, u16* key_row,
                                  u16* value_row, bool writes, int room) {
  constexpr int ELEMENTS = HEAD_DIM / 32, HALF = ROTARY_DIM / 2;
  const int lane = threadIdx.x % 32;
  for (int item = threadIdx.x / 32; item < rows * OWN_HEADS; item += WARPS) {
    const int row = item / OWN_HEADS, head = item % OWN_HEADS, at = first + row;
    const bool is_value = head == GROUP + 1, is_query = head < GROUP;
    const float* const from = own.made[row] + head * HEAD_DIM;
    const u16* const scales = is_query ? q_norm : k_norm;
    float factor = 1;
    if (QK_NORM && !is_value) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) sum += from[lane + 32 * i] * from[lane + 32 * i];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      factor = rsqrt_fast(sum * (1.0f / HEAD_DIM) + EPSILON);
    }
    auto normed = [&](int dim) {
      return QK_NORM && !is_value ? from[dim] * factor * to_float(scales[dim]) : from[dim];
    };
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const int dim = lane + 32 * i;
      float value = normed(dim);
      if (!is_value && dim < ROTARY_DIM) {
        const bool second = dim >= HALF;
        const int pair = second ? dim - HALF : dim;
        const float other = normed(second ? pair : dim + HALF), sin = own.sin[at][pair];
        value = value * own.cos[at][pair] + other * (second ? sin : -sin);
      }
      if (is_query) {  // log2(e): softmax in base 2
        own.queries[row][head][dim] = value * (LOG2E * rsqrt_fast(HEAD_DIM));
        continue;
      }
      const u16 bits = from_float(value);
      reinterpret_cast<u16*>(is_value ? own.new_values[at] : own.new_keys[at])[dim] = bits;
      if (writes && row < room) (is_value ? value_row : key_row)[row * HEAD_DIM + dim] = bits;
    }
  }
}

__device__ inline void unpack(float (&values)[8], uint4 bits) {
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats(words[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

// KV rows that a CTA attends to: `old` committed ones, and in the last split the new ones.
struct KvRows {
  const u16 *keys, *values;  // of the first old row
  int old;
  bool sees_new;
};

// Store each warp's partial output of one query. Several warps split a query's KV rows if there are few queries.
__device__ inline void decode_attention(Memory& own, const KvRows& share, int rows, int first, int warps) {
  const int lane = threadIdx.x % 32, row_lane = lane / LANES, chunk = lane % LANES;
  for (int item = threadIdx.x / 32; item < rows * GROUP * warps; item += WARPS) {
    const int query = item / warps, part = item % warps, row = query / GROUP;
    const int count = share.old + (share.sees_new ? first + row + 1 : 0);
    float q[8], result[8] = {}, highest = LOWEST, total = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) q[j] = own.queries[row][query % GROUP][8 * chunk + j];
    for (int base = part; base * ROW_LANES < count; base += warps * AHEAD) {
      uint4 keys[AHEAD], values[AHEAD];
      bool valid[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int at = (base + i * warps) * ROW_LANES + row_lane;
        valid[i] = at < count;
        keys[i] = values[i] = {0, 0, 0, 0};
        if (!valid[i]) continue;
        if (at >= share.old) {
          keys[i] = own.new_keys[at - share.old][chunk], values[i] = own.new_values[at - share.old][chunk];
        } else if (at < CACHED) {
          keys[i] = own.keys[at][chunk], values[i] = own.values[at][chunk];
        } else {
          keys[i] = load_cg(reinterpret_cast<const uint4*>(share.keys + (i64)at * HEAD_DIM) + chunk);
          values[i] = load_cg(reinterpret_cast<const uint4*>(share.values + (i64)at * HEAD_DIM) + chunk);
        }
      }
      float scores[AHEAD], high = highest;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float key[8];
        unpack(key, keys[i]);
        scores[i] = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) scores[i] += q[j] * key[j];
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2) scores[i] += __shfl_xor_sync(~0u, scores[i], other);
        if (valid[i]) high = fmaxf(high, scores[i]);
      }
      const float factor = exp2_fast(highest - high);
      highest = high, total *= factor;
#pragma unroll
      for (int j = 0; j < 8; ++j) result[j] *= factor;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float value[8];
        unpack(value, values[i]);
        const float weight = valid[i] ? exp2_fast(scores[i] - highest) : 0.0f;
        total += weight;
#pragma unroll
        for (int j = 0; j < 8; ++j) result[j] += weight * value[j];
      }
    }
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) {
      const float high = fmaxf(highest, __shfl_xor_sync(~0u, highest, other)), factor = exp2_fast(highest - high);
      total *= factor;
      total += __shfl_xor_sync(~0u, total, other);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        result[j] *= factor;
        result[j] += __shfl_xor_sync(~0u, result[j], other);
      }
      highest = high;
    }
    if (row_lane == 0)
#pragma unroll
      for (int j = 0; j < 8; ++j) own.attending.values[item][8 * chunk + j] = result[j];
    if (lane == 0) own.attending.scales[item] = {highest, total};
  }
}

// Combine the warps' partial outputs of each query, and send them to all CTAs.
__device__ inline void give_attended(Memory& own, int rows, int warps, int kv_head, int split) {
  constexpr int QUARTERS = HEAD_DIM / 4;
  for (int i = threadIdx.x; i < rows * GROUP * CLUSTER * QUARTERS; i += THREADS) {
    const int at = i % QUARTERS, block = i / QUARTERS % CLUSTER, query = i / QUARTERS / CLUSTER, first = query * warps;
    float highest = LOWEST, total = 0, values[4] = {};
    for (int warp = 0; warp < warps; ++warp) highest = fmaxf(highest, own.attending.scales[first + warp].highest);
    for (int warp = 0; warp < warps; ++warp) {
      const Scale scale = own.attending.scales[first + warp];
      const float factor = exp2_fast(scale.highest - highest);
      total += factor * scale.total;
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] += factor * own.attending.values[first + warp][4 * at + j];
    }
    const int row = query / GROUP, head = kv_head * GROUP + query % GROUP;
    Mbarrier& mbarrier = own.mbarrier[ATTENDED];
    st_async(block, mbarrier, &own.splits.values[split][row][head][at], bits_of(values));
    const uint2 scale = {__float_as_uint(highest), __float_as_uint(total)};
    if (at == 0) st_async(block, mbarrier, &own.splits.scales[split][row][head], scale);
  }
}

__device__ inline void merge_splits(Memory& own, int rows) {
  for (int i = threadIdx.x; i < rows * Q_SIZE; i += THREADS) {
    const int row = i / Q_SIZE, column = i % Q_SIZE, head = column / HEAD_DIM, dim = column % HEAD_DIM;
    float highest = LOWEST, total = 0, value = 0;
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) highest = fmaxf(highest, own.splits.scales[split][row][head].highest);
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) {
      const Scale scale = own.splits.scales[split][row][head];
      const float factor = exp2_fast(scale.highest - highest);
      total += factor * scale.total;
      value += factor * reinterpret_cast<const float*>(own.splits.values[split][row][head])[dim];
    }
    own.attended[row][column] = from_float(value / total);
  }
}

// Argmax of the logits, by each warp; -1 if a logit is not finite.
__device__ inline int most_likely(const Memory& own) {
  u64 best = 0;
  for (int id = threadIdx.x % 32; id < VOCAB; id += 32) {
    const float logit = own.rest.logits[id] == 0 ? 0.0f : own.rest.logits[id];
    const u32 bits = __float_as_uint(logit), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    const u64 rank = fabsf(logit) <= 3.402823466e38f ? (u64)key << 32 | ~(u32)id : ~0ull;  // ties: the lower id
    best = rank > best ? rank : best;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    const u64 theirs = __shfl_xor_sync(~0u, best, other);
    best = theirs > best ? theirs : best;
  }
  return best == ~0ull ? -1 : (int)~(u32)best;
}

// Log-sum-exp of the logits relative to the largest, by one warp.
__device__ inline float log_mass(const Memory& own, int best) {
  float mass = 0;
  for (int id = threadIdx.x % 32; id < VOCAB; id += 32)
    mass += exp2_fast(LOG2E * (own.rest.logits[id] - own.rest.logits[best]));
#pragma unroll
  for (int other = 16; other > 0; other /= 2) mass += __shfl_xor_sync(~0u, mass, other);
  return logf(mass);
}

// Grid [CLUSTER,batch]. Pending tokens [batch,ROWS] with states [batch,ROWS,HIDDEN], of which counts[b] are valid;
// the table of candidates and the tree as in kernels/tree_protocol.py, with one candidate per node. Commits the rows
// of the pending tokens: adds counts to lengths. A sequence without pending tokens has ended and is left as it is.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    draft_chain(const u16* qkv, const u16* qkv_bias, const u16* q_norm, const u16* k_norm, const u16* o,
                const u16* o_bias, const u16* gate_up, const u16* gate_up_bias, const u16* down, const u16* down_bias,
                const u16* lm_head, const u16* embed_norm, const u16* state_norm, const u16* post_norm, const u16* norm,
                const u16* embedding, i64 tokens_of_embedding, const i64* token_of_logit, const float* cos_table,
                const float* sin_table, const float* radians, i64 positions, i64* lengths, const float* deltas,
                u16* key_cache, u16* value_cache, const i64* pending, const i64* counts, const u16* states, i64* newest,
                i64* table_tokens, float* table_scores, i64* table_parents, i64* table_nodes, i64 table_levels,
                const i64* last_tokens, i64* tree_tokens, i64* tree_parents, i64* tree_depths, i64 tree_size) {
  DYNAMIC_SMEM(memory);
  Memory& own = *reinterpret_cast<Memory*>(memory);
  const int rank = blockIdx.x, sequence = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_head = rank / SPLITS, split = rank % SPLITS;
  if (threadIdx.x < PHASES) own.mbarrier[threadIdx.x].prepare();
  cluster_arrive();
  QKV::fetch(own.qkv_weights, qkv, rank);
  O::fetch(own.o_weights, o, rank);
  GATE_UP::fetch(own.gate_up_weights, gate_up, rank);
  DOWN::fetch(own.down_weights, down, rank);
  LM_HEAD::fetch(own.lm_head_weights, lm_head, rank);
  const u16* const norms[4] = {embed_norm, state_norm, post_norm, norm};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    for (int at = threadIdx.x; at < HIDDEN; at += THREADS) own.norms[i][at] = norms[i][at];
  for (int id = threadIdx.x; id < VOCAB; id += THREADS)
    own.token_of_logit[id] = token_of_logit ? (int)token_of_logit[id] : id;
  pdl_wait();

  const i64 count = load_cg(counts + sequence), committed = load_cg(lengths + sequence);
  const int length = committed < 0 ? 0 : committed > CAPACITY ? CAPACITY : (int)committed;
  if (count < 1) {  // the sequence has ended
    cp_async_commit();
    cp_async_wait<0>();
    cluster_wait();
    return;
  }
  const int accepted = count > ROWS ? ROWS : (int)count;
  const i64 cache = ((i64)sequence * KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
  const int even = (length + SPLITS - 1) / SPLITS, begin = split * even < length ? split * even : length;
  const int old = length - begin < even ? length - begin : even;
  const KvRows share = {key_cache + cache + (i64)begin * HEAD_DIM, value_cache + cache + (i64)begin * HEAD_DIM, old,
                        split == SPLITS - 1};
  for (int i = threadIdx.x; i < old * LANES && i < CACHED * LANES; i += THREADS) {
    cp_async(SmemPtr(own.keys[0] + i), reinterpret_cast<const uint4*>(share.keys) + i);
    cp_async(SmemPtr(own.values[0] + i), reinterpret_cast<const uint4*>(share.values) + i);
  }
  cp_async_commit();
  const float delta = load_cg(deltas + sequence);
  for (int i = threadIdx.x; i < NEW_ROWS * (ROTARY_DIM / 2); i += THREADS) {
    const int row = i / (ROTARY_DIM / 2), at = i % (ROTARY_DIM / 2);
    write_angle(&own.cos[row][at], &own.sin[row][at], cos_table, sin_table, radians, (float)(length + row) + delta, at,
                positions, ROTARY_DIM / 2);
  }
  __syncthreads();  // norms
  if (warp < accepted) {
    const i64 place = (i64)sequence * ROWS + warp;
    begin_embedding(own, warp, embedding + clamp(load_cg(pending + place), 0, tokens_of_embedding - 1) * HIDDEN);
    Row state;
    state.read_written(states + place * HIDDEN);
    begin_state(own, warp, state);
  }
  const bool writes = rank == 0 && threadIdx.x == 0;
  i64* const own_tokens = table_tokens + sequence * (table_levels + 1);
  float* const own_scores = table_scores + sequence * (table_levels + 1);
  i64* const own_parents = table_parents + sequence * (table_levels + 1);
  i64* const own_tree = tree_tokens + sequence * tree_size;
  if (writes) {
    newest[sequence] = accepted - 1;
    own_tokens[0] = own_parents[0] = -1, own_scores[0] = 0;
    own_tree[0] = load_cg(last_tokens + sequence);
  }
  if (rank == 0)
    for (int node = threadIdx.x; node < (int)tree_size; node += THREADS)
      tree_parents[sequence * tree_size + node] = node - 1, tree_depths[sequence * tree_size + node] = node;
  cp_async_wait<0>();
  cluster_wait();

  float above = 0;                 // score of the parent node
  bool known = true;               // whether all nodes so far are valid tokens
  int rows = accepted, first = 0;  // rows of this run; its first new KV row
  for (int level = 1; level <= (int)table_levels; ++level) {
    __syncthreads();
    QKV::gemv(own.qkv_weights, own.rest.x[0], 2 * HIDDEN + X_GAP, own.sums, rank);
    __syncthreads();
    if (threadIdx.x < CLUSTER) st_async(threadIdx.x, own.mbarrier[QKV_MADE], &own.turns[rank], 0u);  // x has been read
    QKV::deliver(own.sums, qkv_bias, rows, rank, [&](int block, int row, int column, float (&sums)[4], float (&)[4]) {
      const int part = column < Q_SIZE ? 0 : column < Q_SIZE + KV_SIZE ? 1 : 2;  // Q, K, V
      const int head = (column - (part ? Q_SIZE + (part - 1) * KV_SIZE : 0)) / HEAD_DIM;
      if (block / SPLITS != (part ? head : head / GROUP)) return;
      const int own_head = part ? GROUP + part - 1 : head % GROUP;
      st_async(block, own.mbarrier[QKV_MADE], &own.made[row][own_head * HEAD_DIM + column % HEAD_DIM], bits_of(sums));
    });
    receive(own, QKV_MADE, 4 * rows * OWN_SIZE + 4 * CLUSTER, level);

    const i64 slot = cache + (i64)(length + first) * HEAD_DIM;
    make_heads(own, q_norm, k_norm, rows, first, key_cache + slot, value_cache + slot, split == 0,
               CAPACITY - length - first);
    __syncthreads();
    const int warps = rows * GROUP < WARPS ? WARPS / (rows * GROUP) : 1;
    decode_attention(own, share, rows, first, warps);
    __syncthreads();
    give_attended(own, rows, warps, kv_head, split);
    receive(own, ATTENDED, (int)(sizeof(uint4) * HEAD_DIM / 4 + sizeof(Scale)) * SPLITS * rows * HEADS, level);

    merge_splits(own, rows);
    __syncthreads();
    O::gemv(own.o_weights, own.attended[0], Q_SIZE + X_GAP, own.sums, rank);
    __syncthreads();
    O::deliver(own.sums, o_bias, rows, rank, [&](int block, int row, int column, float (&sums)[4], float (&)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] += own.residual[0][row][column + j];
      st_async(block, own.mbarrier[O_ADDED], &own.residual[1][row][column], bits_of(sums));
    });
    receive(own, O_ADDED, 4 * rows * HIDDEN, level);

    if (warp < rows) {
      Row row;
      row.read(own.residual[1][warp]);
      row.normalize(own.norms[2]);
      row.write(own.rest.normed[warp]);
    }
    __syncthreads();
    GATE_UP::gemv(own.gate_up_weights, own.rest.normed[0], HIDDEN + X_GAP, own.sums, rank);
    __syncthreads();
    GATE_UP::deliver(own.sums, gate_up_bias, rows, rank,
                     [&](int block, int row, int column, float (&gate)[4], float (&up)[4]) {
                       u32 values[4];
#pragma unroll
                       for (int j = 0; j < 4; ++j)
                         values[j] = from_float(gate[j] * up[j] / (1.0f + exp2_fast(-LOG2E * gate[j])));
                       const uint2 bits = {values[0] | values[1] << 16, values[2] | values[3] << 16};
                       st_async(block, own.mbarrier[INNER_MADE], &own.rest.inner[row][column], bits);
                     });
    receive(own, INNER_MADE, 2 * rows * INNER, level);
    __syncthreads();  // the accumulators have been read

    DOWN::gemv(own.down_weights, own.rest.inner[0], INNER + X_GAP, own.sums, rank);
    __syncthreads();
    DOWN::deliver(own.sums, down_bias, rows, rank, [&](int block, int row, int column, float (&sums)[4], float (&)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] += own.residual[1][row][column + j];
      st_async(block, own.mbarrier[DOWN_ADDED], &own.residual[0][row][column], bits_of(sums));
    });
    receive(own, DOWN_ADDED, 4 * rows * HIDDEN, level);

    const int last = rows - 1;  // the row of the newest token
    if (warp == 0) {
      Row row;
      row.read(own.residual[0][last]);
      row.normalize(own.norms[3]);
      row.write(own.rest.normed[0]);
    }
    __syncthreads();
    LM_HEAD::gemv(own.lm_head_weights, own.rest.normed[0], HIDDEN + X_GAP, own.sums, rank);
    __syncthreads();
    LM_HEAD::deliver(own.sums, nullptr, 1, rank, [&](int block, int, int column, float (&sums)[4], float (&)[4]) {
      st_async(block, own.mbarrier[LOGITS_MADE], &own.rest.logits[column], bits_of(sums));
    });
    receive(own, LOGITS_MADE, 4 * VOCAB, level);

    const int best = most_likely(own);
    known = known && best >= 0;
    float score = __uint_as_float(0xff800000u);  // -inf
    if (rank == 0 && warp == WARPS - 1 && known) score = above - log_mass(own, best);
    const i64 token = known ? own.token_of_logit[best] : -1;
    first += rows, rows = 1;
    if (warp == 0) {
      begin_embedding(own, 0, embedding + clamp(token, 0, tokens_of_embedding - 1) * HIDDEN);
    } else if (warp == 1) {
      Row state;
      if (FEEDS_BACK_NORMED)
        state.read(own.rest.normed[0]);
      else
        state.read(own.residual[0][last]), state.round();
      begin_state(own, 0, state);
    } else if (rank == 0 && warp == WARPS - 1 && lane == 0) {
      own_tokens[level] = token, own_scores[level] = score, own_parents[level] = level - 1;
      if (level < (int)table_levels) table_nodes[sequence * (table_levels - 1) + level - 1] = level;
      if (level < (int)tree_size) own_tree[level] = token;
    }
    above = score;
  }
  if (writes) lengths[sequence] = committed + count;
}
