# SPDX-License-Identifier: Apache-2.0
"""`python -m lab recompute`: steps of recomputation modes over slow links between CPU ranks, and predictions.

Recomputing whole blocks ("full") sends activations again; "communication" keeps the results of collectives. Ranks are
processes of one machine, and a link's bandwidth is emulated by waiting: each collective begins after the time that a
ring algorithm's bytes take over it. Nothing is overlapped (overlap=False), so a step is predicted to be shorter by the
bytes that recomputation no longer sends, over the link's rate. It also saves products that are not computed again; the
rows without a link show them, and a second prediction adds them.
"""

import itertools
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from lab.harness import Bench, column
from lab.training.steps import cluster_of_a_byte_a_second, whole_gpt
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Option, Repeats, Rounds, SeqLen, WarmUp
from stretto.bench.training.runs import Step, Stepped, TrainingRun, local_batch, measure
from stretto.execution import Recomputation
from stretto.models import GPTConfig
from stretto.parallel import Grid, clip_grad_norm_, count_collectives, parallelize
from stretto.parallel.comm.counting import CollectiveCall
from stretto.planner import predict


@dataclass(frozen=True)
class RecomputeSetting:
    """Settings of `python -m lab recompute`, over which links. Raises ValueError for settings that cannot work."""

    ranks: Annotated[int, Option("Processes of the CPU, along x.", least=2)] = 2
    modes: Annotated[tuple[str, ...], Option("Modes of recomputation in addition to full, with commas.")] = (
        "communication",
    )
    links: Annotated[tuple[int, ...], Option("Bandwidths of links in MB/s, with commas.")] = (10, 3)
    layers: Annotated[int, Option("Transformer blocks.", least=1)] = 4
    hidden: Annotated[int, Option("Width of a token's vector; heads are of 64.", least=1)] = 128
    batch: Annotated[int, Option("Sequences of a step.", least=1)] = 4
    seq_len: SeqLen = 128
    warm_up: WarmUp = 1
    repeats: Repeats = 5
    rounds: Rounds = 3

    def __post_init__(self) -> None:
        if self.hidden % 64 or self.hidden // 64 % self.ranks:
            raise ValueError(
                f"hidden is {self.hidden}, but must be 64 times a number of heads that the {self.ranks} ranks divide; "
                f"{64 * self.ranks} would do"
            )
        object.__setattr__(self, "modes", tuple(dict.fromkeys(("full", *self.modes))))
        for mode in self.modes:
            Recomputation.parse(mode).check_blocks(self.layers)

    @property
    def model(self) -> GPTConfig:
        """The GPT that is trained."""
        return GPTConfig(self.layers, self.hidden, self.hidden // 64, vocab=256, max_seq_len=self.seq_len)


def run_modes(setting: RecomputeSetting) -> list[dict[str, Any]]:
    """Measure each mode over each link, on processes of the CPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the links are between processes of the CPU
    return compare(setting, run_ranks(setting.ranks, measure_modes, setting))


@dataclass(frozen=True)
class Row:
    """A mode of recomputation over one link: measured and predicted."""

    link_megabytes: float = column("link (MB/s)", "{:g}")
    recompute: str = column("recompute")
    sent_megabytes: float = column("sent (MB)", "{:.2f}")
    predicted_megabytes: float = column("predicted (MB)", "{:.2f}")
    kept_megabytes: float = column("kept, predicted (MB)", "{:.2f}")
    step_milliseconds: float = column("step (ms)", "{:.1f}")
    saved_milliseconds: float = column("less than full (ms)", "{:.1f}")
    predicted_milliseconds: float = column("by removed bytes (ms)", "{:.1f}")
    with_computation_milliseconds: float = column("and by computation (ms)", "{:.1f}")
    loss: float = column("first loss", "{:.5f}")
    gradient_norm: float = column("gradient norm", "{:.5f}")


def measure_modes(setting: RecomputeSetting) -> list[dict[str, Any]]:
    """The job of each rank: a row for each link (None waits for nothing) and mode, which are measured in turn."""
    grid = Grid(x=setting.ranks, device="cpu")
    cases = list(itertools.product((None, *setting.links), setting.modes))
    sent: dict[str, float] = {}
    runs = [
        TrainingRun(f"{mode}, {link or 'no'} MB/s", partial(_build, setting, grid, mode, link, sent))
        for link, mode in cases
    ]
    return [
        {"link_megabytes": link, "recompute": mode, "sent_megabytes": sent.get(mode)} | row
        for (link, mode), row in zip(cases, measure(runs, setting, grid.device), strict=True)
    ]


def _build(setting: RecomputeSetting, grid: Grid, mode: str, link: int | None, sent: dict[str, float]) -> Step:
    tokens, targets = local_batch(setting, 0, 1, grid.device)
    model = parallelize(whole_gpt(setting.model, grid.device), grid, overlap=False, recompute=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def wait(call: CollectiveCall) -> None:
        if link is not None:
            time.sleep(call.bytes_sent / (link * 1e6))

    def step() -> Stepped:
        with count_collectives(grid, before=wait) as counts:
            loss = model(tokens, targets)
            loss.backward()
        sent[mode] = counts.bytes_by_axis().get("x", 0) / 1e6
        norm = clip_grad_norm_(model.parameters(), 1.0, grid)
        optimizer.step()
        optimizer.zero_grad()
        return Stepped(loss.detach(), norm)

    return step


def compare(setting: RecomputeSetting, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the planner's prediction, and by how much each step is shorter than full's over the same link."""
    full = {row["link_megabytes"]: row for row in rows if row["recompute"] == "full" and "error" not in row}
    predicted = {mode: _predict(setting, mode) for mode in setting.modes}
    computation = {  # time of products that are not computed again, by the rows without a link
        row["recompute"]: full[None]["step_milliseconds"] - row["step_milliseconds"]
        for row in rows
        if row["link_megabytes"] is None and None in full and "error" not in row
    }
    for row in rows:
        link, mode = row["link_megabytes"], row["recompute"]
        sent, kept = predicted[mode]
        row["predicted_megabytes"], row["kept_megabytes"] = sent / 1e6, kept / 1e6
        if mode == "full" or link not in full or "error" in row:
            continue
        row["saved_milliseconds"] = full[link]["step_milliseconds"] - row["step_milliseconds"]
        if link is not None:
            row["predicted_milliseconds"] = (predicted["full"][0] - sent) / (link * 1e6) * 1e3
            row["with_computation_milliseconds"] = row["predicted_milliseconds"] + computation.get(mode, 0.0)
    return rows


def _predict(setting: RecomputeSetting, mode: str) -> tuple[float, float]:
    """Bytes that a rank sends over x in a step, and that its blocks keep between the passes."""
    plan = predict(
        setting.model,
        cluster_of_a_byte_a_second(setting.ranks),
        grid={"x": setting.ranks},
        batch=setting.batch,
        seq_len=setting.seq_len,
        dtype="fp32",
        optimizer="sgd",
        overlaps=False,
        recompute=mode,
    )
    return plan.communication["all_reduce_x"], plan.kept_activations


BENCH = Bench(
    "recompute",
    "Activation checkpointing with and without repeated communication, over slow links between CPU processes.",
    RecomputeSetting,
    run_modes,
    Row,
    title=lambda setting: f"Recomputation on {setting.ranks} CPU ranks of x, links made by waiting",
)
