# SPDX-License-Identifier: Apache-2.0
"""stretto.optim.Muon: torch's bits on one rank, and one rank's weights on every grid."""

import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tests.parallel.experts.training import gpt
from torch import nn

from stretto.models import GPT
from stretto.optim import Muon, RowParts, hidden_matrices
from stretto.optim.muon import NewtonSchulz
from stretto.parallel import Grid, gather, parallelize

SEED = random.randrange(2**31)
SHAPES = (24, 16), (16, 24), (8, 8), (1, 5)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_of_plain_matrices_have_torchs_bits(adjust, nesterov):
    print(f"seed {SEED}")
    weights = []
    for is_ours in (True, False):
        torch.manual_seed(SEED)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        options = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
        if is_ours:
            optimizer = Muon(parameters, adjust_lr=adjust, **options)
        else:
            optimizer = torch.optim.Muon(parameters, adjust_lr_fn=adjust, **options)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        weights.append(parameters)
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


CONFIG = gpt(layers=2, hidden=16, heads=2, expert_ffn=32, num_experts=4, balance="none", vocab=31)
BATCH, SEQ, LR, DECAY = 8, 8, 0.02, 0.1


def rows_of_qkv(config):
    """Queries, keys and values of each KV head's group lie together in a GPT's qkv."""
    queries, dim = config.heads // config.num_kv_heads, config.head_dim
    edges = 0, queries * dim, (queries + 1) * dim, (queries + 2) * dim
    return [RowParts(start, stop, edges[-1]) for start, stop in pairwise(edges)]


def orthogonalize(matrix):
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    x = x if matrix.shape[0] <= matrix.shape[1] else x.T
    return x * 0.2 * max(matrix.shape) ** 0.5


def orthogonalize_all(name, weight):
    """The update of a GPT's parameter: per expert, and per part of qkv."""
    if weight.dim() == 3:
        return torch.stack([orthogonalize(one) for one in weight])
    if not name.endswith("qkv.weight"):
        return orthogonalize(weight)
    queries, dim = CONFIG.heads // CONFIG.num_kv_heads, CONFIG.head_dim
    update = torch.empty_like(weight).view(-1, queries + 2, dim, weight.shape[1])
    groups = weight.view_as(update)
    for part in (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2)):
        chosen = groups[:, part]
        update[:, part] = orthogonalize(chosen.reshape(-1, weight.shape[1])).view_as(chosen)
    return update.view_as(weight)


def make_model():
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def draw(step):
    return torch.randint(CONFIG.vocab, (2, BATCH, SEQ), generator=torch.Generator().manual_seed(step))


def train_plainly(steps):
    """Weights of a plain loop, with another Newton-Schulz and torch's AdamW."""
    model, momenta = make_model(), {}
    names = [n for n, p in model.named_parameters() if p.dim() >= 2 and not n.startswith(("embedding", "head"))]
    matrices = {name: dict(model.named_parameters())[name] for name in names}
    others = [p for n, p in model.named_parameters() if n not in matrices]
    adamw = torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for step in range(steps):
        model.zero_grad()
        model(*draw(step)).backward()
        adamw.step()
        for name, weight in matrices.items():
            momenta[name] = 0.95 * momenta.get(name, 0.0) + 0.05 * weight.grad
            update = orthogonalize_all(name, 0.05 * weight.grad + 0.95 * momenta[name])
            weight.data = weight.data * (1 - LR * DECAY) - LR * update
    return {name: weight.detach() for name, weight in model.named_parameters()}, names


def train_on_grid(sizes, steps):
    """The largest distance of a weight from the plain loop's."""
    grid = Grid(**sizes)
    model = parallelize(make_model(), grid, dtype=torch.float64)
    expected, names = train_plainly(steps)
    matrices = hidden_matrices(model)
    assert sorted(matrices) == sorted(names)
    others = [p for n, p in model.named_parameters() if n not in matrices]
    parts = [rows_of_qkv(CONFIG) if name.endswith("qkv.weight") else () for name in matrices]
    groups = [{"params": list(matrices.values()), "use_muon": True, "row_parts": parts}, {"params": others}]
    optimizer = Muon(groups, lr=LR, weight_decay=DECAY, grid=grid)
    size, part = grid.size("batch"), grid.coordinate("batch")
    for step in range(steps):
        model(*(one.chunk(size)[part] for one in draw(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    distances = [(gather(p) - expected[n]).norm() / expected[n].norm() for n, p in model.named_parameters()]
    return float(max(distances))


GRIDS = [
    {"x": 2, "y": 2, "z": 2},
    {"data": 2, "x": 2, "z": 2, "expert": 2},
    {"data": 4, "z": 2, "expert": 4},
    *(
        pytest.param(grid, marks=pytest.mark.exhaustive)
        for grid in ({"data": 8}, {"z": 8}, {"x": 2, "data": 4}, {"y": 2, "z": 4}, {"data": 2, "context": 2, "z": 2})
    ),
]


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_weights_on_a_grid_are_one_ranks(ranks, sizes):
    for distance in ranks(8).run(train_on_grid, sizes, 3):
        assert distance < 1e-9


def make_wrongly():
    grid = Grid(data=dist.get_world_size())
    model = parallelize(make_model(), grid, dtype=torch.float64)
    with pytest.raises(ValueError, match="grid=grid"):
        Muon(list(hidden_matrices(model).values()))


def test_bad_input_is_refused(ranks):
    ranks(2).run(make_wrongly)
    weight = nn.Parameter(torch.ones(6, 4))
    for match, options in {
        "0.95 is usual": {"momentum": 1.0},
        "5 is usual": {"iteration": NewtonSchulz(steps=0)},
        "match_rms_adamw, original": {"adjust_lr": "none"},
    }.items():
        with pytest.raises(ValueError, match=match):
            Muon([weight], **options)
    with pytest.raises(ValueError, match="do not divide the 6 rows"):
        Muon([{"params": [weight], "use_muon": True, "row_parts": [[RowParts(0, 4, 4)]]}])
    with pytest.raises(ValueError, match="use_muon=False would do"):
        Muon([nn.Parameter(torch.ones(3))])
