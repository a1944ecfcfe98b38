# SPDX-License-Identifier: Apache-2.0
"""A probe measures every group of ranks that a grid can make, and what it writes is a cluster that plans can use."""

import pytest

import stretto
from stretto.cli.probe import _measure
from stretto.cluster import GPU, Cluster, HostLink, HostTimes, name_grid
from stretto.cluster.probe import assemble, hierarchies, members, require_links
from stretto.planner.compute import matmul_shapes


def test_every_hierarchy_of_four_and_of_eight_ranks_is_measured():
    assert sorted(hierarchies(4)) == [(1, 2), (1, 3), (1, 4), (2, 2)]
    assert sorted(hierarchies(8)) == sorted(
        [*((1, size) for size in range(2, 9)), (2, 2), (2, 3), (2, 4), (3, 2), (4, 2)]
    )


def test_all_groups_of_a_hierarchy_work_side_by_side():
    assert members(8, 2, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert members(8, 1, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert members(4, 1, 3) == [[0, 1, 2]]  # the fourth rank sits out


def test_a_models_own_products_are_measured_on_every_grid_that_can_run_it():
    shapes = matmul_shapes(["gpt2-small"], [4], 128, 2)
    # data=2 or z=2: 2 sequences a rank. qkv 768 to 2304, forward, input's and weight's gradient.
    assert {(256, 2304, 768), (256, 768, 2304), (2304, 768, 256)} <= set(shapes)
    # x=2: all four sequences, half of the outputs; y=2: half of the inputs.
    assert {(512, 1152, 768), (512, 2304, 384)} <= set(shapes)


@pytest.mark.parametrize(
    ("link", "source"),
    [
        (HostLink(54e9, 53e9, 99e9), "Measured by stretto probe, 2 ranks"),
        (None, "not measured: this machine has no GPU"),
    ],
)
def test_measurements_of_host_links_are_in_the_cluster_with_their_source(link, source, tmp_path):
    transfers = [(kind, 1, 2, size, 1e-3) for kind in ("all_gather", "reduce_scatter") for size in (4, 4096)]
    measured = {
        "transfers": transfers,
        "matmuls": [(32, 32, 32, "NN", 1e-6)],
        "memory_bandwidth": 1e12,
        "attention_flops": 1e12,
        "long_attention_flops": 2e12,
        "slowdown": 0.1,
        "host_link": link,
        "host": {"block_forward": 3e-4, "block_backward": 4e-4, "collective": 2e-5},
    }
    detected = Cluster(name="detected", gpus_per_node=2, gpu=GPU(name="a GPU"), host_memory=64e9)
    cluster = assemble(detected, 2, "fp32", measured)
    assert cluster.host_link == (link or HostLink())
    assert cluster.host_memory == 64e9
    assert cluster.host == HostTimes(3e-4, 4e-4, 2e-5)
    assert cluster.sources["host_link"].startswith(source)
    cluster.save(tmp_path / "here.toml")
    assert Cluster.load(tmp_path / "here.toml") == cluster


@pytest.mark.exhaustive
def test_a_probed_machine_can_be_planned_for(tmp_path):
    measured = _measure(2, "fp32")
    assert measured.gpus_per_node == 2
    assert [(row.preceding, row.size) for row in measured.in_node_bandwidths] == [(1, 2)]
    kinds = {row.collective for row in measured.transfers}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}
    for kind in kinds:
        rows = measured.measured_transfers(kind, 1, 2)
        assert len(rows) == 5
        factor = 2 if kind == "all_reduce" else 1
        assert rows[-1].bytes == factor * 2**20  # of 2 MiB, one of two ranks sends a half (all-reduce: twice)
    assert {row.layout for row in measured.matmuls} == {"NN", "NT", "TN"}
    assert measured.gpu.empirical_flops.fp32 == pytest.approx(
        max(2 * row.m * row.n * row.k / row.seconds for row in measured.matmuls)
    )
    assert measured.host_link == HostLink()
    assert "no GPU" in measured.sources["host_link"]
    assert measured.host_memory == Cluster.detect().host_memory
    assert min(measured.host.block_forward, measured.host.block_backward, measured.host.collective) > 0
    measured.save(tmp_path / "here.toml")
    loaded = stretto.Cluster.load(tmp_path / "here.toml")
    assert loaded == measured
    plans = stretto.plan("gpt2-small", loaded, gpus=2, batch=4, seq_len=64, dtype="fp32", cost="full")
    assert {name_grid(plan.grid) for plan in plans} == {"data=2", "x=2", "y=2", "z=2"}
    assert all(plan.step_time > plan.compute_time > 0 for plan in plans)


def test_one_rank_has_no_links_to_measure():
    with pytest.raises(ValueError, match="at least 2 ranks; it was given 1"):
        require_links(1, 0)


def test_models_and_batches_go_together():
    with pytest.raises(ValueError, match="go together"):
        matmul_shapes(["gpt2-small"], [], 128, 2)
