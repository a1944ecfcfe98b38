// CUDA's words in C++ threads, and what ptx.cu has, so that the kernels' own source runs on a CPU. One thread a CUDA
// thread; a warp is a block of eight, which is what a line of LL128 needs.
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
struct Block { std::barrier<> barrier; std::atomic<int> misses[2]; explicit Block(int n) : barrier(n), misses{0, 0} {} };
static thread_local Dim blockIdx, threadIdx, blockDim, gridDim;
static thread_local Block* block_state;
static thread_local unsigned votes;
static void __syncthreads() { block_state->barrier.arrive_and_wait(); }
static void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static void __threadfence_system() { __threadfence(); }
static u32 atomicAdd(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
static u32 atomicExch(u32* at, u32 value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
static bool __all_sync(unsigned, bool here) {
  auto& misses = block_state->misses[votes++ % 2];
  if (!here) ++misses;
  __syncthreads();
  bool all = misses == 0;
  __syncthreads();
  misses = 0;  // the other one is used before this one is again
  return all;
}
static bool __any_sync(unsigned mask, bool here) { return !__all_sync(mask, !here); }
static bool __syncthreads_or(bool here) { return !__all_sync(0, !here); }
// Whether the warp's threads are where they met last: a branch on the user's memory takes each its own way (`part`).
static thread_local bool is_together;
static void part() { is_together = false; }
static void __syncwarp() { __syncthreads(); is_together = true; }
static float from_bits(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static float from_bf16(unsigned short bits) { return from_bits((u32)bits << 16); }
static unsigned short to_bf16(float x) {
  u32 bits; std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float from_fp16(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return x; }
static unsigned short to_fp16(float x) { _Float16 half = x; unsigned short bits; std::memcpy(&bits, &half, 2); return bits; }
static u64 nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
// Whoever is waited for needs a core: to yield is not enough beside other busy processes.
static thread_local unsigned looks;
static void rest() { if (++looks % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(20)); }
// 16 bytes are written and read at once, as on a GPU. The locks are inline variables, of which a process has one each,
// whatever it loads: kernels of several files share memory.
inline std::atomic<bool> locks[1024];
template <typename Access> static void at_once(const char* place, Access access) {
  auto& lock = locks[(u64)place / 16 % 1024];
  while (lock.exchange(true)) std::this_thread::yield();
  access();
  lock.store(false);
}
static void write(char* to, u64 first, u64 second) {
  at_once(to, [&] { ((u64*)to)[0] = first, ((u64*)to)[1] = second; });
}
static void read(const char* from, u64& first, u64& second) {
  at_once(from, [&] { first = ((const u64*)from)[0], second = ((const u64*)from)[1]; });
}
// A line of LL128 is whole for a warp that is together: the flag's thread writes after the others, and reads before them.
// For one that is not, it is the other way round.
template <typename Access> static void in_turn(bool is_first, Access access) {
  if (!is_together && !is_first) std::this_thread::sleep_for(std::chrono::microseconds(300));
  if (is_together && !is_first) __syncthreads();
  access();
  if (is_together && is_first) __syncthreads();
}
static void store_relaxed(char* to, u64 first, u64 second) {
#if PROTOCOL == LL128
  in_turn((threadIdx.x % 8 == 7) != is_together, [&] { write(to, first, second); });
#else
  write(to, first, second);
#endif
#if PROTOCOL == LL
  rest();  // so that what a message's first lanes bring about is seen before its last ones are sent
#endif
}
static void load_relaxed(const char* from, u64& first, u64& second) {
#if PROTOCOL == LL128
  in_turn((threadIdx.x % 8 == 7) == is_together, [&] { read(from, first, second); });
#else
  read(from, first, second);
#endif
  rest();
}
static void store_weak(char* to, u64 first, u64 second) { write(to, first, second); }
static void raise_flag(u64* flag, u64 value) { __atomic_store_n(flag, value, __ATOMIC_SEQ_CST); }
static u64 see_flag(const u64* flag) { rest(); return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
