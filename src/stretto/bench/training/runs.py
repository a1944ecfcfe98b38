# SPDX-License-Identifier: Apache-2.0
"""Builds training steps of Stretto and measures runs in turn, for all benches of whole training steps.

Every run trains the same GPT on the same tokens with AdamW, fp32 parameters, bf16 compute (by default) and gradients
clipped at norm 1. Torch's runs use torch's fused AdamW, Stretto's use its own AdamW, which clips in the same kernel.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.bench.harness import FAILURES, TORCH_DTYPES, empty_memory, in_one_line, peak_memory_gib, time_each_step
from stretto.bench.training.settings import TrainingWorkload
from stretto.models import GPT, GPTConfig
from stretto.optim import AdamW
from stretto.parallel import Grid, Overlap, checkpoint_activations, clip_scale, gradient_norm, parallelize

MAX_NORM = 1.0


class Stepped(NamedTuple):
    """A step's result: this rank's loss, and the global norm of the gradients before clipping."""

    loss: Tensor
    gradient_norm: Tensor


Step = Callable[[], Stepped]


class TimedWorkload(Protocol):
    """The workload that `measure` expects: global batch, tokens of a sequence, and how steps are timed."""

    @property
    def batch(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def warm_up(self) -> int: ...
    @property
    def repeats(self) -> int: ...
    @property
    def rounds(self) -> int: ...


class TrainedModel(Protocol):
    """The sizes of a batch: the model, sequences of the global batch, and tokens of each."""

    @property
    def model(self) -> GPTConfig: ...
    @property
    def batch(self) -> int: ...
    @property
    def seq_len(self) -> int: ...


@dataclass(frozen=True)
class TrainingRun:
    """One setup that trains the workload. name: in tables; build: makes its step; is_peer: not Stretto's."""

    name: str
    build: Callable[[], Step]
    is_peer: bool = False
    is_compiled: bool = False


def measure(
    runs: Sequence[TrainingRun],
    workload: TimedWorkload,
    device: torch.device,
    *,
    extra: Callable[[Step], dict[str, Any]] | None = None,
    keep: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Time every run, round by round, and return a row for each: collective, and the same on every rank.

    keep: called on rank 0 with all rows after each run, so that a job that is cut off keeps what it has measured.

    A row has name, is_peer, and either error (the reason why the run could not) or seconds (the median of each round),
    step_seconds (of each round, those of every step), step_milliseconds (of the best round), tokens_per_second_per_gpu,
    peak_memory_gib (None on a CPU), loss and gradient_norm (at the weights that a run starts from), last_loss (after as
    many steps in every run), and the columns that `extra` returns for a step.
    """
    rows: dict[str, dict[str, Any]] = {run.name: {"name": run.name, "is_peer": run.is_peer} for run in runs}
    for _, run in itertools.product(range(workload.rounds), runs):
        row = rows[run.name]
        if "error" in row:
            continue
        try:
            _measure_once(run, row, workload, device, extra)
        except FAILURES as error:
            rows[run.name] = {"name": run.name, "is_peer": run.is_peer, "error": in_one_line(error)}
        finally:
            _forget(run)
        _report(rows[run.name])
        if keep is not None and dist.get_rank() == 0:
            keep(list(rows.values()))
    return list(rows.values())


def _measure_once(
    run: TrainingRun,
    row: dict[str, Any],
    workload: TimedWorkload,
    device: torch.device,
    extra: Callable[[Step], dict[str, Any]] | None,
) -> None:
    empty_memory()  # also frees the memory of a failed run
    step = run.build()
    with _closed_afterwards(step):
        empty_memory()
        stepped = [step()]
        of_steps = time_each_step(lambda: stepped.append(step()), warm_up=workload.warm_up, repeats=workload.repeats)
        seconds = statistics.median(of_steps)
        found = {
            "step_milliseconds": seconds * 1e3,
            "tokens_per_second_per_gpu": workload.batch * workload.seq_len / seconds / dist.get_world_size(),
            "peak_memory_gib": peak_memory_gib(device),
            "loss": _mean_over_ranks(stepped[0].loss, device),
            "last_loss": _mean_over_ranks(stepped[-1].loss, device),
            "gradient_norm": float(stepped[0].gradient_norm),
        }
        if extra is not None:
            found |= extra(step)
    row.setdefault("seconds", []).append(seconds)
    row.setdefault("step_seconds", []).append(of_steps)
    if seconds == min(row["seconds"]):
        row.update(found)


@contextmanager
def _closed_afterwards(step: Step) -> Iterator[None]:
    """Close a step, also one that has failed: threads of a pipeline would keep its model alive.

    Raises the first error.
    """
    close = getattr(step, "close", None)
    try:
        yield
    except FAILURES:
        if close is not None:
            with suppress(*FAILURES):
                close()
        raise
    if close is not None:
        close()


def _forget(run: TrainingRun) -> None:
    if run.is_compiled:  # else the next runs' blocks count as recompilations, of which dynamo allows eight
        torch.compiler.reset()


def _report(row: Mapping[str, Any]) -> None:
    if dist.get_rank() == 0:
        text = f"{row['seconds'][-1] * 1e3:,.1f} ms" if "seconds" in row else row["error"]
        print(f"{row['name']}: {text}", flush=True)


def _mean_over_ranks(loss: Tensor, device: torch.device) -> float:
    """The mean over the ranks, which hold the means of equal parts of the batch, or of the whole."""
    total = loss.to(device, torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def local_batch(workload: TrainedModel, part: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one part of a fixed random batch. Raises ValueError if `parts` does not divide it."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, workload.model.vocab, (workload.batch, workload.seq_len + 1), generator=generator)
    if workload.batch % parts:
        raise ValueError(f"a batch of {workload.batch} cannot be cut into {parts} parts")
    rows = tokens.chunk(parts)[part].to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def meta_gpt(config: GPTConfig) -> GPT:
    """The model on the meta device, without weights."""
    with torch.device("meta"):
        return GPT(config)


def build_stretto(
    workload: TrainingWorkload, grid: Grid, *, overlap: Overlap | bool = True, tunes_matmuls: bool = False
) -> Step:
    """Build a training step with `stretto.parallelize`. ValueError if the grid cannot hold the model or the batch.

    The model's weights are made shard by shard, from its own seed.
    """
    tokens, targets = local_batch(workload, grid.coordinate("batch"), grid.size("batch"), grid.device)
    model = parallelize(
        meta_gpt(workload.model),
        grid,
        dtype=TORCH_DTYPES[workload.dtype],
        reduce_dtype=torch.float32 if workload.reduce_fp32 else None,
        overlap=overlap,
        tune_matmuls=tunes_matmuls,
    )
    if workload.checkpointing:
        checkpoint_activations(model)
    optimizer = AdamW(model.parameters(), lr=workload.learning_rate)

    def step() -> Stepped:
        loss = model(tokens, targets)
        loss.backward()
        norm = gradient_norm(model.parameters(), grid)
        optimizer.step(scale=clip_scale(norm, MAX_NORM))
        optimizer.zero_grad()
        return Stepped(loss.detach(), norm)

    return step
