# SPDX-License-Identifier: Apache-2.0
"""Trains a model by a Pipeline, to be compared with the plain training of tests/parallel/training.py."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stretto.execution import StageOptions
from stretto.parallel import Grid, Pipeline, clip_grad_norm_, gather, parallelize
from stretto.schedules.schedule import place_in_loops, place_in_v
from tests.parallel.training import Case, Precision, Trace, batches, build, distance, my_rows, plain_loss, train_plainly

STAGES = {
    "interleaved": StageOptions(virtual_stages=2),
    "zb-v": StageOptions(virtual_stages=2, placement="v"),
    "dualpipe-v": StageOptions(virtual_stages=2, placement="v"),
}


@dataclass(frozen=True)
class Run:
    """One way to train a case by a pipeline. pipeline, options: of Pipeline and of parallelize."""

    grid: dict[str, Any]
    schedule: str = "1f1b"
    micro_batch_size: int = 1
    pipeline: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = "-".join(f"{axis}{size}" for axis, size in self.grid.items() if size != 1)
        others = "-".join(f"{name}={value}" for name, value in {**self.pipeline, **self.options}.items())
        return "-".join(filter(None, [self.schedule, sizes, f"rows{self.micro_batch_size}", others]))

    @property
    def stages(self) -> StageOptions:
        return STAGES.get(self.schedule, StageOptions())

    def stages_of(self, pipe_rank: int) -> list[int]:
        """The stages that a rank of pipe has."""
        pipe = self.grid["pipe"]
        placed = place_in_v(pipe) if self.stages.placement == "v" else place_in_loops(pipe, self.stages.virtual_stages)
        return [stage for stage, rank in enumerate(placed) if rank == pipe_rank]


def train_by_pipeline(run: Run, case: Case, precision: Precision, grid: Grid) -> tuple[Trace, float]:
    """Train on this rank's stages; returns the trace, with the weights that this rank has, and an evaluation's loss."""
    options = {"stages": run.stages, "reshard": case.reshard, "shard_sequence": case.shards_sequence}
    model = parallelize(build(case, precision), grid, **options | run.options)
    parameters = list(model.parameters())
    shards = [nn.Parameter(parameter.to_local().detach()) for parameter in parameters]
    optimizer = precision.make_optimizer(shards)
    rows = my_rows(grid, case.batch)
    losses, grad_norms = [], []
    with Pipeline(
        model, grid, schedule=run.schedule, micro_batch_size=run.micro_batch_size, **run.pipeline
    ) as pipeline:
        for batch in batches(case):
            model.zero_grad()
            inputs = arguments(case, *(tensor[rows].to(grid.device) for tensor in batch))
            losses.append(pipeline.step(**inputs).item())
            norm = clip_grad_norm_(parameters, case.max_norm, grid)
            for shard, parameter in zip(shards, parameters, strict=True):
                shard.grad = parameter.grad.to_local()
            optimizer.step()
            grad_norms.append(norm.item())
        evaluated = pipeline.evaluate(**inputs).item()
    weights = {name: gather(parameter).detach().cpu() for name, parameter in model.named_parameters()}
    return Trace(tuple(losses), tuple(grad_norms), weights), evaluated


def arguments(case: Case, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """A batch by the names that the model's forward has for it."""
    names = ("input_ids", "labels") if case.is_hugging_face else ("tokens", "targets")
    return dict(zip(names, (tokens, targets), strict=True))


@dataclass(frozen=True)
class Expected:
    """Results of plain training, and the loss of its last batch after it."""

    trace: Trace
    evaluated: float


def expect(case: Case, precision: Precision) -> Expected:
    """Train plainly, and evaluate the last batch."""
    trace, model = train_plainly(case, precision), build(case, precision)
    model.load_state_dict(trace.weights, strict=False)
    with torch.no_grad():
        return Expected(trace, plain_loss(case, model, *list(batches(case))[-1]).item())


@dataclass(frozen=True)
class Found:
    """Differences that a rank saw from the reference, as norm(difference) / norm(reference), and the names it has."""

    far: dict[str, float | str]
    names: tuple[str, ...]


def compare(run: Run, case: Case, precision: Precision, expected: Expected, grid: Grid | None = None) -> Found:
    grid = grid or Grid(**run.grid)
    seen, evaluated = train_by_pipeline(run, case, precision, grid)
    plain = expected.trace
    if unknown := [name for name in seen.weights if name not in plain.weights]:
        return Found({"parameter names": f"{unknown} are not the model's"}, tuple(seen.weights))
    pairs = {
        **_pairs("loss", seen.losses, plain.losses),
        **_pairs("gradient norm", seen.grad_norms, plain.grad_norms),
        "evaluation": (evaluated, expected.evaluated),
        **{name: (seen.weights[name], plain.weights[name]) for name in seen.weights},
    }
    found = {name: distance(ours, theirs) for name, (ours, theirs) in pairs.items()}
    return Found({name: far for name, far in found.items() if not far <= precision.tolerance}, tuple(seen.weights))


def _pairs(what: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, tuple[Any, Any]]:
    return {f"{what} of step {step}": pair for step, pair in enumerate(zip(ours, theirs, strict=True))}


def compare_all(runs: Sequence[tuple[Run, Case, Precision, Expected]]) -> list[Found]:
    grid = Grid(**runs[0][0].grid)
    return [compare(run, case, precision, expected, grid) for run, case, precision, expected in runs]


def complaints(founds: Sequence[Found], expected: Expected) -> Iterator[str]:
    """Return what is wrong in what all ranks saw: differences, and parameters that no rank has."""
    for rank, found in enumerate(founds):
        if found.far or not found.names:
            yield f"rank {rank}: {found.far or 'no parameters'}"
    if missing := set(expected.trace.weights) - {name for found in founds for name in found.names}:
        yield f"no rank has {sorted(missing)}"
