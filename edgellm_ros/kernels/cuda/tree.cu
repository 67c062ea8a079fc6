// SPDX-License-Identifier: Apache-2.0
// Kernels of speculative decoding: candidates, trees, their masks and rotary rows, sampled paths, moves of rows.
// Letters as in kernels/tree_protocol.py: K candidates of a node, N levels, T entries of a table, M nodes of a tree.

constexpr int TOP_VALUES = TOP_SHARE / THREADS;  // per thread
constexpr int FEW = 256;                         // values that are ordered by counting without a bound
#define NO_SCORE __uint_as_float(0xff800000u)    // -inf

struct TopShared {
  u64 warp_values[WARPS];
  u64 reaching[TOP_SHARE];
  u64 top[MOST_CANDIDATES];
  u64 least;
  u32 count;
  bool last;
};

static_assert(TOP_SHARE % THREADS == 0, "each thread has as many values");
static_assert(MOST_CANDIDATES <= 32, "the first warp writes the candidates");
static_assert(MOST_CANDIDATES <= WARPS, "so many warps have a maximum that reaches the least of the top");
static_assert(MOST_CANDIDATES * ((1 << 19) / TOP_SHARE) <= TOP_SHARE, "the tops of all blocks are values of one");

// Writes the `wanted` greatest of shared.reaching [count] to shared.top in falling order.
__device__ void order_top(TopShared& shared, int count, int wanted) {
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const u64 own = shared.reaching[i];
    int place = 0;
    for (int other = 0; other < count; ++other) place += shared.reaching[other] > own;
    if (place < wanted) shared.top[place] = own;
  }
  __syncthreads();
}

// Writes shared.top: the `wanted` greatest values of the block in falling order, then zeros. A value of 0 is none;
// others are different, but for NOT_FINITE.
//
// The warp maxima that are the `wanted` greatest of these bound the top from below, and few other values reach the
// bound: these are ordered by counting.
__device__ void find_top(TopShared& shared, const u64 (&values)[TOP_VALUES], int wanted) {
  const int thread = threadIdx.x;
  u64 highest = 0;
  for (u64 value : values) highest = value > highest ? value : highest;
  highest = warp_maximum(highest);
  if (thread % 32 == 0) shared.warp_values[thread / 32] = highest;
  if (thread < MOST_CANDIDATES) shared.top[thread] = 0;
  if (thread == 0) shared.count = 0;
  __syncthreads();
  if (thread < WARPS) {
    const u64 own = shared.warp_values[thread];
    int place = 0;
    for (int warp = 0; warp < WARPS; ++warp) {
      const u64 other = shared.warp_values[warp];
      place += other > own || (other == own && warp < thread);
    }
    if (place == wanted - 1) shared.least = own;
  }
  __syncthreads();
  const u64 least = shared.least;
  for (u64 value : values)
    if (value && value >= least) shared.reaching[atomicAdd(&shared.count, 1u)] = value;
  __syncthreads();
  order_top(shared, (int)shared.count, wanted);
}

// Returns the table entry where a level begins.
__device__ inline i64 level_start(i64 level, i64 top_k) {
  return level == 1 ? 1 : 1 + top_k + (level - 2) * top_k * top_k;
}

// Returns the value of a logit; half precision comes as its bits.
__device__ inline float value_of(float logit) { return logit; }

__device__ inline float value_of(unsigned short bits) {
  const u32 sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  const bool is_finite = magnitude < 0x0f800000u;
  const float scaled = __uint_as_float(magnitude) * 5.192296858534828e33f;  // 2^112: exact, also if subnormal
  return __uint_as_float(sign | (is_finite ? __float_as_uint(scaled) : 0x7f800000u | magnitude));
}

// logits [rows, vocab]; tables [batch, entries]; nodes [batch, levels - 1, K]. gridDim.x blocks of TOP_SHARE logits for
// each of gridDim.y rows; if there are several, the last block of a row to finish combines what they found. arrived
// [rows]: zero before and after a launch; work [rows, gridDim.x, 1 + K]: mass and most likely tokens of each block.
template <class Logit>
__device__ void add_candidates_of(const Logit* all_logits, i64 vocab, const i64* token_of_logit, i64* tokens,
                                  float* scores, i64* parents, const i64* nodes, i64 nodes_per_sequence, i64 top_k,
                                  i64 entries, i64 levels, i64 level, u32* arrived, u64* work) {
  __shared__ TopShared shared;
  const int thread = threadIdx.x, blocks = gridDim.x, wanted = (int)top_k;
  const i64 row = blockIdx.y, sequence = row / nodes_per_sequence, node = row % nodes_per_sequence;
  const Ranks ranks(vocab);
  const Logit* logits = all_logits + row * vocab;
  const i64 parent = level == 1 ? 0 : nodes[(sequence * (levels - 1) + level - 2) * top_k + node];
  const double above = level == 1 ? 0.0 : (double)scores[sequence * entries + parent];
  u64 values[TOP_VALUES];
#pragma unroll
  for (int i = 0; i < TOP_VALUES; ++i) {
    const i64 id = (i64)blockIdx.x * TOP_SHARE + i * THREADS + thread;
    const float logit = id < vocab ? value_of(logits[id]) : 0.0f;
    values[i] = id >= vocab ? 0 : fabsf(logit) <= LARGEST_FLOAT ? ranks.rank(logit, id) : NOT_FINITE;
  }
  find_top(shared, values, wanted);
  u64 best = shared.top[0], mass = 0;
  const Scale scale = make_scale(1.0f);
  if (best != NOT_FINITE) {
    const float top = ranks.score(best);
    for (u64 value : values) {
      const float score = ranks.score(value);
      if (value && distance_bin(top, score, scale.high) < (float)THREADS) mass += weight(top, score, scale);
    }
  }
  mass = sum_in_first_warp(mass, shared.warp_values);
  if (blocks > 1) {
    u64* found = work + (row * blocks + blockIdx.x) * (1 + top_k);
    if (thread < wanted) found[1 + thread] = shared.top[thread];
    if (thread == 0) found[0] = mass;
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      shared.last = atomicAdd(&arrived[row], 1u) == gridDim.x - 1;
      __threadfence();
    }
    __syncthreads();
    if (!shared.last) return;

    found = work + row * blocks * (1 + top_k);
    const u64* part = found + thread * (1 + top_k);  // of this thread's block
    const u64 part_mass = thread < blocks ? __ldcg(&part[0]) : 0, part_best = thread < blocks ? __ldcg(&part[1]) : 0;
    const int count = blocks * wanted;
    if (count <= FEW) {
      if (thread < count)
        shared.reaching[thread] = __ldcg(&found[thread / wanted * (1 + wanted) + 1 + thread % wanted]);
      if (thread < MOST_CANDIDATES) shared.top[thread] = 0;
      __syncthreads();
      order_top(shared, count, wanted);
    } else {
#pragma unroll
      for (int i = 0; i < TOP_VALUES; ++i) {
        const int place = i * THREADS + thread;
        values[i] = place < count ? __ldcg(&found[place / wanted * (1 + wanted) + 1 + place % wanted]) : 0;
      }
      find_top(shared, values, wanted);
    }
    best = shared.top[0];
    mass = 0;
    if (thread < blocks && best != NOT_FINITE)
      mass = (u64)((double)part_mass * exp((double)ranks.score(part_best) - (double)ranks.score(best)));
    mass = sum_in_first_warp(mass, shared.warp_values);
  }

  const double top = ranks.score(best);
  i64* own_tokens = tokens + sequence * entries;
  float* own_scores = scores + sequence * entries;
  i64* own_parents = parents + sequence * entries;
  if (thread < wanted) {
    const i64 entry = level_start(level, top_k) + node * top_k + thread;
    const u64 rank = shared.top[thread];
    float score = NO_SCORE;
    i64 id = 0;
    if (best != NOT_FINITE) {
      const double log_mass = log((double)mass / (double)(1ull << WEIGHT_BITS));
      score = (float)(above + ((double)ranks.score(rank) - top - log_mass));
      id = ranks.id(rank);
    }
    own_tokens[entry] = !(score > NO_SCORE) ? -1 : token_of_logit ? token_of_logit[id] : id;
    own_scores[entry] = score;
    own_parents[entry] = parent;
  }
  if (thread == 0) {
    if (blocks > 1) arrived[row] = 0;
    if (level == 1) {
      own_tokens[0] = own_parents[0] = -1;
      own_scores[0] = 0.0f;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_candidates(const float* logits, i64 vocab, const i64* token_of_logit, i64* tokens, float* scores, i64* parents,
                   const i64* nodes, i64 nodes_per_sequence, i64 top_k, i64 entries, i64 levels, i64 level,
                   u32* arrived, u64* work) {
  pdl_wait();
  add_candidates_of(logits, vocab, token_of_logit, tokens, scores, parents, nodes, nodes_per_sequence, top_k, entries,
                    levels, level, arrived, work);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_candidates_half(const unsigned short* logits, i64 vocab, const i64* token_of_logit, i64* tokens, float* scores,
                        i64* parents, const i64* nodes, i64 nodes_per_sequence, i64 top_k, i64 entries, i64 levels,
                        i64 level, u32* arrived, u64* work) {
  pdl_wait();
  add_candidates_of(logits, vocab, token_of_logit, tokens, scores, parents, nodes, nodes_per_sequence, top_k, entries,
                    levels, level, arrived, work);
}

// Writes a row of a mask: the first `committed` of `units` * sizeof(Unit) columns, and those of `slots` [count] in
// shared memory, written by thread 0 before.
template <class Unit>
__device__ void mask_row(Unit* out, i64 units, i64 committed, const i64* slots, const int& count) {
  constexpr int width = sizeof(Unit);
  for (i64 i = threadIdx.x; i < units; i += blockDim.x) {
    Unit unit;
    for (int byte = 0; byte < width; ++byte) ((unsigned char*)&unit)[byte] = i * width + byte < committed;
    out[i] = unit;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    if (slots[i] >= 0 && slots[i] < units * width) ((unsigned char*)out)[slots[i]] = 1;
}

// One block for each of tokens [batch, count]. embedding [vocab, row_units]; embeds [batch, count, row_units]; cos, sin
// [batch, count, frequencies]; mask [batch, 1, count, mask_units]; counts, lengths, deltas, newest, filled [batch].
// mask, with 0 units, and filled may be null.
template <class Unit>
__device__ void begin_accepted(const i64* tokens, const i64* counts, i64 count, const Unit* embedding, i64 vocab,
                               i64 row_units, const float* cos_table, const float* sin_table, const float* radians,
                               i64 positions, i64 frequencies, const i64* lengths, const float* deltas, i64* newest,
                               Unit* embeds, float* cos, float* sin, Unit* mask, i64 mask_units, i64* filled) {
  const i64 row = blockIdx.x, sequence = row / count, slot = lengths[sequence] + row % count;
  if (threadIdx.x == 0 && row % count == 0) {
    newest[sequence] = clamp(counts[sequence] - 1, 0, count - 1);
    if (filled) filled[sequence] = slot + count;
  }
  const Unit* embedding_row = embedding + clamp(tokens[row], 0, vocab - 1) * row_units;
  for (i64 unit = threadIdx.x; unit < row_units; unit += blockDim.x)
    embeds[row * row_units + unit] = embedding_row[unit];
  const float position = (float)slot + deltas[sequence];
  for (i64 i = threadIdx.x; i < frequencies; i += blockDim.x)
    write_angle(cos + row * frequencies + i, sin + row * frequencies + i, cos_table, sin_table, radians, position, i,
                positions, frequencies);
  mask_row(mask + row * mask_units, mask_units, slot + 1, nullptr, 0);
}

// One block for each of batch * K nodes of a level. table [batch, entries]; nodes [batch, levels - 1, K]; embedding
// [vocab, row_units], states [batch, state_rows, row_units], embeds and parents [batch, K, row_units]; cos, sin [batch,
// K, frequencies]; mask [batch, 1, K, mask_units]; newest, write_index, filled [batch]. mask, with 0 units, write_index
// and filled may be null.
template <class Unit>
__device__ void begin_level(const i64* tokens, const float* scores, i64* nodes, i64 top_k, i64 entries, i64 levels,
                            i64 level, const Unit* states, i64 state_rows, const i64* newest, const Unit* embedding,
                            i64 vocab, i64 row_units, const float* cos_table, const float* sin_table,
                            const float* radians, i64 positions, i64 frequencies, const i64* lengths,
                            const float* deltas, Unit* embeds, Unit* parents, float* cos, float* sin, Unit* mask,
                            i64 mask_units, i64* write_index, i64* filled) {
  __shared__ u64 values[MOST_CANDIDATES * MOST_CANDIDATES];
  __shared__ i64 slots[MOST_TREE_NODES];
  __shared__ int slot_count;
  __shared__ i64 own_entry;
  const i64 row = blockIdx.x, sequence = row / top_k, own = row % top_k, committed = lengths[sequence];
  const i64 start = level_start(level, top_k), count = level_start(level + 1, top_k) - start;
  const Ranks ranks(entries);
  for (i64 i = threadIdx.x; i < count; i += blockDim.x)
    values[i] = ranks.rank(scores[sequence * entries + start + i], start + i);
  __syncthreads();
  for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
    i64 place = 0;
    for (i64 other = 0; other < count; ++other) place += values[other] > values[i];
    if (place == own) own_entry = start + i;
  }
  __syncthreads();
  const i64 entry = own_entry, parent = (entry - start) / top_k;
  if (threadIdx.x == 0) {
    nodes[(sequence * (levels - 1) + level - 1) * top_k + own] = entry;
    slots[0] = committed + (level - 1) * top_k + own;
    i64 node = parent;
    for (i64 above = level - 1; above > 0; --above) {
      slots[level - above] = committed + (above - 1) * top_k + node;
      const i64 upper = nodes[(sequence * (levels - 1) + above - 1) * top_k + node];
      node = clamp((upper - level_start(above, top_k)) / top_k, 0, top_k - 1);
    }
    slot_count = (int)level;
    if (own == 0 && write_index) write_index[sequence] = committed + (level - 1) * top_k;
    if (own == 0 && filled) filled[sequence] = committed + level * top_k;
  }
  const i64 token = clamp(tokens[sequence * entries + entry], 0, vocab - 1);
  const i64 state = clamp(level == 1 ? newest[sequence] : parent, 0, state_rows - 1);
  const Unit* embedding_row = embedding + token * row_units;
  const Unit* state_row = states + (sequence * state_rows + state) * row_units;
  for (i64 unit = threadIdx.x; unit < row_units; unit += blockDim.x) {
    embeds[row * row_units + unit] = embedding_row[unit];
    parents[row * row_units + unit] = state_row[unit];
  }
  const float position = (float)(committed + level - 1) + deltas[sequence];
  for (i64 i = threadIdx.x; i < frequencies; i += blockDim.x)
    write_angle(cos + row * frequencies + i, sin + row * frequencies + i, cos_table, sin_table, radians, position, i,
                positions, frequencies);
  mask_row(mask + row * mask_units, mask_units, committed, slots, slot_count);
}

// out [batch, 1, size, capacity] bool; one block per row of it. parents [batch, size].
template <class Unit>
__device__ void tree_mask(Unit* out, const i64* parents, const i64* lengths, i64 size, i64 units) {
  __shared__ i64 slots[MOST_TREE_NODES];
  __shared__ int count;
  const i64 row = blockIdx.x, sequence = row / size, committed = lengths[sequence];
  if (threadIdx.x == 0) {
    count = 0;
    for (i64 node = row % size; node >= 0 && count < size; node = parents[sequence * size + node])
      slots[count++] = committed + node;
  }
  mask_row(out + row * units, units, committed, slots, count);
}

// cache [layers, batch, heads, capacity, units]; each thread moves its unit of all rows of a path. lengths, counts
// [rows], path [rows, width] of the sequences from first_row on.
template <class Unit>
__device__ void move_cache_rows(Unit* cache, const i64* lengths, const i64* path, const i64* counts, i64 layers,
                                i64 batch, i64 heads, i64 capacity, i64 units, i64 first_row, i64 rows, i64 width) {
  constexpr int GROUP = 8;  // rows whose reads are under way at once
  for (i64 i = first_index(); i < layers * rows * heads * units; i += index_stride()) {
    const i64 plane = i / units, head = plane % heads, row = plane / heads % rows, layer = plane / heads / rows;
    const i64 length = lengths[row], count = counts[row] < width ? counts[row] : width;
    Unit* column = cache + ((layer * batch + first_row + row) * heads + head) * capacity * units + i % units;
    for (i64 first = 0; first < count; first += GROUP) {
      Unit moved[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        const i64 source = first + j < count ? length + path[row * width + first + j] : capacity;
        if (source < capacity) moved[j] = column[source * units];
      }
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        const i64 source = first + j < count ? length + path[row * width + first + j] : capacity;
        if (source < capacity) column[(length + first + j) * units] = moved[j];
      }
    }
  }
}

// out [places, units]; source [batch, rows, units], index [batch, places / batch]. One block per row of `out`.
template <class Unit>
__device__ void take_rows(Unit* out, const Unit* source, const i64* index, i64 places, i64 places_per_sequence,
                          i64 rows, i64 units) {
  for (i64 place = blockIdx.x; place < places; place += gridDim.x) {
    const i64 row = place / places_per_sequence * rows + clamp(index[place], 0, rows - 1);
    for (i64 unit = threadIdx.x; unit < units; unit += blockDim.x)
      out[place * units + unit] = source[row * units + unit];
  }
}

// take_rows, and copies of tokens [places] and of counts [batch]; lengths [batch].
template <class Unit>
__device__ void take_accepted(Unit* out, const Unit* source, const i64* index, i64 places, i64 places_per_sequence,
                              i64 rows, i64 units, const i64* tokens, i64* out_tokens, const i64* counts,
                              i64* out_counts, i64* lengths) {
  for (i64 place = blockIdx.x; place < places; place += gridDim.x) {
    const i64 sequence = place / places_per_sequence, count = counts[sequence];
    const bool is_first = threadIdx.x == 0 && place % places_per_sequence == 0;
    if (count == 0) {
      if (is_first) lengths[sequence] -= out_counts[sequence];
      continue;
    }
    if (is_first) out_counts[sequence] = count;
    if (threadIdx.x == 0) out_tokens[place] = tokens[place];
    const i64 row = sequence * rows + clamp(index[place], 0, rows - 1);
    for (i64 unit = threadIdx.x; unit < units; unit += blockDim.x)
      out[place * units + unit] = source[row * units + unit];
  }
}

// source [places, units]; out [batch, rows, units], index [batch, places / batch]. One block per row of `source`.
template <class Unit>
__device__ void put_rows(Unit* out, const Unit* source, const i64* index, i64 places, i64 places_per_sequence, i64 rows,
                         i64 units) {
  for (i64 place = blockIdx.x; place < places; place += gridDim.x) {
    if (index[place] < 0 || index[place] >= rows) continue;
    const i64 row = place / places_per_sequence * rows + index[place];
    for (i64 unit = threadIdx.x; unit < units; unit += blockDim.x)
      out[row * units + unit] = source[place * units + unit];
  }
}

#define TREE_KERNELS(width, Unit)                                                                                      \
  extern "C" __global__ void begin_accepted_##width(                                                                   \
      const i64* tokens, const i64* counts, i64 count, const Unit* embedding, i64 vocab, i64 row_units,                \
      const float* cos_table, const float* sin_table, const float* radians, i64 positions, i64 frequencies,            \
      const i64* lengths, const float* deltas, i64* newest, Unit* embeds, float* cos, float* sin, Unit* mask,          \
      i64 mask_units, i64* filled) {                                                                                   \
    pdl_wait();                                                                                                        \
    begin_accepted(tokens, counts, count, embedding, vocab, row_units, cos_table, sin_table, radians, positions,       \
                   frequencies, lengths, deltas, newest, embeds, cos, sin, mask, mask_units, filled);                  \
  }                                                                                                                    \
  extern "C" __global__ void begin_level_##width(                                                                      \
      const i64* tokens, const float* scores, i64* nodes, i64 top_k, i64 entries, i64 levels, i64 level,               \
      const Unit* states, i64 state_rows, const i64* newest, const Unit* embedding, i64 vocab, i64 row_units,          \
      const float* cos_table, const float* sin_table, const float* radians, i64 positions, i64 frequencies,            \
      const i64* lengths, const float* deltas, Unit* embeds, Unit* parents, float* cos, float* sin, Unit* mask,        \
      i64 mask_units, i64* write_index, i64* filled) {                                                                 \
    pdl_wait();                                                                                                        \
    begin_level(tokens, scores, nodes, top_k, entries, levels, level, states, state_rows, newest, embedding, vocab,    \
                row_units, cos_table, sin_table, radians, positions, frequencies, lengths, deltas, embeds, parents,    \
                cos, sin, mask, mask_units, write_index, filled);                                                      \
  }                                                                                                                    \
  extern "C" __global__ void tree_mask_##width(Unit* out, const i64* parents, const i64* lengths, i64 size,            \
                                               i64 units) {                                                            \
    pdl_wait();                                                                                                        \
    tree_mask(out, parents, lengths, size, units);                                                                     \
  }                                                                                                                    \
  extern "C" __global__ void move_cache_rows_##width(                                                                  \
      Unit* cache, const i64* lengths, const i64* path, const i64* counts, i64 layers, i64 batch, i64 heads,           \
      i64 capacity, i64 units, i64 first_row, i64 rows, i64 path_width) {                                              \
    pdl_wait();                                                                                                        \
    move_cache_rows(cache, lengths, path, counts, layers, batch, heads, capacity, units, first_row, rows, path_width); \
  }                                                                                                                    \
  extern "C" __global__ void take_rows_##width(Unit* out, const Unit* source, const i64* index, i64 places,            \
                                               i64 places_per_sequence, i64 rows, i64 units) {                         \
    pdl_wait();                                                                                                        \
    take_rows(out, source, index, places, places_per_sequence, rows, units);                                           \
  }                                                                                                                    \
  extern "C" __global__ void take_accepted_##width(                                                                    \
      Unit* out, const Unit* source, const i64* index, i64 places, i64 places_per_sequence, i64 rows, i64 units,       \
      const i64* tokens, i64* out_tokens, const i64* counts, i64* out_counts, i64* lengths) {                          \
    pdl_wait();                                                                                                        \
    take_accepted(out, source, index, places, places_per_sequence, rows, units, tokens, out_tokens, counts,            \
                  out_counts, lengths);                                                                                \
  }                                                                                                                    \
  extern "C" __global__ void put_rows_##width(Unit* out, const Unit* source, const i64* index, i64 places,             \
                                              i64 places_per_sequence, i64 rows, i64 units) {                          \
    pdl_wait();                                                                                                        \
    put_rows(out, source, index, places, places_per_sequence, rows, units);                                            \
  }

FOR_EACH_WIDTH(TREE_KERNELS)

// One block of SELECT_THREADS per sequence. A radix search finds the key of the last selected entry; of the entries
// with this key the first ones are selected. An entry's node is the number of selected entries before it.
constexpr int DIGIT_BITS = 8;
static_assert(SELECT_THREADS == 1 << DIGIT_BITS, "a thread for each value of a digit");

extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
    select_tree(const i64* table_tokens, const float* table_scores, const i64* table_parents, i64 entries, i64 top_k,
                const i64* last_tokens, i64* tokens, i64* parents, i64* depths, i64 size) {
  pdl_wait();
  __shared__ u32 keys[MOST_TABLE_ENTRIES];  // then the nodes of the selected entries
  __shared__ u32 counts[SELECT_THREADS], warp_counts[WARPS], digit, before;
  const i64 table = blockIdx.x * entries, tree = blockIdx.x * size;
  const int thread = threadIdx.x, all = (int)entries;
  for (int entry = thread; entry < all; entry += SELECT_THREADS) keys[entry] = order_key(table_scores[table + entry]);

  u64 known = 0;           // the leading digits of the last selected key
  u32 wanted = (u32)size;  // number of selected keys with these digits
  for (int left = 32; left > 0; left -= DIGIT_BITS) {
    counts[thread] = 0;
    __syncthreads();
    for (int entry = thread; entry < all; entry += SELECT_THREADS)
      if ((u64)keys[entry] >> left == known)
        atomicAdd(&counts[keys[entry] >> (left - DIGIT_BITS) & (SELECT_THREADS - 1)], 1u);
    __syncthreads();
    const u32 count = counts[SELECT_THREADS - 1 - thread], through = block_sum_through(count, warp_counts);
    if (through >= wanted && through - count < wanted) {
      digit = SELECT_THREADS - 1 - thread;
      before = through - count;
    }
    __syncthreads();
    known = known << DIGIT_BITS | digit;
    wanted -= before;
  }

  const int own = (all + SELECT_THREADS - 1) / SELECT_THREADS, first = thread * own;
  const int last = first + own < all ? first + own : all;
  static_assert(MOST_TABLE_ENTRIES / SELECT_THREADS <= 32, "a bit for each entry of a thread");
  u32 equal = 0, selected = 0;
  for (int entry = first; entry < last; ++entry) equal += keys[entry] == known;
  u32 equal_before = block_sum_through(equal, warp_counts) - equal;
  for (int entry = first; entry < last; ++entry)
    if (keys[entry] > known || (keys[entry] == known && equal_before++ < wanted)) selected |= 1u << (entry - first);
  const u32 count = __popc(selected);
  u32 next = block_sum_through(count, warp_counts) - count;
  for (int entry = first; entry < last; ++entry)
    if (selected >> (entry - first) & 1) keys[entry] = next++;
  __syncthreads();
  for (int entry = first; entry < last; ++entry) {
    if (!(selected >> (entry - first) & 1)) continue;
    const i64 at = tree + keys[entry];
    const bool root = entry == 0;
    tokens[at] = root ? last_tokens[blockIdx.x] : table_tokens[table + entry];
    parents[at] = root ? -1 : (i64)keys[clamp(table_parents[table + entry], 0, entries - 1)];
    depths[at] = root ? 0 : entry <= top_k ? 1 : 2 + (entry - 1 - top_k) / (top_k * top_k);
  }
}

// cos, sin [batch, steps, frequencies] from tables [positions, frequencies]; depths [batch, steps].
extern "C" __global__ void tree_rope_rows(float* cos, float* sin, const float* cos_table, const float* sin_table,
                                          const float* radians, const i64* lengths, const float* deltas,
                                          const i64* depths, i64 batch, i64 steps, i64 positions, i64 frequencies) {
  pdl_wait();
  for (i64 i = first_index(); i < batch * steps * frequencies; i += index_stride()) {
    const i64 token = i / frequencies, sequence = token / steps;
    const float position = (float)(lengths[sequence] + depths[token]) + deltas[sequence];
    write_angle(cos + i, sin + i, cos_table, sin_table, radians, position, i % frequencies, positions, frequencies);
  }
}

// Writes the highest rank of each node's tokens to shared memory, or NOT_FINITE. logits [size, vocab].
__device__ inline void find_best_of_nodes(u64* bests, const float* logits, int size, int vocab, Ranks ranks) {
  constexpr int BATCH = 8;                                                     // reads on their way
  const int warps = size < WARPS ? WARPS / size : 1, lane = threadIdx.x % 32;  // of a node
  for (int node = threadIdx.x; node < size; node += THREADS) bests[node] = 0;
  __syncthreads();
  for (int item = threadIdx.x / 32; item < size * warps; item += WARPS) {
    const int node = item / warps;
    const float* const own = logits + (i64)node * vocab;
    u64 highest = 0;
    for (int first = item % warps * 32 + lane; first < vocab; first += BATCH * 32 * warps) {
      float values[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int id = first + i * 32 * warps;
        values[i] = id < vocab ? own[id] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int id = first + i * 32 * warps;
        const u64 rank = fabsf(values[i]) <= LARGEST_FLOAT ? ranks.rank(values[i], id) : NOT_FINITE;
        if (id < vocab && rank > highest) highest = rank;
      }
    }
    highest = warp_maximum(highest);
    if (lane == 0) atomicMax(&bests[node], highest);
  }
  __syncthreads();
}

// One cooperative launch, gridDim.x blocks for each of gridDim.y sequences, which all find the same path. logits
// [batch, size, vocab]; tree [batch, size]; sampled, tokens, path [batch, most]; offered [batch]. Tokens of the path
// are marked in seen [batch, vocab] until the end, by the block that reads them there. If tokens do not depend on those
// before, and there is one block, the tokens of all nodes are found at once.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_path(const float* logits, i64 vocab, const float* temperature, const i64* top_k, const float* top_p,
                const float* min_p, const float* repetition_penalty, const u64* seed, const i64* positions,
                const i64* path_limits, bool* seen, const i64* tree_tokens, const i64* tree_parents, i64 size,
                const i64* vocab_map, i64* sampled, i64* tokens, i64* path, i64* offered, i64 most,
                RowScratch* scratch) {
  pdl_wait();
  __shared__ SampleShared shared;
  __shared__ Rules rules;                  // not in registers, of which 1024 threads have few
  __shared__ int marked[MOST_TREE_NODES];  // tokens of the path; -1 = not marked by this block
  __shared__ int node_tokens[MOST_TREE_NODES], node_parents[MOST_TREE_NODES];
  __shared__ u32 places[MOST_TREE_NODES + 1];  // of the path's nodes, from the end; 0 = none
  __shared__ u64 bests[MOST_TREE_NODES];
  const int row = blockIdx.y, thread = threadIdx.x;
  const i64 limit = path_limits[row] < most ? path_limits[row] : most;
  if (thread == 0) {
    rules = {temperature[row], top_k[row], top_p[row], min_p[row], seed[row]};
    if (!rules.greedy()) prepare(shared, rules);
    shared.barriers = 0;
  }
  if (thread <= MOST_TREE_NODES) places[thread] = thread == 0 ? (u32)size : 0;
  if (thread < size) {
    node_tokens[thread] = (int)tree_tokens[row * size + thread];
    node_parents[thread] = (int)tree_parents[row * size + thread];
  }
  const Share share(vocab);
  RowSampler sampler{
      shared,      scratch[row], logits + row * size * vocab, seen + row * vocab, repetition_penalty[row], Ranks(vocab),
      share.begin, share.end};
  const bool at_once = gridDim.x == 1 && !(temperature[row] > 0.0f) && repetition_penalty[row] == 1.0f;
  if (at_once) find_best_of_nodes(bests, sampler.logits, (int)size, (int)vocab, sampler.ranks);
  while (true) {
    const int count = sampler.count;
    int index;
    if (at_once) {
      const u64 best = bests[size - places[count]];
      index = best == NOT_FINITE ? -1 : (int)sampler.ranks.id(best);
    } else {
      index = sampler.sample(sampler.block_best(), rules, (u32)positions[row] + (u32)count);
    }
    const int node = (int)(size - places[count]), token = index < 0 || !vocab_map ? index : (int)vocab_map[index];
    const bool matches = index >= 0 && count + 1 < limit && thread < size && node_parents[thread] == node &&
                         node_tokens[thread] == token;
    if (matches) atomicMax(&places[count + 1], (u32)(size - thread));  // the first child has the highest
    if (thread == 0) {
      const bool marks =
          sampler.penalty != 1.0f && index >= share.begin && index < share.end && !seen[row * vocab + index];
      marked[count] = marks ? index : -1;
      if (marks) seen[row * vocab + index] = true;
      if (blockIdx.x == 0) {
        // All blocks are done with the token before, and none begins the one after the next.
        if (!at_once) scratch[row].min_p_mass[(count + TURNS - 1) % TURNS] = 0;
        sampled[row * most + count] = index;
        tokens[row * most + count] = token;
        path[row * most + count] = node;
      }
    }
    __syncthreads();
    sampler.count = count + 1;
    if (places[count + 1] == 0) break;
    sampler.logits = logits + (row * size + size - places[count + 1]) * vocab;
  }
  const int count = sampler.count;
  if (thread < count && marked[thread] >= 0) seen[row * vocab + marked[thread]] = false;
  if (blockIdx.x == 0) {
    for (i64 i = count + thread; i < most; i += THREADS) {
      sampled[row * most + i] = tokens[row * most + i] = -1;
      path[row * most + i] = size - places[count - 1];
    }
    if (thread == 0) offered[row] = count;
  }
  if (!at_once && scratch[row].is_last()) scratch[row].reset();
}

// One block per sequence. history [batch, capacity]; tokens, parents, depths [batch, size] of the chain.
extern "C" __global__ void __launch_bounds__(THREADS)
    find_continuation(const i64* histories, const i64* lengths, i64 capacity, i64 most_ngram, i64 least_ngram,
                      i64* tokens, i64* parents, i64* depths, i64 size) {
  pdl_wait();
  __shared__ u64 warp_values[WARPS];
  const i64* history = histories + blockIdx.x * capacity;
  const i64 newest = lengths[blockIdx.x], chain = blockIdx.x * size;
  const bool inside = newest >= 0 && newest < capacity;
  u64 best = 0;  // length of the n-gram, then its end + 1
  const i64 last = inside ? history[newest] : -1;
  for (i64 end = threadIdx.x; inside && end < newest; end += THREADS) {
    if (last < 0 || history[end] != last) continue;
    i64 length = 1;
    while (length < most_ngram && length <= end && history[newest - length] >= 0 &&
           history[end - length] == history[newest - length])
      ++length;
    const u64 found = (u64)length << 32 | (u64)(end + 1);
    if (length >= least_ngram && found > best) best = found;
  }
  best = block_maximum(best, warp_values);
  const i64 end = (i64)(best & 0xffffffffu) - 1;
  for (i64 node = threadIdx.x; node < size; node += THREADS) {
    tokens[chain + node] = node == 0 ? last : best == 0 ? -1 : history[end + 1 + (node - 1) % (newest - end)];
    parents[chain + node] = node - 1;
    depths[chain + node] = node;
  }
}

// The last counts[i] of tokens [batch, width] up to counts[i] end at entry lengths[i] of history [batch, capacity].
extern "C" __global__ void append_history(const i64* tokens, const i64* counts, const i64* lengths, i64* history,
                                          i64 batch, i64 width, i64 capacity) {
  pdl_wait();
  for (i64 i = first_index(); i < batch * width; i += index_stride()) {
    const i64 sequence = i / width, place = i % width, count = counts[sequence];
    const i64 entry = lengths[sequence] - count + 1 + place;
    if (place < count && entry >= 0 && entry < capacity) history[sequence * capacity + entry] = tokens[i];
  }
}
