# SPDX-License-Identifier: Apache-2.0
"""Blocks whose large parameters copy engines gather train as those that a process group gathers."""

import importlib
import random
import time
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from stretto.parallel import Grid, Overlap, checkpoint_activations, count_collectives, parallelize
from stretto.parallel.comm.copy_engine_gather import CopyEngineAllGather
from stretto.parallel.comm.copy_engine_scatter import ScatterRing
from stretto.parallel.layers import block_shard

SEED = 29
WIDTH, ROWS = 12, 6
BLOCKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 26), nn.Linear(26, WIDTH)  # 26 rows: three ranks do not divide them

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Blocks with two large weights each; the head's is the model's own, and large too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 26)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def setup(z: int, *, by_copies: bool, dtype: torch.dtype | None = None) -> tuple[Grid, nn.Module, Tensor]:
    """The model on a grid, and this rank's rows."""
    grid = Grid(z=z)
    torch.manual_seed(SEED)
    builder = importlib.import_module("stretto.parallel.builder")
    with (
        mock.patch.object(builder, "have_copy_engines", return_value=True),
        mock.patch.object(builder, "CopyEngineAllGather", partial(CopyEngineAllGather, backend="host")),
        mock.patch.object(builder, "make_scatter_ring", partial(ScatterRing, backend="host")),
        mock.patch.object(block_shard, "MIN_COPIED_BYTES", 26 * WIDTH * 2),
    ):
        model = parallelize(Stack(), grid, overlap=Overlap(copy_engines=by_copies), dtype=dtype)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return grid, model, x.chunk(z)[grid.coordinate("z")]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
            parameter.grad = None


def shards(model: nn.Module) -> list[Tensor]:
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def train(z: int, by_copies: bool, dtype: torch.dtype | None, straggles: bool) -> tuple[list[Tensor], int, int]:
    """The shards after three steps, and the all-gathers and bytes that the group and the copies sent in the last."""
    grid, model, x = setup(z, by_copies=by_copies, dtype=dtype)
    pause = random.Random(SEED + grid.coordinate("z"))
    real = CopyEngineAllGather._copy_to_peers

    def late(*arguments: Any) -> None:
        time.sleep(pause.random() / 50)
        real(*arguments)

    with mock.patch.object(CopyEngineAllGather, "_copy_to_peers", late if straggles else real):
        for _ in range(2):
            loss_of(model, x).backward()
            update(model)
        with count_collectives(grid) as counts:
            loss_of(model, x).backward()
        update(model)
    kinds = Counter(call.kind for call in counts.calls if call.axis == "z")
    return shards(model), kinds["all_gather"], kinds["reduce_scatter"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("z", "dtype", "straggles"), [(2, None, True), pytest.param(3, torch.bfloat16, False, marks=pytest.mark.long)]
)
def test_training_has_the_same_bits_and_only_small_parameters_go_through_the_group(interpret, z, dtype, straggles):
    print(f"seed {SEED}")
    copied, plain = interpret(z, train, z, True, dtype, straggles), interpret(z, train, z, False, dtype, False)
    for (ours, gathers, scatters), (theirs, all_gathers, all_scatters) in zip(copied, plain, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert (all_gathers, all_scatters) == (BLOCKS + 1, BLOCKS + 1)
        assert (gathers, scatters) == (BLOCKS + 1, BLOCKS + 1)  # of norms and biases, and of all gradients


def count_places() -> tuple[int, bool]:
    """Return how many parameters have a place, and whether autograd has marked one of these,
    which later passes share.
    """
    _, model, x = setup(2, by_copies=True)
    created = []
    real = CopyEngineAllGather._prepare

    def prepare(self: CopyEngineAllGather) -> Any:
        created.append(self)
        return real(self)

    with mock.patch.object(CopyEngineAllGather, "_prepare", prepare):
        loss_of(model, x)
    places = created[0]._places.values()
    return len(places), any(place.whole.requires_grad for place in places)


def test_large_parameters_are_gathered_by_copies_one_by_one(interpret):
    assert interpret(2, count_places) == [(2 * BLOCKS + 1, False)] * 2


def hold_two_graphs(by_copies: bool) -> list[Tensor]:
    """Two forward passes before their two backward passes."""
    _, model, x = setup(2, by_copies=by_copies)
    first, second = loss_of(model, x), loss_of(model, 2 * x)
    first.backward()
    second.backward()
    update(model)
    return shards(model)


@pytest.mark.long
def test_two_passes_may_be_alive_at_once(interpret):
    for ours, theirs in zip(*(interpret(2, hold_two_graphs, copies) for copies in (True, False)), strict=True):
        assert all(map(torch.equal, ours, theirs))


def change_before_backward() -> str:
    _, model, x = setup(2, by_copies=True)
    early = loss_of(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    loss_of(model, x)
    try:
        early.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_parameter_overwritten_before_the_backward_pass_is_named(interpret):
    for message in interpret(2, change_before_backward):
        assert "a parameter of" in message
        assert "was changed, and written over by a forward pass" in message


def checkpoint_later(by_copies: bool) -> list[Tensor]:
    _, model, x = setup(2, by_copies=by_copies)
    checkpoint_activations(model)
    for _ in range(3):
        loss_of(model, x).backward()
        update(model)
    with torch.no_grad():
        model(x)
    return shards(model)


@pytest.mark.long
def test_checkpointed_blocks_compute_the_same(interpret):
    for ours, theirs in zip(*(interpret(2, checkpoint_later, copies) for copies in (True, False)), strict=True):
        assert all(map(torch.equal, ours, theirs))
