"""What the kernels of one group share on each GPU: mailboxes that peers write to, epochs, and a report of failures."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.executor.cuda.copy_engine.streams import CopyStreams, CudaCopyStreams
from stretto.collectives.executor.cuda.nvrtc import Function, Launchable, load_or_compile
from stretto.memory import failures, find_symmetric, group_timeout
from stretto.memory.cuda import CudaMemory
from stretto.memory.gpus import NVML_NVLINK, bound_blocks, nvml_supports

MAX_BLOCKS = 1024
FLAGS = 32 << 10
COUNTS = 768 << 10
PAD = 1 << 20
"""Bytes before a half's mailboxes: 64-bit tokens of up to 4096 ranks, from FLAGS on those [mailbox, block] of lane
programs by Simple, from COUNTS on the interpreter's counts of its connections."""
MAX_SIMPLE_MAILBOXES = (COUNTS - FLAGS) // (8 * MAX_BLOCKS)
MAX_COUNTS = (PAD - COUNTS) // 8
STATE_WORDS = MAX_BLOCKS + 2 + 2 * MAX_BLOCKS + 2
"""Words of 4 bytes of the kernels' `State` (primitives.cu)."""
DEFAULT_REGIONS = {"LL": 16 << 20, "LL128": 64 << 20, "Simple": 32 << 20}
COPY_BYTES = 769 << 20  # of 1 GB what 4 ranks give each other, and flags; two-shot all-reduce: pieces of 32 MB
KEY_BITS = 24  # as in copy_engine/flags.cu
_PAGE = 4096
_TO_BEGIN = 0xFFFFFFFF
_TO_AGREE = 0xFFFFFFFE
_BROKEN_OFF = 0xFFFFFFFD
_GAVE_UP = 1
_REPORT_WORDS = 6


@dataclass(frozen=True)
class Region:
    """Where a protocol's mailboxes begin in each half of every rank's memory, and how many bytes a call has there."""

    start: int
    size: int


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, Region], int]:
    """The regions of each protocol's bytes a call, and the bytes of a half: calls take the two halves in turn."""
    regions = {}
    start = PAD
    for protocol, size in sizes.items():
        regions[protocol] = Region(start, size & ~127)
        start += -(-size // _PAGE) * _PAGE
    return regions, start


def require_lines(protocol: str, name: str, *, has_nvlink: bool) -> None:
    """ValueError for LL128 over links that may cut a line of it."""
    if protocol == "LL128" and not has_nvlink:
        raise ValueError(
            f"{name} by LL128 needs NVLink between all ranks' GPUs, which keeps lines of 128 bytes whole, and these "
            "are linked otherwise: take LL or Simple"
        )


def has_nvlink(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether NVLink links each rank's GPU to every other's, the same on all ranks. Collective."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    answer = are_linked(own, everyone)
    answers = [answer] * len(everyone)
    dist.all_gather_object(answers, answer, group=group)
    return all(answers)


def are_linked(own: str, gpus: list[str]) -> bool:
    """Whether NVLink links this GPU to all others, by their UUIDs; not where the driver's NVML does not say so."""
    return nvml_supports(NVML_NVLINK, own, gpus) is True


class Waiting(Protocol):
    """A kernel, for the words about a wait of its that was given up."""

    name: str

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """What a thread block waited for, from the two numbers that the kernel wrote down about it."""


def words_of_broken_off(kernel: int) -> tuple[int, ...]:
    """The failure record of a call of that kernel that was broken off, as if it had given up a wait."""
    return _GAVE_UP, kernel, 0, 0, _BROKEN_OFF, 0


def describe_report(words: Sequence[int], kernels: Mapping[int, Waiting], limit: int) -> str | None:
    """What a failure record says about the wait that a kernel gave up; None where none was. limit: nanoseconds."""
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
    return f"{name}, call {epoch}, thread block {block} waited in vain for {what}, {limit / 1e9:g} s"


def _describe(rank: int, world: int, kernels: Mapping[int, Waiting], limit: int, words: Sequence[int]) -> str:
    said = describe_report(words, kernels, limit)
    return f"rank {rank} of {world}: {said}: the group's kernels are broken from here on"


class SymmetricView(NamedTuple):
    """A part of a symmetric tensor: its address on every rank, and a number that tells it from others, not 0."""

    addresses: tuple[int, ...]
    key: int


class CopyArea:
    """Memory that copy engines push into, alike on all ranks: its size, and every rank's address.

    On this GPU besides: base, how many pieces all calls have had, and the peers' addresses in a table.
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


class CollectiveWorkspace:
    """One group's, for one stream: its kernels run one after another, in the same order on all ranks.

    regions: bytes of mailboxes for one call by protocol; timeout: seconds that a wait on the device may take (None: the
    group's own limit); has_nvlink (of what is made): whether NVLink links all ranks' GPUs. Collective.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        regions: dict[str, int] | None = None,
        timeout: float | None = None,
    ) -> None:
        timeout = group_timeout(group) if timeout is None else timeout
        self._group = group
        self._timeout = timeout
        self._queues: CudaCopyStreams | None = None
        self._copy_area: CopyArea | None = None
        self._copy_memory: CudaMemory | None = None
        self.regions, self.half = lay_out(DEFAULT_REGIONS | (regions or {}))
        self.memory = CudaMemory.allocate(2 * self.half, 0, group, timeout)
        self.rank, self.world_size = self.memory.rank, self.memory.world_size
        self.device = self.memory.device
        self.has_nvlink = has_nvlink(group, self.device)
        self._raw_stream = -1
        self._stream: torch.cuda.Stream | None = None
        self.limit = int(timeout * 1e9)
        self._kernels: WeakValueDictionary[int, Waiting] = WeakValueDictionary()
        self._registered = 0
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=self.device)
        describe = partial(_describe, self.rank, self.world_size, self._kernels, self.limit)
        self._record = failures.register(self, describe, self.device)
        torch.cuda.synchronize(self.device)
        self.memory.barrier()

    @property
    def multiprocessors(self) -> int:
        """How many blocks run at once for certain, while the GPU has nothing else to run."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @property
    def most_blocks(self) -> int:
        """The most blocks of a kernel that waits for peers: see `bound_blocks`."""
        return bound_blocks(self.multiprocessors)

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def load(self, source: str, names: list[str], entry: str = "run") -> Launchable:
        """The kernel `entry` of CUDA C++, compiled for this GPU. names: its parameters in order."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return Function(load_or_compile(source, f"sm_{major}{minor}"), names, entry)

    def copy_streams(self) -> CopyStreams:
        """The streams of copies."""
        if self._queues is None:
            self._queues = CudaCopyStreams(self.device)
        return self._queues

    def copy_area(self) -> "CopyArea":
        """The memory of copies; collective at its first use, for most groups never make large calls."""
        if self._copy_area is None:
            memory = CudaMemory.allocate(COPY_BYTES, 0, self._group, self._timeout)
            area = CopyArea(COPY_BYTES, memory.addresses, self.device)
            memory.barrier()
            self._copy_area, self._copy_memory = area, memory
        return self._copy_area

    def find_symmetric(self, tensor: Tensor) -> SymmetricView | None:
        """What peers know a tensor by, if it is one of this group's symmetric ones or a part of it."""
        found = find_symmetric(tensor)
        if found is None or not isinstance(found.memory, CudaMemory) or found.memory.group != self.memory.group:
            return None
        addresses = tuple(address + found.offset for address in found.memory.addresses)
        return SymmetricView(
            addresses, 1 + zlib.crc32(f"{found.number} {found.offset}".encode()) % ((1 << KEY_BITS) - 1)
        )

    @property
    def peers(self) -> list[int]:
        """The addresses of all ranks' memory, as this GPU sees them."""
        return self.memory.addresses

    @property
    def report(self) -> Tensor:
        """The failure record that kernels write to, in pinned memory."""
        return self._record.words

    @property
    def failed(self) -> Tensor:
        """The process's failure flag on this GPU."""
        return self._record.failed

    def follow_stream(self) -> None:
        """Put the next kernel after all before it, on whichever stream these are: they share the mailboxes.

        While a graph is captured nothing outside of it can be waited for: its replays are the caller's to order.
        """
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw == self._raw_stream or self.is_capturing:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._raw_stream, self._stream = raw, stream

    def register(self, kernel: Waiting) -> int:
        """A number for this kernel, by which a report names it."""
        self._registered += 1
        self._kernels[self._registered] = kernel
        return self._registered

    def require_lines_for(self, protocol: str, name: str) -> None:
        """ValueError for LL128 over links that may cut a line of it."""
        require_lines(protocol, name, has_nvlink=self.has_nvlink)

    def check(self) -> None:
        """Raise PeerError if a wait of this process on a device was given up, in whichever group."""
        failures.check()

    def break_off(self, kernel: int) -> None:
        """Have all further calls refused, after an error in the middle of one; kernel: of `register`."""
        self._record.mark(words_of_broken_off(kernel))

    def close(self) -> None:
        """Give the memory back, and forget what has failed with it."""
        self._record.close()
        self.memory.close()
        if self._copy_memory is not None:
            self._copy_memory.close()
