# SPDX-License-Identifier: Apache-2.0
"""Kernels of two groups and a stand-in for NCCL's end in whatever order each rank launches them on its GPU."""

import random
import threading
import time
from itertools import permutations

import pytest
import torch
from tests.collectives.executor.cuda.emulated import COMPILER, Places, make_workspaces
from tests.collectives.executor.cuda.test_kernels import make
from tests.processes import LIMIT

from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.memory.gpus import NCCL_BLOCKS, bound_blocks

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
PLACES = 8
ELEMENTS = PLACES * 128 * 4  # of a chunk: what as many blocks of 128 threads of 16 bytes hold
OTHERS = 2  # that the stand-in for NCCL takes, of which each waits for its peer
SEED = random.randrange(2**31)


def test_with_nccl_and_one_kernel_resident_another_can_run():
    for multiprocessors in range(1, 200):
        most = bound_blocks(multiprocessors)
        assert 1 <= most <= max(multiprocessors - multiprocessors // 4, 1)
        if multiprocessors >= 2 * (NCCL_BLOCKS + 1):
            assert most + NCCL_BLOCKS < multiprocessors
        elif multiprocessors > 1:
            assert most < multiprocessors
    assert bound_blocks(132) == 99


class Crossing:
    """Two groups of two ranks, whose GPUs they share with a stand-in for NCCL that needs all its blocks at once."""

    def __init__(self, folder, max_blocks, limit):
        self.gpus = [Places(PLACES) for _ in range(2)]
        self.groups = [make_workspaces(2, folder, limit=limit) for _ in range(2)]
        for workspaces in self.groups:
            for workspace, places in zip(workspaces, self.gpus, strict=True):
                workspace.places, workspace.max_blocks = places, max_blocks
        variant = Variant("int32", "sum", "Simple")
        self.kernels = [
            make(FusedScheduleKernel, "direct-all-gather", {"ranks": 2}, workspaces, variant, True)
            for workspaces in self.groups
        ]

    def run(self, orders):
        """orders: of each rank, who is launched first: 0 and 1 are the groups, 2 is the stand-in."""
        tensors = [[torch.full((2 * ELEMENTS,), rank + 1, dtype=torch.int32) for rank in range(2)] for _ in self.groups]
        arrived = threading.Barrier(2 * OTHERS)

        def wait_for_all(*_):
            arrived.wait(LIMIT)

        def launch(rank, which):
            if which == 2:
                self.gpus[rank].run(wait_for_all, OTHERS)
            else:
                self.kernels[which][rank](tensors[which][rank])

        threads = []
        for turn in range(3):
            for rank, order in enumerate(orders):
                threads.append(threading.Thread(target=launch, args=(rank, order[turn])))
                threads[-1].start()
            time.sleep(0.005)  # so that blocks have their places in the order of launches
        for thread in threads:
            thread.join()
        return [[tensor.view(2, -1)[:, 0].tolist() for tensor in group] for group in tensors]


@needs_compiler
def test_groups_that_cross_in_any_order_end(folder):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    crossing = Crossing(folder, bound_blocks(PLACES), limit=60.0)
    orders = list(permutations(range(3)))
    for first in orders:
        for second in {orders[-1 - orders.index(first)], rng.choice(orders)}:
            assert crossing.run([first, second]) == [[[1, 2]] * 2] * 2
            for workspaces in crossing.groups:
                for workspace in workspaces:
                    workspace.check()
    assert crossing.kernels[0][0]._current.pieces[0][2] == bound_blocks(PLACES)


@pytest.mark.exhaustive
@needs_compiler
def test_without_the_bound_they_lock_each_other_out(folder):
    """Without this, the test above would show nothing."""
    crossing = Crossing(folder, PLACES, limit=2.0)
    crossing.run([(0, 1, 2), (0, 1, 2)])
    for workspaces in crossing.groups:
        for workspace in workspaces:
            workspace.check()
    crossing.run([(0, 1, 2), (1, 0, 2)])
    assert any(workspace.report[0] for workspaces in crossing.groups for workspace in workspaces)


@pytest.mark.long
@needs_compiler
def test_an_interpreted_schedule_that_may_leave_no_room_warns(tmp_path, caplog):
    workspaces = make_workspaces(2, tmp_path)
    make(InterpretedSchedule, "ring-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", "LL"), True, 4)
    assert "may find no place" in caplog.text
