// SPDX-License-Identifier: Apache-2.0
// Two proxies of this process, whose threads a sanitizer watches: FIFOs of the host and of kernels are written while
// connections break, memory is freed with puts on their way, and the proxies end. Prints the counts of signals.

#include "proxy.cpp"

#include <cstdio>
#include <random>

namespace {

constexpr uint64_t kBytes = 1 << 20, kPlaces = 64, kSignals = 512, kPadBytes = 2 * kSignals * 4;
constexpr int kPuts = 400, kHostPuts = 100, kRounds = 6;

struct Rank {
  void* proxy = nullptr;
  int port = 0;
  std::vector<uint8_t> memory = std::vector<uint8_t>(kPadBytes + kBytes);
  std::vector<uint64_t> posted = std::vector<uint64_t>(4 * kPlaces), written = std::vector<uint64_t>(4 * kPlaces);
  uint64_t tails[2] = {0, 0};

  uint32_t* counter(int peer, uint64_t signal) {
    return reinterpret_cast<uint32_t*>(memory.data()) + peer * kSignals + signal;
  }

  // As a kernel: puts the first bytes into the second half of the peer's buffer.
  void write(uint64_t ticket, int peer, uint64_t size) {
    while (ticket - std::atomic_ref(tails[1]).load(std::memory_order_acquire) >= kPlaces) std::this_thread::yield();
    uint64_t* slot = written.data() + ticket % kPlaces * 4;
    uint64_t phase = ticket / kPlaces & 1 ? 0 : kPhase;
    std::atomic_ref(slot[3]).store(size | phase, std::memory_order_relaxed);
    std::atomic_ref(slot[2]).store(kBytes / 2 | phase, std::memory_order_relaxed);
    std::atomic_ref(slot[1]).store(phase, std::memory_order_relaxed);
    std::atomic_ref(slot[0]).store(1ull << 60 | uint64_t(peer) << 40 | 1 << 20 | phase, std::memory_order_release);
  }
};

void run_round(int round) {
  Rank ranks[2];
  uint8_t token[16] = {7};
  uint64_t near[2] = {0, 0};
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].proxy = proxy_open(rank, 2, token, 30.0, 1, "127.0.0.1", &ranks[rank].port);
  }
  for (int rank = 0; rank < 2; ++rank) {
    Rank& one = ranks[rank];
    proxy_add_peer(one.proxy, 1 - rank, "127.0.0.1", ranks[1 - rank].port);
    proxy_start(one.proxy);
    proxy_add_region(one.proxy, 0, reinterpret_cast<uint64_t>(one.memory.data()), kPadBytes, kBytes, kSignals, near, 2);
    proxy_add_fifo(one.proxy, reinterpret_cast<uint64_t>(one.posted.data()), kPlaces,
                   reinterpret_cast<uint64_t>(&one.tails[0]), 0);
    proxy_add_fifo(one.proxy, reinterpret_cast<uint64_t>(one.written.data()), kPlaces,
                   reinterpret_cast<uint64_t>(&one.tails[1]), 1);
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      for (int number = 0; number < kPuts; ++number) {
        ranks[rank].write(number, 1 - rank, number % 3 ? 0 : 4096 + 1024 * (number % 64));
        if (number % 7 == 0) proxy_wake(ranks[rank].proxy);
      }
    });
    threads.emplace_back([&, rank] {
      for (int number = 0; number < kHostPuts; ++number) {
        while (proxy_put(ranks[rank].proxy, number, 1 - rank, 0, 0, 0, kBytes - 8, 8, 2) < 0) std::this_thread::yield();
        proxy_await(ranks[rank].proxy, reinterpret_cast<uint64_t>(ranks[rank].counter(1 - rank, 2)), number + 1, 5.0);
      }
    });
  }
  threads.emplace_back([&] {
    std::mt19937 drawn(round);
    for (int number = 0; number < 20; ++number) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      int rank = drawn() % 2;
      proxy_break_connection(ranks[rank].proxy, 1 - rank);
    }
  });
  for (auto& thread : threads) thread.join();
  double deadline = now() + 20.0;
  for (int rank = 0; rank < 2; ++rank) {
    std::atomic_ref counter(*ranks[rank].counter(1 - rank, 1));
    while (counter.load() < kPuts && now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    printf("%u\n", counter.load());
  }
  for (int number = 0; number < 40; ++number) ranks[0].write(kPuts + number, 1, 1 << 16);
  if (round % 2) proxy_remove_region(ranks[0].proxy, 0, round == 1 ? 0.0 : 1.0);
  std::thread first([&] { proxy_close(ranks[0].proxy, round % 2 ? 1.0 : 0.0); });
  proxy_close(ranks[1].proxy, 0.5);
  first.join();
  for (Rank& one : ranks) proxy_free(one.proxy);
}

}  // namespace

int main() {
  for (int round = 0; round < kRounds; ++round) run_round(round);
  return 0;
}
