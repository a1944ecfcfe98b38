# SPDX-License-Identifier: Apache-2.0
"""Descriptors of puts, and the FIFO by which programs and the host pass them to the proxy.

A descriptor is four 8-byte words. The highest bit of each is the FIFO's phase: 1 in the first lap, 0 in the second, and
so on, so that the proxy recognizes a descriptor as complete once all four words have its lap's phase, in whatever order
they arrive. Below it, from the highest bits down:

    word 0    kind (3 bits), peer (20), signal (20), operator (20)
    word 1    source: region (23), offset (40)
    word 2    destination at the peer: region (23), offset (40)
    word 3    zeros (23), bytes (40)

Synchronization. Producers take tickets; ticket t is written into slot t % capacity. The proxy reads slots in the order
of tickets and then stores the number of tickets that it has read into `tail`. A producer reads `tail` only if the FIFO
looks full, and writes ticket t once `tail` has passed t - capacity. The payload is stored before the descriptor's first
word, which is a release at system scope; the proxy reads that word with acquire.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.memory.symmetric import Backoff, find_fence

WORDS = 4
PHASE = 1 << 63
OFFSET_BITS, REGION_BITS, RANK_BITS, SIGNAL_BITS, OPERATOR_BITS = 40, 23, 20, 20, 20
PUT_AND_SIGNAL, PUT = 1, 2
KIND_SHIFT, PEER_SHIFT, SIGNAL_SHIFT = 60, 40, 20
CAPACITY = 1024


class Put(NamedTuple):
    """One put: `size` bytes from (source_region, source) here to (region, offset) at `peer`, then its signal.

    signal: index of this rank's counter in the peer's region, which goes up by 1; None: no counter. operator: a number
    for messages.
    """

    peer: int
    source_region: int
    source: int
    region: int
    offset: int
    size: int
    signal: int | None
    operator: int = 0


_BITS = (RANK_BITS, REGION_BITS, OFFSET_BITS, REGION_BITS, OFFSET_BITS, OFFSET_BITS, SIGNAL_BITS, OPERATOR_BITS)
"""The bits of a put's fields."""


def pack(put: Put) -> tuple[int, int, int, int]:
    """The descriptor's words, with phase 0. ValueError for numbers that do not fit their bits."""
    peer, source_region, source, region, offset, size, signal, operator = put
    kind, signal = (PUT, 0) if signal is None else (PUT_AND_SIGNAL, signal)
    # One look for all, since puts of few bytes are to be quick: a number that is negative shifts to -1.
    if (
        (peer >> RANK_BITS | signal >> SIGNAL_BITS | operator >> OPERATOR_BITS)
        or (source_region | region) >> REGION_BITS
        or (source | offset | size) >> OFFSET_BITS
    ):
        for (name, value), bits in zip(put._replace(signal=signal)._asdict().items(), _BITS, strict=True):
            if not 0 <= value < 1 << bits:
                nearest = min(max(value, 0), (1 << bits) - 1)
                raise ValueError(f"a put's {name} is {value}, and must have {bits} bits: {nearest} would do")
    return (
        kind << KIND_SHIFT | peer << PEER_SHIFT | signal << SIGNAL_SHIFT | operator,
        source_region << OFFSET_BITS | source,
        region << OFFSET_BITS | offset,
        size,
    )


def unpack(words: tuple[int, int, int, int]) -> Put:
    """Read a descriptor's words, of any phase. ValueError for words that are none."""
    head, source, destination, size = (word & ~PHASE for word in words)
    kind = head >> KIND_SHIFT
    if kind not in (PUT, PUT_AND_SIGNAL) or size >> OFFSET_BITS:
        raise ValueError(f"{tuple(map(hex, words))} are no descriptor of a put")
    signal = head >> SIGNAL_SHIFT & (1 << SIGNAL_BITS) - 1
    offset = (1 << OFFSET_BITS) - 1
    return Put(
        head >> PEER_SHIFT & (1 << RANK_BITS) - 1,
        source >> OFFSET_BITS,
        source & offset,
        destination >> OFFSET_BITS,
        destination & offset,
        size,
        signal if kind == PUT_AND_SIGNAL else None,
        head & (1 << OPERATOR_BITS) - 1,
    )


class Fifo:
    """A FIFO of descriptors in host memory that the proxy reads: both ends of it on the host.

    words: int64 [capacity, 4], zeros at first, where capacity is a power of two; tail: int64 [1]. For kernels both are
    pinned. One thread posts; posted: the descriptors so far.
    """

    def __init__(self, words: Tensor, tail: Tensor) -> None:
        self.words, self.tail = words, tail
        self.capacity = len(words)
        if self.capacity & (self.capacity - 1) or not self.capacity:
            raise ValueError(f"a FIFO has a power of two of descriptors, not {self.capacity}")
        self._words = memoryview(words.view(-1).numpy()).cast("B").cast("Q")  # type: ignore[arg-type]
        self._tail = memoryview(tail.numpy()).cast("B").cast("Q")  # type: ignore[arg-type]
        self.posted = 0
        self._taken = 0
        self._fence = find_fence()

    @classmethod
    def allocate(cls, capacity: int = CAPACITY) -> "Fifo":
        """Allocate a FIFO that only the host posts to."""
        return cls(
            torch.zeros(capacity, WORDS, dtype=torch.int64, device="cpu"),
            torch.zeros(1, dtype=torch.int64, device="cpu"),
        )

    def post(self, put: Put, timeout: float) -> None:
        """Write a put's descriptor, once there is room. TimeoutError if the proxy makes none in `timeout` seconds."""
        words = pack(put)
        if self.posted - self._tail[0] >= self.capacity:
            self._wait_for_room(timeout)
        phase = PHASE if not self.posted // self.capacity & 1 else 0
        at = self.posted % self.capacity * WORDS
        for index in (3, 2, 1):
            self._words[at + index] = words[index] | phase
        if self._fence is not None:
            self._fence()
        self._words[at] = words[0] | phase
        self.posted += 1

    def _wait_for_room(self, timeout: float) -> None:
        backoff = Backoff()
        while self.posted - self._tail[0] >= self.capacity:
            if backoff.pause() > timeout:
                raise TimeoutError(f"the proxy has read none of {self.capacity} descriptors for {timeout:g} s")

    def take(self) -> tuple[int, int, int, int] | None:
        """The next descriptor's words, for the proxy; None if it is not complete yet."""
        at = self._taken % self.capacity * WORDS
        phase = PHASE if not self._taken // self.capacity & 1 else 0
        words = self._words[at], self._words[at + 1], self._words[at + 2], self._words[at + 3]
        if any(word & PHASE != phase for word in words):
            return None
        if self._fence is not None:
            self._fence()
        self._taken += 1
        self._tail[0] = self._taken
        return words

    def wait_until_read(self, seconds: float) -> bool:
        """Wait until the proxy has read all descriptors that the host has posted; False after so many seconds."""
        deadline, backoff = time.monotonic() + seconds, Backoff()
        while self._tail[0] < self.posted:
            if time.monotonic() > deadline:
                return False
            backoff.pause()
        return True
