// SPDX-License-Identifier: Apache-2.0
// The interpreter of schedules (MSCCLang, section 6.2): one launch, a CUDA block for each thread block of the
// schedule, all resident at once (cooperative), tile after tile, step after step.
//
// Waits: a receive waits for its message; a send for a free FIFO slot of its connection, which the receiver counts at the
// sender; a step that depends on another thread block's step for that block's count of ended steps, on this GPU. All
// counts carry the call's epoch in their upper half, so they need no reset. Reuse of memory: FIFOs and
// counts use two halves in turn, and no call ends before all ranks have begun it (the tokens at its end, or a fused
// kernel's messages): a rank that has begun call n has ended n - 1, so all have begun n - 1 and ended n - 2.
//
// Between nodes (BETWEEN_NODES is 1, and puts not 0) a connection uses Simple, whatever the protocol of the others: a message is the bytes of its
// tiles, in as many slots of pinned memory. The sender's block waits for a slot's credit, stores into a slot of its own, and
// after the barrier its leader posts a descriptor; the proxies carry it into the receiver's slot and count it. The
// receiver's leader waits for that count, its block reads the slot, and after the barrier the leader posts the credit. Both
// count on over calls, so these need neither halves nor tokens, which ranks of one node alone have.
//
// After a timed-out wait: the barrier after a step informs the whole block, which publishes nothing from then on, neither
// messages nor counts, to other ranks or thread blocks. Within a step, a vector that never arrived is not sent on.

#define SENDS 1
#define RECEIVES 2
#define REDUCES 4
#define READS 8
#define WRITES 16
#define COMPLETES 32
#define AWAITED 64
#define DIVIDES_LEFT 128
#define DIVIDES_RIGHT 256
#define SCRATCH 2

struct StepRow { int kind, source, destination, size, awaited_block, awaited_step; };
struct BlockRow {
  int send_peer, receive_peer, send_number, receive_number, first_step, steps;
  int puts_out, puts_in;  // whether it sends, and receives, between nodes; the numbers are then those of signals
  u64 send_start, send_stride, receive_start, receive_stride;  // FIFO slots: from the half's start, and their bytes
  u64 send_source;  // slots of this rank from which it is put
};

struct Call {
  char *input, *output, *scratch;
  u64 block_bytes, chunk_bytes, tile_bytes, num_vectors, tiles;
  u64 block_chunks, slots;  // slots: of each connection's FIFO

  // Where a chunk begins and how long it is: the last one of a block may be short. Scratch has whole chunks.
  __device__ __forceinline__ char* chunk(int place, u64& length) const {
    u32 buffer = (u32)place >> 28, index = place & 0x0fffffff;
    if (buffer == SCRATCH) {
      length = chunk_bytes;
      return scratch + index * chunk_bytes;
    }
    u64 start = index % block_chunks * chunk_bytes;
    length = chunk_length(block_bytes, start, chunk_bytes);
    return (buffer ? output : input) + index / block_chunks * block_bytes + start;
  }
};

// One step on one tile of its chunks. The received vector is the left operand, and the local one the right. put_bytes: of a
// chunk's tile between nodes.
__device__ __forceinline__ void do_step(const StepRow& step, const Call& call, u64 tile, const char* incoming, char* outgoing,
                                        u64 in_flag, u64 out_flag, Wait& wait, bool is_lost, u32 at_step, bool puts_in,
                                        bool puts_out, u64 put_bytes) {
#if PROTOCOL != SIMPLE
  // By the verifier's rules a forwarded message shows that its first sender has read all of it. LL and LL128 forward
  // vector by vector, so the relay of several chunks waits for all of them: otherwise the first chunk could return and
  // overwrite the next one before the sender has read it. (Within one chunk each vector overwrites only itself.)
  if (step.size > 1 && step.kind & RECEIVES && step.kind & SENDS && !puts_in) {
    for (int c = 0; c < step.size; ++c)
      for (u64 vector = threadIdx.x; vector < call.num_vectors; vector += blockDim.x) {
        Pack pack;
        do converge();
        while (!warp_all(take(incoming, c * call.num_vectors + vector, pack, in_flag) || !wait.again(at_step, FOR_MESSAGE)));
      }
    __syncthreads();
  }
#endif
  for (int c = 0; c < step.size; ++c) {
    u64 source_length = 0, destination_length = 0;
    const char* source = step.kind & READS ? call.chunk(step.source + c, source_length) : 0;
    char* destination = step.destination >= 0 ? call.chunk(step.destination + c, destination_length) : 0;
    for (u64 vector = threadIdx.x; vector < call.num_vectors; vector += blockDim.x) {
#if PROTOCOL == LL128
      u64 in_tile = vector / 8 * 120 + vector % 8 * 16;
      int width = vector % 8 == 7 ? 8 : 16;
#else
      u64 in_tile = vector * PACK_BYTES;
      int width = PACK_BYTES;
#endif
      width = valid(call.tile_bytes, in_tile, width);
      u64 at = tile * call.tile_bytes + in_tile;
      Pack pack;
      if (step.kind & RECEIVES && puts_in) {
        pack = load(incoming + c * put_bytes + in_tile, valid(put_bytes, in_tile, width));
      } else if (step.kind & RECEIVES) {
        do converge();
        while (!warp_all(take(incoming, c * call.num_vectors + vector, pack, in_flag) || !wait.again(at_step, FOR_MESSAGE)));
      }
      if (step.kind & REDUCES) {
        Pack left = step.kind & RECEIVES ? pack : load(destination + at, valid(destination_length, at, width));
        Wide wide_left = widen(left), wide_right = widen(load(source + at, valid(source_length, at, width)));
        if (step.kind & DIVIDES_LEFT) wide_left = divide_by_ranks(wide_left);
        if (step.kind & DIVIDES_RIGHT) wide_right = divide_by_ranks(wide_right);
        Wide sum = combine(wide_left, wide_right);
        pack = narrow(step.kind & COMPLETES ? divide_by_ranks(sum) : sum);
      } else if (!(step.kind & RECEIVES)) {
        pack = load(source + at, valid(source_length, at, width));
      }
      if (step.kind & WRITES) store(destination + at, pack, valid(destination_length, at, width));
      if (step.kind & SENDS) {
        const bool keeps = warp_any(is_lost || wait.is_given_up);
        converge();
        if (puts_out) {
          if (!is_lost) store(outgoing + c * put_bytes + in_tile, pack, valid(put_bytes, in_tile, width));
        } else if (!keeps) {
          put(outgoing, c * call.num_vectors + vector, pack, out_flag);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(512)
    run(char* input, char* output, char* scratch, u64 block_bytes, u64 chunk_bytes, u64 tile_bytes, u64 num_vectors,
        u64 tiles, u64 block_chunks, u64 slots, const BlockRow* blocks, const StepRow* steps, State* state, Report* report,
        u32* failed, u64 limit, u64 kernel, char* const* peers, u64 counts, u64 region, u64 half, u64 connections, u64 rank,
        const Puts* puts) {
  const Call call = {input,      output,      scratch, block_bytes,  chunk_bytes,
                     tile_bytes, num_vectors, tiles,   block_chunks, slots};
  const BlockRow block = blocks[blockIdx.x];
  const bool puts_out = BETWEEN_NODES && block.puts_out, puts_in = BETWEEN_NODES && block.puts_in;
  const u32 epoch = next_epoch(state);
  const u64 call_flag = (u64)epoch << 32, side = (epoch & 1) * half;
  const bool is_leader = threadIdx.x == 0;
  u64* ended = state->ended;
  char* own = peers[rank] + side;
  Wait wait(state, report, failed, limit, kernel, epoch);
  // Another thread block is late because a peer is: the wait for that peer times out first, and is the one recorded.
  Wait local_wait(state, report, failed, 2 * limit, kernel, epoch);
  if (blockIdx.x == 0)
    for (u32 peer = threadIdx.x; peer < WORLD; peer += blockDim.x)
      if (peer != rank && peers[peer]) raise_flag((u64*)(peers[peer] + side) + rank, call_flag);
  // Counts of messages that this rank has received, and of slots that are free again for it, by connection.
  u64* arrived = (u64*)(own + counts) + block.receive_number;
  u64* freed = (u64*)(own + counts) + connections + block.send_number;
  char* receiver = block.send_peer < 0 || puts_out ? 0 : peers[block.send_peer] + side;
  char* sender = block.receive_peer < 0 || puts_in ? 0 : peers[block.receive_peer] + side;
  u64* arrived_there = receiver ? (u64*)(receiver + counts) + block.send_number : 0;
  u64* freed_there = sender ? (u64*)(sender + counts) + connections + block.receive_number : 0;
  u64 sent = 0, received = 0, done = 0;
  // Messages that calls before this one have put; the signals of the peers' messages and credits.
  const u64 put_before = puts_out ? puts->passed[2 * blockIdx.x] : 0;
  const u64 got_before = puts_in ? puts->passed[2 * blockIdx.x + 1] : 0;
  const u32* credits = puts_out ? puts->signals + block.send_peer * puts->row + block.send_number + 1 : 0;
  const u32* messages = puts_in ? puts->signals + block.receive_peer * puts->row + block.receive_number : 0;
  bool is_lost = false;  // the same in all threads of the block
  for (u64 tile = 0; tile < tiles; ++tile) {
    for (int at = 0; at < block.steps; ++at) {
      const StepRow step = steps[block.first_step + at];
      if (is_leader) {
        if (step.awaited_block >= 0) {
          u64 target = tile * blocks[step.awaited_block].steps + step.awaited_step + 1;
          await_flag(ended + step.awaited_block, call_flag + target, local_wait, at, FOR_THREAD_BLOCK);
        }
        if (step.kind & SENDS && puts_out)
          await_count(credits, put_before + sent - slots + 1, wait, at, FOR_SLOT);
        else if (step.kind & SENDS && sent >= slots)
          await_flag(freed, call_flag + sent - slots + 1, wait, at, FOR_SLOT);
        if (step.kind & RECEIVES && puts_in) await_count(messages, got_before + received + 1, wait, at, FOR_MESSAGE);
#if PROTOCOL == SIMPLE
        else if (step.kind & RECEIVES)
          await_flag(arrived, call_flag + received + 1, wait, at, FOR_MESSAGE);
#endif
      }
      is_lost = __syncthreads_or(wait.is_given_up || local_wait.is_given_up);
      const u64 in_slot = (got_before + received) % slots * block.receive_stride;
      const u64 out_slot = (put_before + sent) % slots * block.send_stride;
      const char* incoming = (puts_in ? puts->slots : own + region) + block.receive_start + in_slot;
      char* outgoing = puts_out ? puts->slots + block.send_source + out_slot
                       : receiver     ? receiver + region + block.send_start + out_slot
                                      : 0;
      // The last tile's bytes are fewer, in whole vectors.
      const u64 put_bytes = chunk_length((call.chunk_bytes + 15) & ~15ull, tile * call.tile_bytes, call.tile_bytes);
      do_step(step, call, tile, incoming, outgoing, call_flag + received + 1, call_flag + sent + 1, wait, is_lost, at,
              puts_in, puts_out, put_bytes);
      ++done;
      if (step.kind & SENDS) ++sent;
      if (step.kind & RECEIVES) ++received;
      is_lost = __syncthreads_or(wait.is_given_up || local_wait.is_given_up);
      if (is_leader && !is_lost) {
        if (step.kind & SENDS && puts_out)
          post(*puts, block.send_peer, block.send_number, block.send_source + out_slot, block.send_start + out_slot,
               step.size * put_bytes, wait, at);
#if PROTOCOL == SIMPLE
        else if (step.kind & SENDS)
          raise_flag(arrived_there, call_flag + sent);
#endif
        if (step.kind & RECEIVES && puts_in)
          post(*puts, block.receive_peer, block.receive_number + 1, 0, 0, 0, wait, at);
        else if (step.kind & RECEIVES)
          raise_flag(freed_there, call_flag + received);
        if (step.kind & AWAITED) {
          __threadfence();
          *(volatile u64*)(ended + blockIdx.x) = call_flag + done;
        }
      }
    }
  }
  if (is_leader && puts_out) puts->passed[2 * blockIdx.x] = put_before + sent;
  if (is_leader && puts_in) puts->passed[2 * blockIdx.x + 1] = got_before + received;
  if (blockIdx.x == 0)  // a call's half may be written again once all ranks have begun the next one
    for (u32 peer = threadIdx.x; peer < WORLD; peer += blockDim.x)
      if (peer != rank && peers[peer]) await_flag((u64*)own + peer, call_flag, wait, TO_BEGIN, peer);
  local_wait.conclude();
  end_call(state, epoch, own, half, wait);
}
