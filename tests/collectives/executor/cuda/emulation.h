// SPDX-License-Identifier: Apache-2.0
// CUDA's words in C++, and what ptx.cu has, so that the kernels' own source runs on a CPU. A block of eight CUDA threads,
// which are its one warp, is a thread of the system's; within it the CUDA threads take turns, in random order, wherever one
// waits, looks at what others write, or tells others. A line of LL128 is whole for eight threads.
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
static u64 nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
static void sleep_until(u64 time) {
  u64 now = nanoseconds();
  if (now < time) std::this_thread::sleep_for(std::chrono::nanoseconds(time - now));
}
struct Dim { unsigned x; };
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Dim index;
  unsigned votes = 0, looks = 0, waits_for = 0;
  bool has_ended = false, is_at_barrier = false, is_together = false;
  u64 sleeps_until = 0;
};
// One thread of the system runs it.
struct Block {
  static constexpr u64 STACK = 1 << 16;
  Dim index, size, blocks;
  std::vector<Thread> threads;
  ucontext_t caller;
  unsigned current = 0, arrived = 0, barriers = 0, misses[2] = {0, 0};
  u64 random, turns = 0;
  std::function<void()> kernel;

  Block(unsigned index, unsigned size, unsigned blocks, std::function<void()> kernel)
      : index{index}, size{size}, blocks{blocks}, threads(size), random(nanoseconds() * 2 + 1), kernel(kernel) {}
  unsigned draw(unsigned below) {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return (random >> 20) % below;
  }
  void run();
  // Give the turn to one of the threads that can go on, at random. While all of them sleep, so does the block.
  void turn();
};
static thread_local Block* running;
#define threadIdx (running->threads[running->current].index)
#define blockIdx (running->index)
#define blockDim (running->size)
#define gridDim (running->blocks)
static Thread& self() { return running->threads[running->current]; }
static void begin_thread() {
  running->kernel();
  self().has_ended = true;
  running->turn();
}
void Block::run() {
  running = this;
  for (unsigned at = 0; at < size.x; ++at) {
    Thread& one = threads[at];
    one.index.x = at;
    one.stack = std::unique_ptr<char[]>(new char[STACK]);
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = one.stack.get();
    one.context.uc_stack.ss_size = STACK;
    makecontext(&one.context, begin_thread, 0);
  }
  current = draw(size.x);
  swapcontext(&caller, &threads[current].context);
}
void Block::turn() {
  // Whoever is waited for needs a core: to yield is not enough beside other busy processes.
  if (++turns % 128 == 0) sleep_until(nanoseconds() + 20000);
  Thread& last = self();
  for (;;) {
    u64 now = 0, first = ~0ull;
    bool have_ended = true;
    for (unsigned step = 0, start = draw(size.x); step < size.x; ++step) {
      unsigned at = (start + step) % size.x;
      Thread& one = threads[at];
      if (one.has_ended) continue;
      have_ended = false;
      if (one.is_at_barrier && one.waits_for == barriers) continue;
      if (one.sleeps_until && one.sleeps_until > (now = now ? now : nanoseconds())) {
        first = std::min(first, one.sleeps_until);
        continue;
      }
      one.sleeps_until = 0;
      if (&one == &last) return;
      current = at;
      swapcontext(&last.context, &one.context);
      return;
    }
    if (have_ended) setcontext(&caller);
    if (first == ~0ull) {
      std::fputs("a CUDA thread has ended, and others of its block wait for it at a barrier\n", stderr);
      std::abort();
    }
    sleep_until(first);
  }
}
static void sleep_for(u64 microseconds) {
  self().sleeps_until = nanoseconds() + 1000 * microseconds;
  running->turn();
}
static void __syncthreads() {
  Thread& own = self();
  if (++running->arrived == running->size.x) {
    running->arrived = 0, ++running->barriers;
    running->turn();
    return;
  }
  own.is_at_barrier = true, own.waits_for = running->barriers;
  running->turn();
  own.is_at_barrier = false;
}
static void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
static void __threadfence_system() { __threadfence(); }
static u32 atomicAdd(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
static u32 atomicExch(u32* at, u32 value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
static bool __all_sync(unsigned, bool here) {
  unsigned& misses = running->misses[self().votes++ % 2];
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
static void part() { self().is_together = false; }
static void __syncwarp() { __syncthreads(); self().is_together = true; }
static float from_bits(u32 bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static float from_bf16(unsigned short bits) { return from_bits((u32)bits << 16); }
static unsigned short to_bf16(float x) {
  u32 bits; std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float from_fp16(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return x; }
static unsigned short to_fp16(float x) { _Float16 half = x; unsigned short bits; std::memcpy(&bits, &half, 2); return bits; }
static void rest() { if (++self().looks % 16 == 0) sleep_for(20); else running->turn(); }
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
  if (!self().is_together && !is_first) sleep_for(300);
  if (self().is_together && !is_first) __syncthreads();
  access();
  if (self().is_together && is_first) __syncthreads();
}
static void store_relaxed(char* to, u64 first, u64 second) {
#if PROTOCOL == LL128
  in_turn((threadIdx.x % 8 == 7) != self().is_together, [&] { write(to, first, second); });
#else
  write(to, first, second);
#endif
#if PROTOCOL == LL
  rest();  // so that what a message's first vectors bring about is seen before its last ones are sent
#endif
}
static void load_relaxed(const char* from, u64& first, u64& second) {
#if PROTOCOL == LL128
  in_turn((threadIdx.x % 8 == 7) == self().is_together, [&] { read(from, first, second); });
#else
  read(from, first, second);
#endif
  rest();
}
static void store_weak(char* to, u64 first, u64 second) { write(to, first, second); }
static void raise_flag(u64* flag, u64 value) {
  __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
  if (running->draw(4) == 0) sleep_until(nanoseconds() + 20000);  // others see it before this block goes on
}
static u64 see_flag(const u64* flag) { rest(); return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
