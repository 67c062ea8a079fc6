// SPDX-License-Identifier: Apache-2.0
// PTX primitives of the fused kernels: cp.async, ldmatrix, mma, PDL, clusters, half-precision conversions. The
// emulation (test/doubles/fused_on_cpu) has the same functions for a host compiler. No CUDA headers are needed.

#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr bool HAS_PDL = __CUDA_ARCH__ >= 900;          // programmatic dependent launch
constexpr float LOG2E = 1.4426950408889634f;            // exponentials have base 2: exp(x) = 2^(LOG2E * x)
constexpr u32 ONES = BF16 ? 0x3f803f80u : 0x3c003c00u;  // 1.0 twice, in the model's type

#define DYNAMIC_SMEM(name) extern __shared__ uint4 name[]
#define STATIC_SMEM(type, name) __shared__ type name
#if MOST_REGISTERS
#define GEMV_LAUNCH_BOUNDS __maxnreg__(MOST_REGISTERS)
#elif EARLY_REGISTERS && __CUDA_ARCH__ >= 900
#define GEMV_LAUNCH_BOUNDS __maxnreg__(EARLY_REGISTERS)
#elif EARLY_REGISTERS
#define GEMV_LAUNCH_BOUNDS __launch_bounds__(THREADS, 1)
#else
#define GEMV_LAUNCH_BOUNDS __launch_bounds__(THREADS)
#endif
#define BATCH_ATTENTION_LAUNCH_BOUNDS __maxnreg__(BATCH_REGISTERS)

// Smem address of a 16-byte chunk; offsets are in chunks. Opaque to the compiler, so it stays in one register.
struct SmemPtr {
  u32 address;

  __device__ explicit SmemPtr(const uint4* memory) {
    u64 wide;
    asm volatile("cvta.to.shared.u64 %0, %1;" : "=l"(wide) : "l"(memory));
    address = (u32)wide;
  }
  __device__ void advance(int places) { address += 16 * places; }
  __device__ SmemPtr plus(int places) const {
    SmemPtr other = *this;
    other.advance(places);
    return other;
  }
  __device__ uint4 read() const {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
  }
};

// Smem address of a 4-byte word; offsets are in units of 16 bytes.
struct SmemWordPtr {
  u32 address;

  __device__ explicit SmemWordPtr(const void* memory) {
    u64 wide;
    asm volatile("cvta.to.shared.u64 %0, %1;" : "=l"(wide) : "l"(memory));
    address = (u32)wide;
  }
  __device__ SmemWordPtr plus(int places) const {
    SmemWordPtr other = *this;
    other.address += 16 * places;
    return other;
  }
  __device__ uint2 read_pair() const {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
    return value;
  }
  __device__ uint4 read_quad() const {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
  }
};

// ldmatrix.x4, by all lanes of a warp: lane 8i + j has the address of row j of matrix i; lane 4g + t gets word t of
// row g of each matrix.
__device__ inline void ldmatrix_x4(u32 (&words)[4], SmemPtr place) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(place.address)
               : "memory");
}

// ldmatrix.x4.trans, by all lanes of a warp: lane 8i + j has the address of row j of matrix i; lane 4g + t gets
// column g, rows 2t and 2t + 1 of each matrix.
__device__ inline void ldmatrix_x4_trans(u32 (&values)[4], SmemPtr place) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(place.address));
}

// cp.async of 16 bytes; zero-fill unless `valid`.
__device__ inline void cp_async(SmemPtr target, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target.address), "l"(source), "r"(bytes)
               : "memory");
}
__device__ inline void cp_async(SmemPtr target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target.address), "l"(source) : "memory");
}

// cp.async from BYTES past `source`.
template <i64 BYTES>
__device__ inline void cp_async_offset(SmemPtr target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1 + %2], 16;" ::"r"(target.address), "l"(source), "n"(BYTES)
               : "memory");
}

// Commit a cp.async group.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most GROUPS of this thread's cp.async groups are in flight.
template <int GROUPS>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// PDL: let the dependent kernel launch before this one waits (griddepcontrol.launch_dependents).
__device__ inline void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  if (PDL_TRIGGER_FIRST) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// PDL: wait for the previous kernel and its writes (griddepcontrol.wait), and let the dependent kernel launch once
// every CTA has come here or exited. Every kernel waits, so all kernels before one have ended when it ends.
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  if (PDL_TRIGGER_FIRST) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!PDL_TRIGGER_FIRST) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// __syncwarp: earlier writes of the other lanes to smem are visible.
__device__ inline void warp_sync() { __syncwarp(); }

// Cluster barrier, from sm_90 on: arrive has release semantics, wait acquire.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// mbarrier that counts the bytes of st.async from other CTAs, phase by phase. A phase completes when `expect` was
// called for it, by one thread, and that many bytes have arrived; bytes may arrive before `expect`. A wait takes
// hundreds of cycles; a cluster barrier takes thousands, because it flushes all writes.
struct Mbarrier {
  u64 state;

  // By one thread, before a cluster barrier.
  __device__ void prepare() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SmemWordPtr(this).address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ void expect(u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SmemWordPtr(this).address), "r"(bytes)
                 : "memory");
#endif
  }
  // Wait for a phase to complete; phases count from 0.
  __device__ void wait(int phase) {
#if __CUDA_ARCH__ >= 900
    const u32 address = SmemWordPtr(this).address;
    u32 done = 0;
    while (!done)
      asm volatile(
          "{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
          : "=r"(done)
          : "r"(address), "r"(phase % 2)
          : "memory");
#endif
  }
};

// mapa: the address of the same variable in the smem of another CTA of the cluster.
__device__ inline u32 map_to_cta(int block, const void* place) {
  u32 address = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SmemWordPtr(place).address), "r"(block));
#endif
  return address;
}

// st.async to the same variable in the smem of another CTA, completing bytes on its mbarrier.
__device__ inline void st_async(int block, Mbarrier& mbarrier, void* place, u32 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(map_to_cta(block, place)),
      "r"(value), "r"(map_to_cta(block, &mbarrier))
      : "memory");
#endif
}
__device__ inline void st_async(int block, Mbarrier& mbarrier, void* place, uint2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                   map_to_cta(block, place)),
               "r"(value.x), "r"(value.y), "r"(map_to_cta(block, &mbarrier))
               : "memory");
#endif
}
__device__ inline void st_async(int block, Mbarrier& mbarrier, void* place, uint4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   map_to_cta(block, place)),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(map_to_cta(block, &mbarrier))
               : "memory");
#endif
}

__device__ inline i64 clamp(i64 value, i64 low, i64 high) { return value < low ? low : value > high ? high : value; }

// ld.global.cg: bypass L1, which may hold what an earlier kernel has overwritten.
__device__ inline float load_cg(const float* address) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}
__device__ inline u16 load_cg(const u16* address) {
  u16 value;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value) : "l"(address));
  return value;
}
__device__ inline u32 load_cg(const u32* address) {
  u32 value;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ inline i64 load_cg(const i64* address) {
  i64 value;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}
__device__ inline float2 load_cg(const float2* address) {
  float2 value;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(address));
  return value;
}
__device__ inline longlong2 load_cg(const longlong2* address) {
  longlong2 value;
  asm volatile("ld.global.cg.v2.s64 {%0, %1}, [%2];" : "=l"(value.x), "=l"(value.y) : "l"(address));
  return value;
}
__device__ inline uint2 load_cg(const uint2* address) {
  uint2 value;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address));
  return value;
}
__device__ inline uint4 load_cg(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// ld.global.nc: memory that no kernel of the step writes.
__device__ inline uint4 load_nc(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

__device__ inline u32 load_nc_scalar(const u16* address) {
  u32 value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ inline u32 load_nc_scalar(const u32* address) {
  u32 value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}
__device__ inline u32 load_nc_scalar(const unsigned char* address) {
  u32 value;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

#if BF16
__device__ inline float to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ inline float2 to_floats(u32 bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
__device__ inline u16 from_float(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline u32 from_floats(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
#else
__device__ inline float to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ inline float2 to_floats(u32 bits) {
  float2 values;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(bits));
  return values;
}
__device__ inline u16 from_float(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline u32 from_floats(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
#endif

// KV cache element and 8-element word: the model's type, or E4M3.
#if FP8_CACHE
using CacheValue = unsigned char;
using CacheWord = uint2;

__device__ inline CacheValue to_cache(float value) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return (CacheValue)pair;
}
__device__ inline float2 from_cache(u16 pair) {
  float2 values;
  asm("{.reg .b32 halves; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 halves, %2; mov.b32 {low, high}, halves;"
      " cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(values.x), "=f"(values.y)
      : "h"(pair));
  return values;
}
// Two values in the model's type.
__device__ inline u32 widen(u16 pair) {
  u32 values;
#if BF16
  const float2 both = from_cache(pair);
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(values) : "f"(both.y), "f"(both.x));
#else
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(pair));
#endif
  return values;
}
__device__ inline uint4 widen(CacheWord word) {
  return {widen((u16)word.x), widen((u16)(word.x >> 16)), widen((u16)word.y), widen((u16)(word.y >> 16))};
}
__device__ inline CacheWord load_nc(const CacheValue* address) {
  CacheWord value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address));
  return value;
}
#else
using CacheValue = u16;
using CacheWord = uint4;

__device__ inline CacheValue to_cache(float value) { return from_float(value); }
__device__ inline uint4 widen(CacheWord word) { return word; }
#endif

// E4M3 pair to fp16 pair, where the GPU has the conversion.
constexpr bool HAS_FP8 = __CUDA_ARCH__ >= 890;
__device__ inline u32 fp8x2_to_fp16x2(u16 pair) {
  u32 values = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(pair));
#endif
  return values;
}

#if BF16
// Packed bf16 multiplication.
__device__ inline u32 mul_bf16x2(u32 values, u32 factors) {
  u32 products;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(values), "r"(factors), "r"(0x80008000u));
  return products;
}
#endif

// Keep a constant in a register.
__device__ inline u32 in_register(u32 value) {
  u32 result;
  asm volatile("mov.b32 %0, %1;" : "=r"(result) : "r"(value));
  return result;
}

// value & mask | bits in one lop3.
__device__ inline u32 lop3_and_or(u32 value, u32 mask, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
  return result;
}

// bf16 in a program of any type, for values beyond the range of fp16.
__device__ inline u32 bf16_from_floats(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
__device__ inline float2 bf16_to_floats(u32 bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

// mma.m16n8k16, accumulating into `sums`. Lane 4g + t has a: A[g][2t, 2t+1], A[g+8][2t, 2t+1], A[g][2t+8, 2t+9],
// A[g+8][2t+8, 2t+9]; b0: B[2t, 2t+1][g]; b1: B[2t+8, 2t+9][g]; sums: D[g][2t], D[g][2t+1], D[g+8][2t], D[g+8][2t+1].
#define MMA(types)                                                                    \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." types                         \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ inline void mma_m16n8k16_bf16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) { MMA("bf16.bf16"); }
__device__ inline void mma_m16n8k16(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
  MMA("bf16.bf16");
#else
  MMA("f16.f16");
#endif
}
#undef MMA

// mma.m16n8k32 of bytes: A unsigned, B signed. Lane 4g + t has a: A[g][4t to 4t+3], A[g+8][4t ..], A[g][16+4t ..],
// A[g+8][16+4t ..]; b0: B[4t to 4t+3][g]; b1: B[16+4t ..][g].
__device__ inline void mma_m16n8k32_u8s8(int (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Max or sum over 16 lanes or the warp.
template <int LANES>
__device__ inline u32 lanes_max(u32 value) {
  if (LANES == 32) return __reduce_max_sync(~0u, value);
#pragma unroll
  for (int other = LANES / 2; other > 0; other /= 2) {
    const u32 its = __shfl_xor_sync(~0u, value, other);
    value = its > value ? its : value;
  }
  return value;
}
template <int LANES>
__device__ inline int lanes_sum(int value) {
  if (LANES == 32) return __reduce_add_sync(~0u, value);
#pragma unroll
  for (int other = LANES / 2; other > 0; other /= 2) value += __shfl_xor_sync(~0u, value, other);
  return value;
}

__device__ inline float exp2_fast(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ inline float rsqrt_fast(float value) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ inline i64 round_to_integer(float value) { return __float2ll_rn(value); }
__device__ inline int round_to_int(float value) { return __float2int_rn(value); }
