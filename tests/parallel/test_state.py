# SPDX-License-Identifier: Apache-2.0
"""`state_of`: a model's state is found through the model and wrappers of it alone, and goes with it."""

import gc
import weakref
from collections.abc import Callable

import torch
from torch import nn

from stretto.parallel import Grid, parallelize
from stretto.parallel.state import state_of
from tests.conftest import Ranks


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def find_states() -> dict[str, bool]:
    grid = Grid()
    one, other = (parallelize(blocks(), grid, blocks=["0"]) for _ in range(2))
    state = state_of(one)
    assert state is not None
    found = {
        "the model": state_of(one) is state,
        "compiled": state_of(torch.compile(one)) is state,
        "wrapped": state_of(nn.Sequential(one)) is state,
        "its grid": state.grid is grid,
        "its gathered modules": {*state.block_shards} == {one, one[0]} == {*state.wrappers},
        "another's": state_of(other) not in (None, state),
        "a part": state_of(one[0]) is None,
        "with another model": state_of(nn.ModuleList([one, other])) is None,
        "a plain model": state_of(blocks()) is None,
        "no attribute": not {"gradient_reducer", "weight_gatherer", "pipeline_stages"} & {*vars(one)},
    }
    alive = weakref.ref(state)
    del one, state
    gc.collect()
    return found | {"freed": alive() is None}


def test_a_state_is_found_through_its_model_and_wrappers_alone_and_freed_with_it(ranks: Callable[[int], Ranks]) -> None:
    (found,) = ranks(1).run(find_states)
    assert [what for what, holds in found.items() if not holds] == []
