# SPDX-License-Identifier: Apache-2.0
"""The planner against figures worked out by hand from equations 5.1 to 5.7 of Singh's dissertation (section 5.1.2).

Axes are ordered as the paper orders them, x innermost, then y, z and data; a grid here is (data, x, y, z). A linear
multiplies [m, k] by [k, n]. A block has four: h to 3h and h to 4h as they are, h to h and 4h to h "transposed".
"""

import functools
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import stretto
from stretto.cli import app
from stretto.cluster import InNodeBandwidth, NetworkLink, NodeLink

AXES = ("data", "x", "y", "z")
COLLECTIVES = ("all_gather_z", "reduce_scatter_z", "all_reduce_y", "all_reduce_x", "all_reduce_data")
# Made-up measurements, each different, so that a look-up of the wrong row shows. (preceding, size): bytes/s.
MEASURED = {
    "perlmutter": {(1, 2): 250e9, (2, 2): 160e9, (1, 4): 200e9},
    "frontier": {(1, 2): 200e9, (2, 2): 80e9, (4, 2): 50e9, (1, 4): 160e9, (2, 4): 64e9, (1, 8): 128e9},
}


def measured(name):
    """A preset whose nodes have been measured."""
    rows = tuple(InNodeBandwidth(*pair, bandwidth) for pair, bandwidth in MEASURED[name].items())
    return replace(stretto.Cluster.preset(name), in_node_bandwidths=rows)


@functools.cache
def paper_plans(model, cluster, gpus, batch, **options):
    plans = stretto.plan(model, measured(cluster), gpus=gpus, batch=batch, seq_len=2048, cost="paper", **options)
    return {tuple(p.grid[axis] for axis in AXES): p for p in plans}


def seconds(*values):
    """The times of the five collectives and their sum, as `communication` names them."""
    return pytest.approx(dict(zip((*COLLECTIVES, "total"), values, strict=True)), rel=1e-9)


def stretto_plan(model, cluster, gpus, batch, *more):
    options = {"model": model, "cluster": cluster, "gpus": gpus, "batch": batch, "seq-len": 2048}
    return CliRunner().invoke(app, ["plan", *(f"--{name}={value}" for name, value in options.items()), *more])


# Times. The first case, gpt-20b (32 blocks, h = 7168) on 32 GPUs as data 2, x 2, y 2, z 4, step by step:
#
#   bandwidths   node of 4 GPUs, beta_inter = 4 NICs x 25e9 = 100e9
#     x          1 x 2 = 2 <= 4: measured, (1, 2): 250e9          y     2 x 2 = 4 <= 4: measured, (2, 2): 160e9
#     z          4 x 4 = 16 > 4: 100e9 / min(4, 4) = 25e9         data  16 x 2 = 32 > 4: 100e9 / min(4, 16) = 25e9
#   weights      3hh + hh + 4hh + 4hh = 12hh = 12 x 7168 x 7168 = 616,562,688 elements a block;
#                x 32 blocks x 2 bytes = 39,460,012,032 bytes; / (x y z = 16) = 2,466,250,752 bytes a GPU
#     5.1        (4 - 1) x 2,466,250,752 / 25e9            = 0.29595009024 s    all-gather over z
#     5.2        3/4 x 39,460,012,032 / (2 x 2) / 25e9     = 0.29595009024 s    reduce-scatter over z
#     5.5        2 x 1/2 x 2,466,250,752 / 25e9            = 0.09865003008 s    all-reduce over data
#   activations  m = 1024 x 2048 / 2 = 1,048,576 tokens; m h = 7,516,192,768 elements
#     over y     forward (5.3) of the two colwise linears, n = 3h and 4h; backward (5.4, swapped) of the two transposed
#                ones, k = h and 4h: 12 m h x 32 blocks x 2 bytes = 5,772,436,045,824 bytes;
#                / (z x = 8) x 2 x 1/2 / 160e9             = 4.5097156608 s
#     over x     backward (5.4) of the colwise ones, k = h and h; forward (5.3, swapped) of the transposed ones,
#                n = h and h: 4 m h x 32 blocks x 2 bytes = 1,924,145,348,608 bytes;
#                / (z y = 8) x 2 x 1/2 / 250e9             = 0.962072674304 s
#   5.6          0.29595009024 x 2 + 4.5097156608 + 0.962072674304 + 0.09865003008 = 6.162338545664 s
TIMES = [
    ((2, 2, 2, 4), 0.29595009024, 0.29595009024, 4.5097156608, 0.962072674304, 0.09865003008, 6.162338545664),
    ((4, 2, 2, 2), 0.19730006016, 0.19730006016, 4.5097156608, 0.962072674304, 0.29595009024, 6.162338545664),
    ((2, 4, 2, 2), 0.09865003008, 0.09865003008, 28.86218022912, 3.60777252864, 0.09865003008, 32.765902848),
    ((2, 2, 4, 2), 0.09865003008, 0.09865003008, 43.29327034368, 0.962072674304, 0.09865003008, 44.551293108224),
    ((1, 4, 1, 8), 0.34527510528, 0.34527510528, 0, 3.60777252864, 0, 4.2983227392),
    ((2, 8, 2, 1), 0, 0, 28.86218022912, 16.83627180032, 0.09865003008, 45.79710205952),
    # gpt-40b: 38 blocks, h = 9216, on 64 GPUs.
    ((2, 2, 4, 4), 0.29047652352, 0.29047652352, 33.04977334272, 0.734439407616, 0.09682550784, 34.461991305216),
    ((4, 4, 2, 2), 0.19365101568, 0.19365101568, 22.03318222848, 2.75414777856, 0.29047652352, 25.46510856192),
    ((2, 8, 2, 2), 0.09682550784, 0.09682550784, 22.03318222848, 12.85268963328, 0.09682550784, 35.17634838528),
    ((4, 2, 2, 4), 0.58095304704, 0.58095304704, 3.4426847232, 0.734439407616, 0.29047652352, 5.629506748416),
    ((8, 8, 1, 1), 0, 0, 0, 12.85268963328, 0.67777855488, 13.53046818816),
    # gpt-80b: 42 blocks, h = 12288, on 8192 GCDs, 8 a node, again 4 NICs x 25e9.
    ((128, 8, 2, 4), 0.57076088832, 0.57076088832, 4.05874409472, 0.924844032, 0.37753454592, 6.50264444928),
    ((32, 4, 4, 16), 0.7134511104, 0.7134511104, 6.08811614208, 0.3170893824, 0.09215410176, 7.92426184704),
    ((256, 2, 2, 8), 1.33177540608, 1.33177540608, 0.6341787648, 0.08455716864, 0.7580418048, 4.1403285504),
    ((16, 2, 4, 64), 1.49824733184, 1.49824733184, 2.378170368, 0.08455716864, 0.0445906944, 5.50381289472),
    ((1024, 8, 1, 1), 0, 0, 0, 0.924844032, 3.04108535808, 3.96592939008),
]
SETTINGS = {
    32: ("gpt-20b", "perlmutter", 32, 1024),
    64: ("gpt-40b", "perlmutter", 64, 1024),
    8192: ("gpt-80b", "frontier", 8192, 8192),
}


@pytest.mark.parametrize(("grid", "expected"), [(case[0], case[1:]) for case in TIMES])
def test_communication_times_are_those_worked_out_by_hand(grid, expected):
    data, x, y, z = grid
    plan = paper_plans(*SETTINGS[data * x * y * z])[grid]
    assert plan.communication == seconds(*expected)
    assert plan.step_time == pytest.approx(expected[-1], rel=1e-9)


@pytest.mark.parametrize(("gpus", "count"), [(32, 56), (64, 84), (8192, 560)])
def test_every_factorization_is_there_once_and_its_step_takes_the_sum_of_its_collectives(gpus, count):
    # 2 ** 5, 2 ** 6 and 2 ** 13 into four ordered factors: 8 choose 3, 9 choose 3, 16 choose 3.
    model, cluster, _, batch = SETTINGS[gpus]
    plans = stretto.plan(model, measured(cluster), gpus=gpus, batch=batch, seq_len=2048, cost="paper")
    assert len(plans) == len({tuple(p.grid[axis] for axis in AXES) for p in plans}) == count
    for p in plans:
        assert set(p.communication) == {*COLLECTIVES, "total"}
        total = sum(p.communication[name] for name in COLLECTIVES)
        assert p.communication["total"] == pytest.approx(total, rel=1e-9)
        assert p.step_time == pytest.approx(total, rel=1e-9)


# Bandwidths.


@pytest.mark.parametrize(
    ("cluster", "grid", "expected"),
    [
        ("perlmutter", (1, 4, 1, 1), {"x": 200e9}),
        ("perlmutter", (1, 1, 4, 1), {"y": 200e9}),
        ("perlmutter", (2, 2, 1, 1), {"x": 250e9, "data": 160e9}),
        ("perlmutter", (2, 1, 1, 2), {"z": 250e9, "data": 160e9}),
        ("perlmutter", (4, 1, 1, 1), {"data": 200e9}),
        ("frontier", (1, 2, 2, 2), {"x": 200e9, "y": 80e9, "z": 50e9}),
        ("frontier", (2, 1, 2, 2), {"y": 200e9, "z": 80e9, "data": 50e9}),
        ("frontier", (1, 2, 4, 1), {"x": 200e9, "y": 64e9}),
        ("frontier", (2, 4, 1, 1), {"x": 160e9, "data": 50e9}),
        ("frontier", (1, 8, 1, 1), {"x": 128e9}),
    ],
)
def test_inside_a_node_the_measured_row_of_the_preceding_size_and_the_own_size_is_used(cluster, grid, expected):
    gpus = {"perlmutter": 4, "frontier": 8}[cluster]
    bandwidth = paper_plans("gpt-5b", cluster, gpus, 1024)[grid].bandwidth
    assert {axis: bandwidth[axis] for axis in expected} == pytest.approx(expected)


def test_inside_a_node_without_measurements_the_estimate_is_at_most_what_one_gpu_sends():
    plans = stretto.plan("gpt-5b", stretto.Cluster.preset("perlmutter"), gpus=4, batch=8, seq_len=2048, cost="paper")
    for p in plans:
        assert set(p.bandwidth) == {"pipe", "context", *AXES}
        assert min(p.bandwidth.values()) > 0
        assert all(p.bandwidth[axis] <= 300e9 for axis in AXES if p.grid[axis] > 1), p.grid


@pytest.mark.parametrize(
    ("cluster", "gpus", "grid", "expected"),
    [
        ("perlmutter", 8, (1, 8, 1, 1), {"x": 100e9}),  # figure 5.3, left: one ring over two nodes
        ("perlmutter", 8, (1, 2, 4, 1), {"y": 50e9}),  # figure 5.3, right: two rings share the link
        ("perlmutter", 8, (8, 1, 1, 1), {"data": 100e9}),  # alone again, however far out the axis is
        ("perlmutter", 8, (1, 4, 1, 2), {"z": 25e9}),  # four rings
        ("perlmutter", 16, (1, 8, 1, 2), {"x": 100e9, "z": 25e9}),  # preceding 8, but a node has only 4 GPUs
        ("frontier", 16, (1, 4, 1, 4), {"z": 25e9}),
        ("frontier", 16, (2, 8, 1, 1), {"data": 12.5e9}),
        ("frontier", 64, (2, 16, 1, 2), {"x": 100e9, "z": 12.5e9, "data": 12.5e9}),
    ],
)
def test_between_nodes_the_rings_that_leave_a_node_share_its_bandwidth(cluster, gpus, grid, expected):
    bandwidth = paper_plans("gpt-5b", cluster, gpus, 1024)[grid].bandwidth
    assert {axis: bandwidth[axis] for axis in expected} == pytest.approx(expected)


# Grids that are algorithms of their own. An axis alone on 8 or 32 GPUs of Perlmutter has 100e9 bytes/s.
# gpt-20b has 19,730,006,016 weights in its linears; m h = 1024 x 2048 x 7168 = 15,032,385,536.


def test_x_alone_is_megatron_lm_with_four_all_reduces_of_the_activations_in_each_block():
    # 32 blocks x 4 x 15,032,385,536 elements x 2 bytes x 2 x 7/8 = 6,734,508,720,128 bytes.
    plan = paper_plans("gpt-20b", "perlmutter", 8, 1024)[(1, 8, 1, 1)]
    assert plan.communication == seconds(0, 0, 0, 67.34508720128, 0, 67.34508720128)


def test_data_alone_is_one_all_reduce_of_all_weights():
    # 19,730,006,016 elements x 2 bytes x 2 x 31/32 = 76,453,773,312 bytes.
    plan = paper_plans("gpt-20b", "perlmutter", 32, 1024)[(32, 1, 1, 1)]
    assert plan.communication == seconds(0, 0, 0, 0, 0.76453773312, 0.76453773312)


def test_z_alone_is_fsdp_that_gathers_the_weights_once_and_scatters_their_gradients_once():
    # Each: 19,730,006,016 elements x 2 bytes x 31/32 = 38,226,886,656 bytes.
    plan = paper_plans("gpt-20b", "perlmutter", 32, 1024)[(1, 1, 1, 32)]
    assert plan.communication == seconds(0.38226886656, 0.38226886656, 0, 0, 0, 0.76453773312)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [  # as above, but for an all-gather of twice the time
        ((1, 1, 1, 32), (0.76453773312, 0.38226886656, 0, 0, 0, 1.14680659968)),
        ((2, 2, 2, 4), (0.59190018048, 0.29595009024, 4.5097156608, 0.962072674304, 0.09865003008, 6.458288635904)),
    ],
)
def test_weights_that_are_not_kept_are_gathered_again_for_the_backward_pass_as_fsdp_does(grid, expected):
    plan = paper_plans("gpt-20b", "perlmutter", 32, 1024, reshard="after_forward")[grid]
    assert plan.communication == seconds(*expected)


def test_one_gpu_communicates_nothing():
    (plan,) = paper_plans("gpt-5b", "perlmutter", 1, 8).values()
    assert plan.communication == seconds(0, 0, 0, 0, 0, 0)


# The ranking.


def test_plans_that_fit_come_first_and_the_fastest_of_them_is_the_first():
    cluster = stretto.Cluster.preset("perlmutter")
    plans = stretto.plan("gpt2-small", cluster, gpus=8, batch=32, seq_len=1024, cost="paper")
    fitting = [p for p in plans if p.fits]
    assert fitting
    assert plans[: len(fitting)] == fitting
    assert [p.step_time for p in fitting] == sorted(p.step_time for p in fitting)
    # Eight ranks cannot share 12 heads.
    assert [p.fits for p in plans if p.grid["x"] == 8] == [False]
    assert all(p.why for p in plans if not p.fits)


def test_a_model_too_large_for_the_gpus_is_planned_all_the_same_and_no_plan_fits():
    plans = stretto.plan("gpt-640b", measured("perlmutter"), gpus=4, batch=8, seq_len=2048, cost="paper")
    assert len(plans) == 10  # 4 into four ordered factors: 5 choose 3
    for p in plans:
        assert not p.fits
        assert p.why
        assert all(size >= 0 for size in p.memory.values())


# The command line. On these grids every axis with more than one GPU leaves the node: no estimate comes in.


@pytest.mark.parametrize(
    ("gpus", "count", "grid", "expected"),
    [
        (32, 56, (2, 8, 2, 1), (0, 0, 28.86218022912, 16.83627180032, 0.09865003008, 45.79710205952)),
        (64, 84, (8, 8, 1, 1), (0, 0, 0, 12.85268963328, 0.67777855488, 13.53046818816)),
        (8192, 560, (128, 16, 1, 4), (0.57076088832, 0.57076088832, 0, 2.5367150592, 0.37753454592, 4.05577138176)),
    ],
)
def test_the_command_prints_the_plans_as_json(gpus, count, grid, expected):
    result = stretto_plan(*SETTINGS[gpus], "--cost", "paper", "--json")
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)
    assert len(plans) == count
    (plan,) = (p for p in plans if p["grid"] == {"pipe": 1} | dict(zip(AXES, grid, strict=True)))
    assert plan["communication"] == seconds(*expected)
    assert plan["step_time"] == pytest.approx(expected[-1], rel=1e-9)


def test_the_command_counts_gradients_that_are_accumulated_unsharded():
    largest = []
    for policy in ("after_backward", "gradients_after_step"):
        result = stretto_plan("gpt-20b", "perlmutter", 32, 1024, "--micro-batch", "1", "--reshard", policy, "--json")
        assert result.exit_code == 0, result.output
        largest.append(max(plan["memory"]["gradients"] for plan in json.loads(result.stdout) if plan["grid"]["z"] > 1))
    assert largest[1] > 2 * largest[0]


def test_without_a_cost_the_command_prints_the_same_keys():
    result = stretto_plan("gpt-20b", "perlmutter", 32, 1024, "--json")
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)
    assert len(plans) == 56
    for p in plans:
        assert {"grid", "bandwidth", "communication", "step_time", "memory", "fits", "why"} <= set(p)
        assert set(p["grid"]) == set(p["bandwidth"]) - {"context"} == {"pipe", *AXES}
        assert {*COLLECTIVES, "total"} <= set(p["communication"])


def test_a_narrow_terminal_cuts_no_figure_short(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = stretto_plan("gpt-640b", "perlmutter", 512, 1024, "--cost=paper", "--top=60")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    assert "e+" not in result.stdout
    assert "26.61 s" in result.stdout
    assert "9.93 TB" in result.stdout


# What is refused.


@pytest.mark.parametrize(
    ("model", "gpus"), [("gpt-20b", 11), ("gpt-20b", 37), ("gpt-20b", 0), ("gpt-20b", -4), ("gpt-21b", 32), ("", 32)]
)
def test_unknown_models_and_gpu_counts_that_fit_no_grid_are_refused(model, gpus):
    # 11 and 37 are primes that divide neither 7168 features, 56 heads, 1024 samples nor 2048 tokens.
    with pytest.raises(ValueError):
        stretto.plan(model, stretto.Cluster.preset("perlmutter"), gpus=gpus, batch=1024, seq_len=2048, cost="paper")
    assert stretto_plan(model, "perlmutter", gpus, 1024, "--cost", "paper", "--json").exit_code == 2


@pytest.mark.parametrize(
    ("gpus", "unknown", "named"),
    [
        (32, {"between_nodes": NetworkLink()}, r"between_nodes\.bandwidth"),
        (32, {"nics_per_node": None}, "nics_per_node"),
        (4, {"in_node": NodeLink()}, "in_node"),
    ],
)
def test_a_figure_that_the_cluster_lacks_is_asked_for_by_its_key(gpus, unknown, named):
    cluster = replace(stretto.Cluster.preset("perlmutter"), **unknown)
    with pytest.raises(ValueError, match=named):
        stretto.plan("gpt-20b", cluster, gpus=gpus, batch=1024, seq_len=2048, cost="paper")
