# SPDX-License-Identifier: Apache-2.0
"""Random programs in the chunk language, each with the postcondition that it happens to have, and random damage."""

import random
from collections import Counter
from dataclasses import replace

from stretto.collectives import Buffer, Collective, Program, Schedule, StepType, chunk, parallelize, trace

SCRATCH = 5


def random_program(rng: random.Random) -> Program:
    """Up to 25 fragments of copies and reduces on up to 5 ranks, in place or not, on asked and unasked channels."""
    ranks, inputs, outputs = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4)
    in_place = rng.random() < 0.4
    outputs = inputs if in_place else outputs
    bare = Collective("custom", ranks, inputs, outputs, lambda rank, index: None, in_place=in_place)
    holds: dict[tuple[int, Buffer, int], Counter] = {}
    for rank in range(ranks):
        for index in range(inputs):
            holds[(rank, *bare.place(rank, Buffer.IN, index))] = Counter({(rank, index): 1})
    sizes = {Buffer.IN: inputs, Buffer.OUT: outputs, Buffer.SCRATCH: SCRATCH}
    with trace(bare) as traced:
        for _ in range(rng.randint(0, 25)):
            with parallelize(rng.choice([1, 1, 1, 2, 3])):
                for _ in range(rng.randint(1, 3)):
                    _one_operation(rng, bare, sizes, holds)

    def expected(rank: int, index: int):
        sums = holds.get((rank, *bare.place(rank, Buffer.OUT, index)))
        return None if sums is None or max(sums.values()) > 1 else tuple(sorted(sums))

    return replace(traced.program, collective=replace(bare, expected=expected))


def _one_operation(rng, bare, sizes, holds) -> None:
    count = rng.choice([1, 1, 1, 2, 3])
    channel = rng.choice([None, None, None, 0, 1, 2])

    def full(rank):
        return [(b, i) for r, b, i in holds if r == rank and all((rank, b, i + k) in holds for k in range(count))]

    source, target = rng.randrange(bare.ranks), rng.randrange(bare.ranks)
    if not (places := full(source)):
        return
    buffer, index = rng.choice(places)
    values = [holds[source, buffer, index + k] for k in range(count)]

    def clear_of_source(to_buffer, to_index):
        return target != source or to_buffer is not buffer or abs(to_index - index) >= count

    if rng.random() < 0.5:
        to = rng.choice(list(Buffer))
        if sizes[to] < count:
            return
        at = rng.randint(0, sizes[to] - count)
        to_buffer, to_index = bare.place(target, to, at)
        if clear_of_source(to_buffer, to_index):
            chunk(source, buffer, index, count).copy(target, to, at, ch=channel)
            holds |= {(target, to_buffer, to_index + k): values[k] for k in range(count)}
    elif sums := [place for place in full(target) if clear_of_source(*place)]:
        to_buffer, to_index = rng.choice(sums)
        chunk(target, to_buffer, to_index, count).reduce(chunk(source, buffer, index, count), ch=channel)
        for k in range(count):
            holds[target, to_buffer, to_index + k] = holds[target, to_buffer, to_index + k] + values[k]


def damaged(schedule: Schedule, rng: random.Random) -> tuple[str, Schedule] | None:
    """The schedule with one thing changed, and what; None where there is nothing to change so."""
    blocks = {
        (rank, number): list(block.steps)
        for rank, program in enumerate(schedule.ranks)
        for number, block in enumerate(program.thread_blocks)
        if block.steps
    }
    if not blocks:
        return None
    where = rng.choice(list(blocks))
    steps = blocks[where]
    at = rng.randrange(len(steps))
    peers: dict[str, int] = {}
    what = rng.choice(["wait", "offset", "twice", "gone", "swapped", "peer", "type", "size"])
    match what:
        case "wait":
            waiting = [(key, i) for key, all_ in blocks.items() for i, step in enumerate(all_) if step.waits_for]
            if not waiting:
                return None
            key, i = rng.choice(waiting)
            blocks[key][i] = blocks[key][i]._replace(waits_for=None)
        case "offset":
            name = rng.choice(["source", "destination"])
            steps[at] = steps[at]._replace(**{name: max(0, getattr(steps[at], name) + rng.choice([-1, 1]))})
        case "twice":
            steps.insert(at, steps[at])
        case "gone":
            del steps[at]
        case "swapped":
            other = rng.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        case "peer":
            name = rng.choice(["send_peer", "receive_peer", "channel"])
            peer = rng.randrange(len(schedule.ranks))
            if name != "channel" and peer == where[0]:
                return None
            peers = {name: peer}
        case "type":
            steps[at] = steps[at]._replace(type=rng.choice(list(StepType)))
        case "size":
            steps[at] = steps[at]._replace(size=max(0, steps[at].size + rng.choice([-1, 1])))
    ranks = tuple(
        program._replace(
            thread_blocks=tuple(
                block._replace(
                    steps=tuple(blocks.get((rank, number), block.steps)), **(peers if (rank, number) == where else {})
                )
                for number, block in enumerate(program.thread_blocks)
            )
        )
        for rank, program in enumerate(schedule.ranks)
    )
    return what, replace(schedule, ranks=ranks)
