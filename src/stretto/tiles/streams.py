# SPDX-License-Identifier: Apache-2.0
"""CUDA streams and driver calls by handles: functions that torch lacks, or whose torch versions cost the host too much.

One operator makes dozens of copies and signals, and on some hosts each costs ten microseconds through torch.
"""

import ctypes
import functools
from typing import Any

import torch

_MAX_KEPT = 64
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_BY_ADDRESS = 4  # CU_MEMORYTYPE_UNIFIED
_kept: dict[int, torch.cuda.Stream] = {}


def find_handle(device: torch.device) -> int:
    """Return the current stream's handle."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def find_current(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream as a cached object; torch makes a new one each time."""
    handle = find_handle(device)
    stream = _kept.get(handle)
    if stream is None or stream.device_index != device.index:  # the default stream's handle is 0 on every device
        if len(_kept) == _MAX_KEPT:
            _kept.clear()
        stream = _kept[handle] = torch.cuda.current_stream(device)
    return stream


class SideStream:
    """A side stream for copies, which forks from and joins whichever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._opened, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._before: list[tuple[int, int, int]] = []

    def open(self) -> None:
        """Fork: order later work of this stream after the current stream's work so far."""
        self._opened.record(find_current(self.device))
        self.stream.wait_event(self._opened)

    def join(self) -> None:
        """Join: order later work of the current stream after this stream's work so far."""
        self._joined.record(self.stream)
        find_current(self.device).wait_event(self._joined)

    def __enter__(self) -> None:
        """Make this the current stream until exit."""
        self._before.append(torch._C._cuda_getCurrentStream(self.device.index))
        stream = self.stream
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *exception: object) -> None:
        torch._C._cuda_setStream(*self._before.pop())


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: a copy of rows that are `pitch` bytes apart, each starting at a column."""

    _fields_ = [
        field
        for end in ("source", "target")
        for field in (
            (f"{end}_column", ctypes.c_size_t),
            (f"{end}_row", ctypes.c_size_t),
            (f"{end}_kind", ctypes.c_int),
            (f"{end}_host", ctypes.c_void_p),
            (f"{end}_device", ctypes.c_uint64),
            (f"{end}_array", ctypes.c_void_p),
            (f"{end}_pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class Driver:
    """CUDA's driver functions by raw addresses and stream handles. RuntimeError if a call fails."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        word = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._copy = _declare(library.cuMemcpyAsync, [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, word[0]])
        self._copy_rows = _declare(library.cuMemcpy2DAsync_v2, [ctypes.POINTER(_Memcpy2D), word[0]])
        self._await = _declare(library.cuStreamWaitValue32_v2, word)
        self._write = _declare(library.cuStreamWriteValue32_v2, word)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Copy `size` bytes between addresses, in stream order."""
        failed = self._copy(destination, source, size, stream)
        if failed:
            raise RuntimeError(f"CUDA error {failed} of a copy of {size} bytes")

    def copy_rows(self, target: tuple[int, int], source: tuple[int, int], size: int, count: int, stream: int) -> None:
        """Copy `count` rows of `size` bytes between addresses and pitches (bytes from row to row), in stream order."""
        rows = _Memcpy2D(width=size, height=count)
        rows.target_kind = rows.source_kind = _BY_ADDRESS
        (rows.target_device, rows.target_pitch), (rows.source_device, rows.source_pitch) = target, source
        failed = self._copy_rows(ctypes.byref(rows), stream)
        if failed:
            raise RuntimeError(f"CUDA error {failed} of a copy of {count} rows of {size} bytes")

    def await_count(self, address: int, count: int, stream: int) -> None:
        """Make the stream wait until an int32 has reached `count`, then set it to 0."""
        failed = self._await(stream, address, count, _AT_LEAST) or self._write(stream, address, 0, 0)
        if failed:
            raise RuntimeError(
                f"CUDA error {failed}: this driver's streams cannot wait for a word in memory, as copies of tiles that "
                'a kernel stores do; operators do without them by a plan with transfer="programs"'
            )


@functools.cache
def find_driver() -> Driver:
    """Return this machine's driver, loaded once."""
    return Driver()


def _declare(function: Any, arguments: list[Any]) -> Any:
    function.argtypes = arguments
    return function
