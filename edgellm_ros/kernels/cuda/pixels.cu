// SPDX-License-Identifier: Apache-2.0
// Images to patches: Pillow's bicubic filter in integers (kernels/resampling.py), normalised values in the order of
// the vision tower. Sizes of one launch fit into 32 bits.

using u8 = unsigned char;

__device__ inline u8 weighted(int sum) {
  const int value = (sum + (1 << 21)) >> 22;
  return (u8)(value < 0 ? 0 : value > 255 ? 255 : value);
}

// out [channels, height, out_width]; image [height, width, channels]; first [out_width], weights [out_width, taps].
extern "C" __global__ void resize_width(u8* out, const u8* image, const int* first, const int* weights, i64 channels,
                                        i64 height, i64 width, i64 out_width, i64 taps) {
  pdl_wait();
  for (i64 i = first_index(); i < channels * height * out_width; i += index_stride()) {
    const u32 x = (u32)i % (u32)out_width, line = (u32)i / (u32)out_width;
    const u32 y = line % (u32)height, channel = line / (u32)height;
    const u8* source = image + (i64)y * width * channels + channel;
    int sum = 0;
    for (int tap = 0; tap < taps; ++tap) {
      const int from = first[x] + tap;
      if (from < width) sum += weights[x * taps + tap] * source[from * channels];
    }
    out[i] = weighted(sum);
  }
}

// out [count, out_height, width]; planes [count, height, width]; first [out_height], weights [out_height, taps].
extern "C" __global__ void resize_height(u8* out, const u8* planes, const int* first, const int* weights, i64 count,
                                         i64 height, i64 out_height, i64 width, i64 taps) {
  pdl_wait();
  for (i64 i = first_index(); i < count * out_height * width; i += index_stride()) {
    const u32 x = (u32)i % (u32)width, line = (u32)i / (u32)width;
    const u32 y = line % (u32)out_height, plane = line / (u32)out_height;
    const u8* source = planes + (i64)plane * height * width + x;
    int sum = 0;
    for (int tap = 0; tap < taps; ++tap) {
      const int from = first[y] + tap;
      if (from < height) sum += weights[y * taps + tap] * source[from * width];
    }
    out[i] = weighted(sum);
  }
}

// A place of a resized line among `size` pixels: the first of two neighbours, and the second's share.
struct Between {
  i64 first, second;
  float share;
};

__device__ inline Between between(i64 index, float scale, i64 size) {
  const float place = scale * ((float)index + 0.5f) - 0.5f, positive = place < 0.0f ? 0.0f : place;
  const i64 first = (i64)positive < size - 1 ? (i64)positive : size - 1;
  return {first, first + 1 < size ? first + 1 : size - 1, positive - (float)first};
}

__device__ inline float mixed(float first, float second, float share) { return share * (second - first) + first; }

// out [3, side, side] from image [height, width, 3]: `Kernels.place_image`.
extern "C" __global__ void place_image(float* out, const u8* image, i64 side, i64 height, i64 width, i64 rows,
                                       i64 columns, i64 top, i64 left, double row_scale, double column_scale,
                                       double level, double fill) {
  pdl_wait();
  for (i64 i = first_index(); i < 3 * side * side; i += index_stride()) {
    const i64 line = (u32)i / (u32)side, channel = (u32)line / (u32)side;
    const i64 x = (u32)i % (u32)side - left, y = (u32)line % (u32)side - top;
    if (y < 0 || y >= rows || x < 0 || x >= columns) {
      out[i] = (float)fill;
      continue;
    }
    const Between down = between(y, (float)row_scale, height), across = between(x, (float)column_scale, width);
    const auto pixel = [&](i64 row, i64 column) { return (float)image[(row * width + column) * 3 + channel]; };
    const auto of_both = [&](i64 column) {
      return mixed(pixel(down.first, column), pixel(down.second, column), down.share);
    };
    out[i] = mixed(of_both(across.first), of_both(across.second), across.share) * (float)level - 1.0f;
  }
}

// out [tiles, blocks, merge * merge, channels, repeated, patch, patch] from pixels [frames, channels, height, width];
// levels [channels, 256]. Tiles, and the blocks of a tile, come row by row.
extern "C" __global__ void cut_patches(float* out, const float* levels, const u8* pixels, i64 size, i64 frames,
                                       i64 repeated, i64 channels, i64 height, i64 width, i64 tile_height,
                                       i64 tile_width, i64 patch, i64 merge) {
  pdl_wait();
  for (i64 i = first_index(); i < size; i += index_stride()) {
    u32 rest = (u32)i;
    const auto next = [&rest](i64 count) {  // the last index of those that are left
      const u32 index = rest % (u32)count;
      rest /= (u32)count;
      return index;
    };
    const u32 x_in = next(patch), y_in = next(patch), frame = next(repeated), channel = next(channels);
    const u32 patch_x = next(merge), patch_y = next(merge);
    const u32 block_x = next(tile_width / (patch * merge)), block_y = next(tile_height / (patch * merge));
    const u32 tile_x = next(width / tile_width), tile_y = rest;
    const i64 y = tile_y * tile_height + (block_y * merge + patch_y) * patch + y_in;
    const i64 x = tile_x * tile_width + (block_x * merge + patch_x) * patch + x_in;
    const i64 source = frame < frames ? frame : frames - 1;
    out[i] = levels[channel * 256 + pixels[((source * channels + channel) * height + y) * width + x]];
  }
}
