# SPDX-License-Identifier: Apache-2.0
"""`python -m lab checkouts`: calls of two checkouts of Stretto in turn in one run, to show what a change costs.

All ranks share one GPU under MPS, so the times only serve to compare two checkouts. `comparison` says how.
"""

import hashlib
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import stretto
from lab.checkouts.cases import AFTER, BEFORE, CPU_CASES, CPU_TRAINING_CASES, CheckoutCase, find_source, list_cases
from lab.checkouts.comparison import BOUND, Comparison, MeasuredCase, log
from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from lab.processes import raising_on_sigterm
from stretto.bench.settings import Needs, Option, require_least
from stretto.cluster.detection import count_gpus

_INCHES = 0.17  # of a row of the picture


@dataclass(frozen=True)
class CheckoutsSetting:
    """The checkouts that `python -m lab checkouts` compares, the cases, and the time that it may take.

    before, after: folders that hold the package `stretto`, or a `src` that does. rounds: of every case; those whose
    confidence interval still contains a bound then get more, up to most_rounds each, until `seconds` have passed since
    the command started. At a percentage of 100 / (2 ranks) or less, both sets of ranks have multiprocessors of their
    own and prepare cases at the same time. Raises ValueError for settings that cannot work.
    """

    before: Annotated[Path, Option("A checkout of Stretto, or its src.")]
    after: Annotated[Path, Option("Another one (default: where this command is from).")] = field(
        default_factory=lambda: Path(stretto.__file__).parents[1]
    )
    ranks: Annotated[int, Option("Processes of each checkout; all share one GPU.", least=1)] = 4
    rounds: Annotated[int, Option("Rounds over all cases.", least=2)] = 30
    most_rounds: Annotated[
        int | None, Option("Rounds at most, of a case that --rounds do not decide (default: ten times --rounds).")
    ] = None
    seconds: Annotated[float, Option("Time limit of the whole run.", least=1)] = 270.0
    only: Annotated[tuple[str, ...], Option("Parts of the names of cases, with commas; hyphens match spaces.")] = ()
    skip: Annotated[tuple[str, ...], Option("The same, of cases to leave out.")] = ()
    percentage: Annotated[
        int | None, Option("Share of the GPU's multiprocessors for a rank (default: 100 / ranks).")
    ] = None
    placements: Annotated[
        int | None, Option("2: exchange the checkouts' places on the GPU after half of the time (default).")
    ] = None
    seed: Annotated[int, Option("Seed of the order of measurements (default: random).")] = field(
        default_factory=lambda: random.randrange(2**31)
    )
    on_cpu: Annotated[bool, Option("Only two cases, with interpreted kernels, to try the command.", "--cpu")] = False

    def __post_init__(self) -> None:
        require_least(self.rounds, most_rounds=self.round_limit)
        if self.placements not in (None, 1, 2):
            raise ValueError(f"--placements is {self.placements}, but two sets of ranks have 1 or 2")
        if self.share * self.ranks > 100 or self.share < 1:
            raise ValueError(
                f"{self.ranks} ranks with {self.share}% of the multiprocessors each: up to {100 // self.ranks}% will "
                "do, since ranks that wait for each other run at once"
            )
        self.sources  # noqa: B018 - raises where a folder holds no checkout
        names = [case.name for case in list_cases(self.ranks)]
        for part in (*self.only, *self.skip):
            if not any(has_part(name, part) for name in names):
                raise ValueError(f"no case has {part!r} in its name; one is {names[0]!r}")
        if not self.cases():
            raise ValueError("no case is left to measure: --skip leaves out all of them")

    @property
    def round_limit(self) -> int:
        """The most rounds of a case."""
        return 10 * self.rounds if self.most_rounds is None else self.most_rounds

    @property
    def orders(self) -> tuple[tuple[str, str], ...]:
        """In which order the two sets of ranks start, for each placement."""
        placements = self.placements or (1 if self.on_cpu else 2)
        return ((BEFORE, AFTER), (AFTER, BEFORE))[:placements]

    @property
    def share(self) -> int:
        """Percent of the multiprocessors that a rank gets."""
        from stretto.memory.mps import share_for

        return share_for(self.ranks) if self.percentage is None else self.percentage

    @property
    def sources(self) -> dict[str, Path]:
        """The folder to import from, of each checkout."""
        return {name: find_source(name, path) for name, path in ((BEFORE, self.before), (AFTER, self.after))}

    def cases(self) -> list[CheckoutCase]:
        """The cases to measure."""
        every = list_cases(self.ranks)
        if self.on_cpu:
            every = CPU_TRAINING_CASES if self.ranks == 1 else CPU_CASES
        wanted = [case for case in every if not self.only or any(has_part(case.name, part) for part in self.only)]
        return [case for case in wanted if not any(has_part(case.name, part) for part in self.skip)]


def has_part(name: str, part: str) -> bool:
    """True if a case's name contains a part, in which hyphens may stand for spaces."""
    return part in name or part in name.replace(" ", "-")


@dataclass(frozen=True)
class Row:
    """A case: microseconds a call of both checkouts, and their ratio with its interval. host: only of eager calls."""

    kind: str
    mode: str
    placements: int
    case: str = column("case")
    is_bounded: bool = column("fills the GPU and waits")
    rounds: int = column("rounds")
    before: float = column("before (us)", "{:.1f}")
    after: float = column("after (us)", "{:.1f}")
    ratio: float = column("after / before", "{:.3f}")
    low: float = column("from", "{:.3f}")
    high: float = column("to", "{:.3f}")
    verdict: str = column("verdict")
    host_before: float | None = column("host before (us)", "{:.1f}")
    host_after: float | None = column("host after (us)", "{:.1f}")


def compare(setting: CheckoutsSetting) -> Measured:
    """Compare the two checkouts.

    Cases that were not measured are "refused", with the reason. All processes and the MPS daemon have ended on return.
    Raises ValueError where there is no GPU or no MPS.
    """
    deadline = time.monotonic() + setting.seconds
    if not setting.on_cpu and not count_gpus():
        raise ValueError("this bench takes a GPU, which all ranks share: torch sees none here; --cpu tries the command")
    with raising_on_sigterm(), tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        outcome = Comparison(setting, Path(folder), deadline)
        outcome.run()
    rows = [_row(case, outcome.measured[case.name]) for case in setting.cases() if case.name in outcome.measured]
    # Of kernels that fill the GPU and wait, a change may bound how many programs they have.
    parts = {
        "cases": [row for row in rows if not row.is_bounded],
        "cases whose kernels fill the GPU and wait": [row for row in rows if row.is_bounded],
    }
    summary = {name: _summarize(part) for name, part in parts.items() if part}
    for name, reason in outcome.refused.items():
        log(f"not measured: {name}: {reason}")
    if outcome.failure is not None:
        log(f"broken off: {outcome.failure}")
    about = {
        "processors": outcome.processors,
        "summary": summary,
        "refused": outcome.refused,
        "failure": outcome.failure,
    }
    lines = tuple(f"{name}: {describe(found)}" for name, found in summary.items())
    return Measured(rows, about, lines, failure=outcome.failure)


def _row(case: CheckoutCase, found: MeasuredCase) -> Row:
    ratio, low, high = found.estimate()
    before, after = (1e6 * statistics.median(each) for each in zip(*found.device, strict=True))
    host = [1e6 * statistics.median(each) if case.mode == "eager" else None for each in zip(*found.host, strict=True)]
    return Row(
        case.kind, case.mode, len(set(found.placements)), case.name, case.is_bounded, len(found.device),
        before, after, ratio, low, high, found.judge(), *host,
    )  # fmt: skip


def _summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The number of rows, the ratios' geometric mean, and the cases of each verdict."""
    verdicts = ("same", "slower", "faster", "unclear")
    mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows))
    return {"cases": len(rows), "mean_ratio": mean} | {
        name: [row.case for row in rows if row.verdict == name] for name in verdicts
    }


def describe(summary: dict[str, Any]) -> str:
    """A summary in words."""
    text = (
        f"{len(summary['same'])} of {summary['cases']} medians within {BOUND:.0%}, geometric mean of the ratios "
        f"{summary['mean_ratio']:.3f}"
    )
    others = [f"{name}: {', '.join(summary[name])}" for name in ("slower", "faster", "unclear") if summary[name]]
    return "; ".join([text, *others])


def describe_setting(setting: CheckoutsSetting) -> dict[str, Any]:
    """Return what a result says of the settings."""
    return {
        "ranks": setting.ranks,
        "percentage": setting.share,
        "rounds": setting.rounds,
        "placements": len(setting.orders),
        "seed": setting.seed,
        "bound": BOUND,
        "checkouts": {name: _digest(source) for name, source in setting.sources.items()},
    }


def _digest(source: Path) -> str:
    """Identify a checkout by a hash of its package's files: results name neither paths nor commits."""
    found = hashlib.sha256()
    for path in sorted((source / "stretto").rglob("*")):
        if path.suffix in (".py", ".cu", ".cpp", ".hpp"):
            found.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def plot_checkouts(data: dict[str, Any], picture: Path) -> None:
    """Draw a line a case: the median of after / before with its interval, and the bounds; the first case on top."""
    from lab.style import drawing
    from stretto.report.style import EXPOSED, GREY, GUIDE, STRETTO

    rows = data["rows"]
    kinds = (
        ("median and 95% interval", STRETTO, False),
        ("the same, of a kernel that fills the GPU and waits", EXPOSED, True),
    )
    with drawing(picture, 8, _INCHES * len(rows) + 0.6) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        bounds = (1 - data["bound"], 1 + data["bound"])
        panel.axvspan(*bounds, color=GREY, alpha=0.25, linewidth=0, label=f"counts as equal: {data['bound']:.0%}")
        panel.axvline(1, **GUIDE)
        for label, look, is_bounded in kinds:
            mine = [(place, row) for place, row in enumerate(rows) if row["is_bounded"] == is_bounded]
            if mine:
                panel.errorbar(
                    [row["ratio"] for _, row in mine],
                    [place for place, _ in mine],
                    xerr=(
                        [row["ratio"] - row["low"] for _, row in mine],
                        [row["high"] - row["ratio"] for _, row in mine],
                    ),
                    linestyle="none",
                    color=look.colour,
                    marker=look.marker,
                    elinewidth=1.2,
                    label=label,
                )
        panel.set_yticks(range(len(rows)), [row["case"] for row in rows])
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("time after / before")
        if any(" LL " in row["case"] for row in rows):
            drawn.caption = "LL: the protocol for small messages, which sends a flag beside every 4 bytes."
        drawn.title = f"Two checkouts, interleaved: {data['ranks']} ranks on one device"
        drawn.subtitle = describe_origin(data)


BENCH = Bench(
    "checkouts",
    """Collectives, tiles, embeddings and operators of two checkouts, interleaved, all ranks on one GPU under MPS.

    A case that loses ranks is left out. Ends with 1 where that happened four times; what was measured until then is
    written.
    """,
    CheckoutsSetting,
    compare,
    Row,
    title=lambda setting: f"Two checkouts: {setting.ranks} ranks of each on one device",
    plot=plot_checkouts,
    needs=Needs.ONE_GPU,
    about=describe_setting,
)
