# SPDX-License-Identifier: Apache-2.0
"""Modules that stay as they are, and parameters that a model's own code reads: whole on every rank, sharded over z and
gathered, or split over x by heads."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel import (
    Grid,
    SegmentLoadPlanner,
    SegmentSavePlanner,
    checkpoint_activations,
    clip_grad_norm_,
    gather,
    layout_of,
    mean_over_batch,
    parallelize,
    validate,
)
from tests.differences import largest
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


class AttentionWithSinks(nn.Module):
    """Attention with a sink for each head, a bias for each feature that its code adds, and a scale for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(16, 8)
        self.sinks, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(48))
        self.scale = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.qkv(x) + self.bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        logits = q @ k.transpose(-1, -2)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        attended = torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1] @ v
        return self.out((attended * self.scale[None, :, None]).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of three experts for each token, weighted by a router; returns the routing, too."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(8, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 6, 8))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = self.route(x).topk(2, dim=-1)
        weights = torch.zeros_like(x[..., :3]).scatter(-1, chosen, best.softmax(-1))
        made = torch.einsum("bsh,ehf->bsef", x, self.up).tanh()
        return self.gain * torch.einsum("bsef,efh,bse->bsh", made, self.down, weights), weights


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm, self.mlp = (
            nn.LayerNorm(8),
            AttentionWithSinks(),
            nn.LayerNorm(8),
            Experts(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))[0]


class MixtureOfExperts(nn.Module):
    """Takes images as tokens, of which the last decides the class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(ExpertBlock() for _ in range(2))
        self.classify = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1, 2)[:, :, 0].mul(4).long() % 16)
        for block in self.blocks:
            x = block(x)
        return self.classify(x[:, -1])


EXPERT_ROLES: dict[str, str | dict[str, object]] = {
    "embed": "embedding",
    "blocks.*.norm": "norm",
    "blocks.*.mlp_norm": "norm",
    "blocks.*.attention.qkv": {"role": "colwise", "segments": 3, "unit": 4, "unit_name": "heads"},
    "blocks.*.attention.bias": {"role": "inner_parameter", "segments": 3, "unit": 4, "unit_name": "heads"},
    "blocks.*.attention.sinks": {"role": "inner_parameter", "unit_name": "heads"},
    "blocks.*.attention.scale": {"role": "inner_parameter", "unit_name": "heads"},
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp": "gathered",
    "classify": "head",
}


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


def trained(sizes: Sizes, make: type[nn.Module], roles: dict[str, Any], **options: Any) -> dict[str, float]:
    """Return how far training on a grid is from plain training, and what a state dict of the plain model puts back."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    plain, model = make().double(), parallelize(make().double(), grid, roles=roles, **options)
    expected, found = train(plain, None), train(model, grid)
    far = {
        f"norm {step}": distance(ours, theirs) for step, (ours, theirs) in enumerate(zip(found, expected, strict=True))
    }
    far |= {name: distance(gather(p), plain.get_parameter(name).detach()) for name, p in model.named_parameters()}
    model.load_state_dict(make().state_dict())
    fresh = make().double()
    for name, parameter in model.named_parameters():
        far[f"{name} loaded"] = 0.0 if torch.equal(gather(parameter), fresh.get_parameter(name)) else 1.0
    return {name: value for name, value in far.items() if not value < 1e-5}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_a_vision_transformer_trains_as_on_one_rank(ranks, sizes):
    assert ranks(4).run(trained, sizes, VisionTransformer, ROLES) == [{}] * 4


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 2, 1), {}),
        ((1, 2, 1, 2), {"reshard": "after_forward"}),
        ((2, 2, 1, 1), {}),
        ((2, 1, 1, 2), {"reshard": "gradients_after_step"}),
        ((1, 1, 2, 2), {}),
        ((1, 1, 1, 4), {}),
    ],
    ids=str,
)
def test_experts_and_attention_with_sinks_train_as_on_one_rank(ranks, sizes, options):
    assert ranks(4).run(trained, sizes, MixtureOfExperts, EXPERT_ROLES, **options) == [{}] * 4


def shapes_here(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return what this rank has of the parameters of a block that no module of Stretto holds."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(MixtureOfExperts(), grid, roles=EXPERT_ROLES)
    block = dict(model.blocks[0].named_parameters())
    return {name: tuple(block[name].to_local().shape) for name in block if "norm" not in name and "weight" not in name}


def test_x_splits_inner_parameters_by_heads_and_z_shards_gathered_modules(ranks):
    first, *_, last = ranks(4).run(shapes_here, (1, 2, 1, 2))
    of_attention = {"attention.sinks": (2,), "attention.bias": (24,), "attention.scale": (2, 4)}
    of_attention |= {"attention.qkv.bias": (24,), "attention.out.bias": (8,)}
    gain = {"mlp.gain": ()}
    assert first == of_attention | gain | {"mlp.up": (2, 8, 6), "mlp.down": (2, 6, 8), "mlp.route.bias": (2,)}
    assert last == of_attention | gain | {"mlp.up": (1, 8, 6), "mlp.down": (1, 6, 8), "mlp.route.bias": (1,)}


def save_with_planner(sizes: Sizes, path: str) -> None:
    """Save by Stretto's planner what torch's own refuses for an inner parameter with segments."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(MixtureOfExperts(), grid, roles=EXPERT_ROLES)
    state = model.state_dict()
    with pytest.raises(dcp.api.CheckpointException, match="SegmentSavePlanner"):
        dcp.save({"bias": state["blocks.0.attention.bias"]}, checkpoint_id=f"{path}-refused")
    dcp.save(state, checkpoint_id=path, planner=SegmentSavePlanner())


def load_with_planner(sizes: Sizes, path: str) -> list[str]:
    """The parameters that are other ones than those of `save_with_planner`."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model, expected = parallelize(MixtureOfExperts(), grid, roles=EXPERT_ROLES), MixtureOfExperts()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path, planner=SegmentLoadPlanner())
    model.load_state_dict(state)
    pairs = zip(model.named_parameters(), expected.parameters(), strict=True)
    return [name for (name, parameter), whole in pairs if not torch.equal(gather(parameter), whole)]


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), pytest.param((1, 2, 2, 1), marks=pytest.mark.exhaustive)], ids=str)
def test_torchs_checkpoints_hold_inner_parameters_whole_for_other_grids(ranks, tmp_path, sizes):
    path = str(tmp_path / "checkpoint")
    ranks(4).run(save_with_planner, (1, 2, 1, 2), path)
    assert ranks(4).run(load_with_planner, sizes, path) == [[]] * 4


class TakesKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, *, x: Tensor) -> Tensor:
        return x * self.scale


class Sums(TakesKeywords):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x * self.scale).sum(-1)


def refusal_of_features(kind: type[nn.Module]) -> str:
    model = parallelize(kind(), Grid(y=2), roles={"": "gathered"})
    with pytest.raises(ValueError) as caught:
        model(torch.ones(2, 4)) if kind is Sums else model(x=torch.ones(2, 4))
    return str(caught.value)


@pytest.mark.parametrize(("kind", "message"), [(TakesKeywords, "first argument is not a tensor"), (Sums, "choose y=1")])
def test_a_gathered_module_of_other_than_hidden_features_is_refused_where_y_splits_them(ranks, kind, message):
    assert all(message in refusal for refusal in ranks(2).run(refusal_of_features, kind))


def tied_distance(sizes: Sizes) -> float:
    """Return how far the gradient of a weight that two replicated linears share is from plain training's."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))

    def tied() -> nn.Module:
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        model[2].weight = model[0].weight
        return model

    x = torch.arange(32.0, dtype=torch.float64).view(4, 8) / 32
    plain, model = tied(), parallelize(tied(), grid, roles={"0": "replicated", "2": "replicated"}, gradients="sum")
    plain(x).square().sum().backward()
    model(x[my_rows(grid, 4)]).square().sum().backward()
    assert model[0].weight is model[2].weight
    return distance(gather(model[0].weight.grad), plain[0].weight.grad)


def test_a_weight_may_be_shared_by_replicated_modules(ranks):
    assert largest(ranks(2).run(tied_distance, (2, 1, 1, 1))) < 1e-12


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
    plain, model = adapted(), parallelize(adapted(), grid, roles=ADAPTER_ROLES, gradients="sum")
    plain(x).square().sum().backward()
    model(x[my_rows(grid, 4)]).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in plain.parameters()]
    return [distance(gather(p.grad, layout_of(p)), q.grad) for p, q in pairs if p.grad is not None]


def test_adapters_get_the_gradients_of_plain_training(ranks):
    assert all(largest(distances) < 1e-12 for distances in ranks(4).run(adapter_distances, (1, 2, 1, 2)))


class SplitWithin(nn.Module):
    """A scale, and an MLP that x may split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up, self.down = nn.Parameter(torch.rand(8)), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.up(x).tanh())


def split_within() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(SplitWithin(), SplitWithin()).double()


def distances_of_split_within(sizes: Sizes) -> list[float]:
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    x = torch.arange(32.0, dtype=torch.float64).view(4, 8) / 32
    roles = {"*": "gathered", "*.up": "colwise", "*.down": "rowwise"}
    plain, model = split_within(), parallelize(split_within(), grid, roles=roles, gradients="sum")
    plain(x).square().sum().backward()
    model(x[my_rows(grid, 4)]).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [distance(gather(p.grad, layout_of(p)), q.grad) for p, q in pairs]


def test_x_may_split_linears_within_a_gathered_module(ranks):
    assert all(largest(distances) < 1e-12 for distances in ranks(4).run(distances_of_split_within, (1, 2, 1, 2)))


@pytest.mark.parametrize(
    ("model", "roles", "sizes", "message"),
    [
        (VisionTransformer(), ROLES, {"y": 2}, r"token has the role 'replicated'.*Choose y=1"),
        (VisionTransformer(), ROLES | {"token": "norm"}, {}, r"no submodule is named 'token'"),
        (VisionTransformer(), {k: v for k, v in ROLES.items() if k != "token"}, {}, r"have no role: the model itself"),
        (nn.Sequential(nn.BatchNorm1d(8)), {"0": "replicated"}, {"data": 2}, r"0 has a BatchNorm1d.*one rank's rows"),
        (nn.Sequential(nn.Dropout(0.1)), {"0": "replicated"}, {}, r"submodules have no role: 0 \(Dropout\)"),
        (nn.Sequential(nn.BatchNorm1d(8)), {"0": "gathered"}, {"z": 2}, r"0 has a BatchNorm1d.*one rank's rows"),
        (nn.Sequential(nn.Dropout(0.1)), {"0": "gathered"}, {}, r"submodules have no role: 0 \(Dropout\)"),
        (nn.ParameterList([torch.ones(4)]), {"0": "inner_parameter"}, {"x": 3}, r"^0: 4 .* over x=3; .* choose x=2"),
        (MixtureOfExperts(), EXPERT_ROLES | {"blocks": "gathered"}, {"x": 2}, r"'inner_parameter', but it is within"),
        (MixtureOfExperts(), EXPERT_ROLES | {"blocks.*.mlp.route": "colwise"}, {"y": 2}, r"is within blocks.0.mlp, wh"),
        (MixtureOfExperts(), EXPERT_ROLES | {"blocks.*.mlp.gain": "inner_parameter"}, {}, r"but it is within"),
        (MixtureOfExperts(), EXPERT_ROLES | {"blocks.*.sink": "inner_parameter"}, {}, r"no parameter is named"),
        (nn.ParameterList([torch.ones(())]), {"0": "inner_parameter"}, {}, r"shape \[\] is not 1 segments"),
        (nn.Sequential(nn.ModuleList([nn.Linear(8, 8)])), {"0": "gathered"}, {}, r"but no forward of its own"),
    ],
)
def test_modules_that_cannot_be_replicated_raise(model, roles, sizes, message):
    with pytest.raises(ValueError, match=message):
        validate(model, sizes, roles=roles)


def test_a_parameter_that_is_cut_elsewhere_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="are one parameter"):
        validate(model, {"x": 2}, roles={"0": "colwise", "1": "replicated"})


def test_a_parameter_of_two_such_roles_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"are one parameter, but their roles are 'replicated' and 'gathered'"):
        validate(model, {"z": 2}, roles={"0": "gathered", "1": "replicated"})


def refusal_within_a_block() -> str:
    modules = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 8))
    model = parallelize(modules, Grid(x=2), roles={"0": "colwise", "1": "replicated", "2": "rowwise"})
    with pytest.raises(ValueError, match="its input's are split over x") as caught:
        model(torch.ones(2, 8))
    return str(caught.value)


def test_a_replicated_module_within_a_block_is_refused_where_it_shows(ranks):
    torch.manual_seed(0)
    assert all(message.startswith("1 takes features") for message in ranks(2).run(refusal_within_a_block))


class Pictures(nn.Module):
    """A token before each row and positions in all of them, each added without a sum where there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(1, 3, 4))
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        return self.layers[0](x).square().sum()


def gradients_of_single_rows() -> list[float]:
    """Return how far gradients over two micro-batches of a row are from those of one of both."""
    torch.manual_seed(0)
    plain = Pictures().double()
    model = parallelize(copy.deepcopy(plain), Grid(), blocks=["layers.*"])
    rows = torch.randn(2, 2, 4, dtype=torch.float64)
    plain(rows).backward()
    for row in rows.split(1):
        model(row).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [float((ours.grad.to_local() - theirs.grad).norm()) for ours, theirs in pairs]


def test_gradients_of_single_rows_add_up_though_autograd_gives_one_tensor_to_two_parameters(ranks):
    assert largest(ranks(1).run(gradients_of_single_rows)[0]) < 1e-12
