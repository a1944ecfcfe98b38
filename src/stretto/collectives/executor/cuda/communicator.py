"""Collectives of one group on GPUs: for each call the way that the table says, made at its first use."""

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.algorithms import find
from stretto.collectives.executor.cuda.copied import PROTOCOL, CopiedSchedule
from stretto.collectives.executor.cuda.kernel import MAX_PLANS, LaneKernel
from stretto.collectives.executor.cuda.source import ELEMENTS, OPERATIONS, Variant
from stretto.collectives.executor.cuda.workspace import DEFAULT_TIMEOUT, Workspace
from stretto.collectives.schedule import Schedule
from stretto.collectives.selection import LIBRARY, Table, Way
from stretto.collectives.verifier import verify

logger = logging.getLogger("stretto.collectives")

Kernel = LaneKernel | CopiedSchedule


def machine_name() -> str:
    """What a table was measured on: the GPU and the versions whose speed is in it, never a machine's name."""
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}"


class CudaCommunicator:
    """Runs collectives of one group by Stretto's kernels. Collective: all ranks make it, and call it alike.

    The choice is rank 0's, sent to all. timeout: seconds that a wait on the device may take.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.workspace = Workspace(group, timeout=timeout)
        self.world_size = self.workspace.world_size
        tables = [Table.read(machine_name(), self.world_size)]
        root = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(tables, src=root, group=group, device=self.workspace.device)
        self.table = tables[0]
        self._kernels: dict[tuple[Way, str, str, bool], Kernel] = {}
        self._calls: dict[tuple[object, ...], tuple[Kernel, str] | Way] = {}

    def run(self, collective: str, input: Tensor, output: Tensor | None = None, reduction: str = "sum") -> str | None:
        """Run it on the current stream, or return None where the library does it better or alone can.

        input, output: flat or not, contiguous, of one dtype; output None: in place, where `input` holds both buffers.
        Returns the name of the way. ValueError for tensors of two dtypes, or that are not on this GPU.
        """
        for tensor in (input,) if output is None else (input, output):
            if tensor.dtype != input.dtype or tensor.device != self.workspace.device:
                raise ValueError(
                    f"{collective} takes tensors of one dtype on {self.workspace.device}: not {tensor.dtype} on "
                    f"{tensor.device} beside {input.dtype} on {input.device}"
                )
        call = (collective, input.dtype, input.numel(), -1 if output is None else output.numel(), reduction)
        known = self._calls.get(call)
        if known is None:
            known = self._find(collective, input, output, reduction)
            if known is None:
                return None
            if len(self._calls) == MAX_PLANS:
                self._calls.clear()
            self._calls[call] = known
        if known is LIBRARY:
            return None
        assert isinstance(known, tuple)
        if not input.is_contiguous() or not (output is None or output.is_contiguous()):
            return None
        kernel, name = known
        kernel(input, output)
        return name

    def _find(
        self, collective: str, input: Tensor, output: Tensor | None, reduction: str
    ) -> tuple[Kernel, str] | Way | None:
        """The kernel of such calls, LIBRARY, or None where it cannot be said for good."""
        larger = input if output is None or input.numel() >= output.numel() else output
        dtype = str(larger.dtype).removeprefix("torch.")
        if dtype not in ELEMENTS or reduction not in OPERATIONS or not larger.numel():
            return LIBRARY
        way = self.table.choose(collective, dtype, larger.numel() * larger.itemsize, self.world_size)
        if way == LIBRARY:
            return LIBRARY
        key = (way, dtype, reduction, output is None)
        kernel = self._kernels.get(key)
        if kernel is None:
            if torch.cuda.is_current_stream_capturing():
                logger.debug("%s is not compiled yet, and cannot be while a graph is captured: NCCL", way.name)
                return None
            kernel = self._kernels[key] = self.kernel(way, dtype, reduction, in_place=output is None)
        return kernel, way.name

    def kernel(self, way: Way, dtype: str, reduction: str = "sum", *, in_place: bool) -> Kernel:
        """The kernel of a way. ValueError for one that does not exist for this group."""
        assert way.algorithm is not None
        schedule = find(way.algorithm).compile(ranks=self.world_size, in_place=in_place)
        return self.load(schedule, Variant(dtype, reduction, way.protocol, way.unroll), in_place=in_place)

    def load(self, schedule: Schedule, variant: Variant, *, in_place: bool) -> Kernel:
        """The kernel of any schedule, once it is verified. ValueError with what is wrong with it."""
        found = verify(schedule)
        if not found.ok:
            raise ValueError(f"the schedule {schedule.name} is not safe to run: {found.errors[0]}")
        kind = CopiedSchedule if variant.protocol == PROTOCOL else LaneKernel
        return kind(schedule, self.workspace, variant, in_place=in_place)

    def close(self) -> None:
        """Give the memory back."""
        self._kernels.clear()
        self._calls.clear()
        self.workspace.close()
