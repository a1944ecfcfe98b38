# SPDX-License-Identifier: Apache-2.0
"""Copy engines of GPUs: which groups they reach, copies and flags in stream order, and the streams that they run on.

    used by                                                       streams            a copy has arrived when
    tiles.host: operators, weights' gathers, gradients' scatters  `SideStream`       a flag follows it (`set_flag`)
    collectives' executor                                         `CudaCopyStreams`  a kernel after it has signalled
    pipelines' messages                                           `ChannelStreams`   the host has seen its event

Each user has slots of its own: where peers write, and when a slot may be used again. `Driver` calls CUDA's driver by
addresses and handles: one operator makes dozens of copies and signals, and on some hosts each costs ten microseconds
through torch.
"""

import ctypes
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster.local_ranks import name_node, require_declared
from stretto.memory.gpus import NVML_NVLINK, nvml_supports
from stretto.memory.plain_data import all_gather_data
from stretto.memory.symmetric import find_fence

SIDE_STREAMS = ("copy", "flag", "wait")

_MAX_KEPT = 64
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_BY_ADDRESS = 4  # CU_MEMORYTYPE_UNIFIED
_kept: dict[int, torch.cuda.Stream] = {}


def have_copy_engines(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Check whether copy engines reach the whole group: GPUs of one machine, with NVLink between all. Collective."""
    if group.size() == 1 or device.type != "cuda":
        return False
    return has_nvlink(group, device)


def has_nvlink(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Check whether NVLink links each rank's GPU to every other's, the same on all ranks. Collective."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    here = name_node(dist.get_rank(), dist.get_world_size()), own
    nodes, gpus = zip(*all_gather_data(here, group, tuple[str, str]), strict=True)
    require_declared(nodes)
    return all(all_gather_data(len(set(nodes)) == 1 and are_linked(own, list(gpus)), group, bool))


def are_linked(own: str, gpus: list[str]) -> bool:
    """Check whether NVLink links this GPU to all others, by UUIDs; False if the driver's NVML does not report it."""
    return nvml_supports(NVML_NVLINK, own, gpus) is True


def find_handle(device: torch.device) -> int:
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
        self._record = _declare(library.cuEventRecord, [ctypes.c_void_p, ctypes.c_void_p])
        self._follow = _declare(library.cuStreamWaitEvent, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint])
        self._await = _declare(library.cuStreamWaitValue32_v2, word)
        self._clear = _declare(library.cuMemsetD32Async, [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, word[0]])

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

    def record(self, event: int, stream: int) -> None:
        """Record an event after the work that a stream has so far."""
        failed = self._record(event, stream)
        if failed:
            raise RuntimeError(f"CUDA error {failed} of an event's recording")

    def follow(self, stream: int, event: int) -> None:
        failed = self._follow(stream, event, 0)
        if failed:
            raise RuntimeError(f"CUDA error {failed} of a stream's wait for an event")

    def await_count(self, address: int, count: int, stream: int) -> None:
        """Make the stream wait until an int32 has reached `count`."""
        failed = self._await(stream, address, count, _AT_LEAST)
        if failed:
            raise RuntimeError(
                f"CUDA error {failed}: this driver's streams cannot wait for a word in memory, as copies of tiles that "
                'a kernel stores do; operators do without them by implementation="library"'
            )

    def clear(self, address: int, count: int, stream: int) -> None:
        """Set `count` int32 words to 0, in stream order."""
        failed = self._clear(address, 0, count, stream)
        if failed:
            raise RuntimeError(f"CUDA error {failed} of setting {count} words to 0")


@functools.cache
def find_driver() -> Driver:
    """Return this machine's driver, loaded once."""
    return Driver()


def set_flag(word: Tensor, value: Tensor) -> None:
    """Signal in stream order: copy value [1] to word [1], both int32, after all earlier copies and stores.

    A copy of 4 bytes from device memory, so that CUDA graphs replay. In host memory it is written immediately.
    """
    if word.device.type == "cpu":
        fence = find_fence()
        if fence is not None:
            fence()
        word.numpy()[0] = value.item()
    else:
        find_driver().copy(word.data_ptr(), value.data_ptr(), value.element_size(), find_handle(word.device))


class DriverEvent:
    """An event that the driver records: torch's own call takes the host several times as long."""

    def __init__(self) -> None:
        self._event, self._handle = torch.cuda.Event(), 0

    def record(self, stream: torch.cuda.Stream) -> int:
        """Record the event after the work that a stream has so far; returns its handle, for `Driver.follow`."""
        if not self._handle:
            self._event.record(stream)  # torch creates the event when it is first recorded
            self._handle = self._event.cuda_event
        find_driver().record(self._handle, stream.cuda_stream)
        return self._handle


class SideStream:
    """A side stream for copies, which forks from and joins whichever stream is current, through the driver.

    priority: below 0, its kernels go before those of other streams whose blocks still wait for a place.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._opened, self._joined = DriverEvent(), DriverEvent()
        self._before: list[tuple[int, int, int]] = []

    def open(self) -> None:
        """Fork: order later work of this stream after the current stream's work so far."""
        find_driver().follow(self.stream.cuda_stream, self._opened.record(find_current(self.device)))

    def join(self) -> None:
        """Join: order later work of the current stream after this stream's work so far."""
        find_driver().follow(find_handle(self.device), self._joined.record(self.stream))

    def __enter__(self) -> None:
        """Make this the current stream until exit."""
        self._before.append(torch._C._cuda_getCurrentStream(self.device.index))
        stream = self.stream
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_setStream(*self._before.pop())


class CudaCopyStreams:
    """The streams of a call: "caller", the stream that was current at `fork`, and `SIDE_STREAMS`.

    They work under graph capture: the side streams fork from the caller's and join it.
    Events go through the driver: torch's own take the host several times as long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {name: torch.cuda.Stream(device, priority=-1) for name in SIDE_STREAMS}  # as the group's
        self._handles = {name: stream.cuda_stream for name, stream in self._streams.items()}
        self._events: dict[Hashable, torch.cuda.Event] = {}
        self._known: dict[Hashable, int] = {}
        self._driver = find_driver()

    def fork(self) -> None:
        """Have the side streams go on after what the caller's stream has."""
        self._handles["caller"] = find_handle(self._device)
        self.mark("forked", "caller")
        for stream in SIDE_STREAMS:
            self.follow("forked", stream)

    def handle(self, stream: str) -> int:
        return self._handles[stream]

    def mark(self, event: Hashable, stream: str) -> None:
        """Record an event on a stream; its name may be used again once `follow` has been called for it."""
        known = self._known.get(event)
        if known is None:
            made = self._events[event] = torch.cuda.Event()
            made.record(self._streams.get(stream))  # torch creates the event when it is first recorded
            known = self._known[event] = made.cuda_event
        self._driver.record(known, self._handles[stream])

    def follow(self, event: Hashable, stream: str) -> None:
        self._driver.follow(self._handles[stream], self._known[event])

    def copy(self, target: int, source: int, num_bytes: int, stream: str) -> None:
        """Copy between addresses on a stream. Raises RuntimeError with CUDA's error number if it refuses."""
        self._driver.copy(target, source, num_bytes, self._handles[stream])

    def join(self) -> None:
        """Have the caller's stream go on after the side streams."""
        for stream in SIDE_STREAMS:
            self.mark("joined", stream)
            self.follow("joined", "caller")


class ChannelStreams:
    """Copies of tensors on streams of one GPU, one for each channel, whose ends the host can ask for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[int, torch.cuda.Stream] = {}

    def ready(self) -> torch.cuda.Event:
        """Record an event after all work so far of the caller's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def empty(self, channel: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory for a tensor that copies of the channel will fill."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream(channel)):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def copy(
        self, channel: int, pairs: list[tuple[Tensor, Tensor]], after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        """Start to copy (target, source) of each, not before the event `after`; returns the event of their end."""
        stream = self._stream(channel)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            if after is not None:
                after.wait(stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def _stream(self, channel: int) -> torch.cuda.Stream:
        if channel not in self._streams:
            self._streams[channel] = torch.cuda.Stream(self.device)
        return self._streams[channel]


def _declare(function: Any, arguments: list[Any]) -> Any:
    function.argtypes = arguments
    return function
