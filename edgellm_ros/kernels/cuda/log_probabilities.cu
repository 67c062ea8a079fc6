// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of each row's most likely tokens and of the sampled token. One block per row is enough,
// because few requests want log-probabilities.

struct LogprobShared {
  u32 count[THREADS];
  u64 warp_values[WARPS];
  u32 warp_counts[WARPS];
  u64 ranks[MOST_LOGPROBS];
  u32 kept;
  int bin;
  u32 before, through;  // tokens before `bin`, and including it
  u32 least_key, greatest_key;
};

// Finds the bin where the count reaches `wanted`, after all threads have counted their tokens.
__device__ inline void find_bin(LogprobShared& shared, u32 wanted) {
  __syncthreads();
  const u32 count = shared.count[threadIdx.x];
  const u32 through = block_sum_through(count, shared.warp_counts);
  if (through >= wanted && through - count < wanted) {
    shared.bin = threadIdx.x;
    shared.before = through - count;
    shared.through = through;
  }
  shared.count[threadIdx.x] = 0;
  __syncthreads();
}

// Returns a rank that only the `wanted` most likely tokens reach; 1 <= wanted <= vocab.
template <class Read>
__device__ u64 least_rank(LogprobShared& shared, Read read, int vocab, Ranks ranks, u64 best, Scale scale, u32 wanted) {
  const u32 top_key = ranks.key(best);
  const float top = ranks.score(best);
  constexpr int beyond = THREADS - 1;  // the last bin, also for all larger distances
  shared.count[threadIdx.x] = 0;
  __syncthreads();
  visit_tokens(0, vocab, read, [&](int id, float logit) {
    const float bin = distance_bin(top, logit, scale.high);
    atomicAdd(&shared.count[bin < (float)beyond ? (int)bin : beyond], 1u);
  });
  find_bin(shared, wanted);
  const int bin = shared.bin;
  if (threadIdx.x == 0) shared.least_key = bin == beyond ? KEY_OF_LOWEST : least_key_of_bins(top_key, bin, scale.high);
  if (threadIdx.x == 32) shared.greatest_key = bin == 0 ? top_key : least_key_of_bins(top_key, bin - 1, scale.high) - 1;
  __syncthreads();
  u64 low = ranks.last_of_key(shared.least_key), high = ranks.first_of_key(shared.greatest_key);
  while (shared.through != wanted) {  // the bin holds too many tokens
    wanted -= shared.before;
    const int shift = bin_shift(low, high);
    visit_tokens(0, vocab, read, [&](int id, float logit) {
      const u64 rank = ranks.rank(logit, id);
      if (low <= rank && rank <= high) atomicAdd(&shared.count[(high - rank) >> shift], 1u);
    });
    find_bin(shared, wanted);
    high -= (u64)shared.bin << shift;
    const u64 last = high - ((1ull << shift) - 1);
    low = last > low && last <= high ? last : low;
  }
  return low;
}

// top_ids, top_values [rows, width]: the width - 1 most likely tokens, then the token of `tokens` [rows].
extern "C" __global__ void __launch_bounds__(THREADS)
    log_probabilities(const float* all_logits, i64 vocab, const i64* tokens, i64* top_ids, float* top_values,
                      i64 width) {
  pdl_wait();
  __shared__ LogprobShared shared;
  const float* logits = all_logits + blockIdx.x * vocab;
  i64* ids = top_ids + blockIdx.x * width;
  float* values = top_values + blockIdx.x * width;
  const u32 wanted = (u32)(width - 1);
  const i64 token = tokens[blockIdx.x];
  const Ranks ranks(vocab);
  const auto read = [=](int id) { return logits[id]; };

  u64 best = 0;
  visit_tokens(0, vocab, read, [&](int id, float logit) {
    const u64 rank = fabsf(logit) <= LARGEST_FLOAT ? ranks.rank(logit, id) : NOT_FINITE;
    best = rank > best ? rank : best;
  });
  best = block_maximum(best, shared.warp_values);
  if (best == NOT_FINITE) {
    for (i64 i = threadIdx.x; i < width; i += THREADS) {
      ids[i] = -1;
      values[i] = NO_NUMBER;
    }
    return;
  }

  const Scale scale = make_scale(1.0f);
  const float top = ranks.score(best);
  u64 mass = 0;
  visit_tokens(0, vocab, read, [&](int id, float logit) {
    if (distance_bin(top, logit, scale.high) < (float)THREADS) mass += weight(top, logit, scale);
  });
  mass = block_sum(mass, shared.warp_values);
  const double log_mass = log((double)mass / (double)(1ull << WEIGHT_BITS));

  if (threadIdx.x == 0) {
    const i64 id = clamp(token, 0, vocab - 1);
    ids[wanted] = token;
    values[wanted] = (float)((double)logits[id] - (double)top - log_mass);
    shared.kept = 0;
  }
  if (wanted == 0) return;
  const u64 least = least_rank(shared, read, vocab, ranks, best, scale, wanted);
  visit_tokens(0, vocab, read, [&](int id, float logit) {
    const u64 rank = ranks.rank(logit, id);
    if (rank >= least) shared.ranks[atomicAdd(&shared.kept, 1u)] = rank;
  });
  __syncthreads();
  if (threadIdx.x < wanted) {
    const u64 rank = shared.ranks[threadIdx.x];
    u32 place = 0;
    for (u32 other = 0; other < wanted; ++other) place += shared.ranks[other] > rank;
    ids[place] = ranks.id(rank);
    values[place] = (float)((double)ranks.score(rank) - (double)top - log_mass);
  }
}
