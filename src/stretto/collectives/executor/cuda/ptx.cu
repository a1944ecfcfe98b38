// SPDX-License-Identifier: Apache-2.0
// Instructions that C++ lacks: ordered reads and writes of memory, and the rounding of 16-bit numbers.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float from_bf16(unsigned short bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ unsigned short to_bf16(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ float from_fp16(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ unsigned short to_fp16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// 16 bytes at once, never torn: LL and LL128 rely on it. PTX promises that for one access of 128 bits, and not for two of
// 64 (which are the same instructions on today's GPUs).
__device__ __forceinline__ void store_relaxed(char* to, u64 first, u64 second) {
  asm volatile(
      "{.reg .b128 both; mov.b128 both, {%1, %2}; st.relaxed.sys.global.b128 [%0], both;}" ::"l"(to), "l"(first), "l"(second)
      : "memory");
}

__device__ __forceinline__ void load_relaxed(const char* from, u64& first, u64& second) {
  asm volatile("{.reg .b128 both; ld.relaxed.sys.global.b128 both, [%2]; mov.b128 {%0, %1}, both;}"
               : "=l"(first), "=l"(second)
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ void store_weak(char* to, u64 first, u64 second) {
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}

// After a barrier of the block: a reader that sees the flag sees all that the block's threads have written.
__device__ __forceinline__ void raise_flag(u64* flag, u64 value) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ u64 see_flag(const u64* flag) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// A counter of 32 bits in pinned memory, which the proxy stores after the bytes that it counts.
__device__ __forceinline__ u32 see_count(const u32* count) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}
