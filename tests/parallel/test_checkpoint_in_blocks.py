# SPDX-License-Identifier: Apache-2.0
"""torch.utils.checkpoint inside of a block: what is computed again finds whole parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

from stretto.parallel import Grid, gather, parallelize
from stretto.parallel.layout import has_layout
from tests.parallel.training import distance, my_rows

WIDTH, ROWS = 6, 8


class Block(nn.Module):
    """A block that may checkpoint its parts."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.positions = nn.Embedding(3, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())

    def mixed(self, x: Tensor) -> Tensor:
        """Reads parameters before it calls a submodule."""
        return x * self.scale + self.gain * self.mlp(self.norm(x)) + self.positions.weight[1]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self.mixed, self.run(self.mlp, self.norm(x) * self.scale))


def call(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


class Model(nn.Module):
    """Blocks, and parameters of its own that a checkpointed function reads."""

    def __init__(self, run: Callable[..., Tensor], frozen: bool) -> None:
        super().__init__()
        self.run = run
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rows = nn.Embedding(200, WIDTH)  # not kept from the forward pass to the backward pass
        self.layers = nn.ModuleList(Block(run) for _ in range(3))
        if frozen:
            self.layers[1].requires_grad_(False)
            self.layers[2].up.requires_grad_(False)

    def begin(self, x: Tensor) -> Tensor:
        return self.first(x) + self.offset + self.rows(torch.tensor([1]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.begin, x)
        for layer in self.layers:
            x = layer(x)
        return x


def make(run: Callable[..., Tensor], frozen: bool = False) -> nn.Module:
    torch.manual_seed(4)
    return Model(run, frozen).double()


def wrapped() -> nn.Module:
    """A model whose linears torch has wrapped in modules that checkpoint them."""
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))).double()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return model


def train(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Weights after two steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(x.clone().requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: gather(p).detach().clone() for name, p in model.named_parameters()}


KINDS: dict[str, Callable[[], nn.Module]] = {
    "new": partial(make, partial(checkpoint, use_reentrant=False)),
    "reentrant": partial(make, partial(checkpoint, use_reentrant=True)),
    "new, frozen": partial(make, partial(checkpoint, use_reentrant=False), True),
    "reentrant, frozen": partial(make, partial(checkpoint, use_reentrant=True), True),
    "wrapped by torch": wrapped,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reshard": "after_forward"},
    {"blocks": []},
    {"blocks": ["layers.*.up", "layers.*.down", "layers.*.norm"]},
    {"recompute": "full"},
    {"recompute": "full", "blocks": []},
]


@mock.patch("stretto.parallel.install.MIN_COPIED_BYTES", 5000)
def wrong_weights(sizes: dict[str, int], half: int) -> list[str]:
    """Return what trains otherwise than in one process, by a half of the options, which alternates between kinds."""
    grid, found = Grid(**sizes), []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for number, (kind, build) in enumerate(KINDS.items()):
        right = train(build(), x)
        for options in OPTIONS[(number + half) % 2 :: 2]:
            if kind.startswith("wrapped") and any(options.get("blocks", [])):
                continue
            try:
                weights = train(parallelize(build(), grid, **options), x[my_rows(grid, ROWS)])
            except Exception as error:  # noqa: BLE001
                found.append(f"{kind} {options}: {error!r:.300}")
                continue
            far = {name: distance(weights[name], right[name]) for name in right}
            found += [f"{kind} {options}: {name} is {far[name]} off" for name in far if not far[name] <= 1e-12]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "sizes", "half"),
    [
        (2, {"z": 2}, 0),
        pytest.param(2, {"z": 2}, 1, marks=pytest.mark.exhaustive),
        pytest.param(2, {"data": 2}, 0, marks=pytest.mark.exhaustive),
        pytest.param(4, {"data": 2, "z": 2}, 0, marks=pytest.mark.exhaustive),
        pytest.param(4, {"data": 2, "z": 2}, 1, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_what_a_block_checkpoints_trains_as_in_one_process(ranks, count, sizes, half):
    assert ranks(count).run(wrong_weights, sizes, half) == [[]] * count


class Interrupted(torch.autograd.Function):
    """The identity, whose backward pass the user ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise KeyboardInterrupt


def differences_after_an_interruption(run: Callable[..., Tensor], options: dict[str, Any]) -> list[str]:
    """Return which parameters are no shards after a backward pass that was interrupted,
    or lose edits that are made then.
    """
    model, x = parallelize(make(run), Grid(z=2), **options), torch.ones(2, WIDTH, dtype=torch.float64)
    handle = model.layers[0].register_forward_hook(lambda *args: Interrupted.apply(args[-1]))
    with pytest.raises(KeyboardInterrupt):
        model(x).sum().backward()
    handle.remove()
    found = [name for name, parameter in model.named_parameters() if not has_layout(parameter)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model(x).sum().backward()
    return found + [name for name, parameter in model.named_parameters() if not (gather(parameter) == 0.5).all()]


def test_an_interrupted_backward_pass_leaves_parameters_that_can_be_edited(ranks):
    for options in ({}, {"reshard": "after_forward"}, {"recompute": "full"}, {"blocks": []}):
        for reentrant in (False, True):
            run = partial(checkpoint, use_reentrant=reentrant)
            assert ranks(2).run(differences_after_an_interruption, run, options) == [[]] * 2, options
