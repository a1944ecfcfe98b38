// SPDX-License-Identifier: Apache-2.0
// CUDA's words in C++, and what ptx.cu has, so that the kernels' own source runs on a CPU. A block of eight CUDA threads,
// which are its one warp, is a thread of the system's; within it the CUDA threads take turns, in random order, wherever one
// waits, looks at what others write, or tells others. A line of LL128 is whole for eight threads.
//
// What gives the turns is in emulation.cpp, which is compiled once: a kernel is compiled with this header in a third of
// the time that it takes with both.
#pragma once
#include <cmath>
#include <cstring>
#define LL 0
#define LL128 1
#define SIMPLE 2
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(n)
typedef unsigned int u32;
typedef unsigned long long u64;
struct Dim { unsigned x; };
// Where the running CUDA thread is.
Dim thread_index();
Dim block_index();
Dim block_size();
Dim grid_size();
#define threadIdx (thread_index())
#define blockIdx (block_index())
#define blockDim (block_size())
#define gridDim (grid_size())
// Run the blocks from first to end, of so many, each by a thread of the system's; to their ends.
void launch_blocks(u32 first, u32 end, u32 blocks, u32 threads, void (*kernel)(u64*), u64* arguments);

u64 nanoseconds();
void sleep_for(u64 microseconds);
void __syncthreads();
bool __all_sync(unsigned, bool here);
inline bool __any_sync(unsigned mask, bool here) { return !__all_sync(mask, !here); }
inline bool __syncthreads_or(bool here) { return !__all_sync(0, !here); }
// Whether the warp's threads are where they met last: a branch on the user's memory takes each its own way (`part`).
bool is_together();
void part();
void __syncwarp();
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
inline u32 atomicAdd(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
inline u64 atomicAdd(u64* at, u64 value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
inline u32 atomicExch(u32* at, u32 value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
inline float from_bits(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline float from_bf16(unsigned short bits) { return from_bits((u32)bits << 16); }
inline unsigned short to_bf16(float x) {
  u32 bits; std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float from_fp16(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return x; }
inline unsigned short to_fp16(float x) { _Float16 half = x; unsigned short bits; std::memcpy(&bits, &half, 2); return bits; }
// Give the turn to another thread, and now and then rest.
void rest();
// 16 bytes are written and read at once, as on a GPU.
void write(char* to, u64 first, u64 second);
void read(const char* from, u64& first, u64& second);
// A line of LL128 is whole for a warp that is together: the flag's thread writes after the others, and reads before them.
// For one that is not, it is the other way round.
template <typename Access> static void in_turn(bool is_first, Access access) {
  if (!is_together() && !is_first) sleep_for(300);
  if (is_together() && !is_first) __syncthreads();
  access();
  if (is_together() && is_first) __syncthreads();
}
static void store_relaxed(char* to, u64 first, u64 second) {
#if PROTOCOL == LL128
  in_turn((threadIdx.x % 8 == 7) != is_together(), [&] { write(to, first, second); });
#else
  write(to, first, second);
#endif
#if PROTOCOL == LL
  rest();  // so that what a message's first vectors bring about is seen before its last ones are sent
#endif
}
static void load_relaxed(const char* from, u64& first, u64& second) {
#if PROTOCOL == LL128
  in_turn((threadIdx.x % 8 == 7) == is_together(), [&] { read(from, first, second); });
#else
  read(from, first, second);
#endif
  rest();
}
inline void store_weak(char* to, u64 first, u64 second) { write(to, first, second); }
void raise_flag(u64* flag, u64 value);
inline u64 see_flag(const u64* flag) { rest(); return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
inline u32 see_count(const u32* count) { rest(); return __atomic_load_n(count, __ATOMIC_SEQ_CST); }
