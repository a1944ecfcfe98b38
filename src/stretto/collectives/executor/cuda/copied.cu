// What stands beside copy engines: who may be written to, what has been sent, and what a rank is done with. `base` counts
// the pieces of all calls before this one; a piece's tick is its number among all.

// Before a piece is pushed: all peers are done with what its slot held before.
extern "C" __global__ void begin(State* state, Report* report, u64 limit, u64 kernel, const u64* base, u64 index,
                                 u64 behind, u64 rank, u64 world, u64* done) {
  u64 tick = *base + index + 1, wanted = behind < index + 1 ? tick - behind : *base;
  Wait wait(state, report, limit, kernel, (u32)tick);
  for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x)
    if (peer != rank) await_tick(done + peer, wanted, wait, TO_BEGIN, (u32)peer);
}

// After a push: its message is there.
extern "C" __global__ void tell(const u64* base, u64 index, u64* flag) {
  if (threadIdx.x == 0) raise_flag(flag, *base + index + 1);
}

// After a piece whose slot is used again, and the last one: whoever pushes here may. The last one ends the call.
extern "C" __global__ void finish(u64* base, u64 index, u64 is_last, u64 rank, u64 world, u64* const* peers, u64 done) {
  u64 tick = *base + index + 1;
  for (u64 peer = threadIdx.x; peer < world; peer += blockDim.x)
    if (peer != rank) raise_flag((u64*)((char*)peers[peer] + done) + rank, tick);
  __syncthreads();
  if (threadIdx.x == 0 && is_last) *base = tick;
}
