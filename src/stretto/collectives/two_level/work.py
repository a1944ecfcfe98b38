"""What a collective that was started returns: on the CPU a thread runs it, on a GPU a stream."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from stretto.memory import PeerError


class Work(Protocol):
    """A collective on its way. Its tensors must not be written to, nor the output read, before `wait` has returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for its end; True. On a GPU the current stream waits and the host does not.

        timeout: for the host, on the CPU, besides the group's own limit. PeerError where a peer did not come in time.
        """
        ...

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        ...


class InOrder:
    """Runs collectives one after another in the order in which they were started, apart from the caller.

    Ranks that start them in one order so exchange messages of one collective at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None

    def start(self, run: Callable[[], None], tensors: tuple[Tensor, ...]) -> Work:
        """Start `run`, which reads and writes `tensors` and what it allocates itself."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream), torch.no_grad():
                run()
            for tensor in tensors:
                tensor.record_stream(self._stream)
            return _StreamWork(self._stream.record_event(), self._device)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-two-level")
        return _ThreadWork(self._thread.submit(torch.no_grad()(run)))

    def close(self) -> None:
        """Wait for what was started, and end."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)


class _ThreadWork:
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
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()
