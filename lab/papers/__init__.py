# SPDX-License-Identifier: Apache-2.0
"""Figures of papers, predicted and simulated: published numbers in a TOML file a paper, and a study a chapter.

A study yields `Measured` tables of its figures, and a `Compared` for each published number. `python -m lab papers`
runs them. Nothing is fitted to a paper.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.harness import column

if TYPE_CHECKING:
    from stretto.models import GPTConfig


@dataclass(frozen=True)
class Compared:
    """A published number, beside the planner's (or closed form's) and the simulator's."""

    paper: str = column("paper")
    source: str = column("figure or table")
    run: str = column("run")
    quantity: str = column("quantity")
    published: str = column("published")
    predicted: float | None = column("predicted", "{:,.3g}")
    simulated: float | None = column("simulated", "{:,.3g}", default=None)


@cache
def read_paper(name: str) -> dict[str, Any]:
    """The entries of `lab/papers/NAME.toml`."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())


def by_number(entries: dict[str, float]) -> dict[int, float]:
    """The entries of a table whose keys are numbers, which TOML has as text."""
    return {int(key): value for key, value in entries.items()}


def model_flops(model: "GPTConfig", batch: int, seq_len: int) -> float:
    """Narayanan et al.'s model FLOPs of a step, including the recomputed forward pass."""
    layers, hidden = model.layers, model.hidden
    return 96 * batch * seq_len * layers * hidden**2 * (1 + seq_len / 6 / hidden + model.vocab / 16 / layers / hidden)
