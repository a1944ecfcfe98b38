"""A grid lays its ranks out with x innermost, and its groups are the rows of that layout."""

from math import prod

import pytest
import torch.distributed as dist

from stretto.parallel import Grid
from tests.parallel.training import Sizes

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


@pytest.mark.parametrize("sizes", [(2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 2, 2), (1, 1, 1, 1), (1, 3, 2, 1)], ids=str)
def test_ranks_are_laid_out_data_z_y_x_with_x_innermost(ranks, sizes):
    data, x, y, z = sizes
    for rank, seen in enumerate(ranks(prod(sizes)).run(describe, sizes)):
        at = {"x": rank % x, "y": rank // x % y, "z": rank // (x * y) % z, "data": rank // (x * y * z)}
        strides = {"x": 1, "y": x, "z": x * y, "data": x * y * z}
        lengths = dict(zip(AXES, sizes, strict=True))
        members = {axis: [rank + (place - at[axis]) * strides[axis] for place in range(lengths[axis])] for axis in AXES}
        assert seen == {
            "names": ("data", "y", "x", "z"),
            "device": "cpu",
            "sizes": sizes,
            "coordinates": {**at, "batch": at["data"] * z + at["z"]},
            "members": {
                **members,
                "batch": list(range(rank % (x * y), data * x * y * z, x * y)),
                "world": list(range(prod(sizes))),
            },
        }


def messages() -> list[str]:
    grid = Grid(data=2)
    refusals = []
    for question in (grid.size, grid.coordinate, grid.group):
        with pytest.raises(ValueError) as caught:
            question("pipe")
        refusals.append(str(caught.value))
    for wrong in ({"x": 3}, {"data": 2, "z": 2}, {}):
        with pytest.raises(ValueError) as caught:
            Grid(**wrong)
        refusals.append(str(caught.value))
    return refusals


def test_an_unknown_axis_is_refused_with_those_that_exist_and_a_wrong_product_with_both_counts(ranks):
    for seen in ranks(2).run(messages):
        for refusal in seen[:3]:
            assert "'pipe'" in refusal
            assert all(axis in refusal for axis in AXES)
        for refusal, asked in zip(seen[3:], ("3", "4", "1"), strict=True):
            assert asked in refusal
            assert "2" in refusal
