# SPDX-License-Identifier: Apache-2.0
"""Calls are run again without Python, by the right launches. Here on CPU tensors, whose stream is 0."""

import ctypes
import faulthandler
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.processes import LIMIT
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode

from stretto.collectives.backend import native
from stretto.collectives.backend.cuda_runner import CudaRunner
from stretto.collectives.backend.dispatcher import Dispatcher
from stretto.collectives.backend.runner import Member

HANDLE = 77  # of stream 0
LaunchKernel = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7),
    *(ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)), ctypes.c_void_p),
)
IsCapturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


class Group:
    """A backend over gloo with one rank, which counts itself as rank 1 of several. asked: what reached the dispatcher.

    launched: (function, blocks, threads, stream, parameters) of launches, which are all refused. A call is on `is_busy`
    while it asks whether its stream is being captured.
    """

    def __init__(self):
        self.asked, self.launched = [], []
        self.is_busy = threading.Event()
        self.seconds_to_ask = 0.0
        gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        self.fast = native.find_extension().FastCalls()
        self._callbacks = LaunchKernel(self._launch), IsCapturing(self._is_capturing)
        addresses = (ctypes.cast(each, ctypes.c_void_p).value for each in self._callbacks)
        self.loaded = ctypes.c_int64(5)
        self.fast.open(1, torch.device("cpu"), *addresses, 0, HANDLE, ctypes.addressof(self.loaded))
        self.fast.follow(HANDLE, None)
        self.backend = native.make_backend(0, 1, gloo, None, self._dispatch, None, 1000, self.fast)

    def _dispatch(self, operation, *_):
        self.asked.append(operation)
        work = native.make_work(0, operation, [])
        work.succeed()
        return work

    def _launch(self, function, blocks, _y, _z, threads, _ty, _tz, _shared, stream, parameters, _extra):
        self.launched.append((function, blocks, threads, stream, [parameters[index][0] for index in range(3)]))
        return 1

    def _is_capturing(self, stream, status):
        assert stream == HANDLE
        status[0] = 0
        self.is_busy.set()
        time.sleep(self.seconds_to_ask)
        return 0

    def all_reduce(self, tensor, reduction=dist.ReduceOp.SUM):
        """Check whether the dispatcher was asked about it."""
        options = c10d.AllreduceOptions()
        options.reduceOp, options.asyncOp = reduction, False
        before = len(self.asked)
        self.backend.allreduce([tensor], options).wait()
        return len(self.asked) > before

    def all_gather(self, output, input):
        """As `all_reduce`."""
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        before = len(self.asked)
        self.backend._allgather_base(output, input, options).wait()
        return len(self.asked) > before

    def remember_launch(self, operation, output, input):
        self.fast.add(operation, [output], [input], "", 0, 1000, operation, "schedule s", 5, 6, 7, [8, 9, 10], 0, 2)


@pytest.fixture
def group():
    return Group()


def remember_all_reduce(group, tensor):
    group.fast.add_inner("allreduce", [tensor], [tensor], "sum", 0, "nccl")


def test_calls_of_a_kind_that_is_known_do_not_reach_the_dispatcher(group):
    known = torch.ones(8)
    assert group.all_reduce(known)
    remember_all_reduce(group, known)
    assert not group.all_reduce(torch.ones(8))
    assert not group.all_reduce(torch.ones(2, 4))
    others = torch.ones(9), torch.ones(8, dtype=torch.int32), torch.ones(8, 2)[:, 0], torch.ones(0)
    assert all(map(group.all_reduce, others))
    assert group.all_reduce(known, dist.ReduceOp.MAX)
    group.fast.clear()
    assert group.all_reduce(known)


def test_the_first_call_after_a_kernel_was_loaded_goes_to_the_dispatcher_whose_limit_is_longer(group):
    output, input = torch.ones(8), torch.ones(4)
    group.remember_launch("_allgather_base", output, input)
    group.all_gather(output, input)
    assert len(group.launched) == 1
    group.loaded.value += 1
    assert group.all_gather(output, input)
    assert len(group.launched) == 1
    group.fast.follow(HANDLE, None)  # by the dispatcher
    group.all_gather(output, input)
    assert len(group.launched) == 2


def test_tensors_that_answer_in_python_go_to_the_dispatcher(group):
    remember_all_reduce(group, torch.ones(8))
    with FakeTensorMode():
        fake = torch.ones(8)
    assert group.all_reduce(fake)


def test_nothing_runs_concurrently_with_the_dispatcher(group):
    remember_all_reduce(group, torch.ones(8))
    group.fast.hold()
    group.fast.pause()
    group.fast.release()
    assert group.all_reduce(torch.ones(8))
    group.fast.release()
    assert not group.all_reduce(torch.ones(8))


def test_no_call_is_lost_from_the_counts(group):
    for _ in range(2):  # a kind is remembered again once it has come with another time limit, say
        remember_all_reduce(group, torch.ones(8))
        group.all_reduce(torch.ones(8))
    assert group.fast.counts() == [("allreduce", "nccl", 2)]
    group.all_reduce(torch.ones(8))
    group.fast.clear()
    assert group.fast.counts() == [("allreduce", "nccl", 3)]


def test_a_launch_gets_the_addresses_of_its_call_and_one_that_is_refused_goes_to_the_dispatcher(group):
    both = torch.ones(2, 4)
    for output, input in (torch.ones(8), torch.ones(4)), (both, both[1]):
        group.remember_launch("_allgather_base", output, input)
    output, input, other = torch.ones(8), torch.ones(4), torch.ones(2, 4)
    assert group.all_gather(output, input)
    assert group.all_gather(other, other[1])
    assert group.all_gather(other, other[0])  # overlaps otherwise: of no kind
    assert group.launched == [
        (5, 6, 7, HANDLE, [input.data_ptr(), 9, output.data_ptr()]),
        (5, 6, 7, HANDLE, [other.data_ptr(), 9, other.data_ptr()]),
    ]


def test_a_thread_that_has_the_gil_does_not_wait_for_one_that_needs_it(group):
    group.remember_launch("_allgather_base", torch.ones(8), torch.ones(4))
    group.seconds_to_ask = 0.05
    faulthandler.dump_traceback_later(30, exit=True)  # no thread of this process would run again
    call = threading.Thread(target=group.all_gather, args=(torch.ones(8), torch.ones(4)))
    call.start()
    assert group.is_busy.wait(LIMIT)
    group.fast.hold()
    group.fast.release()
    call.join()
    faulthandler.cancel_dump_traceback_later()
    assert group.launched


def test_calls_that_two_threads_make_through_python_do_not_mix():
    """They share the kernels' parameters and the knowledge of the last call, and launches let other threads run."""
    runner = CudaRunner(Member(0, 2, "g"))
    entered = threading.Event()

    def call():
        with runner._caught_up():
            entered.set()

    with runner._caught_up():
        thread = threading.Thread(target=call)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(LIMIT)
    thread.join()


def test_a_bypass_on_one_thread_does_not_affect_counts_of_another():
    dispatcher = Dispatcher(Member(0, 1, "g"), {"cpu": "gloo"})
    call = "allreduce", [torch.ones(8)], [torch.ones(8)], "sum", 0, 1000, ""
    with dispatcher.bypassed():
        dispatcher(*call)
        thread = threading.Thread(target=dispatcher, args=call)
        thread.start()
        thread.join()
    assert dispatcher.counts() == {("allreduce", "gloo"): 1}
