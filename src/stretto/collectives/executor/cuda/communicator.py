# SPDX-License-Identifier: Apache-2.0
"""Runs the collectives of one group on GPUs: looks up each call's choice in a table, and loads its kernel once."""

import functools
import logging
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.executor.cuda.copy_engine.executor import PROTOCOL, CopyEngineExecutor
from stretto.collectives.executor.cuda.fused.kernel import MAX_PLANS, FusedScheduleKernel
from stretto.collectives.executor.cuda.variant import ELEMENTS, OPERATIONS, Variant
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace
from stretto.collectives.schedule import Schedule
from stretto.collectives.selection import LIBRARY, AlgorithmChoice, Table, find_table_file
from stretto.collectives.verifier import verify
from stretto.tuning import decide_on_rank_0, machine_key

logger = logging.getLogger("stretto.collectives")

Kernel = FusedScheduleKernel | CopyEngineExecutor


def machine_name(has_nvlink: bool) -> str:
    """Key of the machines that a table is valid for: the GPU, its links, and the versions of torch and NCCL."""
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    links = "NVLink" if has_nvlink else "no NVLink"
    return machine_key(torch.device("cuda", torch.cuda.current_device()), links=links, versions=(f"NCCL {nccl}",))


class ResolvedCall(NamedTuple):
    """Implementation of calls of one kind: a kernel, called with (input, output), and its choice's name, or None for
    both if the library runs them; why: the reason, for logs.
    """

    kernel: Kernel | None
    name: str | None
    why: str


class CudaCommunicator:
    """Runs collectives of one group by Stretto's kernels. Collective: all ranks make it, and call it alike.

    Rank 0's table is sent to all ranks: from `table`, a file that `stretto tune collectives --table FILE` has
    written (default: $STRETTO_COLLECTIVES_TABLE), or else the times measured on this machine, or else the defaults. A
    Table is used as it is, and must be the same on all ranks.
    timeout: seconds that a wait on the device may take, None for the group's own limit. Raises ValueError, on all
    ranks, for a file that is no table of this machine and number of ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        table: Table | Path | str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.workspace = CollectiveWorkspace(group, timeout=timeout)
        self.world_size = self.workspace.world_size
        self._group_name = "0" if group is None else group.group_name
        self._log_once = functools.lru_cache(65536)(logger.debug)
        self._kernels: dict[tuple[AlgorithmChoice, str, str, bool], Kernel] = {}
        self._calls: dict[tuple[object, ...], ResolvedCall] = {}
        try:
            self.table = table if isinstance(table, Table) else self._find_table(group, find_table_file(table))
        except ValueError:
            self.close()
            raise

    def run(self, collective: str, input: Tensor, output: Tensor | None = None, reduction: str = "sum") -> str | None:
        """Run a collective on the current stream, or return None where the library is better or alone can run it.

        input, output: of any shape, contiguous, of one dtype; output None: in place, where `input` holds both buffers.
        Returns the name of the choice, and logs it with its reason at debug level, once for calls that are alike.
        Raises ValueError for tensors of two dtypes, or that are not on this GPU.
        """
        kernel, name, why = self.find(collective, input, output, reduction)
        if kernel is not None:
            kernel(input, output)
        if logger.isEnabledFor(logging.DEBUG):
            larger = input if output is None or input.numel() >= output.numel() else output
            call = f"{collective} {reduction} of {larger.numel()} {_name(larger.dtype)} ({larger.nbytes} bytes)"
            self._log_once(f"group {self._group_name}: {call} runs as {name or 'the library'}: {why}")
        return name

    def find(self, collective: str, input: Tensor, output: Tensor | None, reduction: str) -> ResolvedCall:
        """Look up how such a call runs, without running it; arguments and errors as of `run`.

        Collective: the first call of a kind compiles its kernel.
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
                return ResolvedCall(
                    None, None, "its kernel is not compiled yet, and cannot be while a graph is captured"
                )
            if len(self._calls) == MAX_PLANS:
                self._calls.clear()
            self._calls[call] = known
        if known.kernel is None or (input.is_contiguous() and (output is None or output.is_contiguous())):
            return known
        return ResolvedCall(None, None, "its tensors are not contiguous")

    def _find(self, collective: str, input: Tensor, output: Tensor | None, reduction: str) -> ResolvedCall | None:
        """Find how such calls run, or None if that is not settled: its kernel cannot be compiled now."""
        if nodes := set(self.workspace.nodes):
            return ResolvedCall(None, None, f"its ranks are on {len(nodes)} nodes, and it is no installed schedule's")
        larger = input if output is None or input.numel() >= output.numel() else output
        dtype = _name(larger.dtype)
        if dtype not in ELEMENTS:
            return ResolvedCall(None, None, f"Stretto's kernels have no {dtype}")
        if reduction not in OPERATIONS:
            return ResolvedCall(None, None, f"Stretto's kernels have no reduction {reduction}")
        if not larger.numel():
            return ResolvedCall(None, None, "it has no elements")
        choice, why = self.table.choose(collective, dtype, larger.nbytes, self.world_size)
        if choice == LIBRARY:
            return ResolvedCall(None, None, why)
        if obstacle := choice.find_obstacle(self.world_size, in_place=output is None, reduction=reduction):
            return ResolvedCall(None, None, obstacle)
        key = (choice, dtype, reduction, output is None)
        kernel = self._kernels.get(key)
        if kernel is None:
            if torch.cuda.is_current_stream_capturing():
                return None
            if choice.protocol == PROTOCOL:
                try:
                    self.workspace.copy_area()
                except ValueError as error:  # on all ranks, if on one: the library needs less
                    return ResolvedCall(None, None, f"{choice.name} has no memory: {error}")
            kernel = self._kernels[key] = self.kernel(choice, dtype, reduction, in_place=output is None)
        return ResolvedCall(kernel, choice.name, why)

    def kernel(self, choice: AlgorithmChoice, dtype: str, reduction: str = "sum", *, in_place: bool) -> Kernel:
        """Load the kernel of a choice. Raises ValueError for one that does not exist for this group."""
        schedule = choice.compile(self.world_size, in_place=in_place)
        return self.load(schedule, Variant(dtype, reduction, choice.protocol, choice.unroll), in_place=in_place)

    def load(self, schedule: Schedule, variant: Variant, *, in_place: bool, waive: Collection[str] = ()) -> Kernel:
        """Verify a schedule and load its kernel; waive: as in `verify`. Raises ValueError with what is wrong."""
        found = verify(schedule, waive=waive)
        if not found.ok:
            raise ValueError(f"the schedule {schedule.name} is not safe to run: {found.errors[0]}")
        kind = CopyEngineExecutor if variant.protocol == PROTOCOL else FusedScheduleKernel
        return kind(schedule, self.workspace, variant, in_place=in_place)

    def close(self) -> None:
        """Free the memory."""
        self._kernels.clear()
        self._calls.clear()
        self.workspace.close()

    def _find_table(self, group: dist.ProcessGroup | None, path: Path | None) -> Table:
        """Send rank 0's table to all ranks. Raises ValueError on all if it cannot read the file that was named."""
        has_nvlink = self.workspace.has_nvlink

        def read() -> Table:
            machine = machine_name(has_nvlink)
            if path is None:
                return Table.read(machine, self.world_size, has_nvlink=has_nvlink)
            return Table.load(path, machine, self.world_size, has_nvlink=has_nvlink)

        return decide_on_rank_0(read, Table, group)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
