# SPDX-License-Identifier: Apache-2.0
"""`python -m lab parity`: the same training on every grid, compared with plain PyTorch on one rank.

The reference is the model as it is, trained by a plain loop. Compared after five steps, as norm of the difference over
norm: losses, gradient norms, and the worst weight. fp64 with AdamW, fp32 with SGD (AdamW turns rounding noise of
gradients that are zero in exact arithmetic into steps).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.bench.harness import Column, print_table, run_ranks, write_result
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
COLUMNS = (
    Column("model", "model"),
    Column("grid", "(data, x, y, z)"),
    *(
        Column(f"{kind}_{what}", f"{kind} {what}", "{:.0e}")
        for kind in ("fp64", "fp32")
        for what in ("loss", "norm", "weights")
    ),
)


@dataclass(frozen=True)
class Trained:
    """The result of five steps: losses, gradient norms, weights by name."""

    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]


def bench_parity(most_ranks: int, out: Path) -> list[dict[str, Any]]:
    """Run every factorization of 1, 2, 4 ... `most_ranks` ranks, print the table, write parity.json to `out`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fp64 parity is a property of the algorithm; the CPU is exact enough
    rows: list[dict[str, Any]] = []
    ranks = 1
    while ranks <= most_ranks:
        rows += run_ranks(ranks, _compare_all, ranks)
        ranks *= 2
    print_table("Difference from one rank after five steps", COLUMNS, rows)
    write_result(out, "parity", COLUMNS, rows, steps=STEPS, batch=BATCH, seq_len=SEQ_LEN)
    return rows


def _compare_all(ranks: int) -> list[dict[str, Any]]:
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
                row[f"{kind}_weights"] = max(
                    _difference(weight, reference.weights[key]) for key, weight in trained.weights.items()
                )
            rows.append(row)
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
