// The kernels that signal and wait beside copy engines: which peers may be written to, which messages have been sent, and
// which mailboxes a rank is done with. `base` counts the pieces of all calls before this one; a piece's tick is its number
// among all.
//
// After a wait of this process has timed out, `tell` and `finish` publish nothing, so that peers give up, too. Copies
// cannot be held back: they are queued when the call begins. So `begin` waits for the peers even in a process that has
// failed elsewhere: nothing is copied to a peer that may still read its memory, until a wait of this very workspace has
// exceeded its limit.
#define KEY_BITS 24

// Before the first piece of a call: waits until all peers have begun it too, with the same symmetric tensor (`key`; 0:
// none). Before another piece: waits until they are done with the piece that used its slot before.
extern "C" __global__ void begin(State* state, Report* report, u32* failed, u64 limit, u64 kernel, const u64* base,
                                 u64 index, u64 behind, u64 rank, u64 world, u64* done, u64* const* peers, u64 enters,
                                 u64* entered, u64 key) {
  const u64 tick = *base + index + 1, entry = tick << KEY_BITS;
  // Only a failure of this workspace itself ends this wait.
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
      // A peer that is a call ahead has needed nothing of this rank, nor of its tensors.
      if (seen >> KEY_BITS == tick && seen != (entry | key)) wait.give_up(TO_AGREE, (u32)peer);
    }
  }
  if (wait.is_given_up) *(volatile u32*)failed = 1;
}

// After a copy: signals that its message has arrived. Not after a timed-out wait: what was copied is then undefined, and
// the peers give up, too.
extern "C" __global__ void tell(const u32* failed, const u64* base, u64 index, u64* flag) {
  if (threadIdx.x == 0 && !*(const volatile u32*)failed) raise_flag(flag, *base + index + 1);
}

// After a piece whose slot is used again, and the last one: allows peers to write to the slot. The last one ends the call.
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
