# SPDX-License-Identifier: Apache-2.0
"""Shards tile the whole: every number has an owner, and boxes say where it lies."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.parallel import ParameterLayout, Split

SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in ("data", "x", "y", "z")})


def coordinates_of(sizes: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(sizes, place, strict=True)) for place in product(*(range(size) for size in sizes.values()))]


@given(sizes=SIZES, rows=st.integers(1, 40), columns=st.integers(1, 9))
def test_every_number_of_an_uneven_matrix_is_held_once_by_each_replica(
    sizes: dict[str, int], rows: int, columns: int
) -> None:
    layout = ParameterLayout((rows, columns), (Split(0, "x"), Split(1, "y"), Split(0, "z")))
    holders = torch.zeros(rows, columns)
    for place in coordinates_of(sizes):
        for box in layout.boxes(sizes, place):
            corner = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            holders[corner] += 1
    assert torch.equal(holders, torch.full_like(holders, sizes["data"]))
    assert layout.replicas(sizes) == sizes["data"]


@given(sizes=SIZES, rows=st.integers(1, 40))
def test_shards_are_cut_as_torch_chunk_cuts_first_over_x_then_over_z(sizes: dict[str, int], rows: int) -> None:
    whole = torch.arange(rows)
    layout = ParameterLayout((rows,), (Split(0, "x"), Split(0, "z")))
    for place in coordinates_of(sizes):
        expected = whole
        for axis in ("x", "z"):
            chunks = torch.chunk(expected, sizes[axis])
            expected = chunks[place[axis]] if place[axis] < len(chunks) else expected[:0]
        assert torch.equal(layout.shard(whole, sizes, place), expected)
        assert layout.local_shape(sizes, place) == tuple(expected.shape)


def test_fused_parts_are_each_split_over_x() -> None:
    whole = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33])  # q, k, v of four features
    layout = ParameterLayout((12,), (Split(0, "x", segments=3), Split(0, "z")))
    sizes = {"data": 1, "x": 2, "y": 1, "z": 2}
    shards = {
        (x, z): layout.shard(whole, sizes, {"data": 0, "x": x, "y": 0, "z": z}).tolist() for x in (0, 1) for z in (0, 1)
    }
    assert shards == {(0, 0): [10, 11, 20], (0, 1): [21, 30, 31], (1, 0): [12, 13, 22], (1, 1): [23, 32, 33]}


@pytest.mark.parametrize("segments", [1, 3])
def test_boxes_place_a_shard_where_it_was_cut_from(segments: int) -> None:
    whole = torch.arange(12 * 8).view(12, 8)
    layout = ParameterLayout((12, 8), (Split(0, "x", segments), Split(1, "y"), Split(0, "z")))
    sizes = {"data": 1, "x": 2, "y": 2, "z": 2}
    rebuilt = torch.full_like(whole, -1)
    for place in coordinates_of(sizes):
        shard = layout.shard(whole, sizes, place)
        for box in layout.boxes(sizes, place):
            there = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            here = tuple(slice(o, o + s) for o, s in zip(box.local_offsets, box.sizes, strict=True))
            rebuilt[there] = shard[here]
    assert torch.equal(rebuilt, whole)
