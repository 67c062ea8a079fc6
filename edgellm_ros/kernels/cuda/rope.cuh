// SPDX-License-Identifier: Apache-2.0
// Rotary angles of any position, for the kernels that write rotary rows.

// Cosine and sine of one frequency at a position, from tables [positions, frequencies] of whole positions. From there
// to the position the angle is small, so that a few terms of both series are enough. cosf would need local memory.
__device__ inline void write_angle(float* cos, float* sin, const float* cos_table, const float* sin_table,
                                   const float* radians, float position, i64 frequency, i64 positions,
                                   i64 frequencies) {
  const float whole = floorf(position), angle = (position - whole) * radians[frequency], square = angle * angle;
  const i64 source = clamp((i64)whole, 0, positions - 1) * frequencies + frequency;
  const float table_cos = cos_table[source], table_sin = sin_table[source];
  float small_cos = -1.0f / 3628800, small_sin = -1.0f / 39916800;
  small_cos = small_cos * square + 1.0f / 40320, small_sin = small_sin * square + 1.0f / 362880;
  small_cos = small_cos * square - 1.0f / 720, small_sin = small_sin * square - 1.0f / 5040;
  small_cos = small_cos * square + 1.0f / 24, small_sin = small_sin * square + 1.0f / 120;
  small_cos = small_cos * square - 1.0f / 2, small_sin = small_sin * square - 1.0f / 6;
  small_cos = small_cos * square + 1, small_sin = (small_sin * square + 1) * angle;
  const bool between = position != whole;
  *cos = between ? table_cos * small_cos - table_sin * small_sin : table_cos;
  *sin = between ? table_sin * small_cos + table_cos * small_sin : table_sin;
}
