"""Waiting for peers with a limit, and saying where it was when they did not come."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from stretto.collectives.two_level.transport import Transfer
from stretto.memory import PeerError

_LEAST = timedelta(milliseconds=1)  # 0 would mean no limit


@dataclass(frozen=True)
class Deadline:
    """The end of a collective's time, and the rank and the collective that errors name.

    `rank` of `world` is in the whole group; `place` says where that is, in words. On a GPU (`on_stream`) a limit would
    make the host wait: there NCCL's watchdog keeps the limit that the sub-groups were made with.
    """

    end: float
    seconds: float
    rank: int
    world: int
    place: str
    collective: str
    on_stream: bool

    @classmethod
    def start(
        cls, seconds: float, rank: int, world: int, place: str, collective: str, *, on_stream: bool
    ) -> "Deadline":
        """A limit of so many seconds from now."""
        return cls(time.monotonic() + seconds, seconds, rank, world, place, collective, on_stream)

    @contextmanager
    def watch(self, doing: str) -> Iterator[None]:
        """Turn what a backend raises into a PeerError with `doing` (phase, step, peer)."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise PeerError(self.describe(doing, str(error))) from error

    def wait(self, transfer: Transfer, doing: str) -> None:
        """Wait for a transfer. PeerError, with `doing`, where it fails or time is up."""
        left = timedelta(seconds=self.end - time.monotonic())
        with self.watch(doing):
            done = transfer.wait() if self.on_stream else transfer.wait(max(left, _LEAST))
            if not done:
                raise RuntimeError("it was not done within the limit, or aborted")

    def describe(self, doing: str, cause: str) -> str:
        """The words of the error."""
        if "imed out" in cause or "imeout" in cause:
            cause = f"not done within {self.seconds:g} s ({cause})"
        return f"rank {self.rank} of {self.world} ({self.place}), {self.collective}, {doing}: {cause}"
