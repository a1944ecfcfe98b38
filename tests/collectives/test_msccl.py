# SPDX-License-Identifier: Apache-2.0
"""Scripts in msccl-tools' API, run unmodified and compiled here."""

import importlib.util
import logging
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
from tests.collectives.machine import runs_right

from stretto.collectives.msccl import ImportedScript, ScriptError, import_msccl
from stretto.collectives.schedule import Schedule, StepType
from stretto.collectives.verifier import verify

HEAD = """\
from msccl.language import *
from msccl.language.collectives import *
from msccl.topologies import *
"""
Importer = Callable[..., ImportedScript]

RING = """
    import argparse

    def ring_sum(ranks, instances, protocol):
        with MSCCLProgram("ring", ring(ranks), AllReduce(ranks, ranks, True), instances, protocol=protocol):
            for first in range(ranks):
                total = chunk(first, Buffer.input, first)
                for hop in range(1, ranks):
                    total = chunk((first + hop) % ranks, Buffer.input, first).reduce(total)
                for hop in range(ranks - 1):
                    total = total.copy((first + hop) % ranks, Buffer.output, first)
            assert Check()

    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--protocol", default="Simple")
    given = parser.parse_args()
    ring_sum(given.ranks, given.instances, given.protocol)
"""

GIVE_AWAY = """
    class GiveAway(Collective):
        '''Rank 0's chunks end on all other ranks, the last first.'''

        def init_buffers(self):
            held = [Chunk(0, index, -1, self.chunk_factor - 1 - index) for index in range(self.chunk_factor)]
            nothing = [None] * self.chunk_factor
            return [
                {Buffer.input: held if rank == 0 else list(nothing), Buffer.output: list(nothing)}
                for rank in range(self.num_ranks)
            ]

        def check(self, prog):
            wanted = [Chunk(0, index) for index in reversed(range(self.chunk_factor))]
            for rank in range(1, self.num_ranks):
                if prog.buffers[rank][Buffer.output] != wanted:
                    print("rank", rank, "has it wrong")
                    return False
            return True
"""


@pytest.fixture
def imported(tmp_path: Path) -> Importer:
    """`imported(text, *args)` writes a script with the usual imports and runs it."""

    def run(text: str, *args: str) -> ImportedScript:
        script = tmp_path / "script.py"
        script.write_text(HEAD + dedent(text))
        return import_msccl(str(script), args)

    return run


@pytest.fixture
def refused(imported: Importer) -> Callable[..., str]:
    """`refused(text, *args)` is the one line with which a script is refused, after the script's path."""

    def run(text: str, *args: str) -> str:
        with pytest.raises(ScriptError) as raised:
            imported(text, *args)
        path, _, message = str(raised.value).partition("script.py")
        assert Path(path).is_absolute()
        assert "\n" not in message
        return message

    return run


def only(script: ImportedScript) -> Schedule:
    """Its only program's schedule, which is right."""
    (program,) = script.programs
    assert_right(program.schedule)
    return program.schedule


def assert_right(schedule: Schedule) -> None:
    """It verifies, and runs right on the machine of symbols in several orders of events."""
    verification = verify(schedule)
    assert verification.ok, verification.errors
    for seed in range(3):
        assert runs_right(schedule, schedule.collective, schedule.slots, random.Random(seed))


def line_of(text: str, statement: str) -> int:
    lines = (HEAD + dedent(text)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if statement in line)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_ring_all_reduce_with_arguments(imported: Importer, instances: int) -> None:
    schedule = only(imported(RING, "5", "--instances", str(instances), "--protocol", "LL"))
    assert (schedule.name, schedule.protocol, schedule.in_place) == ("ring", "LL", True)
    assert schedule.collective.name == "allreduce"
    assert schedule.collective.input_chunks == 5 * instances
    types = {step.type for rank in schedule.ranks for block in rank.thread_blocks for step in block.steps}
    assert StepType.RECEIVE_REDUCE_COPY_SEND in types


def test_xml_goes_to_what_the_script_printed(imported: Importer, capsys: pytest.CaptureFixture[str]) -> None:
    script = imported("""
        with MSCCLProgram("swap", fully_connected(2), AllGather(2, 1, True), 1):
            for rank in range(2):
                chunk(rank, Buffer.input, 0).copy(1 - rank, Buffer.output, rank)
            print("before")
            XML()
    """)
    only(script)
    assert script.printed.startswith("before\n<algo ")
    assert script.printed.rstrip().endswith("</algo>")
    assert capsys.readouterr().out == ""


def test_an_all_gather_in_place_reads_its_input_inside_the_output(imported: Importer) -> None:
    schedule = only(
        imported("""
            with MSCCLProgram("gather", fully_connected(3), AllGather(3, 2, inplace=True), 1):
                for rank in range(3):
                    c = chunk(rank, Buffer.input, 0, 2)
                    assert (c.rank, c.buffer, c.index, c.size) == (rank, Buffer.output, 2 * rank, 2)
                    c.copy(rank, Buffer.output, 2 * rank)
                    for other in range(3):
                        if other != rank:
                            c.copy(other, Buffer.output, 2 * rank)
                assert Check()
        """)
    )
    assert schedule.in_place
    assert schedule.steps == 12


def test_chunks_before_the_own_one_of_an_all_gather_in_place_have_negative_indices(imported: Importer) -> None:
    """As in allgather_a100_pcie_hierarchical.py of msccl-tools: rows of two ranks, then columns."""
    schedule = only(
        imported("""
            with MSCCLProgram("rows", fully_connected(4), AllGather(4, 1, inplace=True), 1):
                for rank in range(4):
                    chunk(rank, Buffer.input, 0).copy(rank ^ 1, Buffer.input, 0)
                for rank in range(4):
                    for index in range(-(rank % 2), 2 - rank % 2):
                        c = chunk(rank, Buffer.input, index)
                        assert c.index == rank + index
                        assert c.copy(rank ^ 2, Buffer.input, index).index == rank + index
        """)
    )
    assert schedule.in_place


def test_an_all_gather_out_of_place_needs_its_own_copy(imported: Importer) -> None:
    text = """
        with MSCCLProgram("gather", fully_connected(2), AllGather(2, 1, inplace=False), 1):
            for rank in range(2):
                for other in range(2):
                    chunk(rank, Buffer.input, 0).copy(other, Buffer.output, rank)
    """
    schedule = only(imported(text))
    assert schedule.out_of_place
    assert not schedule.in_place


def test_an_all_to_all_in_two_steps_through_scratch_buffers_of_any_name(imported: Importer) -> None:
    schedule = only(
        imported("""
            nodes, gpus = 2, 2
            ranks = nodes * gpus
            with MSCCLProgram("two-step", fully_connected(ranks), AllToAll(ranks, 1, False), 1):
                for source in range(ranks):
                    for target in range(ranks):
                        c = chunk(source, Buffer.input, target)
                        assert (c.get_origin_rank(), c.get_origin_index()) == (source, target)
                        if source // gpus == target // gpus:
                            c.copy(c.get_dst_rank(), Buffer.output, c.get_dst_index())
                        else:
                            # To the GPU of this node that has the target's place, behind what lies there.
                            gate = source // gpus * gpus + target % gpus
                            position = source % gpus
                            assert c.copy(gate, ("to", target // gpus)).index == position
                for gate in range(ranks):
                    other = 1 - gate // gpus
                    c = chunk(gate, ("to", other), 0, gpus)
                    c = c.copy(other * gpus + gate % gpus, "arrived")
                    for one in c.split(gpus):
                        one.copy(one.rank, Buffer.output, one.get_origin_rank())
                assert Check()
        """)
    )
    assert {rank.scratch_chunks for rank in schedule.ranks} == {4}


@pytest.mark.parametrize("in_place", [True, False])
def test_a_reduce_scatter(imported: Importer, in_place: bool) -> None:
    schedule = only(
        imported(
            """
            ranks, in_place = 4, sys.argv[1] == "True"
            with MSCCLProgram("scatter", fully_connected(ranks), ReduceScatter(ranks, 1, in_place), 1):
                for owner in range(ranks):
                    c = chunk((owner + 1) % ranks, Buffer.input, owner)
                    for hop in range(2, ranks + 1):
                        c = chunk((owner + hop) % ranks, Buffer.input, owner).reduce(c)
                    c.copy(owner, Buffer.output, 0)
                assert Check()
            """,
            str(in_place),
        )
    )
    assert (schedule.in_place, schedule.collective.name) == (in_place, "reducescatter")


def test_group_includes_chunks_in_between_and_split_divides_them(imported: Importer) -> None:
    text = """
        with MSCCLProgram("halves", line(2), AllReduce(2, 4, True), 2):
            first, last = chunk(0, Buffer.input, 0), chunk(0, Buffer.input, 3)
            everything = last.group(first)
            assert (everything.index, everything.size) == (0, 4)
            low, high = everything.split(2)
            there = chunk(1, Buffer.input, 0, 2).reduce(low)
            there.copy(0)
            chunk(0, Buffer.input, 2, 2).reduce(chunk(1, Buffer.input, 2, 2)).copy(1)
            assert low == chunk(0, Buffer.output, 0, 2)
            assert Check()
    """
    assert only(imported(text)).channels == 2


def test_a_reference_reads_what_its_place_holds_now(imported: Importer) -> None:
    # Rank 0's reference is used after a sum was written there: it must send the sum.
    text = """
        with MSCCLProgram("stale", fully_connected(2), AllReduce(2, 1, True), 1):
            old = chunk(0, Buffer.input, 0)
            chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))
            old.copy(1, Buffer.input, 0)
            assert Check()
    """
    only(imported(text))


def test_a_place_that_holds_nothing_gives_none(imported: Importer) -> None:
    text = """
        with MSCCLProgram("none", fully_connected(2), AllGather(2, 1, True), 1):
            assert chunk(0, Buffer.output, 1) is None
            for rank in range(2):
                chunk(rank, Buffer.input, 0).copy(1 - rank, Buffer.output, rank)
    """
    only(imported(text))


def test_batched_instances_of_an_all_reduce_are_the_same_function(imported: Importer) -> None:
    text = """
        with MSCCLProgram("batched", fully_connected(2), AllReduce(2, 2, True), 2, interleaved_replication=False):
            chunk(1, Buffer.input, 0, 2).reduce(chunk(0, Buffer.input, 0, 2)).copy(0, Buffer.input, 0)
    """
    assert only(imported(text)).channels == 2


def test_routines_run_among_some_of_the_ranks(imported: Importer) -> None:
    script = imported("""
        from msccl.language.routines import *

        with MSCCLProgram("gather", fully_connected(4), AllGather(4, 1, True), 1):
            allgather_ring_inplace(4)
            assert Check()
        with MSCCLProgram("sum", fully_connected(4), AllReduce(4, 4, True), 1):
            for group in (0, 2):
                allreduce_ring_inplace(2, group, 0)
                allreduce_ring_inplace(2, group, 2, ch=1)
            for index in range(4):
                for low in range(2):
                    c = chunk(low + 2, Buffer.input, index).reduce(chunk(low, Buffer.input, index))
                    c.copy(low, Buffer.input, index)
            assert Check()
    """)
    assert [program.schedule.name for program in script.programs] == ["gather", "sum"]
    for program in script.programs:
        assert_right(program.schedule)


# ------------------------------------------------------------------------------------------ thread blocks by number

PAIRS = """
    ranks = 4
    collective = AllReduce(ranks, ranks, True)
    with MSCCLProgram("pairs", fully_connected(ranks), collective, 2, threadblock_policy=ThreadblockPolicy.manual):
        for source in range(ranks):
            for owner in range(ranks):
                if source != owner:
                    chunk(source, Buffer.input, owner).copy(owner, "heap", sendtb=owner, recvtb=source)
        for owner in range(ranks):
            for index in range(ranks - 1):
                chunk(owner, Buffer.input, owner).reduce(chunk(owner, "heap", index), sendtb=owner)
        for owner in range(ranks):
            for target in range(ranks):
                if owner != target:
                    chunk(owner, Buffer.input, owner).copy(target, sendtb=target, recvtb=owner)
        assert Check()
"""


def test_thread_blocks_are_those_that_the_program_asks_for(imported: Importer) -> None:
    schedule = only(imported(PAIRS))
    for rank, program in enumerate(schedule.ranks):
        # Of both instances: one for each peer, and the rank's own number for its sums.
        peers = sorted(
            (block.send_peer, block.receive_peer)
            for block in program.thread_blocks
            if block.steps and block.send_peer is not None
        )
        assert peers == sorted((peer, peer) for peer in range(4) if peer != rank for _ in range(2))
        local = [block for block in program.thread_blocks if block.send_peer is None]
        assert len(local) == 2
        assert all(step.type in (StepType.REDUCE, StepType.NOP) for block in local for step in block.steps)
    assert schedule.channels == 2


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ("copy(2, Buffer.output, 1, sendtb=0, recvtb=5)", "block 0 on rank 0 would need two ranks to send to, 1 and 2"),
        ("copy(1, Buffer.output, 1, sendtb=0, recvtb=0, ch=1)", "thread block 0 on rank 0 would need channels 0 and 1"),
        ("copy(1, Buffer.output, 1, sendtb=1, recvtb=0)", "block 1 on rank 0 sends to rank 1 over a channel on which"),
        ("copy(1, Buffer.output, 1, sendtb=0, recvtb=1)", "block 1 on rank 1 receives from rank 0 over a channel on"),
    ],
)  # fmt: skip
def test_thread_blocks_that_cannot_be_name_both_lines(refused: Callable[..., str], second: str, what: str) -> None:
    text = f"""
        policy = ThreadblockPolicy.manual
        with MSCCLProgram("odd", fully_connected(3), AllGather(3, 2, True), 1, "Simple", policy):
            chunk(0, Buffer.input, 0).copy(1, Buffer.output, 0, sendtb=0, recvtb=0)
            chunk(0, Buffer.input, 1).{second}
            for source in range(3):
                for target in range(3):
                    chunk(source, Buffer.input, 0, 2).copy(target, Buffer.output, 2 * source)
    """
    message = refused(text)
    assert what in message
    for statement in ("chunk(0, Buffer.input, 0)", "chunk(0, Buffer.input, 1)"):
        assert f"script.py:{line_of(text, statement)}" in "script.py" + message


def test_the_automatic_policy_looks_at_no_thread_blocks(imported: Importer) -> None:
    text = """
        with MSCCLProgram("auto", fully_connected(3), AllToAll(3, 1, False), 1):
            for source in range(3):
                for target in range(3):
                    chunk(source, Buffer.input, target).copy(target, Buffer.output, source, sendtb=0, recvtb=0)
    """
    only(imported(text))


# ------------------------------------------------------------------------------------------------- own collectives


def test_an_own_chunk_without_an_end_has_none(imported: Importer) -> None:
    imported(
        GIVE_AWAY.replace(", -1, self.chunk_factor - 1 - index)", ")")
        + """
    with MSCCLProgram("give", line(3), GiveAway(3, 2, False), 1):
        for index in range(2):
            c = chunk(0, Buffer.input, index)
            assert (c.get_dst_rank(), c.get_dst_index()) == (-1, -1)
            c.copy(1, Buffer.output, 1 - index).copy(2, Buffer.output, 1 - index)
"""
    )


def test_an_own_collective_must_end_as_its_trace_ended(imported: Importer) -> None:
    schedule = only(
        imported(
            GIVE_AWAY
            + """
    with MSCCLProgram("give", line(3), GiveAway(3, 2, False), 2):
        for index in range(2):
            c = chunk(0, Buffer.input, index)
            c.copy(1, "stop").copy(2, Buffer.output, c.get_dst_index())
            c.copy(1, Buffer.output, 1 - index)
        assert Check()
"""
        )
    )
    collective = schedule.collective
    assert (collective.name, collective.in_place, collective.input_chunks) == ("custom", False, 4)
    # Chunks 0 and 1 are cut in two: the second chunk's parts come first.
    assert [collective.expected(2, index) for index in range(4)] == [((0, 2),), ((0, 3),), ((0, 0),), ((0, 1),)]
    assert collective.expected(0, 0) is None
    assert not collective.initialized(1, 0)


def test_an_own_collective_whose_check_fails_is_refused(refused: Callable[..., str]) -> None:
    text = (
        GIVE_AWAY
        + """
    with MSCCLProgram("give", line(2), GiveAway(2, 2, False), 1):
        chunk(0, Buffer.input, 0, 2).copy(1, Buffer.output, 0)
        assert Check() is False
"""
    )
    message = refused(text)
    assert message.startswith(f":{line_of(text, 'with MSCCLProgram')}: give: ")
    assert message.endswith("check fails: rank 1 has it wrong")


def test_an_own_collective_in_place_keeps_its_results_in_the_input(imported: Importer) -> None:
    schedule = only(
        imported("""
            class SumOnLast(Collective):
                def init_buffers(self):
                    return [
                        {Buffer.input: [Chunk(rank, 0)], Buffer.output: [None]} for rank in range(self.num_ranks)
                    ]

                def check(self, prog):
                    wanted = ReduceChunk(-1, [])
                    for rank in range(self.num_ranks):
                        wanted = wanted.reduce(-1, Chunk(rank, 0))
                    return prog.buffers[-1][Buffer.input][0] == wanted

            with MSCCLProgram("sum", line(3), SumOnLast(3, 1, inplace=True), 1):
                c = chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0))
                chunk(2, Buffer.input, 0).reduce(c)
        """)
    )
    assert schedule.in_place
    assert schedule.collective.expected(2, 0) == ((0, 0), (1, 0), (2, 0))


def test_an_own_collective_that_claims_in_place_and_is_not(imported: Importer) -> None:
    script = imported(
        GIVE_AWAY
        + """
    with MSCCLProgram("give", line(2), GiveAway(2, 1, True), 1):
        chunk(0, Buffer.input, 0).copy(1, Buffer.output, 0)
"""
    )
    assert only(script).out_of_place
    (note,) = script.programs[0].notes
    assert "imported out of place" in note


def test_a_check_without_a_condition_is_noted(imported: Importer) -> None:
    script = imported("""
        class Quiet(AllReduce):
            def check(self, prog):
                pass

        with MSCCLProgram("quiet", line(2), Quiet(2, 1, True), 1):
            chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0))
    """)
    assert only(script).collective.expected(0, 0) == ((0, 0),)
    assert "neither yes nor no" in script.programs[0].notes[0]


def test_a_subclass_that_changes_no_condition_is_the_collective(imported: Importer) -> None:
    text = """
        class Named(AllReduce):
            pass

        with MSCCLProgram("named", line(2), Named(2, 1, True), 1):
            chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0)).copy(0)
    """
    assert only(imported(text)).collective.replicated


# ------------------------------------------------------------------------------------------------------- topologies


NVIDIA_SMI = """\
\tGPU0\tGPU1\tGPU2
GPU0\t X \tNV2\tSYS
GPU1\tNV2\t X \tPIX
GPU2\tSYS\tPIX\t X
"""


@pytest.mark.parametrize(
    ("topology", "present", "missing"),
    [
        ("ring(4)", [(3, 0), (0, 3)], [(0, 2), (1, 1)]),
        ("line(4)", [(0, 1), (1, 0)], [(3, 0)]),
        ("star(4)", [(0, 3), (3, 0)], [(1, 2)]),
        ("hub_and_spoke(3)", [(0, 2)], [(2, 2)]),
        ("dgx1()", [(0, 4), (2, 6), (1, 5)], [(0, 5), (3, 4)]),
        ("dgx_a100()", [(0, 7)], [(7, 7)]),
        ("amd4()", [(1, 3)], [(0, 3)]),
        ("amd8()", [(0, 7)], [(1, 1)]),
        ("distributed_fully_connected(line(3), 2, 1)", [(0, 5), (4, 5)], [(3, 5)]),
        ("distributed_hub_and_spoke(ring(4), 2, 1)", [(0, 5)], [(4, 6)]),
        ("reverse_topology(Topology('one-way', [[0, 0], [1, 0]]))", [(1, 0)], [(0, 1)]),
        ("binarize_topology(dgx1())", [(0, 1)], [(0, 6)]),
        (f"nvlink_only({NVIDIA_SMI!r})", [(0, 1)], [(1, 2)]),
    ],
)
def test_a_topology_has_these_links(
    imported: Importer, topology: str, present: list[tuple[int, int]], missing: list[tuple[int, int]]
) -> None:
    with pytest.raises(ScriptError, match="makes no program"):
        imported(f"""
            from msccl.topologies.distributed import *
            topology = {topology}
            assert len(topology.nodes()) == topology.num_nodes()
            assert all(topology.link(*pair) for pair in {present})
            assert not any(topology.link(*pair) for pair in {missing})
            assert all(dst in topology.destinations(src) and src in topology.sources(dst) for src, dst in {present})
        """)


def test_a_copy_needs_a_link(refused: Callable[..., str]) -> None:
    text = """
        with MSCCLProgram("far", line(3), AllGather(3, 1, True), 1):
            chunk(0, Buffer.input, 0).copy(2, Buffer.output, 0)
    """
    assert refused(text) == f":{line_of(text, 'copy(2')}: Line(n=3) has no link from rank 0 to rank 2"


# ----------------------------------------------------------------------------------------------------- wrong scripts


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("chunk(0, Buffer.output, 0).copy(1)", "(chunk() gives None for a place that holds nothing)"),
        ("chunk(0, 'nowhere', 0)", "rank 0's scratch 'nowhere'[0] holds nothing yet"),
        ("c = chunk(0, Buffer.input, 0); c.copy(1, 'x', 0).group(c.copy(1, 'x', 2)).copy(0)", "'x'[1] holds nothing"),
        ("chunk(5, Buffer.input, 0)", "there is no rank 5: there are 0 to 1"),
        ("chunk(0.5, Buffer.input, 0)", "a rank is a whole number, not 0.5"),
        ("chunk(0, Buffer.input, 1, 2)", "rank 0's input[1..2] is out of bounds: there are 2 chunks"),
        ("chunk(0, Buffer.input, -1)", "chunks are counted from 0"),
        ("chunk(0, Buffer.input, 0).copy(1, Buffer.output)", "needs an index"),
        ("chunk(0, Buffer.input, 0).copy(1, Buffer.output, 4)", "rank 1's output[4] is out of bounds"),
        ("chunk(0, Buffer.input, 0).copy(1, 'x', 2**26)", "'x'[67108864] is out of bounds: scratch has up to 1048576"),
        ("chunk(0, Buffer.input, 0).reduce(1)", "reduce() takes what chunk() returns, not 1"),
        ("chunk(0, Buffer.input, 0, 2).reduce(chunk(1, Buffer.input, 0))", "differ in size"),
        ("chunk(0, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0))", "overlap"),
        ("chunk(0, Buffer.input, 0, 2).split(3)", "2 chunks cannot be split into 3 equal parts"),
        ("chunk(0, Buffer.input, 0).group(chunk(1, Buffer.input, 0))", "are not in one buffer"),
        ("chunk(0, Buffer.input, 0).put(1)", "put() is an operation of MSCCL++"),
        ("Json()", "MSCCL++"),
        ("collective.nothing", "AttributeError: 'AllGather' object has no attribute 'nothing'"),
        ("with MSCCLProgram('inner', line(2), collective, 1): pass", "the program 'outer' is still open"),
        ("MSCCLProgram('inner', line(2), collective, 1, 'TCP')", "the protocols are Simple, LL, LL128, not 'TCP'"),
        ("MSCCLProgram('inner', line(3), collective, 1)", "the topology has 3 nodes, the collective 2 ranks"),
        ("MSCCLProgram('inner', line(2), 'allgather', 1)", "'allgather' is no Collective"),
        ("import msccl.programs.allreduce_a100_ring", "msccl.programs is not supported"),
        ("import msccl; msccl.init('ndv4', 1)", "msccl.init is not supported"),
        ("sys.exit('no GPUs')", "the script exited: no GPUs"),
        ("sys.exit(3)", "the script exited: status 3"),
        ("raise KeyError('over\\nthere')", "KeyError: "),
    ],
)  # fmt: skip
def test_a_wrong_statement_is_named_by_its_line(refused: Callable[..., str], statement: str, what: str) -> None:
    text = f"""
        collective = AllGather(2, 2, False)
        with MSCCLProgram("outer", line(2), collective, 1):
            {statement}
    """
    message = refused(text)
    assert message.startswith(f":{line_of(text, statement)}: ")
    assert what in message


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1", ": the script makes no program"),
        ("MSCCLProgram('never entered', line(2), AllReduce(2, 1, True), 1)", ": the script makes no program"),
        ("MSCCLProgram('x', line(2), AllReduce(2, 1, True), 1).__enter__()", ":4: the program 'x' never leaves its"),
        ("chunk(0, Buffer.input, 0)", ":4: this is a statement of a program"),
        (
            "with MSCCLProgram('idle', line(2), AllReduce(2, 1, True), 1): pass",
            ":4: idle: its collective's check fails: rank 0's output chunk 0 holds (0, 0), not (0, 0) + (1, 0)",
        ),
        ("def broken(:", ":4: not Python: "),
        ("import argparse\nargparse.ArgumentParser().parse_args()", ":5: the script exited: status 2"),
    ],
)  # fmt: skip
def test_a_script_without_a_finished_program_is_refused(refused: Callable[..., str], text: str, what: str) -> None:
    assert refused(text, "--unknown").startswith(what)


@pytest.mark.parametrize("collective", ["AllGather(2, 1, True)", "AllToAll(2, 1, False)"])
def test_batched_instances_of_another_collective_are_refused(refused: Callable[..., str], collective: str) -> None:
    text = f"""
        with MSCCLProgram("batched", line(2), {collective}, 2, interleaved_replication=False):
            for rank in range(2):
                if "AllToAll" in "{collective}":
                    chunk(rank, Buffer.input, rank).copy(rank, Buffer.output, rank)
                    chunk(rank, Buffer.input, 1 - rank).copy(1 - rank, Buffer.output, rank)
                else:
                    chunk(rank, Buffer.input, 0).copy(1 - rank, Buffer.output, rank)
    """
    assert "interleaved_replication=False with 2 instances" in refused(text)


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"none\.py: cannot be read: No such file"):
        import_msccl(tmp_path / "none.py", [])


# -------------------------------------------------------------------------------------------------- nothing is left


def surroundings() -> list[object]:
    """Collect the state that a run must leave as it was."""
    return [
        dict(sys.modules),
        sys.argv,
        list(sys.argv),
        list(sys.path),
        sys.stdout,
        sys.stderr,
        os.getcwd(),
        dict(os.environ),
        list(logging.root.handlers),
        logging.root.level,
    ]


@pytest.mark.parametrize(
    ("end", "is_refused"),
    [("pass", False), ("sys.exit()", False), ("sys.exit(1)", True), ("raise OSError('gone')", True)],
)
def test_nothing_of_a_run_is_left(
    imported: Importer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, is_refused: bool
) -> None:
    imported(RING, "2")  # what a run imports for the first time and keeps, such as argparse, is here now
    for name in ("msccl", "msccl.language"):
        monkeypatch.setitem(sys.modules, name, ModuleType("another msccl"))
    (tmp_path / "beside.py").write_text("from msccl.language import chunk\n")
    text = f"""
        import logging, os
        import beside
        assert __name__ == "__main__" and sys.modules["__main__"].beside is beside
        assert sys.argv[1:] == ["left", "--right=1"]
        logging.basicConfig(level=logging.DEBUG)
        os.environ["LEFT"] = "behind"
        os.chdir("/")
        sys.argv.append("more")
        sys.path.append("/nowhere")
        with MSCCLProgram("sum", line(2), AllReduce(2, 1, True), 1):
            beside.chunk(1, Buffer.input, 0).reduce(chunk(0, Buffer.input, 0)).copy(0)
            print("sent")
            {end}
    """
    before = surroundings()
    if is_refused:
        with pytest.raises(ScriptError):
            imported(text, "left", "--right=1")
    else:
        assert imported(text, "left", "--right=1").printed == "sent\n"
    assert surroundings() == before


def test_msccl_is_not_there_after_a_run(imported: Importer) -> None:
    imported(RING, "2")
    assert not [name for name in sys.modules if name.partition(".")[0] == "msccl"]
    assert importlib.util.find_spec("msccl") is None
