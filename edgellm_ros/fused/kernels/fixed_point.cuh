// SPDX-License-Identifier: Apache-2.0
// The residual stream [rows,H] of decode steps is fixed point: CTAs add their partials by int64 atomics, whose result
// does not depend on the order (deterministic).

#pragma once

#include "primitives.cuh"

constexpr float FIXED_UNITS = 1073741824.0f;  // 2^30 per 1.0: resolution 9.3e-10
constexpr float FIXED_LIMIT = 4194304.0f;     // of one addend; sums may be twice as large
// Added in place of NaN, inf and overflow. Multiples of it are hardly ever in the valid range, so a sum that contains
// it becomes NaN again.
constexpr i64 BROKEN = 0x2545f4914f6cdd1d;

__device__ inline i64 to_fixed(float value) {
  return fabsf(value) < FIXED_LIMIT ? round_to_integer(value * FIXED_UNITS) : BROKEN;
}
__device__ inline float from_fixed(i64 value) {
  constexpr i64 LIMIT = (i64)(2 * FIXED_LIMIT) * (i64)FIXED_UNITS;
  return -LIMIT < value && value < LIMIT ? (float)value * (1.0f / FIXED_UNITS) : __uint_as_float(0x7fffffff);
}

__device__ inline void add_to_residual(i64* residual, float value) {
  atomicAdd(reinterpret_cast<u64*>(residual), (u64)to_fixed(value));
}
