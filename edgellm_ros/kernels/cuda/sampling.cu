// SPDX-License-Identifier: Apache-2.0
// Samples a token from each row of logits, in one cooperative launch.

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const float* logits, i64 vocab, const float* temperature, const i64* top_k, const float* top_p,
           const float* min_p, const float* repetition_penalty, const u64* seed, const i64* positions, const bool* seen,
           i64* tokens, i64 tokens_per_sequence, RowScratch* scratch) {
  pdl_wait();
  __shared__ SampleShared shared;
  __shared__ Rules rules;  // not in registers, of which 1024 threads have few
  const int row = blockIdx.y, sequence = row / (int)tokens_per_sequence;
  if (threadIdx.x == 0) {
    rules = {temperature[sequence], top_k[sequence], top_p[sequence], min_p[sequence], seed[sequence]};
    shared.barriers = 0;
  }
  const Share share(vocab);
  RowSampler sampler{shared,
                     scratch[row],
                     logits + (i64)row * vocab,
                     seen + (i64)sequence * vocab,
                     repetition_penalty[sequence],
                     Ranks(vocab),
                     share.begin,
                     share.end};

  const u64 own_best = sampler.block_best();
  i64 token = -1;
  if (rules.greedy()) {
    if (threadIdx.x == 0) atomicMax(&sampler.scratch.best, own_best);
  } else {
    if (threadIdx.x == 32) prepare(shared, rules);
    const u32 position = (u32)positions[sequence] + (u32)(row - sequence * (int)tokens_per_sequence);
    token = sampler.sample(own_best, rules, position);
  }
  if (sampler.scratch.is_last()) {  // the best token needs no barrier: the last block to finish has it
    const u64 best = __ldcg(&sampler.scratch.best);
    if (rules.greedy() && best != NOT_FINITE) token = sampler.ranks.id(best);
    tokens[row] = token;
    sampler.scratch.reset();
  }
}
