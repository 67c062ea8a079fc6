// SPDX-License-Identifier: Apache-2.0
// Attention of one new token per row to its cache, the visible rows of which are split over blocks.
//
// A block has one KV head, up to GROUP of the query heads that share it, and one split. LANES lanes read a cache row,
// 8 values each. Every row of threads keeps its own maximum and sums; they are merged in a fixed order at the end.

constexpr int HEADS_PER_KV = HEADS / KV_HEADS;
constexpr int GROUPS = (HEADS_PER_KV + 3) / 4, GROUP = (HEADS_PER_KV + GROUPS - 1) / GROUPS;
constexpr int LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;
constexpr int ATTENTION_WARPS = ATTENTION_THREADS / 32, ROW_LANES = ATTENTION_THREADS / LANES;
constexpr int AHEAD = 4;  // rows of keys and of values that a thread has on their way
constexpr float LOWEST = -1e30f;

// The cache rows that a token attends to, and their split.
struct Splits {
  int begin, end, share, used;

  __device__ Splits(int length, int window) {
    begin = window > 0 && length > window ? length - window : 0;
    end = length;
    const int even = (end - begin + SPLITS - 1) / SPLITS;
    share = even > SPLIT_ROWS ? even : SPLIT_ROWS;
    used = (end - begin + share - 1) / share;
  }
};

// RMSNorm and rotation of the heads of q and the new k; v as it is. One warp per head.
struct NewRow {
  float heads[GROUP + 2][HEAD_DIM];    // q, k, v as the product left them, normalised
  float rotated[GROUP + 1][HEAD_DIM];  // q times the scale of scores, k
};

__device__ inline void attend(const float* parts, const u16* bias, const u16* q_norm, const u16* k_norm,
                              const float* cos_table, const float* sin_table, const i64* position_ids,
                              const i64* kv_length, u16* key_cache, u16* value_cache, float* sums, float* scales,
                              int window) {
  constexpr int ELEMENTS = HEAD_DIM / 32, SIZE = KV_HEADS * HEAD_DIM;
  __shared__ NewRow fresh;
  __shared__ uint4 new_rows[2][HEAD_DIM / 8];  // k and v in the model's type
  __shared__ float merged[ATTENTION_WARPS][GROUP][HEAD_DIM], warp_scales[ATTENTION_WARPS][GROUP][2];
  const int split = blockIdx.x % SPLITS, group = blockIdx.x / SPLITS % GROUPS, kv_head = blockIdx.x / (SPLITS * GROUPS);
  const int row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_lane = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
  const int heads = HEADS_PER_KV - group * GROUP < GROUP ? HEADS_PER_KV - group * GROUP : GROUP;
  const int first_head = kv_head * HEADS_PER_KV + group * GROUP;
  const Splits splits((int)kv_length[row], window);
  const int begin = splits.begin + split * splits.share, last = splits.end - 1;
  const int end = begin + splits.share < splits.end ? begin + splits.share : splits.end;
  const bool owner = begin <= last && last < end;  // of the new row
  const i64 cache = ((i64)row * KV_HEADS + kv_head) * CAPACITY * HEAD_DIM;
  const bool active = column < HEAD_DIM;

  uint4 keys[AHEAD], values[AHEAD];
  auto fetch = [&](int base) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int cache_row = base + i * ROW_LANES + row_lane;
      const bool valid = active && cache_row < end && cache_row != last;
      const i64 place = cache + (i64)cache_row * HEAD_DIM + column;
      keys[i] = valid ? load_once(key_cache + place) : uint4{0, 0, 0, 0};
      values[i] = valid ? load_once(value_cache + place) : uint4{0, 0, 0, 0};
    }
  };
  fetch(begin);
  wait_for_kernel_before();
  if (split >= splits.used) return;

  // q of each head of the group, then k and v
  const int tasks = owner ? heads + 2 : heads;
  const float* cos = cos_table + position_ids[row] * (ROTARY_DIM / 2);
  const float* sin = sin_table + position_ids[row] * (ROTARY_DIM / 2);
  for (int task = warp; task < tasks; task += ATTENTION_WARPS) {
    const int place = task < heads ? task : GROUP + task - heads;
    const int source = task < heads ? (first_head + task) * HEAD_DIM
                                    : HEADS * HEAD_DIM + (task - heads) * SIZE + kv_head * HEAD_DIM;
    const u16* norm = task < heads ? q_norm : k_norm;
    float values[ELEMENTS], sum = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const int at = source + lane + 32 * i;
      values[i] = sum_of_parts<QKV, QKV_PARTS>(parts, row, at) + (QKV_BIAS ? to_float(bias[at]) : 0.0f);
      sum += values[i] * values[i];
    }
    if (QK_NORM && task <= heads) {
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      const float factor = rsqrt_fast(sum * (1.0f / HEAD_DIM) + EPSILON);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) values[i] *= factor * to_float(norm[lane + 32 * i]);
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) fresh.heads[place][lane + 32 * i] = values[i];
  }
  __syncthreads();
  for (int task = warp; task < (owner ? heads + 1 : heads); task += ATTENTION_WARPS) {
    const int place = task < heads ? task : GROUP;
    // of the scores, in powers of two
    const float scale = task < heads ? 1.4426950408889634f * rsqrt_fast(HEAD_DIM) : 1.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const int at = lane + 32 * i;
      float value = fresh.heads[place][at];
      if (at < ROTARY_DIM) {
        const bool second = INTERLEAVED ? at % 2 : at >= ROTARY_DIM / 2;
        const int pair = INTERLEAVED ? at / 2 : second ? at - ROTARY_DIM / 2 : at;
        const int other = INTERLEAVED ? at ^ 1 : second ? pair : at + ROTARY_DIM / 2;
        value = value * cos[pair] + (second ? 1.0f : -1.0f) * fresh.heads[place][other] * sin[pair];
      }
      fresh.rotated[place][at] = value * scale;
    }
  }
  __syncthreads();
  if (owner) {
    u16* rows = reinterpret_cast<u16*>(new_rows);
    for (int at = threadIdx.x; at < 2 * HEAD_DIM; at += ATTENTION_THREADS) {
      const u16 bits = from_float(at < HEAD_DIM ? fresh.rotated[GROUP][at] : fresh.heads[GROUP + 1][at - HEAD_DIM]);
      rows[at] = bits;
      if (group == 0) (at < HEAD_DIM ? key_cache : value_cache)[cache + (i64)last * HEAD_DIM + at % HEAD_DIM] = bits;
    }
    __syncthreads();
  }

  float q[GROUP][8], result[GROUP][8] = {}, highest[GROUP], total[GROUP];
#pragma unroll
  for (int head = 0; head < GROUP; ++head) {
#pragma unroll
    for (int j = 0; j < 8; ++j) q[head][j] = active && head < heads ? fresh.rotated[head][column + j] : 0.0f;
    highest[head] = LOWEST, total[head] = 0;
  }
  for (int base = begin; base < end; base += AHEAD * ROW_LANES) {
    if (base != begin) fetch(base);
    float scores[AHEAD][GROUP];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int cache_row = base + i * ROW_LANES + row_lane;
      if (owner && cache_row == last && active) keys[i] = new_rows[0][column / 8], values[i] = new_rows[1][column / 8];
      float key[8];
      unpack(key, keys[i]);
#pragma unroll
      for (int head = 0; head < GROUP; ++head) scores[i][head] = dot(q[head], key);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int head = 0; head < GROUP; ++head)
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
          scores[i][head] += __shfl_xor_sync(~0u, scores[i][head], other);
#pragma unroll
    for (int head = 0; head < GROUP; ++head) {
      float high = highest[head];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (base + i * ROW_LANES + row_lane < end) high = fmaxf(high, scores[i][head]);
      const float factor = exp2_fast(highest[head] - high);
      highest[head] = high, total[head] *= factor;
#pragma unroll
      for (int j = 0; j < 8; ++j) result[head][j] *= factor;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      float value[8];
      unpack(value, values[i]);
      const bool inside = base + i * ROW_LANES + row_lane < end;
#pragma unroll
      for (int head = 0; head < GROUP; ++head) {
        const float weight = inside ? exp2_fast(scores[i][head] - highest[head]) : 0.0f;
        total[head] += weight;
#pragma unroll
        for (int j = 0; j < 8; ++j) result[head][j] += weight * value[j];
      }
    }
  }

#pragma unroll
  for (int head = 0; head < GROUP; ++head) {
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) {
      const float high = fmaxf(highest[head], __shfl_xor_sync(~0u, highest[head], other));
      const float factor = exp2_fast(highest[head] - high);
      total[head] *= factor;
      total[head] += __shfl_xor_sync(~0u, total[head], other);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        result[head][j] *= factor;
        result[head][j] += __shfl_xor_sync(~0u, result[head][j], other);
      }
      highest[head] = high;
    }
    if (lane < LANES && active)
#pragma unroll
      for (int j = 0; j < 8; ++j) merged[warp][head][column + j] = result[head][j];
    if (lane == 0) warp_scales[warp][head][0] = highest[head], warp_scales[warp][head][1] = total[head];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < heads * HEAD_DIM; at += ATTENTION_THREADS) {
    const int head = at / HEAD_DIM, dim = at % HEAD_DIM;
    float high = LOWEST, sum = 0, value = 0;
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; ++w) high = fmaxf(high, warp_scales[w][head][0]);
#pragma unroll
    for (int w = 0; w < ATTENTION_WARPS; ++w) {
      const float factor = exp2_fast(warp_scales[w][head][0] - high);
      sum += factor * warp_scales[w][head][1], value += factor * merged[w][head][dim];
    }
    const int place = (row * SPLITS + split) * HEADS + first_head + head;
    sums[place * HEAD_DIM + dim] = value;
    if (dim == 0) scales[2 * place] = high, scales[2 * place + 1] = sum;
  }
}

// What the splits of some heads count in the result: in shared memory [ROWS,LOCAL,SPLITS], from head `first` on.
template <int LOCAL>
__device__ inline void split_weights(float* weights, const float* scales, const i64* kv_length, int window, int first,
                                     int rows) {
  const int lane = threadIdx.x % 32;
  for (int place = threadIdx.x / 32; place < rows * LOCAL; place += THREADS / 32) {
    const int row = place / LOCAL, head = (first + place % LOCAL) % HEADS;
    const bool used = lane < Splits((int)kv_length[row], window).used;
    float2 scale = {LOWEST, 0};
    if (used) scale = load(reinterpret_cast<const float2*>(scales) + (row * SPLITS + lane) * HEADS + head);
    float high = scale.x;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, other));
    const float weight = used ? exp2_fast(scale.x - high) : 0.0f;
    float sum = weight * scale.y;
#pragma unroll
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane < SPLITS) weights[place * SPLITS + lane] = weight / sum;
  }
}
