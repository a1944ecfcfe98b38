# SPDX-License-Identifier: Apache-2.0
"""The kernels' own source on a CPU: fused programs and the interpreter, every protocol, any size and place."""

import random
import re
import time
import weakref
from functools import partial

import pytest
import torch
from tests.collectives.executor.cuda import emulated
from tests.collectives.executor.cuda.emulated import COMPILER, make_workspaces, run_all

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.executor.cuda import interpreter
from stretto.collectives.executor.cuda.fused.codegen import write_source
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.memory import PeerError
from stretto.memory.gpus import bound_blocks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
PROTOCOLS = ("LL", "LL128", "Simple")
SEED = random.randrange(2**31)


def expected(collective, inputs, rank, block_chunks, reduction):
    """The output's blocks, None where they may be anything."""
    blocks = [one.view(max(collective.input_chunks // block_chunks, 1), -1) for one in inputs]
    found = []
    for block in range(collective.output_chunks // block_chunks):
        terms = collective.expected(rank, block * block_chunks)
        if terms is None:
            found.append(None)
            continue
        parts = torch.stack([blocks[giver][index // block_chunks] for giver, index in terms]).double()
        combined = {"sum": parts.sum(0), "max": parts.amax(0), "avg": parts.sum(0) / len(terms)}
        found.append(parts[0] if len(terms) == 1 else combined[reduction])
    return found


def check(kernels, dtype, reduction, in_place, elements, offset, rng, prepare=None):
    collective, chunks = kernels[0].collective, kernels[0].block_chunks
    ranks = range(collective.ranks)
    elements *= chunks if kernels[0].needs_even else 1
    in_blocks, out_blocks = collective.input_chunks // chunks, collective.output_chunks // chunks
    inputs = [torch.tensor([rng.randrange(64) for _ in range(in_blocks * elements)], dtype=dtype) for _ in ranks]
    length = (max(in_blocks, out_blocks) if in_place else out_blocks) * elements
    memories = [torch.full((offset + length + 9,), 77, dtype=dtype) for _ in ranks]
    targets = [memory[offset : offset + length] for memory in memories]
    given = [one.clone() for one in inputs]
    if prepare is not None:
        prepare(targets)
    if in_place:
        starts = [[start // chunks * elements for start in collective.starts(rank)] for rank in ranks]
        for target, one, (start, _) in zip(targets, inputs, starts, strict=True):
            target[start : start + len(one)] = one
        run_all(kernels, [(target,) for target in targets])
        results = [t[start : start + out_blocks * elements] for t, (_, start) in zip(targets, starts, strict=True)]
    else:
        run_all(kernels, list(zip(given, targets, strict=True)))
        results = targets
        for one, kept in zip(inputs, given, strict=True):
            assert torch.equal(one, kept), "the input was changed"
    for rank, (memory, result) in enumerate(zip(memories, results, strict=True)):
        assert (memory[:offset] == 77).all()
        assert (memory[offset + length :] == 77).all()
        right = expected(collective, inputs, rank, chunks, reduction)
        for block, (found, wanted) in enumerate(zip(result.view(out_blocks, -1), right, strict=True)):
            assert wanted is None or torch.equal(found.double(), wanted.to(dtype).double()), (rank, block, SEED)


def make(kind, name, size, workspaces, variant, in_place, instances=1):
    options = size if name == "all-to-next" else {**size, "in_place": in_place}
    schedule = ALGORITHMS[name].compile(instances=instances, **options)
    tiles = {"tile_bytes": 480} if kind is InterpretedSchedule else {}
    return [kind(schedule, workspace, variant, in_place=in_place, **tiles) for workspace in workspaces]


def in_places(name):
    return [False] if name == "all-to-next" else [False, True]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_interpreter_runs_every_algorithm_on_two_ranks(protocol, folder):
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder)
    dtype, reduction = {"LL": ("float16", "sum"), "LL128": ("int32", "max"), "Simple": ("bfloat16", "avg")}[protocol]
    for name in ALGORITHMS:
        if name == "dgx1-all-gather":  # has eight ranks
            continue
        size = {"nodes": rng.choice([1, 2])} if "nodes" in ALGORITHMS[name].parameters else {"ranks": 2}
        size |= {"gpus": 2 // size["nodes"]} if "nodes" in size else {}
        for in_place in in_places(name):
            instances = rng.choice([1, 2])
            variant = Variant(dtype, reduction, protocol)
            kernels = make(InterpretedSchedule, name, size, workspaces, variant, in_place, instances)
            for elements in (1, rng.choice([7, 64]), rng.choice([1000, 1300])):
                check(kernels, getattr(torch, dtype), reduction, in_place, elements, rng.choice([0, 1, 3]), rng)


@pytest.mark.exhaustive
def test_the_interpreter_runs_on_four_ranks_in_two_nodes(folder):
    rng = random.Random(SEED)
    workspaces = make_workspaces(4, folder)
    for name in ("hierarchical-all-reduce", "hierarchical-all-gather", "two-step-all-to-all", "all-to-next"):
        for in_place in in_places(name):
            size = {"nodes": 2, "gpus": 2}
            kernels = make(InterpretedSchedule, name, size, workspaces, Variant("int64", "sum", "LL"), in_place)
            for elements in (3, 500):
                check(kernels, torch.int64, "sum", in_place, elements, rng.choice([0, 1]), rng)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (FusedScheduleKernel, "ring-all-reduce"),
        (InterpretedSchedule, "recursive-halving-all-reduce"),
        pytest.param(FusedScheduleKernel, "two-shot-all-reduce", marks=pytest.mark.exhaustive),
        pytest.param(InterpretedSchedule, "ring-all-reduce", marks=pytest.mark.exhaustive),
    ],
)
def test_an_average_in_16_bits_does_not_overflow_where_the_sum_would(name, kind, folder):
    rng = random.Random(SEED)
    workspaces = make_workspaces(4, folder)
    kernels = make(kind, name, {"ranks": 4}, workspaces, Variant("float16", "avg", "LL"), True)
    large = [torch.full((100,), 40000.0, dtype=torch.float16) for _ in range(4)]
    run_all(kernels, [(tensor,) for tensor in large])
    for tensor in large:
        assert (tensor == 40000).all(), tensor
    numbers = [torch.tensor([rng.uniform(-100, 100) for _ in range(100)], dtype=torch.float16) for _ in range(4)]
    right = torch.stack(numbers).double().mean(0)
    run_all(kernels, [(tensor,) for tensor in numbers])
    for tensor in numbers:  # rounded three times at most, sums of up to 100 to 1 / 32
        assert (tensor.double() - right).abs().max() < 3 / 32, SEED
        assert torch.equal(tensor, numbers[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "protocol", "dtype", "reduction"),
    [
        ("one-shot-all-reduce", "LL", "bfloat16", "avg"),
        ("two-shot-all-reduce", "LL128", "float32", "sum"),
        ("ring-all-reduce", "Simple", "uint8", "max"),
        ("direct-all-gather", "LL128", "int16", "sum"),
        ("binomial-broadcast", "LL", "float64", "sum"),
    ],
)
def test_fused_programs_and_the_interpreter_share_one_workspace(name, protocol, dtype, reduction, folder):
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder)
    in_place = rng.random() < 0.5
    variant = Variant(dtype, reduction, protocol)
    fused = make(FusedScheduleKernel, name, {"ranks": 2}, workspaces, variant, in_place)
    steps = make(
        InterpretedSchedule, "ring-all-gather", {"ranks": 2}, workspaces, Variant("int32", "max", "LL128"), True
    )
    for elements in (1, 7, 255, 4097):
        check(fused, getattr(torch, dtype), reduction, in_place, elements, rng.choice([0, 1, 3]), rng)
        check(steps, torch.int32, "max", True, elements % 500, 0, rng)


def test_data_larger_than_the_mailboxes_is_sent_in_pieces(folder):
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder, bytes_each=4096)
    for protocol in PROTOCOLS:
        kernels = make(
            FusedScheduleKernel, "direct-all-gather", {"ranks": 2}, workspaces, Variant("int16", "sum", protocol), True
        )
        check(kernels, torch.int16, "sum", True, 9001, 1, rng)
        assert len(kernels[0]._current.pieces) > 2


def test_a_piece_leaves_the_next_one_alone(folder, monkeypatch):
    """A block of 24 threads goes beyond the end of a piece of 32 vectors, where it must not write.

    LL128's threads all meet for a line here, so that its blocks end with a piece.
    """
    monkeypatch.setattr(emulated, "THREADS", 24)
    rng = random.Random(SEED)
    workspaces = make_workspaces(2, folder, bytes_each=4096)
    for protocol in ("LL", "Simple"):
        kernels = make(
            FusedScheduleKernel,
            "two-shot-all-reduce",
            {"ranks": 2},
            workspaces,
            Variant("int32", "sum", protocol),
            True,
        )
        check(kernels, torch.int32, "sum", True, 3001, 0, rng)
        assert len(kernels[0]._current.pieces) > 2


def test_a_missing_peer_is_named_after_the_time_limit(folder):
    workspaces = make_workspaces(2, folder, limit=0.3)
    for kind, protocol, wait in (
        (FusedScheduleKernel, "LL", r"rank 1's message 0 \(level 1\)"),
        (InterpretedSchedule, "Simple", r"rank 1's message \(step 0, r, channel 0\)"),
    ):
        workspaces[0].mend()
        kernels = make(kind, "ring-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", protocol), True)
        kernels[0](torch.zeros(200, dtype=torch.int32))
        calls = int(workspaces[0].state[0])
        with pytest.raises(
            PeerError, match=rf"^ring-all-gather, call {calls}, thread block \d waited in vain for {wait}, 0.3 s$"
        ):
            kernels[0](torch.zeros(200, dtype=torch.int32))
        other = make(kind, "ring-all-reduce", {"ranks": 2}, workspaces, Variant("int32", "sum", "LL"), True)
        with pytest.raises(PeerError, match=r"^ring-all-gather, "):  # whoever finds the report, it is the other's
            other[0](torch.zeros(2000, dtype=torch.int32))


def test_a_launch_that_is_repeated_has_the_limit_of_later_calls(folder):
    """Also if the call was the first after a kernel was loaded, whose limit is longer."""
    workspaces = make_workspaces(2, folder, limit=0.3)
    workspaces[0].lasting_limit = 77
    kernel = make(
        FusedScheduleKernel, "ring-all-gather", {"ranks": 2}, workspaces, Variant("int32", "sum", "LL"), True
    )[0]
    kernel(torch.zeros(200, dtype=torch.int32))
    values, limit = list(kernel.last_launch().values), kernel._function.place("limit")
    assert values[limit] == 77
    values[limit] = 300_000_000
    assert tuple(values) == kernel._function.parameters()


def test_a_wait_of_the_interpreter_names_the_one_thing_that_it_was_for(folder):
    # The root sends tile after tile to a rank that takes none, until its slots are full.
    schedule = ALGORITHMS["binomial-broadcast"].compile(ranks=2)
    workspace = make_workspaces(2, folder, limit=0.3)[0]
    variant = Variant("int32", "sum", "Simple")
    kernel = InterpretedSchedule(schedule, workspace, variant, in_place=True, tile_bytes=480)
    kernel(torch.zeros(12_000, dtype=torch.int32))
    with pytest.raises(PeerError, match=r"waited in vain for a free slot at rank 1 \(step 0, s, channel 0\), 0.3 s$"):
        workspace.check()


@pytest.mark.long
def test_a_thread_block_that_waits_for_another_leaves_it_to_that_one_to_name_the_peer(folder):
    # Thread block 1 adds what thread block 0 has received, which never comes.
    schedule = ALGORITHMS["two-shot-all-reduce"].compile(ranks=2, in_place=False)
    workspace = make_workspaces(2, folder, limit=0.3)[0]
    kernel = InterpretedSchedule(schedule, workspace, Variant("int32", "sum", "LL"), in_place=False)
    for _ in range(6):
        workspace.mend()
        kernel(torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32))
        with pytest.raises(
            PeerError, match=r"thread block 0 waited in vain for rank 1's message \(step 1, r, channel 0\), 0.3 s$"
        ):
            workspace.check()
    description = kernel.describe_wait(1, 1, 2)  # where that one has no time limit of its own: another fault
    assert description == "its own thread block 0 to end step 1 (step 1, re, channel 0)"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", [FusedScheduleKernel, InterpretedSchedule])
def test_call_numbers_may_wrap_around(kind, protocol, folder):
    """Calls on both sides of 2^31 and of 2^32, the first ones on memory that no call has written to."""
    rng = random.Random(SEED)
    for calls in (2**31 - 3, 2**32 - 4):
        workspaces = make_workspaces(2, folder)
        name = "binomial-broadcast" if kind is FusedScheduleKernel else "ring-all-reduce"  # the former waits for tokens
        kernels = make(kind, name, {"ranks": 2}, workspaces, Variant("int32", "sum", protocol), True)
        for workspace in workspaces:
            workspace.set_calls(calls)
        for elements in (5, 700, 1, 700, 90, 5, 700):
            check(kernels, torch.int32, "sum", True, elements, 0, rng)
        after = calls + 7 if calls < 2**31 else calls + 9 - 2**32  # 0 and 1 are left out
        assert int(workspaces[0].state[0]) & 0xFFFFFFFF == after


@pytest.mark.sampled(2)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", [FusedScheduleKernel, InterpretedSchedule])
def test_data_of_an_old_call_is_not_taken_when_its_number_recurs(kind, protocol, folder):
    """A call, others elsewhere in memory past the numbers at which it is cleaned, and the first call's number again.

    Rank 0 comes much earlier than rank 1, and would find the old call's message in place of the new one's.
    """
    workspaces = make_workspaces(2, folder, macros="#define CALLS_BETWEEN_CLEANINGS 64u\n")
    variant = Variant("int32", "sum", protocol)
    tested = make(kind, "ring-all-gather", {"ranks": 2}, workspaces, variant, True)
    elsewhere = Variant("int32", "sum", "Simple" if protocol == "LL" else "LL")
    others = make(FusedScheduleKernel, "direct-all-gather", {"ranks": 2}, workspaces, elsewhere, True)

    def call(kernels, elements, content, seconds=0.0):
        tensors = [torch.zeros(2 * elements, dtype=torch.int32) for _ in workspaces]
        for rank, tensor in enumerate(tensors):
            tensor[rank * elements : (rank + 1) * elements] = content + rank

        def late(kernel, tensor):
            time.sleep(seconds if kernel is kernels[1] else 0)
            kernel(tensor)

        run_all([partial(late, kernel) for kernel in kernels], [(tensor,) for tensor in tensors])
        for tensor in tensors:
            assert tensor.view(2, -1)[:, 0].tolist() == [content, content + 1]
            assert (tensor.view(2, -1) == tensor.view(2, -1)[:, :1]).all()

    for number in (6, 7):  # one in each half
        for workspace in workspaces:
            workspace.set_calls(number - 1)
        call(tested, 200, 100)
        for workspace in workspaces:
            workspace.set_calls(62)
        for small in range(4):
            call(others, 3, small)
        for workspace in workspaces:
            workspace.set_calls(number - 1)
        call(tested, 200, 500, seconds=0.2)


def test_a_call_without_elements_does_not_count_as_one(folder):
    workspaces = make_workspaces(2, folder)
    kernels = make(
        FusedScheduleKernel, "direct-all-gather", {"ranks": 2}, workspaces, Variant("int16", "sum", "LL128"), True
    )
    kernels[0](torch.zeros(0, dtype=torch.int16))  # nobody is waited for, so the mailboxes' halves must not turn
    assert workspaces[0].state[0] == 0


def test_tables_that_a_graph_reads_outlive_interpreted_calls_of_other_sizes(folder, monkeypatch):
    made, stock = [], torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda table: made.append(stock(table)) or made[-1])
    workspaces = make_workspaces(2, folder)
    variant, sizes, rng = Variant("int32", "sum", "LL"), (8, 300), random.Random(SEED)
    kernels = make(InterpretedSchedule, "ring-all-reduce", {"ranks": 2}, workspaces, variant, True)

    def call(elements):
        check(kernels, torch.int32, "sum", True, elements, 0, rng)

    for elements in sizes:
        call(elements)
    tables = [weakref.ref(table) for table in made]
    made.clear()
    for workspace in workspaces:
        workspace.is_capturing = True
    for elements in sizes:
        call(elements)
    with pytest.raises(RuntimeError, match="call once before"):
        call(9)
    for workspace in workspaces:
        workspace.is_capturing = False
    for elements in range(1000, 1000 + interpreter._MAX_SIZES + 1):  # more than are kept
        for kernel in kernels:
            kernel._find_sized((elements, None))
    made.clear()
    assert all(table() is not None for table in tables)


def test_a_schedule_for_other_ranks_is_refused(folder):
    workspaces = make_workspaces(2, folder)
    for kind in (FusedScheduleKernel, InterpretedSchedule):
        with pytest.raises(ValueError, match="is made for 3 ranks, the group has 2"):
            make(kind, "ring-all-gather", {"ranks": 3}, workspaces, Variant("int32", "sum", "LL"), True)


def test_an_interpreter_whose_fifos_do_not_fit_raises(folder):
    workspaces = make_workspaces(2, folder, bytes_each=4096)
    schedule = ALGORITHMS["ring-all-gather"].compile(ranks=2)
    kernel = InterpretedSchedule(
        schedule, workspaces[0], Variant("int32", "sum", "Simple"), in_place=True, tile_bytes=1 << 16
    )
    with pytest.raises(ValueError, match=r"bytes of FIFOs with tiles of .* bytes, of 4096 that there are for Simple"):
        kernel(torch.zeros(100_000, dtype=torch.int32))


@pytest.mark.parametrize("unroll", [1, 2])
def test_a_launch_has_the_fewest_rounds_and_no_more_threads_than_were_compiled_for(unroll, folder):
    variant, options = Variant("bfloat16", "sum", "LL128", unroll), {"ranks": 2}
    workspaces = make_workspaces(2, folder)
    for workspace in workspaces:
        workspace.multiprocessors, workspace.max_blocks = 132, bound_blocks(132)
    kernel = make(FusedScheduleKernel, "two-shot-all-reduce", options, workspaces, variant, False)[0]
    kernel._capacity = 64 << 20  # as on GPUs
    text = write_source(kernel.fused, 0, kernel.block_chunks, variant)
    most = int(re.search(r"__launch_bounds__\((\d+)\)", text)[1])
    assert most == (1024 if unroll == 1 else 512)

    def check(size, bound):
        plan = kernel._plan((size // 2, size // 2))
        assert plan.threads % 128 == 0
        assert plan.threads <= most
        for _, num_vectors, blocks in plan.pieces:
            assert blocks <= bound
            assert -(-num_vectors // (blocks * plan.threads * unroll)) == -(-num_vectors // (bound * most * unroll))

    for size in (2, 1 << 10, 1 << 20, 2 << 20, 3_000_000, 8 << 20):
        check(size, 99)
    check(64 << 20, 48)  # a large all-reduce leaves more to the products beside it
