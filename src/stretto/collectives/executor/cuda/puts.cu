// SPDX-License-Identifier: Apache-2.0
// Puts to ranks of other nodes, which a proxy sends: descriptors in a FIFO of pinned memory, as
// stretto/memory/network/descriptors.py describes them. Its constants are repeated here.

#define PUT_AND_SIGNAL 1ull

// slots: this rank's buffer, of arriving slots, then leaving ones; signals: of each rank, `row` of them, what it has
// counted up here; passed: by thread block, the messages that earlier calls have sent, and received. All but `tickets` (the
// next one, and the tail that was seen last) and `passed` are in pinned memory.
struct Puts {
  u64 *words, *tail, *tickets;
  char* slots;
  const u32* signals;
  u64* passed;
  u64 row, region, capacity;  // the last is a power of two
};

// Counts go up by one and wrap around.
__device__ __forceinline__ void await_count(const u32* count, u32 target, Wait& wait, u32 level, u32 message) {
  while ((int)(see_count(count) - target) < 0 && wait.again(level, message)) {
  }
}

// Put `bytes` from `source` of this rank's buffer to `there` of the peer's, and count up `signal` there. By one thread, after
// a barrier of the block, so that what others have stored, or loaded, comes before: the first word is a release at system
// scope. The tail in pinned memory is read only if the FIFO looks full by the one that was seen last.
__device__ __forceinline__ void post(const Puts& puts, u64 peer, u64 signal, u64 source, u64 there, u64 bytes, Wait& wait,
                                     u32 level) {
  const u64 ticket = atomicAdd(puts.tickets, 1ull);
  volatile u64* seen = puts.tickets + 1;
  if (ticket - *seen >= puts.capacity) {
    u64 tail;
    while (ticket - (tail = see_flag(puts.tail)) >= puts.capacity && wait.again(level, FOR_ROOM)) {
    }
    *seen = tail;
  }
  if (wait.is_given_up) return;
  const u64 phase = (u64)!(ticket & puts.capacity) << 63, region = puts.region << 40;  // 1 in the first lap
  volatile u64* words = puts.words + (ticket & (puts.capacity - 1)) * 4;
  words[3] = bytes | phase;
  words[2] = region | there | phase;
  words[1] = region | source | phase;
  raise_flag((u64*)words, PUT_AND_SIGNAL << 60 | peer << 40 | signal << 20 | phase);
}
