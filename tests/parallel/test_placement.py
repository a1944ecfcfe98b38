# SPDX-License-Identifier: Apache-2.0
"""`parallelize` resolves, places and installs: only the last step changes the model."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stretto.execution import ExecutionOptions
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid
from stretto.parallel.install import install
from stretto.parallel.meta import MetaInitializer
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
    placement = place(model, request, plan, MetaInitializer(model, grid.device, 0), None)

    def is_as_it_was() -> bool:
        now = look_at(model)
        return before.keys() == now.keys() and all(now[name] is value for name, value in before.items())

    was_changed_early = not is_as_it_was() or state_of(model) is not None
    install(model, placement, None)
    return was_changed_early, is_as_it_was(), state_of(model) is placement.builder.state


@pytest.mark.parametrize("blocks", [None, ["blocks.*"]], ids=["roles", "blocks"])
def test_a_model_is_changed_only_once_all_is_built(ranks: Callable[[int], Ranks], blocks: list[str] | None) -> None:
    assert ranks(2).run(place_and_install, blocks) == [(False, False, True)] * 2
