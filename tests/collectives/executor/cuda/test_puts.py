# SPDX-License-Identifier: Apache-2.0
"""The interpreter's source on ranks of several nodes: messages between nodes are put, with the host executor's bits."""

import os
import random
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.executor.cuda.emulated import COMPILER, EmulatedWorkspace
from tests.collectives.executor.simulation import simulate
from tests.collectives.joint.random_algorithms import COLLECTIVES, random_all_to_all, random_schedule
from tests.collectives.random_programs import random_program

from stretto.collectives import compile_program, verify
from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.puts import lay_out_puts
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.executor.cuda.workspace import lay_out
from stretto.memory import PeerError
from stretto.memory.host import HostMemory

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
SEED = random.randrange(2**31)


def make_workspace(nodes, folder):
    """This process's rank; the memory of other nodes' ranks is not among its peers'."""
    rank, world = dist.get_rank(), dist.get_world_size()
    regions, half = lay_out(dict.fromkeys(("LL", "LL128", "Simple"), 1 << 18))
    memory = HostMemory.allocate(2 * half, 0, None, 60.0)
    near = [memory.buffer(peer) if nodes[peer] == nodes[rank] else None for peer in range(world)]
    workspace = EmulatedWorkspace(rank, near, regions, half, folder)
    workspace.nodes, workspace.group, workspace.timeout = nodes, dist.new_group(), 60.0
    return workspace


def draw_schedule(rng, world, per_node):
    """A random program, a random tree of a collective, an all-to-all by random ways, or one made for nodes."""
    kind = rng.choice(["program", "tree", "ways", "levels"])
    if kind == "levels":
        name = rng.choice(["hierarchical-all-reduce", "hierarchical-all-gather", "two-step-all-to-all", "all-to-next"])
        return ALGORITHMS[name].compile(nodes=world // per_node, gpus=per_node, instances=rng.choice([1, 2]))
    while kind == "program" and world < 6:
        program = random_program(rng)
        if program.collective.ranks == world:
            return compile_program(program, name="random", instances=rng.choice([1, 2]))
    return (
        random_all_to_all(rng, world, 1)
        if kind == "ways"
        else random_schedule(rng, rng.choice(sorted(COLLECTIVES)), world, 2)
    )


def run_schedules(per_node, variables, variant, count, seed, folder):
    """Random verified schedules, each called with several sizes; the calls whose bits differ from the simulation's."""
    rng, rank, world = random.Random(seed), dist.get_rank(), dist.get_world_size()
    wrong, put = [], 0
    dtype, nodes = getattr(torch, variant.dtype), tuple(peer // per_node for peer in range(world))
    with mock.patch.dict(os.environ, variables):
        workspace = make_workspace(nodes, folder)
        for number in range(count):
            schedule = draw_schedule(rng, world, per_node)
            collective = schedule.collective
            assert verify(schedule).ok
            kernel = InterpretedSchedule(schedule, workspace, variant, in_place=schedule.in_place, tile_bytes=480)
            put += len(kernel._puts.slots)
            for elements in (1, rng.choice([7, 64]), rng.choice([300, 500])):
                size = elements * collective.input_chunks
                inputs = [
                    torch.rand(size, generator=torch.Generator().manual_seed(peer)).to(dtype) for peer in range(world)
                ]
                right = simulate(schedule, inputs)[rank]
                if schedule.in_place:
                    output = right.new_zeros(elements * collective.chunks_per_loop)
                    begin, end = (elements * start for start in collective.starts(rank))
                    output[begin : begin + size] = inputs[rank]
                    kernel(output)
                    output = output[end : end + right.numel()]
                else:
                    output = torch.empty_like(right)
                    kernel(inputs[rank], output)
                workspace.check()
                known = [at for at in range(collective.output_chunks) if collective.expected(rank, at) is not None]
                parts = [one.view(collective.output_chunks, -1)[known] for one in (output, right)]
                if not torch.equal(*parts):
                    wrong.append((number, schedule.name, elements))
            dist.barrier()
    return wrong, put > 0


@pytest.mark.parametrize(
    ("world", "per_node", "variables", "variant", "count"),
    [
        (4, 2, {"STRETTO_NODES": "2x2"}, Variant("float32", "sum", "LL"), 2),
        pytest.param(4, 2, {}, Variant("bfloat16", "sum", "Simple"), 6, marks=pytest.mark.long),
        pytest.param(
            *(8, 4, {"STRETTO_NODES": "2x4", "STRETTO_PROXY": "python"}, Variant("float32", "sum", "LL128"), 8),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *(8, 2, {"STRETTO_NODES": "4x2"}, Variant("float32", "sum", "LL"), 8), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            *(3, 1, {"STRETTO_NODES": "3x1"}, Variant("int8", "sum", "LL128"), 60), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_random_verified_schedules_between_nodes_have_the_host_executors_bits(
    ranks, world, per_node, variables, variant, count, folder
):
    """By sockets between declared nodes; without them by the transport for GPUs of one machine."""
    print(f"seed {SEED}")
    assert ranks(world).run(run_schedules, per_node, variables, variant, count, SEED, folder) == [([], True)] * world


def lose_a_rank(folder):
    """Rank 0 makes one call, with more messages than a FIFO holds, and no second one; what the other one's raises."""
    with mock.patch.dict(os.environ, {"STRETTO_NODES": "2x1"}):
        workspace = make_workspace((0, 1), folder)
        schedule = ALGORITHMS["ring-all-gather"].compile(ranks=2)
        kernel = InterpretedSchedule(schedule, workspace, Variant("int32", "sum", "LL"), in_place=True, tile_bytes=480)
    right = torch.arange(2 * 120 * 600, dtype=torch.int32)
    given = torch.zeros_like(right)
    mine = slice(dist.get_rank() * 72_000, (dist.get_rank() + 1) * 72_000)
    given[mine] = right[mine]
    kernel(given)
    assert torch.equal(given, right)
    dist.barrier()
    message = ""
    kernel._function.set("limit", 500_000_000)  # nanoseconds, of a wait
    if dist.get_rank():
        kernel(torch.zeros(200, dtype=torch.int32))
        with pytest.raises(PeerError) as lost:
            workspace.check()
        message = str(lost.value)
    dist.barrier()
    return message


@pytest.mark.long
def test_a_wait_for_a_message_from_another_node_names_rank_node_and_interface(ranks, folder):
    assert re.fullmatch(
        r"ring-all-gather, call 2, thread block \d waited in vain for rank 0 of 2 \(node 0, NIC lo\)'s message "
        r"\(step \d, r\w*, channel 0\), 0.5 s",
        ranks(2).run(lose_a_rank, folder)[1],
    )


def test_connections_between_nodes_have_the_slots_that_were_verified_and_share_no_byte():
    schedule = ALGORITHMS["hierarchical-all-reduce"].compile(nodes=2, gpus=2, instances=2)
    slots, num_bytes, signals = lay_out_puts(schedule, (0, 0, 1, 1), 480)
    assert {(sender // 2, receiver // 2) for sender, receiver, _ in slots} == {(0, 1), (1, 0)}
    for rank in range(4):
        used = [(one.start, one.stride) for (_, receiver, _), one in slots.items() if receiver == rank]
        used += [(one.source, one.stride) for (sender, _, _), one in slots.items() if sender == rank]
        ends = [start + schedule.slots * stride for start, stride in sorted(used)]
        assert all(end <= start for end, (start, _) in zip(ends, sorted(used)[1:], strict=False))
        assert ends[-1] <= num_bytes
        pairs = [(key[:2], one.signal) for key, one in slots.items() if key[1] == rank]
        assert len(set(pairs)) == len(pairs)
    assert all(one.signal + 1 < signals for one in slots.values())


def test_fused_kernels_are_refused_between_nodes(folder):
    schedule = ALGORITHMS["ring-all-gather"].compile(ranks=2)
    workspace = EmulatedWorkspace(0, [torch.zeros(1), None], {}, 0, folder)
    workspace.nodes = (0, 1)
    with pytest.raises(ValueError, match="the group's ranks are on 2 nodes, between which the interpreter alone puts"):
        FusedScheduleKernel(schedule, workspace, Variant("int32", "sum", "LL"), in_place=True)
