// SPDX-License-Identifier: Apache-2.0
// Kernels of recurrent layers: the states after the accepted tokens of a verification.

// A block per STATE_COLUMNS columns of a group, and row of the batch in each layer: `TreeKernels.advance_states`.
// Threads share these columns as `slices` rows. A thread keeps its entries of the state in registers between the
// products with all keys and the change, so a state of up to slices * ENTRIES rows is read once.
constexpr int ENTRIES = 16;
extern "C" __global__ void __launch_bounds__(STATE_THREADS)
    advance_states(float* states, const float* keys, const float* values, const float* decays, const float* strengths,
                   const i64* counts, i64 batch, i64 rows, i64 tokens, i64 heads, i64 key_heads, i64 key_dim,
                   i64 groups, i64 columns) {
  pdl_wait();
  __shared__ float logs[MOST_CHAIN_TOKENS], fades[MOST_CHAIN_TOKENS];
  __shared__ float products[MOST_CHAIN_TOKENS][MOST_CHAIN_TOKENS];  // of keys, faded from the second to the first
  __shared__ float sums[MOST_CHAIN_TOKENS][STATE_THREADS], updates[MOST_CHAIN_TOKENS][STATE_COLUMNS];
  const i64 layer = blockIdx.y / rows, row = blockIdx.y % rows;
  const int count = (int)clamp(counts[row], 0, tokens), thread = threadIdx.x, size = (int)key_dim;
  if (count == 0) return;
  const i64 parts = (columns + STATE_COLUMNS - 1) / STATE_COLUMNS, group = blockIdx.x / parts;
  const int wide = (int)(columns < STATE_COLUMNS ? columns : STATE_COLUMNS), slices = STATE_THREADS / wide;
  const int lane = thread % wide, slice = thread / wide;
  const i64 column = blockIdx.x % parts * STATE_COLUMNS + lane;
  const bool works = slice < slices && column < columns;
  const i64 per_head = groups / heads, head = group / per_head, key_head = head / (heads / key_heads);
  const i64 first = layer * batch * MOST_CHAIN_TOKENS + row * tokens;
  const i64 key_stride = key_heads * key_dim, value_stride = groups * columns;
  const float* key = keys + first * key_stride + key_head * key_dim;
  const float* value = values + first * value_stride + group * columns;
  float* state = states + ((layer * batch + row) * groups + group) * key_dim * columns + column;
  float entries[ENTRIES];
  const auto load = [&](int from) {
#pragma unroll
    for (int each = 0; each < ENTRIES; ++each) {
      const int i = from + slice + each * slices;
      entries[each] = works && i < size ? state[i * columns] : 0;
    }
  };
  load(0);
  if (thread == 0) {
    float total = 0;
    for (int t = 0; t < count; ++t) logs[t] = total += decays[(first + t) * heads + head];
    for (int t = 0; t < count; ++t) fades[t] = expf(total - logs[t]);
  }
  __syncthreads();
  const int chunk = slices * ENTRIES;
  if (strengths) {
    for (int pair = thread / 32; pair < count * count; pair += STATE_THREADS / 32) {  // a warp each
      const int t = pair / count, before = pair % count;
      if (before >= t) continue;
      float sum = 0;
      for (int i = thread % 32; i < size; i += 32) sum += key[t * key_stride + i] * key[before * key_stride + i];
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (thread % 32 == 0) products[t][before] = expf(logs[t] - logs[before]) * sum;
    }
    float sum[MOST_CHAIN_TOKENS] = {};
    for (int from = 0; from < size; from += chunk) {
      if (from) load(from);
#pragma unroll
      for (int t = 0; t < MOST_CHAIN_TOKENS; ++t) {
#pragma unroll
        for (int each = 0; each < ENTRIES; ++each) {
          const int i = from + slice + each * slices;
          if (t < count && i < size) sum[t] += entries[each] * key[t * key_stride + i];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < MOST_CHAIN_TOKENS; ++t) sums[t][thread] = sum[t];
  }
  __syncthreads();
  for (int t = 0; slice == 0 && works && t < count; ++t) {
    float update = value[t * value_stride + column];
    if (strengths) {
      float known = 0;
      for (int each = 0; each < slices; ++each) known += sums[t][each * wide + lane];
      known *= expf(logs[t]);
      for (int before = 0; before < t; ++before) known += products[t][before] * updates[before][lane];
      update = strengths[(first + t) * heads + head] * (update - known);
    }
    updates[t][lane] = update;
  }
  __syncthreads();
  const float fade = expf(logs[count - 1]);
  for (int from = 0; from < size; from += chunk) {
    if (size > chunk) load(from);
#pragma unroll
    for (int each = 0; each < ENTRIES; ++each) {
      const int i = from + slice + each * slices;
      if (!works || i >= size) continue;
      float entry = entries[each] * fade;
      for (int t = 0; t < count; ++t) entry += fades[t] * key[t * key_stride + i] * updates[t][lane];
      state[i * columns] = entry;
    }
  }
}

// windows [layers, batch, channels, past], inputs [layers, batch * MOST_CHAIN_TOKENS tokens, channels]:
// `TreeKernels.advance_windows`.
extern "C" __global__ void advance_windows(float* windows, const float* inputs, const i64* counts, i64 layers,
                                           i64 batch, i64 rows, i64 tokens, i64 channels, i64 past) {
  pdl_wait();
  for (i64 i = first_index(); i < layers * rows * channels; i += index_stride()) {
    const i64 channel = i % channels, row = i / channels % rows, layer = i / channels / rows;
    const i64 count = clamp(counts[row], 0, tokens);
    const float* input = inputs + (layer * batch * MOST_CHAIN_TOKENS + row * tokens) * channels + channel;
    float* window = windows + ((layer * batch + row) * channels + channel) * past;
    for (i64 place = 0; count > 0 && place < past; ++place) {
      const i64 from = place + count;
      window[place] = from < past ? window[from] : input[(from - past) * channels];
    }
  }
}
