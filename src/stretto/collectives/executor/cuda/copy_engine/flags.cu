// What stands beside copy engines: who may be written to, what has been sent, and what a rank is done with. `base` counts
// the pieces of all calls before this one; a piece's tick is its number among all.
//
// After a wait of this process was given up, `tell` and `finish` publish nothing, so that peers give up, too. What copy
// engines push cannot be held back: a call's copies are queued when it begins. So `begin` waits for the peers also in a
// process that has failed elsewhere: nothing is pushed to a peer that may still read what its memory holds, until a wait
// of this very workspace has outlasted its limit.
#define KEY_BITS 24

// Before the first piece of a call: all peers have begun it too, with the same symmetric tensor (`key`; 0: none). Before
// another piece is pushed: they are done with what its slot held before.
extern "C" __global__ void begin(State* state, Report* report, u32* failed, u64 limit, u64 kernel, const u64* base,
                                 u64 index, u64 behind, u64 rank, u64 world, u64* done, u64* const* peers, u64 enters,
                                 u64* entered, u64 key) {
  const u64 tick = *base + index + 1, entry = tick << KEY_BITS;
  // Released by this workspace's own failure alone.
  Wait wait(state, report, &state->is_broken, limit, kernel, (u32)tick);
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
  if (wait.is_given_up) *(volatile u32*)failed = 1;
}

// After a push: its message is there. Once a wait was given up nobody knows what was pushed, and so the peers give up too.
extern "C" __global__ void tell(const u32* failed, const u64* base, u64 index, u64* flag) {
  if (threadIdx.x == 0 && !*(const volatile u32*)failed) raise_flag(flag, *base + index + 1);
}

// After a piece whose slot is used again, and the last one: whoever pushes here may. The last one ends the call.
extern "C" __global__ void finish(State* state, Report* report, u32* failed, u64 limit, u64 kernel, u64* base, u64 index,
                                  u64 is_last, u64 rank, u64 world, u64* const* peers, u64 done) {
  u64 tick = *base + index + 1;
  Wait wait(state, report, failed, limit, kernel, (u32)tick);
  for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x)
    if (peer != rank && !wait.is_given_up) raise_flag((u64*)((char*)peers[peer] + done) + rank, tick);
  wait.conclude();
  __syncthreads();
  if (threadIdx.x == 0 && is_last) *base = tick;
}
