# SPDX-License-Identifier: Apache-2.0
"""Every algorithm, at every rank count that it admits from 2 to 16, in place and not, with 1, 2 and 4 instances."""

from itertools import product

import pytest
import torch
from tests.collectives.executor.simulation import simulate

from stretto.collectives import Algorithm, ProgramError, algorithm, chunk, verify
from stretto.collectives.algorithms import ALGORITHMS, find, load
from stretto.collectives.collective import AllGather

NODES_AND_GPUS = [{"nodes": nodes, "gpus": gpus} for nodes in range(1, 5) for gpus in range(1, 5) if nodes * gpus > 1]
RANKS = [{"ranks": ranks} for ranks in range(2, 17)]


def sizes(name):
    parameters = ALGORITHMS[name].parameters
    if name == "dgx1-all-gather":
        return [{"ranks": 8}]
    return NODES_AND_GPUS if "nodes" in parameters else RANKS


def require_right_numbers(schedule, seed):
    """Run it on the host executor, thread blocks in random order, over two tiles, and check every output chunk."""
    collective, elements = schedule.collective, 3
    rng = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randint(-1000, 1000, (collective.input_chunks * elements,), generator=rng)
        for _ in range(collective.ranks)
    ]
    chunks = [given.view(-1, elements) for given in inputs]
    for rank, output in enumerate(simulate(schedule, inputs, seed=seed, tile_bytes=16)):
        for index, found in enumerate(output.view(-1, elements)):
            expected = collective.expected(rank, index)
            if expected is not None:
                assert torch.equal(found, sum(chunks[giver][given] for giver, given in expected)), (rank, index)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("instances", [1, 2, 4])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_verifies_at_every_size_and_gives_the_right_numbers(name, instances):
    for turn, (size, in_place) in enumerate(product(sizes(name), (True, False))):
        if (name == "all-to-next" and in_place) or (instances > 1 and turn % 4 in (1, 2)):
            continue  # with more instances, every other size is in place
        options = size if name == "all-to-next" else {**size, "in_place": in_place}
        schedule = ALGORITHMS[name].compile(instances=instances, **options)
        found = verify(schedule)
        assert found.ok, (options, found.errors[:2])
        assert not found.writes_input, options
        # With more instances not every size is run, so that it does not take too long.
        if instances == 1 or turn % 8 == 0:
            require_right_numbers(schedule, seed=turn)


@pytest.mark.parametrize("protocol", [pytest.param("LL", marks=pytest.mark.long), "LL128"])
def test_the_other_protocols_have_more_slots(protocol):
    for name in ALGORITHMS:
        schedule = ALGORITHMS[name].compile(protocol=protocol, **sizes(name)[-1])
        assert verify(schedule).slots == 8
        assert verify(schedule).ok, name


@pytest.mark.parametrize(
    ("name", "ranks", "roundings"),
    [
        ("ring-all-reduce", 8, 7),
        ("one-shot-all-reduce", 8, 7),
        ("two-shot-all-reduce", 8, 7),
        ("recursive-halving-all-reduce", 8, 3),
        ("recursive-halving-all-reduce", 6, 3),
        ("ring-reduce-scatter", 5, 4),
        ("recursive-halving-reduce-scatter", 16, 4),
        ("binomial-reduce", 16, 4),
        ("ring-all-gather", 8, 0),
    ],
)
def test_a_sum_is_rounded_as_often_as_its_longest_row_of_additions(name, ranks, roundings):
    assert verify(ALGORITHMS[name].compile(ranks=ranks)).roundings == roundings


@pytest.mark.parametrize(
    ("name", "size", "messages"),
    [
        # Messages that a rank sends: 2 (n - 1) around a ring; n - 1 to all pairs; log2 n by halving or doubling.
        ("ring-all-reduce", {"ranks": 8}, 14),
        ("one-shot-all-reduce", {"ranks": 8}, 7),
        ("two-shot-all-reduce", {"ranks": 8}, 14),
        ("recursive-halving-all-reduce", {"ranks": 8}, 6),
        ("recursive-doubling-all-gather", {"ranks": 16}, 4),
        ("direct-all-to-all", {"ranks": 8}, 7),
        # To 3 GPUs of its node for each of 4 nodes, then one aggregated message to each of the 3 other nodes.
        ("two-step-all-to-all", {"nodes": 4, "gpus": 4}, 15),
        # To 4 neighbours, then to 3.
        ("dgx1-all-gather", {}, 7),
    ],
)
def test_a_rank_sends_as_many_messages_as_the_algorithm_specifies(name, size, messages):
    schedule = ALGORITHMS[name].compile(**size)
    for program in schedule.ranks:
        assert sum(step.type.sends for block in program.thread_blocks for step in block.steps) == messages


def test_several_channels_share_the_chunks_of_a_ring():
    schedule = ALGORITHMS["ring-all-reduce"].compile(ranks=4, channels=2)
    assert [block.channel for block in schedule.ranks[0].thread_blocks] == [0, 1]
    assert verify(schedule).ok


def test_a_node_crosses_to_another_in_one_message_for_each_of_its_gpus():
    schedule = ALGORITHMS["two-step-all-to-all"].compile(nodes=2, gpus=4)
    crossing = [
        step.size
        for rank in range(4)
        for block in schedule.ranks[rank].thread_blocks
        for step in block.steps
        if step.type.sends and block.send_peer is not None and block.send_peer >= 4
    ]
    assert crossing == [4] * 4


def test_all_gpus_of_a_node_help_to_send_to_the_next_node():
    schedule = ALGORITHMS["all-to-next"].compile(nodes=2, gpus=3)
    crossing = {
        (rank, block.send_peer)
        for rank in range(3)
        for block in schedule.ranks[rank].thread_blocks
        if block.send_peer is not None and block.send_peer >= 3
    }
    assert crossing == {(0, 3), (1, 4), (2, 5)}


def test_algorithms_are_found_by_name_and_in_files(tmp_path):
    assert find("ring_all_reduce") is find("ring-all-reduce")
    with pytest.raises(ValueError, match="there is no algorithm 'rong': there are ring-all-reduce"):
        find("rong")
    own = tmp_path / "own.py"
    own.write_text(
        "from stretto.collectives import AllGather, algorithm, chunk\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def star(ranks):\n"
        "    for source in range(ranks):\n"
        "        for rank in range(ranks):\n"
        "            chunk(source, 'in', 0).copy(rank, 'out', source)\n"
        "def plain(ranks): pass\n"
    )
    assert verify(load(own, "star").compile(ranks=3)).ok
    with pytest.raises(ValueError, match="has no algorithm 'plain': it has star"):
        load(own, "plain")
    with pytest.raises(ValueError, match="is no Python file"):
        load(tmp_path / "not_there.py", "star")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match="does not run: ZeroDivisionError"):
        load(tmp_path / "broken.py", "star")


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="ring-all-gather needs 'ranks': it takes ranks, channels"):
        find("ring-all-gather").compile()
    with pytest.raises(ValueError, match="ring-all-gather has no parameter 'rank'"):
        find("ring-all-gather").compile(rank=4)
    with pytest.raises(ValueError, match="a DGX-1 has 8 GPUs, not 4"):
        find("dgx1-all-gather").compile(ranks=4)
    with pytest.raises(ValueError, match="hierarchical-all-reduce has at least 1 of nodes, not -1"):
        find("hierarchical-all-reduce").compile(nodes=-1, gpus=-4)
    with pytest.raises(ValueError, match="all-to-next leaves no choice of in_place"):
        find("all-to-next").compile(nodes=2, gpus=2, in_place=True)
    with pytest.raises(ValueError, match="own is given no collective to do: 7 is none"):
        Algorithm("own", lambda: None, lambda: 7, "").compile()


def test_an_algorithm_may_be_a_part_of_another():
    @algorithm(lambda ranks: AllGather(ranks))
    def inner(ranks: int) -> None:
        for rank in range(ranks):
            chunk(rank, "in", 0).copy((rank + 1) % ranks, "out", rank)

    @algorithm(lambda ranks: AllGather(ranks))
    def outer(ranks: int) -> None:
        inner(ranks)

    assert len(outer.trace(ranks=3).operations) == 3
    with pytest.raises(ProgramError):
        inner(3)
