# SPDX-License-Identifier: Apache-2.0
"""Schedules by copy engines: their kernels' own source on CPU threads, and copies by memmove."""

import random
import time
from functools import partial

import pytest
import torch
from tests.collectives.executor.cuda.emulated import COMPILER, EmulatedGraph, add_copy_areas, make_workspaces, run_all
from tests.collectives.executor.cuda.test_kernels import check, make

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.executor.cuda.copy_engine import planner
from stretto.collectives.executor.cuda.copy_engine.executor import CopyEngineExecutor
from stretto.collectives.executor.cuda.copy_engine.lowering import lower_to_copies
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.fused.program import lower_to_fused_program
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.executor.cuda.workspace import SymmetricView
from stretto.memory import PeerError

SEED = random.randrange(2**31)
NAMES = ["direct-all-gather", "direct-reduce-scatter", "direct-all-to-all", "two-shot-all-reduce"]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(planner, "SMALLEST_PIECE", 64)
    monkeypatch.setattr(planner, "LARGEST_PIECE", 256)


def count_pieces(kernel):
    """Of the last call of a new size, by a rank that sends."""
    return 1 + max(dict(push.signal_arrival.values)["index"] for push in copies_of(kernel))


def copies_of(kernel):
    """Of the last call of a new size."""
    _, steps = list(kernel._plans.values())[-1]
    return [push for step in steps for push in step.copies]


def test_pieces_cover_a_chunk_once_and_the_last_is_small():
    for size in (1, 15, 4 << 20, 8 << 20, (8 << 20) + 1, 64 << 20, (256 << 20) + 24):
        for largest in (1 << 20, 7 << 20, 32 << 20):
            pieces = planner.split_into_pieces(size, largest)
            assert sum(count for _, count in pieces) == size
            assert [begin for begin, _ in pieces] == [sum(count for _, count in pieces[:i]) for i in range(len(pieces))]
            assert all(begin % 16 == 0 and 0 < count <= largest for begin, count in pieces)
            assert pieces[-1][1] <= 2 * planner.SMALLEST_PIECE
    assert planner.split_into_pieces(0, 1 << 20) == ()


@pytest.mark.sampled(1)
@needs_compiler
@pytest.mark.parametrize("name", [*NAMES, "ring-all-gather"])
def test_it_gives_the_collectives_numbers_in_one_piece_and_in_many(name, folder, small_pieces):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    ranks = rng.choice([2, 3])
    workspaces = make_workspaces(ranks, folder)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    reduction, in_place = rng.choice(["sum", "max"]), rng.random() < 0.5
    kernels = make(
        CopyEngineExecutor, name, {"ranks": ranks}, workspaces, Variant("int32", reduction, "Copy"), in_place
    )
    for elements in (1, rng.choice([7, 64]), rng.choice([1000, 1300]), 2):
        check(kernels, torch.int32, reduction, in_place, elements, rng.choice([0, 1, 3]), rng)


@pytest.mark.exhaustive
@needs_compiler
def test_more_pieces_than_mailbox_sets_wait_for_those_before_them(folder, small_pieces):
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    fused = make(
        FusedScheduleKernel, "direct-all-gather", {"ranks": 2}, workspaces, Variant("bfloat16", "sum", "LL"), True
    )
    kernels = make(
        CopyEngineExecutor, "two-shot-all-reduce", {"ranks": 2}, workspaces, Variant("bfloat16", "avg", "Copy"), True
    )
    for elements in (3001, 3001, 40):
        check(kernels, torch.bfloat16, "avg", True, elements, rng.choice([0, 1]), rng)
        check(fused, torch.bfloat16, "sum", True, 100, 0, rng)
    assert count_pieces(kernels[0]) == 1
    check(kernels, torch.bfloat16, "avg", True, 9001, 0, rng)
    assert count_pieces(kernels[0]) > 2 * planner.MIN_MAILBOX_SETS


@needs_compiler
def test_a_rank_that_does_not_wait_does_not_overwrite_unread_data(folder, small_pieces):
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder)
    add_copy_areas(workspaces, planner.HEAD + (1 << 12))
    kernels = make(
        CopyEngineExecutor, "binomial-broadcast", {"ranks": 2}, workspaces, Variant("int16", "sum", "Copy"), True
    )
    check(kernels, torch.int16, "sum", True, 9001, 0, rng)
    assert count_pieces(kernels[0]) == 5


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("name", ["direct-all-gather", "direct-all-to-all"])
def test_collectives_without_sums_send_whole_messages_except_for_the_last_and_in_rounds(name, folder, small_pieces):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    workspaces = make_workspaces(3, folder, limit=10.0)
    add_copy_areas(workspaces, planner.HEAD + (2 << 12))  # two messages of 4096 bytes
    kernels = make(CopyEngineExecutor, name, {"ranks": 3}, workspaces, Variant("int32", "sum", "Copy"), False)
    check(kernels, torch.int32, "sum", False, 1024, 0, rng)
    assert [push.num_bytes for push in copies_of(kernels[1])] == [4096, 3072, 768, 192, 64]
    workspaces[rng.randrange(3)].late[rng.choice(["wait", "copy", "flag", "caller"])] = 0.003
    for elements in (1024, rng.randint(1025, 5000), 40):
        check(kernels, torch.int32, "sum", False, elements, rng.choice([0, 1]), rng)
        assert count_pieces(kernels[0]) == -(-elements // 1024)
    for workspace in workspaces:
        workspace.check()


@pytest.mark.long
@pytest.mark.sampled(1)
@needs_compiler
@pytest.mark.parametrize("in_place", [False, True])
def test_collectives_with_sums_split_all_messages_and_run_in_rounds(in_place, folder, small_pieces):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    workspaces = make_workspaces(3, folder, limit=10.0)
    add_copy_areas(workspaces, planner.HEAD + (2 << 12))  # two messages of 4096 bytes
    variant = Variant("int32", "avg", "Copy")
    kernels = make(CopyEngineExecutor, "direct-reduce-scatter", {"ranks": 3}, workspaces, variant, in_place)
    check(kernels, torch.int32, "avg", in_place, 1024, 0, rng)
    sizes = [push.num_bytes for push in copies_of(kernels[1])]
    assert sizes[::2] == sizes[1::2] == sorted(sizes[::2], reverse=True)
    assert (sum(sizes), len(sizes) < 16, sizes[-1] <= 128) == (2 * 4096, True, True)
    workspaces[rng.randrange(3)].late[rng.choice(["wait", "copy", "flag", "caller"])] = 0.003
    for elements in (1024, rng.randint(1025, 5000), 40):
        check(kernels, torch.int32, "avg", in_place, elements, rng.choice([0, 1]), rng)
        assert count_pieces(kernels[0]) == -(-elements // 1024)
    for workspace in workspaces:
        workspace.check()


@pytest.mark.sampled(2)
@needs_compiler
@pytest.mark.parametrize("queue", ["wait", "flag", "copy", "caller"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_rank_with_a_late_queue_spoils_nothing(in_place, name, queue, folder, small_pieces):
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder, limit=10.0)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    kernels = make(CopyEngineExecutor, name, {"ranks": 2}, workspaces, Variant("int32", "sum", "Copy"), in_place)
    workspaces[1].late[queue] = 0.01
    for _ in range(3):
        check(kernels, torch.int32, "sum", in_place, rng.choice([300, 900]), 0, rng)
    for workspace in workspaces:
        workspace.check()


@needs_compiler
@pytest.mark.parametrize("queue", ["wait", "caller"])
def test_a_rank_that_pushes_nothing_ends_no_call_before_its_late_queues(queue, folder, small_pieces):
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder, limit=10.0)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    kernels = make(
        CopyEngineExecutor, "binomial-broadcast", {"ranks": 2}, workspaces, Variant("int16", "sum", "Copy"), True
    )
    workspaces[1].late[queue] = 0.02
    for elements in (3000, 300):
        check(kernels, torch.int16, "sum", True, elements, 0, rng)
    for workspace in workspaces:
        workspace.check()


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "ring-all-gather", "binomial-broadcast"])
def test_a_captured_call_ends_in_whatever_order_the_graph_is_executed(name, symmetric, folder, small_pieces):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    ranks = rng.choice([2, 3, 4])
    workspaces = make_workspaces(ranks, folder, limit=5.0)
    add_copy_areas(workspaces, planner.HEAD + (1 << 14))  # some of the calls need several rounds
    in_place = rng.random() < 0.5
    kernels = make(CopyEngineExecutor, name, {"ranks": ranks}, workspaces, Variant("int32", "sum", "Copy"), in_place)
    prepare = partial(make_symmetric, workspaces) if symmetric else None
    check(kernels, torch.int32, "sum", in_place, 300, 0, rng, prepare)
    for workspace in workspaces:
        workspace.is_capturing = True
        workspace._queues = EmulatedGraph(random.Random(rng.random()))
    for elements in (300, rng.randint(1000, 5000), 5000, 300):
        check(kernels, torch.int32, "sum", in_place, elements, 0, rng, prepare)
    for workspace in workspaces:
        workspace.check()


def make_symmetric(workspaces, targets, keys=None):
    addresses = tuple(target.data_ptr() for target in targets)
    for workspace, target, key in zip(workspaces, targets, keys or [7] * len(targets), strict=True):
        workspace.symmetric = {target.data_ptr(): SymmetricView(addresses, key)}


def forget_symmetric(workspaces, targets):
    for workspace in workspaces:
        workspace.symmetric = {}


@pytest.mark.sampled(2)
@needs_compiler
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "ring-all-gather"])
def test_into_symmetric_tensors_copies_go_straight(name, in_place, folder, small_pieces):
    rng = random.Random(SEED)
    ranks = rng.choice([2, 3])
    workspaces = make_workspaces(ranks, folder, limit=10.0)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    kernels = make(CopyEngineExecutor, name, {"ranks": ranks}, workspaces, Variant("int32", "sum", "Copy"), in_place)
    workspaces[0].late[rng.choice(["wait", "copy", "flag", "caller"])] = 0.002
    for elements in (7, 1000):
        for prepare in (make_symmetric, forget_symmetric):  # one call so, the next into ordinary tensors
            prepare = partial(prepare, workspaces)
            check(kernels, torch.int32, "sum", in_place, elements, rng.choice([0, 1]), rng, prepare)
    # In place, what all-to-all and all-reduce write over is still to be sent. Of a ring the last hop goes straight.
    zero_copy = {"direct-all-gather", "ring-all-gather"}
    zero_copy |= set() if in_place else {"direct-all-to-all", "two-shot-all-reduce"}
    assert (kernels[0]._zero_copy_planner is not None) == (name in zero_copy)
    for workspace in workspaces:
        workspace.check()


@needs_compiler
def test_other_symmetric_tensors_on_two_ranks_are_an_error(folder, small_pieces):
    for keys in ([7, 8], [7, None]):
        workspaces = make_workspaces(2, folder, limit=1000.0)  # at once, and not after the time limit
        add_copy_areas(workspaces, planner.HEAD + (1 << 16))
        variant = Variant("int32", "sum", "Copy")
        kernels = make(CopyEngineExecutor, "direct-all-gather", {"ranks": 2}, workspaces, variant, False)
        targets = [torch.zeros(200, dtype=torch.int32) for _ in workspaces]
        make_symmetric(workspaces, targets, keys)
        if keys[1] is None:
            workspaces[1].symmetric = {}
        run_all(kernels, [(torch.zeros(100, dtype=torch.int32), target) for target in targets])
        for workspace in workspaces:
            with pytest.raises(
                PeerError, match=f"rank {1 - workspace.rank} has called it with another symmetric tensor"
            ):
                workspace.check()


@needs_compiler
def test_a_missing_peer_is_named(folder, small_pieces):
    workspaces = make_workspaces(2, folder, limit=0.3)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    kernels = make(
        CopyEngineExecutor, "direct-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", "Copy"), True
    )
    run_all(kernels[:1], [(torch.zeros(200, dtype=torch.int32),)])
    with pytest.raises(PeerError, match="rank 1 to begin"):
        kernels[0](torch.zeros(200, dtype=torch.int32))


@pytest.mark.long
@needs_compiler
def test_a_rank_that_has_given_up_does_not_signal_its_sums(folder):
    workspaces = make_workspaces(3, folder, limit=3.0)
    workspaces[0].limit = int(0.1e9)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    variant = Variant("int32", "sum", "Copy")
    kernels = make(CopyEngineExecutor, "two-shot-all-reduce", {"ranks": 3}, workspaces, variant, True)

    def come_late(tensor):
        while not workspaces[0].report[0]:
            time.sleep(0.01)
        kernels[2](tensor)
        workspaces[2].drain()

    tensors = [torch.full((99,), rank + 1, dtype=torch.int32) for rank in range(3)]
    run_all([*kernels[:2], come_late], [(tensor,) for tensor in tensors])
    for workspace, waited_for in zip(
        workspaces, ["rank 2 to begin", "rank 0's message", "rank 0's message"], strict=True
    ):
        with pytest.raises(PeerError, match=waited_for):
            workspace.check()


@pytest.mark.long
@needs_compiler
def test_after_an_error_in_the_middle_of_a_call_no_other_is_taken_for_it(folder, monkeypatch):
    workspaces = make_workspaces(2, folder, limit=1.0)
    add_copy_areas(workspaces, planner.HEAD + (1 << 16))
    kernels = make(
        CopyEngineExecutor, "direct-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", "Copy"), True
    )
    copy_streams = workspaces[0].copy_streams()

    def refuse(*_):
        raise RuntimeError("a copy of 400 bytes was refused: CUDA error 1")

    tensors = [torch.full((200,), rank + 1, dtype=torch.int32) for rank in range(2)]

    def call_in_vain(tensor):
        with monkeypatch.context() as patched:
            patched.setattr(copy_streams, "copy", refuse)
            with pytest.raises(RuntimeError, match="was refused"):
                kernels[0](tensor)
        workspaces[0].drain()

    run_all([call_in_vain, kernels[1]], [(tensor,) for tensor in tensors])
    with pytest.raises(PeerError, match="direct-all-gather was broken off by an error"):
        kernels[0](tensors[0])
    with pytest.raises(PeerError, match="rank 0's message"):
        kernels[1](tensors[1])


def test_every_direct_algorithm_can_go_by_copies():
    for name in NAMES:
        for ranks in (2, 3, 4, 8):
            for in_place in (False, True):
                fused = lower_to_fused_program(
                    ALGORITHMS[name].compile(ranks=ranks, in_place=in_place), in_place=in_place
                )
                for program in fused.ranks:
                    levels = lower_to_copies(program, name, {})
                    sent = sum(len(level.sends) for level in levels)
                    assert sent == sum(len(level.sends) for level in program.levels) > 0


def test_a_message_outside_of_all_buffers_raises():
    # A ring's partial sums are nobody's output in a reduce-scatter: they travel on without being stored.
    fused = lower_to_fused_program(ALGORITHMS["ring-reduce-scatter"].compile(ranks=4, in_place=False), in_place=False)
    with pytest.raises(ValueError, match="ring cannot go by copy engines: it sends what is in none of its buffers"):
        lower_to_copies(fused.ranks[0], "ring", {})


def test_refused_requests_take_no_memory(folder):
    workspaces = make_workspaces(4, folder)  # without areas
    variant = Variant("int32", "sum", "Copy")
    with pytest.raises(ValueError, match="cannot go by copy engines"):
        make(CopyEngineExecutor, "ring-reduce-scatter", {"ranks": 4}, workspaces, variant, False)
