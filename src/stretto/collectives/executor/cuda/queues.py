"""Streams beside the caller's, and copies on them."""

import ctypes
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Queues(Protocol):
    """Where copies and kernels are put in order: the caller's stream, which is current, "push" and "watch"."""

    def fork(self) -> None:
        """The others go on after what the caller's has."""

    def on(self, queue: str) -> AbstractContextManager[object]:
        """Launch and copy on one of the others."""

    def mark(self, event: object) -> None:
        """Name this place of the current one."""

    def follow(self, event: object) -> None:
        """The current one goes on after a marked place."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy between addresses of GPUs that this one sees, on the current one."""

    def join(self) -> None:
        """The caller's goes on after the others."""


class CudaQueues:
    """`Queues` as CUDA streams. Works while a graph is captured: the streams fork from the caller's and join it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {name: torch.cuda.Stream(device) for name in ("push", "watch")}
        self._events: dict[object, torch.cuda.Event] = {}
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def fork(self) -> None:
        """See `Queues`."""
        caller = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(caller)

    def on(self, queue: str) -> AbstractContextManager[object]:
        """See `Queues`."""
        return torch.cuda.stream(self._streams[queue])

    def mark(self, event: object) -> None:
        """See `Queues`."""
        known = self._events.get(event)
        if known is None:
            known = self._events[event] = torch.cuda.Event()
        known.record(torch.cuda.current_stream(self._device))

    def follow(self, event: object) -> None:
        """See `Queues`."""
        torch.cuda.current_stream(self._device).wait_event(self._events[event])

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """See `Queues`. RuntimeError with CUDA's number for what it refuses."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        result = self._copy(target, source, num_bytes, stream)
        if result:
            raise RuntimeError(f"a copy of {num_bytes} bytes was refused: CUDA error {result}")

    def join(self) -> None:
        """See `Queues`."""
        caller = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            caller.wait_stream(stream)
