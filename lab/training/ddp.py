# SPDX-License-Identifier: Apache-2.0
"""`python -m lab ddp`: torch's DistributedDataParallel over Stretto's backend, of two checkouts, on one GPU.

Each rank traces one step. The picture has rank 0's kernels, of the backward pass and of the buckets' all-reduces, of
both checkouts. The checkouts alternate in fresh processes, and each step's time is the median over their steps.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import stretto
from lab.checkouts.cases import find_source
from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from lab.processes import Processes
from stretto.bench.settings import Needs, Option
from stretto.cluster.detection import count_gpus
from stretto.memory.mps import mps_daemon, share_for
from stretto.train.observe.timeline import Interval, Intervals, merge, subtract, total


@dataclass(frozen=True)
class DdpSetting:
    """Settings of `python -m lab ddp`, which compares checkouts. Raises ValueError for settings that cannot work.

    before, after: folders that hold the package `stretto`, or a `src` that does.
    """

    before: Annotated[Path, Option("A checkout of Stretto, or its src.")]
    after: Annotated[Path, Option("Another one (default: where this command is from).")] = field(
        default_factory=lambda: Path(stretto.__file__).parents[1]
    )
    ranks: Annotated[int, Option("Processes; all share one GPU.", least=2)] = 4
    steps: Annotated[int, Option("Timed steps of each start.", least=1)] = 20
    turns: Annotated[int, Option("Starts of each checkout.", least=1)] = 2
    seconds: Annotated[float, Option("Time limit of each start.", least=1)] = 150.0
    on_cpu: Annotated[bool, Option("A small model on the CPU, to try the command: no trace.", "--cpu")] = False

    def __post_init__(self) -> None:
        for name, path in (("before", self.before), ("after", self.after)):
            find_source(name, path)


_RANK = Path(__file__).with_name("ddp_rank.py")
_SIZES = {True: {"width": 64, "layers": 4, "rows": 32}, False: {"width": 2048, "layers": 6, "rows": 2048}}
_BUCKET_MB = {True: 0.01, False: 8.0}  # two layers or fewer


@dataclass(frozen=True)
class Row:
    """A rank of a checkout: medians of steps, means of traced steps."""

    checkout: str = column("checkout")
    rank: int = column("rank")
    milliseconds: float = column("a step (ms)", "{:.2f}")
    communication_milliseconds: float = column("all-reduces (ms)", "{:.2f}")
    exposed_milliseconds: float = column("of them with nothing beside them (ms)", "{:.2f}")


def compare_checkouts(setting: DdpSetting) -> Measured:
    """Measure both checkouts: a row for each checkout and rank.

    Raises ValueError where there is no GPU or no MPS, and `RanksFailed` with a rank's last words if one fails.
    """
    if not setting.on_cpu and not count_gpus():
        raise ValueError("this bench takes a GPU, which all ranks share: torch sees none here; --cpu tries the command")
    sources = {"before": find_source("before", setting.before), "after": find_source("after", setting.after)}
    measured: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in sources}
    for turn in range(setting.turns):
        for name in list(sources)[:: -1 if turn % 2 else 1]:
            measured[name].append(_measure(name, sources[name], setting))
    rows = [
        _summarize(name, rank, [turn[rank] for turn in measured[name]])
        for name in sources
        for rank in range(setting.ranks)
    ]
    kernels = {name: turns[-1][0]["kernels"] for name, turns in measured.items()}
    return Measured(rows, {"kernels": kernels}, is_drawn=not setting.on_cpu)


def _measure(checkout: str, source: Path, setting: DdpSetting) -> list[dict[str, Any]]:
    """Run the ranks of one checkout. Returns each rank's result."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-bench-")))
        environment = {
            "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1",
            "STRETTO_SHARE_GPUS": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
        if not setting.on_cpu:
            environment |= stack.enter_context(mps_daemon(share_for(setting.ranks)))
        given = {
            "world": setting.ranks,
            "store": str(folder / "store"),
            "device": "cpu" if setting.on_cpu else "cuda",
            "bucket_mb": _BUCKET_MB[setting.on_cpu],
            "steps": setting.steps,
            **_SIZES[setting.on_cpu],
        }
        # -P keeps the script's folder off sys.path, before the checkout.
        commands = [
            [sys.executable, "-P", str(_RANK), json.dumps(given | {"rank": rank})] for rank in range(setting.ranks)
        ]
        ranks = stack.enter_context(Processes(checkout, commands, environment, folder / "errors"))
        found = ranks.receive("a training", setting.seconds)
    for each in found:
        if not Path(each["stretto"]).resolve().is_relative_to(source):
            raise RuntimeError(f"a rank imported Stretto from {each['stretto']}, not from {source}")
    return found


def _summarize(checkout: str, rank: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """A row: medians over all steps of all turns, and means over the turns' traced steps."""
    collectives, exposed = [], []
    for turn in turns:
        work, communication = split_kernels(turn["kernels"])
        collectives.append(total(communication) / 1e3)
        exposed.append(total(subtract(communication, work)) / 1e3)
    return {
        "checkout": checkout,
        "rank": rank,
        "milliseconds": 1e3 * statistics.median(second for turn in turns for second in turn["seconds"]),
        "communication_milliseconds": statistics.mean(collectives),
        "exposed_milliseconds": statistics.mean(exposed),
    }


def split_kernels(kernels: list[list[Any]]) -> tuple[Intervals, Intervals]:
    """The times of the model's kernels and of the collectives', merged, in microseconds."""
    times: dict[bool, list[Interval]] = {False: [], True: []}
    for is_collective, start, end in kernels:
        times[bool(is_collective)].append((start, end))
    return merge(times[False]), merge(times[True])


def plot_ddp(data: dict[str, Any], picture: Path) -> None:
    """Draw rank 0's kernels over a step of each checkout: a row for the model's and one for the all-reduces."""
    from lab.style import PEER, drawing
    from stretto.report.style import EXPOSED, STRETTO

    kernels = data["kernels"]
    ends = [end for each in kernels.values() for _, _, end in each]
    with drawing(picture, 10, 1.1 * len(kernels)) as drawn:
        panels = drawn.panels(len(kernels), 1, sharex=True)[:, 0]
        for panel, (checkout, spans) in zip(panels, kernels.items(), strict=True):
            work, communication = split_kernels(spans)
            alone = subtract(communication, work)
            for place, (times, label, look) in enumerate(
                ((work, "computation", STRETTO), (subtract(communication, alone), "all-reduces beside it", PEER))
            ):
                if times:  # the legend only has drawn bars
                    panel.broken_barh(_bars(times), (place - 0.4, 0.8), color=look.colour, label=label)
            if alone:
                panel.broken_barh(
                    _bars(alone), (0.6, 0.8), color=EXPOSED.colour, hatch="//", edgecolor="white", linewidth=0,
                    label="all-reduces alone",
                )  # fmt: skip
            panel.set_yticks([0, 1], ["model", "buckets"])
            panel.set_ylim(1.6, -0.6)
            panel.grid(visible=False, axis="y")
            panel.set_xlim(0, max(ends) / 1e3)
            panel.set_title(checkout, loc="left")
        panels[-1].set_xlabel("ms since the step's first kernel, on rank 0")
        drawn.title = f"A step of DistributedDataParallel over Stretto's backend: {data['ranks']} ranks on one GPU"
        drawn.subtitle = describe_origin(data)


def _bars(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(start / 1e3, (end - start) / 1e3) for start, end in times]


BENCH = Bench(
    "ddp",
    "The timeline of DistributedDataParallel with two checkouts' backends: overlap of buckets.",
    DdpSetting,
    compare_checkouts,
    Row,
    title="DistributedDataParallel over Stretto's backend",
    plot=plot_ddp,
    needs=Needs.ONE_GPU,
    about=lambda setting: {
        "ranks": setting.ranks,
        "model": _SIZES[setting.on_cpu],
        "bucket_mb": _BUCKET_MB[setting.on_cpu],
    },
)
