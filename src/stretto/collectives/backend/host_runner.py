# SPDX-License-Identifier: Apache-2.0
"""Runs schedules on CPU tensors: the host executor, on shared memory that is allocated once, in the group's own thread.

A call is a job of the worker thread. Its ranks begin it with a barrier (`Agreement`), which ensures that all make the
same call and that all FIFO slots are free; then the schedule runs on the call's tensors. The calling thread continues,
and may wait for the Work. After an error that may leave a rank in the middle of a schedule, the group's memory is not
used again: every later call raises.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.backend.agreement import Agreement, DisagreementError
from stretto.collectives.backend.calls import BackendCall, require_room, run_staged, runs_in_place
from stretto.collectives.backend.native import make_work
from stretto.collectives.backend.runner import Member
from stretto.collectives.executor.host import run_thread_blocks
from stretto.collectives.executor.layout import Buffers
from stretto.collectives.executor.plan import DEFAULT_TILE_BYTES, DTYPES, REDUCTIONS, ExecutionPlan, make_plan
from stretto.collectives.executor.rank_run import RankRun
from stretto.collectives.schedule import Schedule
from stretto.memory import HostMemory, allocate

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work


_MAX_PLANS = 256


@dataclass
class _PreparedSchedule:
    """A schedule's memory, its connections' message counts so far, and its execution plans by size."""

    schedule: Schedule
    memory: HostMemory
    tile_bytes: int
    passed: dict[tuple[int, int, int], int] = field(default_factory=dict)
    plans: dict[tuple[object, ...], tuple[ExecutionPlan, dict[str, object]]] = field(default_factory=dict)


class HostRunner:
    """Runner for CPU tensors. The group's ranks are processes of one machine."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._worker = Worker(f"stretto, group {member.name}")
        self._agreement: Agreement | None = None
        self._prepared: dict[int, _PreparedSchedule] = {}
        self._calls = 0
        self._broken: str | None = None

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(DTYPES)

    @property
    def reductions(self) -> frozenset[str]:
        """The reductions of the host executor, and averages, which `run_staged` divides."""
        return frozenset(REDUCTIONS) | {"avg"}

    def prepare(
        self, schedule: Schedule, group: dist.ProcessGroup | None, timeout: float, tile_bytes: int | None = None
    ) -> None:
        """Allocate shared memory for the schedule's largest plan."""
        self._worker.drain()  # this thread is about to use the group
        if self._agreement is None:
            self._agreement = Agreement(group, timeout)
        tile_bytes = tile_bytes or DEFAULT_TILE_BYTES
        elements = schedule.collective.input_chunks * tile_bytes
        largest = _make_plan(schedule, elements, torch.uint8, None, schedule.in_place, tile_bytes)
        memory = allocate(largest.buffer_bytes, group, signals=largest.signals, timeout=timeout)
        assert isinstance(memory, HostMemory)
        self._prepared[id(schedule)] = _PreparedSchedule(schedule, memory, tile_bytes)

    def start(self, schedule: Schedule, call: BackendCall) -> "Work":
        work = make_work(self._member.rank, call.title, call.outputs, call.inputs)
        prepared = self._prepared[id(schedule)]

        def run() -> None:
            try:
                self._run(prepared, call)
            except BaseException as error:
                if self._worker.is_closed:
                    message = f"the process group was destroyed or aborted during {call.describe()}"
                    raise RuntimeError(message) from error
                raise

        return self._worker.submit_work(work, run)

    def begin_barrier(self, on_gpu: bool, is_async: bool) -> None:
        """Do nothing: `after_schedules` waits for all calls."""

    def after_schedules(self, barrier: "Work") -> "Work":
        """A Work that waits for the barrier in the worker thread, after the schedules of earlier calls.

        The caller has started the barrier, so that gloo's calls stay in the same order on all ranks.
        """
        if not self._worker.has_begun:
            return barrier
        return self._worker.submit_work(make_work(self._member.rank, "barrier", ()), barrier.wait)

    def start_fastest(self, call: BackendCall) -> None:
        """None: on a CPU gloo is faster than any schedule here."""

    def discard(self, schedule: Schedule) -> None:
        """Free the schedule's memory once the worker has finished earlier calls."""
        self._worker.drain()
        self._prepared.pop(id(schedule)).memory.close()

    def close(self, seconds: float) -> None:
        """End the worker thread, and free all memory."""
        self._worker.close(seconds)
        for prepared in self._prepared.values():
            prepared.memory.close()
        self._prepared = {}
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    # The methods below run in the worker thread.

    def _run(self, prepared: _PreparedSchedule, call: BackendCall) -> None:
        if self._broken is not None:
            raise RuntimeError(f"no schedule runs in this group any more, since an earlier call failed: {self._broken}")
        self._calls += 1
        try:
            self._run_parts(prepared, call)
        except DisagreementError:
            raise  # raised on all ranks, none of which has started
        except BaseException as error:
            self._break(prepared, error)
            raise

    def _run_parts(self, prepared: _PreparedSchedule, call: BackendCall) -> None:
        if call.note == "uneven sizes":
            self._wait_and_compare(call, {"refused": "its sizes are not equal, as even_sizes=True had promised"})
        collective = prepared.schedule.collective.name
        is_scaled = _scales_inputs(call)
        average = self._member.size if call.reduction == "avg" and not is_scaled else 1
        in_place = runs_in_place(prepared.schedule)
        parts = list(call.collectives())
        for number, part in enumerate(parts, 1):
            position = f"{number} of {len(parts)}"
            run = partial(self._run_part, prepared, call, part.input_elements, position, in_place)
            run_staged(part, collective, in_place, self._member.rank, call.root, average, run)

    def _run_part(
        self,
        prepared: _PreparedSchedule,
        call: BackendCall,
        elements: int,
        position: str,
        in_place: bool,
        input: Tensor,
        output: Tensor | None,
    ) -> Tensor:
        own: dict[str, object] = {
            "operation": call.operation,
            "root": call.root,
            "part": position,
            "call": self._calls,
            "asks for": call.reduction,
        }
        if call.operation == "allreduce_coalesced":  # other lists may have the same total
            own["its tensors' elements"] = call.describe_sizes()
        plan = None
        try:
            require_room(call)
            plan, from_plan = self._find_plan(prepared, call, elements, in_place)
            description = own | from_plan
        except ValueError as error:
            description = own | {"refused": str(error)}
        self._wait_and_compare(call, description)
        assert plan is not None  # otherwise `_wait_and_compare` has raised
        if _scales_inputs(call):
            ranks = self._member.size
            input = input.div_(ranks) if output is None else input / ranks
        return self._execute(prepared, plan, input, output, call.timeout)

    def _wait_and_compare(self, call: BackendCall, description: dict[str, object]) -> None:
        assert self._agreement is not None
        self._agreement.wait_and_compare(call.describe(), description, call.timeout)

    def _execute(
        self, prepared: _PreparedSchedule, plan: ExecutionPlan, input: Tensor, output: Tensor | None, timeout: float
    ) -> Tensor:
        rank = self._member.rank
        buffers = Buffers(prepared.schedule, plan.collective, plan.layout, rank, input, output)
        run = RankRun(plan, rank, prepared.memory, buffers, prepared.passed)
        run_thread_blocks(run, timeout)
        for key, connection in plan.connections.items():
            prepared.passed[key] = prepared.passed.get(key, 0) + connection.messages * plan.tiles
        return buffers.finish()

    def _find_plan(
        self, prepared: _PreparedSchedule, call: BackendCall, elements: int, in_place: bool
    ) -> tuple[ExecutionPlan, dict[str, object]]:
        reduction = "sum" if call.reduction == "avg" else call.reduction or None
        assert call.dtype is not None
        key = (elements, call.dtype, reduction)
        if key not in prepared.plans:
            if len(prepared.plans) >= _MAX_PLANS:
                prepared.plans.clear()
            plan = _make_plan(prepared.schedule, elements, call.dtype, reduction, in_place, prepared.tile_bytes)
            prepared.plans[key] = plan, plan.describe()
        return prepared.plans[key]

    def _break(self, prepared: _PreparedSchedule, error: BaseException) -> None:
        """Stop running schedules, send the reason to the other ranks, and add their reports to the error."""
        self._broken = str(error)
        if self._agreement is None:  # closed meanwhile
            return
        losses = self._agreement.find_losses()
        if losses and not all(loss in str(error) for loss in losses):
            error.args = (f"{error}\n" + "\n".join(losses),)
        self._broken = str(error)
        self._agreement.give_up(self._broken)
        memory = prepared.memory
        for peer in range(memory.world_size):
            memory.signal(peer, memory.signals - 1)  # `ExecutionPlan.gave_up`, of every plan of this schedule


def _scales_inputs(call: BackendCall) -> bool:
    """Check whether an average divides each rank's input, as NCCL's: 16 bits may hold the average and not the sum."""
    return call.reduction == "avg" and call.dtype in (torch.float16, torch.bfloat16)


def _make_plan(
    schedule: Schedule, elements: int, dtype: torch.dtype, reduction: str | None, in_place: bool, tile_bytes: int
) -> ExecutionPlan:
    """The execution plan for an input of that many elements on each rank."""
    return make_plan(
        schedule, elements, None, in_place=in_place, dtype=dtype, reduction=reduction, tile_bytes=tile_bytes, slots=None
    )


Job = Callable[[], None]
_GRACE = 5.0  # seconds for the last job, if nothing has closed the worker


class Worker:
    """A thread that runs jobs one after another, in the order in which they were submitted.

    It starts with its first job, and ends with `close`, when the object is collected, or with the interpreter.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.is_closed = False

    @property
    def has_begun(self) -> bool:
        """True if any job has been submitted."""
        return self._thread is not None

    def submit(self, job: Job) -> None:
        """Queue a job, which must not raise. RuntimeError once the worker is closed."""
        with self._lock:
            if self.is_closed:
                raise RuntimeError(f"{self._name} is closed: its process group was destroyed or aborted")
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
                weakref.finalize(self, _end, self._jobs, self._thread, _GRACE)
                self._thread.start()
            self._jobs.put(job)

    def submit_work(self, work: Any, run: Callable[[], object]) -> "Work":
        def job() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001  (whatever it is, `work.wait` must raise it)
                work.fail(error)
            else:
                work.succeed()

        self.submit(job)
        return work

    def drain(self) -> None:
        """Wait until all jobs that were submitted so far have run."""
        if self._thread is not None and not self.is_closed:
            done = threading.Event()
            self.submit(done.set)
            done.wait()

    def close(self, seconds: float) -> bool:
        """Accept no more jobs, and wait up to `seconds` for those so far; returns whether all have run."""
        with self._lock:
            self.is_closed = True
        if self._thread is not None:
            _end(self._jobs, self._thread, seconds)
        return self._thread is None or not self._thread.is_alive()


def _work(jobs: SimpleQueue[Job | None]) -> None:
    with torch.inference_mode():  # or this thread could not write to inference tensors
        while (job := jobs.get()) is not None:
            job()
            del job  # or it would keep its tensors until the next job


def _end(jobs: SimpleQueue[Job | None], thread: threading.Thread, seconds: float) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(seconds)
