// SPDX-License-Identifier: Apache-2.0
// The kernels that signal and wait beside copy engines: which peers may be written to, which messages have been sent, and
// which mailboxes a rank is done with. `base` counts the pieces of all calls before this one; a piece's epoch is its
// number among all.
//
// After a wait of this process has timed out, `signal_arrival` and `release_mailboxes` publish nothing, so that peers give
// up, too. Copies cannot be held back: they are queued when the call begins. So `wait_for_peers` waits even in a process
// that has failed elsewhere: nothing is copied to a peer that may still read its memory, until a wait of this very
// workspace has exceeded its limit.
#define KEY_BITS 24

// Before the first piece of a call: waits until all peers have begun it too, with the same symmetric tensor
// (`tensor_key`; 0: none). Before another piece: waits until they are done with the piece that used its mailbox set
// before. `entry_flags_offset`: where each rank's `entry_flags` lie in its memory; a flag is the call's epoch and the key.
extern "C" __global__ void wait_for_peers(State* state, Report* report, u32* failed, u64 limit, u64 kernel,
                                          const u64* base, u64 index, u64 num_mailbox_sets, u64 rank, u64 world,
                                          u64* release_flags, u64* const* peers, u64 entry_flags_offset,
                                          u64* entry_flags, u64 tensor_key) {
  const u64 epoch = *base + index + 1, entry = epoch << KEY_BITS;
  // Only a failure of this workspace itself ends this wait.
  Wait wait(state, report, &state->is_broken, limit, kernel, (u32)epoch);
  if (index == 0)
    for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x)
      if (peer != rank) raise_flag((u64*)((char*)peers[peer] + entry_flags_offset) + rank, entry | tensor_key);
  for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x) {
    if (peer == rank) continue;
    if (index) {
      await_epoch(release_flags + peer, epoch - num_mailbox_sets, wait, TO_BEGIN, (u32)peer);
    } else {
      await_epoch(entry_flags + peer, entry, wait, TO_BEGIN, (u32)peer);
      u64 seen = see_flag(entry_flags + peer);
      // A peer that is already one call ahead did not depend on this rank or its tensors.
      if (seen >> KEY_BITS == epoch && seen != (entry | tensor_key)) wait.give_up(TO_AGREE, (u32)peer);
    }
  }
  if (wait.is_given_up) *(volatile u32*)failed = 1;
}

// After a copy: signals that its message has arrived. Not after a timed-out wait: what was copied is then undefined, and
// the peers give up, too.
extern "C" __global__ void signal_arrival(const u32* failed, const u64* base, u64 index, u64* flag) {
  if (threadIdx.x == 0 && !*(const volatile u32*)failed) raise_flag(flag, *base + index + 1);
}

// After a piece whose mailbox set is used again, and the last one: allows peers to write to the set. The last one ends the
// call.
extern "C" __global__ void release_mailboxes(State* state, Report* report, u32* failed, u64 limit, u64 kernel,
                                             u64* base, u64 index, u64 is_last, u64 rank, u64 world,
                                             u64* const* peers, u64 release_flags_offset) {
  u64 epoch = *base + index + 1;
  Wait wait(state, report, failed, limit, kernel, (u32)epoch);
  for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x)
    if (peer != rank && !wait.is_given_up) raise_flag((u64*)((char*)peers[peer] + release_flags_offset) + rank, epoch);
  wait.conclude();
  __syncthreads();
  if (threadIdx.x == 0 && is_last) *base = epoch;
}
