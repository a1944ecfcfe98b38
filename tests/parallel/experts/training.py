# SPDX-License-Identifier: Apache-2.0
"""Trains GPTs with experts on grids, to be compared with the plain training of tests/parallel/training.py."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn

from stretto.axes import check_sizes
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, clip_grad_norm_, gather, layout_of, parallelize
from tests.parallel.pipeline.training import Run as PipelineRun
from tests.parallel.pipeline.training import train_by_pipeline
from tests.parallel.training import Case, Precision, Trace, batches, build, distance, my_rows, plain_loss, train_plainly

EXACT = Precision(torch.float64, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1), 1e-10)


def gpt(**options: Any) -> GPTConfig:
    """A small GPT with 8 experts in each block, and a vocabulary, 61, that no axis divides."""
    small = {"layers": 2, "hidden": 32, "heads": 8, "vocab": 61, "max_seq_len": 16, "num_experts": 8, "expert_ffn": 24}
    return GPTConfig(**{**small, "activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", **options})


CASES = {
    # Everything that a router may add: losses, a shared expert with a gate.
    "top-2": Case(
        GPT,
        (gpt(balance="switch", balance_loss=0.5, z_loss=0.1, shared_ffn=16, shared_expert_gate=True),),
        has_ignored_targets=True,
    ),
    "top-1 on alternate layers": Case(
        GPT, (gpt(layers=4, activation="gelu", experts_per_token=1, moe_layers="every:2", balance="none"),)
    ),
}
OTHER_CASES = {
    "6 experts": Case(GPT, (gpt(num_experts=6, balance="none"),)),
    # The switch loss of a micro-batch is no part of that of the batch; the z-loss is.
    "top-2 in micro-batches": Case(
        GPT, (gpt(balance="none", z_loss=0.1, shared_ffn=16, shared_expert_gate=True),), has_ignored_targets=True
    ),
    # GPUs and CPUs compute other angles of rotary positions, which are fp32.
    "top-2 in micro-batches, learned positions": Case(
        GPT,
        (gpt(balance="none", z_loss=0.1, shared_ffn=16, shared_expert_gate=True, positions="learned"),),
        has_ignored_targets=True,
    ),
}


@dataclass(frozen=True)
class Run:
    """A grid, and options of parallelize. schedule: of the pipeline, if there is one."""

    grid: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    case: str = "top-2"
    schedule: str = "1f1b"

    def __str__(self) -> str:
        sizes = [f"{axis}{size}" for axis, size in self.grid.items() if size != 1]
        schedule = [self.schedule] * (self.grid.get("pipe", 1) > 1)
        options = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([*sizes, *schedule, *options, self.case[:5]])

    @property
    def ranks(self) -> int:
        return check_sizes(self.grid).ranks


def train(run: Run, case: Case, precision: Precision) -> Trace:
    """Train on this rank of the grid; the weights that this rank has come back gathered."""
    grid = Grid(**run.grid)
    if grid.size("pipe") > 1:
        trace, _ = train_by_pipeline(PipelineRun(run.grid, run.schedule, options=run.options), case, precision, grid)
        return trace
    model = parallelize(build(case, precision), grid, **run.options)
    parameters = list(model.parameters())
    shards = [nn.Parameter(parameter.to_local().detach()) for parameter in parameters]
    optimizer, rows = precision.make_optimizer(shards), my_rows(grid, case.batch)
    losses, grad_norms = [], []
    for tokens, targets in batches(case):
        model.zero_grad()
        loss = model(tokens[rows], targets[rows])
        loss.backward()
        losses.append(loss.item())
        grad_norms.append(clip_grad_norm_(parameters, case.max_norm, grid).item())
        for shard, parameter in zip(shards, parameters, strict=True):
            shard.grad = parameter.grad.to_local()
        optimizer.step()
    weights = {name: gather(parameter).detach() for name, parameter in model.named_parameters()}
    return Trace(tuple(losses), tuple(grad_norms), weights)


def disagreements(run: Run, case: Case, expected: Trace) -> dict[str, float]:
    """Return what this rank sees otherwise than the reference: norm(difference) / norm(reference), by name."""
    seen = train(run, case, EXACT)
    steps = range(len(expected.losses))
    found = {f"loss of step {step}": distance(seen.losses[step], expected.losses[step]) for step in steps}
    found |= {f"norm of step {step}": distance(seen.grad_norms[step], expected.grad_norms[step]) for step in steps}
    found |= {name: distance(weight, expected.weights[name]) for name, weight in seen.weights.items()}
    wrong = {name: value for name, value in found.items() if not value <= EXACT.tolerance}
    return wrong if seen.weights else {"weights": 0.0}


def gradient_distances(run: Run, case: Case) -> dict[str, float]:
    """Return how far the loss and each gradient of the first batch are from those of one rank."""
    tokens, targets = next(batches(case))
    plain = build(case, EXACT)
    loss = plain_loss(case, plain, tokens, targets)
    loss.backward()
    grid = Grid(**run.grid)
    model, rows = parallelize(build(case, EXACT), grid, **run.options), my_rows(grid, case.batch)
    own = model(tokens[rows], targets[rows])
    own.backward()
    expected = dict(plain.named_parameters())
    found = {"loss": distance(own.detach(), loss.detach())}
    for name, parameter in model.named_parameters():
        ours, theirs = gather(parameter.grad, layout_of(parameter)), expected[name].grad
        found[name] = distance(ours, theirs)
    return found


def case_of(run: Run) -> Case:
    return (CASES | OTHER_CASES)[run.case]


def expected_of(run: Run) -> Trace:
    return train_plainly(case_of(run), EXACT)


def every_run(ranks: int) -> list[Run]:
    """Every grid of so many ranks with every expert that it holds, cut and fold, with and without dropped duplicates
    (where x has any) and kept communication; the two models, and other options, are dealt out in turn."""
    others: list[dict[str, Any]] = [{}, {"shard_sequence": True}, {"reshard": "after_forward"}]
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    runs: list[Run] = []
    for pipe, data, x, y, z in product((1, 2), divisors, divisors, divisors, divisors):
        if pipe * data * x * y * z != ranks:
            continue
        sizes = {"pipe": pipe, "data": data, "x": x, "y": y, "z": z}
        cases = ["top-2" if pipe == 1 else "top-2 in micro-batches", "top-1 on alternate layers"]
        experts = [{"expert": n} for n in divisors if data * z % n == 0]
        experts += [{"expert": x * n, "expert_tensor": "fold"} for n in divisors if data * z % n == 0] if x > 1 else []
        for grid in experts:
            is_cut = x > 1 and grid["expert"] > 1 and len(grid) == 1
            modes = [{"drop_duplicates": drops} for drops in ((True, False) if is_cut else (True,))]
            for mode, recompute in product(modes, ("none", "communication")):
                options = {**mode, "recompute": recompute, **others[len(runs) // 2 % len(others)]}
                case = cases[(len(runs) + len(runs) // 2) % 2]
                runs.append(Run(sizes | grid, options, case))
    return [run for run in runs if run.grid["expert"] <= 8]


def every_run_of_context(ranks: int) -> list[Run]:
    """Every grid of so many ranks that cuts sequences, without y, with every expert that it holds; modes of
    recomputation, and sharded sequences, are dealt out in turn."""
    modes = ("none", "host", "communication", "full", "products")
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    runs: list[Run] = []
    for pipe, context, data, x, z in product((1, 2), sizes[1:], sizes, sizes, sizes):
        if pipe * context * data * x * z != ranks:
            continue
        for expert in (n for n in sizes if data * z % n == 0):
            grid = {"pipe": pipe, "context": context, "data": data, "x": x, "z": z, "expert": expert}
            options = {"recompute": modes[len(runs) % len(modes)], "shard_sequence": x > 1 and len(runs) % 2 == 0}
            runs.append(Run(grid, options, "top-2" if pipe == 1 else "top-2 in micro-batches"))
    return runs
