// SPDX-License-Identifier: Apache-2.0
// Sizes of a recurrent mixer, and the columns of its in_proj and of its convolution.

#pragma once

#include "primitives.cuh"

constexpr bool DELTA = MIXER == 1;  // otherwise Mamba2
constexpr int KEYS = KEY_HEADS * KEY_DIM, VALUES = MIXER_HEADS * VALUE_DIM, CHANNELS = 2 * KEYS + VALUES;
// Columns of in_proj: a delta net has channels, gate, strengths, decays; Mamba2 gate, channels, steps.
constexpr int FIRST_CHANNEL = DELTA ? 0 : VALUES, FIRST_GATE = DELTA ? CHANNELS : 0;
constexpr int FIRST_STRENGTH = CHANNELS + VALUES, FIRST_STEP = FIRST_STRENGTH + (DELTA ? MIXER_HEADS : 0);
// Channels of the convolution.
constexpr int FIRST_QUERY = DELTA ? 0 : VALUES + KEYS, FIRST_KEY = DELTA ? KEYS : VALUES,
              FIRST_VALUE = DELTA ? 2 * KEYS : 0;
constexpr int PAST = CONV_KERNEL - 1;                         // inputs of the convolution before the new one
constexpr int NORM_GROUPS = DELTA ? MIXER_HEADS : KEY_HEADS;  // of a row, each with a norm of its own
constexpr float UNIT_EPSILON = 1e-6f;                         // of the norms of a delta net's queries and keys

__device__ inline float silu(float value) { return value / (1.0f + exp2_fast(-LOG2E * value)); }
__device__ inline float softplus(float value) { return fmaxf(value, 0.0f) + log1pf(expf(-fabsf(value))); }
