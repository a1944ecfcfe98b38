# SPDX-License-Identifier: Apache-2.0
"""`python -m lab parity`: the same training on every grid, compared with plain PyTorch on one rank.

The reference is the model as it is, trained by a plain loop. Compared after five steps, as norm of the difference over
norm: losses, gradient norms, and the worst weight. fp64 with AdamW, fp32 with SGD (AdamW turns rounding noise of
gradients that are zero in exact arithmetic into steps).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.harness import Bench, column
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Option
from stretto.bench.training.settings import grids_of
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, clip_grad_norm_, gather, parallelize

STEPS, BATCH, SEQ_LEN = 5, 8, 16
MODELS = {
    "GPT (learned positions, GELU, LayerNorm, tied)": GPTConfig(
        layers=2, hidden=32, heads=8, vocab=61, max_seq_len=SEQ_LEN
    ),
    "GPT (rotary, SwiGLU, RMSNorm, grouped-query)": GPTConfig(
        layers=2,
        hidden=64,
        heads=16,
        kv_heads=8,
        vocab=61,
        max_seq_len=SEQ_LEN,
        positions="rotary",
        activation="swiglu",
        norm="rmsnorm",
        bias=False,
        tie_embeddings=False,
    ),
}


@dataclass(frozen=True)
class ParitySetting:
    """On how many ranks `python -m lab parity` trains."""

    ranks: Annotated[int, Option("Largest number of ranks; its powers of two below are run too.", least=1)] = 8


@dataclass(frozen=True)
class Row:
    """Differences of a grid from one rank, in fp64 and fp32: losses, gradient norms, the worst weight."""

    model: str = column("model")
    grid: str = column("(data, x, y, z)")
    fp64_loss: float = column("fp64 loss", "{:.0e}")
    fp64_norm: float = column("fp64 norm", "{:.0e}")
    fp64_weights: float = column("fp64 weights", "{:.0e}")
    fp32_loss: float = column("fp32 loss", "{:.0e}")
    fp32_norm: float = column("fp32 norm", "{:.0e}")
    fp32_weights: float = column("fp32 weights", "{:.0e}")


@dataclass(frozen=True)
class Trained:
    """The result of five steps: losses, gradient norms, weights by name."""

    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]


def compare_grids(setting: ParitySetting) -> Iterator[Row]:
    """Run every factorization of 1, 2, 4 ... ranks."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fp64 parity is a property of the algorithm; the CPU is exact enough
    ranks = 1
    while ranks <= setting.ranks:
        yield from run_ranks(ranks, _compare_all, ranks)
        ranks *= 2


def _compare_all(ranks: int) -> list[Row]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = []
    for name, config in MODELS.items():
        references = {dtype: _train(_model(config, dtype), None) for dtype in (torch.float64, torch.float32)}
        for sizes in grids_of(ranks):
            row: dict[str, Any] = {"model": name, "grid": str(tuple(sizes.values()))}
            for dtype, reference in references.items():
                kind = "fp64" if dtype == torch.float64 else "fp32"
                grid = Grid(sizes["data"], sizes["x"], sizes["y"], sizes["z"])
                trained = _train(parallelize(_model(config, dtype), grid), grid)
                row[f"{kind}_loss"] = _difference(trained.losses, reference.losses)
                row[f"{kind}_norm"] = _difference(trained.norms, reference.norms)
                pairs = [(weight, reference.weights[key]) for key, weight in trained.weights.items()]
                row[f"{kind}_weights"] = torch.tensor(list(starmap(_difference, pairs))).max().item()
            rows.append(Row(**row))
    return rows


def _model(config: GPTConfig, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return GPT(config).to(dtype)


def _train(model: nn.Module, grid: Grid | None) -> Trained:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 61, (BATCH, SEQ_LEN + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100  # uneven over the ranks
    if grid is not None:
        part, parts = grid.coordinate("batch"), grid.size("batch")
        inputs, targets = inputs.chunk(parts)[part], targets.chunk(parts)[part]
    is_exact = next(model.parameters()).dtype == torch.float64
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3) if is_exact else torch.optim.SGD(parameters, lr=0.1)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0) if grid is None else clip_grad_norm_(parameters, 1.0, grid)
        optimizer.step()
        losses.append(loss.detach().double())
        norms.append(norm.double())
    weights = {name: gather(parameter).detach() for name, parameter in model.named_parameters()}
    return Trained(torch.stack(losses), torch.stack(norms), weights)


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


BENCH = Bench(
    "parity",
    "Five steps on every grid of 1, 2, 4 and more ranks, compared with plain PyTorch on one (CPU, fp64 and fp32).",
    ParitySetting,
    compare_grids,
    Row,
    title="Difference from one rank after five steps",
    about=lambda setting: {"steps": STEPS, "batch": BATCH, "seq_len": SEQ_LEN},
)
