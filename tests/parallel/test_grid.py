# SPDX-License-Identifier: Apache-2.0
"""A grid lays its ranks out with x innermost, and its groups are the rows of that layout."""

import time
from datetime import timedelta
from math import prod

import pytest
import torch
import torch.distributed as dist

from stretto.memory import group_timeout
from stretto.parallel import Grid
from tests.parallel.training import Sizes
from tests.pool import GROUP_LIMIT

AXES = ("data", "x", "y", "z")


def describe(sizes: Sizes) -> dict[str, object]:
    grid = Grid(**dict(zip(AXES, sizes, strict=True)))
    return {
        "names": grid.mesh.mesh_dim_names,
        "device": grid.device.type,
        "sizes": tuple(grid.size(axis) for axis in AXES),
        "coordinates": {axis: grid.coordinate(axis) for axis in (*AXES, "batch")},
        "members": {axis: dist.get_process_group_ranks(grid.group(axis)) for axis in (*AXES, "batch", "world")},
    }


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1),
        (1, 3, 2, 1),
        *(
            pytest.param(sizes, marks=pytest.mark.long)
            for sizes in ((2, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2), (2, 1, 2, 2))
        ),
    ],
    ids=str,
)
def test_ranks_are_laid_out_data_z_y_x_with_x_innermost(ranks, sizes):
    data, x, y, z = sizes
    for rank, seen in enumerate(ranks(prod(sizes)).run(describe, sizes)):
        at = {"x": rank % x, "y": rank // x % y, "z": rank // (x * y) % z, "data": rank // (x * y * z)}
        strides = {"x": 1, "y": x, "z": x * y, "data": x * y * z}
        lengths = dict(zip(AXES, sizes, strict=True))
        members = {axis: [rank + (place - at[axis]) * strides[axis] for place in range(lengths[axis])] for axis in AXES}
        assert seen == {
            "names": ("pipe", "data", "context", "y", "x", "z"),
            "device": "cpu",
            "sizes": sizes,
            "coordinates": {**at, "batch": at["data"] * z + at["z"]},
            "members": {
                **members,
                "batch": list(range(rank % (x * y), data * x * y * z, x * y)),
                "world": list(range(prod(sizes))),
            },
        }


def describe_stages() -> dict[str, object]:
    grid = Grid(pipe=2, x=2, data=2)
    groups = ("pipe", "stage", "world", "batch")
    return {
        "at": (grid.coordinate("pipe"), grid.coordinate("data"), grid.coordinate("x")),
        "members": [dist.get_process_group_ranks(grid.group(axis)) for axis in groups],
        "parameters": (grid.parameter_mesh.mesh_dim_names, grid.parameter_mesh.mesh.tolist()),
        "agreeing": grid.size("stage"),
        "text": repr(grid),
    }


def test_pipeline_stages_are_outermost_and_parameters_live_on_one_of_them(ranks):
    for rank, seen in enumerate(ranks(8).run(describe_stages)):
        stage, inside = divmod(rank, 4)
        first = 4 * stage
        assert seen == {
            "at": (stage, inside // 2, inside % 2),
            "members": [
                [inside, inside + 4],
                list(range(first, first + 4)),
                list(range(8)),
                [rank - inside + inside % 2, rank - inside + inside % 2 + 2],
            ],
            "parameters": (("data", "x"), [[first, first + 1], [first + 2, first + 3]]),
            "agreeing": 4,
            "text": "Grid(pipe=2, data=2, x=2, y=1, z=1)",
        }


def messages() -> list[str]:
    grid = Grid(data=2)
    refusals = []
    for question in (grid.size, grid.coordinate, grid.group):
        with pytest.raises(ValueError) as caught:
            question("width")
        refusals.append(str(caught.value))
    for wrong in ({"x": 3}, {"data": 2, "z": 2}, {}):
        with pytest.raises(ValueError) as caught:
            Grid(**wrong)
        refusals.append(str(caught.value))
    return refusals


def test_an_unknown_axis_is_refused_with_those_that_exist_and_a_wrong_product_with_both_counts(ranks):
    for seen in ranks(2).run(messages):
        for refusal in seen[:3]:
            assert "'width'" in refusal
            assert all(axis in refusal for axis in AXES)
        for refusal, asked in zip(seen[3:], ("3", "4", "1"), strict=True):
            assert asked in refusal
            assert "2" in refusal


def read_timeouts(given: float | timedelta | None) -> dict[str, float]:
    """The time limit of each of the grid's groups, in seconds."""
    grid = Grid(data=2, x=2, timeout=given)
    groups = {axis: grid.group(axis) for axis in (*AXES, "batch", "world")}
    groups |= {f"parameters' {axis}": grid.parameter_mesh.get_group(axis) for axis in ("data", "x")}
    return {name: group_timeout(group) for name, group in groups.items()}


@pytest.mark.parametrize("given", [31.5, timedelta(minutes=45)], ids=str)
def test_all_groups_of_a_grid_have_its_time_limit(ranks, given):
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    for seen in ranks(4).run(read_timeouts, given):
        assert set(seen.values()) == {seconds}, seen


def test_without_a_time_limit_all_groups_have_that_of_the_process_group(ranks):
    for seen in ranks(4).run(read_timeouts, None):
        assert set(seen.values()) == {GROUP_LIMIT.total_seconds()}, seen


def wait_for_a_late_rank(timeout: float, late: float) -> str:
    """Return what an all-reduce says to the ranks that wait while rank 1 is late."""
    grid = Grid(x=2, timeout=timeout)
    if dist.get_rank() == 1:
        time.sleep(late)
    try:
        dist.all_reduce(torch.ones(1), group=grid.group("x"))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_is_late_by_less_than_the_time_limit_breaks_nothing(ranks):
    assert ranks(2).run(wait_for_a_late_rank, 20.0, 0.4) == ["", ""]


@pytest.mark.long
def test_a_rank_that_is_late_by_more_than_the_time_limit_is_given_up(ranks):
    assert "imed out" in ranks(2).run(wait_for_a_late_rank, 0.2, 1.0)[0]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "600", timedelta(0)], ids=repr)
def test_a_time_limit_that_is_none_is_refused_with_what_would_do(timeout):
    with pytest.raises(ValueError, match=r"timeout is .*(nearest that would do|such as 600)"):
        Grid(timeout=timeout)
    assert not dist.is_initialized()


def describe_experts(sizes: dict[str, object], groups: tuple[str, ...]) -> dict[str, object]:
    grid = Grid(**sizes)
    return {
        "members": {axis: dist.get_process_group_ranks(grid.group(axis)) for axis in groups},
        "places": [dist.get_process_group_ranks(grid.group(a)).index(dist.get_rank()) for a in groups],
        "coordinates": [grid.coordinate(axis) for axis in groups],
        "sizes": [grid.size(axis) for axis in groups],
        "mesh": (grid.expert_mesh.mesh_dim_names, grid.expert_mesh.mesh.tolist(), grid.expert_mesh.get_coordinate()),
        "agreeing": grid.size("stage"),
        "text": repr(grid),
        "again": repr(Grid(**grid.sizes)),
        "limits": {group_timeout(grid.group(axis)) for axis in groups},
    }


EXPERT_GROUPS = ("expert_data", "expert", "expert_z")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("sizes", "members", "mesh"),
    [
        # rank = ((data * z + z) * y + y) * x + x; the last rank's groups.
        ({"data": 4, "x": 2, "expert": 4}, ([7], [1, 3, 5, 7], [7]), (("x", "expert"), [[0, 2, 4, 6], [1, 3, 5, 7]])),
        ({"data": 4, "x": 2, "expert": 2}, ([3, 7], [5, 7], [7]), (("expert_data", "x", "expert"), None)),
        ({"data": 2, "z": 4, "expert": 4}, ([7], [2, 3, 6, 7], [5, 7]), (("expert", "expert_z"), None)),
        (
            {"data": 2, "z": 2, "x": 2, "expert": 4, "expert_tensor": "fold"},
            ([7], [2, 3, 6, 7], [5, 7]),
            (("expert", "expert_z"), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ),
        ({"data": 2, "x": 4, "expert": 4, "expert_tensor": "fold"}, ([3, 7], [4, 5, 6, 7], [7]), (None, None)),
        ({"pipe": 2, "data": 2, "x": 2, "expert": 2}, ([7], [5, 7], [7]), (("x", "expert"), [[4, 6], [5, 7]])),
    ],
    ids=str,
)
def test_expert_takes_the_innermost_ranks_of_data_then_of_z(ranks, sizes, members, mesh):
    found = ranks(8).run(describe_experts, sizes, EXPERT_GROUPS)
    assert tuple(found[7]["members"].values()) == members
    names, places = mesh
    assert names is None or found[7]["mesh"][0] == names
    assert places is None or found[7]["mesh"][1] == places
    for rank, seen in enumerate(found):
        assert all(rank in group for group in seen["members"].values())
        assert seen["coordinates"] == seen["places"]
        assert seen["sizes"] == list(map(len, seen["members"].values()))
        at = torch.tensor(seen["mesh"][1])[tuple(seen["mesh"][2])]
        assert (at, seen["agreeing"]) == (rank, 8 // sizes.get("pipe", 1))
        assert seen["text"] == seen["again"]
        assert len(seen["limits"]) == 1
    assert f"expert={sizes['expert']}" in found[0]["text"]


def count_groups() -> tuple[int, int, list[int]]:
    Grid(data=2, x=2)
    before = len(dist.distributed_c10d._world.pg_map)
    grid = Grid(data=2, x=2)
    sizes = [grid.size(axis) for axis in EXPERT_GROUPS]
    plain = len(dist.distributed_c10d._world.pg_map) - before
    Grid(data=2, x=2, expert=2)
    return plain, len(dist.distributed_c10d._world.pg_map) - before - plain, sizes


def test_a_grid_without_experts_makes_no_group_for_them(ranks):
    for plain, with_experts, sizes in ranks(4).run(count_groups):
        assert (with_experts - plain, sizes) == (1, [2, 1, 1])
