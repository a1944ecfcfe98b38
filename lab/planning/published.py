# SPDX-License-Identifier: Apache-2.0
"""`python -m lab published`: plans for each run of Table 5.2 of Singh's dissertation, with its measured FLOP/s."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from lab.harness import Bench, column
from lab.papers import read_paper
from stretto.bench.settings import Option, require_least
from stretto.cluster import Cluster, name_grid
from stretto.models import GPTConfig
from stretto.planner import plan

# The text does not give them; every run is assumed to have a global batch of 16.8 million tokens.
BATCH, SEQ_LEN = 8192, 2048


@dataclass(frozen=True)
class PublishedRun:
    """A row of Table 5.2."""

    cluster: str
    gpus: int
    model: str
    petaflops: float


RUNS = tuple(PublishedRun(*run) for run in read_paper("singh")["table-5-2"]["runs"])


@dataclass(frozen=True)
class PublishedSetting:
    """The global batch that `python -m lab published` assumes."""

    batch: Annotated[int, Option("Global batch, in sequences of 2048 tokens.")] = BATCH

    def __post_init__(self) -> None:
        require_least(1, batch=self.batch)


@dataclass(frozen=True)
class Row:
    """Plans of one run of Table 5.2, beside its published speed."""

    cluster: str = column("machine")
    gpus: int = column("GPUs", "{:,}")
    model: str = column("model")
    paper_grid: str = column("best grid, paper's model")
    paper_seconds: float = column("its communication (s)", "{:.3g}")
    full_grid: str = column("best grid, full model")
    full_seconds: float = column("its step (s)", "{:.3g}")
    exposed_seconds: float = column("of it exposed (s)", "{:.3g}")
    predicted_petaflops: float = column("predicted PFLOP/s", "{:,.1f}")
    petaflops: float = column("published PFLOP/s", "{:,.1f}")


def plan_runs(setting: PublishedSetting) -> Iterator[Row]:
    """Plan every run with both cost models."""
    for run in RUNS:
        yield plan_run(run, setting.batch)


def plan_run(run: PublishedRun, batch: int) -> Row:
    """Plan a run with both cost models."""
    cluster = Cluster.preset(run.cluster)
    # The paper's runs recompute activations.
    paper, full = (
        plan(
            paper_model(run.model),
            cluster,
            gpus=run.gpus,
            batch=batch,
            seq_len=SEQ_LEN,
            cost=cost,
            recompute="full",
        )[0]
        for cost in ("paper", "full")
    )
    return Row(
        cluster=run.cluster,
        gpus=run.gpus,
        model=run.model,
        paper_grid=name_grid(paper.grid),
        paper_seconds=paper.step_time,
        full_grid=name_grid(full.grid),
        full_seconds=full.step_time,
        exposed_seconds=sum(full.exposed.values()),
        predicted_petaflops=model_flops(GPTConfig.preset(run.model), batch) / full.step_time / 1e15,
        petaflops=run.petaflops,
    )


def paper_model(name: str) -> GPTConfig:
    """A preset as the paper trained it: with dropout, so that a block that is recomputed is computed to its end."""
    return replace(GPTConfig.preset(name), dropout=0.1)


def model_flops(model: GPTConfig, batch: int) -> float:
    """Narayanan et al.'s model FLOPs of a step, including the recomputed forward pass (section 5.2.3)."""
    layers, hidden = model.layers, model.hidden
    return (
        96 * batch * SEQ_LEN * layers * hidden**2 * (1 + SEQ_LEN / (6 * hidden) + model.vocab / (16 * layers * hidden))
    )


BENCH = Bench(
    "published",
    "Plans for every run of Singh's dissertation (Table 5.2), compared with the published FLOP/s (needs no GPU).",
    PublishedSetting,
    plan_runs,
    Row,
    title=lambda setting: f"Table 5.2's runs, {setting.batch} sequences of {SEQ_LEN} tokens",
    about=lambda setting: {"batch": setting.batch, "seq_len": SEQ_LEN},
)
