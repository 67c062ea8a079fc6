// SPDX-License-Identifier: Apache-2.0
// Twin of kernels/random.py: Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011).

constexpr u32 TOKEN_STREAM = 1;

// Returns 53 random bits for the token at a position of the answer: token_uniform times 2^53.
__device__ inline u64 token_bits(u64 seed, u32 position) {
  u32 c0 = position, c1 = 0, c2 = TOKEN_STREAM, c3 = 0;
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = (u64)c0 * 0xD2511F53u, product1 = (u64)c2 * 0xCD9E8D57u;
    c0 = (u32)(product1 >> 32) ^ c1 ^ k0;
    c1 = (u32)product1;
    c2 = (u32)(product0 >> 32) ^ c3 ^ k1;
    c3 = (u32)product0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (u64)(c0 >> 5) << 26 | c1 >> 6;
}
