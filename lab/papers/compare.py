# SPDX-License-Identifier: Apache-2.0
"""`python -m lab papers`: numbers that papers have published, predicted and simulated here, side by side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from lab.harness import ANY_CPU, Bench, Measured
from lab.papers import Compared
from lab.papers.collectives import plot_curves, plot_two_level_heat_maps, study_collectives
from lab.papers.dlrm import study_dlrm
from lab.papers.experts import study_experts
from lab.papers.flux import study_flux
from lab.papers.msccl import plot_simulated_msccl, study_msccl
from lab.papers.pipelines import plot_simulated_pipelines, study_pipelines
from lab.papers.training import plot_scaling, study_training
from lab.papers.zero3 import plot_zero3, study_zero3
from stretto.bench.settings import Option, require_known

PARTS = ("pipelines", "training", "collectives", "zero3", "experts", "dlrm", "msccl", "flux")
STUDIES: dict[str, Callable[[], Iterator[Measured | Compared]]] = {
    "pipelines": study_pipelines,
    "training": study_training,
    "collectives": study_collectives,
    "zero3": study_zero3,
    "experts": study_experts,
    "dlrm": study_dlrm,
    "msccl": study_msccl,
    "flux": study_flux,
}


@dataclass(frozen=True)
class PapersSetting:
    """Settings of `python -m lab papers`: parts of the papers to compare."""

    only: Annotated[tuple[str, ...], Option(", ".join(PARTS) + ", with commas.")] = PARTS

    def __post_init__(self) -> None:
        require_known("part", self.only, PARTS)


def compare_papers(setting: PapersSetting) -> Iterator[Measured | Compared]:
    """Predict and simulate the figures of each part: its own tables, and a row for each published number."""
    for part in setting.only:
        yield from STUDIES[part]()


BENCH = Bench(
    "papers",
    "Figures of papers, predicted and simulated here, and their published numbers side by side (needs no GPU).",
    PapersSetting,
    compare_papers,
    Compared,
    title="Published, predicted and simulated",
    plot={
        "simulated-pipelines": plot_simulated_pipelines,
        "simulated-scaling": plot_scaling,
        "simulated-two-level": plot_two_level_heat_maps,
        "simulated-curves": plot_curves,
        "simulated-zero3": plot_zero3,
        "simulated-msccl": plot_simulated_msccl,
    },
    about=lambda setting: {"machine": ANY_CPU, "parts": list(setting.only)},
)
