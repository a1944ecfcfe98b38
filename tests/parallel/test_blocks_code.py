# SPDX-License-Identifier: Apache-2.0
"""Tests of what the code of modules does to their parameters when a model is sharded block by block: right,
or refused.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from stretto.parallel import Grid, gather, parallelize
from tests.differences import largest
from tests.parallel.training import distance, my_rows

WIDTH = 6
ROWS = 4
DOUBLE = torch.float64


class Chain(nn.Module):
    """Layers one after another; `change` makes a model's oddity of it. Tests call its methods, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class AveragesOther(Chain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.lerp_(self.first.weight.roll(1, 0), 0.5)
        return super().forward(x)


class ShrinksData(Chain):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data.mul_(0.5)
        return super().forward(x)


class Replaces(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.first.weight = nn.Parameter(self.first.weight.detach() * 0.5)
        return x


class Checkpoints(Chain):
    """Checkpoints a submodule that is in no block."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class ListsTwice(Chain):
    """A module in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.ModuleList([self.layers[0], nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for layer in self.again:
            x = layer(x).tanh()
        return x


class Quantized(Chain):
    """A frozen weight of integers, whose bits count."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))  # which has no rows
        self.codes = nn.Parameter(torch.arange(WIDTH * WIDTH, dtype=torch.int8).view(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale @ (self.codes & 7).to(x.dtype)


class Adds(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Adapted(nn.Module):
    """A frozen layer whose weight is parametrized within each forward pass, as PEFT does with experts' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.column, self.row = nn.Parameter(torch.ones(WIDTH, 1)), nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        trains = self.base.weight.requires_grad
        parametrize.register_parametrization(self.base, "weight", Adds(self.column @ self.row))
        self.base.parametrizations.weight.original.requires_grad_(trains)
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class AdaptedTrained(Adapted):
    """The same with a weight that is trained, too, under the names of PEFT's wrapper."""

    parameter_name = "weight"

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = self.base.requires_grad_(True)


class Adapts(Chain):
    def __init__(self, kind: Callable[[], nn.Module] = Adapted) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))


class ReadsOtherBlock(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.layers[1].weight)


def weight_normed() -> nn.Module:
    """Blocks whose hooks compute their weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layers = [torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def embedding_with(option: str) -> nn.Module:
    return nn.Sequential(nn.Embedding(5, WIDTH, **{option: 1.0 if option == "max_norm" else True}), nn.Linear(WIDTH, 2))


def complex_scale() -> nn.Module:
    model = Chain()
    model.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
    return model


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return kind().double()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)


def train(model: nn.Module, x: Tensor, part: str = "") -> dict[str, Tensor]:
    """Weights after two steps of the model, or of one of its submodules called by itself."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model.get_submodule(part)(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: gather(p).detach().clone() for name, p in model.named_parameters()}


def largest_distance(sizes: dict[str, int], kind: Callable[[], nn.Module], part: str, options: dict[str, Any]) -> float:
    """Return how far the weights are from those of one process."""
    grid = Grid(**sizes)
    right = train(make(kind), batch(), part)
    found = train(parallelize(make(kind), grid, **options), batch()[my_rows(grid, ROWS)], part)
    return largest(distance(found[name].double(), right[name].double()) for name in right)


@pytest.mark.parametrize(
    ("kind", "part", "options"),
    [
        (weight_normed, "", {}),
        (Checkpoints, "", {}),
        (ListsTwice, "", {"recompute": "full"}),
        (Quantized, "", {}),
        (Adapts, "", {}),
        (Adapts, "", {"recompute": "full"}),
        (partial(Adapts, AdaptedTrained), "", {"reshard": "after_forward"}),
        (ReadsOtherBlock, "", {"blocks": []}),
        (Chain, "first", {}),
        (Chain, "layers.1", {}),
    ],
)
@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}], ids=str)
def test_code_that_reads_parameters_in_other_ways_trains_as_in_one_process(ranks, sizes, kind, part, options):
    assert largest(ranks(2).run(largest_distance, sizes, kind, part, options)) < 1e-12


def refusals(kinds: list[tuple[Any, ...]]) -> list[str]:
    """The error for each model, of `parallelize` or of its first forward pass."""
    messages = []
    for kind, *arguments in kinds:
        with pytest.raises((ValueError, RuntimeError)) as error:
            parallelize(kind(*arguments) if arguments else make(kind), Grid(z=2))(batch())
        messages.append("\n".join([str(error.value), *getattr(error.value, "__notes__", [])]))
    return messages


def test_code_that_would_be_silently_wrong_is_refused(ranks):
    kinds = [
        (AveragesOther,),
        (ShrinksData,),
        (Replaces,),
        (ReadsOtherBlock,),
        (embedding_with, "max_norm"),
        (embedding_with, "sparse"),
        (embedding_with, "scale_grad_by_freq"),
        (complex_scale,),
    ]
    for messages in ranks(2).run(refusals, kinds):
        written = "writes to its parameter 'weight' in place, which would be lost"
        assert written in messages[0]
        assert written in messages[1]
        assert "replaces its parameter 'weight', which would be lost" in messages[2]
        assert "or pass blocks=[], which gathers all parameters" in messages[3]
        assert "0: an embedding with max_norm is not supported" in messages[4]
        assert "0: an embedding with sparse is not supported" in messages[5]
        assert "0: an embedding with scale_grad_by_freq is not supported" in messages[6]
        assert "scale is torch.complex64, but parameters must be real" in messages[7]


class Residual(nn.Module):
    """All parameters are in blocks; the sum is outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def bits_in_bf16() -> float:
    grid = Grid(z=2)
    assert parallelize(make(Residual), grid, dtype=torch.bfloat16)(batch()).dtype == torch.bfloat16
    right = make(Quantized)(batch())
    found = parallelize(make(Quantized), grid, dtype=torch.bfloat16)(batch())
    return distance(found.double(), right)


def test_a_models_inputs_are_cast_to_bf16_and_integers_stay_integers(ranks):
    assert largest(ranks(2).run(bits_in_bf16)) < 0.02


def warnings_of_batch_norm() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), Grid(z=2))
    return [str(each.message) for each in caught]


def test_a_batch_norm_of_each_ranks_rows_is_warned_of(ranks):
    first, second = ranks(2).run(warnings_of_batch_norm)
    assert any("1 is a batch norm" in each and "SyncBatchNorm" in each for each in first)
    assert second == []


class Chooses(Chain):
    """Runs one layer or the other."""

    def forward(self, x: Tensor, layer: int) -> Tensor:
        return self.layers[layer](self.first(x))


def go_different_ways(width: int) -> str:
    """The error where ranks of z use different layers, the second of this inner width, in the first step."""
    grid = Grid(z=2)
    model = make(Chooses)
    model.layers[1] = nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)).double()
    parallelize(model, grid)
    with pytest.raises(RuntimeError) as error:
        model(batch()[my_rows(grid, ROWS)], grid.coordinate("batch")).sum().backward()
    return str(error.value)


@pytest.mark.parametrize("width", [1, 64])
def test_ranks_that_use_different_layers_raise(ranks, width):
    for message in ranks(2).run(go_different_ways, width):
        assert "every rank must go through the same submodules in the same order" in message
        assert "layers.0" in message


def test_a_module_that_nothing_initializes_is_named(ranks):
    for messages in ranks(2).run(build_on_meta):
        for message, held in zip(messages, ("(scale)", "(places)"), strict=True):
            assert "the model (Bare) is on the meta device and has no reset_parameters" in message
            assert held in message


class Bare(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("places", torch.arange(WIDTH))


def build_on_meta() -> list[str]:
    with torch.device("meta"):
        model = Bare()
    messages = []
    for seed in (0, None):  # None: parameters are loaded afterwards, and only buffers need a value
        with pytest.raises(ValueError) as error:
            parallelize(model, Grid(z=2), seed=seed)
        messages.append(str(error.value))
    return messages
