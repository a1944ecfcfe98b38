"""The interface of symmetric memory, whatever it is made of."""

import time
from abc import ABC, abstractmethod
from types import TracebackType

from torch import Tensor

MASK = 0xFFFFFFFF
_SIGN = 0x80000000
_LOOKS_AT_ONCE = 4
_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3


class PeerError(RuntimeError):
    """Another rank did not do in time what this one waited for; the message names both."""


def has_reached(seen: int, target: int) -> bool:
    """Whether a counter that shows `seen` has got to `target`, also around 2^32: (int32)(seen - target) >= 0."""
    return not (seen - target) & _SIGN


class Backoff:
    """Pauses that grow from none to a millisecond, until `reset`: whoever is waited for may need this core."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """What was waited for has come."""
        self._looks = 0
        self._pause = _FIRST_PAUSE
        self._since: float | None = None

    def pause(self) -> float:
        """Pause, and return for how many seconds nothing has come."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        self._looks += 1
        if self._looks <= _LOOKS_AT_ONCE:
            time.sleep(0)
        else:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return now - self._since


MAX_BYTES = 1 << 40
MAX_SIGNALS = 1 << 20


class SymmetricMemory(ABC):
    """A buffer of `size` bytes on each of `world_size` ranks, and `signals` counters from each rank to each other.

    Signals are 32-bit counters that start at 0, count up, wrap around and are never reset: one for each (writer,
    reader, index). Only the writer counts it up, only the reader waits for it. Before a signal is seen, all that its
    writer had written to any buffer is; a wait that was met sees all that.

    `rank` and all peers are ranks in the group. Use it as a context manager, or call `close`.
    """

    rank: int
    world_size: int
    size: int
    signals: int

    @abstractmethod
    def buffer(self, rank: int | None = None) -> Tensor:
        """That rank's buffer (default: the own one) as uint8 [size], aligned to 64 bytes; zeros at first."""

    @abstractmethod
    def signal(self, peer: int, index: int) -> None:
        """Count up the own counter `index` at `peer`, after everything written so far."""

    @abstractmethod
    def wait(self, peer: int, index: int, target: int, timeout: float) -> None:
        """Wait until `peer`'s counter `index` here has reached `target`: (int32)(seen - target) >= 0.

        `timeout` is in seconds. PeerError, which names both ranks and the counter, when it runs out or the peer has
        died.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. What `buffer` returned stays valid, and keeps its memory, until it is dropped."""

    def __enter__(self) -> "SymmetricMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
