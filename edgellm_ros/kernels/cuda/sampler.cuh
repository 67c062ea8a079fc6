// SPDX-License-Identifier: Apache-2.0
// Samples tokens from rows of logits in one cooperative launch: gridDim.x blocks for each of gridDim.y rows. `sample`
// samples one token of each row, `sample_path` several, one after the other.
//
// Every filter keeps a prefix of the tokens in falling order. So top-k, top-p and sampling are all prefix-sum
// searches: find the first token at which the sum of counts, or of masses, exceeds a target. A histogram radix
// search finds the exact token without sorting: the first histogram is over the distance from the most likely
// token, the next ones are over the ranks within the bin that contains the token, until this bin contains no
// other token. The blocks of a row add up their histograms in global memory, and each block finds the same token.
//
// Scratch memory is zero when a launch begins and when it ends. Only the histograms are not: they are cleared
// before use.

struct Histogram {
  u64 mass[THREADS];
  u32 count[THREADS];
  u32 id[THREADS];  // of a bin's only token, if its count is 1
};

constexpr int TURNS = 3;  // one is being filled, one may still be read, one is being cleared

struct RowScratch {
  u64 best;                               // highest rank; NOT_FINITE if a logit is not finite
  u64 block_best[2][MAX_BLOCKS_PER_ROW];  // stamped ranks: see RowSampler::exchange
  u64 min_p_mass[TURNS];                  // of the tokens that min-p keeps, for each token in turn
  u32 arrived;                            // arrivals of blocks at all barriers so far
  u32 left;                               // blocks that have finished
  Histogram histograms[TURNS];

  // Returns whether this block is the last one of the row to finish; in its first thread only.
  __device__ bool is_last() {
    __syncthreads();
    if (threadIdx.x > 0) return false;
    __threadfence();
    const bool last = atomicAdd(&left, 1u) == gridDim.x - 1;
    __threadfence();
    return last;
  }

  __device__ void reset() {
    best = 0;
    for (int i = 0; i < MAX_BLOCKS_PER_ROW; ++i) block_best[0][i] = block_best[1][i] = 0;
    for (int i = 0; i < TURNS; ++i) min_p_mass[i] = 0;
    arrived = left = 0;
  }
};

static_assert(MAX_BLOCKS_PER_ROW <= 32, "one warp reads the best ranks of all blocks");
static_assert(sizeof(RowScratch) == ROW_SCRATCH_BYTES, "the host allocates ROW_SCRATCH_BYTES per row");

struct Bin {  // thread i has bin i; *_through: sums over bins 0 .. i
  u64 mass, mass_through;
  u32 count, count_through;
  u32 id;
};

struct Found {  // a bin, and the sums over the bins before it
  int bin;
  u32 count, count_before, id;
  u64 mass, mass_before;
};

struct SampleShared {
  u32 mass_low[THREADS], mass_high[THREADS], count[THREADS], id[THREADS];
  u64 all_masses[THREADS];  // of all tokens with a weight: sums over bins 0 .. i
  u32 all_counts[THREADS], all_ids[THREADS];
  u64 warp_masses[WARPS];
  u32 warp_counts[WARPS];
  u64 best, random_bits;
  u32 barriers;  // that this block has passed; used by its first thread
  Found found;
  u32 least_key, greatest_key;
  float top;              // score of the most likely token
  Scale scale;            // of distances from `top`
  float least_score;      // the lowest score that min-p keeps
  double min_p_distance;  // the lowest score minus `top`, not rounded
};

struct Logit {
  float value;
  bool repeated;  // whether the repetition penalty applies
};

enum Measure { COUNT, MASS };
enum Search { TOP_K, TOP_P, SAMPLE };  // the last token that a filter keeps, and the sampled token

struct Rules {  // of a request
  float temperature;
  i64 top_k;
  float top_p, min_p;
  u64 seed;

  // Also true for a NaN: the search of the others would not end.
  __device__ bool greedy() const { return !(temperature > 0.0f); }
};

// Prepares for the sampling of tokens by the rules; called by one thread of the block.
__device__ inline void prepare(SampleShared& shared, const Rules& rules) {
  shared.scale = make_scale(rules.temperature);
  if (rules.min_p > 0.0f) shared.min_p_distance = (double)rules.temperature * log((double)rules.min_p);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int READS = 2;  // under way at once: with four, variables do not fit into the registers of sm_110
#else
constexpr int READS = 4;
#endif

struct RowSampler {
  SampleShared& shared;
  RowScratch& scratch;
  const float* logits;
  const bool* seen;
  float penalty;
  Ranks ranks;
  int begin, end;  // range of ids of this block
  int count;       // tokens of the row sampled before
  int histogram;   // index of the next histogram

  __device__ Logit logit(int id) const { return {logits[id], penalty != 1.0f && seen[id]}; }

  // Returns the logit with the repetition penalty; NaN if the logit is not finite.
  __device__ float score(Logit logit) const {
    if (!(fabsf(logit.value) <= LARGEST_FLOAT)) return NO_NUMBER;
    if (!logit.repeated) return logit.value;
    const float changed = logit.value < 0.0f ? logit.value * penalty : logit.value / penalty;
    return fminf(fmaxf(changed, -LARGEST_FLOAT), LARGEST_FLOAT);
  }

  // Calls visit(id, score) for this thread's share of this block's tokens.
  template <class Visit>
  __device__ void visit_scores(Visit visit) const {
    visit_tokens<READS>(
        begin, end, [this](int id) { return logit(id); }, [&](int id, Logit logit) { visit(id, score(logit)); });
  }

  // Waits for all blocks of the row; makes their writes visible.
  __device__ void barrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
      const u32 all = ++shared.barriers * gridDim.x;
      __threadfence();
      atomicAdd(&scratch.arrived, 1u);
      while (*(volatile u32*)&scratch.arrived < all) __nanosleep(16);
      __threadfence();
    }
    __syncthreads();
  }

  __device__ void clear_next_histogram() {
    if (blockIdx.x > 0) return;
    Histogram& next = scratch.histograms[histogram];
    next.mass[threadIdx.x] = 0;
    next.count[threadIdx.x] = 0;
  }

  // Returns the highest rank of this block's tokens, in its first warp; NOT_FINITE if a logit is not finite.
  __device__ u64 block_best() {
    u64 highest = 0;
    visit_scores([&](int id, float of_id) {
      const u64 rank = of_id == of_id ? ranks.rank(of_id, id) : NOT_FINITE;
      highest = rank > highest ? rank : highest;
    });
    return maximum_in_first_warp(highest, shared.warp_masses);
  }

  // Returns the highest of the blocks' ranks, in all blocks of the row. Makes writes before it visible if `fence`.
  //
  // A rank has 51 bits at most, so that a stamp, the number of the token, fits into the same 64 bits: one write and
  // one read take less time than an atomic maximum and a barrier. A block writes to the same place again for the
  // token after the next, when all have read it.
  __device__ u64 exchange(u64 best, bool fence) {
    constexpr int stamp_bits = 13, rank_bits = 64 - stamp_bits;
    constexpr u64 not_finite = (1ull << rank_bits) - 1;
    const u64 stamp = count + 1;
    volatile u64* places = scratch.block_best[stamp & 1];
    if (fence) __syncthreads();
    if (threadIdx.x == 0) {
      if (fence) __threadfence();
      places[blockIdx.x] = stamp << rank_bits | (best == NOT_FINITE ? not_finite : best);
    }
    if (threadIdx.x < 32) {
      u64 highest = 0;
      if (threadIdx.x < gridDim.x) {
        while ((highest = places[threadIdx.x]) >> rank_bits != stamp) __nanosleep(16);
        highest &= not_finite;
      }
      highest = warp_maximum(highest);
      if (fence) __threadfence();
      if (threadIdx.x == 0) shared.best = highest == not_finite ? NOT_FINITE : highest;
    }
    __syncthreads();
    return shared.best;
  }

  __device__ void clear_bins() {
    shared.mass_low[threadIdx.x] = shared.mass_high[threadIdx.x] = shared.count[threadIdx.x] = 0;
    __syncthreads();
  }

  // Adds to a 64-bit sum of two words, because shared memory adds 32 bits at a time.
  __device__ void add_to_bin(int bin, u64 mass, int id) {
    const u32 low = (u32)mass, before = atomicAdd(&shared.mass_low[bin], low);
    const u32 high = (u32)(mass >> 32) + (before + low < before);
    if (high) atomicAdd(&shared.mass_high[bin], high);
    atomicAdd(&shared.count[bin], 1u);
    shared.id[bin] = (u32)id;
  }

  // Returns this thread's bin, summed over the row, after all threads have added their tokens.
  __device__ Bin sum_bins() {
    Histogram& row = scratch.histograms[histogram];
    histogram = (histogram + 1) % 3;
    const int i = threadIdx.x;
    __syncthreads();
    if (shared.count[i]) {
      atomicAdd(&row.mass[i], ((u64)shared.mass_high[i] << 32) + shared.mass_low[i]);
      atomicAdd(&row.count[i], shared.count[i]);
      row.id[i] = shared.id[i];
    }
    clear_next_histogram();
    barrier();
    Bin bin;
    bin.mass = __ldcg(&row.mass[i]);
    bin.count = __ldcg(&row.count[i]);
    bin.id = __ldcg(&row.id[i]);
    bin.mass_through = block_sum_through(bin.mass, shared.warp_masses);
    bin.count_through = block_sum_through(bin.count, shared.warp_counts);
    return bin;
  }

  // Makes bins over the distance from the most likely token, of all tokens with a weight.
  __device__ void make_all_bins(bool min_p) {
    clear_bins();
    const float top = shared.top;
    const Scale scale = shared.scale;
    u64 kept = 0;
    visit_scores([&](int id, float of_id) {
      const float bin = distance_bin(top, of_id, scale.high);
      if (bin >= (float)THREADS) return;
      const u64 mass = weight(top, of_id, scale);
      add_to_bin((int)bin, mass, id);
      if (min_p && of_id >= shared.least_score) kept += mass;
    });
    if (min_p) {
      kept = block_sum(kept, shared.warp_masses);
      if (threadIdx.x == 0) atomicAdd(&scratch.min_p_mass[count % TURNS], kept);
    }
    const Bin bin = sum_bins();
    shared.all_masses[threadIdx.x] = bin.mass_through;
    shared.all_counts[threadIdx.x] = bin.count_through;
    shared.all_ids[threadIdx.x] = bin.id;
    __syncthreads();
  }

  // Returns the bin of all tokens that this thread has: in shared memory, because registers are few.
  __device__ Bin all_bin() const {
    const int i = threadIdx.x;
    const u64 mass = shared.all_masses[i], mass_before = i ? shared.all_masses[i - 1] : 0;
    const u32 count = shared.all_counts[i], count_before = i ? shared.all_counts[i - 1] : 0;
    return {mass - mass_before, mass, count - count_before, count, shared.all_ids[i]};
  }

  // Returns bins of 2^shift ranks each, from `high` down.
  __device__ Bin fine_bins(u64 low, u64 high, int shift) {
    clear_bins();
    const float top = shared.top;
    const Scale scale = shared.scale;
    visit_scores([&](int id, float of_id) {
      const u64 rank = ranks.rank(of_id, id);
      if (low <= rank && rank <= high) add_to_bin((int)((high - rank) >> shift), weight(top, of_id, scale), id);
    });
    return sum_bins();
  }

  // Returns the first bin where the sum exceeds `target`; such a bin must exist.
  __device__ Found find(const Bin& bin, u64 target, Measure measure) {
    const u64 own = measure == MASS ? bin.mass : bin.count;
    const u64 through = measure == MASS ? bin.mass_through : bin.count_through;
    if (through > target && through - own <= target)
      shared.found = {(int)threadIdx.x, bin.count, bin.count_through - bin.count,
                      bin.id,           bin.mass,  bin.mass_through - bin.mass};
    __syncthreads();
    const Found found = shared.found;
    __syncthreads();
    return found;
  }

  // Returns the first token, in falling order, where the sum exceeds `target`, as a bin with this token only.
  __device__ Found find_token(u64 target, Measure measure) {
    Found found = find(all_bin(), target, measure);
    if (found.count == 1) return found;
    const u32 top_key = order_key(shared.top);
    if (threadIdx.x == 0) shared.least_key = least_key_of_bins(top_key, found.bin, shared.scale.high);
    if (threadIdx.x == 32)
      shared.greatest_key = found.bin == 0 ? top_key : least_key_of_bins(top_key, found.bin - 1, shared.scale.high) - 1;
    __syncthreads();
    u64 low = ranks.last_of_key(shared.least_key), high = ranks.first_of_key(shared.greatest_key);
    while (found.count > 1) {
      const int shift = bin_shift(low, high);
      const Bin fine = fine_bins(low, high, shift);
      const Found finer = find(fine, target - (measure == MASS ? found.mass_before : found.count_before), measure);
      found = {finer.bin, finer.count, found.count_before + finer.count_before,
               finer.id,  finer.mass,  found.mass_before + finer.mass_before};
      high -= (u64)finer.bin << shift;
      const u64 last = high - ((1ull << shift) - 1);
      low = last > low && last <= high ? last : low;
    }
    return found;
  }

  // Returns the sampled token. Reads the rules where they are needed: registers are few.
  __device__ int choose(const Rules& rules) {
    make_all_bins(rules.min_p > 0.0f);
    u64 kept = shared.all_masses[THREADS - 1];
    Found found;
#pragma unroll 1  // one copy of the search: fewer registers
    for (int search = TOP_K; search <= SAMPLE; ++search) {
      u64 target;
      if (search == TOP_K) {
        if (rules.top_k <= 0 || rules.top_k >= shared.all_counts[THREADS - 1]) continue;
        target = rules.top_k - 1;
      } else if (search == TOP_P) {
        if (!(rules.top_p < 1.0f)) continue;
        const u64 top_p = (u64)fmaxf(rules.top_p * 18446744073709551616.0f, 1.0f);  // in units of 2^-64
        target = __umul64hi(kept, top_p) + (kept * top_p != 0) - 1;
      } else {
        const u64 kept_by_min_p = rules.min_p > 0.0f ? __ldcg(&scratch.min_p_mass[count % TURNS]) : kept;
        target = __umul64hi(shared.random_bits << 11, kept_by_min_p < kept ? kept_by_min_p : kept);
      }
      found = find_token(target, search == TOP_K ? COUNT : MASS);
      kept = found.mass_before + found.mass;
    }
    return (int)found.id;
  }

  // Returns a token sampled by the rules after `block_best`, in all blocks; -1 if a logit is not finite.
  __device__ int sample(u64 own_best, const Rules& rules, u32 position) {
    const bool greedy = rules.greedy();
    if (!greedy) {
      clear_next_histogram();
      if (threadIdx.x == 32) shared.random_bits = token_bits(rules.seed, position);  // the first warp has enough to do
    }
    const u64 best = exchange(own_best, !greedy);
    if (best == NOT_FINITE) return -1;
    if (greedy) return (int)ranks.id(best);
    if (threadIdx.x == 0) {
      shared.top = ranks.score(best);
      // rounded up to a float, so that no score is in between
      if (rules.min_p > 0.0f) shared.least_score = __double2float_ru(shared.top + shared.min_p_distance);
    }
    return choose(rules);
  }
};

struct Share {  // range of ids of a block
  int begin, end;

  __device__ explicit Share(i64 vocab) {
    const int size = ((int)vocab + gridDim.x - 1) / gridDim.x;
    begin = blockIdx.x * size;
    end = begin + size < (int)vocab ? begin + size : (int)vocab;
  }
};
