"""Runs a schedule on symbols, one step of any thread block at a time: an oracle for what the compiler makes.

It shares nothing with the verifier. A chunk's content is a multiset of input chunks; which thread block goes next is
drawn, so that several runs see several orders.
"""

import random
from collections import Counter, deque

from stretto.collectives.collective import Buffer
from stretto.collectives.schedule import Schedule, Step, StepType

Content = Counter[tuple[int, int]]


def assert_right(schedule: Schedule, runs: int = 3) -> None:
    """Assert that the schedule ends, drains its FIFOs and meets its collective's postcondition in every drawn order."""
    for seed in range(runs):
        memory = _run(schedule, random.Random(seed))
        collective = schedule.collective
        for rank in range(collective.ranks):
            for index in range(collective.output_chunks):
                expected = collective.expected(rank, index)
                if expected is not None:
                    place = (rank, *collective.place(rank, Buffer.OUT, index))
                    assert memory.get(place) == Counter(expected), f"rank {rank}'s output chunk {index}, seed {seed}"


def _run(schedule: Schedule, draw: random.Random) -> dict[tuple[int, Buffer, int], Content]:
    collective = schedule.collective
    memory: dict[tuple[int, Buffer, int], Content] = {}
    for rank in range(collective.ranks):
        for index in range(collective.input_chunks):
            if collective.initialized(rank, index):
                memory[(rank, *collective.place(rank, Buffer.IN, index))] = Counter([(rank, index)])
    fifos: dict[tuple[int, int, int], deque[list[Content]]] = {}
    done = {
        (rank, number): 0 for rank, program in enumerate(schedule.ranks) for number in range(len(program.thread_blocks))
    }
    waiting = list(done)

    def places(rank: int, buffer: Buffer, start: int, size: int) -> list[tuple[int, Buffer, int]]:
        assert start >= 0
        assert start + size <= schedule.ranks[rank].chunks(buffer)
        return [(rank, *collective.place(rank, buffer, index)) for index in range(start, start + size)]

    def try_step(rank: int, number: int, step: Step) -> bool:
        block = schedule.ranks[rank].thread_blocks[number]
        if step.waits_for is not None:
            assert schedule.ranks[rank].thread_blocks[step.waits_for[0]].steps[step.waits_for[1]].awaited
            if done[rank, step.waits_for[0]] <= step.waits_for[1]:
                return False
        source = fifos.setdefault((block.receive_peer, rank, block.channel), deque()) if step.type.receives else None
        target = fifos.setdefault((rank, block.send_peer, block.channel), deque()) if step.type.sends else None
        if (source is not None and not source) or (target is not None and len(target) >= schedule.slots):
            return False
        chunks = source.popleft() if source is not None else None
        if step.type.reads_source:
            own = [memory[place] for place in places(rank, step.source_buffer, step.source, step.size)]
            if step.type is StepType.REDUCE:
                at = places(rank, step.destination_buffer, step.destination, step.size)
                chunks = [memory[place] for place in at]
            chunks = own if chunks is None else [one + other for one, other in zip(own, chunks, strict=True)]
        if step.type.writes_destination:
            at = places(rank, step.destination_buffer, step.destination, step.size)
            memory.update(zip(at, chunks, strict=True))
        if target is not None:
            target.append(chunks)
        return True

    while waiting:
        draw.shuffle(waiting)
        moved = False
        for rank, number in list(waiting):
            steps = schedule.ranks[rank].thread_blocks[number].steps
            while done[rank, number] < len(steps) and try_step(rank, number, steps[done[rank, number]]):
                done[rank, number] += 1
                moved = True
                if draw.random() < 0.5:
                    break
            if done[rank, number] == len(steps):
                waiting.remove((rank, number))
        assert moved or not waiting, f"deadlock at {[(block, done[block]) for block in waiting]}"
    assert not any(fifos.values()), "a message was never received"
    return memory
