# SPDX-License-Identifier: Apache-2.0
"""The backend of native/backend.hpp in Python, for torch 2.15 and later on machines without a C++ compiler.

torch wraps every Work that a Python backend returns, including the inner backends' ones, and the wrapper forwards only
`wait` and `get_future`: `is_completed` stays False. So the C++ backend is preferred if it can be compiled.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, Work

from stretto.collectives.backend.calls import NON_COLLECTIVE
from stretto.memory import failures

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
_SECONDS_TO_END = 5.0
_alive: set["PythonBackend"] = set()
"""Backends that are not shut down. Where torch wraps one, it keeps no reference to the Python object, without which its
methods would be gone.
"""


class PythonWork(Work):
    """A Work to be ended by `succeed` or `fail`."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._ended = threading.Event()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._error: BaseException | None = None

    def succeed(self) -> None:
        """End it: the outputs are there."""
        self._ended.set()
        # In another thread: a callback may wait for a later call.
        threading.Thread(target=self._future.set_result, args=(self._outputs,), daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """End it with an error, which every wait raises."""
        self._error = error
        self._ended.set()
        threading.Thread(target=self._future.set_exception, args=(error,), daemon=True).start()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; raises the work's error, or RuntimeError after the timeout (0: no limit)."""
        if not self._ended.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"the schedule has not ended within {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
        self._future.wait()  # after `wait`, the future must have its value
        failures.check()
        return True

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the outputs."""
        return self._future


class PythonEnqueuedWork(Work):
    """A Work of kernels on the current stream, as `EnqueuedWork` in native/work.hpp.

    The caller's `tensors` are kept until `wait`, or while the Work lives; then the caching allocator is notified of the
    stream.
    """

    def __init__(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._tensors = list(tensors)
        self._device = outputs[0].device
        self._stream = torch.cuda.current_stream(self._device)
        self.end: torch.cuda.Event = self._stream.record_event()
        self._future: torch.futures.Future[list[Tensor]] | None = None
        if tensors:
            self._future = self._make_future()  # now, since it records the current stream's work

    def __del__(self) -> None:
        for tensor in self._tensors:
            tensor.record_stream(self._stream)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for this call, and with a timeout the host too.

        PeerError if a wait of this process has failed, RuntimeError after the timeout (0: none).
        """
        torch.cuda.current_stream(self._device).wait_event(self.end)
        self._tensors.clear()
        if timeout:
            limit = time.monotonic() + timeout.total_seconds()
            while not self.end.query():
                if time.monotonic() >= limit:
                    raise RuntimeError(f"the schedule has not ended within {timeout.total_seconds():g} s")
                time.sleep(0.001)
        failures.check()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU has finished it. PeerError as `wait`."""
        done = self.end.query()
        failures.check()
        return done

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future of the outputs."""
        if self._future is None:
            torch.cuda.current_stream(self._device).wait_event(self.end)  # the future remembers the current stream
            self._future = self._make_future()
        return self._future

    def _make_future(self) -> "torch.futures.Future[list[Tensor]]":
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._device])
        future.set_result(self._outputs)
        return future


class SeveralWorks(Work):
    """Several calls as one, of a batch that torch has coalesced."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        return all(work.wait(timeout) for work in self._works)


class PythonBackend(Backend):
    """The backend in Python, with the arguments of `StrettoBackend` in native/backend.hpp. Methods are c10d's."""

    def __init__(
        self,
        rank: int,
        size: int,
        cpu: Any,
        cuda: Any,
        dispatch: Callable[..., Work | None],
        split: Callable[..., Backend | None],
        milliseconds: int,
    ) -> None:
        super().__init__(rank, size)
        self._cpu = cpu
        self._cuda = cuda
        self.dispatch = dispatch
        self._split = split
        self._options = Backend.Options("stretto", timedelta(milliseconds=milliseconds))
        self._is_coalescing = False
        self._batch: list[Work] = []  # calls of a coalesced batch that gloo runs
        self._sequence_number = 0
        self._last_split: tuple[str, Backend] | None = None
        _alive.add(self)

    def getBackendName(self) -> str:
        """The backend's name."""
        return "stretto"

    @property
    def options(self) -> Any:
        """The options, with the time limit."""
        return self._options

    @property
    def supports_splitting(self) -> bool:
        """True: `split` works."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether NCCL, the inner backend for GPUs, can coalesce calls."""
        return self._cuda is not None and self._cuda.supports_coalescing

    def split(self, store: Any, ranks: list[int], opts: Any) -> Backend:
        """Make the backend of a part of the group.

        torch asks once for each device type, and gets the same backend each time. RuntimeError on a rank outside the
        part.
        """
        if self._last_split is None or self._last_split[0] != opts.group_name:
            made = self._split(store, self.rank(), ranks, opts.group_name, round(opts._timeout.total_seconds() * 1000))
            if made is None:  # torch would crash on None from Python here
                raise RuntimeError(
                    f"rank {self.rank()} is not in the part {ranks} of the group, and only a compiled backend can be "
                    "split without it: use new_group, or install a C++ compiler"
                )
            self._last_split = opts.group_name, made
        return self._last_split[1]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later calls, of the inner backends too."""
        self._options._timeout = timeout
        for inner in self._inners():
            inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def _set_sequence_number_for_group(self) -> None:
        """Numbers start at 0 on all ranks."""

    def start_coalescing(self) -> None:
        """Begin a group of calls that NCCL starts together."""
        self._cuda._start_coalescing()
        self._is_coalescing = True

    def end_coalescing(self) -> Work:
        """Start the group of calls, and return its Work, which also waits for those of them that gloo runs."""
        self._is_coalescing = False
        works, self._batch = self._batch, []
        work = self._cuda._end_coalescing()
        return SeveralWorks([*works, *([] if work is None else [work])]) if works else work

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Have NCCL connect this GPU now."""
        if self._cuda is not None and device is not None and device.type == "cuda":
            self._cuda.bound_device_id = device
            self._cuda.eager_connect_single_device(device)

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Do nothing: called on ranks outside a new group, whose members make new communicators and split none."""

    def abort(self) -> None:
        """Close the dispatcher immediately, and abort the inner backends."""
        _alive.discard(self)
        self.dispatch.close(0.0)  # type: ignore[attr-defined]
        for inner in self._inners():
            inner.abort()

    def shutdown(self) -> None:
        """Close the dispatcher once its calls have ended, and shut the inner backends down."""
        _alive.discard(self)
        self.dispatch.close(_SECONDS_TO_END)  # type: ignore[attr-defined]
        self._last_split = None
        for inner in self._inners():
            inner.shutdown()

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Run gloo's monitored barrier."""
        self._start_schedule("monitored_barrier", (), ())
        self.dispatch.begin_barrier(False, False)  # type: ignore[attr-defined]
        self._cpu.monitored_barrier(opts.timeout, wait_all_ranks)

    def barrier(self, opts: Any) -> Work:
        """Run NCCL's barrier, or gloo's and then wait for the schedules that were started before."""
        on_gpu = self._cuda is not None and (
            opts.device_ids or (opts.device is not None and opts.device.type == "cuda")
        )
        self._start_schedule("barrier", (), (), note="cuda" if on_gpu else "")
        self.dispatch.begin_barrier(bool(on_gpu), opts.asyncOp)  # type: ignore[attr-defined]
        if on_gpu:
            return self._cuda.barrier(opts)
        if self._cuda is not None and not opts.asyncOp:
            self.dispatch.warm_up_nccl_if_ready()  # type: ignore[attr-defined]
        return self.dispatch.after_schedules(self._cpu.barrier(opts))  # type: ignore[attr-defined]

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Work:
        """Run a schedule or the inner backend's all-to-all of one tensor, with or without explicit sizes."""
        is_even = len(set(output_sizes)) <= 1 and len(set(input_sizes)) <= 1
        note = "" if not output_sizes and not input_sizes else "even sizes" if is_even else "uneven sizes"
        work = self._start_schedule("alltoall_base", (output,), (input,), opts, note)
        return work or self._inner((input,)).all_to_all_single(output, input, output_sizes, input_sizes, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        """Run a schedule or the inner backend's all-to-all of lists."""
        is_even = all(len({tensor.numel() for tensor in tensors}) <= 1 for tensors in (outputs, inputs))
        work = self._start_schedule("alltoall", outputs, inputs, opts, "even sizes" if is_even else "uneven sizes")
        return work or self._inner(inputs).alltoall(outputs, inputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """Run the inner backend's scatter. gloo ignores the strides of what it sends, so it gets contiguous tensors."""
        self._start_schedule("scatter", outputs, outputs, opts)
        inner = self._inner(outputs)
        if inner is self._cpu:
            inputs = [[tensor.contiguous() for tensor in tensors] for tensors in inputs]
        return inner.scatter(outputs, inputs, opts)

    def _kept(self, inner: Any, work: Work) -> Work:
        """Of a call that an inner backend runs: torch takes no Work of a coalesced batch but that of its end."""
        if self._is_coalescing and inner is self._cpu:
            self._batch.append(work)
        return work

    def _inners(self) -> list[Any]:
        return [inner for inner in (self._cpu, self._cuda) if inner is not None]

    def _inner(self, tensors: Sequence[Tensor]) -> Any:
        device = tensors[0].device.type if tensors else "cpu"
        if device == "cpu":
            return self._cpu
        if self._cuda is None:
            raise ValueError(f"this group of the backend stretto has nothing to run a call on {device} tensors")
        return self._cuda

    def _start_schedule(
        self, operation: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, note: str = ""
    ) -> Work | None:
        reduction = _REDUCTIONS.get(opts.reduceOp.op, "another") if hasattr(opts, "reduceOp") else ""
        timeout = getattr(opts, "timeout", timedelta(0))
        limit = timeout if timeout > timedelta(0) else self._options._timeout
        root = getattr(opts, "rootRank", 0)
        note = note if getattr(opts, "rootTensor", 0) == 0 else "root tensor"
        note = "coalescing" if self._is_coalescing else note
        self._sequence_number += operation not in NON_COLLECTIVE
        milliseconds = round(limit.total_seconds() * 1000)
        is_async = getattr(opts, "asyncOp", False)
        return self.dispatch(operation, outputs, inputs, reduction, root, milliseconds, note, is_async)


def _first(lists: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    return lists[0] if len(lists) == 1 else ()


def _same(tensors: Any) -> Any:
    return tensors


def _one(tensor: Tensor) -> tuple[Tensor]:
    return (tensor,)


def _define_method(name: str, operation: str, outputs: Callable[..., Any], inputs: Callable[..., Any] | None) -> None:
    """Define c10d's method `name` of PythonBackend: (tensors, opts) if not `inputs`, else (outputs, inputs, opts)."""

    def call_in_place(self: PythonBackend, tensors: Any, *rest: Any) -> Work:
        flat = outputs(tensors)
        opts = rest[0] if rest and not isinstance(rest[0], int) else None
        inner = self._inner(flat)
        work = self._start_schedule(operation, flat, flat, opts)
        return work or self._kept(inner, getattr(inner, name)(tensors, *rest))

    def call(self: PythonBackend, output: Any, input: Any, opts: Any) -> Work:
        assert inputs is not None
        flat_outputs, flat_inputs = outputs(output), inputs(input)
        inner = self._inner(flat_inputs or flat_outputs)
        work = self._start_schedule(operation, flat_outputs, flat_inputs, opts)
        return work or self._kept(inner, getattr(inner, name)(output, input, opts))

    setattr(PythonBackend, name, call_in_place if inputs is None else call)


for _name in ("broadcast", "allreduce", "allreduce_coalesced", "allreduce_sparse", "reduce"):
    _define_method(_name, _name, _same, None)
for _name in ("send", "recv", "recv_anysource"):
    _define_method(_name, _name, _same, None)
for _name, _operation, _outputs, _inputs in (
    ("allgather", "allgather", _first, _same),
    ("all_gather_single", "_allgather_base", _one, _one),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced", _same, _same),
    ("allgather_coalesced", "allgather_coalesced", _first, _same),
    ("reduce_scatter", "reduce_scatter", _same, _first),
    ("reduce_scatter_single", "_reduce_scatter_base", _one, _one),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", _same, _same),
    ("gather", "gather", _first, _same),
):
    _define_method(_name, _operation, _outputs, _inputs)
