# SPDX-License-Identifier: Apache-2.0
"""All executors give the host executor's numbers, by the rule in `executor.layout`: any schedule, size and form."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.collectives.executor.cuda.emulated import COMPILER, add_copy_areas, make_workspaces, run_all
from tests.collectives.executor.simulation import simulate
from tests.collectives.random_programs import random_program

from stretto.collectives import Collective, chunk, compile_program, trace, verify
from stretto.collectives.collective import AllReduce
from stretto.collectives.executor.cuda.copy_engine import planner
from stretto.collectives.executor.cuda.copy_engine.executor import CopyEngineExecutor
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.executor.layout import count_block_chunks
from stretto.collectives.executor.plan import make_plan
from stretto.collectives.executor.processes import place_input

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
SEED = random.randrange(2**31)
KINDS = {
    "interpreter": (InterpretedSchedule, "LL"),
    "fused": (FusedScheduleKernel, "LL"),
    "copies": (CopyEngineExecutor, "Copy"),
}


@pytest.fixture(scope="module")
def workspaces(folder):
    made = {ranks: make_workspaces(ranks, folder) for ranks in (1, 2, 3)}
    for each in made.values():
        add_copy_areas(each, planner.HEAD + (1 << 16))
    return made


def make(kind, schedule, workspaces, in_place):
    cls, protocol = KINDS[kind]
    options = {"tile_bytes": 480} if cls is InterpretedSchedule else {}
    variant = Variant("int32", "sum", protocol)
    return [cls(schedule, workspace, variant, in_place=in_place, **options) for workspace in workspaces]


def check_against_the_host(schedule, kernels, block_elements, in_place, rng):
    """Compare what the collective promises of each output with what the host executor gives."""
    collective = schedule.collective
    chunks = count_block_chunks(collective)
    inputs = [
        torch.tensor(
            [rng.randrange(1000) for _ in range(collective.input_chunks // chunks * block_elements)], dtype=torch.int32
        )
        for _ in range(collective.ranks)
    ]
    outputs = simulate(schedule, inputs, in_place=in_place)
    plan = make_plan(
        schedule,
        inputs[0].numel(),
        None,
        in_place=in_place,
        dtype=torch.int32,
        reduction="sum",
        tile_bytes=480,
        slots=None,
    )
    given = [place_input(plan, rank, tensor.clone()) for rank, tensor in enumerate(inputs)]
    kept = [tensor.clone() for tensor, _ in given]
    run_all(kernels, [(tensor,) if output is None else (tensor, output) for tensor, output in given])
    length = plan.layout.chunk_length
    for rank, (tensor, output) in enumerate(given):
        kernels[rank].workspace.check()
        if output is not None:
            assert torch.equal(tensor, kept[rank]), "the caller's input was changed"
        start = 0 if output is not None else plan.layout.elements(plan.collective.starts(rank)[1])
        result = (tensor if output is None else output)[start:]
        for index in range(collective.output_chunks):
            if collective.expected(rank, index) is not None:
                at = index // chunks * block_elements + index % chunks * plan.layout.chunk_elements
                part = slice(at, at + length(index))
                assert torch.equal(result[part], outputs[rank][part]), (rank, index, block_elements)


def stage_in_a_short_place(ranks):
    """All-reduce of four chunks; the sum of the first waits where the last, which may be shorter, is put in the end."""
    for index in range(4):
        total = chunk(0, "in", index)
        for rank in range(1, ranks):
            total = chunk(rank, "in", index).reduce(total)
        staged = total.copy(ranks - 1, "out", 3) if index == 0 else total
        for rank in range(ranks):
            staged.copy(rank, "out", index)


@pytest.mark.parametrize("kind", ["interpreter", "fused"])
def test_a_full_chunk_keeps_its_tail_where_it_passes_through_the_place_of_a_short_one(kind, workspaces):
    collective = AllReduce(2, 4, in_place=False)
    with trace(collective) as traced:
        stage_in_a_short_place(2)
    schedule = compile_program(traced.program, name="staged")
    assert verify(schedule).ok
    kernels = make(kind, schedule, workspaces[2], in_place=False)
    inputs = [torch.arange(1, 10, dtype=torch.int32), 10 * torch.arange(1, 10, dtype=torch.int32)]
    outputs = [torch.zeros(9, dtype=torch.int32) for _ in inputs]
    run_all(kernels, list(zip(inputs, outputs, strict=True)))
    for output in outputs:
        assert output.tolist() == [11 * number for number in range(1, 10)]


@pytest.mark.parametrize("kind", ["interpreter", "fused"])
def test_a_schedule_that_writes_its_input_leaves_the_callers_as_it_is_when_called_out_of_place(kind, workspaces):
    with trace(AllReduce(2, 2, in_place=False)) as traced:
        for index in range(2):
            total = chunk(1, "in", index).reduce(chunk(0, "in", index))
            total.copy(0, "out", index)
            total.copy(1, "out", index)
    schedule = compile_program(traced.program, name="writes its input")
    assert verify(schedule).ok
    kernels = make(kind, schedule, workspaces[2], in_place=False)
    rng = random.Random(SEED)
    for elements in (8, 9, 301):
        check_against_the_host(schedule, kernels, elements, False, rng)


def without_waits(schedule):
    ranks = tuple(
        program._replace(
            thread_blocks=tuple(
                block._replace(steps=tuple(step._replace(waits_for=None, awaited=False) for step in block.steps))
                for block in program.thread_blocks
            )
        )
        for program in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


@pytest.mark.parametrize("protocol", ["LL", "LL128"])
def test_a_relayed_message_overwrites_nothing_that_its_first_sender_has_yet_to_read(protocol, workspaces):
    """Two chunks go from rank 0 to rank 1 and at once back, a chunk further on: the second is read before it is stored.

    By LL and LL128 a thread of the first may be back before rank 0 has come to the second.
    """
    with trace(Collective("custom", 2, 3, 3, lambda rank, index: None, in_place=True)) as traced:
        chunk(0, "in", 0, 2).copy(1, "in", 0).copy(0, "in", 1)
    collective = replace(
        traced.program.collective, expected=lambda rank, index: ((0, (0, 0, 1)[index]),) if rank == 0 else None
    )
    schedule = without_waits(compile_program(replace(traced.program, collective=collective), name="there and back"))
    assert verify(schedule).ok
    assert any(
        step.type.sends and step.type.receives for block in schedule.ranks[1].thread_blocks for step in block.steps
    )
    variant = Variant("int32", "sum", protocol)
    kernels = [InterpretedSchedule(schedule, one, variant, in_place=True, tile_bytes=4800) for one in workspaces[2]]
    for number in range(10):
        tensor = torch.arange(3600, dtype=torch.int32) + number
        wanted = torch.cat([tensor[:1200], tensor[:2400]])
        run_all(kernels, [(tensor,), (torch.zeros_like(tensor),)])
        assert torch.equal(tensor, wanted)


def test_calls_that_need_no_copy_of_their_tensors_make_none(workspaces):
    """Chunks that stay in their own places, and even sizes, run on the caller's tensors."""
    with trace(AllReduce(2, 4, in_place=False)) as traced:
        stage_in_a_short_place(2)
    staged = compile_program(traced.program, name="staged")
    with trace(AllReduce(2, 3)) as traced:
        for index in range(3):
            total = chunk(1, "in", index).reduce(chunk(0, "in", index))
            total.copy(0, "in", index)
    plain = compile_program(traced.program, name="plain")
    no, both = (False, False), (True, True)
    for schedule, in_place, elements, are_copied in (
        (staged, False, 8, [no, (True, False)]),  # rank 1 adds into its input
        (staged, False, 9, [no, both]),  # rank 0 holds no chunk in another's place
        (plain, True, 8, [no, no]),
    ):
        kernels = make("interpreter", schedule, workspaces[2], in_place)
        sized = [kernel._find_sized((elements, None if in_place else elements)) for kernel in kernels]
        assert [(one.input_copy is not None, one.output_copy is not None) for one in sized] == are_copied


def random_schedule(rng, most_ranks):
    """A random program's schedule that takes uneven sizes: nothing is promised of a chunk in another's place."""
    while True:
        program = random_program(rng)
        collective = program.collective
        if collective.ranks > most_ranks:
            continue
        schedule = compile_program(replace(program, collective=_with_own_places(collective)), name="random")
        if schedule.steps and verify(schedule).ok:
            return schedule


def _with_own_places(collective: Collective) -> Collective:
    chunks = count_block_chunks(collective)
    wanted = collective.expected

    def expected(rank, index):
        of = wanted(rank, index)
        return None if of is None or any(given % chunks != index % chunks for _, given in of) else of

    return replace(collective, expected=expected)


def check_random_schedules(kind, count, workspaces, rng):
    ran = Counter()
    while ran["schedules"] < count:
        schedule = random_schedule(rng, most_ranks=3)
        in_place = schedule.in_place
        try:
            kernels = make(kind, schedule, workspaces[schedule.collective.ranks], in_place)
        except ValueError:  # it sends what lies in none of its buffers
            if kind != "copies":
                raise
            continue
        ran["schedules"] += 1
        block_chunks = count_block_chunks(schedule.collective)
        for elements in (rng.randint(1, 3 * block_chunks), 40 * block_chunks, rng.randint(100, 700)):
            check_against_the_host(schedule, kernels, elements, in_place, rng)
            ran["uneven"] += elements % block_chunks != 0
    return ran


def test_the_interpreter_runs_random_schedules_as_the_host_does(workspaces):
    print(f"seed {SEED}")
    assert check_random_schedules("interpreter", 6, workspaces, random.Random(SEED))["uneven"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_the_interpreter_runs_many_random_schedules_as_the_host_does(seed, workspaces):
    print(f"seed {SEED + seed}")
    ran = check_random_schedules("interpreter", 25, workspaces, random.Random(SEED + seed))
    assert ran["uneven"] > 5


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["fused", "copies"])
@pytest.mark.parametrize("seed", range(2))
def test_fused_kernels_and_copy_engines_run_random_schedules_as_the_host_does(kind, seed, workspaces):
    print(f"seed {SEED + seed}")
    check_random_schedules(kind, 2, workspaces, random.Random(SEED + seed))


def test_copy_engines_send_nothing_from_a_place_that_may_be_too_short_for_it(workspaces):
    """Rank 1 passes on chunks in an output of its that may hold anything, and is shorter for uneven sizes."""
    bare = Collective("custom", 3, 2, 2, lambda rank, index: None)
    with trace(bare) as traced:
        chunk(0, "in", 0).copy(1, "out", 1).copy(2, "out", 0)
    collective = replace(bare, expected=lambda rank, index: ((0, 0),) if (rank, index) == (2, 0) else None)
    schedule = compile_program(replace(traced.program, collective=collective), name="through a short place")
    assert verify(schedule).ok
    rng = random.Random(SEED)
    for kind in ("interpreter", "fused"):
        check_against_the_host(schedule, make(kind, schedule, workspaces[3], False), 7, False, rng)
    with pytest.raises(ValueError, match="it sends what is in none of its buffers"):
        make("copies", schedule, workspaces[3], in_place=False)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("in_place", [True, False])
def test_chunks_begin_where_they_should_when_only_some_of_them_are_sums(kind, in_place, workspaces):
    """29 elements are chunks of 10, 10 and 9. With chunks of 12, begun at 16 bytes, sums would begin elsewhere."""

    def expected(rank, index):
        return ((0, index), (1, index)) if index else ((rank, index),)

    collective = replace(Collective("custom", 2, 3, 3, expected), in_place=in_place)
    with trace(collective) as traced:
        for index in range(3):
            held = [chunk(rank, "in", index) for rank in range(2)]
            if not in_place:
                held = [one.copy(rank, "out", index) for rank, one in enumerate(held)]
            if index:
                held[0].reduce(held[1]).copy(1, "in" if in_place else "out", index)
    schedule = compile_program(traced.program, name="some are sums")
    assert verify(schedule).ok
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    check_against_the_host(schedule, make(kind, schedule, workspaces[2], in_place), 29, in_place, rng)


def test_copy_engines_push_no_more_into_a_peers_tensor_than_its_place_holds(workspaces):
    with trace(Collective("custom", 2, 2, 2, lambda rank, index: None)) as traced:
        chunk(0, "in", 0).copy(1, "out", 1)
        chunk(0, "in", 1).copy(0, "out", 1)
    schedule = compile_program(traced.program, name="to a short place")
    kernels = make("copies", schedule, workspaces[2], in_place=False)
    assert not kernels[0]._zero_copy
