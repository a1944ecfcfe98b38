# SPDX-License-Identifier: Apache-2.0
"""`python -m lab embedding-figures` times the look-up launched in other ways, which give its numbers."""

from collections.abc import Callable
from typing import Any

import pytest

from lab.embedding.figures import FiguresSetting, measure_figures

TINY = FiguresSetting("4x2x8x2", rows=9, studies=("order", "launches"), ranks=2, warm_up=0, repeats=1)


@pytest.mark.exhaustive
def test_each_launch_is_a_row(interpret: Callable[..., list[Any]]) -> None:
    rows, _ = interpret(2, measure_figures, TINY, 2)
    assert [row["what"] for row in rows] == [
        "remote_first", "oblivious", "persistent", "a program a slice", "a kernel a table"
    ]  # fmt: skip
    assert all(row["milliseconds"] > 0 and row["skew"] >= 0 for row in rows)


def test_an_unknown_study_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no study 'orders': there are occupancy, slice, order, launches"):
        FiguresSetting(studies=("orders",))
