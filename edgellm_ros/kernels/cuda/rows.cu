// SPDX-License-Identifier: Apache-2.0
// Copies of rows of embeddings and of KV caches. Sizes and strides count units of the selected width.

// out [tokens, units]; table [vocab, units], multimodal [multimodal_count, units]. One block per token.
template <class Unit>
__device__ void embed(Unit* out, const i64* ids, const Unit* table, const Unit* multimodal, i64 tokens, i64 vocab,
                      i64 multimodal_count, i64 units) {
  for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
    const i64 id = ids[token];
    const Unit* source = id < vocab || multimodal_count == 0
                             ? table + clamp(id, 0, vocab - 1) * units
                             : multimodal + clamp(id - vocab, 0, multimodal_count - 1) * units;
    for (i64 unit = threadIdx.x; unit < units; unit += blockDim.x) out[token * units + unit] = source[unit];
  }
}

// Like embed, with zeros for the tokens of the vocabulary.
template <class Unit>
__device__ void deepstack(Unit* out, const i64* ids, const Unit* multimodal, i64 tokens, i64 vocab,
                          i64 multimodal_count, i64 units) {
  for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
    const i64 id = ids[token];
    const bool zero = id < vocab || multimodal_count == 0;
    const Unit* source = zero ? multimodal : multimodal + clamp(id - vocab, 0, multimodal_count - 1) * units;
    for (i64 unit = threadIdx.x; unit < units; unit += blockDim.x)
      out[token * units + unit] = zero ? Unit() : source[unit];
  }
}

// Copies `units` consecutive units of each of layers * heads planes. blockIdx.y selects the planes.
template <class Unit>
__device__ void copy_cache_rows(Unit* target, const Unit* source, i64 layers, i64 heads, i64 target_layer_stride,
                                i64 target_head_stride, i64 source_layer_stride, i64 source_head_stride, i64 units) {
  for (i64 plane = blockIdx.y; plane < layers * heads; plane += gridDim.y) {
    const i64 layer = plane / heads, head = plane % heads;
    Unit* to = target + layer * target_layer_stride + head * target_head_stride;
    const Unit* from = source + layer * source_layer_stride + head * source_head_stride;
    for (i64 unit = first_index(); unit < units; unit += index_stride()) to[unit] = from[unit];
  }
}

// Copies the rows of each range of `ranges` [count, 5], see `Kernels.copy_cache_ranges`. source [layers,
// source_sequences, heads, source_capacity, row_units]; target likewise. blockIdx.y selects range, layer and head.
template <class Unit>
__device__ void copy_cache_ranges(Unit* target, const Unit* source, const i64* ranges, i64 count, i64 layers, i64 heads,
                                  i64 source_sequences, i64 source_capacity, i64 target_sequences, i64 target_capacity,
                                  i64 row_units) {
  for (i64 plane = blockIdx.y; plane < count * layers * heads; plane += gridDim.y) {
    const i64* range = ranges + plane / (layers * heads) * 5;
    const i64 layer = plane / heads % layers, head = plane % heads;
    const i64 from_plane = (layer * source_sequences + range[0]) * heads + head;
    const i64 to_plane = (layer * target_sequences + range[2]) * heads + head;
    const Unit* from = source + (from_plane * source_capacity + range[1]) * row_units;
    Unit* to = target + (to_plane * target_capacity + range[3]) * row_units;
    const i64 units = range[4] * row_units;
    for (i64 unit = first_index(); unit < units; unit += index_stride()) to[unit] = from[unit];
  }
}

// Copies the states of rows first_row + i with counts[i] > 0: states, next_states [layers, batch, units].
template <class Unit>
__device__ void commit_states(Unit* states, const Unit* next_states, const i64* counts, i64 layers, i64 batch,
                              i64 first_row, i64 rows, i64 units) {
  for (i64 plane = blockIdx.y; plane < layers * rows; plane += gridDim.y) {
    const i64 layer = plane / rows, row = plane % rows;
    if (counts[row] <= 0) continue;
    const i64 start = (layer * batch + first_row + row) * units;
    for (i64 unit = first_index(); unit < units; unit += index_stride())
      states[start + unit] = next_states[start + unit];
  }
}

#define ROW_KERNELS(width, Unit)                                                                                   \
  extern "C" __global__ void embed_##width(Unit* out, const i64* ids, const Unit* table, const Unit* multimodal,   \
                                           i64 tokens, i64 vocab, i64 multimodal_count, i64 units) {               \
    pdl_wait();                                                                                                    \
    embed(out, ids, table, multimodal, tokens, vocab, multimodal_count, units);                                    \
  }                                                                                                                \
  extern "C" __global__ void deepstack_##width(Unit* out, const i64* ids, const Unit* multimodal, i64 tokens,      \
                                               i64 vocab, i64 multimodal_count, i64 units) {                       \
    pdl_wait();                                                                                                    \
    deepstack(out, ids, multimodal, tokens, vocab, multimodal_count, units);                                       \
  }                                                                                                                \
  extern "C" __global__ void copy_cache_rows_##width(Unit* target, const Unit* source, i64 layers, i64 heads,      \
                                                     i64 target_layer_stride, i64 target_head_stride,              \
                                                     i64 source_layer_stride, i64 source_head_stride, i64 units) { \
    pdl_wait();                                                                                                    \
    copy_cache_rows(target, source, layers, heads, target_layer_stride, target_head_stride, source_layer_stride,   \
                    source_head_stride, units);                                                                    \
  }                                                                                                                \
  extern "C" __global__ void copy_cache_ranges_##width(                                                            \
      Unit* target, const Unit* source, const i64* ranges, i64 count, i64 layers, i64 heads, i64 source_sequences, \
      i64 source_capacity, i64 target_sequences, i64 target_capacity, i64 row_units) {                             \
    pdl_wait();                                                                                                    \
    copy_cache_ranges(target, source, ranges, count, layers, heads, source_sequences, source_capacity,             \
                      target_sequences, target_capacity, row_units);                                               \
  }                                                                                                                \
  extern "C" __global__ void commit_states_##width(Unit* states, const Unit* next_states, const i64* counts,       \
                                                   i64 layers, i64 batch, i64 first_row, i64 rows, i64 units) {    \
    pdl_wait();                                                                                                    \
    commit_states(states, next_states, counts, layers, batch, first_row, rows, units);                             \
  }

FOR_EACH_WIDTH(ROW_KERNELS)

// Writes zeros: replaces the memset nodes of graphs (engine/cuda/graph.py).
extern "C" __global__ void fill(unsigned char* out, i64 bytes) {
  pdl_wait();
  for (i64 i = first_index(); i < bytes; i += index_stride()) out[i] = 0;
}
