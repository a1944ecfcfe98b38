# SPDX-License-Identifier: Apache-2.0
"""`python -m lab embedding-figures` times the look-up launched in other ways, which give its numbers."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from lab.embedding.figures import FiguresSetting, measure_figures
from lab.operators.between_nodes import _make_embedding

TINY = FiguresSetting("4x2x8x2", rows=9, studies=("order", "launches", "timeline"), ranks=2, warm_up=0, repeats=1)


@pytest.mark.exhaustive
def test_each_launch_is_a_row(interpret: Callable[..., list[Any]]) -> None:
    rows, _ = interpret(2, measure_figures, TINY, 2)
    assert [row["what"] for row in rows] == [
        "remote_first", "oblivious", "persistent", "a program a slice", "a kernel a table",
        "with a clock in the kernel",
    ]  # fmt: skip
    assert all(row["milliseconds"] > 0 and row["skew"] >= 0 for row in rows)
    timeline = rows[-1]["timeline"]
    assert sorted(each[1] for each in timeline["slices"]) == [0, 0, 1, 1]  # two tables' slices for each rank
    for program, _, begin, end in timeline["slices"]:
        started, waits, ended = timeline["programs"][program]
        assert 0 <= started < begin < end < waits < ended


def measure_on_nodes(nodes: str) -> list[dict[str, Any]]:
    with mock.patch.dict(os.environ):
        return measure_figures(FiguresSetting("16x1x8x2", 9, ("slice",), nodes, ranks=2, warm_up=0, repeats=1), 2)


@pytest.mark.exhaustive
def test_between_nodes_slices_of_several_sizes_are_put(interpret: Callable[..., list[Any]]) -> None:
    rows, _ = interpret(2, measure_on_nodes, "2x1")
    assert [row["what"] for row in rows] == [
        "stores, one node", "4 samples", "4 samples, bytes dropped", "8 samples", "8 samples, bytes dropped"
    ]  # fmt: skip


def look_up_on_nodes(nodes: str) -> bool:
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes}):
        runs = _make_embedding(8, torch.device("cpu"))
        return torch.equal(runs["kernel"](), runs["library"]())


@pytest.mark.exhaustive
def test_operators_between_nodes_has_look_ups_that_are_put(interpret: Callable[..., list[Any]]) -> None:
    assert interpret(2, look_up_on_nodes, "2x1") == [True, True]


def test_between_nodes_slices_alone_are_studied() -> None:
    with pytest.raises(ValueError, match="of occupancy, slice, order, launches, timeline, slices alone are studied"):
        FiguresSetting(nodes="2x1")


def test_an_unknown_study_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no study 'orders'; did you mean 'order'"):
        FiguresSetting(studies=("orders",))
