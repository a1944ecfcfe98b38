# SPDX-License-Identifier: Apache-2.0
"""`parallelize` resolves, places and installs: only the last step changes the model."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import stretto
from stretto.execution import ExecutionOptions
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from stretto.parallel.install import install
from stretto.parallel.place import place
from stretto.parallel.precision import Precision
from stretto.parallel.resolve import resolve
from stretto.parallel.state import ShardingRequest, state_of
from tests.conftest import Ranks


def look_at(model: nn.Module) -> dict[str, object]:
    """Return what a step that changes a model would change: modules, their attributes and hooks,
    parameters and buffers.
    """
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        found |= {f"{name}:{key}": value for key, value in vars(module).items() if not isinstance(value, dict)}
        found |= {
            f"{name}:{key}:{inner}": each
            for key, value in vars(module).items()
            if isinstance(value, dict)
            for inner, each in value.items()
        }
    return found


def place_and_install(blocks: list[str] | None) -> tuple[bool, bool, bool]:
    """True if the model is as it was after `place`, and then changed, and on a grid, after `install`."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, hidden=8, heads=2, vocab=13, max_seq_len=8, dropout=0.1))
    grid = Grid(z=2) if blocks else Grid(x=2)
    before = look_at(model)
    plan = resolve(model, grid.sizes, blocks=blocks)
    request = ShardingRequest(grid, Precision(), ExecutionOptions(), "mean", True)
    placement = place(model, request, plan, seed=0)

    def is_as_it_was() -> bool:
        now = look_at(model)
        return before.keys() == now.keys() and all(now[name] is value for name, value in before.items())

    was_changed_early = not is_as_it_was() or state_of(model) is not None
    install(model, placement)
    return was_changed_early, is_as_it_was(), state_of(model) is placement.builder.state


@pytest.mark.parametrize("blocks", [None, ["blocks.*"]], ids=["roles", "blocks"])
def test_a_model_is_changed_only_once_all_is_built(ranks: Callable[[int], Ranks], blocks: list[str] | None) -> None:
    assert ranks(2).run(place_and_install, blocks) == [(False, False, True)] * 2


def note_visits() -> list[str]:
    """The files in which a function of `parallelize` is given the model or one of its modules, in the order of calls.

    A file is named again where it is come back to.
    """
    model = GPT(GPTConfig(layers=2, hidden=8, heads=2, vocab=13, max_seq_len=8))
    held = {id(module): module for module in model.modules()}  # kept, or another object could get the id of one
    home = str(Path(stretto.__file__).parent)
    visited: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(home):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        file = code.co_filename.removeprefix(f"{home}/")
        if any(id(frame.f_locals.get(name)) in held for name in names) and visited[-1:] != [file]:
            visited.append(file)

    grid = Grid()
    sys.setprofile(note)
    try:
        parallelize(model, grid)
    finally:
        sys.setprofile(None)
    return visited


def test_a_model_visits_few_files_and_returns_to_hardly_any(ranks: Callable[[int], Ranks]) -> None:
    (visited,) = ranks(1).run(note_visits)
    # resolve -> place -> install: who adds a file says why the model itself has to go there. suggestions.py refuses
    # what is no module at all, forward_passes.py a forward pass in a second thread.
    assert len(set(visited)) <= 14, visited
    assert len({file for file in visited if visited.count(file) > 1}) <= 3, visited
