# SPDX-License-Identifier: Apache-2.0
"""Simulated pipelines have the times of `stretto.schedules.simulate`, where messages do not contend."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.simulator.training.steps import configure, made_up, workload

from stretto.axes import SHARDS
from stretto.cluster import NetworkLink, NodeLink
from stretto.planner.communication import bandwidths
from stretto.planner.compute import Device
from stretto.planner.pipeline.cost import estimate, pipeline_cost, simulate_schedule
from stretto.planner.step import COMPUTE
from stretto.planner.workload import ScheduleChoice
from stretto.schedules import SCHEDULES
from stretto.simulator.training import simulate_step

CHOICES = [
    *(ScheduleChoice(name, 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1) for name in SCHEDULES),
    ScheduleChoice("1f1b", extra_warm_up=2),
    ScheduleChoice("message-driven", limit=5, serve_first="backward"),
]


def plan_and_simulate(choice, pipe, batch, machine, layers=8):
    work = workload(layers=layers, batch=batch)
    config = configure({"pipe": pipe}, 1, schedule=choice)
    device = Device(machine, "bf16")
    plan = estimate(work, config, device, bandwidths(machine, config.grid))
    return plan, simulate_step(work, config, machine), device


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_ranks_compute_when_the_timing_model_of_schedules_predicts(choice):
    # Messages are slow enough to make stages wait, and never meet in a channel.
    machine = made_up(between_nodes=NetworkLink(bandwidth=25e9, latency=2e-4))
    plan, step, _ = plan_and_simulate(choice, 8 if choice.virtual_stages == 1 else 4, 16, machine)
    timeline = simulate_schedule(plan, plan.micro_batches)
    for rank, ends in enumerate(timeline.ends):
        computed = [span for span in step.spans(rank) if span.row == COMPUTE and span.name != "optimizer"]
        assert computed[0].start == pytest.approx(timeline.starts[rank][0], abs=1e-15)
        assert computed[-1].end == pytest.approx(ends[-1], rel=1e-12)
        assert sum(span.end - span.start for span in computed) == pytest.approx(timeline.busy[rank], rel=1e-9)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_step_of_stages_without_other_communication_is_the_planners_replay(choice):
    plan, step, device = plan_and_simulate(choice, 4, 16, made_up())
    cost = pipeline_cost(plan, bandwidths(device.cluster, plan.config.grid), replays=True)
    assert step.step_time == pytest.approx(cost.step_time, rel=5e-3)  # tied embeddings' message is counted otherwise


def test_a_pipeline_within_data_and_x_sends_over_all_of_them():
    config = configure({"pipe": 2, "data": 2, "x": 2}, 1, schedule="1f1b")
    step = simulate_step(workload(batch=8), config, made_up())
    assert set(step.communication) == {"pipe", "data", "x"}
    assert step.exposed["x"] > 0
    assert step.lowered.devices == (0, 4)  # one rank of each stage


def test_copy_engines_send_weights_and_gradients_except_in_pipelines():
    # A stage has several micro-batches in flight, and copy engines' memory is that of one.
    machine = made_up(gpu=replace(made_up().gpu, name="NVIDIA H100"))
    assert machine.has_nvlink
    for grid, are_used in (({"z": 2}, True), ({"pipe": 2, "z": 2}, False)):
        step = simulate_step(workload(batch=8), configure(grid, 1, schedule=grid.get("pipe") and "1f1b"), machine)
        streams = {name for name in step.lowered.graph.stream_names if name.startswith(SHARDS)}
        assert streams == ({f"{SHARDS}, by copy engines", SHARDS} if are_used else {SHARDS})
        if are_used:  # four micro-batches gather 16 linears and the head, and look up rows of the embedding
            names = Counter(span.name for span in step.spans(0) if span.row == "z")
            assert (names["gather weight"], names["all_gather outside blocks"]) == (4 * 17, 4)


def test_a_stage_is_exposed_to_the_messages_that_it_receives():
    # Of one micro-batch, the last stage waits for one message, of activations, and computes on without another.
    machine = made_up(in_node=NodeLink(bandwidth=100e9, latency=3e-3))
    step = simulate_step(workload(batch=1), configure({"pipe": 2}, 1, schedule="gpipe"), machine)
    last = [span for span in step.spans(1) if span.row == "pipe"]
    assert [span.name for span in last] == ["send activations", "send gradient of tied embeddings"]
    assert last[0].end - last[0].start == pytest.approx(3e-3, rel=0.02)


@pytest.mark.long
def test_long_pipelines_stay_cheap():
    config = configure({"pipe": 8}, 1, schedule="1f1b")
    step = simulate_step(workload(layers=32, batch=256), config, made_up())
    assert len(step.lowered.graph) < 8 * 256 * 8
