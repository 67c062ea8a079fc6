// SPDX-License-Identifier: Apache-2.0
// Kernels before and after the engine in one step: rotary rows, masks, lengths, stop tokens, Euler steps.

// cos, sin [batch, steps, frequencies] from tables [positions, frequencies]; filled [batch] may be null.
extern "C" __global__ void rope_rows(float* cos, float* sin, const float* cos_table, const float* sin_table,
                                     const float* radians, const i64* lengths, const float* deltas, i64 batch,
                                     i64 steps, i64 positions, i64 frequencies, i64* filled) {
  pdl_wait();
  for (i64 i = first_index(); filled && i < batch; i += index_stride()) filled[i] = lengths[i] + steps;
  for (i64 i = first_index(); i < batch * steps * frequencies; i += index_stride()) {
    const i64 token = i / frequencies, sequence = token / steps;
    const float position = (float)(lengths[sequence] + token % steps) + deltas[sequence];
    write_angle(cos + i, sin + i, cos_table, sin_table, radians, position, i % frequencies, positions, frequencies);
  }
}

// positions [batch, 3, steps]: time, height, width, which have this many frequencies each. Interleaved, frequencies
// with remainder 1 modulo 3 use the height, with remainder 2 the width, until these are used up; all others the time.
// Otherwise the axes have one block each.
extern "C" __global__ void mrope_rows(float* cos, float* sin, const float* cos_table, const float* sin_table,
                                      const float* radians, const float* positions, i64 batch, i64 steps,
                                      i64 table_positions, i64 frequencies, i64 time, i64 height, i64 width,
                                      i64 interleaved) {
  pdl_wait();
  for (i64 i = first_index(); i < batch * steps * frequencies; i += index_stride()) {
    const i64 token = i / frequencies, frequency = i % frequencies;
    const i64 turn = frequency % 3 == 1 && frequency < 3 * height  ? 1
                     : frequency % 3 == 2 && frequency < 3 * width ? 2
                                                                   : 0;
    const i64 block = frequency < time ? 0 : frequency < time + height ? 1 : 2;
    const i64 axis = interleaved ? turn : block;
    const float position = positions[(token / steps * 3 + axis) * steps + token % steps];
    write_angle(cos + i, sin + i, cos_table, sin_table, radians, position, frequency, table_positions, frequencies);
  }
}

// out [batch, 1, steps, capacity] bool, written in units of `width` bytes.
template <class Unit>
__device__ void causal_mask(Unit* out, const i64* lengths, i64 batch, i64 steps, i64 units) {
  constexpr int width = sizeof(Unit);
  for (i64 i = first_index(); i < batch * steps * units; i += index_stride()) {
    const i64 token = i / units, column = i % units * width;
    const i64 last_seen = lengths[token / steps] + token % steps;
    Unit unit;
    for (int byte = 0; byte < width; ++byte) ((unsigned char*)&unit)[byte] = column + byte <= last_seen;
    out[i] = unit;
  }
}

#define MASK_KERNEL(width, Unit)                                                                                   \
  extern "C" __global__ void causal_mask_##width(Unit* out, const i64* lengths, i64 batch, i64 steps, i64 units) { \
    pdl_wait();                                                                                                    \
    causal_mask(out, lengths, batch, steps, units);                                                                \
  }

FOR_EACH_WIDTH(MASK_KERNEL)

extern "C" __global__ void visible_rows(i64* out, const i64* lengths, i64 batch, i64 steps) {
  pdl_wait();
  for (i64 i = first_index(); i < batch; i += index_stride()) out[i] = lengths[i] + steps;
}

// Begins a sequence in a row: `Kernels.open_row`.
extern "C" __global__ void open_row(float* temperature, i64* top_k, float* top_p, float* min_p,
                                    float* repetition_penalty, u64* seed, i64* positions, i64* path_limit,
                                    i64* tokens_left, i64* trigger_token, i64 row, double new_temperature,
                                    i64 new_top_k, double new_top_p, double new_min_p, double new_repetition_penalty,
                                    i64 new_seed, i64 new_path_limit, i64 new_tokens_left, i64 new_trigger_token) {
  pdl_wait();
  if (first_index() > 0) return;
  temperature[row] = (float)new_temperature, top_k[row] = new_top_k;
  top_p[row] = (float)new_top_p, min_p[row] = (float)new_min_p;
  repetition_penalty[row] = (float)new_repetition_penalty, seed[row] = (u64)new_seed;
  positions[row] = 0, path_limit[row] = new_path_limit;
  tokens_left[row] = new_tokens_left, trigger_token[row] = new_trigger_token;
}

// Copies row `source` of the state of sequences, and seen [batch, vocab], over row `target`: `Kernels.move_row`.
extern "C" __global__ void move_row(float* temperature, i64* top_k, float* top_p, float* min_p,
                                    float* repetition_penalty, u64* seed, i64* positions, i64* path_limit, bool* seen,
                                    i64* tokens_left, i64* trigger_token, i64* last_tokens, i64 source, i64 target,
                                    i64 vocab) {
  pdl_wait();
  for (i64 i = first_index(); i < vocab; i += index_stride()) seen[target * vocab + i] = seen[source * vocab + i];
  if (first_index() > 0) return;
  temperature[target] = temperature[source], top_k[target] = top_k[source];
  top_p[target] = top_p[source], min_p[target] = min_p[source];
  repetition_penalty[target] = repetition_penalty[source], seed[target] = seed[source];
  positions[target] = positions[source], path_limit[target] = path_limit[source];
  tokens_left[target] = tokens_left[source], trigger_token[target] = trigger_token[source];
  last_tokens[target] = last_tokens[source];
}

// Counts how many of the first offered[i] of tokens [batch, width] each sequence accepts: `Kernels.count_tokens`.
extern "C" __global__ void count_tokens(const i64* tokens, const i64* offered, i64* tokens_left,
                                        const i64* trigger_token, const i64* stop_ids, i64 stop_count, i64* counts,
                                        i64 batch, i64 width) {
  pdl_wait();
  for (i64 i = first_index(); i < batch; i += index_stride()) {
    const i64 left = tokens_left[i], most = clamp(offered[i] < left ? offered[i] : left, 0, width);
    i64 count = 0, left_after = left - most;
    while (count < most) {
      const i64 token = tokens[i * width + count++];
      bool stops = false;
      for (i64 stop = 0; stop < stop_count; ++stop) stops |= stop_ids[stop] == token;
      if (stops && token >= 0) {
        left_after = token == trigger_token[i];
        break;
      }
    }
    counts[i] = count;
    tokens_left[i] = left_after;
  }
}

// Commits the first counts[i] of sampled and tokens [batch, width] to the answer of sequence i.
extern "C" __global__ void commit_tokens(const i64* sampled, const i64* tokens, const i64* counts, i64* positions,
                                         bool* seen, i64* last_tokens, i64 batch, i64 width, i64 vocab) {
  pdl_wait();
  for (i64 i = first_index(); i < batch; i += index_stride()) {
    const i64 count = counts[i];
    for (i64 place = 0; place < count; ++place) {
      const i64 token = sampled[i * width + place];
      if (token >= 0) seen[i * vocab + token] = true;
    }
    positions[i] += count;
    if (count > 0) last_tokens[i] = tokens[i * width + count - 1];
  }
}

// Excludes the tokens whose bit in masks [rows, words] is 0 from logits [rows, vocab]: `Kernels.mask_logits`.
extern "C" __global__ void mask_logits(float* logits, const u32* masks, i64 size, i64 vocab, i64 words,
                                       double excluded) {
  pdl_wait();
  for (i64 i = first_index(); i < size; i += index_stride()) {
    const i64 row = i / vocab, token = i - row * vocab;
    const bool allowed = masks[row * words + token / 32] >> (token % 32) & 1;
    if (!allowed && fabsf(logits[i]) <= LARGEST_FLOAT) logits[i] = (float)excluded;
  }
}

extern "C" __global__ void commit_rows(i64* lengths, const i64* counts, i64 batch) {
  pdl_wait();
  for (i64 i = first_index(); i < batch; i += index_stride()) lengths[i] += counts[i];
}

// Begins the rows of sequences: `Kernels.begin_rows`.
extern "C" __global__ void begin_rows(i64* lengths, float* deltas, const i64* starts, const float* offsets, i64 batch) {
  pdl_wait();
  for (i64 i = first_index(); i < batch; i += index_stride()) lengths[i] = starts[i], deltas[i] = offsets[i];
}

extern "C" __global__ void map_tokens(i64* out, const i64* tokens, const i64* vocab_map, i64 batch, i64 map_size) {
  pdl_wait();
  for (i64 i = first_index(); i < batch; i += index_stride())
    out[i] = tokens[i] < 0 ? -1 : vocab_map[clamp(tokens[i], 0, map_size - 1)];
}

// Also writes the time of the next step, `times` values.
extern "C" __global__ void euler_step(float* x, const float* velocity, i64 size, double dt, float* time, i64 times,
                                      double next_time) {
  pdl_wait();
  for (i64 i = first_index(); i < times; i += index_stride()) time[i] = (float)next_time;
  for (i64 i = first_index(); i < size; i += index_stride()) x[i] += (float)dt * velocity[i];
}

// An Euler step of x [n, rows, actions] that continues previous [rows, actions]: `Kernels.conditioned_step`. factors
// [3, rows]: strength, pull, next time.
extern "C" __global__ void conditioned_step(float* x, const float* velocity, const float* previous,
                                            const float* factors, i64 size, i64 rows, i64 actions, double dt,
                                            float* time, i64 times) {
  pdl_wait();
  for (i64 i = first_index(); i < times; i += index_stride()) time[i] = factors[2 * rows + i];
  for (i64 i = first_index(); i < size; i += index_stride()) {
    const i64 place = i % (rows * actions), row = place / actions;
    const float moved = factors[row] * velocity[i] + factors[rows + row] * (previous[place] - x[i]);
    x[i] += (float)dt * moved;
  }
}

// A step of a noise schedule: `ActionKernels.denoising_step`. noise may be null.
extern "C" __global__ void denoising_step(float* x, const float* output, const float* noise, i64 size, double of_x,
                                          double of_output, double divisor, double limit, double clean_share,
                                          double x_share, double output_share, double noise_share, float* time,
                                          i64 times, double next_time) {
  pdl_wait();
  for (i64 i = first_index(); i < times; i += index_stride()) time[i] = (float)next_time;
  for (i64 i = first_index(); i < size; i += index_stride()) {
    const float clean = ((float)of_x * x[i] + (float)of_output * output[i]) / (float)divisor, most = (float)limit;
    const float clipped = clean > most ? most : clean < -most ? -most : clean;  // a NaN stays
    const float moved = (float)clean_share * clipped + (float)x_share * x[i] + (float)output_share * output[i];
    x[i] = noise == nullptr ? moved : moved + (float)noise_share * noise[i];
  }
}
