# SPDX-License-Identifier: Apache-2.0
"""The planner counts two-level collectives: their time, and what each network interface sends."""

from dataclasses import replace

import pytest

from stretto.axes import SHARDS, GridSizes
from stretto.cluster import GPU, Cluster, FlopRates, NetworkLink, NodeLink
from stretto.cluster.two_level import Links, predict
from stretto.models.gpt_config import GPTConfig
from stretto.planner import plan
from stretto.planner import predict as predict_step
from stretto.planner.collective_times import collective_seconds
from stretto.planner.communication import bandwidths

CLUSTER = Cluster(
    name="two GPUs a node",
    gpus_per_node=2,
    nics_per_node=2,
    gpu=GPU(name="a GPU", memory=80e9, memory_bandwidth=3e12, peak_flops=FlopRates(bf16=1e15)),
    in_node=NodeLink(bandwidth=200e9, latency=3e-6),
    between_nodes=NetworkLink(bandwidth=25e9, latency=20e-6),
)
MODEL = GPTConfig(layers=4, hidden=256, heads=8, vocab=512, max_seq_len=64)


def seconds(kind, group, num_bytes, mode, cluster=CLUSTER, **sizes):
    grid = GridSizes(**sizes)
    return collective_seconds(kind, group, num_bytes, cluster, grid, bandwidths(cluster, grid), mode)


def test_groups_on_several_nodes_take_the_time_of_both_levels():
    links = Links(3e-6, 200e9, 20e-6, 50e9)
    both = [predict("all_gather", name, 1e6, 4, 2, links) for name in ("recursive", "ring")]
    pipelined = [predict("all_gather", "recursive", 1e6, 4, 2, links, parts) for parts in (2, 4, 8)]
    flat = seconds("all_gather", SHARDS, 7e6, False, z=8)
    assert seconds("all_gather", SHARDS, 7e6, True, z=8) == pytest.approx(min(*both, *pipelined))
    assert flat == pytest.approx(7 * 20e-6 + 7e6 / 50e9)
    assert seconds("all_reduce", "data", 14e6, True, data=8) == seconds("all_reduce", "data", 14e6, False, data=8)
    summed = seconds("all_reduce", "replicas", 14e6, True, data=8)
    assert summed < seconds("all_reduce", "replicas", 14e6, False, data=8)
    # data is over nodes alone, and the two ranks of x share the network
    alone = Links(3e-6, 50e9, 20e-6, 25e9)
    expected = min(predict("all_reduce", name, 1e6, 4, 1, alone) for name in ("recursive", "ring"))
    assert seconds("all_reduce", "replicas", 6e6, True, data=4, x=2) == pytest.approx(expected)
    # gloo's reduce-scatter is an all-reduce, so that "auto" takes two levels for it wherever it would for a sum
    gloo, scatter = replace(CLUSTER, library="gloo"), ("reduce_scatter", SHARDS, 7e6)
    assert seconds(*scatter, False, gloo, z=8) == 2 * seconds(*scatter, False, z=8)
    assert seconds(*scatter, True, gloo, z=8) == seconds(*scatter, True, z=8)
    assert Links.of_cluster(gloo) == replace(Links.of_cluster(CLUSTER), library_scatters=False)
    # inside a node, for sums over x, and on nodes that are not full, nothing changes
    flat_ones = (("all_gather", SHARDS, {"z": 2}), ("all_reduce", "x", {"x": 4}), ("all_gather", SHARDS, {"z": 5}))
    for kind, group, sizes in flat_ones:
        assert seconds(kind, group, 1e6, True, **sizes) == seconds(kind, group, 1e6, False, **sizes)
    # "auto" is the library where two levels are slower: on nodes whose own links are the slow ones
    slow = replace(CLUSTER, in_node=NodeLink(bandwidth=1e9, latency=1e-3))
    assert seconds("all_gather", SHARDS, 7e6, "auto", slow, z=8) == seconds("all_gather", SHARDS, 7e6, False, slow, z=8)
    assert seconds("all_gather", SHARDS, 7e6, "auto", z=8) == seconds("all_gather", SHARDS, 7e6, True, z=8)


def test_a_plan_says_what_each_interface_sends_and_two_levels_are_a_choice_of_its_own():
    how = {"batch": 8, "seq_len": 64, "micro_batch": 1}
    flat, leveled = (
        predict_step(MODEL, CLUSTER, grid={"z": 8}, two_level=two_level, **how) for two_level in (False, True)
    )
    weights = 4 * 12 * 256 * 256 * 2  # bytes of blocks' linears in bf16
    # Each of two ranks sends its part to three nodes, through an interface of its own; a ring has one more hop of 7.
    for kind in ("all_gather_z", "reduce_scatter_z"):
        assert leveled.nic_bytes[kind] == pytest.approx(3 * weights / 8)
        assert flat.nic_bytes[kind] == pytest.approx(7 / 2 * weights / 8)
    assert leveled.exposed["z"] < flat.exposed["z"]
    assert leveled.as_dict()["nic_bytes"] == leveled.nic_bytes
    assert predict_step(MODEL, CLUSTER, grid={"z": 2}, **how | {"batch": 2}).nic_bytes == {}
    plans = plan(MODEL, CLUSTER, gpus=8, **how, two_level=True)
    (same,) = [each for each in plans if each.grid["z"] == 8]
    assert same.step_time <= leveled.step_time
    with pytest.raises(ValueError, match="two_level is 'always', but must be 'auto', True or False"):
        plan(MODEL, CLUSTER, gpus=8, **how, two_level="always")
