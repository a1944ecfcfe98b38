// SPDX-License-Identifier: Apache-2.0
// How the emulation runs a kernel's CUDA threads: see emulation.h.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <ucontext.h>
#include <vector>
#include "emulation.h"

u64 nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
static void sleep_until(u64 time) {
  u64 now = nanoseconds();
  if (now < time) std::this_thread::sleep_for(std::chrono::nanoseconds(time - now));
}
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
  void (*kernel)(u64*);
  u64* arguments;

  Block(unsigned index, unsigned size, unsigned blocks, void (*kernel)(u64*), u64* arguments)
      : index{index}, size{size}, blocks{blocks}, threads(size), random(nanoseconds() * 2 + 1), kernel(kernel),
        arguments(arguments) {}
  unsigned draw(unsigned below) {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    return (random >> 20) % below;
  }
  void run();
  // Give the turn to one of the threads that can go on, at random. While all of them sleep, so does the block.
  void turn();
};
static thread_local Block* running;
static Thread& self() { return running->threads[running->current]; }
Dim thread_index() { return self().index; }
Dim block_index() { return running->index; }
Dim block_size() { return running->size; }
Dim grid_size() { return running->blocks; }
static void begin_thread() {
  running->kernel(running->arguments);
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
void launch_blocks(u32 first, u32 end, u32 blocks, u32 threads, void (*kernel)(u64*), u64* arguments) {
  auto run_block = [=](u32 index) { Block(index, threads, blocks, kernel, arguments).run(); };
  std::vector<std::thread> all;
  for (u32 b = first + 1; b < end; ++b) all.emplace_back(run_block, b);
  run_block(first);
  for (auto& one : all) one.join();
}
void sleep_for(u64 microseconds) {
  self().sleeps_until = nanoseconds() + 1000 * microseconds;
  running->turn();
}
void __syncthreads() {
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
bool __all_sync(unsigned, bool here) {
  unsigned& misses = running->misses[self().votes++ % 2];
  if (!here) ++misses;
  __syncthreads();
  bool all = misses == 0;
  __syncthreads();
  misses = 0;  // the other one is used before this one is again
  return all;
}
bool is_together() { return self().is_together; }
void part() { self().is_together = false; }
void __syncwarp() { __syncthreads(); self().is_together = true; }
void rest() { if (++self().looks % 16 == 0) sleep_for(20); else running->turn(); }
// A process has these locks once, whatever it loads: kernels of several files share memory.
static std::atomic<bool> locks[1024];
template <typename Access> static void at_once(const char* place, Access access) {
  auto& lock = locks[(u64)place / 16 % 1024];
  while (lock.exchange(true)) std::this_thread::yield();
  access();
  lock.store(false);
}
// Other processes do not see the locks: the second half, where LL128 has its flag, is written last and read first.
void write(char* to, u64 first, u64 second) {
  at_once(to, [&] { ((volatile u64*)to)[0] = first, ((volatile u64*)to)[1] = second; });
}
void read(const char* from, u64& first, u64& second) {
  at_once(from, [&] { second = ((const volatile u64*)from)[1], first = ((const volatile u64*)from)[0]; });
}
void raise_flag(u64* flag, u64 value) {
  __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
  if (running->draw(4) == 0) sleep_until(nanoseconds() + 20000);  // others see it before this block goes on
}
