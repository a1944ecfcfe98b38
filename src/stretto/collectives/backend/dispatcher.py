# SPDX-License-Identifier: Apache-2.0
"""Decides for each call of the backend what runs it: an installed schedule, the fastest one, gloo or NCCL."""

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.backend.calls import NON_COLLECTIVE, BackendCall, find_obstacle
from stretto.collectives.backend.debug_check import DebugCheck
from stretto.collectives.backend.nccl_warmup import NcclWarmup
from stretto.collectives.backend.runner import FastestRun, Member, Runner
from stretto.collectives.executor.layout import overlap
from stretto.collectives.schedule import Schedule
from stretto.memory import failures, is_debugging

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

    from stretto.collectives.backend.two_level import TwoLevelRunner

logger = logging.getLogger("stretto.collectives")


@dataclass(frozen=True, eq=False)
class InstalledSchedule:
    """A verified schedule that a user installed in a group, for calls of its collective in a range of sizes.

    min_bytes, max_bytes: the range, both inclusive (max_bytes 0: no limit); dtypes: None for all that the device's
    runner supports; even_sizes: also for all-to-alls with explicit sizes, which the user has promised to be equal on
    all ranks; tile_bytes: of the executor's tiles, None for its default.
    """

    schedule: Schedule
    min_bytes: int
    max_bytes: int
    dtypes: frozenset[torch.dtype] | None
    even_sizes: bool = False
    tile_bytes: int | None = None

    def find_obstacle(
        self, call: BackendCall, dtypes: frozenset[torch.dtype], reductions: frozenset[str]
    ) -> str | None:
        """Say why it cannot run this call, on a runner with these dtypes and reductions; None if it can."""
        schedule = self.schedule
        if schedule.collective.name != call.collective:
            return f"it does {schedule.collective.name}"
        if call.bytes < self.min_bytes:
            return f"it is for at least {self.min_bytes} bytes"
        if self.max_bytes and call.bytes > self.max_bytes:
            return f"it is for at most {self.max_bytes} bytes"
        if call.dtype not in (dtypes if self.dtypes is None else dtypes & self.dtypes):
            return f"it is not for {str(call.dtype)[6:]}"
        if call.reduction and call.reduction not in reductions:
            return f"its executor has no {call.reduction}"
        wanted = "sum" if call.reduction == "avg" else call.reduction
        if call.reduction and schedule.reduction not in (None, wanted):
            return f"it is made for {schedule.reduction}"
        if call.collective in ("broadcast", "reduce") and schedule.collective.root != call.root:
            return f"its root is rank {schedule.collective.root}"
        if call.note.endswith("sizes") and not self.even_sizes:
            return "sizes are given, and may be others on other ranks (even_sizes=True promises that they are equal)"
        return None


class CallCounter:
    """Counts calls by (operation, what ran it), and logs each distinct one once. Thread-safe."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._log_once = functools.lru_cache(65536)(logger.debug)

    def count(self, call: BackendCall, ran_as: str, why: str) -> None:
        """Count a call, and log what ran it at debug level, once for calls that are alike."""
        with self._lock:
            self._counts[call.operation, ran_as] += 1
        if logger.isEnabledFor(logging.DEBUG):
            self._log_once(f"group {self._group}: {call.describe()} runs as {ran_as}: {why}")

    def read(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)


class Dispatcher:
    """Decides what runs the calls of one group, on this rank. The backend holds it; it holds neither backend nor group.

    inner: the name of the inner backend by device type ("gloo", "nccl"). nccl_warmup: NCCL's, where there are GPUs.
    fast: what runs repeated calls on GPUs without this dispatcher, which fills it (native/fast_calls.hpp).
    """

    def __init__(
        self, member: Member, inner: dict[str, str], nccl_warmup: NcclWarmup | None = None, fast: Any = None
    ) -> None:
        self.member = member
        self.inner = inner
        self.counter = CallCounter(member.name)
        self._installed: tuple[InstalledSchedule, ...] = ()
        self._runners: dict[str, Runner | None] = {}
        self._nccl_warmup = nccl_warmup
        self._bypassing: set[int] = set()  # threads
        self._debug_check = DebugCheck(member) if is_debugging() else None
        self._fast = None if is_debugging() else fast
        self._two_level: TwoLevelRunner | None = None
        self.is_closed = False
        self.load_schedules: Callable[[], object] | None = None
        """Callback: collectively installs schedules before the first call that one could run."""

    @property
    def _is_bypassed(self) -> bool:
        """True if this thread is in `bypassed`; other threads may make calls concurrently."""
        return threading.get_ident() in self._bypassing

    @property
    def installed(self) -> tuple[InstalledSchedule, ...]:
        """The schedules that users have installed, in the order in which they did."""
        return self._installed

    @installed.setter
    def installed(self, schedules: tuple[InstalledSchedule, ...]) -> None:
        self._installed = schedules
        if self._fast is not None:
            self._fast.clear()  # one of them may run what another kernel has run

    @property
    def two_level(self) -> "TwoLevelRunner | None":
        """Runs calls that no installed schedule matches in two levels, between nodes and inside them."""
        return self._two_level

    @two_level.setter
    def two_level(self, runner: "TwoLevelRunner | None") -> None:
        self._two_level = runner
        if self._fast is not None:
            self._fast.clear()

    def counts(self) -> dict[tuple[str, str], int]:
        """The calls so far, by (operation, what ran it)."""
        counts = Counter(self.counter.read())
        for operation, ran_as, number in () if self._fast is None else self._fast.counts():
            counts[operation, ran_as] += number
        return dict(counts)

    def __call__(
        self,
        operation: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        reduction: str,
        root: int,
        milliseconds: int,
        note: str,
        is_async: bool = False,
    ) -> "Work | None":
        """Start a schedule for this call and return its Work; None: the inner backend is to run it.

        RuntimeError once the group has been destroyed or aborted; PeerError if a wait of this process has failed. If
        STRETTO_DEBUG was set when the group was made, DisagreementError where ranks make different calls, and PeerError
        for a rank that does not arrive.
        """
        timeout = milliseconds / 1000
        call = BackendCall(operation, tuple(outputs), tuple(inputs), reduction, root, timeout, note, is_async)
        if self._is_bypassed and not self.is_closed:
            self._leave_to_inner(call)
            return None
        return self.start(call)

    def start(self, call: BackendCall) -> "Work | None":
        """Start a schedule for this call, as `__call__`.

        ValueError for a user's own collective that has none, and for tensors with strides that gloo would ignore.
        """
        if self.is_closed:
            raise RuntimeError(f"{call.operation}: the process group {self.member.name} was destroyed or aborted")
        failures.check()
        if self._debug_check is not None:
            self._debug_check.require_same(call)
        obstacle = find_obstacle(call, self.member.size)
        with _on_gpu_of(call):
            return self._start(call, obstacle)

    def _start(self, call: BackendCall, obstacle: str | None) -> "Work | None":
        chosen, why = (None, obstacle) if obstacle is not None else self._choose(call)
        if chosen is None and call.is_own:
            raise ValueError(f"no installed schedule runs {call.describe()}: {why}")
        if chosen is None and obstacle is None and self._two_level is not None:
            algorithm, how = self._two_level.find_algorithm(call)
            if algorithm:
                with self.bypassed():
                    work = self._two_level.start(call)
                self.counter.count(call, f"two levels, {algorithm}", f"{why}; {how}")
                return work
            why = f"{why}; {how}"
        if chosen is None:
            fastest = self._start_fastest(call) if obstacle is None else None
            if fastest is not None and fastest.work is not None:
                self._warm_up_nccl(call)
                self.counter.count(call, f"schedule {fastest.name}", fastest.why)
                return fastest.work
            reason = why if fastest is None else f"{why}; {fastest.why}"
            inner = self.inner.get(call.device_type, "nothing")
            if inner == "gloo":
                _refuse_for_gloo(call, reason)
            self.counter.count(call, inner, reason)
            self._leave_to_inner(call)
            if self._fast is not None and inner == "nccl" and fastest is not None and fastest.is_settled:
                self._fast.add_inner(call.operation, call.outputs, call.inputs, call.reduction, call.root, inner)
            return None
        runner = self.runner(call.device_type)
        assert runner is not None
        work = runner.start(chosen.schedule, call)
        self._warm_up_nccl(call)
        self.counter.count(call, f"schedule {chosen.schedule.name}", why)
        return work

    def begin_barrier(self, on_gpu: bool, is_async: bool) -> None:
        """Before a barrier of an inner backend: have it come after the schedules that this rank's GPU has begun.

        on_gpu: of NCCL, which follows the current stream. A barrier of the CPU's backend follows nothing: with
        is_async False the host waits here, otherwise the Work of `after_schedules` does. PeerError if a wait of this
        process has failed.
        """
        runner = self._runners.get("cuda")
        if runner is not None and not self._is_bypassed:
            runner.begin_barrier(on_gpu, is_async)

    def after_schedules(self, barrier: "Work") -> "Work":
        """A Work that ends when this barrier of the CPU's backend has, and all schedules that were started before."""
        for runner in self._runners.values():
            if runner is not None and not self._is_bypassed:
                barrier = runner.after_schedules(barrier)
        return barrier

    def warm_up_nccl_if_ready(self) -> None:
        """At a synchronous barrier of the CPU's backend: have NCCL connect if all ranks use GPUs."""
        if self._nccl_warmup is not None and not self._is_bypassed and not self.is_closed:
            with self.bypassed():
                self._nccl_warmup.warm_up_if_ready()

    def runner(self, device_type: str) -> Runner | None:
        """The group's runner for tensors on such devices, made at its first use; None where there is none."""
        if device_type not in self._runners:
            self._runners[device_type] = _make_runner(device_type, self.member, self._fast)
        return self._runners[device_type]

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """A context in which inner backends run all calls of this thread, uncounted: Stretto's own messages."""
        thread = threading.get_ident()
        self._bypassing.add(thread)
        if self._fast is not None:
            self._fast.pause()
        try:
            yield
        finally:
            self._bypassing.discard(thread)
            if self._fast is not None:
                self._fast.release()

    def close(self, seconds: float) -> None:
        """End the group; calls that have started may take `seconds` more. The counts stay.

        PeerError, once everything is closed, if a wait of this process has failed and the failure was never raised.
        """
        self.is_closed = True
        self.installed = ()
        if self._two_level is not None:
            self._two_level.close(seconds)
        for runner in self._runners.values():
            if runner is not None:
                runner.close(seconds)
        failures.raise_unseen()

    def _leave_to_inner(self, call: BackendCall) -> None:
        """Keep track of whether NCCL has connected the ranks: a collective does so, messages of some ranks cannot."""
        if self._nccl_warmup is None or call.device_type != "cuda":
            return
        if call.operation not in NON_COLLECTIVE:
            self._nccl_warmup.is_warm = True
        elif call.note == "coalescing":
            self._nccl_warmup.require_all(call.timeout)

    def _warm_up_nccl(self, call: BackendCall) -> None:
        """Make NCCL connect, too, when a schedule runs a call on GPUs, in which all ranks participate."""
        if self._nccl_warmup is not None and call.device_type == "cuda":
            self._nccl_warmup.warm_up(call.inputs[0].device)

    def _start_fastest(self, call: BackendCall) -> FastestRun | None:
        """Let the device's runner choose, for a call that no installed schedule matches."""
        runner = self.runner(call.device_type)
        if runner is None:
            return None
        with self.bypassed():  # its first call exchanges messages over this very group
            return runner.start_fastest(call)

    def _choose(self, call: BackendCall) -> tuple[InstalledSchedule | None, str]:
        """The installed schedule for a call, and the reason; the last installed one, if several match."""
        # With GPUs not before a call on these: ranks may not have chosen theirs yet.
        is_time = call.device_type == ("cuda" if "cuda" in self.inner else "cpu")
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if self.load_schedules is not None and is_time and not is_captured:
            self.load_schedules()
            self.load_schedules = None
        if not self.installed:
            return None, "no schedule is installed"
        runner = self.runner(call.device_type)
        if runner is None:
            return None, f"Stretto has no executor for {call.device_type} tensors"
        obstacles = {}
        for installed in reversed(self.installed):
            obstacle = installed.find_obstacle(call, runner.dtypes, runner.reductions)
            if obstacle is None:
                return installed, "it is installed for such calls"
            if installed.schedule.collective.name == call.collective:
                obstacles[installed.schedule.name] = obstacle
        if not obstacles:
            return None, f"no schedule is installed for {call.collective}"
        return None, "; ".join(f"schedule {name}: {obstacle}" for name, obstacle in obstacles.items())


def _on_gpu_of(call: BackendCall) -> contextlib.AbstractContextManager[object]:
    """A context in which the current GPU is that of the call's tensors, where memory and kernels of the group are."""
    tensors = (*call.inputs, *call.outputs)
    is_on_gpu = bool(tensors) and tensors[0].is_cuda and torch.cuda.is_initialized()
    return torch.cuda.device(tensors[0].device) if is_on_gpu else contextlib.nullcontext()


_IGNORE_STRIDES = ("allreduce", "allreduce_coalesced", "reduce", "broadcast", "scatter")
"""The operations of which gloo sends and writes as many consecutive elements as a tensor has, whatever its strides."""


_BY_ROWS = ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced")
"""The operations in which gloo reads a tensor's first dimension without asking whether there is one."""


def _refuse_for_gloo(call: BackendCall, reason: str) -> None:
    """Raise ValueError for tensors of which gloo would send or write other bytes than theirs, or crash."""

    def refuse(what: str, why: str) -> NoReturn:
        raise ValueError(f"{call.operation} {what}: gloo, which runs this call ({reason}), {why}")

    def show(tensor: Tensor) -> str:
        return f"of shape {tuple(tensor.shape)} with strides {tensor.stride()}"

    tensors = (*call.inputs, *call.outputs)
    for tensor in tensors if call.operation in _IGNORE_STRIDES else ():
        is_strided = tensor.layout == torch.strided  # gloo has another implementation for sparse tensors
        if is_strided and not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            refuse(f"of a tensor {show(tensor)}", "does not support gaps between elements: pass tensor.contiguous()")
    # Of an all-to-all gloo itself refuses such an input, but writes the output's elements one after another. It adds
    # the inputs of a reduce-scatter in the order of their memory, unless there are gaps.
    for output in call.outputs if call.operation in ("alltoall_base", "reduce_scatter", "scatter") else ():
        if not output.is_contiguous():
            refuse(f"into an output {show(output)}", "does not support that: pass a contiguous output")
    for input in call.inputs if call.operation == "reduce_scatter" else ():
        if not input.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(input):
            refuse(f"of an input {show(input)}", "does not support that: pass tensor.contiguous()")
    if call.operation == "alltoall_base" and overlap(call.inputs[0], call.outputs[0]):
        refuse(
            "whose output shares memory with its input", "overwrites what it has yet to send: pass an output of its own"
        )
    if call.operation in _BY_ROWS and not all(map(Tensor.dim, tensors)):
        refuse("of a tensor without dimensions", "divides the first dimension: pass tensor.view(1)")


def _make_runner(device_type: str, member: Member, fast: Any) -> Runner | None:
    """Make the runner for this group's tensors on devices of this type; None where Stretto has none.

    This is the one place to plug in a device's executor.
    """
    match device_type:
        case "cpu":
            from stretto.collectives.backend.host_runner import HostRunner

            return HostRunner(member)
        case "cuda":
            from stretto.collectives.backend.cuda_runner import CudaRunner

            return CudaRunner(member, fast)
        case _:
            return None


_dispatchers: WeakValueDictionary[str, Dispatcher] = WeakValueDictionary()
"""The dispatchers by the names of their groups, which are unique in a process at any time."""


def register_dispatcher(dispatcher: Dispatcher) -> None:
    """Have `find_dispatcher` find the dispatcher of a group, as long as something else holds it."""
    _dispatchers[dispatcher.member.name] = dispatcher


def find_dispatcher(group: dist.ProcessGroup | None) -> Dispatcher:
    """The dispatcher of a group (None: the default group). ValueError for a group of another backend."""
    if not dist.is_initialized():
        raise ValueError('there is no process group: call torch.distributed.init_process_group("stretto") first')
    known = dist.group.WORLD if group is None else group
    if not isinstance(known, dist.ProcessGroup):
        raise ValueError(f"this process (rank {dist.get_rank()}) is not in the group")
    # By name: torch may wrap a backend (TORCH_DISTRIBUTED_DEBUG=DETAIL), or drop its Python object.
    found = _dispatchers.get(known.group_name)
    if found is not None and not found.is_closed:
        return found
    raise ValueError(
        f"the group's backend is {dist.get_backend_config(known)}, not stretto: name stretto in init_process_group or "
        "new_group"
    )
