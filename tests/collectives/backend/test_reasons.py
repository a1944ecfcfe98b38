# SPDX-License-Identifier: Apache-2.0
"""The reason for a call's plan, of the device's own choice too: logged once for equal calls."""

import logging
from types import SimpleNamespace

import pytest
import torch

from stretto.collectives.algorithms import find
from stretto.collectives.backend import cuda_runner
from stretto.collectives.backend.calls import BackendCall
from stretto.collectives.backend.cuda_runner import CudaRunner, _find_buffers
from stretto.collectives.backend.dispatcher import Dispatcher
from stretto.collectives.backend.runner import FastestRun, Member


class FastestRunner:
    """Runs what has 4 elements by a way of its own."""

    def start_fastest(self, call):
        if call.inputs[0].numel() == 4:
            return FastestRun("a Work", "magic LL", "it was the fastest")
        return FastestRun(None, "", "it was slower")


def test_the_devices_own_choice_is_counted_and_logged_with_its_reason(caplog):
    dispatcher = Dispatcher(Member(0, 2, "g"), {"cpu": "gloo"})
    dispatcher._runners["cpu"] = FastestRunner()

    def call(elements, operation="allreduce"):
        tensors = [torch.zeros(elements)]
        return dispatcher(operation, tensors, tensors, "sum", 0, 1000, "")

    with caplog.at_level(logging.DEBUG, "stretto.collectives"):
        for _ in range(3):
            assert call(4) == "a Work"
            assert call(5) is None
            assert call(4, "send") is None
    assert caplog.messages == [
        "group g: allreduce sum of 4 float32 (16 bytes) on cpu runs as schedule magic LL: it was the fastest",
        "group g: allreduce sum of 5 float32 (20 bytes) on cpu runs as gloo: no schedule is installed; it was slower",
        "group g: send sum of 4 float32 (16 bytes) on cpu runs as gloo: no schedule does this operation",
    ]
    assert dispatcher.counter.read() == {
        ("allreduce", "schedule magic LL"): 3,
        ("allreduce", "gloo"): 3,
        ("send", "gloo"): 3,
    }


@pytest.mark.parametrize(
    ("inputs", "outputs", "note", "why"),
    [
        ([torch.zeros(4)], [torch.zeros(4)], "coalescing", "it is coalescing"),
        ([torch.zeros(4)], [torch.zeros(4)], "even sizes", "the sizes of its parts are given"),
        ([torch.zeros(4)] * 2, [torch.zeros(4)] * 2, "", "it has several tensors"),
        ([torch.zeros(2, 2).t()], [torch.zeros(2, 2)], "", "its tensors are not contiguous"),
        ([torch.zeros(4)], [torch.zeros(4)], "", "the group has one rank"),
    ],
)
def test_calls_left_to_nccl_on_gpus_have_a_reason(inputs, outputs, note, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    runner = CudaRunner(Member(0, 1, "g"))
    found = runner.start_fastest(BackendCall("allreduce", tuple(outputs), tuple(inputs), "sum", 0, 1.0, note))
    assert found == (None, "", why, False)


def test_on_several_nodes_a_schedule_that_is_installed_puts_and_nccl_runs_the_rest(monkeypatch):
    """Also where a call came first, before which no GPU could have run a schedule."""

    def find_obstacle(group, device, *, needs_atomics, puts_between_nodes):
        return None if puts_between_nodes else "its ranks are on 2 nodes"

    installed = find("direct-all-gather").compile(ranks=2)
    workspace = SimpleNamespace(require_lines_for=lambda protocol, name: None, nodes=(0, 1))
    monkeypatch.setattr(cuda_runner.SchedulePuts, "allocate", lambda *arguments: arguments)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_runner.c10d, "_resolve_process_group", lambda name: name)
    monkeypatch.setattr(cuda_runner, "find_obstacle", find_obstacle)
    monkeypatch.setattr(cuda_runner, "CudaCommunicator", lambda group: SimpleNamespace(workspace=workspace))
    runner = CudaRunner(Member(0, 2, "g"))
    call = BackendCall("allreduce", (torch.zeros(4),), (torch.zeros(4),), "sum", 0, 1.0)
    assert runner.start_fastest(call) == (None, "", "its ranks are on 2 nodes", False)
    runner.prepare(installed, None, 1.0)
    assert runner._puts == {id(installed): (installed, workspace, 1 << 16)}


@pytest.mark.parametrize(
    ("operation", "tensor", "note", "message"),
    [
        ("alltoall", torch.zeros(4), "uneven sizes", r"alltoall of 4 float32 .* not equal, as even_sizes=True"),
        ("allreduce", torch.zeros(1).expand(4), "", r"shape \[4\] and strides \[0\]"),
    ],
)
def test_calls_that_no_schedule_supports_on_gpus_raise_before_any_launch(operation, tensor, note, message):
    call = BackendCall(operation, (tensor,), (tensor,), "", 0, 1.0, note)
    with pytest.raises(ValueError, match=message):
        CudaRunner(Member(0, 2, "g")).start(find("direct-all-to-all").compile(ranks=2), call)


def test_a_call_with_a_sparse_tensor_is_described_with_the_bytes_of_a_dense_one(caplog):
    dispatcher = Dispatcher(Member(0, 2, "g"), {"cpu": "gloo"})
    tensors = [torch.eye(3).to_sparse()]
    with caplog.at_level(logging.DEBUG, "stretto.collectives"):
        assert dispatcher("allreduce", tensors, tensors, "sum", 0, 1000, "") is None
    assert caplog.messages == [
        "group g: allreduce sum of 9 float32 (36 bytes) on cpu runs as gloo: a tensor is not dense"
    ]


BOTH = torch.arange(8.0)


@pytest.mark.parametrize(
    ("collective", "given", "taken", "expected"),
    [
        ("allgather", BOTH[2:4], BOTH, "in place"),  # rank 1's part of 4
        ("allgather", BOTH[:2], BOTH, None),  # another rank's
        ("allgather", BOTH[2:4], torch.empty(8), "apart"),
        ("allreduce", BOTH, BOTH, "in place"),
        ("allreduce", BOTH[:4], BOTH[4:], "apart"),
        ("allreduce", BOTH[4:], BOTH[:4], "apart"),
        ("allreduce", BOTH[:4], BOTH[3:7], None),
        ("allreduce", BOTH[3:7], BOTH[:4], None),
        ("alltoall", BOTH, BOTH, None),
        ("reducescatter", BOTH, BOTH[2:4], None),  # its input would be gone
        ("reducescatter", BOTH, torch.empty(2), "apart"),
    ],
)
def test_nested_buffers_are_distinguished_from_overlapping_ones(collective, given, taken, expected):
    match _find_buffers(collective, given, taken, rank=1):
        case None:
            assert expected is None
        case both, None:
            assert expected == "in place"
            assert torch.equal(both, BOTH)
        case found_given, found_taken:
            assert expected == "apart"
            assert (found_given.data_ptr(), found_taken.data_ptr()) == (given.data_ptr(), taken.data_ptr())
