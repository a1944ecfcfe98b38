# SPDX-License-Identifier: Apache-2.0
"""Chapter 3 of Singh's dissertation, pipelines on Summit: plans for its runs, and the measured results.

The bench writes two tables. The first varies the number of stages of a model of 12B parameters on 48
GPUs (figures 3.3 and 3.4), the second has the choices of Table 3.1 with the speeds of figure 3.7.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.papers import by_number, read_paper
from stretto.axes import GridSizes
from stretto.bench.settings import Option
from stretto.cluster import Cluster
from stretto.execution import StateOptions
from stretto.models import GPTConfig
from stretto.planner import GridPlan, plan, predict
from stretto.planner.communication import bandwidth
from stretto.planner.pipeline.memory import checkpoint_interval
from stretto.planner.search_space import PredictKeywords


@dataclass(frozen=True)
class PublishedPipelinesSetting:
    """The global batch that `python -m lab published-pipelines` assumes for the runs of Table 3.1."""

    batch: Annotated[int, Option("Global batch of Table 3.1's runs, in sequences of 512 tokens.")] = 16384

    def __post_init__(self) -> None:
        if self.batch < 64 or self.batch % 64:
            near = max(64, round(self.batch / 64) * 64)
            raise ValueError(
                f"--batch is {self.batch}, which 8 replicas with micro-batches of 8 do not divide; {near} would do"
            )


def plan_published(setting: PublishedPipelinesSetting) -> Iterator[Measured]:
    """Plan the figures' stages, then the choices of Table 3.1."""
    title = f"12B parameters on 48 GPUs of Summit, {FIGURES_BATCH} sequences"
    figures = [plan_stages(stages) for stages in (6, 12, 24, 48)]
    yield Measured(figures, {"batch": FIGURES_BATCH}, name="pipelines", title=title, row=StagesRow)
    yield Measured(plan_choices(setting.batch), {"batch": setting.batch}, name="pipeline-choices")


SEQ_LEN, VOCAB = 512, 51200
# Section 3.3 has 2048 sequences. The batch of section 3.4 is not stated: with 2048 sequences, 48 stages and
# micro-batches of 2 would idle a quarter of the time, but the runs reached half of the peak.
FIGURES_BATCH, RUNS_BATCH = 2048, 16384
STATE = StateOptions("host")  # as there, with 16-bit weights and gradients on the GPU
# Sizes of the models, from AxoNN's paper; the dissertation only states their parameter counts. With dropout, as GPT
# models had then: blocks that are recomputed are computed to their end.
MODELS = {
    12: GPTConfig(layers=48, hidden=4512, heads=24, vocab=VOCAB, max_seq_len=SEQ_LEN, dropout=0.1),
    24: GPTConfig(layers=48, hidden=6336, heads=36, vocab=VOCAB, max_seq_len=SEQ_LEN, dropout=0.1),
    50: GPTConfig(layers=96, hidden=6528, heads=48, vocab=VOCAB, max_seq_len=SEQ_LEN, dropout=0.1),
    100: GPTConfig(layers=96, hidden=9360, heads=60, vocab=VOCAB, max_seq_len=SEQ_LEN, dropout=0.1),
}


@dataclass(frozen=True)
class PublishedChoice:
    """A row of Table 3.1. intra: G_intra, which is x here."""

    billions: int
    framework: str
    micro_batch: int
    intra: int
    inter: int
    data: int


CHOICES = tuple(PublishedChoice(*choice) for choice in read_paper("singh")["table-3-1"]["choices"])
# The pipeline and the all-reduce.
MEASURED_PHASE, MEASURED_REDUCTION = (
    by_number(read_paper("singh")["figure-3-4"][key]) for key in ("phase", "reduction")
)


@dataclass(frozen=True)
class StagesRow:
    """A number of stages: planned and published times (figures 3.3 and 3.4)."""

    stages: int = column("G_inter")
    phase_seconds: float = column("pipeline (s)", "{:.2f}")
    measured_phase_seconds: float = column("published (s)", "{:.2f}")
    paper_seconds: float = column("eq. 4.7 and 4.10 (s)", "{:.2f}")
    message_gigabytes: float = column("sent by an inner rank (GB)", "{:.1f}")
    compute_over_messages: float = column("computation / sent (s/GB)", "{:.2f}")
    reduction_seconds: float = column("all-reduce (s)", "{:.2f}")
    outer_reduction_seconds: float = column("data outermost (s)", "{:.2f}")
    measured_reduction_seconds: float = column("published (s)", "{:.2f}")


@dataclass(frozen=True)
class Row:
    """A choice of Table 3.1, and our best plans of as many GPUs."""

    billions: int = column("parameters (10^9)")
    framework: str = column("framework")
    gpus: int = column("GPUs")
    choice: str = column("choice of Table 3.1")
    step_seconds: float = column("its step (s)", "{:.0f}")
    peak_share: float = column("of the peak", "{:.0%}")
    over_axonn: float = column("over AxoNN's", "{:.2f}")
    memory_gigabytes: float = column("memory (GB)", "{:.1f}")
    best: str = column("our best, stages x data")
    best_seconds: float = column("its step (s)", "{:.0f}")
    over_best: float = column("the choice over it", "{:.3f}")
    best_of_all: str = column("our best of all grids")
    best_of_all_seconds: float = column("its step (s)", "{:.0f}")


def plan_stages(stages: int) -> dict[str, Any]:
    """Predict a step of 12B parameters on 48 GPUs with `stages` stages, micro-batches of 1 (section 3.3.2)."""
    summit, grid = Cluster.preset("summit"), GridSizes(pipe=stages, data=48 // stages)
    found = predict_pipeline(12, grid, FIGURES_BATCH, 1)
    paper = predict_pipeline(12, grid, FIGURES_BATCH, 1, cost="paper")
    # t_f + t_b of equation 4.7, of all micro-batches: computation does not depend on the number of stages.
    whole = paper.bubble / (1 - 1 / stages)
    after = found.terms["the optimizer"] + found.exposed["data"]
    sent = 2 * (FIGURES_BATCH // grid.data) * SEQ_LEN * MODELS[12].hidden * 2 * 2
    # With data outside of the stages, as the dissertation has it, all GPUs of a node share its network.
    outer = bandwidth(summit, GridSizes(x=stages, data=grid.data), "data")
    reduction = found.communication["all_reduce_data"]
    return {
        "stages": stages,
        "phase_seconds": found.step_time - after,
        "measured_phase_seconds": MEASURED_PHASE.get(stages),
        "paper_seconds": whole * FIGURES_BATCH / 48 + paper.bubble + paper.message_time,
        "message_gigabytes": sent / 1e9,
        "compute_over_messages": found.terms["computation"] / (sent / 1e9),
        "reduction_seconds": reduction,
        "outer_reduction_seconds": reduction * (found.bandwidth["data"] or outer) / outer,
        "measured_reduction_seconds": MEASURED_REDUCTION.get(stages),
        "optimizer_seconds": found.terms["the optimizer"],
        "step_seconds": found.step_time,
    }


def plan_choices(batch: int = RUNS_BATCH) -> list[dict[str, Any]]:
    """Predict Table 3.1's choices, and find the best grids of as many GPUs to compare with AxoNN's."""
    rows = []
    axonn = 0.0
    for choice in CHOICES:
        grid = GridSizes(pipe=choice.inter, data=choice.data, x=choice.intra)
        found = predict_pipeline(choice.billions, grid, batch, choice.micro_batch, choice.framework == "AxoNN")
        row = {
            "billions": choice.billions,
            "framework": choice.framework,
            "gpus": grid.ranks,
            "choice": f"{grid}, micro-batches of {choice.micro_batch}",
            "step_seconds": found.step_time,
            "peak_share": model_flops(MODELS[choice.billions], batch) / found.step_time / grid.ranks / 125e12,
            "memory_gigabytes": found.peak_memory / 1e9,
        }
        if choice.framework == "AxoNN":
            axonn = found.step_time
            of_stages, of_all = _find_best(choice.billions, grid.ranks, batch)
            row |= {
                "best": _name(of_stages),
                "best_seconds": of_stages.step_time,
                "over_best": found.step_time / of_stages.step_time,
                "best_of_all": _name(of_all),
                "best_of_all_seconds": of_all.step_time,
            }
        rows.append(row | {"over_axonn": found.step_time / axonn})
    return rows


def predict_pipeline(
    billions: int, grid: GridSizes, batch: int, micro_batch: int, is_axonn: bool = True, cost: Any = "full"
) -> GridPlan:
    model = MODELS[billions]
    interval = checkpoint_interval(model.layers, grid.pipe)
    # AxoNN's pipeline_limit is the number of stages (section 3.2.1); the others run 1F1B.
    options: PredictKeywords = {
        "schedule": "message-driven" if is_axonn else "1f1b",
        "recompute": f"every:{interval}" if interval > 1 else "full",
    }
    return predict(
        model,
        Cluster.preset("summit"),
        grid=grid,
        batch=batch,
        seq_len=SEQ_LEN,
        micro_batch=micro_batch,
        dtype="fp16",
        state=STATE,
        cost=cost,
        **options,
    )


def _find_best(billions: int, gpus: int, batch: int) -> tuple[GridPlan, GridPlan]:
    """The fastest plan of stages and data alone, and that of all grids."""
    model, summit = MODELS[billions], Cluster.preset("summit")
    options: dict[str, Any] = {"gpus": gpus, "batch": batch, "seq_len": SEQ_LEN, "dtype": "fp16", "state": STATE}
    pipes = [pipe for pipe in range(2, model.layers + 1) if gpus % pipe == 0]
    plans = [each for pipe in pipes for each in plan(model, summit, pipe=pipe, **options) if each.fits]
    alone = [each for each in plans if each.grid["pipe"] * each.grid["data"] == gpus]
    return min(alone, key=lambda each: each.step_time), min(plans, key=lambda each: each.step_time)


def _name(found: GridPlan) -> str:
    schedule = f"{found.schedule}{f' v={found.virtual_stages}' if found.schedule == 'interleaved' else ''}"
    return f"{GridSizes(**found.grid)}, {schedule}, micro-batches of {found.micro_batch}, recompute={found.recompute}"


def model_flops(model: GPTConfig, batch: int) -> float:
    """Narayanan et al.'s model FLOPs of a step, including the recomputed forward pass, as figure 3.7 counts them."""
    layers, hidden = model.layers, model.hidden
    return (
        96 * batch * SEQ_LEN * layers * hidden**2
        * (1 + SEQ_LEN / (6 * hidden) + model.vocab / (16 * layers * hidden))
    )  # fmt: skip


BENCH = Bench(
    "published-pipelines",
    "Plans for the pipelines of Singh's chapter 3 on Summit, compared with the published times (needs no GPU).",
    PublishedPipelinesSetting,
    plan_published,
    Row,
    title=lambda setting: f"Table 3.1's choices, {setting.batch} sequences",
    about=lambda setting: {"seq_len": SEQ_LEN},
)
