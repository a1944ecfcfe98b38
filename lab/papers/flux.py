# SPDX-License-Identifier: Apache-2.0
"""Section 5.2 of Flux, GPT-3 175B and Llama-2 70B on three clusters: planned, and why overlap gains what it does.

Shares of tensor parallel communication (figure 1) are of the planner's step that overlaps nothing. What hiding them
gains is computed from them by the paper's own mean overlap efficiencies (section 6), and by hiding all; training's also
by the planner's overlapped step. The paper does not give training's batch, nor how much the cache holds in decoding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lab.harness import ANY_CPU, Measured, column
from lab.papers import Compared, read_paper
from stretto.cluster import Cluster
from stretto.planner import predict
from stretto.planner.inference import plan_inference

BATCH, SEQ_LEN = 256, 2048  # sequences a step, each a micro-batch: assumed
CONTEXT = 2048  # cached tokens of a request that decodes: assumed, the prompt's


def _paper() -> dict[str, Any]:
    return read_paper("flux")["section-5-2"]


@dataclass(frozen=True)
class OverlappedRow:
    """A model on a cluster in one phase: the share of communication over x, and the speed-up by hiding it."""

    cluster: str = column("cluster")
    model: str = column("model")
    phase: str = column("phase")
    seconds: float = column("planned (s)", "{:.3g}")
    share: float = column("communication", "{:.0%}")
    published_share: str | None = column("published")
    efficiency: float = column("speed-up at the paper's overlap efficiency", "{:.2f}")
    hidden: float = column("if all were hidden", "{:.2f}")
    overlapped: float | None = column("by our overlapped plan", "{:.2f}")
    published: float = column("published, up to", "{:.2f}")


def study_flux(clusters: Sequence[str] = tuple(_paper()["clusters"])) -> Iterator[Measured | Compared]:
    """Plan training on 128 GPUs and inference on 8, on each cluster, without overlap and with it."""
    rows = [row for cluster in clusters for model in _paper()["models"] for row in _phases(cluster, model)]
    about = {"machine": ANY_CPU, "batch": BATCH, "seq_len": SEQ_LEN, "context": CONTEXT}
    yield Measured(rows, about, name="published-overlap", title="Flux, section 5.2, planned", row=OverlappedRow)
    for row in rows:
        run = f"{row.model} on {row.cluster}, {row.phase}"
        if row.published_share is not None:
            yield Compared("Flux", "figure 1, section 6", run, "communication", row.published_share, row.share)
        yield Compared("Flux", "section 5.2", run, "speed-up", f"up to {row.published:.2f}", row.efficiency)


def _phases(cluster: str, model: str) -> Iterator[OverlappedRow]:
    plain, overlapped = (
        predict(
            model,
            cluster,
            grid=_paper()["training"]["grid"],
            batch=BATCH,
            seq_len=SEQ_LEN,
            micro_batch=1,
            recompute="full",
            overlaps=overlaps,
        )
        for overlaps in (False, True)
    )
    share = plain.exposed["x"] / plain.step_time
    yield _row(cluster, model, "training", plain.step_time, share, plain.step_time / overlapped.step_time)
    inference = _paper()["inference"]
    for batch in inference["batches"]:
        prompts, gpus = (inference["tokens"],), inference["gpus"]
        machine = Cluster.preset(cluster)
        plans = plan_inference(model, machine, prompts=prompts, contexts=(CONTEXT,), batch=batch, gpus=gpus)
        plan = next(each for each in plans if each.grid["x"] == gpus)
        for phase, took, times in (("prefill", plan.first_token, inference["prompts"]), ("decoding", plan.token, 1)):
            if phase == "decoding" or batch == inference["batches"][0]:
                name = f"{phase} of {batch}" if phase == "decoding" else f"{phase} of {times} x {inference['tokens']}"
                yield _row(cluster, model, name, took.total * times, took.communication / took.total)


def _row(
    cluster: str, model: str, phase: str, seconds: float, share: float, overlapped: float | None = None
) -> OverlappedRow:
    kind, text = phase.split()[0], read_paper("flux")["section-6"]
    return OverlappedRow(
        cluster,
        model,
        phase,
        seconds,
        share,
        text["shares"].get(cluster, {}).get(kind),
        efficiency=1 / (1 - text["overlap_efficiency"][cluster] * share),
        hidden=1 / (1 - share),
        overlapped=overlapped,
        published=_paper()["speed-ups"][cluster][kind],
    )
