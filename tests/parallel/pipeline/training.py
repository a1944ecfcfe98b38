# SPDX-License-Identifier: Apache-2.0
"""Trains a model by a Pipeline, to be compared with the plain training of tests/parallel/training.py."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stretto.execution import StageOptions
from stretto.parallel import Grid, Pipeline, clip_grad_norm_, gather, parallelize
from tests.parallel.training import (
    Case,
    Precision,
    Trace,
    batches,
    build,
    distance,
    my_rows,
)

VIRTUAL = {"interleaved": (2, "loops"), "zb-v": (2, "v"), "dualpipe-v": (2, "v")}


@dataclass(frozen=True)
class Run:
    """One way to train a case by a pipeline."""

    grid: dict[str, int]
    schedule: str = "1f1b"
    micro_batch_size: int = 1
    pipeline: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    cuts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sizes = "-".join(f"{axis}{size}" for axis, size in self.grid.items() if size > 1)
        return f"{self.schedule}-{sizes}-{self.micro_batch_size}"


def train_by_pipeline(run: Run, case: Case, precision: Precision) -> tuple[Trace, float]:
    """Train on this rank's stages; returns the trace, with the weights that this rank has, and an evaluation's loss."""
    grid = Grid(**run.grid)
    virtual, placement = VIRTUAL.get(run.schedule, (1, "loops"))
    stages = StageOptions(virtual_stages=virtual, placement=placement, cuts=run.cuts)
    model = parallelize(build(case, precision), grid, stages=stages, **run.options)
    parameters = list(model.parameters())
    shards = [nn.Parameter(parameter.to_local().detach()) for parameter in parameters]
    optimizer = precision.make_optimizer(shards)
    rows = my_rows(grid, case.batch)
    losses, grad_norms = [], []
    names = ("input_ids", "labels") if case.is_hugging_face else ("tokens", "targets")
    with Pipeline(
        model, grid, schedule=run.schedule, micro_batch_size=run.micro_batch_size, **run.pipeline
    ) as pipeline:
        for batch in batches(case):
            model.zero_grad()
            inputs = {name: tensor[rows] for name, tensor in zip(names, batch, strict=True)}
            losses.append(pipeline.step(**inputs).item())
            norm = clip_grad_norm_(parameters, case.max_norm, grid)
            for shard, parameter in zip(shards, parameters, strict=True):
                shard.grad = parameter.grad.to_local()
            optimizer.step()
            grad_norms.append(norm.item())
        evaluated = pipeline.evaluate(**inputs).item()
    weights = {name: gather(parameter).detach() for name, parameter in model.named_parameters()}
    return Trace(tuple(losses), tuple(grad_norms), weights), evaluated


def disagreements(run: Run, case: Case, precision: Precision, expected: Trace) -> dict[str, float | str]:
    """What this rank sees otherwise than the reference: norm(difference) / norm(reference), by name."""
    seen, _ = train_by_pipeline(run, case, precision)
    unknown = [name for name in seen.weights if name not in expected.weights]
    if unknown or not seen.weights:
        return {"parameter names": f"{unknown} are not the model's"}
    pairs = {
        **{f"loss of step {step}": pair for step, pair in enumerate(zip(seen.losses, expected.losses, strict=True))},
        **{
            f"gradient norm of step {step}": pair
            for step, pair in enumerate(zip(seen.grad_norms, expected.grad_norms, strict=True))
        },
        **{name: (seen.weights[name], expected.weights[name]) for name in seen.weights},
    }
    found = {name: distance(ours, theirs) for name, (ours, theirs) in pairs.items()}
    return {name: value for name, value in found.items() if not value <= precision.tolerance} | {
        "names": " ".join(seen.weights)
    }
