# SPDX-License-Identifier: Apache-2.0
"""Two-level collectives on real processes: the results of plain torch.distributed, on every shape of nodes."""

import re
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.processes import LIMIT

from stretto.collectives.two_level import GroupTransport, Links, Message, Nodes, TwoLevelGroup
from stretto.collectives.two_level import group as group_module
from stretto.collectives.two_level.nodes import Host
from stretto.memory import PeerError

SHAPES = [(2, 2), (4, 2), (3, 2), (2, 3), (1, 4), (4, 1), (5, 1), (7, 1), (1, 1)]  # nodes, ranks a node
SIZES = [0, 1, 3, 64, 1001]
ALGORITHMS = ["auto", "ring", "recursive", "flat"]
MOVED = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64]
REDUCED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int64, torch.uint8]
TINY_PARTS = 48  # bytes: three elements of 16


def values(rank: int, elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, the sums of which every dtype has."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (elements,), generator=generator).to(dtype)


def check_all_gathers(shape: tuple[int, int], part_bytes: int, sizes: list[int], parts: int | None = None) -> int:
    two = TwoLevelGroup(ranks_per_node=shape[1], part_bytes=part_bytes, parts=parts)
    checked = 0
    for number, dtype in enumerate(MOVED):
        for size in sizes if number == 0 else sizes[-1:]:
            expected = torch.cat([values(rank, size, dtype) for rank in range(two.world)])
            for algorithm in ALGORITHMS:
                output = torch.full_like(expected, 1)
                assert two.all_gather(output, values(two.rank, size, dtype), algorithm=algorithm) is None
                assert torch.equal(output.view(torch.uint8), expected.view(torch.uint8)), (dtype, size, algorithm)
                checked += 1
    two.close()
    return checked


def expected_reduction(op: str, elements: int, dtype: torch.dtype, world: int) -> torch.Tensor:
    """The reduction as torch.distributed has it, or, for what gloo lacks, as one process has it."""
    stack = torch.stack([values(rank, elements, dtype) for rank in range(world)]).to(torch.float64)
    result = {"sum": stack.sum(0), "avg": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[op].to(dtype)
    if op != "avg" and dtype != torch.int16:
        reduced = values(dist.get_rank(), elements, dtype)
        dist.all_reduce(reduced, getattr(dist.ReduceOp, op.upper()))
        assert torch.equal(reduced, result)
    return result


def check_reductions(shape: tuple[int, int], part_bytes: int, sizes: list[int], parts: int | None = None) -> int:
    two = TwoLevelGroup(ranks_per_node=shape[1], part_bytes=part_bytes, parts=parts)
    checked = 0
    for number, dtype in enumerate(REDUCED):
        ops = {torch.float32: ["sum", "avg", "max", "min"], torch.bfloat16: ["avg", "max"]}.get(dtype, ["sum"])
        for op in ops:
            for size in sizes if number == 0 and op == "sum" else sizes[-1:]:
                expected = expected_reduction(op, size * two.world, dtype, two.world)
                for algorithm in ALGORITHMS:
                    input, output = values(two.rank, size * two.world, dtype), torch.empty(size, dtype=dtype)
                    two.reduce_scatter(output, input, op, algorithm=algorithm)
                    mine = expected.view(two.world, size)[two.rank]
                    torch.testing.assert_close(output, mine, msg=lambda m, c=(dtype, op, size, algorithm): f"{c}: {m}")
                    assert torch.equal(input, values(two.rank, size * two.world, dtype))
                # an all-reduce of sizes that the ranks do not divide, too
                count = max(0, size * two.world - 1)
                for algorithm in ALGORITHMS:
                    tensor = values(two.rank, size * two.world, dtype)[:count]
                    two.all_reduce(tensor, op, algorithm=algorithm)
                    torch.testing.assert_close(tensor, expected[:count])
                    checked += 1
    two.close()
    return checked


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_all_gather_is_in_rank_order_for_every_dtype_and_size(ranks, shape):
    assert min(ranks(shape[0] * shape[1]).run(check_all_gathers, shape, 2**20, SIZES)) > 0


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_reductions_are_those_of_torch_distributed_for_every_dtype_and_size(ranks, shape):
    assert min(ranks(shape[0] * shape[1]).run(check_reductions, shape, 2**20, SIZES)) > 0


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(3, 2), (1, 3)], ids=["3x2", "1x3"])
def test_messages_in_many_parts_change_nothing(ranks, shape):
    ranks(shape[0] * shape[1]).run(check_all_gathers, shape, TINY_PARTS, [1, 11])
    ranks(shape[0] * shape[1]).run(check_all_gathers, shape, 2**20, [1, 11], parts=3)
    ranks(shape[0] * shape[1]).run(check_reductions, shape, 2**20, [1, 11], parts=3)
    ranks(shape[0] * shape[1]).run(check_reductions, shape, TINY_PARTS, [1, 11])


class Halting:
    """A transport that notes its first messages, and lets only the first part's go until `gathered` is set."""

    def __init__(self, group: dist.ProcessGroup, began: threading.Event, gathered: threading.Event, free: int) -> None:
        self.inner = GroupTransport(group)
        self.began, self.gathered, self.free = began, gathered, free

    def start(self, outgoing: list[Message], incoming: list[Message]) -> tuple[object, object]:
        self.began.set()
        self.free -= 1
        assert self.free >= 0 or self.gathered.wait(LIMIT)
        return self.inner.start(outgoing, incoming)


def pipeline_through_both_levels() -> None:
    """On two nodes of two ranks, in three parts: each level waits for something that the other does meanwhile."""
    sum_inside, gather_inside = group_module.intra_node_reduce_scatter, group_module.intra_node_all_gather
    for collective, free in (("all_gather", 1), ("reduce_scatter", 3), ("all_reduce", 2)):  # messages of the first part
        began, gathered, sums = threading.Event(), threading.Event(), []

        def gather(*arguments: object, gathered=gathered) -> None:
            gather_inside(*arguments)
            gathered.set()

        def sum_up(*arguments: object, began=began, sums=sums) -> None:
            sums.append(1)
            assert len(sums) == 1 or began.wait(LIMIT)  # the second part's sum
            sum_inside(*arguments)

        def make(group: dist.ProcessGroup, began=began, gathered=gathered, free=free) -> Halting:
            return Halting(group, began, gathered, free)

        two = TwoLevelGroup(ranks_per_node=2, parts=3, make_transport=make)
        mine, whole = torch.full((7,), float(two.rank)), torch.arange(28.0)
        with (
            mock.patch.object(group_module, "intra_node_all_gather", gather),
            mock.patch.object(group_module, "intra_node_reduce_scatter", sum_up),
        ):
            if collective == "all_gather":
                two.all_gather(whole, mine, algorithm="ring")
                assert whole.tolist() == [float(rank) for rank in range(4) for _ in range(7)]
            elif collective == "reduce_scatter":
                two.reduce_scatter(mine, whole, algorithm="ring")
                assert mine.tolist() == [4.0 * (7 * two.rank + i) for i in range(7)]
            else:
                two.all_reduce(whole, algorithm="ring")
                assert whole.tolist() == [4.0 * i for i in range(28)]


def test_parts_are_between_nodes_while_others_are_inside(ranks):
    ranks(4).run(pipeline_through_both_levels)


def make_and_close_repeatedly() -> tuple[int, int]:
    """Three times, on groups that are made anew; groups in torch's registry after the first time, and at the end."""
    counts = []
    for number in range(3):
        group = dist.new_group(list(range(4)))
        if dist.get_rank() < 4:
            two = TwoLevelGroup(group, ranks_per_node=2, timeout=30.0 + number)
            tensor = torch.full((7,), float(two.rank))
            two.all_reduce(tensor, algorithm="ring")
            assert tensor.tolist() == [6.0] * 7
            two.close()
            dist.destroy_process_group(group)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts[0], counts[-1]


def test_groups_are_made_and_closed_repeatedly(ranks):
    for first, last in ranks(4).run(make_and_close_repeatedly):
        assert first == last


def count_message_bytes() -> list[int]:
    seen = []
    isend, all_to_all = dist.isend, dist.all_to_all_single

    def counting_isend(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen.append(tensor.numel() * tensor.element_size())
        return isend(tensor, *args, **kwargs)

    def counting_all_to_all(output: torch.Tensor, *args: object, **kwargs: object) -> object:
        seen.append(output.numel() * output.element_size())
        return all_to_all(output, *args, **kwargs)

    two = TwoLevelGroup(ranks_per_node=2, part_bytes=TINY_PARTS)
    with (
        mock.patch.object(dist, "isend", counting_isend),
        mock.patch.object(dist, "all_to_all_single", counting_all_to_all),
    ):
        two.reduce_scatter(torch.empty(101), torch.ones(404), algorithm="recursive")
    return seen


def test_no_message_is_larger_than_a_part(ranks):
    for seen in ranks(4).run(count_message_bytes):
        assert max(seen) == TINY_PARTS
        assert sum(seen) == 101 * 4 + 404 * 4  # one slot between the nodes, and everything staged inside


def reduce_random_floats(dtype: torch.dtype, shape: tuple[int, int], runs: int) -> dict[str, list[bytes]]:
    two = TwoLevelGroup(ranks_per_node=shape[1])
    found: dict[str, list[bytes]] = {algorithm: [] for algorithm in ALGORITHMS}
    for _ in range(runs):
        for algorithm in ALGORITHMS:
            generator = torch.Generator().manual_seed(two.rank)
            tensor = torch.randn(777, generator=generator, dtype=torch.float64).to(dtype)
            two.all_reduce(tensor, "avg", algorithm=algorithm)
            exact = torch.stack(
                [
                    torch.randn(777, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
                    for rank in range(two.world)
                ]
            )
            # a rounding for each of at most `nodes` hops and the phase inside the node, of sums of about 3
            error = (tensor.double() - exact.double().mean(0)).abs().max().item()
            assert error < 8 * torch.finfo(dtype).eps, (algorithm, error)
            found[algorithm].append(tensor.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (2, 3)], ids=["3x2", "2x3"])
def test_all_ranks_and_all_runs_have_the_same_bits(ranks, shape, dtype):
    first, second = (ranks(6).run(reduce_random_floats, dtype, shape, 2) for _ in range(2))
    for algorithm in ALGORITHMS:
        assert len({bits for found in first + second for bits in found[algorithm]}) == 1


def sum_eighths_inside_a_node() -> list[float]:
    """256 on one rank, 0.5 on three: in bf16 each addition alone would be lost, in fp32 they are 1.5 together."""
    two = TwoLevelGroup(ranks_per_node=4)
    tensor = torch.full((8,), 256.0 if two.rank % 4 == 0 else 0.75, dtype=torch.bfloat16)
    two.all_reduce(tensor, algorithm="ring")
    return tensor.float().tolist()


def test_narrow_dtypes_are_added_in_fp32_inside_a_node(ranks):
    # 256 + 2.25 rounds to 258; two nodes' are 516. In bf16, 256 + 0.75 is 256 each time.
    assert ranks(8).run(sum_eighths_inside_a_node) == [[516.0] * 8] * 8


def start_many() -> bool:
    two = TwoLevelGroup(ranks_per_node=2)
    works, checks = [], []
    for number in range(12):
        tensor = values(two.rank, 501, torch.float32, number)
        expected = sum(values(rank, 501, torch.float32, number) for rank in range(two.world))
        works.append(two.all_reduce(tensor, algorithm=ALGORITHMS[number % 4], async_op=True))
        gathered = torch.empty(33 * two.world)
        works.append(two.all_gather(gathered, torch.full((33,), float(two.rank)), async_op=True))
        checks += [(tensor, expected), (gathered, torch.arange(two.world).repeat_interleave(33).float())]
    # a collective that is waited for at once comes after all of them
    last = torch.ones(5)
    two.all_reduce(last, "max")
    assert all(work.is_completed() for work in works)
    assert all(work.wait() for work in works)
    two.close()
    return all(torch.equal(*pair) for pair in checks)


def test_many_may_be_on_their_way_at_once(ranks):
    assert all(ranks(6).run(start_many))


def leave_while_it_runs() -> bool:
    """Rank 0 comes last, and not before the others have started."""
    two = TwoLevelGroup(ranks_per_node=2)
    if two.rank == 0:
        dist.barrier()
    tensor = torch.ones(9)
    work = two.all_reduce(tensor, async_op=True)
    completed = work.is_completed()
    if two.rank != 0:
        dist.barrier()
    work.wait()
    assert tensor.tolist() == [4.0] * 9
    return completed


def test_starting_does_not_wait_for_other_ranks(ranks):
    assert ranks(4).run(leave_while_it_runs)[1:] == [False] * 3


def use_a_subgroup_of_scattered_nodes(hosts: str) -> list[object]:
    """Ranks 1 to 6 are a group on two hosts."""
    group = dist.new_group(list(range(1, 7)))
    if dist.get_rank() in (0, 7):
        return []
    host = Host(hosts[dist.get_rank() - 1], 3, None)
    with mock.patch.object(Host, "of_this_process", return_value=host):
        two = TwoLevelGroup(group)
    output = torch.empty(6 * 5, dtype=torch.int32)
    tensor, part = torch.arange(13.0) * two.rank, torch.empty(2)
    for algorithm in ("ring", "recursive"):
        two.all_gather(output, torch.full((5,), two.rank, dtype=torch.int32), algorithm=algorithm)
        assert output.tolist() == [rank for rank in range(6) for _ in range(5)]
        tensor = torch.arange(13.0) * two.rank
        two.all_reduce(tensor, algorithm=algorithm)
        assert tensor.tolist() == [15.0 * i for i in range(13)]
        two.reduce_scatter(part, torch.arange(12.0), algorithm=algorithm)
        assert part.tolist() == [6.0 * (2 * two.rank), 6.0 * (2 * two.rank + 1)]
    return [two.nodes]


def test_nodes_are_found_from_hosts_and_need_not_be_neighbours(ranks):
    found = ranks(8).run(use_a_subgroup_of_scattered_nodes, "ababab")
    assert found[1:7] == [[Nodes(((0, 2, 4), (1, 3, 5)))]] * 6
    found = ranks(8).run(use_a_subgroup_of_scattered_nodes, "abbbaa")  # a later node's rank may be lower
    assert found[1:7] == [[Nodes(((0, 4, 5), (1, 2, 3)))]] * 6


def find_this_host() -> tuple[int, int]:
    two = TwoLevelGroup()
    output = torch.empty(3)
    two.all_gather(output, torch.tensor([float(two.rank)]))
    assert output.tolist() == [0, 1, 2]
    assert {call.algorithm for call in two.calls} == {"flat"}
    return two.nodes.count, two.nodes.size


def test_one_host_is_one_node_and_the_library_serves_it(ranks):
    assert ranks(3).run(find_this_host) == [(1, 3)] * 3


def choose_by_size() -> list[tuple[str, int]]:
    links = Links(0.0, 8e6, 10e-3, 4e6, leaf_nodes=2, oversubscription=2.0)
    two = TwoLevelGroup(ranks_per_node=2, links=links)
    for size in (9_000, 11_000, 100_000):
        two.all_gather(torch.empty(size * two.world, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8))
    return sorted((call.algorithm, count) for call, count in two.calls.items())


def test_the_model_chooses_and_calls_are_counted(ranks):
    assert ranks(8).run(choose_by_size) == [[("flat", 1), ("recursive", 1), ("ring", 1)]] * 8


def refuse(case: str) -> str:
    host = Host(str(dist.get_rank() // 2), None, None)
    two = TwoLevelGroup(ranks_per_node=1)
    with mock.patch.object(Host, "of_this_process", return_value=host), pytest.raises(ValueError) as refused:
        REFUSALS[case][0](two)
    return str(refused.value)


REFUSALS = {
    "not contiguous": (
        lambda two: two.all_gather(torch.empty(12), torch.empty(2, 2).t()),
        "input (2, 2) is not contiguous; input.contiguous() would do",
    ),
    "output not contiguous": (
        lambda two: two.all_gather(torch.empty(2, 6).t(), torch.empty(4)),
        "output (6, 2) is not contiguous",
    ),
    "size": (
        lambda two: two.all_gather(torch.empty(11), torch.empty(4)),
        "output has 11 elements and input 4, on 3 ranks: output must have 12",
    ),
    "scatter size": (
        lambda two: two.reduce_scatter(torch.empty(4), torch.empty(11)),
        "input has 11 elements and output 4, on 3 ranks: input must have 12",
    ),
    "dtype": (
        lambda two: two.all_gather(torch.empty(12), torch.empty(4).half()),
        "output is torch.float32 on cpu and input torch.float16 on cpu",
    ),
    "algorithm": (
        lambda two: two.all_gather(torch.empty(12), torch.empty(4), algorithm="tree"),
        "algorithm is 'tree': must be auto, recursive, ring, flat",
    ),
    "op": (lambda two: two.all_reduce(torch.empty(4), "product"), "op is 'product': must be one of sum, avg, max, min"),
    "torch op": (
        lambda two: two.all_reduce(torch.empty(4), dist.ReduceOp.PRODUCT),
        "must be one of sum, avg, max, min",
    ),
    "avg of int": (lambda two: two.all_reduce(torch.empty(4).int(), "avg"), "op 'avg' of torch.int32"),
    "bool": (lambda two: two.all_reduce(torch.empty(4).bool()), "op 'sum' of torch.bool is not defined"),
    "complex": (lambda two: two.all_reduce(torch.empty(4).to(torch.complex64), "max"), "complex numbers have no order"),
    "ranks per node": (lambda two: TwoLevelGroup(ranks_per_node=2), "3 ranks must fill whole nodes; 1 would do"),
    "timeout": (lambda two: TwoLevelGroup(timeout=0), "timeout is 0, but must be a finite number of seconds"),
    "part": (lambda two: TwoLevelGroup(part_bytes=1), "part_bytes is 1, but must be at least 16"),
    "uneven": (
        lambda two: TwoLevelGroup(),
        "the group's nodes have 2, 1 ranks, and two levels need equally many on each",
    ),
    "parts": (lambda two: TwoLevelGroup(parts=0), "parts is 0, but must be 1 to 64; 1 would do"),
    "intra": (
        lambda two: TwoLevelGroup(intra="nclc"),
        "intra is 'nclc', but must be a backend of torch.distributed; did you mean 'nccl'?",
    ),
    "inter": (lambda two: TwoLevelGroup(inter="mpi"), "inter is 'mpi', which this build of torch does not have"),
    "disagree": (
        lambda two: TwoLevelGroup(ranks_per_node=1, part_bytes=1024 if two.rank else 2048),
        "rank 1 was given (ranks_per_node, (links, part_bytes, algorithms, parts, intra, inter)) = (1, ",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_arguments_raise_on_every_rank(ranks, case):
    for text in ranks(3).run(refuse, case):
        assert REFUSALS[case][1] in text


def miss_a_peer(collective: str, algorithm: str) -> tuple[str, str]:
    two = TwoLevelGroup(ranks_per_node=2, timeout=5.0)
    dist.barrier()
    if two.rank == 5:
        time.sleep(7)  # the others' limit and more: the group that they would meet by is broken then
        return "", ""
    tensor = torch.ones(8)
    if collective == "all_gather":
        work = two.all_gather(torch.empty(48), tensor, algorithm=algorithm, async_op=True)
    else:
        work = two.all_reduce(tensor, algorithm=algorithm, async_op=True)
    with pytest.raises(PeerError) as missed:
        work.wait()
    with pytest.raises(PeerError) as again:
        two.all_gather(torch.empty(48), tensor)
    return str(missed.value), str(again.value)


@pytest.mark.exhaustive
def test_a_missing_peer_is_named_with_phase_and_step(ranks):
    found = ranks(6).run(miss_a_peer, "all_gather", "recursive")
    where = "rank 3 of 6 (node 1, place 1), all_gather (recursive), phase between nodes, step 1 of 2"
    assert where + ", receiving from rank 5: " in found[3][0]
    assert any("not done within 5 s" in missed for missed, _ in found)
    assert "phase inside the node, step 1 of 1, with rank 5" in found[4][0]
    assert all("this two-level group is of no more use: rank" in again for _, again in found[:5])


@pytest.mark.exhaustive
def test_a_reduction_names_the_rank_that_is_missing_inside_a_node(ranks):
    found = ranks(6).run(miss_a_peer, "all_reduce", "ring")
    assert "rank 4 of 6 (node 2, place 0), all_reduce (ring), phase inside the node" in found[4][0]
    assert "with rank 5" in found[4][0]


@pytest.mark.exhaustive
def test_the_limit_holds_on_the_groups_own_connections_too(ranks):
    found = ranks(6).run(miss_a_peer, "all_gather", "flat")  # the pool's group has a limit of half an hour
    assert "the library's collective, step 1 of 1, with rank 0, 2, 3, 4, 5: not done within 5 s" in found[1][0]


def lose_a_connection() -> str:
    two = TwoLevelGroup(ranks_per_node=1, timeout=5.0)
    two.all_reduce(torch.ones(4), algorithm="ring")  # all are connected
    dist.barrier()
    if two.rank == 2:
        lost = [group for _, group in two._sub_groups]
        two._failure = RuntimeError("it was closed")  # or the next group of these ranks would take them over
        two.close()
        while lost:  # their sockets are closed, as those of a process that has died
            dist.destroy_process_group(lost.pop())
        with pytest.raises(PeerError, match="of no more use: it was closed"):
            two.all_gather(torch.empty(3), torch.empty(1))
        return ""
    with pytest.raises(PeerError) as lost:
        two.all_reduce(torch.ones(1000), algorithm="ring")
    return str(lost.value)


@pytest.mark.long
def test_a_lost_peer_is_an_error_immediately_and_within_the_limit_for_ranks_that_wait_for_others(ranks):
    direct, indirect, _ = ranks(3).run(lose_a_connection)
    where = "rank 0 of 3 (node 0, place 0), all_reduce (ring), phase between nodes, step 1 of 2, "
    assert where in direct
    # "receiving from" where the connection ends while it waits, "to rank 1 and from" where it has ended before.
    assert "from rank 2: " in direct
    assert "not done within" not in direct
    # Step 1 where rank 0 gave up before its own message had left.
    assert re.search(
        r"rank 1 of 3 \(node 1, place 0\), all_reduce \(ring\), phase between nodes, step [12] of 2, ", indirect
    )


class Slow:
    """A transport whose messages a test holds back until it lets them go."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.seen: list[Message] = []

    def start(self, outgoing, incoming):
        self.seen += outgoing
        works = [dist.irecv(m.data, group=self.group, group_src=m.peer, tag=m.tag) for m in incoming]
        held = [_Held(self.group, message) for message in outgoing]
        return held, works


class _Held:
    def __init__(self, group: dist.ProcessGroup, message: Message) -> None:
        self.done = threading.Event()

        def later() -> None:
            time.sleep(0.05)
            dist.send(message.data, group=group, group_dst=message.peer, tag=message.tag)
            self.done.set()

        threading.Thread(target=later, daemon=True).start()

    def wait(self, timeout: timedelta) -> bool:
        return self.done.wait(timeout.total_seconds())


def use_another_transport() -> int:
    made: list[Slow] = []

    def make(group: dist.ProcessGroup) -> Slow:
        made.append(Slow(group))
        return made[-1]

    two = TwoLevelGroup(ranks_per_node=2, make_transport=make)
    output = torch.empty(12)
    two.all_gather(output, torch.full((3,), float(two.rank)), algorithm="ring")
    assert output.tolist() == [float(rank) for rank in range(4) for _ in range(3)]
    return sum(message.data.numel() for message in made[0].seen)


def test_messages_between_nodes_go_through_the_given_transport(ranks):
    assert ranks(4).run(use_another_transport) == [12] * 4
