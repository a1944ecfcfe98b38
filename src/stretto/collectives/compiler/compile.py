# SPDX-License-Identifier: Apache-2.0
"""Compiles a traced program to a schedule: runs all passes, and emits the thread blocks' steps."""

from itertools import pairwise

from stretto.collectives.collective import Buffer
from stretto.collectives.compiler.channels import assign_channels
from stretto.collectives.compiler.chunk_dag import find_dependencies, split_into_instances
from stretto.collectives.compiler.instructions import InstructionDag, fuse, generate_instructions
from stretto.collectives.compiler.order import find_order
from stretto.collectives.compiler.placement_errors import CompileError
from stretto.collectives.compiler.thread_blocks import ThreadBlockBuilder, place
from stretto.collectives.language import Chunks, Program
from stretto.collectives.limits import merges
from stretto.collectives.schedule import PROTOCOLS, RankProgram, Schedule, Step, StepType, ThreadBlock


def compile_program(
    program: Program,
    *,
    name: str,
    protocol: str = "Simple",
    instances: int = 1,
    slots: int | None = None,
    min_bytes: int = 0,
    max_bytes: int = 0,
    fusion: bool = True,
) -> Schedule:
    """Compile a traced program to a schedule that is free from deadlock with `slots` FIFO slots a connection.

    instances: the number of copies of the program that share the data; slots: None for the protocol's; min_bytes,
    max_bytes: the sizes that the schedule is meant for (0: any). Raises ValueError for an unknown protocol or a count
    out of bounds, CompileError for a program that cannot be compiled.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"the protocols are {', '.join(PROTOCOLS)}, not {protocol!r}")
    slots = PROTOCOLS[protocol] if slots is None else slots
    if slots < 1:
        raise ValueError(f"a connection has at least 1 FIFO slot, not {slots}")
    if min_bytes < 0 or max_bytes < 0 or 0 < max_bytes < min_bytes:
        raise ValueError(f"sizes from {min_bytes} to {max_bytes} bytes are no range")
    plain = generate_instructions(find_dependencies(split_into_instances(program, instances)))
    dag, channels, sequence = _fuse_and_order(plain, slots, fusion)
    ranks = place(dag, channels, sequence)
    collective = plain.chunk_dag.parts.collective
    scratch = plain.chunk_dag.parts.scratch_chunks
    return Schedule(
        name,
        collective,
        protocol,
        tuple(
            RankProgram(collective.input_chunks, collective.output_chunks, scratch[rank], _emit(dag, blocks))
            for rank, blocks in enumerate(ranks)
        ),
        in_place=collective.in_place,
        out_of_place=not collective.in_place,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
    )


def _fuse_and_order(
    plain: InstructionDag, slots: int, fusion: bool
) -> tuple[InstructionDag, dict[int, int], tuple[int, ...]]:
    """Fuse instructions, and find channels and an order for them; instructions that prevent either stay unfused."""
    split: frozenset[int] = frozenset() if fusion else frozenset(plain.sender)
    while True:
        dag = fuse(plain, split)
        channels = assign_channels(dag)
        if channels.split:
            split |= channels.split
            continue
        order = find_order(dag, channels.of, slots)
        if order.sequence or not dag.instructions:
            return dag, channels.of, order.sequence
        if not order.split:
            # The program's own order, each receive right after its send: one slot is enough, as nothing is fused.
            return dag, channels.of, tuple(range(len(dag.instructions)))
        split |= order.split


def _emit(dag: InstructionDag, blocks: list[ThreadBlockBuilder]) -> tuple[ThreadBlock, ...]:
    """Emit a rank's thread blocks: a step's waits beyond the first become nops before it."""
    ranked = sorted(range(len(blocks)), key=lambda number: _order_of(blocks[number]))
    position = {number: at for at, number in enumerate(ranked)}
    step_of = []
    awaited: set[tuple[int, int]] = set()
    for block in blocks:
        steps, at = [], 0
        for placed in block.instructions:
            at += max(0, len(placed.waits_for) - 1)
            steps.append(at)
            at += 1
            awaited.update(placed.waits_for)
        step_of.append(steps)
    emitted = []
    for number in ranked:
        block = blocks[number]
        result: list[Step] = []
        for at, placed in enumerate(block.instructions):
            waits = [(position[other], step_of[other][ended]) for other, ended in placed.waits_for]
            result.extend(Step(StepType.NOP, waits_for=wait) for wait in waits[:-1])
            instruction = dag.instructions[placed.instruction]
            source = instruction.source or _NOWHERE_IN
            destination = instruction.destination or _NOWHERE_OUT
            result.append(
                Step(
                    instruction.type,
                    source.buffer,
                    source.start,
                    destination.buffer,
                    destination.start,
                    instruction.size,
                    waits[-1] if waits else None,
                    (number, at) in awaited,
                )
            )
        for at, (one, following) in enumerate(pairwise(result)):
            # RCCL would merge both into one reduction of the second's size. It does not if the first is awaited.
            if merges(one, following) and one.size != following.size:
                result[at] = one._replace(awaited=True)
        emitted.append(ThreadBlock(block.send_peer, block.receive_peer, block.channel, tuple(result)))
    return tuple(emitted)


_NOWHERE_IN = Chunks(0, Buffer.IN, -1, 0)
_NOWHERE_OUT = Chunks(0, Buffer.OUT, -1, 0)


def _order_of(block: ThreadBlockBuilder) -> tuple[int, int, int]:
    """The sort key of thread blocks: those of one peer come together, as runtimes want those of one link."""
    none = -1
    return (
        none if block.send_peer is None else block.send_peer,
        none if block.receive_peer is None else block.receive_peer,
        block.channel,
    )


__all__ = ["CompileError", "compile_program"]
