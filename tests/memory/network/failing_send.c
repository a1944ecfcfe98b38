// SPDX-License-Identifier: Apache-2.0
// failing_send PROXY: ends a proxy while a second thread's call that sends fails. Prints "ended", or is ended by a signal.
// The program's own `sendmsg` goes before the C library's, also in the proxy's library.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { kPuts = 16, kBytes = 1 << 16, kWorld = 2 };

static atomic_int is_armed, is_sending, may_fail;
static uint64_t words[2 * kPuts][4], tail;
static uint8_t memory[kWorld][64 + kBytes];

ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  static ssize_t (*stock)(int, const struct msghdr*, int);
  if (!stock) stock = (ssize_t (*)(int, const struct msghdr*, int))dlsym(RTLD_NEXT, "sendmsg");
  if (message->msg_iovlen < kPuts || !atomic_exchange(&is_armed, 0)) return stock(fd, message, flags);
  atomic_store(&is_sending, 1);
  while (!atomic_load(&may_fail)) usleep(1000);
  errno = EPIPE;
  return -1;
}

static void* fail_later(void* unused) {
  usleep(200000);  // the proxy is being closed by then
  atomic_store(&may_fail, 1);
  return unused;
}

#define FIND(result, name, ...) result (*name)(__VA_ARGS__) = (result (*)(__VA_ARGS__))dlsym(library, #name)

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
  if (!library) return 2;
  FIND(void*, proxy_open, int, int, const uint8_t*, double, int, const char*, int*);
  FIND(void, proxy_add_peer, void*, int, const char*, int);
  FIND(void, proxy_start, void*);
  FIND(void, proxy_add_region, void*, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, const uint64_t*, int);
  FIND(void, proxy_add_fifo, void*, uint64_t, uint64_t, uint64_t, int);
  FIND(void, proxy_close, void*, double);
  uint8_t token[16] = {0};
  uint64_t near[kWorld] = {0};
  void* proxies[kWorld];
  int ports[kWorld];
  for (int rank = 0; rank < kWorld; ++rank) proxies[rank] = proxy_open(rank, kWorld, token, 30.0, 1, "127.0.0.1", &ports[rank]);
  for (int rank = 0; rank < kWorld; ++rank) {
    proxy_add_peer(proxies[rank], 1 - rank, "127.0.0.1", ports[1 - rank]);
    proxy_start(proxies[rank]);
    proxy_add_region(proxies[rank], 0, (uint64_t)memory[rank], 64, kBytes, 4, near, kWorld);
  }
  uint64_t phase = 1ull << 63;
  for (int number = 0; number < kPuts; ++number) {  // of all bytes to the other rank, with signal 0
    words[number][0] = 1ull << 60 | 1ull << 40 | phase;
    words[number][1] = words[number][2] = phase;
    words[number][3] = kBytes | phase;
  }
  atomic_store(&is_armed, 1);
  proxy_add_fifo(proxies[0], (uint64_t)words, 2 * kPuts, (uint64_t)&tail, 1);
  while (!atomic_load(&is_sending)) usleep(1000);
  pthread_t later;
  pthread_create(&later, NULL, fail_later, NULL);
  alarm(10);
  proxy_close(proxies[0], 0.0);
  pthread_join(later, NULL);
  proxy_close(proxies[1], 0.0);
  puts("ended");
  return 0;
}
