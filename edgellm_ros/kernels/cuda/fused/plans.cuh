// SPDX-License-Identifier: Apache-2.0
// The products of a step. The host passes sizes, tiles and blocks as macros, and what it made of them; NAME_X: whether a
// kernel of its own makes a product's x.

template <int K, int N, int TILE, int BLOCKS, bool ALL_OF_X, int BITS, int GROUP, bool ZERO_POINTS, bool FLOAT8, bool ORDERED,
          bool DIRECT>
struct Choice {
  using Type = QuantizedPlan<K, N, TILE, BLOCKS, ALL_OF_X, BITS, GROUP, ZERO_POINTS, FLOAT8, ORDERED>;
};
template <int K, int N, int TILE, int BLOCKS, bool ALL_OF_X, bool DIRECT>
struct Choice<K, N, TILE, BLOCKS, ALL_OF_X, 16, 0, false, false, false, DIRECT> {
  using Type = Plan<K, N, TILE, BLOCKS, ALL_OF_X, false, DIRECT>;
};
#define PLAN(NAME, K, N, ALL_OF_X)                                                                        \
  using NAME = Choice<K, N, NAME##_TILE, NAME##_BLOCKS, ALL_OF_X, NAME##_BITS, NAME##_GROUP, NAME##_ZERO_POINTS, \
                      NAME##_FLOAT8, NAME##_ORDERED, NAME##_DIRECT>::Type
PLAN(QKV, (1 + JOINED) * HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, !QKV_X);
PLAN(O, HEADS * HEAD_DIM, HIDDEN, false);
PLAN(GATE_UP, HIDDEN, 2 * INNER, !GATE_UP_X);
PLAN(DOWN, INNER, HIDDEN, false);

#define CHECK_PLAN(NAME)                                                                                           \
  static_assert(NAME::SHARED + LoraSums<NAME>::BYTES == NAME##_SHARED && NAME::most_parts() == NAME##_PARTS, #NAME)
CHECK_PLAN(QKV);
CHECK_PLAN(O);
CHECK_PLAN(GATE_UP);
CHECK_PLAN(DOWN);

#if TIED
static_assert(Table::SHARED == LM_HEAD_SHARED);
#else
using LM_HEAD = Plan<HIDDEN, VOCAB, LM_HEAD_TILE, LM_HEAD_BLOCKS, !LM_HEAD_X, true, LM_HEAD_DIRECT>;
static_assert(LM_HEAD::SHARED == LM_HEAD_SHARED);
#endif
