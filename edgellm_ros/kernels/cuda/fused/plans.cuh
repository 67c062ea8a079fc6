// SPDX-License-Identifier: Apache-2.0
// The products of a step. The host passes sizes, tiles and blocks as macros, and what it made of them; NAME_X: whether a
// kernel of its own makes a product's x.

using QKV = Plan<(1 + JOINED) * HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, QKV_TILE, QKV_BLOCKS, !QKV_X>;
using O = Plan<HEADS * HEAD_DIM, HIDDEN, O_TILE, O_BLOCKS, false>;
using GATE_UP = Plan<HIDDEN, 2 * INNER, GATE_UP_TILE, GATE_UP_BLOCKS, !GATE_UP_X>;
using DOWN = Plan<INNER, HIDDEN, DOWN_TILE, DOWN_BLOCKS, false>;

#define CHECK_PLAN(NAME) static_assert(NAME::SHARED == NAME##_SHARED && NAME::most_parts() == NAME##_PARTS, #NAME)
CHECK_PLAN(QKV);
CHECK_PLAN(O);
CHECK_PLAN(GATE_UP);
CHECK_PLAN(DOWN);

#if TIED
static_assert(Table::SHARED == LM_HEAD_SHARED);
#else
using LM_HEAD = Plan<HIDDEN, VOCAB, LM_HEAD_TILE, LM_HEAD_BLOCKS, !LM_HEAD_X, true>;
static_assert(LM_HEAD::SHARED == LM_HEAD_SHARED);
#endif
