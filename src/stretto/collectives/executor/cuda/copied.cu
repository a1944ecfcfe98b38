// What stands beside copy engines: who may be written to, what has been sent, and what a rank is done with. `base` counts
// the pieces of all calls before this one; a piece's tick is its number among all.
#define KEY_BITS 24

// Before the first piece of a call: all peers have begun it too, with the same symmetric tensor (`key`; 0: none). Before
// another piece is pushed: they are done with what its slot held before.
extern "C" __global__ void begin(State* state, Report* report, u64 limit, u64 kernel, const u64* base, u64 index,
                                 u64 behind, u64 rank, u64 world, u64* done, u64* const* peers, u64 enters, u64* entered,
                                 u64 key) {
  const u64 tick = *base + index + 1, entry = tick << KEY_BITS;
  Wait wait(state, report, limit, kernel, (u32)tick);
  if (index == 0)
    for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x)
      if (peer != rank) raise_flag((u64*)((char*)peers[peer] + enters) + rank, entry | key);
  for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x) {
    if (peer == rank) continue;
    if (index) {
      await_tick(done + peer, tick - behind, wait, TO_BEGIN, (u32)peer);
    } else {
      await_tick(entered + peer, entry, wait, TO_BEGIN, (u32)peer);
      u64 seen = see_flag(entered + peer);
      // One that is a call ahead has needed nothing of this rank, nor of its tensors.
      if (seen >> KEY_BITS == tick && seen != (entry | key)) wait.give_up(TO_AGREE, (u32)peer);
    }
  }
}

// After a push: its message is there. Once a wait was given up nobody knows what was pushed, and so the peers give up too.
extern "C" __global__ void tell(const State* state, const u64* base, u64 index, u64* flag) {
  if (threadIdx.x == 0 && !*(const volatile u32*)&state->is_broken) raise_flag(flag, *base + index + 1);
}

// After a piece whose slot is used again, and the last one: whoever pushes here may. The last one ends the call.
extern "C" __global__ void finish(u64* base, u64 index, u64 is_last, u64 rank, u64 world, u64* const* peers, u64 done) {
  u64 tick = *base + index + 1;
  for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x)
    if (peer != rank) raise_flag((u64*)((char*)peers[peer] + done) + rank, tick);
  __syncthreads();
  if (threadIdx.x == 0 && is_last) *base = tick;
}
