# SPDX-License-Identifier: Apache-2.0
"""Every rank of a step: one stands for all that do the same, stragglers hold up the others, links are shared."""

from dataclasses import replace

import pytest
from tests.simulator.training.steps import configure, made_up, workload

from stretto.axes import GridSizes
from stretto.cluster import NodeLink
from stretto.simulator.training import (
    CHANGES,
    RankFactors,
    Variation,
    messages,
    simulate_change,
    simulate_step,
    simulation,
)
from stretto.simulator.training.lowering import list_groups

GRIDS = [
    {"data": 2, "x": 2, "z": 2},
    {"y": 2, "z": 4},
    {"pipe": 2, "data": 2, "x": 2},
    {"data": 4, "x": 2, "expert": 4},
]


def config_of(grid, **options):
    schedule = {"schedule": "1f1b"} if grid.get("pipe", 1) > 1 else {}
    return configure(grid, 2, **schedule, **options)


def work_of(grid, **options):
    return workload(**options, **({"num_experts": 4} if "expert" in grid else {}))


def test_groups_are_those_of_the_grid():
    grid = GridSizes(data=2, x=2, z=2)
    assert list(list_groups(grid, "x")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(list_groups(grid, "z")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(list_groups(grid, "data")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(list_groups(grid, "y")) == []
    experts = GridSizes(data=2, x=2, z=2, expert=4)  # all of data, then z
    assert list(list_groups(experts, "expert")) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    left = GridSizes(z=4, expert=2)  # z's inner ranks divide the experts, and its outer ones shard them
    assert list(list_groups(left, "expert")) == [(0, 1), (2, 3)]
    assert list(list_groups(left, "expert_z")) == [(0, 2), (1, 3)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_one_rank_of_each_stage_stands_for_all(grid):
    one, every = (
        simulate_step(work_of(grid), config_of(grid), made_up(), all_ranks=all_ranks) for all_ranks in (False, True)
    )
    assert every.lowered.graph.world == 8
    assert one.lowered.graph.world == grid.get("pipe", 1)
    assert one.step_time == pytest.approx(every.step_time, rel=1e-12)
    assert one.exposed == pytest.approx(every.exposed)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_collectives_wait_for_a_straggler(grid):
    work, config = work_of(grid), config_of(grid)
    alone = simulate_step(work, config, made_up())
    slow = RankFactors(compute=(1.0,) * 5 + (1.5,) + (1.0,) * 2)
    held_up = simulate_step(work, config, made_up(), factors=slow)
    assert held_up.step_time > alone.step_time * 1.1
    assert held_up.device == 5  # the rank that computes longest
    if grid.get("pipe", 1) == 1:  # as if all were as slow: everyone waits for it
        all_slow = simulate_step(work, config, made_up(), factors=RankFactors(compute=(1.5,) * 8))
        assert held_up.step_time == pytest.approx(all_slow.step_time, rel=0.02)


def test_slow_links_slow_the_collectives_of_their_ranks_alone():
    work, config = workload(), configure({"x": 2, "z": 4}, 2, overlap=False)
    plain = simulate_step(work, config, made_up())
    slow = simulate_step(work, config, made_up(), factors=RankFactors(links=(2.0,) + (1.0,) * 7))
    assert slow.step_time > plain.step_time
    # All ranks wait for those with the slow link, so the step is as long as if all links were.
    assert slow.step_time == pytest.approx(plain.undisturbed + 2 * sum(plain.communication.values()))


def test_variations_are_drawn_by_seed_and_are_never_faster():
    for text in ("lognormal:0.1", "uniform:0.3", "fraction:0.25:1.5"):
        variation = Variation.parse(text)
        drawn = variation.draw(64, seed=3)
        assert drawn == variation.draw(64, seed=3)
        assert drawn != variation.draw(64, seed=4)
        assert min(drawn) >= 1
    assert sorted(Variation.parse("fraction:0.25:1.5").draw(8, 0)) == [1.0] * 6 + [1.5] * 2


@pytest.mark.parametrize(
    "text", ["", "lognormal", "lognormal:-1", "fraction:2:1", "fraction:0.1:0.5", "normal:0.1", "fraction:1:1e308"]
)
def test_other_variations_are_refused(text):
    with pytest.raises(ValueError, match=r"--stragglers is .*must be lognormal:SIGMA"):
        Variation.parse(text, "--stragglers")


@pytest.mark.parametrize(
    "grid", [{"data": 4}, {"z": 4}, {"x": 4}, {"y": 4}, {"data": 4, "expert": 4}, {"pipe": 4}], ids=str
)
def test_messages_alone_on_their_links_take_the_planners_time(grid):
    work, config = work_of(grid), config_of(grid)
    formula, queued = (
        simulate_step(work, config, made_up(), fidelity=fidelity) for fidelity in ("closed-form", "event-driven")
    )
    assert (formula.fidelity, queued.fidelity) == ("closed-form", "event-driven")
    assert queued.step_time == pytest.approx(formula.step_time, rel=0.01)
    assert queued.lowered.graph.world == 4


def test_messages_of_two_axes_share_a_ranks_link():
    # Sums over x and scatters over z at once: each takes as long as alone in closed form, and longer on one link.
    work, config = workload(hidden=2048), configure({"x": 2, "z": 2}, 8)
    formula, queued = (
        simulate_step(work, config, made_up(), fidelity=fidelity) for fidelity in ("closed-form", "event-driven")
    )
    assert sum(queued.communication.values()) > sum(formula.communication.values()) * 1.001
    use = queued.link_use
    assert use is not None
    assert 0 < use.max() <= 1


def test_steps_of_too_many_messages_or_operations_are_refused(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGES", 1000)
    with pytest.raises(ValueError, match=r"messages, and 1,000 are simulated at most; .* closed-form would do"):
        simulate_step(workload(), configure({"x": 2, "z": 4}), made_up(), fidelity="event-driven")
    with pytest.raises(ValueError, match="passes of blocks, and 6,000,000 are simulated at most; fewer micro-batches"):
        simulate_step(workload(batch=2**24), configure({"x": 2, "z": 4}), made_up())
    monkeypatch.setattr(simulation, "MAX_OPERATIONS", 100)
    with pytest.raises(ValueError, match="operations on the ranks to simulate, and 100 are simulated at most"):
        simulate_step(workload(), configure({"x": 2, "z": 4}), made_up())


@pytest.mark.parametrize(
    ("batch", "micro_batch", "message"),
    [
        (12, 1, r"data x z = 8 does not divide the batch of 12 sequences; 16 would do"),
        (64, 7, r"a micro-batch of 7 does not divide the 8 sequences of a rank; 4 would do"),
        (8, 2, r"a micro-batch of 2 does not divide the 1 sequences of a rank; 1 would do"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, micro_batch, message):
    with pytest.raises(ValueError, match=message):
        simulate_step(workload(batch=batch), configure({"data": 2, "z": 4}, micro_batch), made_up())


def test_an_unknown_fidelity_is_refused():
    with pytest.raises(ValueError, match="fidelity is 'exact', but must be closed-form or event-driven"):
        simulate_step(workload(), configure({}), made_up(), fidelity="exact")


def change(name, grid, machine, fidelity="closed-form", **options):
    work, config = workload(), configure(grid, 2, **options)
    base = simulate_step(work, config, machine, fidelity=fidelity)
    return simulate_change(name, base, work, config, machine, fidelity)


def test_gpus_twice_as_fast_halve_a_step_that_only_computes():
    assert change("gpu", {"data": 1}, made_up()).speed_up == pytest.approx(2.0)
    with_sums = change("gpu", {"x": 4}, made_up(), overlap=False)
    assert 1 < with_sums.speed_up < 2


def test_one_more_nic_helps_what_leaves_the_node_by_a_quarter():
    machine = made_up(between_nodes=replace(made_up().between_nodes, latency=1e-12))
    without = simulate_step(workload(), configure({"z": 8}, overlap=False), machine)
    more = change("nic", {"z": 8}, machine, overlap=False)
    assert more.description == "5 NICs on each node, not 4"
    assert more.step.communication["z"] == pytest.approx(without.communication["z"] * 4 / 5, rel=1e-6)
    assert change("nic", {"x": 4}, machine).speed_up == 1


@pytest.mark.parametrize("fidelity", ["closed-form", "event-driven"])
def test_a_lost_nic_slows_the_groups_of_its_node(fidelity):
    lost = change("link", {"data": 2, "x": 4}, made_up(), fidelity, overlap=False)
    assert lost.description == "the first node without one of its 4 NICs"
    assert lost.speed_up < 1
    inside = simulate_step(workload(), configure({"data": 2, "x": 4}, overlap=False), made_up())
    if fidelity == "closed-form":
        assert lost.step.communication["x"] == pytest.approx(inside.communication["x"])
        assert lost.step.communication["data"] > inside.communication["data"] * 1.2


def test_a_lost_link_of_a_pair_sends_its_bytes_round_by_another_gpu():
    wired = made_up(in_node=NodeLink(bandwidth=90e9, pair_bandwidth=30e9, latency=2e-6))
    assert change("link", {"x": 4}, wired, overlap=False).speed_up < 1
    lost = change("link", {"x": 2, "z": 2}, wired, "event-driven")
    assert lost.speed_up < 1


def test_a_link_that_nothing_replaces_cannot_be_lost():
    with pytest.raises(ValueError, match=r"has a switch, or does not say in_node.pair_bandwidth"):
        change("link", {"x": 4}, made_up())
    with pytest.raises(ValueError, match="has one NIC: without it, nothing reaches the node"):
        change("link", {"x": 4, "z": 2}, made_up(nics_per_node=1))
    assert set(CHANGES) == {"nic", "gpu", "link"}
