# SPDX-License-Identifier: Apache-2.0
"""The executor with all ranks in one process: every dtype, reduction and size, in every order."""

import os
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from tests.collectives.executor import programs
from tests.collectives.executor.simulation import simulate

from stretto.collectives.algorithms import find
from stretto.collectives.collective import AllGather, AllReduce, AllToAll, Buffer, Collective
from stretto.collectives.executor import REDUCTIONS, ExecutionError
from stretto.collectives.executor.plan import DTYPES
from stretto.collectives.executor.rank_run import FifoSender
from stretto.collectives.language import chunk, parallelize
from stretto.collectives.schedule import RankProgram, Schedule, Step, StepType, ThreadBlock

SEED = int(os.environ.get("STRETTO_TEST_SEED", random.randrange(2**32)))


def assert_outputs(schedule, outputs, expected, what):
    for rank, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        if right is not None:
            assert output.dtype == right.dtype, what
            assert torch.equal(output, right), (what, rank, output, right)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_any_dtype_reduction_and_number_of_elements_gives_the_right_result(name):
    print(f"seed {SEED}")
    order = random.Random(SEED)
    combinations = [(dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS]
    for ranks in (2, 3, 5):
        for instances in (1, 2):
            schedule = programs.compile_named(name, ranks, instances=instances)
            for dtype, reduction in combinations:
                elements = order.choice((0, 1, 2, ranks, 12, 37, 60, 121))
                tile_bytes = order.choice((8, 24, 64, 1 << 18))
                inputs = programs.make_inputs(schedule, elements, dtype, order.randrange(99))
                kept = [tensor.clone() for tensor in inputs]
                seed = order.choice((None, order.randrange(2**32)))
                outputs = simulate(schedule, inputs, reduction=reduction, tile_bytes=tile_bytes, seed=seed)
                what = (ranks, instances, dtype, reduction, elements, tile_bytes, seed)
                assert_outputs(schedule, outputs, programs.expected_outputs(schedule, kept, reduction), what)
                assert all(map(torch.equal, inputs, kept)), what


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_in_fp32_and_rounded_at_each_step(dtype):
    schedule = programs.compile_named("chain reduce", 4)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1000, generator=generator).to(dtype) for _ in range(4)]
    sums = inputs[0]
    for tensor in inputs[1:]:
        sums = (sums.float() + tensor.float()).to(dtype)
    assert torch.equal(simulate(schedule, inputs)[0], sums)
    assert not torch.equal(sums, sum(tensor.float() for tensor in inputs).to(dtype))  # rounding shows in this input


def test_a_full_chunk_may_pass_where_a_short_one_belongs():
    def detour(ranks):
        for index in range(3):
            sums = chunk(1, "in", index).reduce(chunk(0, "in", index))
            parked = sums.copy(0, "out", 2).copy(1, "out", 2)  # of 10 elements, the last chunk has 2
            parked.copy(0, "out", index)
            parked.copy(1, "out", index)

    schedule = programs.compile_collective(detour, AllReduce(2, 3, in_place=False))
    inputs = programs.make_inputs(schedule, 10, torch.int64)
    for output in simulate(schedule, inputs):
        assert torch.equal(output, inputs[0] + inputs[1])


# Programs at random: what a schedule of many thread blocks leaves in memory is what its program, line by line, does.


def run_at_random(order, ranks, chunks):
    """A function that traces a random program, and the buffers that it must leave, as {(rank, buffer): [chunk]}."""
    memory = {(rank, "in", index): 1000 * rank + index for rank in range(ranks) for index in range(chunks)}
    lines = []
    for _ in range(order.randrange(1, 25)):
        count = order.choice((1, 1, 2))
        starts = [key for key in memory if all((*key[:2], key[2] + more) in memory for more in range(count))]
        rank, buffer, index = order.choice(starts)
        peer, target = order.randrange(ranks), order.choice(("in", "out", "scratch"))
        at = order.randrange(chunks - count + 1)
        written = [(peer, target, at + more) for more in range(count)]
        read = [(rank, buffer, index + more) for more in range(count)]
        if set(written) & set(read):
            continue
        reduces = all(key in memory for key in written) and order.random() < 0.5
        for key, value in zip(written, [memory[key] for key in read], strict=True):
            memory[key] = value + memory[key] if reduces else value
        lines.append((reduces, (rank, buffer, index, count), (peer, target, at, count), order.choice((1, 1, 2))))

    def program(ranks):
        for reduces, source, destination, parallel in lines:
            with parallelize(parallel):
                if reduces:
                    chunk(*destination).reduce(chunk(*source))
                else:
                    chunk(*source).copy(*destination[:3])

    return program, memory


def expect_what_is_there(memory, rank, index):
    """Every output chunk that was written counts; which sum it holds is of no interest to the compiler."""
    return ((rank, index),) if (rank, "out", index) in memory else None


@pytest.mark.long
@pytest.mark.parametrize("trials", [40, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_random_programs_leave_the_expected_values_in_any_order(trials):
    for trial in range(trials):
        seed = SEED + trial
        print(f"seed {seed}")
        order = random.Random(seed)
        ranks, chunks = order.choice((1, 2, 3, 4)), order.choice((2, 3, 4))
        program, memory = run_at_random(order, ranks, chunks)
        custom = Collective("custom", ranks, chunks, chunks, partial(expect_what_is_there, memory))
        schedule = programs.compile_collective(
            program, custom, protocol=order.choice(("Simple", "LL")), instances=order.choice((1, 2, 3))
        )
        numbers = torch.arange(chunks).repeat_interleave(12)  # as many as instances divide
        inputs = [1000 * rank + numbers for rank in range(ranks)]
        for turn in (None, seed, seed + 1, seed + 2):
            outputs = simulate(schedule, inputs, tile_bytes=order.choice((8, 1000)), seed=turn)
            for (rank, buffer, index), value in memory.items():
                if buffer == "out":
                    assert outputs[rank][12 * index : 12 * index + 12].tolist() == [value] * 12, (seed, turn)


def test_a_random_order_shows_a_lost_dependency():
    schedule = programs.compile_named("all-pairs all-reduce", 3)
    blind = replace(
        schedule,
        ranks=tuple(
            program._replace(
                thread_blocks=tuple(
                    block._replace(steps=tuple(step._replace(waits_for=None) for step in block.steps))
                    for block in program.thread_blocks
                )
            )
            for program in schedule.ranks
        ),
    )
    assert blind != schedule
    inputs = programs.make_inputs(schedule, 30, torch.float32)
    expected = programs.expected_outputs(schedule, inputs)
    seen = {all(map(torch.equal, simulate(blind, inputs, seed=seed), expected)) for seed in range(20)}
    assert False in seen


# Schedules by hand.

_SEND = Step(StepType.SEND, Buffer.IN, 0, size=1)
_RECEIVE = Step(StepType.RECEIVE, destination_buffer=Buffer.OUT, destination=0, size=1)


def schedule_of(*ranks, chunks=1, **options):
    """A schedule of ranks that are lists of thread blocks (send peer, receive peer, channel, steps)."""
    collective = Collective("custom", len(ranks), chunks, chunks, lambda rank, index: None)
    rank_programs = tuple(
        RankProgram(chunks, chunks, 0, tuple(ThreadBlock(*block[:3], tuple(block[3])) for block in blocks))
        for blocks in ranks
    )
    return Schedule(
        "by hand", collective, "Simple", rank_programs, **{"in_place": False, "out_of_place": True} | options
    )


def exchange_of(messages):
    """Two ranks that both send before they receive."""
    return schedule_of(*([(1 - rank, 1 - rank, 0, [_SEND] * messages + [_RECEIVE] * messages)] for rank in (0, 1)))


def copying(source, destination):
    """An exchange before which rank 1 copies an input chunk to an output chunk."""
    first, second = exchange_of(1).ranks
    return replace(exchange_of(1), ranks=(first, second._replace(copies=((source, destination),))))


def test_sends_before_receives_need_as_many_slots():
    inputs = [torch.tensor([1.0]), torch.tensor([2.0])]
    for slots in (1, 2, 3):
        with pytest.raises(
            ExecutionError,
            match=rf"rank 0, thread block 0, step {slots} \(s\), tile 0 of 1 waits for one of {slots} slots to rank 1",
        ):
            simulate(exchange_of(slots + 1), inputs, slots=slots)
        assert simulate(exchange_of(slots), inputs, slots=slots) == [2.0, 1.0]


def test_a_circle_of_dependencies_names_what_waits_for_what():
    copy = Step(StepType.COPY, Buffer.IN, 0, Buffer.OUT, 0, 1)
    first, second = copy._replace(waits_for=(1, 0)), copy._replace(waits_for=(0, 0))
    with pytest.raises(ExecutionError) as caught:
        simulate(schedule_of([(None, None, 0, [first]), (None, None, 0, [second])]), [torch.ones(1)])
    assert "thread block 0, step 0 (cpy), tile 0 of 1 waits for step 0 of thread block 1 to end" in str(caught.value)
    assert "thread block 1, step 0 (cpy), tile 0 of 1 waits for step 0 of thread block 0 to end" in str(caught.value)


def test_a_schedule_may_write_over_its_input_and_the_caller_s_stays():
    swap = [
        Step(StepType.COPY, Buffer.IN, 0, Buffer.OUT, 0, 1),
        Step(StepType.COPY, Buffer.IN, 1, Buffer.IN, 0, 1),
        Step(StepType.NOP),
        Step(StepType.COPY, Buffer.IN, 0, Buffer.OUT, 1, 1),
    ]
    given = torch.tensor([1, 2])
    assert simulate(schedule_of([(None, None, 0, swap)], chunks=2), [given])[0].tolist() == [1, 2]
    assert given.tolist() == [1, 2]


PAIR = [torch.ones(4), torch.ones(4)]
IDLE = schedule_of([(None, None, 0, [Step(StepType.NOP)])])
NEVER = Collective("custom", 1, 2, 2, lambda rank, index: None, in_place=True, starts=lambda rank: (0, 1))
OUTSIDE = replace(IDLE, collective=NEVER, in_place=True)
HALFWAY = replace(IDLE, collective=replace(NEVER, output_chunks=4, starts=lambda rank: (1, 0)), in_place=True)
REVERSED = Collective("custom", 1, 2, 2, lambda rank, index: ((rank, 1 - index),))


@pytest.mark.parametrize(
    ("schedule", "inputs", "options", "message"),
    [
        (exchange_of(1), PAIR[:1], {}, "has 2 ranks: 1 inputs"),
        (exchange_of(1), [torch.ones(4), torch.ones(5)], {}, "4 of float32, 5 of float32"),
        (exchange_of(1), [torch.ones(4, dtype=torch.bool)] * 2, {}, "uint8, not bool"),
        (exchange_of(1), PAIR, {"reduction": "mean"}, "sum, max, min, prod, not 'mean'"),
        (replace(exchange_of(1), reduction="max"), PAIR, {"reduction": "sum"}, "made for 'max', not for 'sum'"),
        (exchange_of(1), PAIR, {"slots": 0}, "1 to 1024 FIFO slots, not 0"),
        (exchange_of(1), PAIR, {"tile_bytes": 3}, "4 bytes here: not 3"),
        (exchange_of(1), PAIR, {"in_place": True}, "runs out of place"),
        (
            programs.compile_named("all-to-all", 3),
            [torch.ones(8)] * 3,
            {},
            "the input of alltoall on 3 ranks is 3 blocks of one size: 8 elements are not, 9 would be",
        ),
        (
            replace(IDLE, collective=REVERSED),
            [torch.ones(5)],
            {},
            "takes rank 0's chunk 1 of 2 elements to chunk 0 of 3: use a multiple of 2",
        ),
        (OUTSIDE, [torch.ones(4)], {"in_place": True}, "out of rank 0 begins at chunk 1 of 2, and does not lie inside"),
        (HALFWAY, [torch.ones(5)], {}, "begins a buffer 1 chunks after a block's start: use a multiple of 2"),
        (
            schedule_of([(1, None, 0, [_SEND, _SEND])], [(None, 0, 0, [_RECEIVE])]),
            PAIR,
            {},
            r"from rank 0 to rank 1 over channel 0: 2 sends of \[1, 1\] chunks meet 1 receives of \[1\]",
        ),
        (
            schedule_of([(1, None, 0, [_SEND]), (1, None, 0, [_SEND])], [(None, 0, 0, [_RECEIVE] * 2)]),
            PAIR,
            {},
            "rank 0, thread block 1 sends on .* and so does another",
        ),
        (
            schedule_of([(None, None, 0, [_SEND])], []),
            PAIR,
            {},
            r"step 0 \(s\): its thread block has no peer to send to",
        ),
        (schedule_of([(None, None, 0, [_RECEIVE])], []), PAIR, {}, "no peer to receive from"),
        (schedule_of([(2, None, 0, [_SEND])], []), PAIR, {}, "rank 2 is no peer"),
        (schedule_of([(0, None, 0, [_SEND])], []), PAIR, {}, "rank 0 is no peer"),
        (schedule_of([(1, None, 0, [_SEND._replace(source=1)])], []), PAIR, {}, "in has 1 chunks: not 1 to 1"),
        (copying(0, 1), PAIR, {}, r"rank 1 copies in\[0\] to out\[1\] first: one of them is not there"),
        (copying(-1, 0), PAIR, {}, r"rank 1 copies in\[-1\] to out\[0\] first"),
        (schedule_of([(1, None, 0, [_SEND._replace(size=0)])], []), PAIR, {}, "it has 0 chunks"),
        (
            schedule_of([(None, None, 0, [Step(StepType.NOP, waits_for=(0, 1))])], []),
            PAIR,
            {},
            "waits for step 1 of thread block 0, which is not there",
        ),
        (
            schedule_of([(None, None, 0, [Step(StepType.COPY, Buffer.IN, 0, Buffer.IN, 1, 2)])], chunks=3),
            PAIR[:1],
            {},
            "its source and its destination overlap",
        ),
    ],
)
def test_unsupported_calls_raise_with_the_reason(schedule, inputs, options, message):
    with pytest.raises(ValueError, match=message):
        simulate(schedule, inputs, **options)


def test_blocks_of_the_ordinary_layout_are_cut_each_on_its_own():
    gather = programs.compile_collective(programs.ring_all_gather, AllGather(3, 2), instances=2)
    inputs = [torch.arange(5) + 10 * rank for rank in range(3)]  # 8 chunks a block of 5 elements
    assert simulate(gather, inputs)[1].tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    exchange = programs.compile_collective(programs.direct_all_to_all, AllToAll(2, 2))
    assert simulate(exchange, [torch.arange(6), torch.arange(6) + 10])[1].tolist() == [3, 4, 5, 13, 14, 15]


Sent = Counter[tuple[int, int]]


def run_and_count(name: str, **options: int) -> tuple[list[torch.Tensor], Sent]:
    """The outputs of an algorithm on these nodes, of inputs of which no two numbers are equal, and the messages that
    were sent, by both ranks."""
    schedule = find(name).compile(**options)
    size = 2 * schedule.collective.input_chunks
    inputs = [torch.arange(size, dtype=torch.int32) + rank * size for rank in range(schedule.collective.ranks)]
    sent, send = Sent(), FifoSender.send

    def count(end: FifoSender, num_bytes: int) -> None:
        sent[end.connection.sender, end.connection.receiver] += 1
        send(end, num_bytes)

    with mock.patch.object(FifoSender, "send", count):
        return simulate(schedule, inputs, seed=SEED), sent


@pytest.mark.parametrize(("nodes", "gpus"), [(3, 4), (2, 3)])
def test_between_nodes_gpus_share_the_work(nodes, gpus):
    """Of an all-to-all in two steps, a node sends another a 1/G of the messages of direct sends; of AllToNext each of
    its GPUs sends a part (MSCCLang, 7.3 and 7.4)."""
    print(f"seed {SEED}")
    ranks = nodes * gpus

    def crossing(sent: Sent) -> Sent:
        return Counter({pair: count for pair, count in sent.items() if pair[0] // gpus != pair[1] // gpus})

    outputs, two_step = run_and_count("two-step-all-to-all", nodes=nodes, gpus=gpus)
    same, direct = run_and_count("direct-all-to-all", ranks=ranks)
    assert all(map(torch.equal, outputs, same))
    assert gpus * sum(crossing(two_step).values()) == sum(crossing(direct).values())
    outputs, sent = run_and_count("all-to-next", nodes=nodes, gpus=gpus)
    for rank in range(1, ranks):
        size = outputs[rank].numel()
        assert outputs[rank].tolist() == list(range((rank - 1) * size, rank * size))
    far = crossing(sent)
    assert set(far) == {(rank, rank + gpus) for rank in range(ranks - gpus)}
    assert len(set(far.values())) == 1
