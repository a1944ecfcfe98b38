# SPDX-License-Identifier: Apache-2.0
"""The interface of symmetric memory and its signals, how a process polls for a peer, and fences between the two."""

import ctypes
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum

from torch import Tensor

from stretto import counters

MAX_BYTES = 1 << 40
MAX_SIGNALS = 1 << 20
MASK = 0xFFFFFFFF
_SIGN = 0x80000000
_LOOKS_AT_ONCE = 4
_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


class Reach(Enum):
    """The way in which a rank gets data into a peer's memory: by loads and stores, or by puts, between nodes."""

    LOADS_AND_STORES = "loads and stores"
    PUTS = "puts"


class SymmetricMemory(ABC):
    """A buffer of `size` bytes on each of `world_size` ranks, and `signals` counters from each rank to each other.

    Signals are 32-bit counters that start at 0, count up, wrap around and are never reset: one for each (writer,
    reader, index). Only the writer increments it, only the reader waits for it. A reader that sees a signal, or whose
    wait for it has returned, also sees everything that the writer wrote to any buffer before it.

    `rank` and all peers are ranks in the group. `reach[peer]`: whether this rank maps the peer's buffer, or puts to it
    (`HostMemory.put`). Use it as a context manager, or call `close`.
    """

    rank: int
    world_size: int
    size: int
    signals: int

    @property
    def reach(self) -> tuple[Reach, ...]:
        """The way in which this rank gets data into each rank's buffer."""
        return (Reach.LOADS_AND_STORES,) * self.world_size

    @abstractmethod
    def buffer(self, rank: int | None = None) -> Tensor:
        """A rank's buffer (default: this rank's) as uint8 [size], aligned to 64 bytes; initially zeros."""

    @abstractmethod
    def signal(self, peer: int, index: int) -> None:
        """Increment this rank's counter `index` at `peer`, after everything written so far."""

    @abstractmethod
    def wait(self, peer: int, index: int, target: int, timeout: float) -> None:
        """Wait until `peer`'s counter `index` here has reached `target`: (int32)(seen - target) >= 0.

        `timeout` is in seconds. PeerError, which names both ranks and the counter, on a time-out or if the peer has
        died.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the memory. Tensors that `buffer` returned keep theirs until they are dropped."""

    def __enter__(self) -> "SymmetricMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PeerError(RuntimeError):
    """A wait for another rank has timed out, or the rank has died; the message names both ranks."""


def has_reached(seen: int, target: int) -> bool:
    """Check whether a 32-bit counter at `seen` has reached `target`, with wrap-around: (int32)(seen - target) >= 0."""
    return not (seen - target) & _SIGN


class Backoff:
    """Pauses between polls that grow from 0 to 1 ms until `reset`: the rank that is waited for may need this core.

    sleep: what pauses, given the seconds; constant: of all pauses, where whatever is waited for ends them.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep, constant: float | None = None) -> None:
        self._sleep, self._constant = sleep, constant
        self.reset()

    def reset(self) -> None:
        """Start again with short pauses: something has arrived."""
        self._looks = 0
        self._pause = _FIRST_PAUSE
        self._since: float | None = None

    def pause(self) -> float:
        """Pause, and return the seconds since the first pause after `reset`."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        self._looks += 1
        if self._looks <= _LOOKS_AT_ONCE and self._constant is None:
            self._sleep(0)
            return now - self._since
        wait = counters.begin_wait("a peer") if counters.current_name() == 0 else None
        try:
            self._sleep(self._constant or self._pause)
        finally:
            counters.end_wait(wait)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return now - self._since


_TOTAL_STORE_ORDER = {"x86_64", "AMD64", "i686", "i386", "s390x"}
_MEMBARRIER = {"aarch64": 283, "riscv64": 283, "loongarch64": 283, "ppc64le": 365, "x86_64": 324}  # system call numbers
_GLOBAL_EXPEDITED = 1 << 1


def find_fence() -> Callable[[], None] | None:
    """A full memory fence to call between the data and the counter, on both sides; None where the CPU needs none.

    Counters and data are stored and loaded by separate calls into compiled code (torch, memoryview), which no compiler
    reorders; only the CPU could. x86 and s390x keep stores ordered with stores, and loads with loads and with later
    stores, which is all that publishing, reading and freeing need; a copy that bypasses the cache ends with a fence of
    its own (sfence, in glibc). Other CPUs guarantee none of that, and Python has no fence. There it is the system call
    membarrier, which is a full barrier for its caller too (smp_mb() at its entry and exit, in Linux's
    kernel/sched/membarrier.c). OSError where it is missing.
    """
    if platform.machine() in _TOTAL_STORE_ORDER:
        return None
    return membarrier()


def membarrier() -> Callable[[], None]:
    """The system call membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) as a fence; OSError where the system has none."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None or platform.system() != "Linux":
        raise OSError(f"no memory fence is known for {platform.system()} on {platform.machine()}")
    call = ctypes.CDLL(None, use_errno=True).syscall

    def fence() -> None:
        if call(number, _GLOBAL_EXPEDITED, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"membarrier: {os.strerror(code)}")

    fence()
    return fence
