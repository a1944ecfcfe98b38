# SPDX-License-Identifier: Apache-2.0
"""Starts collectives one after another in a background thread, and waits for them with a time limit.

On a CPU a thread runs them, on a GPU a side stream. A two-level group has one for whole collectives, which also runs
their phases between nodes, and another for phases inside a node, while parts are pipelined.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from stretto.memory import PeerError


class Work(Protocol):
    """Handle of a collective that was started.

    Until `wait` has returned, do not write the collective's tensors, and do not read its output.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended; returns True. On a GPU the current stream waits and the host does not.

        timeout: for the host, on the CPU, in addition to the group's own limit. PeerError where a peer did not arrive
        in time.
        """
        ...

    def is_completed(self) -> bool:
        """Check whether the collective has ended, with or without an error."""
        ...


class MessageWork(Protocol):
    """Handle of a message in flight, as torch.distributed's Work."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait until the message has been received, or its buffer may be reused. RuntimeError if that takes too long.

        On a GPU the current stream waits; the host waits too if the limit is not 0.
        """
        ...


class SerialRunner:
    """Runs collectives one after another in the order in which they were started: in a thread, or on a side stream.

    If all ranks start them in one order, the messages of two collectives are never in flight at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None

    def start(self, run: Callable[[], None], tensors: tuple[Tensor, ...]) -> Work:
        """Start `run`, which reads and writes `tensors` and whatever it allocates itself."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream), torch.no_grad():
                run()
            for tensor in tensors:
                tensor.record_stream(self._stream)
            return _StreamWork(self._stream.record_event(), self._device)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-two-level")
        # In inference mode, or this thread could not write to inference tensors.
        return _ThreadWork(self._thread.submit(torch.inference_mode()(run)))

    def close(self) -> None:
        """Wait for all that was started, then end the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)


class InlineRunner:
    """Runs each collective at once, in the caller's thread and on its stream."""

    def start(self, run: Callable[[], None], tensors: tuple[Tensor, ...]) -> Work:
        run()
        return _DoneWork()


class _DoneWork:
    """Work that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _ThreadWork:
    """Work of a collective on the CPU."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except FutureTimeoutError as error:
            raise PeerError(f"the collective has not ended within {timeout}, and goes on") from error
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class _StreamWork:
    """Work of a collective on the side stream of a GPU."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()


_MIN_TIMEOUT = timedelta(milliseconds=1)  # 0 would mean no limit


@dataclass(frozen=True)
class Deadline:
    """The time limit of one collective, with the rank and the collective for error messages.

    `rank` of `world` is in the whole group; `place` says in words where that rank is. On a GPU (`on_stream`) a time
    limit would block the host; NCCL's watchdog enforces the limit that the sub-groups were made with instead.
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
        """A deadline that many seconds from now."""
        return cls(time.monotonic() + seconds, seconds, rank, world, place, collective, on_stream)

    @contextmanager
    def watch(self, doing: str) -> Iterator[None]:
        """Turn an error of the backend into a PeerError that names `doing` (phase, step, peer)."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise PeerError(self.describe(doing, str(error))) from error

    def wait(self, transfer: MessageWork, doing: str) -> None:
        """Wait for a message. PeerError, which names `doing`, if it fails or the time is up."""
        left = timedelta(seconds=self.end - time.monotonic())
        with self.watch(doing):
            done = transfer.wait() if self.on_stream else transfer.wait(max(left, _MIN_TIMEOUT))
            if not done:
                raise RuntimeError("it was not done within the limit, or aborted")

    def describe(self, doing: str, cause: str) -> str:
        if "imed out" in cause or "imeout" in cause:
            cause = f"not done within {self.seconds:g} s ({cause})"
        return f"rank {self.rank} of {self.world} ({self.place}), {self.collective}, {doing}: {cause}"
