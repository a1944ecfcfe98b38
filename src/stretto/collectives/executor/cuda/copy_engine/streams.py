"""Streams beside the caller's, and copies on them: by handles, since torch's words for them take the host long."""

import ctypes
from collections.abc import Hashable
from typing import Any, Protocol

import torch

SIDE_STREAMS = ("push", "tell", "watch")


class CopyStreams(Protocol):
    """The streams of a call: "caller", the stream that was current at `fork`, and `SIDE_STREAMS`."""

    def fork(self) -> None:
        """The others go on after what the caller's has."""

    def handle(self, queue: str) -> int:
        """Of one of them, to launch on."""

    def mark(self, event: Hashable, queue: str) -> None:
        """Name this place of one of them; a name may be given again once it was followed."""

    def follow(self, event: Hashable, queue: str) -> None:
        """One of them goes on after a marked place."""

    def copy(self, target: int, source: int, num_bytes: int, queue: str) -> None:
        """Copy between addresses of GPUs that this one sees, on one of them."""

    def join(self) -> None:
        """The caller's goes on after the others."""


class CudaCopyStreams:
    """CUDA streams for copies. Works under graph capture: the streams fork from the caller's and join it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {name: torch.cuda.Stream(device) for name in SIDE_STREAMS}
        self._handles = {name: stream.cuda_stream for name, stream in self._streams.items()}
        self._events: dict[Hashable, torch.cuda.Event] = {}
        self._known: dict[Hashable, int] = {}
        driver = ctypes.CDLL("libcuda.so.1")
        self._copy = _declare(driver.cuMemcpyAsync, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._record = _declare(driver.cuEventRecord, ctypes.c_void_p, ctypes.c_void_p)
        self._wait = _declare(driver.cuStreamWaitEvent, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)

    def fork(self) -> None:
        """See `CopyStreams`."""
        self._handles["caller"] = torch._C._cuda_getCurrentRawStream(self._device.index)
        self.mark("forked", "caller")
        for queue in SIDE_STREAMS:
            self.follow("forked", queue)

    def handle(self, queue: str) -> int:
        """See `CopyStreams`."""
        return self._handles[queue]

    def mark(self, event: Hashable, queue: str) -> None:
        """See `CopyStreams`."""
        known = self._known.get(event)
        if known is None:
            made = self._events[event] = torch.cuda.Event()
            made.record(self._streams.get(queue))  # torch makes it when it is first recorded
            known = self._known[event] = made.cuda_event
        self._require(self._record(known, self._handles[queue]), "an event")

    def follow(self, event: Hashable, queue: str) -> None:
        """See `CopyStreams`."""
        self._require(self._wait(self._handles[queue], self._known[event], 0), "a wait")

    def copy(self, target: int, source: int, num_bytes: int, queue: str) -> None:
        """See `CopyStreams`. RuntimeError with CUDA's number for what it refuses."""
        self._require(self._copy(target, source, num_bytes, self._handles[queue]), f"a copy of {num_bytes} bytes")

    def join(self) -> None:
        """See `CopyStreams`."""
        for queue in SIDE_STREAMS:
            self.mark("joined", queue)
            self.follow("joined", "caller")

    def _require(self, result: int, what: str) -> None:
        if result:
            raise RuntimeError(f"{what} was refused: CUDA error {result}")


def _declare(function: Any, *arguments: Any) -> Any:
    function.argtypes = arguments
    return function
