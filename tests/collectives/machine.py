# SPDX-License-Identifier: Apache-2.0
"""A machine of symbols that runs schedules, written apart from Stretto's own, with events in random order.

A chunk holds the multiset of input chunks that were added to make it.
"""

import random
from collections import Counter

from stretto.collectives import Buffer, Collective, Schedule, StepType

Chunk = Counter[tuple[int, int]]


class Stuck(Exception):
    """No thread block can go on."""


class Machine:
    """One run of a schedule, with so many FIFO slots a connection."""

    def __init__(self, schedule: Schedule, collective: Collective, slots: int, rng: random.Random) -> None:
        self.schedule = schedule
        self.collective = collective
        self.slots = slots
        self.rng = rng
        self.memory: list[dict[Buffer, list[Chunk | None]]] = []
        for rank, program in enumerate(schedule.ranks):
            buffers: dict[Buffer, list[Chunk | None]] = {Buffer.SCRATCH: [None] * program.scratch_chunks}
            for buffer in (Buffer.IN, Buffer.OUT):
                name, _ = collective.place(rank, buffer, 0)
                buffers.setdefault(name, [None] * collective.chunks(name))
            self.memory.append(buffers)
            for index in range(collective.input_chunks):
                if collective.initialized(rank, index):
                    self._write(rank, Buffer.IN, index, [Counter({(rank, index): 1})])
        self.fifos: dict[tuple[int, int, int], list[list[Chunk]]] = {}
        self.at = {
            (rank, block): 0
            for rank, program in enumerate(schedule.ranks)
            for block in range(len(program.thread_blocks))
        }
        self.published = dict.fromkeys(self.at, -1)

    def run(self) -> "Machine":
        """To the end; Stuck where there is none. Some thread blocks are much slower than others in some runs."""
        slow = {key: self.rng.random() ** 4 * self.rng.choice([0, 1]) for key in self.at}
        live = [key for key in self.at if self._block(key).steps]
        while live:
            order = sorted(live, key=lambda key: (slow[key] < self.rng.random(), self.rng.random()))
            moved = next((key for key in order if self._step(*key)), None)
            if moved is None:
                raise Stuck
            if self.at[moved] == len(self._block(moved).steps):
                live.remove(moved)
        if any(self.fifos.values()):
            raise Stuck("messages that nobody takes")
        return self

    def outputs_are_right(self) -> bool:
        """Check whether every output chunk that the collective speaks of holds the sum that it asks for."""
        for rank in range(self.collective.ranks):
            for index in range(self.collective.output_chunks):
                expected = self.collective.expected(rank, index)
                if expected is not None and self._read(rank, Buffer.OUT, index, 1)[0] != Counter(expected):
                    return False
        return True

    def _block(self, key):
        return self.schedule.ranks[key[0]].thread_blocks[key[1]]

    def _read(self, rank, buffer, start, size):
        buffer, start = self.collective.place(rank, buffer, start)
        return self.memory[rank][buffer][start : start + size]

    def _write(self, rank, buffer, start, chunks):
        buffer, start = self.collective.place(rank, buffer, start)
        self.memory[rank][buffer][start : start + len(chunks)] = chunks

    def _step(self, rank: int, number: int) -> bool:
        block = self._block((rank, number))
        at = self.at[rank, number]
        step = block.steps[at]
        if step.waits_for is not None and self.published[rank, step.waits_for[0]] < step.waits_for[1]:
            return False
        incoming = outgoing = None
        if step.type in (StepType.RECEIVE, *FUSED, StepType.RECEIVE_REDUCE_COPY):
            incoming = self.fifos.setdefault((block.receive_peer, rank, block.channel), [])
            if not incoming:
                return False
        if step.type in (StepType.SEND, *FUSED):
            outgoing = self.fifos.setdefault((rank, block.send_peer, block.channel), [])
            if len(outgoing) >= self.slots:
                return False
        data = incoming.pop(0) if incoming is not None else []
        source = (rank, step.source_buffer, step.source, step.size)
        destination = (rank, step.destination_buffer, step.destination)
        match step.type.value:
            case "s":
                data = self._read(*source)
            case "r" | "rcs":
                self._write(*destination, data)
            case "rrs":
                data = add(data, self._read(*source))
            case "rrc" | "rrcs":
                data = add(data, self._read(*source))
                self._write(*destination, data)
            case "cpy":
                self._write(*destination, self._read(*source))
            case "re":
                self._write(*destination, add(self._read(*destination, step.size), self._read(*source)))
        if outgoing is not None:
            outgoing.append(data)
        if step.awaited:
            self.published[rank, number] = at
        self.at[rank, number] = at + 1
        return True


FUSED = (StepType.RECEIVE_COPY_SEND, StepType.RECEIVE_REDUCE_SEND, StepType.RECEIVE_REDUCE_COPY_SEND)


def add(one: list[Chunk | None], other: list[Chunk | None]) -> list[Chunk]:
    """Chunk by chunk; an empty chunk cannot be added."""
    assert len(one) == len(other)
    assert None not in one
    assert None not in other
    return [left + right for left, right in zip(one, other, strict=True)]


def runs_right(schedule: Schedule, collective: Collective, slots: int, rng: random.Random) -> bool:
    """Check whether one run ends, and with the right outputs."""
    try:
        return Machine(schedule, collective, slots, rng).run().outputs_are_right()
    except (Stuck, AssertionError, TypeError):
        return False
