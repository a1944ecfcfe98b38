# SPDX-License-Identifier: Apache-2.0
"""A call on GPUs runs on the stream, and is waited for, as with torch's NCCL backend. Streams here are threads."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from torch._C._distributed_c10d import Work

from stretto.collectives.algorithms import find
from stretto.collectives.backend import cuda_runner
from stretto.collectives.backend.calls import BackendCall
from stretto.collectives.backend.dispatcher import Dispatcher
from stretto.collectives.backend.native import load_extension
from stretto.collectives.backend.runner import Member
from stretto.collectives.executor.cuda import workspace
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace
from stretto.memory import compilation
from stretto.memory.compilation import CallLimit

SECONDS = 20.0  # after which what should have come is given up; nothing that passes takes long


class Event:
    """A torch.cuda.Event that has been recorded on a stream."""

    def __init__(self, streams, stream):
        self._streams, self._done = streams, stream.put(int)

    def wait(self, stream=None):
        (stream or self._streams.current).wait_event(self)

    def query(self):
        assert not self._streams.is_capturing
        return self._done.done()

    def synchronize(self):
        assert not self._streams.is_capturing
        self._done.result(SECONDS)


class Stream:
    """A torch.cuda.Stream: a thread that does what is put on it in order."""

    def __init__(self, streams, number):
        self._streams, self.cuda_stream, self._thread = streams, number, ThreadPoolExecutor(1)

    def put(self, function, *arguments):
        return self._thread.submit(function, *arguments)

    def record_event(self):
        return Event(self._streams, self)

    def wait_event(self, event):
        self.put(event._done.result, SECONDS)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


class Streams:
    """The CUDA streams of a process, in place of torch.cuda's functions. is_capturing: of the current stream."""

    def __init__(self):
        self._made = 0
        self.current = self.stream()
        self.is_capturing = False

    def stream(self):
        self._made += 1
        return Stream(self, self._made)

    @contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Workspace(CollectiveWorkspace):
    """A workspace without memory, whose order of calls is the real one."""

    def __init__(self, streams):
        self.device, self._device_index = torch.device("cpu"), None
        self.group_stream = streams.stream()
        self._raw_stream, self._stream, self._end = -1, None, None
        self._limit, self._nanoseconds, self._waiting_functions = CallLimit(1.0), 10**9, WeakSet()


class Kernel:
    """Puts on the current stream what waits until `release` has its name; records in `ended` what has run.

    A call's name is its first element.
    """

    def __init__(self, streams, workspace):
        self._streams, self._workspace = streams, workspace
        self.ended, self.ran_on = [], {}
        self._gates = {}
        self.collective = find("ring-all-reduce").compile(ranks=2).collective

    def __call__(self, input, output):
        name = int(input[0])
        self._workspace.follow_stream()
        self.ran_on[name] = self._streams.current
        self._streams.current.put(self._run, name)

    def last_launch(self):
        return None

    def release(self, name):
        self._gate(name).set()

    def _gate(self, name):
        return self._gates.setdefault(name, threading.Event())

    def _run(self, name):
        assert self._gate(name).wait(SECONDS)
        self.ended.append(name)


class EnqueuedWork(Work):
    """The class of this name in native/work.hpp, on streams that are threads."""

    def __init__(self, outputs, tensors):
        super().__init__()
        self._outputs, self._tensors = list(outputs), list(tensors)
        self._stream = torch.cuda.current_stream()
        self.end = self._stream.record_event()
        # With tensors now, since it records the current stream's work.
        self._future = self._make_future() if tensors else None

    def __del__(self):
        for tensor in self._tensors:
            tensor.record_stream(self._stream)

    def wait(self, timeout=timedelta(0)):
        torch.cuda.current_stream().wait_event(self.end)
        self._tensors.clear()
        limit = time.monotonic() + timeout.total_seconds()
        while timeout and not self.end.query():
            if time.monotonic() >= limit:
                raise RuntimeError(f"the schedule has not ended within {timeout.total_seconds():g} s")
            time.sleep(0.001)
        return True

    def is_completed(self):
        return self.end.query()

    def get_future(self):
        if self._future is None:
            torch.cuda.current_stream().wait_event(self.end)  # the future remembers the current stream
            self._future = self._make_future()
        return self._future

    def _make_future(self):
        future = torch.futures.Future(devices=["cuda"])
        future.set_result(self._outputs)
        return future


@pytest.fixture
def gpu(monkeypatch):
    """A runner whose kernels wait for `kernel.release`, and the process's streams."""
    load_extension()  # compiles now, if it must, and not while a kernel waits
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.use)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: streams.is_capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: streams.current.cuda_stream, raising=False)
    monkeypatch.setattr(torch.futures, "Future", lambda devices: _Future(streams))
    own = Workspace(streams)
    kernel = Kernel(streams, own)
    monkeypatch.setattr(cuda_runner, "FusedScheduleKernel", lambda *_, **__: kernel)
    monkeypatch.setattr(
        cuda_runner, "make_enqueued_work", lambda rank, title, outputs, tensors=(): EnqueuedWork(outputs, tensors)
    )
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    runner = cuda_runner.CudaRunner(Member(0, 2, "g"))
    runner._communicator = SimpleNamespace(workspace=own)
    schedule = find("ring-all-reduce").compile(ranks=2)
    runner._schedules[id(schedule)] = schedule

    def call(name, is_async=True, timeout=1.0):
        tensor = torch.full((4,), name)
        return runner.start(schedule, BackendCall("allreduce", (tensor,), (tensor,), "sum", 0, timeout, "", is_async))

    yield SimpleNamespace(
        streams=streams, kernel=kernel, runner=runner, call=call, workspace=own, recorded=recorded, schedule=schedule
    )
    for name in range(10):
        kernel.release(name)


class _Future:
    """A torch.futures.Future with devices: it remembers the streams that are current when it gets its value."""

    def __init__(self, streams):
        self._streams = streams

    def set_result(self, value):
        self._value, self._end = value, self._streams.current.record_event()

    def wait(self):
        self._streams.current.wait_event(self._end)
        return self._value


def test_kernels_launched_after_an_async_call_overlap_with_it(gpu):
    begun = gpu.streams.current.put(int)
    work = gpu.call(1)
    gpu.streams.current.put(int).result(SECONDS)
    assert begun.done()
    assert gpu.kernel.ended == []
    assert not work.is_completed()
    gpu.kernel.release(1)
    work.end.synchronize()
    assert work.is_completed()


def test_an_async_call_begins_after_what_its_caller_had_launched(gpu):
    gate = threading.Event()
    gpu.streams.current.put(gate.wait, SECONDS)
    gpu.streams.current.put(gpu.kernel.ended.append, "caller")
    gpu.kernel.release(1)
    work = gpu.call(1)
    assert not work.is_completed()
    time.sleep(0.05)  # for a call that does not wait for its caller
    gate.set()
    work.end.synchronize()
    assert gpu.kernel.ended == ["caller", 1]


def test_wait_makes_the_current_stream_wait_for_that_call_alone(gpu):
    first, second = gpu.call(1), gpu.call(2)
    gpu.kernel.release(1)
    first.wait()
    gpu.streams.current.put(int).result(SECONDS)
    assert gpu.kernel.ended == [1]
    assert first.is_completed()
    assert not second.is_completed()
    second.wait()
    after = gpu.streams.current.put(int)
    assert not after.done()
    gpu.kernel.release(2)
    after.result(SECONDS)
    assert gpu.kernel.ended == [1, 2]


def test_the_future_waits_for_its_call_alone_and_making_it_for_none(gpu):
    first = gpu.call(1)
    gpu.call(2)
    future = first.get_future()
    gpu.streams.current.put(int).result(SECONDS)
    gpu.kernel.release(1)
    assert future.wait()[0].tolist() == [1] * 4
    gpu.streams.current.put(int).result(SECONDS)
    assert gpu.kernel.ended == [1]


def test_wait_with_a_limit_makes_the_host_wait_that_long(gpu):
    work = gpu.call(1)
    with pytest.raises(RuntimeError, match=r"not ended within 0.05 s"):
        work.wait(timedelta(seconds=0.05))
    gpu.kernel.release(1)
    assert work.wait(timedelta(seconds=SECONDS))
    assert work.is_completed()


def test_a_call_that_is_not_async_runs_on_its_callers_stream(gpu):
    gpu.call(1, is_async=False)
    assert gpu.kernel.ran_on[1] is gpu.streams.current
    gpu.call(2)
    assert gpu.kernel.ran_on[2] is gpu.workspace.group_stream


def test_calls_of_a_group_run_one_after_another_and_wait_for_nothing_else_of_other_streams(gpu):
    """They share mailboxes; but what follows an earlier call on its caller's stream is no business of theirs."""
    gate = threading.Event()
    other = gpu.streams.stream()
    gpu.call(1, is_async=False)
    gpu.streams.current.put(gate.wait, SECONDS)
    with gpu.streams.use(other):
        second, third = gpu.call(2), gpu.call(3, is_async=False)
    for name in (3, 2):
        gpu.kernel.release(name)
    assert gpu.kernel.ended == []
    gpu.kernel.release(1)
    third.end.synchronize()
    assert gpu.kernel.ended == [1, 2, 3]
    assert second.is_completed()
    gate.set()


@pytest.mark.parametrize("awaits", [True, False])
def test_memory_of_an_async_calls_tensors_is_not_reused_before_its_end(gpu, awaits):
    work = gpu.call(1)
    gpu.kernel.release(1)
    assert work._tensors  # so no reuse so far
    if awaits:
        work.wait()
        assert not work._tensors
    del work
    assert set(gpu.recorded) == (set() if awaits else {gpu.workspace.group_stream})
    gpu.call(2, is_async=False)
    assert set(gpu.recorded) == (set() if awaits else {gpu.workspace.group_stream})


def test_captured_calls_are_ordered_by_the_groups_stream_and_join_their_callers(gpu):
    gpu.kernel.release(1)
    gpu.call(1)
    gpu.runner.begin_barrier(False, False)
    gpu.streams.is_capturing = True
    with gpu.streams.use(gpu.streams.stream()):
        work = gpu.call(2)
        gpu.call(3, is_async=False)
        joined = gpu.streams.current.put(list, gpu.kernel.ended)
        gpu.kernel.release(3)
        gpu.kernel.release(2)
        assert joined.result(SECONDS) == [1, 2, 3]
        work.wait()
    assert gpu.kernel.ended == [1, 2, 3]
    assert gpu.kernel.ran_on[2] is gpu.kernel.ran_on[3] is gpu.workspace.group_stream
    gpu.streams.is_capturing = False
    gpu.runner.begin_barrier(False, False)  # of nothing: the calls of a graph have not run


@pytest.mark.parametrize("is_async_call", [True, False])
def test_a_barrier_is_ordered_after_the_schedules_that_the_gpu_has_begun(gpu, is_async_call):
    gpu.call(1, is_async_call)
    dispatcher = Dispatcher(Member(0, 2, "g"), {"cpu": "gloo", "cuda": "nccl"})
    dispatcher._runners["cuda"] = gpu.runner
    barrier = SimpleNamespace(wait=lambda: True)  # the inner backend's, which has ended
    # Of gloo, with async_op=True: its Work waits.
    dispatcher.begin_barrier(False, True)
    work = dispatcher.after_schedules(barrier)
    assert not work.is_completed()
    # Of NCCL: it follows the current stream.
    other = gpu.streams.stream()
    with gpu.streams.use(other):
        dispatcher.begin_barrier(True, False)
    after = other.put(int)
    assert not after.done()
    # Of gloo: the host waits before it tells the peers that it has come.
    with ThreadPoolExecutor(1) as pool:
        begin = pool.submit(dispatcher.begin_barrier, False, False)
        assert not begin.done()
        gpu.kernel.release(1)
        begin.result(SECONDS)
    assert gpu.kernel.ended == [1]
    assert work.wait()
    after.result(SECONDS)
    assert dispatcher.after_schedules(barrier) is barrier
    gpu.runner._worker.close(SECONDS)


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_discarded_kernel_lives_until_its_call_has_ended_and_on_where_a_graph_has_captured_it(
    gpu, is_captured, monkeypatch
):
    monkeypatch.setattr(cuda_runner, "FusedScheduleKernel", lambda *_, **__: Kernel(gpu.streams, gpu.workspace))
    gpu.call(1)
    (kernel,) = map(weakref.ref, gpu.runner._kernels.values())
    if is_captured:
        gpu.streams.is_capturing = True
        gpu.call(2)
        gpu.streams.is_capturing = False
        kernel().release(2)
    with ThreadPoolExecutor(1) as pool:
        discarding = pool.submit(gpu.runner.discard, gpu.schedule)
        assert not discarding.done()
        kernel().release(1)
        discarding.result(SECONDS)
    gpu.workspace.group_stream.put(int).result(SECONDS)
    gc.collect()
    assert (kernel() is not None) == is_captured


def test_waits_on_the_gpu_take_the_time_limit_that_the_group_has_at_the_call(gpu, monkeypatch):
    class Function:
        def __init__(self, _, names, entry):
            self.limit = None

        def set(self, name, value):
            assert name == "limit"
            self.limit = value

    monkeypatch.setattr(workspace, "Function", Function)
    monkeypatch.setattr(workspace, "load_or_compile", lambda *_: b"")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    waiting, other = gpu.workspace.load("", ["state", "limit"]), gpu.workspace.load("", ["state"])
    gpu.call(1, timeout=1.0)
    assert waiting.limit == int((1 + compilation.ALLOWANCE) * 1e9)  # a peer may be compiling it
    gpu.call(2, timeout=1.0)
    assert waiting.limit == gpu.workspace.limit == 1_000_000_000
    gpu.call(3, timeout=7.5)
    assert (waiting.limit, other.limit, gpu.workspace.limit) == (7_500_000_000, None, 7_500_000_000)
    gpu.workspace.load("", ["limit"])  # in a call: for the rest of it
    assert waiting.limit == gpu.workspace.limit == int((7.5 + compilation.ALLOWANCE) * 1e9)
    assert gpu.workspace.lasting_limit == 7_500_000_000
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    gpu.streams.is_capturing = True
    gpu.call(4, timeout=7.5)
    assert waiting.limit == 7_500_000_000  # for replays, which begin later
    gpu.streams.is_capturing = False


class FastCalls:
    """Launcher of calls without Python, as the runner sees it; `launch` puts one on the current stream."""

    def __init__(self, gpu):
        self._gpu, self._last, self.followed, self.held = gpu, None, [], 0

    def launch(self, name):
        assert not self.held
        self._gpu.streams.current.put(self._gpu.kernel._run, name)
        self._last = self._gpu.streams.current.cuda_stream, self._gpu.streams.current.record_event()

    def hold(self):
        self.held += 1
        last, self._last = self._last, None
        return last

    def release(self):
        self.held -= 1

    def clear(self):
        pass

    def follow(self, handle, end):
        self.followed.append((handle, end))


@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_is_ordered_after_those_that_were_launched_without_python(gpu, is_async):
    gpu.runner._fast = fast = FastCalls(gpu)
    gpu.call(1, is_async=False)
    fast.launch(2)
    with gpu.streams.use(gpu.streams.stream()):
        work = gpu.call(3, is_async)
    for name in (3, 2, 1):
        gpu.kernel.release(name)
    work.end.synchronize()
    assert gpu.kernel.ended == [1, 2, 3]
    assert fast.held == 0
    # And the other way round: they learn where the runner's last call ends.
    handle, end = fast.followed[-1]
    assert handle == (gpu.workspace.group_stream if is_async else gpu.kernel.ran_on[3]).cuda_stream
    assert end is work.end


def test_a_barrier_is_ordered_after_calls_that_were_launched_without_python(gpu):
    gpu.runner._fast = fast = FastCalls(gpu)
    gpu.call(1)
    gpu.kernel.release(1)
    fast.launch(2)
    work = gpu.runner.after_schedules(SimpleNamespace(wait=lambda: True))
    fast.launch(3)
    with ThreadPoolExecutor(1) as pool:
        begin = pool.submit(gpu.runner.begin_barrier, False, False)
        time.sleep(0.05)  # for a barrier that does not wait
        assert not begin.done()
        gpu.kernel.release(2)
        assert work.wait()
        assert not begin.done()
        gpu.kernel.release(3)
        begin.result(SECONDS)
    gpu.runner._worker.close(SECONDS)


def test_a_call_of_a_graph_leaves_the_last_call_as_it_was(gpu):
    gpu.runner._fast = fast = FastCalls(gpu)
    gpu.call(1)
    with gpu.streams.use(gpu.workspace.group_stream):
        fast.launch(2)
    gpu.streams.is_capturing = True
    gpu.call(3)
    gpu.streams.is_capturing = False
    assert len(fast.followed) == 1
    assert fast.held == 0
    work = gpu.call(4, is_async=False)
    for name in (4, 3, 2, 1):
        gpu.kernel.release(name)
    work.end.synchronize()
    assert gpu.kernel.ended == [1, 2, 3, 4]
