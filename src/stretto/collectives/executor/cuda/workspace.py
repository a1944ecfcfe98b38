# SPDX-License-Identifier: Apache-2.0
"""The memory that the kernels of one group share on each GPU: mailboxes that peers write to, epochs, failure reports.

It also knows what links the GPUs: LL128 needs NVLink between all of them, since a warp's store of 128 bytes crosses
NVLink in one piece, and may be split on PCIe.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.executor.cuda.nvrtc import Function, load_or_compile
from stretto.memory import failures, find_own_rank, find_symmetric, group_timeout, shared_gpus
from stretto.memory.compilation import CallLimit, note_loaded_kernel
from stretto.memory.copy_engine import CudaCopyStreams, has_nvlink
from stretto.memory.cuda import CudaMemory
from stretto.memory.gpus import bound_blocks
from stretto.memory.groups import find_nodes, make_node_group, next_group_number
from stretto.memory.plain_data import all_gather_data

MAX_BLOCKS = 1024
FLAGS = 32 << 10
COUNTS = 768 << 10
PAD = 1 << 20
"""Bytes before a half's mailboxes: 64-bit tokens of up to 4096 ranks, from FLAGS on the flags [mailbox, block] of fused
kernels by Simple, from COUNTS on the interpreter's counts of its connections."""
MAX_SIMPLE_MAILBOXES = (COUNTS - FLAGS) // (8 * MAX_BLOCKS)
MAX_COUNTS = (PAD - COUNTS) // 8
STATE_WORDS = MAX_BLOCKS + 2 + 2 * MAX_BLOCKS + 2
"""Words of 4 bytes of the kernels' `State` (primitives.cu)."""
DEFAULT_REGIONS = {"LL": 16 << 20, "LL128": 64 << 20, "Simple": 32 << 20}
COPY_BYTES = 769 << 20  # what 4 ranks send each other of 1 GB, and flags; two-shot all-reduce: pieces of 32 MB
KEY_BITS = 24  # as in copy_engine/flags.cu
_PAGE = 4096
_TO_BEGIN = 0xFFFFFFFF
_TO_AGREE = 0xFFFFFFFE
_BROKEN_OFF = 0xFFFFFFFD
_GAVE_UP = 1
_REPORT_WORDS = 6


@dataclass(frozen=True)
class Region:
    """The first byte of a protocol's mailboxes in each half of every rank's memory, and their bytes."""

    start: int
    size: int


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, Region], int]:
    """Lay out each protocol's region; returns them, and the bytes of a half. Calls use the two halves in turn."""
    regions = {}
    start = PAD
    for protocol, size in sizes.items():
        regions[protocol] = Region(start, size & ~127)
        start += -(-size // _PAGE) * _PAGE
    return regions, start


def require_lines(protocol: str, name: str, *, has_nvlink: bool) -> None:
    """Raise ValueError for LL128 over links that may split one of its lines."""
    if protocol == "LL128" and not has_nvlink:
        raise ValueError(
            f"{name} by LL128 needs NVLink between all ranks' GPUs, which keeps lines of 128 bytes whole, and these "
            "are linked otherwise: take LL or Simple"
        )


class Waiting(Protocol):
    """A kernel that can describe its waits that timed out."""

    name: str

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """Describe what a thread block waited for, from the two numbers that the kernel recorded."""


class EndOfCall(Protocol):
    """The completion of a stream's work up to a call's end: a torch.cuda.Event, or an object with its methods."""

    def wait(self) -> None:
        """Make the current stream wait for it."""

    def query(self) -> bool:
        """Check whether it has come."""

    def synchronize(self) -> None:
        """Make the host wait for it."""


def words_of_broken_off(kernel: int) -> tuple[int, ...]:
    """The failure record of an aborted call of that kernel, as if one of its waits had timed out."""
    return _GAVE_UP, kernel, 0, 0, _BROKEN_OFF, 0


def describe_report(words: Sequence[int], kernels: Mapping[int, Waiting]) -> str | None:
    """Describe the timed-out wait of a failure record; None if there is none."""
    kind, number, epoch, block, level, message = (int(word) & 0xFFFFFFFF for word in words[:_REPORT_WORDS])
    if not kind:
        return None
    kernel = kernels.get(number)
    name = "a collective" if kernel is None else kernel.name
    if kind == failures.FOLLOWED:
        return f"{name}, call {epoch} ended without results, since a wait of another group had failed in this process"
    if level == _BROKEN_OFF:
        return f"{name} was broken off by an error in the middle of a call, and peers may have what it had sent"
    if level == _TO_AGREE:
        return (
            f"{name}, call {epoch}: rank {message} has called it with another symmetric tensor than this rank, or one "
            "of the two with an ordinary one; all give the same part of one, or none does"
        )
    if level == _TO_BEGIN:
        what = f"rank {message} to begin"
    else:
        what = "a message" if kernel is None else kernel.describe_wait(block, level, message)
    return f"{name}, call {epoch}, thread block {block} waited in vain for {what}, {failures.read_limit(words):g} s"


def _describe(rank: int, world: int, kernels: Mapping[int, Waiting], words: Sequence[int]) -> str:
    return f"rank {rank} of {world}: {describe_report(words, kernels)}: the group's kernels are broken from here on"


class SymmetricView(NamedTuple):
    """A part of a symmetric tensor: its address on every rank, and a number, not 0, that identifies it."""

    addresses: tuple[int, ...]
    key: int


class CopyArea:
    """Memory that copy engines of peers write into, of one size on all ranks, and every rank's address of it.

    base: in this GPU's memory, the number of pieces that all calls have had; table: there, too, the peers' addresses.
    """

    def __init__(self, size: int, addresses: list[int], device: torch.device) -> None:
        self.size = size
        self.addresses = addresses
        self._base = torch.zeros(1, dtype=torch.int64, device=device)
        self._table = torch.tensor(addresses, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @property
    def base(self) -> int:
        return self._base.data_ptr()

    @property
    def table(self) -> int:
        return self._table.data_ptr()


def _make_node_group(group: dist.ProcessGroup | None, nodes: Sequence[int]) -> dist.ProcessGroup:
    """Make the group of this node's ranks. Collective. Where ranks share a GPU, NCCL has none for them."""
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    number = max(all_gather_data(next_group_number(), whole, int))
    return make_node_group(whole, nodes, "gloo" if shared_gpus.is_enabled() else "cpu:gloo,cuda:nccl", number)


class CollectiveWorkspace:
    """The memory of one group's kernels, on one stream: they run one after another, in the same order on all ranks.

    nodes: each rank's, empty if there is one. `peers` has the ranks of this node, and 0 for others, which are put to.

    regions: by protocol, the bytes of mailboxes of one call; timeout: seconds that a wait on the device may take (None:
    the group's own limit), until `set_limit`. The attribute has_nvlink says whether NVLink links all ranks' GPUs.
    Collective.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        regions: dict[str, int] | None = None,
        timeout: float | None = None,
    ) -> None:
        timeout = group_timeout(group) if timeout is None else timeout
        self.group = group
        self.timeout = timeout
        self.nodes = find_nodes(group)
        here = _make_node_group(group, self.nodes) if self.nodes else group
        self._queues: CudaCopyStreams | None = None
        self._copy_area: CopyArea | None = None
        self._copy_memory: CudaMemory | None = None
        self.regions, self.half = lay_out(DEFAULT_REGIONS | (regions or {}))
        self.memory = CudaMemory.allocate(2 * self.half, 0, here, timeout)
        self.rank, self.world_size = find_own_rank(group)
        self.device = self.memory.device
        self._device_index = self.device.index
        self.has_nvlink = has_nvlink(here, self.device)
        if self.nodes:  # LL128 is for the links inside nodes, on all of them or none
            self.has_nvlink = all(all_gather_data(self.has_nvlink, group, bool))
        self._raw_stream = -1
        self._stream: torch.cuda.Stream | None = None
        self._end: EndOfCall | None = None
        # Before the caller's streams' work: kernels of a call by copy engines are small, and products that were
        # launched earlier would keep them, and with them the peers, waiting for a multiprocessor.
        self.group_stream = torch.cuda.Stream(self.device, priority=-1)
        self._limit = CallLimit(timeout)
        self._nanoseconds = int(timeout * 1e9)
        self._waiting_functions: WeakSet[Function] = WeakSet()
        self._kernels: WeakValueDictionary[int, Waiting] = WeakValueDictionary()
        self._registered = 0
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=self.device)
        describe = partial(_describe, self.rank, self.world_size, self._kernels)
        self._record = failures.register(self, describe, self.device)
        torch.cuda.synchronize(self.device)
        self.memory.barrier()

    @property
    def multiprocessors(self) -> int:
        """The number of blocks that are certain to run concurrently while the GPU runs nothing else."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def max_blocks(self) -> int:
        """The most blocks of a kernel that waits for peers (`bound_blocks`)."""
        return bound_blocks(self.multiprocessors)

    @property
    def is_capturing(self) -> bool:
        """True if the current stream is being captured in a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def load(self, source: str, names: list[str], entry: str = "run") -> Function:
        """Compile CUDA C++ for this GPU and load its kernel `entry`. names: its parameters in order."""
        major, minor = torch.cuda.get_device_capability(self.device)
        function = Function(load_or_compile(source, f"sm_{major}{minor}"), names, entry)
        if "limit" in names:
            self._waiting_functions.add(function)
        note_loaded_kernel()
        self._set_nanoseconds(self._limit.while_loading())  # of this call, if it is in one
        return function

    @property
    def limit(self) -> int:
        """The nanoseconds that a wait on the device may take: what kernels are given as their parameter "limit"."""
        return self._nanoseconds

    @property
    def lasting_limit(self) -> int:
        """`limit` of calls that follow no loading of a kernel."""
        return int(self._limit.seconds * 1e9)

    def set_limit(self, seconds: float) -> None:
        """Set the group's limit of a wait on the device, for all later calls other than those that a graph replays."""
        self._limit.seconds = seconds

    def _set_nanoseconds(self, seconds: float) -> None:
        nanoseconds = int(seconds * 1e9)
        if nanoseconds != self._nanoseconds:
            self._nanoseconds = nanoseconds
            for function in self._waiting_functions:
                function.set("limit", nanoseconds)

    def copy_streams(self) -> CudaCopyStreams:
        """The streams of calls by copy engines, made at first use."""
        if self._queues is None:
            self._queues = CudaCopyStreams(self.device)
        return self._queues

    def copy_area(self) -> "CopyArea":
        """The memory for copies; collective at its first use, since most groups never make large calls."""
        if self._copy_area is None:
            memory = CudaMemory.allocate(COPY_BYTES, 0, self.group, self.timeout)
            area = CopyArea(COPY_BYTES, memory.addresses, self.device)
            memory.barrier()
            self._copy_area, self._copy_memory = area, memory
        return self._copy_area

    def find_symmetric(self, tensor: Tensor) -> SymmetricView | None:
        """The peers' addresses of a tensor, if it is one of this group's symmetric tensors or a part of one."""
        found = find_symmetric(tensor)
        if found is None or not isinstance(found.memory, CudaMemory) or found.memory.group != self.memory.group:
            return None
        addresses = tuple(address + found.offset for address in found.memory.addresses)
        return SymmetricView(
            addresses, 1 + zlib.crc32(f"{found.number} {found.offset}".encode()) % ((1 << KEY_BITS) - 1)
        )

    @property
    def peers(self) -> list[int]:
        """The addresses of all ranks' memory, as this GPU sees them; 0 for those of other nodes."""
        near = iter(self.memory.addresses)
        here = self.nodes[self.rank] if self.nodes else 0
        return [next(near) if node == here else 0 for node in self.nodes or [0] * self.world_size]

    @property
    def report(self) -> Tensor:
        """The failure record that kernels write to, in pinned memory."""
        return self._record.words

    @property
    def failed(self) -> Tensor:
        """The process's failure flag on this GPU."""
        return self._record.failed

    def follow_stream(self) -> int:
        """Begin a call: set its waits' limit, and order its kernels after all earlier ones, on whichever stream.

        All calls share the mailboxes. Returns the current stream's handle.

        If the current stream is not the last call's, it waits for the event that `mark_end` recorded, or else for all
        work in the last call's stream. While a graph is captured, nothing outside of it can be waited for: the caller
        orders its replays.
        """
        self._set_nanoseconds(self._limit.of_call())
        raw = torch._C._cuda_getCurrentRawStream(self._device_index)
        if raw == self._raw_stream:
            if self._stream is None:  # `resume` has set its handle
                self._stream = torch.cuda.current_stream(self.device)
            self._end = None
            return raw
        if self.is_capturing:
            return raw
        stream = torch.cuda.current_stream(self.device)
        if self._end is not None:
            self._end.wait()
        elif self._stream is not None:
            stream.wait_stream(self._stream)
        self._raw_stream, self._stream, self._end = raw, stream, None
        return raw

    def mark_end(self, end: EndOfCall) -> None:
        """Tell where the call that has just been enqueued ends on the current stream.

        The next call on another stream then waits for that, and not for what follows on this stream. Not to be used
        while a graph is captured.
        """
        self._end = end

    @property
    def last_stream(self) -> int:
        """The handle of the stream that the last call is on; -1 before the first."""
        return self._raw_stream

    def resume(self, stream: int, end: EndOfCall) -> None:
        """Learn that later calls have been launched elsewhere, the last one on the stream of that handle."""
        self._raw_stream, self._stream, self._end = stream, None, end

    def register(self, kernel: Waiting) -> int:
        """Give this kernel a number, by which a failure report names it."""
        self._registered += 1
        self._kernels[self._registered] = kernel
        return self._registered

    def require_lines_for(self, protocol: str, name: str) -> None:
        """Raise ValueError for LL128 over links that may split one of its lines."""
        require_lines(protocol, name, has_nvlink=self.has_nvlink)

    def check(self) -> None:
        """Raise PeerError if a wait of this process on a device has timed out, in whichever group."""
        failures.check()

    def abort(self, kernel: int) -> None:
        """Refuse all further calls, after an error in the middle of one; kernel: its number, of `register`."""
        self._record.mark(words_of_broken_off(kernel))

    def close(self) -> None:
        """Free the memory, and forget its failures."""
        self._record.close()
        self.memory.close()
        if self._copy_memory is not None:
            self._copy_memory.close()
