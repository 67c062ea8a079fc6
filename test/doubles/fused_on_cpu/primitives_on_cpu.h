// SPDX-License-Identifier: Apache-2.0
// `primitives.cuh` of the fused kernels for a host compiler: copies are made when they are waited for, kernels run one
// after the other.
#pragma once
#include "cuda_on_cpu.h"

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr bool HAS_PDL = true;
constexpr float LOG2E = 1.4426950408889634f;
constexpr u32 ONES = BF16 ? 0x3f803f80u : 0x3c003c00u;

struct float2 {
  float x, y;
};
struct alignas(16) longlong2 {
  i64 x, y;
};

namespace fused_on_cpu {

constexpr size_t SHARED_BYTES = 256 << 10;
constexpr int POISON = 0xff;  // NaN in every type

extern __thread uint4* shared_memory;  // of SHARED_BYTES
extern __thread unsigned blocks;       // that this thread of the host has run

void finish_copies(int groups);  // all copies of this thread but those of the newest groups

template <class T>
T& poisoned(T& memory, unsigned& block) {
  if (block != blocks) memset(&memory, POISON, sizeof memory);
  block = blocks;
  return memory;
}

}  // namespace fused_on_cpu

#define GEMV_LAUNCH_BOUNDS
#define BATCH_ATTENTION_LAUNCH_BOUNDS
#define STATIC_SMEM(type, name)                  \
  static thread_local type name##_memory;        \
  static thread_local unsigned name##_block = 0; \
  type& name = fused_on_cpu::poisoned(name##_memory, name##_block)
#define DYNAMIC_SMEM(name) uint4* const name = fused_on_cpu::shared_memory

struct SmemPtr {
  uint4* memory;

  explicit SmemPtr(uint4* memory) : memory(memory) {}
  void advance(int places) { memory += places; }
  SmemPtr plus(int places) const { return SmemPtr(memory + places); }
  uint4 read() const { return *memory; }
};

struct SmemWordPtr {
  const char* memory;

  explicit SmemWordPtr(const void* memory) : memory(static_cast<const char*>(memory)) {}
  SmemWordPtr plus(int places) const { return SmemWordPtr(memory + 16 * places); }
  template <class T>
  T at(int places) const {
    T value;
    memcpy(&value, memory + 16 * places, sizeof value);
    return value;
  }
  uint2 read_pair() const { return at<uint2>(0); }
  uint4 read_quad() const { return at<uint4>(0); }
};

namespace fused_on_cpu {

// What the lanes of a warp give to each other; two, so that a lane can begin the next exchange while others read.
template <class T>
struct Lanes {
  T values[2][cuda_on_cpu::WARP];
  unsigned exchanges[cuda_on_cpu::WARP];
};

// What all lanes of the warp have as their value.
template <class T>
const T* exchange_all(const T& value) {
  static __thread Lanes<T> all[1024 / cuda_on_cpu::WARP];
  const unsigned lane = threadIdx.x % cuda_on_cpu::WARP, warp = threadIdx.x / cuda_on_cpu::WARP;
  Lanes<T>& own = all[warp];
  const unsigned half = own.exchanges[lane]++ % 2;
  own.values[half][lane] = value;
  cuda_on_cpu::meet(cuda_on_cpu::block->warps[warp]);
  return own.values[half];
}

}  // namespace fused_on_cpu

inline void ldmatrix_x4(u32 (&words)[4], SmemPtr place) {
  const unsigned lane = threadIdx.x % cuda_on_cpu::WARP, g = lane / 4, t = lane % 4;
  const uint4* const* rows = fused_on_cpu::exchange_all<const uint4*>(place.memory);
  for (unsigned i = 0; i < 4; ++i) words[i] = reinterpret_cast<const u32*>(rows[8 * i + g])[t];
  cuda_on_cpu::meet(cuda_on_cpu::block->warps[threadIdx.x / cuda_on_cpu::WARP]);
}

inline void ldmatrix_x4_trans(u32 (&values)[4], SmemPtr place) {
  const unsigned lane = threadIdx.x % cuda_on_cpu::WARP, g = lane / 4, t = lane % 4;
  const uint4* const* rows = fused_on_cpu::exchange_all<const uint4*>(place.memory);
  auto value = [&](unsigned row) { return (u32) reinterpret_cast<const u16*>(rows[row])[g]; };
  for (unsigned i = 0; i < 4; ++i) values[i] = value(8 * i + 2 * t) | value(8 * i + 2 * t + 1) << 16;
  cuda_on_cpu::meet(cuda_on_cpu::block->warps[threadIdx.x / cuda_on_cpu::WARP]);
}

void cp_async(SmemPtr target, const void* source, bool valid = true);
template <i64 BYTES>
void cp_async_offset(SmemPtr target, const void* source) {
  cp_async(target, static_cast<const char*>(source) + BYTES);
}
void cp_async_commit();

template <int GROUPS>
void cp_async_wait() {
  fused_on_cpu::finish_copies(GROUPS);
}

inline void pdl_trigger() {}
inline void pdl_wait() {}
inline void warp_sync() { cuda_on_cpu::meet(cuda_on_cpu::block->warps[threadIdx.x / cuda_on_cpu::WARP]); }

namespace fused_on_cpu {

uint4* memory_in_cluster(int block);  // the smem of a block of this cluster
void wait_for_other_blocks();
void lock_arrivals();
void unlock_arrivals();

}  // namespace fused_on_cpu

void cluster_arrive();
void cluster_wait();

struct Mbarrier {
  u64 state;  // phases that have ended, whether the next one is expected, bytes of it that are to come

  struct Parts {
    int bytes;
    short expected;
    unsigned short ended;
  };
  template <class Change>
  void change(Change change) {
    fused_on_cpu::lock_arrivals();
    Parts partials = cuda_on_cpu::same_bits<Parts>(state);
    change(partials);
    if (partials.expected && partials.bytes == 0) partials = {0, 0, (unsigned short)(partials.ended + 1)};
    __atomic_store_n(&state, cuda_on_cpu::same_bits<u64>(partials), __ATOMIC_SEQ_CST);
    fused_on_cpu::unlock_arrivals();
  }

  void prepare() { state = 0; }
  void expect(u32 bytes) {
    change([&](Parts& partials) { partials.bytes += bytes, partials.expected = 1; });
  }
  void wait(int phase) {
    while (cuda_on_cpu::same_bits<Parts>(__atomic_load_n(&state, __ATOMIC_SEQ_CST)).ended % 2 == phase % 2)
      fused_on_cpu::wait_for_other_blocks();
  }
};

namespace fused_on_cpu {

template <class T>
T* map_to_cta(int block, T* place) {
  const size_t offset = reinterpret_cast<char*>(place) - reinterpret_cast<char*>(shared_memory);
  return reinterpret_cast<T*>(reinterpret_cast<char*>(memory_in_cluster(block)) + offset);
}

}  // namespace fused_on_cpu

template <class T>
void st_async(int block, Mbarrier& mbarrier, void* place, T value) {
  memcpy(fused_on_cpu::map_to_cta(block, static_cast<char*>(place)), &value, sizeof value);
  fused_on_cpu::map_to_cta(block, &mbarrier)->change([](Mbarrier::Parts& partials) { partials.bytes -= sizeof value; });
}

inline i64 clamp(i64 value, i64 low, i64 high) { return value < low ? low : value > high ? high : value; }

template <class T>
T load_cg(const T* address) {
  return *address;
}

inline uint4 load_nc(const void* address) {
  uint4 value;
  memcpy(&value, address, sizeof value);
  return value;
}

template <class T>
u32 load_nc_scalar(const T* address) {
  return *address;
}

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return cuda_on_cpu::exchange(value, from);
}

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
inline u16 bf16_from_float(float value) {
  const u32 bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 bf16_from_floats(float low, float high) { return bf16_from_float(low) | (u32)bf16_from_float(high) << 16; }
inline float2 bf16_to_floats(u32 bits) { return {bf16_to_float(bits), bf16_to_float(bits >> 16)}; }
#if BF16
inline float to_float(u16 bits) { return bf16_to_float(bits); }
inline u16 from_float(float value) { return bf16_from_float(value); }
#else
inline float to_float(u16 bits) { return cuda_on_cpu::same_bits<_Float16>(bits); }
inline u16 from_float(float value) { return cuda_on_cpu::same_bits<u16>((_Float16)value); }
#endif
inline u32 from_floats(float low, float high) { return from_float(low) | (u32)from_float(high) << 16; }
inline float2 to_floats(u32 bits) { return {to_float(bits), to_float(bits >> 16)}; }

#if FP8_CACHE
using CacheValue = unsigned char;
using CacheWord = uint2;

inline CacheValue to_cache(float value) {
  if (value != value) return 0x7f;
  const float size = fminf(fabsf(value), 448);
  const int exponent = size < 0x1p-6f ? -6 : ilogbf(size);
  const int eighths = lrintf(ldexpf(size, 3 - exponent));  // to nearest even
  return (value < 0 ? 0x80 : 0) | (exponent + 6) * 8 + eighths;
}
inline float from_cache(CacheValue bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return bits & 0x80 ? -size : size;
}
inline float2 from_cache(u16 pair) { return {from_cache((CacheValue)pair), from_cache((CacheValue)(pair >> 8))}; }
inline u32 widen(u16 pair) {
  const float2 values = from_cache(pair);
  return from_float(values.x) | (u32)from_float(values.y) << 16;
}
inline uint4 widen(CacheWord word) {
  return {widen((u16)word.x), widen((u16)(word.x >> 16)), widen((u16)word.y), widen((u16)(word.y >> 16))};
}
inline CacheWord load_nc(const CacheValue* address) {
  CacheWord value;
  memcpy(&value, address, sizeof value);
  return value;
}
#else
using CacheValue = u16;
using CacheWord = uint4;

inline CacheValue to_cache(float value) { return from_float(value); }
inline uint4 widen(CacheWord word) { return word; }
#endif

#ifndef HARDWARE_FLOAT8
#define HARDWARE_FLOAT8 0
#endif
constexpr bool HAS_FP8 = HARDWARE_FLOAT8;
inline u32 fp8x2_to_fp16x2(u16 pair) {
  auto half = [](unsigned char bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return (u32)cuda_on_cpu::same_bits<u16>((_Float16)(bits & 0x80 ? -size : size));
  };
  return half((unsigned char)pair) | half((unsigned char)(pair >> 8)) << 16;
}
inline u32 mul_bf16x2(u32 values, u32 factors) {
  return from_float(to_float(values) * to_float(factors)) |
         (u32)from_float(to_float(values >> 16) * to_float(factors >> 16)) << 16;
}

inline u32 in_register(u32 value) { return value; }
inline u32 lop3_and_or(u32 value, u32 mask, u32 bits) { return value & mask | bits; }

namespace fused_on_cpu {

struct Fragments {
  u32 a[4], b[2];
};

struct FloatFragments {
  float a[4][2], b[2][2];
};

}  // namespace fused_on_cpu

// to_float: a value of an operand.
template <class ToFloat>
void mma_m16n8k16_of(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, ToFloat to_float) {
  const u32 b[2] = {b0, b1};
  fused_on_cpu::FloatFragments own;
  for (unsigned i = 0; i < 4; ++i)
    for (unsigned j = 0; j < 2; ++j) own.a[i][j] = to_float(a[i] >> 16 * j);
  for (unsigned i = 0; i < 2; ++i)
    for (unsigned j = 0; j < 2; ++j) own.b[i][j] = to_float(b[i] >> 16 * j);
  const fused_on_cpu::FloatFragments* lanes = fused_on_cpu::exchange_all(own);
  const unsigned lane = threadIdx.x % cuda_on_cpu::WARP, g = lane / 4, t = lane % 4;
  for (unsigned i = 0; i < 4; ++i) {  // D[g + i / 2 * 8][2t + i % 2]
    const auto* left = &lanes[4 * g];
    const auto* right = &lanes[4 * (2 * t + i % 2)];
    float sum = sums[i];
    for (unsigned k = 0; k < 16; ++k)
      sum += left[k % 8 / 2].a[i / 2 + k / 8 * 2][k % 2] * right[k % 8 / 2].b[k / 8][k % 2];
    sums[i] = sum;
  }
}
inline void mma_m16n8k16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_m16n8k16_of(sums, a, b0, b1, [](u32 bits) { return to_float((u16)bits); });
}
inline void mma_m16n8k16_bf16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_m16n8k16_of(sums, a, b0, b1, [](u32 bits) { return bf16_to_float((u16)bits); });
}

inline void mma_m16n8k32_u8s8(int (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const fused_on_cpu::Fragments* lanes =
      fused_on_cpu::exchange_all(fused_on_cpu::Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const unsigned lane = threadIdx.x % cuda_on_cpu::WARP, g = lane / 4, t = lane % 4;
  for (unsigned i = 0; i < 4; ++i)  // D[g + i / 2 * 8][2t + i % 2]
    for (unsigned k = 0; k < 32; ++k) {
      const unsigned at = k % 16 / 4, shift = k % 4 * 8;
      const u32 left = lanes[4 * g + at].a[i / 2 + k / 16 * 2] >> shift & 255;
      sums[i] += (int)left * (signed char)(lanes[4 * (2 * t + i % 2) + at].b[k / 16] >> shift);
    }
}

template <int LANES>
u32 lanes_max(u32 value) {
  for (int other = LANES / 2; other > 0; other /= 2) {
    const auto theirs = __shfl_xor_sync(~0u, value, other);
    if (value < theirs) value = theirs;
  }
  return value;
}
template <int LANES>
int lanes_sum(int value) {
  for (int other = LANES / 2; other > 0; other /= 2) value += __shfl_xor_sync(~0u, value, other);
  return value;
}

inline float exp2_fast(float value) { return exp2f(value); }
inline float rsqrt_fast(float value) { return 1 / sqrtf(value); }
inline i64 round_to_integer(float value) { return llrintf(value); }
inline int round_to_int(float value) { return (int)llrintf(value); }
