# SPDX-License-Identifier: Apache-2.0
"""Runs schedules on CUDA tensors, on the streams that torch's NCCL backend would take.

A call with async_op=True runs on a stream of the group, after the caller's stream's work at the call, and concurrently
with what the caller launches later. `Work.wait` makes the then current stream wait for that call, not for later ones. A
call with async_op=False, whose result the caller's stream waits for anyway, runs on the caller's stream. The group's
calls run one after another on whichever streams (`CollectiveWorkspace.follow_stream`). While a CUDA graph is captured
all calls run on the group's stream, forked from the caller's, which keeps their order: `follow_stream` does nothing
there.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.collectives.backend.calls import BackendCall, require_room, run_staged, runs_in_place
from stretto.collectives.backend.host_runner import Worker
from stretto.collectives.backend.native import make_enqueued_work, make_work, profiled
from stretto.collectives.backend.runner import FastestRun, Member
from stretto.collectives.executor.cuda.communicator import CudaCommunicator, Kernel
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import DEFAULT_TILE_BYTES, InterpretedSchedule
from stretto.collectives.executor.cuda.nvrtc import launch_addresses
from stretto.collectives.executor.cuda.puts import SchedulePuts
from stretto.collectives.executor.cuda.variant import ELEMENTS, OPERATIONS, Variant
from stretto.collectives.executor.cuda.workspace import EndOfCall
from stretto.collectives.executor.layout import overlap
from stretto.collectives.schedule import Schedule
from stretto.memory import failures
from stretto.memory.compilation import loaded_kernels_address
from stretto.memory.gpus import find_obstacle

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

logger = logging.getLogger("stretto.collectives")


class CudaRunner:
    """Runner for CUDA tensors. Each rank has a GPU, and GPUs of one node access each other's memory.

    Between nodes it runs installed schedules alone, whose kernels put.

    fast: what launches calls again that were made before (native/fast_calls.hpp); None: nothing does.
    """

    def __init__(self, member: Member, fast: Any = None) -> None:
        self._member = member
        self._fast = fast
        self._communicator: CudaCommunicator | None = None
        self._obstacle: str | None = "the group has one rank" if member.size < 2 else None
        self._schedules: dict[int, Schedule] = {}
        self._tile_bytes: dict[int, int] = {}
        self._puts: dict[int, SchedulePuts] = {}  # between nodes
        self._kernels: dict[tuple[int, str, str], FusedScheduleKernel | InterpretedSchedule] = {}
        self._of_graphs: dict[int, object] = {}  # kernels that graphs replay, even of discarded schedules
        self._lock = threading.RLock()  # of a call, and of what it leaves to the next: the last call's end, parameters
        self._last_end: EndOfCall | None = None  # of the last call, unless a graph has captured it
        self._worker = Worker(f"stretto, barriers of group {member.name}")

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(getattr(torch, name) for name in ELEMENTS)

    @property
    def reductions(self) -> frozenset[str]:
        return frozenset(OPERATIONS)

    def prepare(
        self, schedule: Schedule, group: dist.ProcessGroup | None, timeout: float, tile_bytes: int | None = None
    ) -> None:
        """Check that the group's GPUs can run the schedule. Its kernel is compiled at the first call."""
        if self._communicator is None and self._member.size > 1:
            self._obstacle = None  # of the library's calls: a schedule puts to other nodes
        communicator = self._communicator_or_none(puts_between_nodes=True)
        if communicator is None:
            raise ValueError(f"no schedule runs on this group's GPUs: {self._obstacle}")
        communicator.workspace.require_lines_for(schedule.protocol, schedule.name)
        self._schedules[id(schedule)] = schedule
        if tile_bytes is not None:
            self._tile_bytes[id(schedule)] = tile_bytes
        if communicator.workspace.nodes:
            size = DEFAULT_TILE_BYTES if tile_bytes is None else tile_bytes
            self._puts[id(schedule)] = SchedulePuts.allocate(schedule, communicator.workspace, size)

    def start(self, schedule: Schedule, call: BackendCall) -> "Work":
        """Enqueue the schedule's kernels and all copies."""
        if call.note == "uneven sizes":
            raise ValueError(f"{call.describe()}: its sizes are not equal, as even_sizes=True had promised")
        require_room(call)
        in_place = runs_in_place(schedule)
        kernel = self._kernel(schedule, call, in_place)
        if torch.cuda.is_current_stream_capturing():
            self._of_graphs[id(kernel)] = kernel

        def run(input: Tensor, output: Tensor | None) -> Tensor:
            kernel(input, output)
            return _own_output(kernel, self._member.rank, input) if output is None else output

        def launch() -> None:
            for part in call.collectives():
                run_staged(part, schedule.collective.name, in_place, self._member.rank, call.root, 1, run)

        with self._caught_up():
            work = self._launch(call, launch)
            if _is_one_run(call, in_place, self._member.rank):
                self._remember(call, kernel, schedule.name)
        return work

    def start_fastest(self, call: BackendCall) -> FastestRun:
        """Enqueue the fastest known kernel for a call on single contiguous tensors; no Work if NCCL is to run it."""
        if call.note:
            return _left_to_nccl(
                "the sizes of its parts are given" if call.note.endswith("sizes") else f"it is {call.note}"
            )
        if len(call.inputs) != 1 or len(call.outputs) != 1:
            return _left_to_nccl("it has several tensors")
        (input,), (output,) = call.inputs, call.outputs
        if not input.is_contiguous() or not output.is_contiguous():
            return _left_to_nccl("its tensors are not contiguous")
        if self._communicator is None and torch.cuda.is_current_stream_capturing():
            return _left_to_nccl("the group's first call cannot be set up while a graph is captured")
        communicator = self._communicator_or_none()
        if communicator is None:
            return _left_to_nccl(self._obstacle or "")
        if input.device != communicator.workspace.device:
            return _left_to_nccl(f"the group's kernels run on {communicator.workspace.device}")
        assert call.collective is not None
        buffers = _find_buffers(call.collective, input, output, self._member.rank)
        if buffers is None:
            return _left_to_nccl("its output overlaps its input")
        kernel, name, why = communicator.find(call.collective, *buffers, call.reduction or "sum")
        if kernel is None or name is None:
            return FastestRun(None, "", why, is_settled=not communicator.workspace.is_capturing)
        with self._caught_up():
            work = self._launch(call, lambda: kernel(*buffers))
            self._remember(call, kernel, name)
        return FastestRun(work, name, why)

    def _remember(self, call: BackendCall, kernel: Kernel | InterpretedSchedule, name: str) -> None:
        """Have such calls launched without Python from now on, if they are one launch and no graph captures them."""
        if self._fast is None:
            return
        assert self._communicator is not None
        launch = kernel.last_launch()
        if launch is None or self._communicator.workspace.is_capturing:
            return
        stream = torch.cuda.current_stream(self._communicator.workspace.device)
        self._fast.add_stream(stream.stream_id, stream.cuda_stream)
        milliseconds = round(call.timeout * 1000)
        kind = (call.operation, list(call.outputs), list(call.inputs), call.reduction, call.root)
        self._fast.add(*kind, milliseconds, call.title, f"schedule {name}", *launch)

    @contextlib.contextmanager
    def _caught_up(self) -> Iterator[None]:
        """A context in which this runner knows the group's last call, and no other thread begins one."""
        with self._lock:
            last = None if self._fast is None else self._fast.hold()
            try:
                if last is not None:  # calls that were launched without Python
                    assert self._communicator is not None
                    self._communicator.workspace.resume(*last)
                    self._last_end = last[1]
                yield
            finally:
                if self._fast is not None:
                    self._fast.release()

    def _find_end(self) -> EndOfCall | None:
        """Find where the last call ends; None if there is none to wait for: calls of a graph have not begun."""
        with self._caught_up():
            end = self._last_end
        return None if end is None or torch.cuda.is_current_stream_capturing() else end

    def begin_barrier(self, on_gpu: bool, is_async: bool) -> None:
        """Make the current stream wait for the last call, or the host; see `Runner.begin_barrier`."""
        end = self._find_end()
        if end is None:
            return
        if on_gpu:
            end.wait()
        elif not is_async:
            end.synchronize()
            failures.check()

    def after_schedules(self, barrier: "Work") -> "Work":
        """A Work that ends when this one has, and the GPU has finished the last call before it."""
        end = self._find_end()
        if end is None or end.query():
            return barrier

        def run() -> None:
            barrier.wait()
            end.synchronize()
            failures.check()

        return self._worker.submit_work(make_work(self._member.rank, "barrier", ()), run)

    def discard(self, schedule: Schedule) -> None:
        """Drop the schedule and its kernels once the GPU has finished with them, except those that graphs replay."""
        if (end := self._find_end()) is not None:
            end.synchronize()
        self._schedules.pop(id(schedule))
        self._tile_bytes.pop(id(schedule), None)
        self._puts.pop(id(schedule), None)
        self._kernels = {key: kernel for key, kernel in self._kernels.items() if key[0] != id(schedule)}

    def close(self, seconds: float) -> None:
        """Wait for the GPU, save a failure that was never raised, and free everything."""
        self._worker.close(seconds)
        if self._fast is not None:
            self._fast.hold()  # for ever: a call that another thread is in may be remembered after `clear`
            self._fast.clear()
        self._last_end = None
        if self._communicator is not None:
            torch.cuda.synchronize(self._communicator.workspace.device)
        self._kernels.clear()
        self._of_graphs.clear()
        self._puts.clear()
        self._schedules.clear()
        if self._communicator is not None:
            failures.keep_unseen()
            self._communicator.close()
            self._communicator = None
        self._obstacle = "the group was destroyed"

    def _launch(self, call: BackendCall, launch: Callable[[], None]) -> "Work":
        """Launch a call's kernels on the stream that they belong to, once caught up; returns their Work."""
        assert self._communicator is not None
        workspace = self._communicator.workspace
        workspace.set_limit(call.timeout)  # the group's, which `set_timeout` may have changed
        is_captured = workspace.is_capturing
        rank, title = self._member.rank, call.title
        if not call.is_async and not is_captured:
            with profiled(title, call.inputs):
                launch()
            work = make_enqueued_work(rank, title, call.outputs)
        else:
            caller = torch.cuda.current_stream(workspace.device)
            stream = workspace.group_stream
            stream.wait_stream(caller)
            try:
                with torch.cuda.stream(stream), profiled(title, call.inputs):
                    launch()
                    work = make_enqueued_work(rank, title, call.outputs, (*call.inputs, *call.outputs))
            except BaseException:
                caller.wait_stream(stream)  # the caller may free the tensors; and a capture must be joined
                raise
            if not call.is_async:
                caller.wait_stream(stream)
        if not is_captured:
            self._last_end = work.end
            workspace.mark_end(work.end)
            if self._fast is not None and workspace.last_stream >= 0:
                self._fast.follow(workspace.last_stream, work.end)
        return work

    def _communicator_or_none(self, *, puts_between_nodes: bool = False) -> CudaCommunicator | None:
        """The communicator, made at the first use by all ranks together; None where the GPUs cannot work together.

        puts_between_nodes: whether they can on several nodes.
        """
        if self._communicator is None and self._obstacle is None:
            group = c10d._resolve_process_group(self._member.name)  # type: ignore[arg-type]  # a GroupName, which is a str
            device = torch.device("cuda", torch.cuda.current_device())
            self._obstacle = find_obstacle(group, device, needs_atomics=False, puts_between_nodes=puts_between_nodes)
            if self._obstacle is None:
                self._communicator = CudaCommunicator(group)
                self._open_fast_calls(self._communicator)
            else:
                logger.debug("group %s runs no schedules on its GPUs: %s", self._member.name, self._obstacle)
        return self._communicator

    def _open_fast_calls(self, communicator: CudaCommunicator) -> None:
        if self._fast is None:
            return
        stream = communicator.workspace.group_stream
        device = communicator.workspace.device
        addresses = *launch_addresses(), stream.stream_id, stream.cuda_stream, loaded_kernels_address()
        self._fast.open(self._member.rank, device, *addresses)

    def _kernel(
        self, schedule: Schedule, call: BackendCall, in_place: bool
    ) -> FusedScheduleKernel | InterpretedSchedule:
        assert self._communicator is not None
        dtype, reduction = str(call.dtype).removeprefix("torch."), call.reduction or "sum"
        key = (id(schedule), dtype, reduction)
        if key not in self._kernels:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the schedule {schedule.name} is not compiled for {dtype} yet, and cannot be while a graph is "
                    "captured: call once before"
                )
            variant = Variant(dtype, reduction, schedule.protocol)
            workspace = self._communicator.workspace
            tile_bytes, puts = self._tile_bytes.get(id(schedule)), self._puts.get(id(schedule))
            if tile_bytes is None and puts is None:
                try:
                    self._kernels[key] = FusedScheduleKernel(schedule, workspace, variant, in_place=in_place)
                    return self._kernels[key]
                except ValueError as error:
                    logger.debug("%s runs by the interpreter: %s", schedule.name, error)
            size = DEFAULT_TILE_BYTES if tile_bytes is None else tile_bytes
            self._kernels[key] = InterpretedSchedule(
                schedule, workspace, variant, in_place=in_place, tile_bytes=size, puts=puts
            )
        return self._kernels[key]


def _left_to_nccl(why: str) -> FastestRun:
    """The result for a call that NCCL is to run."""
    return FastestRun(None, "", why)


def _own_output(kernel: FusedScheduleKernel | InterpretedSchedule, rank: int, whole: Tensor) -> Tensor:
    """The rank's output within a buffer that holds input and output, in place."""
    collective = kernel.collective
    chunks = whole.numel() // collective.chunks_per_loop  # such a collective has blocks of equal size
    start = collective.starts(rank)[1] * chunks
    if collective.output_chunks == collective.chunks_per_loop:
        return whole
    return whole[start : start + collective.output_chunks * chunks]


def _is_one_run(call: BackendCall, in_place: bool, rank: int) -> bool:
    """Check whether `run_staged` runs an installed schedule's kernel on the call's own tensors, without copies.

    in_place: how the kernel takes input and output.
    """
    if call.is_own or call.note or len(call.inputs) != 1 or len(call.outputs) != 1:
        return False
    (input,), (output,) = call.inputs, call.outputs
    if call.collective in (None, "reduce", "broadcast") or not input.is_contiguous() or not output.is_contiguous():
        return False
    buffers = _find_buffers(str(call.collective), input, output, rank)
    return buffers is not None and (buffers[1] is None) == in_place


def _find_buffers(collective: str, input: Tensor, output: Tensor, rank: int) -> tuple[Tensor, Tensor | None] | None:
    """The kernel's arguments: (input, output), or (both, None) in place; None for tensors that overlap otherwise."""
    larger, smaller = (output, input) if output.numel() >= input.numel() else (input, output)
    own = larger.data_ptr() + rank * smaller.nbytes if larger.numel() != smaller.numel() else larger.data_ptr()
    if smaller.data_ptr() == own:
        # In place, a reduce-scatter overwrites all of its input with sums, and the caller wants to keep the input.
        return None if collective in ("reducescatter", "alltoall") else (larger.view(-1), None)
    if overlap(input, output):
        return None
    return input.view(-1), output.view(-1)
