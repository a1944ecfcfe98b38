# SPDX-License-Identifier: Apache-2.0
"""The streams of a call by copy engines, and copies and events on them, through the CUDA driver by ctypes.

torch's own streams and events take the host several times as long.
"""

import ctypes
from collections.abc import Hashable
from typing import Any, Protocol

import torch

SIDE_STREAMS = ("copy", "flag", "wait")


class CopyStreams(Protocol):
    """The streams of a call: "caller", the stream that was current at `fork`, and `SIDE_STREAMS`."""

    def fork(self) -> None:
        """Have the side streams go on after what the caller's stream has."""

    def handle(self, stream: str) -> int:
        """The handle of a stream, to launch on."""

    def mark(self, event: Hashable, stream: str) -> None:
        """Record an event on a stream; its name may be used again once `follow` has been called for it."""

    def follow(self, event: Hashable, stream: str) -> None:
        """Have a stream wait for an event."""

    def copy(self, target: int, source: int, num_bytes: int, stream: str) -> None:
        """Copy between addresses of GPUs that this one can reach, on a stream."""

    def join(self) -> None:
        """Have the caller's stream go on after the side streams."""


class CudaCopyStreams:
    """CUDA streams for copies. Works under graph capture: the streams fork from the caller's and join it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {name: torch.cuda.Stream(device, priority=-1) for name in SIDE_STREAMS}  # as the group's
        self._handles = {name: stream.cuda_stream for name, stream in self._streams.items()}
        self._events: dict[Hashable, torch.cuda.Event] = {}
        self._known: dict[Hashable, int] = {}
        driver = ctypes.CDLL("libcuda.so.1")
        self._copy = _declare(driver.cuMemcpyAsync, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._record = _declare(driver.cuEventRecord, ctypes.c_void_p, ctypes.c_void_p)
        self._wait = _declare(driver.cuStreamWaitEvent, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)

    def fork(self) -> None:
        """Have the side streams go on after what the caller's stream has."""
        self._handles["caller"] = torch._C._cuda_getCurrentRawStream(self._device.index)
        self.mark("forked", "caller")
        for stream in SIDE_STREAMS:
            self.follow("forked", stream)

    def handle(self, stream: str) -> int:
        """The handle of a stream, to launch on."""
        return self._handles[stream]

    def mark(self, event: Hashable, stream: str) -> None:
        """Record an event on a stream; its name may be used again once `follow` has been called for it."""
        known = self._known.get(event)
        if known is None:
            made = self._events[event] = torch.cuda.Event()
            made.record(self._streams.get(stream))  # torch creates the event when it is first recorded
            known = self._known[event] = made.cuda_event
        self._require(self._record(known, self._handles[stream]), "an event")

    def follow(self, event: Hashable, stream: str) -> None:
        """Have a stream wait for an event."""
        self._require(self._wait(self._handles[stream], self._known[event], 0), "a wait")

    def copy(self, target: int, source: int, num_bytes: int, stream: str) -> None:
        """Copy between addresses on a stream. Raises RuntimeError with CUDA's error number if it refuses."""
        self._require(self._copy(target, source, num_bytes, self._handles[stream]), f"a copy of {num_bytes} bytes")

    def join(self) -> None:
        """Have the caller's stream go on after the side streams."""
        for stream in SIDE_STREAMS:
            self.mark("joined", stream)
            self.follow("joined", "caller")

    def _require(self, result: int, what: str) -> None:
        if result:
            raise RuntimeError(f"{what} was refused: CUDA error {result}")


def _declare(function: Any, *arguments: Any) -> Any:
    function.argtypes = arguments
    return function
