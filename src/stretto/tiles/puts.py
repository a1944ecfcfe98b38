# SPDX-License-Identifier: Apache-2.0
"""Puts to ranks whose memory the GPU cannot map, on the device: slices go through pinned slots, and a proxy sends them.

A slice's way: `await_credit` waits until the peer has read the slot's last slice (its credit), the program stores into
`outgoing_slice`, and `put_slice` posts a descriptor to the proxy's FIFO. The proxy sends the bytes to the peer's
proxy, which stores them into the same slot there and counts up the signal. There `wait_slice` waits for it, the program
loads from `arrived_slice`, once, and `release_slice` gives the credit back, as a put of 0 bytes.

The host's part is `PutChannel`; descriptors and FIFO are described in `stretto.memory.network.descriptors`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto.memory.network import descriptors
from stretto.tiles.call_state import may_publish
from stretto.tiles.waits import OF_CREDIT, OF_FIFO, OF_SLICE, READS_PER_CLOCK, wait_until, watch_clock

_WORDS = tl.constexpr(descriptors.WORDS)
_OFFSET_BITS = tl.constexpr(descriptors.OFFSET_BITS)
_PEER_SHIFT = tl.constexpr(descriptors.PEER_SHIFT)
_SIGNAL_SHIFT = tl.constexpr(descriptors.SIGNAL_SHIFT)
_PUT_AND_SIGNAL = tl.constexpr(descriptors.PUT_AND_SIGNAL << descriptors.KIND_SHIFT)


class Puts(NamedTuple):
    """Kernel argument: a `PutChannel` in one call; made by `PutChannel.begin`.

    rank, world: this rank and the number of ranks. slots, slot_bytes: slots for each peer and direction. slices:
    signals of slices, for each pair of ranks; as many credits as slots follow them. capacity: of a FIFO. lanes: FIFOs,
    each with a proxy and connections of its own; a signal always goes by the same. region: the buffer's number, in its
    place in a descriptor. operator: its number in the failure record.
    In pinned memory: signals, int32 [world, slices + slots], what each rank has counted up here; buffer, uint8, the
    slots of arriving slices, [world, slots, slot_bytes], then those of outgoing ones; fifo, int64 [lanes, capacity,
    4]; tail, int64 [lanes].
    In device memory: tickets, int64 [lanes, 2], the next ticket and the tail that was seen last; used, int32 [world,
    slots], how often each slot was put; taken, int32 [world, slices], how many slices of each signal were taken.
    state, report, failed, begun_in_kernel: of waits, as in `Channel`.
    """

    rank: Any
    world: Any
    slots: Any
    slot_bytes: Any
    slices: Any
    capacity: Any
    lanes: Any
    region: Any
    operator: Any
    signals: Any
    buffer: Any
    fifo: Any
    tail: Any
    tickets: Any
    used: Any
    taken: Any
    state: Any
    report: Any
    failed: Any
    begun_in_kernel: Any = tl.constexpr(False)


@triton.jit
def outgoing_slice(puts, slot, peer):  # type: ignore[no-untyped-def]
    """Return a pointer (uint8) to the slot from which the next slice is put to `peer`, after `await_credit`."""
    return puts.buffer + _outgoing(puts, slot, peer)


@triton.jit
def arrived_slice(puts, slot, peer):  # type: ignore[no-untyped-def]
    """Return a pointer (uint8) to the slot into which `peer` has put a slice. Add the zero of `wait_slice` to loads."""
    tl.device_assert((slot >= 0) & (slot < puts.slots), "there is no such slot")
    return puts.buffer + tl.cast(peer * puts.slots + slot, tl.int64) * puts.slot_bytes


@triton.jit
def await_credit(puts, slot, peer):  # type: ignore[no-untyped-def]
    """Wait until `peer` has released all slices that were put to it through this slot; returns the opaque zero.

    A slot belongs to one program of a launch. Order: stores through the zero come after the peer's loads (acquire at
    system scope of the credit, which follows them).
    """
    at = peer * puts.slots + slot
    used = tl.atomic_add(puts.used + at, 0, sem="relaxed", scope="gpu")
    word = peer * (puts.slices + puts.slots) + puts.slices + slot
    return wait_until(puts, word, used, OF_CREDIT, slot, slot, peer, False)


@triton.jit
def put_slice(puts, slot, size, peer, signal):  # type: ignore[no-untyped-def]
    """Put the first `size` bytes of a slot to `peer`, and count up this rank's `signal` there when they have arrived.

    Order: the block's barrier, so that all threads' stores into the slot come before the descriptor, whose first word
    is a release at system scope. After a failed wait nothing is posted.
    Reuse: `await_credit` before the next store into the slot.
    """
    tl.device_assert((size >= 0) & (size <= puts.slot_bytes), "the slice is larger than its slot")
    tl.device_assert((signal >= 0) & (signal < puts.slices), "there is no such signal")
    tl.debug_barrier()
    tl.atomic_add(puts.used + peer * puts.slots + slot, 1, sem="relaxed", scope="gpu")
    source = _outgoing(puts, slot, peer)
    there = tl.cast(puts.rank * puts.slots + slot, tl.int64) * puts.slot_bytes
    _post(puts, peer, signal, source, there, size)


@triton.jit
def wait_slice(puts, peer, signal):  # type: ignore[no-untyped-def]
    """Wait until the next slice with `signal` has come from `peer`; returns the opaque zero, to be added to its loads.

    A signal is waited for by one program of a launch. Order: acquire at system scope of the counter, which the proxy
    stores after the slice's bytes, and after all bytes that the peer put before with this signal.
    """
    taken = tl.atomic_add(puts.taken + peer * puts.slices + signal, 0, sem="relaxed", scope="gpu")
    word = peer * (puts.slices + puts.slots) + signal
    return wait_until(puts, word, taken + 1, OF_SLICE, signal, signal, peer, False)


@triton.jit
def release_slice(puts, slot, peer, signal):  # type: ignore[no-untyped-def]
    """Give the slot of a slice that was read back to `peer`: its credit goes up by one.

    Order: the block's barrier, so that all threads have loaded, then the descriptor, with release at system scope.
    """
    tl.debug_barrier()
    tl.atomic_add(puts.taken + peer * puts.slices + signal, 1, sem="relaxed", scope="gpu")
    _post(puts, peer, puts.slices + slot, tl.cast(0, tl.int64), tl.cast(0, tl.int64), 0)


@triton.jit
def _outgoing(puts, slot, peer):  # type: ignore[no-untyped-def]
    """Return a slot's offset in the buffer."""
    tl.device_assert((peer >= 0) & (peer < puts.world), "there is no such rank to put to")
    tl.device_assert((slot >= 0) & (slot < puts.slots), "there is no such slot")
    return tl.cast((puts.world + peer) * puts.slots + slot, tl.int64) * puts.slot_bytes


@triton.jit
def _post(puts, peer, signal, source, there, size):  # type: ignore[no-untyped-def]
    """Take a ticket and write its descriptor into the FIFO.

    Order: three words are stored, then the first one is exchanged with release at system scope, by the same thread.
    Each has the phase of the ticket's lap, by which the proxy sees that it is new.
    """
    lane = signal % puts.lanes
    ticket = tl.atomic_add(puts.tickets + 2 * lane, 1, sem="relaxed", scope="gpu")
    _await_room(puts, lane, ticket, peer)
    lap = ticket // puts.capacity
    phase = ((lap & 1) ^ 1) << 63
    words = puts.fifo + (lane * puts.capacity + ticket % puts.capacity) * _WORDS
    head = (tl.cast(peer, tl.int64) << _PEER_SHIFT) | (tl.cast(signal, tl.int64) << _SIGNAL_SHIFT) | puts.operator
    region = tl.cast(puts.region, tl.int64) << _OFFSET_BITS
    publishes = may_publish(puts)
    tl.store(words + 3, tl.cast(size, tl.int64) | phase, mask=publishes)
    tl.store(words + 2, region | there | phase, mask=publishes)
    tl.store(words + 1, region | source | phase, mask=publishes)
    tl.atomic_xchg(words, head | _PUT_AND_SIGNAL | phase, mask=publishes, sem="release", scope="sys")


@triton.jit
def _await_room(puts, lane, ticket, peer):  # type: ignore[no-untyped-def]
    """Wait until the proxy has read the descriptor whose place the ticket takes.

    The tail that some program saw last is in device memory; the proxy's own, in pinned memory, is read only if the FIFO
    looks full by that one. Atomics give all threads of the block the same value.
    """
    seen = puts.tickets + (2 * lane + 1)
    tail = tl.atomic_add(seen, 0, sem="relaxed", scope="gpu")
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = ticket - tail >= puts.capacity
    while waits:
        tail = tl.atomic_add(puts.tail + lane, 0, sem="acquire", scope="sys")
        tl.atomic_max(seen, tail, sem="relaxed", scope="gpu")
        waits = ticket - tail >= puts.capacity
        looks += 1
        if waits & (looks % READS_PER_CLOCK == 0):
            began, waits = watch_clock(
                puts, began, looks, OF_FIFO, 0, 0, peer, tail.to(tl.int32), (ticket - puts.capacity + 1).to(tl.int32)
            )


@triton.jit
def gather_slices(puts, shard, out, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """All-gather by puts alone: each program sends its pieces of the shard to every other rank, through its own slot.

    shard: int32 [words]; out: int32 [world, words]; a piece has BLOCK words, at most a slot's. One program a slot.
    Signals: the program's, with each piece. Waits: for a slot's credit before it is written to, and for the same piece
    of each other rank. No cycle: a program puts a piece to all ranks before it waits for theirs, and needs for the next
    piece only that they have read this one.
    """
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    for piece in range(program, tl.cdiv(words, BLOCK), tl.num_programs(0)):
        at = piece * BLOCK + index
        mask = at < words
        value = tl.load(shard + at, mask=mask)
        tl.store(out + (puts.rank * words + at), value, mask=mask)
        size = tl.minimum(words - piece * BLOCK, BLOCK) * 4
        for distance in range(1, puts.world):
            peer = (puts.rank + distance) % puts.world
            zero = await_credit(puts, program, peer)
            slot = outgoing_slice(puts, program, peer).to(tl.pointer_type(tl.int32))
            tl.store(tl.multiple_of(slot + zero, 16) + index, value, mask=mask)
            put_slice(puts, program, size, peer, program)
        for distance in range(1, puts.world):
            peer = (puts.rank + puts.world - distance) % puts.world
            zero = wait_slice(puts, peer, program)
            slot = arrived_slice(puts, program, peer).to(tl.pointer_type(tl.int32))
            arrived = tl.load(tl.multiple_of(slot + zero, 16) + index, mask=mask)
            tl.store(out + (peer * words + at), arrived, mask=mask)
            release_slice(puts, program, peer, program)
