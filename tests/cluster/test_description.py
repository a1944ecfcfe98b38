"""A grid's short name."""

import pytest

from stretto.cluster import name_grid
from stretto.planner.grids import GridSizes


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"data": 1, "x": 2, "y": 1, "z": 2}, "x=2 z=2"),
        ({"data": 4, "x": 1, "y": 8, "z": 1}, "data=4 y=8"),
        ({"data": 1, "x": 1, "y": 1, "z": 1}, "one rank"),
    ],
)
def test_a_grid_is_named_by_its_axes_that_have_several_ranks(sizes, name):
    assert name_grid(sizes) == name
    assert str(GridSizes(**sizes)) == name
