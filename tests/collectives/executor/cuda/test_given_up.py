# SPDX-License-Identifier: Apache-2.0
"""After a wait that was given up a rank publishes nothing: who needs it waits in vain, too, and takes no garbage."""

import pytest
import torch
from tests.collectives.executor.cuda.emulated import COMPILER, add_copy_areas, make_workspaces, run_all
from tests.collectives.executor.cuda.test_kernels import make

from stretto.collectives.executor.cuda.copy_engine import planner
from stretto.collectives.executor.cuda.copy_engine.executor import CopyEngineExecutor
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.memory import PeerError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
PROTOCOLS = ("LL", "LL128", "Simple")
KINDS = (FusedScheduleKernel, InterpretedSchedule)


def replay(kernel, tensor):
    """A call as a CUDA graph replays it: the host does not look whether anything has failed."""
    check = kernel.workspace.check
    kernel.workspace.check = lambda: None
    try:
        kernel(tensor)
        if isinstance(kernel, CopyEngineExecutor):
            kernel.workspace.drain()
    finally:
        kernel.workspace.check = check


def fail_elsewhere(workspace):
    """As if a wait in another workspace of that rank's process had been given up."""
    workspace.failed.fill_(1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_never_arrived_is_not_forwarded(kind, protocol, folder):
    """In a ring of three rank 2 never comes: rank 0 has its own chunk to send, and nothing of rank 2's."""
    workspaces = make_workspaces(3, folder, limit=0.2)
    kernels = make(kind, "ring-all-gather", {"ranks": 3}, workspaces, Variant("int32", "sum", protocol), True)
    tensors = [torch.full((3 * 16,), rank + 1, dtype=torch.int32) for rank in range(3)]
    kernels[0](tensors[0])
    with pytest.raises(PeerError, match="rank 2's message"):
        workspaces[0].check()
    kernels[1](tensors[1])  # now: nothing that it needs is still on its way
    assert tensors[1].tolist()[:32] == [1] * 16 + [2] * 16  # what rank 0 sent before it gave up
    with pytest.raises(PeerError, match="rank 0's message"):
        workspaces[1].check()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_results_of_a_thread_block_that_has_given_up_are_not_sent(protocol, folder):
    """By the interpreter a thread block adds what another one has received, and sends the sum on."""
    workspaces = make_workspaces(3, folder, limit=0.2)
    variant = Variant("int32", "sum", protocol)
    kernels = make(InterpretedSchedule, "two-shot-all-reduce", {"ranks": 3}, workspaces, variant, True)
    for rank in (0, 1):  # rank 2 has begun nothing, so no sum is ever complete
        kernels[rank](torch.full((3 * 16,), rank + 1, dtype=torch.int32))
        assert workspaces[rank].report[0] == 1
    tensor = torch.full((3 * 16,), 3, dtype=torch.int32)
    kernels[2](tensor)
    with pytest.raises(PeerError, match=r"rank [01]'s message"):
        workspaces[2].check()


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_of_a_process_that_has_failed_publishes_nothing(kind, protocol, folder):
    workspaces = make_workspaces(2, folder, limit=0.2)
    kernels = make(kind, "direct-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", protocol), True)
    fail_elsewhere(workspaces[0])
    before = workspaces[1].memories[1].clone()
    replay(kernels[0], torch.ones(480, dtype=torch.int32))
    changed = (workspaces[1].memories[1] != before).nonzero().flatten()
    assert all(place % workspaces[1].half < 8 * 2 for place in changed.tolist()), "more than a token was sent"
    tensor = torch.zeros(480, dtype=torch.int32)
    kernels[1](tensor)
    with pytest.raises(PeerError, match="rank 0's message"):
        workspaces[1].check()
    assert not tensor.any()


def test_a_call_that_ended_early_after_another_groups_failure_is_a_failure_of_its_group_too(folder):
    """Otherwise it would be forgotten with the other group."""
    workspaces = make_workspaces(2, folder, limit=20.0)
    kernels = make(
        FusedScheduleKernel, "direct-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", "LL"), True
    )
    fail_elsewhere(workspaces[0])
    replay(kernels[0], torch.ones(480, dtype=torch.int32))
    workspaces[0].failed.zero_()
    with pytest.raises(PeerError, match="direct-all-gather, call 1 ended without results, since a wait of another"):
        kernels[0](torch.ones(480, dtype=torch.int32))


@pytest.mark.long
@pytest.mark.parametrize("name", ["direct-all-gather", "two-shot-all-reduce"])
def test_with_copy_engines_a_failed_rank_signals_neither_data_nor_free_slots(name, folder):
    workspaces = make_workspaces(2, folder, limit=1.0)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    kernels = make(CopyEngineExecutor, name, {"ranks": 2}, workspaces, Variant("int32", "sum", "Copy"), True)
    tensors = [torch.full((480,), rank + 1, dtype=torch.int32) for rank in range(2)]
    fail_elsewhere(workspaces[0])

    def call_without_looking(tensor):
        replay(kernels[0], tensor)

    run_all([call_without_looking, kernels[1]], [(tensor,) for tensor in tensors])
    with pytest.raises(PeerError, match="rank 0's message"):
        workspaces[1].check()
    head = workspaces[0].area_memories[1][: planner.HEAD].view(torch.int64)
    assert head[planner.ENTRY_FLAGS // 8] != 0, "a rank that has begun says so"
    assert head[0] == 0, "rank 0 signalled that it was done"
    assert not head[planner.FLAGS // 8 :].any(), "rank 0 signalled that its messages had arrived"


def test_a_failure_in_one_group_ends_the_waits_of_another(folder):
    """Long before their own limit."""
    workspaces = make_workspaces(2, folder, limit=100.0)
    kernels = make(
        FusedScheduleKernel, "ring-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", "LL"), True
    )
    others = make_workspaces(2, folder, limit=0.3)
    others[0].failed = workspaces[0].failed
    failing = make(FusedScheduleKernel, "ring-all-gather", {"ranks": 2}, others, Variant("int32", "sum", "LL"), True)
    tensors = [torch.zeros(480, dtype=torch.int32) for _ in range(2)]
    run_all([kernels[0], failing[0]], [(tensor,) for tensor in tensors])
    with pytest.raises(PeerError, match=r"0\.3 s"):
        others[0].check()
    with pytest.raises(PeerError, match="since a wait of another group had failed"):
        workspaces[0].check()
