# SPDX-License-Identifier: Apache-2.0
"""A recorded step computes and sends what the planner's model adds up, whatever its grid and options."""

import itertools

import pytest
from tests.simulator.training.steps import ALL_RECOMPUTED, configure, made_up, workload

from stretto.axes import GridSizes
from stretto.execution import StateOptions
from stretto.planner.communication import bandwidths
from stretto.planner.compute import Device
from stretto.planner.cost import full_cost
from stretto.simulator.training.step import write_programs

GRIDS = [
    dict(zip(("data", "x", "y", "z"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 4, 8), repeat=4)
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] == 8
]
OPTIONS = [
    *({"recompute": mode} for mode in ALL_RECOMPUTED),
    {"reshard": "after_forward"},
    {"reshard": "after_forward", "recompute": "full"},
    {"reshard": "gradients_after_step"},
    {"shard_sequence": True},
    {"overlap": False},
]


def assert_sums_are_the_planners(work, config):
    cluster = made_up()
    device = Device(cluster, "bf16")
    (program,) = write_programs(work, config, device).ranks
    planned = full_cost(work, config, device, bandwidths(cluster, config.grid))
    sent: dict[str, float] = {}
    for operation in program:
        if operation.collective is not None:
            sent[operation.collective.axis] = sent.get(operation.collective.axis, 0.0) + operation.collective.seconds
    volume = planned.communication
    by_axis = {
        "z": volume.all_gather_z + volume.reduce_scatter_z,
        "y": volume.all_reduce_y,
        "x": volume.all_reduce_x,
        "data": volume.all_reduce_data,
        "expert": volume.all_to_all,
    }
    assert sent == pytest.approx({axis: time for axis, time in by_axis.items() if time})
    seconds = sum(operation.seconds for operation in program)
    assert seconds == pytest.approx(
        planned.compute.total + planned.terms.get("waits of the host for counts of rows", 0.0)
    )


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_dense_model_sends_and_computes_what_is_planned(grid):
    work = workload()
    for options in OPTIONS:
        parts = GridSizes(**grid).batch_parts
        if options.get("shard_sequence") and grid["x"] == 1:
            continue
        for micro_batch in {16 // parts, 1}:
            assert_sums_are_the_planners(work, configure(grid, micro_batch, **options))


@pytest.mark.parametrize("grid", [{"data": 8}, {"data": 2, "x": 4}, {"z": 8}], ids=str)
def test_separate_optimizer_state_sums_its_gradients_in_chunks(grid):
    state = StateOptions("device", bucket_size=1 << 16)
    assert_sums_are_the_planners(workload(), configure(grid, 2, state=state))


@pytest.mark.parametrize(
    "grid",
    [
        {"data": 8, "expert": 4},
        {"data": 4, "x": 2, "expert": 4},
        {"data": 2, "x": 2, "z": 2, "expert": 4},
        {"data": 2, "y": 2, "z": 2, "expert": 2},
        {"data": 2, "x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"drop_duplicates": False}], ids=str)
def test_a_mixture_of_experts_sends_and_computes_what_is_planned(grid, options):
    work = workload(num_experts=8)
    assert_sums_are_the_planners(work, configure(grid, 2, **options))
