// SPDX-License-Identifier: Apache-2.0
// The GEMVs of a step. Sizes, tiles and CTAs come from the host as macros; static_assert compares the smem and the
// partials that the host has computed from them. NAME_PREPARED: whether a prep kernel computes x.

#pragma once

#include "quantized.cuh"
#include "lora.cuh"
#include "tied_head.cuh"

template <int K, int N, int TILE, int BLOCKS, bool ALL_OF_X, int BITS, int GROUP, bool ZERO_POINTS, bool OFFSETS,
          bool FLOAT8, bool ACT_ORDER, bool X_IN_GMEM, bool WHOLE_TILES>
struct Choice {
  using Type = QuantizedGemvPlan<K, N, TILE, BLOCKS, ALL_OF_X, BITS, GROUP, ZERO_POINTS, OFFSETS, FLOAT8, ACT_ORDER,
                                 WHOLE_TILES>;
};
template <int K, int N, int TILE, int BLOCKS, bool ALL_OF_X, bool X_IN_GMEM, bool WHOLE_TILES>
struct Choice<K, N, TILE, BLOCKS, ALL_OF_X, 16, 0, false, false, false, false, X_IN_GMEM, WHOLE_TILES> {
  using Type = GemvPlan<K, N, TILE, BLOCKS, ALL_OF_X, WHOLE_TILES, X_IN_GMEM>;
};
#define PLAN(NAME, K, N, ALL_OF_X, WHOLE_TILES)                                                                  \
  using NAME = Choice<K, N, NAME##_TILE, NAME##_BLOCKS, ALL_OF_X, NAME##_BITS, NAME##_GROUP, NAME##_ZERO_POINTS, \
                      NAME##_OFFSETS, NAME##_FLOAT8, NAME##_ACT_ORDER, NAME##_X_IN_GMEM, WHOLE_TILES>::Type
PLAN(QKV, (1 + JOINED) * HIDDEN, ((1 + ATTENTION_GATE) * HEADS + 2 * KV_HEADS) * HEAD_DIM, !QKV_PREPARED, false);
PLAN(O, HEADS* HEAD_DIM, HIDDEN, false, false);
PLAN(GATE_UP, HIDDEN, (SQUARED_RELU ? 1 : 2) * INNER, !GATE_UP_PREPARED, false);
PLAN(DOWN, INNER, HIDDEN, false, false);
#if MIXER
PLAN(IN_PROJ, HIDDEN, IN_PROJ_SIZE, !IN_PROJ_PREPARED, false);
PLAN(OUT_PROJ, MIXER_HEADS* VALUE_DIM, HIDDEN, false, false);
#endif

#define CHECK_PLAN(NAME)                                                                                 \
  static_assert(NAME::TILE_K == NAME##_TILE_K, #NAME ": TILE_K here == tile_k of plan/product.py");      \
  static_assert(NAME::max_partials() == NAME##_PARTIALS, #NAME ": partials here == of plan/product.py"); \
  static_assert(NAME::SMEM_BYTES + LoraAccumulators<NAME>::BYTES == NAME##_SMEM,                         \
                #NAME ": smem here == of plan/product.py")
CHECK_PLAN(QKV);
CHECK_PLAN(O);
CHECK_PLAN(GATE_UP);
CHECK_PLAN(DOWN);
#if MIXER
CHECK_PLAN(IN_PROJ);
CHECK_PLAN(OUT_PROJ);
#endif

#if TIED
static_assert(TiedHead::SMEM_BYTES == LM_HEAD_SMEM, "LM_HEAD: smem here == of plan/decoder.py");
#else
PLAN(LM_HEAD, HIDDEN, HEAD_COLUMNS, !LM_HEAD_PREPARED, true);
static_assert(LM_HEAD::SMEM_BYTES == LM_HEAD_SMEM, "LM_HEAD: smem here == of plan/product.py");
#endif
