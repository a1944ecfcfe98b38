"""What the kernels of one group share on each GPU: mailboxes that peers write to, epochs, and a report of failures."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.executor.cuda.function import Function, Launchable
from stretto.collectives.executor.cuda.nvrtc import load_or_compile
from stretto.memory import PeerError
from stretto.memory.cuda import CudaMemory

MAX_BLOCKS = 1024
FLAGS = 32 << 10
COUNTS = 768 << 10
PAD = 1 << 20
"""Bytes before the mailboxes: 64-bit tokens of up to 4096 ranks, from FLAGS on those [mailbox, block] of lane programs
by Simple, from COUNTS on the interpreter's counts of its connections."""
MAX_SIMPLE_MAILBOXES = (COUNTS - FLAGS) // (8 * MAX_BLOCKS)
MAX_COUNTS = (PAD - COUNTS) // 8
DEFAULT_REGIONS = {"LL": 32 << 20, "LL128": 128 << 20, "Simple": 64 << 20}
DEFAULT_TIMEOUT = 30.0


@dataclass(frozen=True)
class Region:
    """Where a protocol's mailboxes begin in every rank's memory, and how many bytes they have."""

    start: int
    size: int

    @property
    def half(self) -> int:
        """The bytes for one call; the next one takes the other half."""
        return self.size // 2 & ~127


class Workspace:
    """One group's, for one stream: its kernels run one after another, in the same order on all ranks.

    regions: bytes of mailboxes by protocol; timeout: seconds that a wait on the device may take. Collective.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        regions: dict[str, int] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        sizes = DEFAULT_REGIONS | (regions or {})
        self.regions: dict[str, Region] = {}
        start = PAD
        for protocol, size in sizes.items():
            self.regions[protocol] = Region(start, size)
            start += -(-size // 4096) * 4096
        self.memory = CudaMemory.allocate(start, 0, group, 60.0)
        self.rank, self.world_size = self.memory.rank, self.memory.world_size
        self.device = self.memory.device
        self._raw_stream = -1
        self._stream: torch.cuda.Stream | None = None
        self.limit = int(timeout * 1e9)
        self.state = torch.zeros(MAX_BLOCKS + 1, dtype=torch.int32, device=self.device)
        self.ended = torch.zeros(MAX_BLOCKS, dtype=torch.int64, device=self.device)
        self._report = torch.zeros(5, dtype=torch.int32, pin_memory=True)
        self._seen = self._report.numpy()
        torch.cuda.synchronize(self.device)
        self.memory.meet()

    @property
    def multiprocessors(self) -> int:
        """How many blocks run at once for certain."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def load(self, source: str, names: list[str]) -> Launchable:
        """The kernel `run` of CUDA C++, compiled for this GPU. names: its parameters in order."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return Function(load_or_compile(source, f"sm_{major}{minor}"), names)

    @property
    def peers(self) -> list[int]:
        """The addresses of all ranks' memory, as this GPU sees them."""
        return self.memory.addresses

    @property
    def report(self) -> Tensor:
        """The kernels' report, in pinned memory."""
        return self._report

    def follow_stream(self) -> None:
        """Put the next kernel after all before it, on whichever stream these are: they share the mailboxes.

        While a graph is captured nothing outside of it can be waited for: its replays are the caller's to order.
        """
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw == self._raw_stream or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._raw_stream, self._stream = raw, stream

    def check(self, name: str = "a collective", describe: Callable[[int, int], str] | None = None) -> None:
        """Raise PeerError if a wait on the device was given up.

        describe: says what a wait was for, from the two numbers that the kernel wrote down about it.
        """
        if not self._seen[0]:
            return
        _, epoch, block, level, message = (int(word) & 0xFFFFFFFF for word in self._seen)
        if level == 0xFFFFFFFF:
            what = f"rank {message} to begin"
        else:
            what = "a message" if describe is None else describe(level, message)
        raise PeerError(
            f"rank {self.rank} of {self.world_size}: {name}, call {epoch}, thread block {block} waited in vain for "
            f"{what}, {self.limit / 1e9:g} s: the group's kernels are broken from here on"
        )

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()
