// SPDX-License-Identifier: Apache-2.0
// The products of a step. The host passes sizes, tiles and blocks as macros, and what it made of them.

using QKV = Plan<(1 + JOINED) * HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, QKV_TILE, QKV_BLOCKS, true>;
using O = Plan<HEADS * HEAD_DIM, HIDDEN, O_TILE, O_BLOCKS, false>;
using GATE_UP = Plan<HIDDEN, 2 * INNER, GATE_UP_TILE, GATE_UP_BLOCKS, true>;
using DOWN = Plan<INNER, HIDDEN, DOWN_TILE, DOWN_BLOCKS, false>;

#define CHECK_PLAN(NAME)                                                                                           \
  static_assert(NAME::SHARED + LoraSums<NAME>::BYTES == NAME##_SHARED && NAME::most_parts() == NAME##_PARTS, #NAME)
CHECK_PLAN(QKV);
CHECK_PLAN(O);
CHECK_PLAN(GATE_UP);
CHECK_PLAN(DOWN);

#if TIED
static_assert(Table::SHARED == LM_HEAD_SHARED);
#else
using LM_HEAD = Plan<HIDDEN, VOCAB, LM_HEAD_TILE, LM_HEAD_BLOCKS, true, true>;
static_assert(LM_HEAD::SHARED == LM_HEAD_SHARED);
#endif
