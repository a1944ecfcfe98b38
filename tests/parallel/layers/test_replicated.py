# SPDX-License-Identifier: Apache-2.0
"""Modules and parameters that every rank has whole, beside those that are cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel import (
    Grid,
    checkpoint_activations,
    clip_grad_norm_,
    gather,
    layout_of,
    mean_over_batch,
    parallelize,
    validate,
)
from tests.parallel.training import Sizes, distance, my_rows

GRIDS = [(1, 2, 1, 2), (2, 2, 1, 1), (2, 1, 1, 2)]
CLASSES = 5


class Block(nn.Module):
    """Attention over patches and an MLP, each with a scale by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.scale * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.patches = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.GroupNorm(2, 8))
        self.token, self.places = nn.Parameter(torch.randn(8)), nn.ParameterList([torch.randn(5, 8)])
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.classify = nn.Linear(8, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), 1, -1), x), dim=1) + self.places[0]
        for block in self.blocks:
            x = block(x)
        return self.classify(x[:, 0]) / self.temperature


ROLES = {
    "patches": "replicated",
    "token": "replicated",
    "temperature": "replicated",
    "places": "replicated",
    "blocks.*.scale": "replicated",
    "blocks.*.norm": "norm",
    "blocks.*.qkv": {"role": "colwise", "segments": 3, "unit": 4},
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "classify": "head",
}
GENERATOR = torch.Generator().manual_seed(4)
IMAGES = torch.randn(8, 3, 4, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.arange(8) % CLASSES


def train(model: nn.Module, grid: Grid | None) -> list[float]:
    """Gradient norms of three steps, after which things have been done that a user might do."""
    rows = slice(None) if grid is None else my_rows(grid, len(IMAGES))
    norms = []
    for step in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.zero_grad()
        total = F.cross_entropy(model(IMAGES[rows]), LABELS[rows], reduction="sum")
        if grid is None:
            (total / len(IMAGES)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            mean_over_batch(total, len(LABELS[rows]), grid).backward()
            norm = clip_grad_norm_(model.parameters(), 0.5, grid)
        optimizer.step()
        norms.append(norm.item())
        if step == 0:
            model.float().double()
        if step == 1 and grid is not None:
            checkpoint_activations(model)
    return norms


def trained(sizes: Sizes) -> dict[str, float]:
    """How far training on a grid is from plain training, and what a state dict of the plain model puts back."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    plain, model = VisionTransformer().double(), parallelize(VisionTransformer().double(), grid, roles=ROLES)
    expected, found = train(plain, None), train(model, grid)
    far = {
        f"norm {step}": distance(ours, theirs) for step, (ours, theirs) in enumerate(zip(found, expected, strict=True))
    }
    far |= {name: distance(gather(p), plain.get_parameter(name).detach()) for name, p in model.named_parameters()}
    model.load_state_dict(VisionTransformer().state_dict())
    fresh = VisionTransformer().double()
    for name, parameter in model.named_parameters():
        far[f"{name} loaded"] = 0.0 if torch.equal(gather(parameter), fresh.get_parameter(name)) else 1.0
    return {name: value for name, value in far.items() if not value < 1e-5}


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_a_vision_transformer_trains_as_on_one_rank(ranks, sizes):
    assert ranks(4).run(trained, sizes) == [{}] * 4


def tied_distance(sizes: Sizes) -> float:
    """How far the gradient of a weight that two replicated linears share is from plain training's."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))

    def tied() -> nn.Module:
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        model[2].weight = model[0].weight
        return model

    x = torch.arange(32.0, dtype=torch.float64).view(4, 8) / 32
    plain, model = tied(), parallelize(tied(), grid, roles={"0": "replicated", "2": "replicated"})
    plain(x).square().sum().backward()
    model(x[my_rows(grid, 4)]).square().sum().backward()
    assert model[0].weight is model[2].weight
    return distance(gather(model[0].weight.grad), plain[0].weight.grad)


def test_a_weight_may_be_shared_by_replicated_modules(ranks):
    assert max(ranks(2).run(tied_distance, (2, 1, 1, 1))) < 1e-12


class Adapted(nn.Module):
    """A frozen linear and what is learned beside it, of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.narrow, self.wide = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.wide(self.narrow(x))


ADAPTER_ROLES = {
    "0.base": "colwise",
    "0.narrow": "replicated",
    "0.wide": "colwise",
    "2.base": "rowwise",
    "2.narrow": "rowwise",
    "2.wide": "replicated",
}


def adapted() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(Adapted(8, 16), nn.Tanh(), Adapted(16, 8)).double()


def adapter_distances(sizes: Sizes) -> list[float]:
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    x = torch.arange(32.0, dtype=torch.float64).view(4, 8) / 32
    plain, model = adapted(), parallelize(adapted(), grid, roles=ADAPTER_ROLES)
    plain(x).square().sum().backward()
    model(x[my_rows(grid, 4)]).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in plain.parameters()]
    return [distance(gather(p.grad, layout_of(p)), q.grad) for p, q in pairs if p.grad is not None]


def test_adapters_get_the_gradients_of_plain_training(ranks):
    assert all(max(distances) < 1e-12 for distances in ranks(4).run(adapter_distances, (1, 2, 1, 2)))


@pytest.mark.parametrize(
    ("model", "roles", "sizes", "message"),
    [
        (VisionTransformer(), ROLES, {"y": 2}, r"token has the role 'replicated'.*Choose y=1"),
        (VisionTransformer(), ROLES | {"token": "norm"}, {}, r"no submodule is named 'token'"),
        (VisionTransformer(), {k: v for k, v in ROLES.items() if k != "token"}, {}, r"are: the model itself"),
        (nn.Sequential(nn.BatchNorm1d(8)), {"0": "replicated"}, {"data": 2}, r"0 has a BatchNorm1d.*one rank's rows"),
        (nn.Sequential(nn.Dropout(0.1)), {"0": "replicated"}, {}, r"submodules are: 0 \(Dropout\)"),
    ],
)
def test_what_cannot_be_whole_is_refused(model, roles, sizes, message):
    with pytest.raises(ValueError, match=message):
        validate(model, sizes, roles=roles)


def test_a_parameter_that_is_cut_elsewhere_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="are one parameter"):
        validate(model, {"x": 2}, roles={"0": "colwise", "1": "replicated"})


def said_within_a_block() -> str:
    modules = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 8))
    model = parallelize(modules, Grid(x=2), roles={"0": "colwise", "1": "replicated", "2": "rowwise"})
    with pytest.raises(ValueError, match="its input's are split over x") as caught:
        model(torch.ones(2, 8))
    return str(caught.value)


def test_a_replicated_module_within_a_block_is_refused_where_it_shows(ranks):
    torch.manual_seed(0)
    assert all(said.startswith("1 takes features") for said in ranks(2).run(said_within_a_block))
