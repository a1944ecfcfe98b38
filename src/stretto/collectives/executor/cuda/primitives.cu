// SPDX-License-Identifier: Apache-2.0
// Building blocks of collectives' kernels: how messages are written, published, awaited and read. Macros that must be
// defined before it: ELEMENT (the C++ type), OPERATION (SUM, MAX, MIN, PROD), IS_AVERAGE, PROTOCOL (LL, LL128, SIMPLE),
// WORLD, UNROLL.
//
// A thread handles one vector at once: PACK_BYTES of a chunk, which take 16 bytes of a message. Vector v begins at
// byte 16 v of the message. The layout of a message (`put`, `take`):
//
//     LL, 8 bytes of data a vector; each store of 16 bytes carries two flags, which are the halves of one 64-bit flag:
//
//         byte 0           4                8               12             16
//         | data 0 to 3    | flag, upper 32 | data 4 to 7    | flag, lower 32 |   vector 0
//
//     LL128, a line of 128 bytes is eight vectors of eight threads: 120 bytes of data, then a flag of 8 bytes:
//
//         byte 0        16       32            96       112          120         128
//         | vector 0    | vector 1 | ... | vector 6      | vector 7: data | flag      |
//         | data 0..15  | 16..31   | ... | 96..111       | 112..119       | 64 bits   |
//
//     Simple, 16 bytes of data a vector, and its flag outside of the message.
//
// How data is published: LL writes 4 bytes of data followed by a 4-byte flag, twice in a 16-byte store; LL128 writes
// lines of 120 bytes of data and an 8-byte flag, eight threads a line in one store of a warp, which NVLink keeps whole
// (one store: the warp must have reconverged after any branch, `converge`, and also before it reads a line); Simple writes
// data, then a barrier of the block, and one thread raises a flag (fence and release, system). A reader of LL and LL128
// reads data and flag together until the flag is right; a reader of Simple waits for the flag (acquire, system), then a
// barrier of the block.
//
// Every flag carries its call's number (`epoch`) in its upper half, and counts only if that is the current call's: flags
// of earlier calls never match, so no flag needs a reset. Numbers have 32 bits and wrap around; before they do, memory
// that no call has written to for long is cleared (`end_call`), and 0 is no call's number. A call uses one of two halves
// of each rank's memory, by the parity of its number.
//
// After a wait of this process has timed out, in any group, nothing is published: a thread that has given up, or begins
// when the process has failed (`Wait`), writes no LL message, its warp no LL128 line (`warp_any`), and its block raises no
// flag of Simple. So no message holds data that never arrived, and the peers' waits time out, too. Nor does a thread store
// to memory whose reuse it has not awaited. Tokens, by which ranks signal that they have begun a call, carry no data and
// are always sent.

#define SUM 0
#define MAX 1
#define MIN 2
#define PROD 3
#define LL 0
#define LL128 1
#define SIMPLE 2
#define PACK_BYTES (PROTOCOL == LL ? 8 : 16)
#define WORDS (PACK_BYTES / 8)
#define EACH _Pragma("unroll") for (int u = 0; u < UNROLL; ++u)
#define MAX_BLOCKS 1024
#define FLAGS 32768  // bytes from a rank's memory's start, after the tokens of up to 4096 ranks
#define POLLS_BETWEEN_LOOKS 2048
#ifndef CALLS_BETWEEN_CLEANINGS
#define CALLS_BETWEEN_CLEANINGS (1u << 28)  // a power of 2, and far from 2^32
#endif
#define TO_BEGIN 0xffffffffu  // in a report, instead of a level or step: the wait was for a rank to begin
#define TO_AGREE 0xfffffffeu  // the same: the rank has begun another call
#define FOR_MESSAGE 0u  // in a report of the interpreter: the kind of a step's wait
#define FOR_SLOT 1u
#define FOR_THREAD_BLOCK 2u
#define FOR_ROOM 3u

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
struct Pack { u64 words[WORDS]; };

// Sums are made in fp32 for 16-bit types, otherwise in the type itself.
template <typename T> struct Wider { typedef T type; };
template <> struct Wider<bf16> { typedef float type; };
template <> struct Wider<fp16> { typedef float type; };
typedef Wider<ELEMENT>::type wide_t;
#define ELEMENTS (PACK_BYTES / sizeof(ELEMENT))
struct Wide { wide_t values[ELEMENTS]; };

template <typename T> __device__ __forceinline__ T widen(T x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return from_bf16(x.bits); }
__device__ __forceinline__ float widen(fp16 x) { return from_fp16(x.bits); }
template <typename T> __device__ __forceinline__ void narrow(T& to, T x) { to = x; }
__device__ __forceinline__ void narrow(bf16& to, float x) { to.bits = to_bf16(x); }
__device__ __forceinline__ void narrow(fp16& to, float x) { to.bits = to_fp16(x); }

union PackedElements {
  Pack pack;
  ELEMENT elements[ELEMENTS];
  __device__ PackedElements() {}
};

__device__ __forceinline__ Wide widen(const Pack& pack) {
  PackedElements packed;
  packed.pack = pack;
  Wide wide;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) wide.values[i] = widen(packed.elements[i]);
  return wide;
}

__device__ __forceinline__ Pack narrow(const Wide& wide) {
  PackedElements packed;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) narrow(packed.elements[i], wide.values[i]);
  return packed.pack;
}

// NaN propagates, as in torch.maximum.
template <typename T> __device__ __forceinline__ T combine(T a, T b) {
#if OPERATION == SUM
  return a + b;
#elif OPERATION == PROD
  return a * b;
#elif OPERATION == MAX
  return a != a || a > b ? a : b;
#else
  return a != a || a < b ? a : b;
#endif
}

__device__ __forceinline__ Wide combine(const Wide& a, const Wide& b) {
  Wide sum;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) sum.values[i] = combine(a.values[i], b.values[i]);
  return sum;
}

// For an average: applied once to each sum, where it is whole. Where sums of some ranks' inputs travel in 16 bits, in
// which they might overflow, it is applied to each input before it is added, as NCCL does it.
__device__ __forceinline__ Wide divide_by_ranks(Wide wide) {
#if IS_AVERAGE
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) wide.values[i] = wide.values[i] / (wide_t)WORLD;
#endif
  return wide;
}

// An element is read in parts of up to 32 bits.
#define PART ((int)sizeof(ELEMENT) < 4 ? (int)sizeof(ELEMENT) : 4)
__device__ __forceinline__ u32 load_part(const char* from) {
  return PART == 1 ? *(const unsigned char*)from : PART == 2 ? *(const unsigned short*)from : *(const u32*)from;
}

// The user's tensors have any alignment and length: whole, aligned vectors take one or two accesses, others one for each
// element.
//
// Elements past the end are read from the first one's address and masked, in 32-bit words. The obvious code, zeros that
// conditional loads overwrite, is miscompiled: ptxas 13.0 to 13.5 ignores the latency of zeroing a pair of registers
// (CS2R) if a predicated write follows, so that sums included stale registers
// (docs/decisions/017-masked-tails.md).
__device__ __noinline__ Pack load_slowly(const char* from, int bytes) {
  Pack pack;
  const int count = bytes / (int)sizeof(ELEMENT);
  if (count <= 0) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) pack.words[i] = 0;
    return pack;
  }
  u32 halves[2 * WORDS];
#pragma unroll
  for (int half = 0; half < 2 * WORDS; ++half) {
    u32 bits = 0;
#pragma unroll
    for (int byte = 0; byte < 4; byte += PART) {
      const int at = half * 4 + byte, element = at / (int)sizeof(ELEMENT), within = at % (int)sizeof(ELEMENT);
      const u32 mask = element < count ? 0xffffffffu >> (32 - 8 * PART) : 0;
      bits |= (load_part(from + (element < count ? element : 0) * (int)sizeof(ELEMENT) + within) & mask) << 8 * byte;
    }
    halves[half] = bits;
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i) pack.words[i] = (u64)halves[2 * i + 1] << 32 | halves[2 * i];
  return pack;
}

__device__ __noinline__ void store_slowly(char* to, Pack pack, int bytes) {
  PackedElements packed;
  packed.pack = pack;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i)
    if ((int)((i + 1) * sizeof(ELEMENT)) <= bytes) ((ELEMENT*)to)[i] = packed.elements[i];
}

// LL128 has 120 bytes of data a line, so every other line of an aligned tensor begins 8 bytes off a multiple of 16, and
// every line's last vector has 8 bytes: all of these use accesses of 8 bytes. (The second word is always loaded, from a
// valid address: a predicated load would overwrite a zero, see above.)
__device__ __forceinline__ bool is_in_words(const char* at, int bytes) {
  return PROTOCOL == LL128 && !((u64)at & 7) && (bytes == 16 || bytes == 8);
}

__device__ __forceinline__ Pack load(const char* from, int bytes) {
  if (is_in_words(from, bytes)) {
    Pack pack;
    pack.words[0] = *(const u64*)from;
    pack.words[WORDS - 1] = *(const u64*)(from + (bytes == 16 ? 8 : 0));
    return pack;
  }
  if (PROTOCOL != LL128 && bytes == PACK_BYTES && !((u64)from & (PACK_BYTES - 1)))
    return *(const Pack*)__builtin_assume_aligned(from, PACK_BYTES);
  return load_slowly(from, bytes);
}

__device__ __forceinline__ void store(char* to, const Pack& pack, int bytes) {
  if (is_in_words(to, bytes)) {
    *(u64*)to = pack.words[0];
    if (bytes == 16) *(u64*)(to + 8) = pack.words[WORDS - 1];
  } else if (PROTOCOL != LL128 && bytes == PACK_BYTES && !((u64)to & (PACK_BYTES - 1))) {
    *(Pack*)__builtin_assume_aligned(to, PACK_BYTES) = pack;
  } else {
    store_slowly(to, pack, bytes);
  }
}

// The length of a chunk: the last one of a block is shorter where the elements do not divide evenly.
__device__ __forceinline__ u64 chunk_length(u64 block_bytes, u64 start, u64 chunk_bytes) {
  u64 left = block_bytes > start ? block_bytes - start : 0;
  return left < chunk_bytes ? left : chunk_bytes;
}

__device__ __forceinline__ int valid(u64 length, u64 at, int width) {
  u64 left = length > at ? length - at : 0;
  return left < width ? (int)left : width;
}

// The state of waits: their time limit, and where a failure is recorded. `State` is in this GPU's memory (its
// `ended` counts the steps of the interpreter's thread blocks; `is_broken` is set by the first wait of this workspace
// that times out, `has_followed` by the first kernel that ends early because another workspace's did). `Report` is the
// workspace's failure record in pinned host memory, and `failed` the process's failure flag on this GPU
// (stretto.memory.failures).
struct State { u32 epochs[MAX_BLOCKS]; u32 is_broken, blocks_done; u64 ended[MAX_BLOCKS]; u32 has_followed, unused; };
struct Report { u32 kind, kernel, epoch, block, level, message, unused[2]; u64 limit, free; u32* summary; };
#define GAVE_UP 1u  // kinds of a report
#define FOLLOWED 0x7fffffffu  // as in stretto.memory.failures

__device__ __forceinline__ bool has_failed(const u32* failed) { return *(const volatile u32*)failed != 0; }

__device__ void write_report(Report* report, u32 kind, u64 limit, u32 kernel, u32 epoch, u32 level, u32 message) {
  report->kernel = kernel;
  report->epoch = epoch;
  report->block = blockIdx.x;
  report->level = level;
  report->message = message;
  report->limit = limit;
  __threadfence_system();
  *(volatile u32*)&report->kind = kind;
  __threadfence_system();
  *(volatile u32*)report->summary = 1;
}

__device__ __noinline__ void record_failure(State* state, Report* report, u32* failed, u64 limit, u32 kernel, u32 epoch,
                                            u32 level, u32 message) {
  bool is_first = atomicExch(&state->is_broken, 1) == 0;
  __threadfence();  // a kernel that sees the flag, and follows, sees `is_broken` too
  *(volatile u32*)failed = 1;
  if (is_first) write_report(report, GAVE_UP, limit, kernel, epoch, level, message);
}

__device__ __noinline__ void record_following(State* state, Report* report, u32 kernel, u32 epoch) {
  __threadfence();
  if (*(volatile u32*)&state->is_broken || atomicExch(&state->has_followed, 1)) return;
  write_report(report, FOLLOWED, 0, kernel, epoch, 0, 0);
}

// The time at which an unsuccessful wait began, in nanoseconds; 0 if it must give up.
__device__ __noinline__ u64 look_around(State* state, Report* report, u32* failed, u64 limit, u32 kernel, u32 epoch,
                                        u64 began, u32 level, u32 message) {
  u64 now = nanoseconds();
  if (!began) began = now;
  if (has_failed(failed)) return 0;
  if (now - began < limit) return began;
  record_failure(state, report, failed, limit, kernel, epoch, level, message);
  return 0;
}

// Its slow paths are separate functions with parameters by value, so that a wait itself stays in registers.
struct Wait {
  State* state;
  Report* report;
  u32* failed;
  u64 limit;
  u32 kernel, epoch;
  u32 polls = 0;
  u64 began = 0;
  bool is_given_up;

  // A kernel of a process that has failed gives up at once: the host checks nothing when a graph is replayed.
  __device__ __forceinline__ Wait(State* state, Report* report, u32* failed, u64 limit, u64 kernel, u32 epoch)
      : state(state), report(report), failed(failed), limit(limit), kernel((u32)kernel), epoch(epoch),
        is_given_up(has_failed(failed)) {}

  // Whether to poll again, after an unsuccessful poll. Once one wait of the process has timed out, all others give up.
  __device__ __forceinline__ bool again(u32 level, u32 message) {
    if (is_given_up) return false;
    if (++polls % POLLS_BETWEEN_LOOKS) return true;
    began = look_around(state, report, failed, limit, kernel, epoch, began, level, message);
    is_given_up = !began;
    return !is_given_up;
  }

  __device__ __forceinline__ void give_up(u32 level, u32 message) {
    is_given_up = true;
    record_failure(state, report, failed, limit, kernel, epoch, level, message);
  }

  // At a kernel's end: this workspace's results are invalid, too, if another's failure has ended its waits.
  __device__ __forceinline__ void conclude() {
    if (is_given_up) record_following(state, report, kernel, epoch);
  }
};

// `flag` is the call's epoch in its upper half; the lower half distinguishes messages that share a place.
__device__ __forceinline__ void put(char* message, u64 vector, const Pack& pack, u64 flag) {
#if PROTOCOL == LL
  store_relaxed(message + vector * 16, (pack.words[0] & 0xffffffff) | (flag & 0xffffffff00000000),
                 pack.words[0] >> 32 | flag << 32);
#elif PROTOCOL == LL128
  store_relaxed(message + vector * 16, pack.words[0], vector % 8 == 7 ? flag : pack.words[WORDS - 1]);
#else
  store_weak(message + vector * 16, pack.words[0], pack.words[WORDS - 1]);
#endif
}

// Reads a vector of a message; returns whether it has arrived (Simple: it has, since its flag was awaited before).
__device__ __forceinline__ bool take(const char* message, u64 vector, Pack& pack, u64 flag) {
  u64 first, second;
  load_relaxed(message + vector * 16, first, second);
#if PROTOCOL == LL
  pack.words[0] = second << 32 | (first & 0xffffffff);
  return (u32)(first >> 32) == (u32)(flag >> 32) && (u32)(second >> 32) == (u32)flag;
#else
  pack.words[0] = first;
  pack.words[WORDS - 1] = second;
  return PROTOCOL == SIMPLE || vector % 8 != 7 || second == flag;
#endif
}

// With LL128, a vote of the warp: whether the predicate holds in all threads; otherwise the thread's own predicate. Eight
// threads read a line, but only one of them its flag, so that the others need its result.
__device__ __forceinline__ bool warp_all(bool predicate) {
#if PROTOCOL == LL128
  return __all_sync(0xffffffffu, predicate);
#else
  return predicate;
#endif
}

// The same vote for whether the predicate holds in any thread: it suppresses a message, with LL that of the thread alone,
// with LL128 the warp's lines if one of its threads has given up. (With Simple the whole block votes, at a barrier.)
__device__ __forceinline__ bool warp_any(bool predicate) {
#if PROTOCOL == LL128
  return __any_sync(0xffffffffu, predicate);
#else
  return predicate;
#endif
}

// Before lines are put or taken. The flag's thread has fewer bytes of the user's data than the others and takes other
// branches: by itself it could read a flag after the others have read memory from before the line.
__device__ __forceinline__ void converge() {
#if PROTOCOL == LL128
  __syncwarp();
#endif
}

// Whether a flag that counts within a call (its lower half) has reached its target. It never shows a later call: its flags
// are in the other half of the memory, or on this GPU, where calls do not overlap.
__device__ __forceinline__ bool has_reached(u64 seen, u64 value) { return seen >> 32 == value >> 32 && (u32)seen >= (u32)value; }

__device__ __forceinline__ void await_flag(const u64* flag, u64 value, Wait& wait, u32 level, u32 message) {
  while (!has_reached(see_flag(flag), value) && wait.again(level, message)) {
  }
}

// The same for epochs of 64 bits (of copy engines' pieces), which never wrap around.
__device__ __forceinline__ void await_epoch(const u64* flag, u64 epoch, Wait& wait, u32 level, u32 message) {
  while (see_flag(flag) < epoch && wait.again(level, message)) {
  }
}

// This call's number. 2^32 - 1, which is odd, is followed by 2: parities alternate, and cleared memory shows 0.
__device__ __forceinline__ u32 next_epoch(const State* state) {
  u32 next = state->epochs[blockIdx.x] + 1;
  return next ? next : 2;
}

// The last block of a call clears the half that the call used. No peer writes to it then: its messages of this call have
// been received, and it sends into this half again only after this rank has begun its next call. (The interpreter's
// counts of free slots may arrive later; they show this call, as they should.)
__device__ __noinline__ void clean(State* state, char* memory, u64 bytes) {
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&state->blocks_done, 1) == gridDim.x - 1;
    __threadfence();
  }
  if (!__syncthreads_or(is_last)) return;
  for (u64 at = threadIdx.x; at < bytes / 8; at += blockDim.x) ((u64*)memory)[at] = 0;
  for (u32 block = threadIdx.x; block < MAX_BLOCKS; block += blockDim.x) state->ended[block] = 0;
  if (threadIdx.x == 0) state->blocks_done = 0;
}

// memory, bytes: the half of this rank's memory that the call used.
__device__ __forceinline__ void end_call(State* state, u32 epoch, char* memory, u64 bytes, Wait& wait) {
  wait.conclude();
  __syncthreads();
  if (threadIdx.x == 0) state->epochs[blockIdx.x] = epoch;
  if (blockIdx.x == 0)  // a call with more blocks may follow
    for (u32 block = gridDim.x + threadIdx.x; block < MAX_BLOCKS; block += blockDim.x) state->epochs[block] = epoch;
  if (epoch >= CALLS_BETWEEN_CLEANINGS && (epoch & (CALLS_BETWEEN_CLEANINGS - 1)) < 2) clean(state, memory, bytes);
}
