# SPDX-License-Identifier: Apache-2.0
"""Tests of what comes out of simulated steps: traces that timelines are read from, plans in simulated order,
use over time.
"""

import json
from dataclasses import replace

import pytest
from tests.simulator.training.steps import SEQ_LEN, SIZES, configure, made_up, workload

from stretto.models import GPTConfig
from stretto.planner import plan
from stretto.planner.documents import read_packed
from stretto.simulator.training import plan_simulated, simulate_step, step_of_plan
from stretto.simulator.training.plans import list_terms
from stretto.simulator.training.trace import make_trace, write_trace
from stretto.train.observe.timeline import read_timeline


@pytest.mark.parametrize("grid", [{"x": 2, "z": 2}, {"pipe": 2, "data": 2}], ids=str)
def test_a_timeline_of_the_trace_has_the_simulations_times(grid):
    schedule = {"schedule": "1f1b"} if "pipe" in grid else {}
    step = simulate_step(workload(), configure(grid, **schedule), made_up())
    timeline = read_timeline(make_trace(step))
    assert timeline.step_time == pytest.approx(step.step_time)
    assert timeline.compute == pytest.approx(step.computation)
    assert {axis: time for axis, time in timeline.communication.items() if time} == pytest.approx(step.communication)
    exposed = {axis: timeline.exposed_by_axis[axis] for axis in step.exposed}
    assert exposed == pytest.approx(step.exposed, abs=1e-12)
    assert timeline.exposed_total == pytest.approx(step.exposed_total)
    assert timeline.idle == pytest.approx(step.idle, abs=1e-12)


def test_a_trace_file_has_a_process_for_each_stage(tmp_path):
    step = simulate_step(workload(), configure({"pipe": 4}, schedule="zb-h1"), made_up())
    write_trace(step, tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}
    assert trace["fidelity"] == "closed-form"
    assert "stretto" not in trace  # one rank's timeline is read, not four at once


def test_use_over_time_adds_up_to_the_whole():
    step = simulate_step(workload(), configure({"x": 2, "z": 2}), made_up())
    use = step.use_over_time(20)
    assert set(use) == {"compute", "x", "z"}
    for axis in ("x", "z"):
        assert sum(use[axis]) / 20 * step.step_time == pytest.approx(step.communication[axis])
        assert all(0 <= part <= 1 + 1e-9 for part in use[axis])


def test_links_use_over_time_adds_up_to_the_whole_and_is_never_more_than_all_of_it():
    step = simulate_step(workload(), configure({"x": 2, "z": 2}), made_up(), fidelity="event-driven")
    use = step.link_use_over_time(20)
    assert use.shape == (20, len(step.network.topology.links))
    assert use.mean(0) == pytest.approx(step.link_use)
    assert use.min() >= -1e-12
    assert use.max() <= 1 + 1e-9
    assert simulate_step(workload(), configure({"x": 2}), made_up()).link_use_over_time() is None
    counters = {event["name"] for event in make_trace(step)["traceEvents"] if event["ph"] == "C"}
    assert counters >= {"links that send", "the busiest link", "ranks that compute", "ranks that communicate over x"}


def test_json_has_whole_nanoseconds_and_names_the_fidelity():
    step = simulate_step(workload(), configure({"x": 2, "z": 2}), made_up(), fidelity="event-driven").as_dict()
    assert step["fidelity"] == "event-driven"
    assert 0 < step["mean_link"] <= step["busiest_link"] <= 1
    times = [step[name] for name in step if name.endswith("_ns")]
    assert all(
        isinstance(each, int) for time in times for each in (time.values() if isinstance(time, dict) else [time])
    )


@pytest.fixture(scope="module")
def found():
    model = GPTConfig(layers=4, **SIZES)
    options = {"gpus": 8, "batch": 16, "seq_len": SEQ_LEN}
    return plan_simulated(model, made_up(), simulated=5, **options), plan(model, made_up(), **options)


def test_the_best_few_plans_are_in_simulated_order(found):
    simulated, planned = found
    assert len(simulated) == len(planned)
    best = {str(each.grid) for each in planned[:5]}
    assert {str(each.grid) for each in simulated[:5]} == best
    times = [each.step_time for each in simulated[:5]]
    assert times == sorted(times)
    assert "first 5 plans are in the order of simulated steps (closed-form)" in simulated[0].notes[-1]
    assert simulated[0].why == "the fastest simulated step"
    assert "slower in simulation: " in simulated[4].why
    assert [each.step_time for each in simulated[5:]] == [each.step_time for each in planned[5:]]


def test_a_simulated_plan_has_the_time_and_terms_of_its_step(found):
    simulated, _ = found
    for each in simulated[:5]:
        step = simulate_step(workload(), step_of_plan(each), made_up())
        assert each.step_time == pytest.approx(step.step_time)
        assert sum(each.terms.values()) == pytest.approx(each.step_time)
        assert each.terms == list_terms(step)


@pytest.mark.parametrize("more", [{"two_level": True}, {"documents": [50, 90, 300]}], ids=str)
def test_what_steps_are_planned_with_they_are_simulated_with(more):
    model, options = GPTConfig(layers=4, **SIZES), {"gpus": 8, "batch": 16, "seq_len": SEQ_LEN, "simulated": 40}
    simulated, usual = (
        {str(each.grid): each.step_time for each in plan_simulated(model, made_up(), **options, **about)}
        for about in (more, {})
    )
    grid = {"data": 1, "x": 1, "y": 1, "z": 8, "pipe": 1}
    (best,) = (each for each in plan(model, made_up(), gpus=8, batch=16, seq_len=SEQ_LEN, **more) if each.grid == grid)
    documents = read_packed(more.get("documents"), SEQ_LEN)
    how = step_of_plan(best, two_level=more.get("two_level", False))
    step = simulate_step(replace(workload(), documents=documents), how, made_up())
    assert simulated[str(best.grid)] == pytest.approx(step.step_time)
    assert simulated[str(best.grid)] < usual[str(best.grid)]


def test_pipelines_are_planned_by_simulation_too():
    model = GPTConfig(layers=8, **SIZES)
    plans = plan_simulated(model, made_up(), gpus=8, batch=32, seq_len=SEQ_LEN, pipe=4, simulated=3)
    for each in plans[:3]:
        assert sum(each.terms.values()) == pytest.approx(each.step_time)
        assert each.schedule is not None
