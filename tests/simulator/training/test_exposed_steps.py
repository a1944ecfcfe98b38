# SPDX-License-Identifier: Apache-2.0
"""Tests of what a simulated step exposes: known answers of small programs, and bounds of whole steps."""

import itertools

import pytest
from tests.simulator.training.steps import configure, made_up, workload

from stretto.execution import Overlap
from stretto.planner.communication import bandwidths
from stretto.planner.step import GroupCollective, WeightCollectives
from stretto.planner.step_recorder import GradientBuckets
from stretto.simulator.network.shapes import switch
from stretto.simulator.training import simulate_step
from stretto.simulator.training.execution import StageNetwork, execute_step
from stretto.simulator.training.lowering import StepLowering
from stretto.simulator.training.program import GradientSums, Tape, WeightGathers
from stretto.simulator.training.simulation import StepSimulation
from stretto.simulator.training.step import StepPrograms


def over(axis: str, seconds: float, kind: str = "all_reduce") -> GroupCollective:
    return GroupCollective(kind, axis, seconds, seconds)


def run(tape: Tape, **slowdowns: float) -> StepSimulation:
    """Execute a tape as the step of a rank of x=2 z=2."""
    programs = StepPrograms(workload(), configure({"x": 2, "z": 2}), (tuple(tape.operations),))
    lowered = StepLowering(programs, (0,)).lower()
    network = StageNetwork(switch(2, 1.0, 0.0), {})
    return StepSimulation(programs, lowered, execute_step(lowered.graph, network, slowdowns), network, slowdowns)


def test_a_collective_is_exposed_as_far_as_no_computation_overlaps_with_it():
    tape = Tape()
    tape.compute("first", 3.0)
    started = tape.start("sum", over("x", 2.0))
    tape.compute("beside", 0.5)
    tape.wait(started)
    tape.compute("last", 1.0)
    step = run(tape)
    assert step.step_time == pytest.approx(3.0 + 2.0 + 1.0)
    assert step.exposed == pytest.approx({"x": 1.5})
    assert step.communication == pytest.approx({"x": 2.0})
    assert step.computation == pytest.approx(4.5)
    assert step.idle == 0


def test_two_axes_at_once_are_each_exposed_and_count_once_together():
    tape = Tape()
    tape.compute("first", 1.0)
    tape.wait(tape.start("sum", over("x", 2.0)), tape.start("scatter", over("z", 3.0)))
    tape.compute("last", 1.0)
    step = run(tape)
    assert step.exposed == pytest.approx({"x": 2.0, "z": 3.0})
    assert step.exposed_total == pytest.approx(3.0)


def test_collectives_of_one_group_follow_one_another_and_those_of_two_do_not():
    one, two = Tape(), Tape()
    for tape, axes in ((one, "zz"), (two, "zx")):
        tape.wait(*(tape.start("collective", over(axis, 2.0)) for axis in axes))
        tape.compute("last", 1.0)
    assert run(one).step_time == pytest.approx(5.0)
    assert run(two).step_time == pytest.approx(3.0)


def test_computation_is_slower_during_communication():
    # For 2 of its seconds it runs at half speed beside x: 1 of its 3 seconds' work is done, and 2 are left.
    beside = Tape()
    started = beside.start("sum", over("x", 2.0))
    beside.compute("beside", 3.0)
    beside.wait(started)
    beside.compute("last", 1.0)
    step = run(beside, x=0.5)
    assert step.step_time == pytest.approx(2.0 + 2.0 + 1.0)
    assert step.computation - step.undisturbed == pytest.approx(1.0)
    assert step.exposed == pytest.approx({"x": 0.0})


def test_the_strongest_of_two_collectives_slows_computation():
    tape = Tape()
    tape.start("sum", over("x", 1.0))
    tape.start("gather", over("z", 2.0))
    tape.compute("beside", 2.0)
    # A second at a quarter, a second at a half: 0.75 are done after two seconds, and 1.25 are left.
    assert run(tape, x=0.75, z=0.5).step_time == pytest.approx(2.0 + 1.25)


@pytest.mark.parametrize(("prefetch", "seconds"), [("none", 12.0), ("next", 9.0), ("all", 8.0)])
def test_weights_are_gathered_where_they_are_used_or_one_ahead_or_all_at_once(prefetch, seconds):
    # Three gathers of 2 s; products of 3, 1 and 2 s. One ahead: 2 + 3 (the second's gather beside it) + 1 (the third's
    # gather begins, and 1 s of it is waited for) + 1 + 2. All at once: the third has come when it is needed.
    tape = Tape()
    gathers = WeightGathers(tape, [over("z", 2.0, "all_gather")] * 3, prefetch)
    for product in (3.0, 1.0, 2.0):
        gathers.use()
        tape.compute("product", product)
    assert run(tape).step_time == pytest.approx(seconds)


def test_only_so_many_gradients_are_on_their_way_at_once():
    # Gradients of 1 s each, scatters of 3 s: with two on their way, the third gradient waits for the first scatter.
    tape = Tape()
    config, machine = configure({"z": 2}), made_up()
    buckets = GradientBuckets(config, machine, bandwidths(machine, config.grid))
    sums = GradientSums(Overlap(), buckets, in_flight=2)
    for _ in range(3):
        sums.throttle(tape)
        tape.compute("weight gradient", 1.0)
        sums.add(tape, WeightCollectives(None, over("z", 3.0, "reduce_scatter")))
    sums.finish(tape)
    tape.compute("optimizer", 1.0)
    step = run(tape)
    assert step.step_time == pytest.approx(1.0 + 3 * 3.0 + 1.0)
    products = [span for span in step.spans() if span.name == "weight gradient"]
    assert [span.start for span in products] == pytest.approx([0.0, 1.0, 4.0])


def test_one_rank_exposes_nothing():
    step = simulate_step(workload(), configure({}, 16), made_up())
    assert step.exposed_total == 0
    assert step.communication == {}
    assert step.step_time == pytest.approx(step.undisturbed)


GRIDS = [
    dict(zip(("data", "x", "y", "z"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 4), repeat=4)
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] == 4
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_without_overlap_all_communication_is_exposed_and_with_it_less(grid):
    plain = simulate_step(workload(), configure(grid, overlap=False), made_up())
    assert plain.exposed == pytest.approx(plain.communication)
    assert plain.step_time == pytest.approx(plain.undisturbed + sum(plain.communication.values()))
    hidden = simulate_step(workload(), configure(grid), made_up())
    assert sum(hidden.exposed.values()) < sum(plain.exposed.values())
    for axis in plain.exposed:
        assert hidden.exposed[axis] <= plain.exposed[axis] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("switch_name", "grid", "axis"),
    [
        ("all_reduce", {"x": 4}, "x"),
        ("reduce_scatter", {"z": 4}, "z"),
        ("all_gather", {"z": 4}, "z"),
        ("data", {"data": 4}, "data"),
    ],
)
def test_each_overlap_hides_its_own(switch_name, grid, axis):
    without = Overlap(**{switch_name: False})
    hidden, plain = (
        simulate_step(workload(hidden=2048), configure(grid, 4, overlap=overlap), made_up())
        for overlap in (Overlap(), without)
    )
    assert hidden.exposed[axis] < plain.exposed[axis]
