# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab checkouts`: the two checkouts, ranks, cases and time limit."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import stretto
from lab.checkouts.cases import CPU_CASES, CPU_TRAINING_CASES, CheckoutCase, list_cases
from stretto.bench.settings import Option, require_least
from stretto.memory.mps import share_for

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class CheckoutsSetting:
    """The checkouts that `python -m lab checkouts` compares, the cases, and the time that it may take.

    before, after: folders that hold the package `stretto`, or a `src` that does. ranks: processes of each checkout;
    with 1, a training step is the only case. rounds: of every case. Cases whose confidence interval still contains a
    bound then get more, up to most_rounds each, until `seconds` have passed since the command started. only: measures
    the cases whose names contain one of these (empty: all); skip: leaves out those that contain one of these. Both may
    have hyphens in place of a name's spaces. percentage: share of the GPU's multiprocessors for each rank (None: 100 /
    ranks, since one set of ranks works at a time). At 100 / (2 ranks) or less, both sets have multiprocessors of their
    own and prepare cases at the same time. on_cpu: a few cases with interpreted kernels, to try the command. Raises
    ValueError for settings that cannot work.
    """

    before: Annotated[Path, Option("A checkout of Stretto, or its src.")]
    after: Annotated[Path, Option("Another one (default: where this command is from).")] = field(
        default_factory=lambda: Path(stretto.__file__).parents[1]
    )
    ranks: Annotated[int, Option("Processes of each checkout; all share one GPU.")] = 4
    rounds: Annotated[int, Option("Rounds over all cases.")] = 30
    most_rounds: Annotated[
        int | None, Option("Rounds at most, of a case that --rounds do not decide (default: ten times --rounds).")
    ] = None
    seconds: Annotated[float, Option("Time limit of the whole run.")] = 270.0
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
        require_least(1, ranks=self.ranks)
        require_least(2, rounds=self.rounds)
        require_least(self.rounds, most_rounds=self.round_limit)
        require_least(1, seconds=self.seconds)
        if self.placements not in (None, 1, 2):
            raise ValueError(f"--placements is {self.placements}, but two sets of ranks have 1 or 2")
        if self.share * self.ranks > 100 or self.share < 1:
            least = 100 // self.ranks
            raise ValueError(
                f"{self.ranks} ranks with {self.share}% of the multiprocessors each: up to {least}% will do, since "
                "ranks that wait for each other run at once"
            )
        for name, path in ((BEFORE, self.before), (AFTER, self.after)):
            find_source(name, path)
        for part in (*self.only, *self.skip):
            if not any(has_part(case.name, part) for case in list_cases(self.ranks)):
                raise ValueError(f"no case has {part!r} in its name; one is {list_cases(self.ranks)[0].name!r}")
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
    """Whether a case's name contains a part, in which hyphens may stand for spaces."""
    return part in name or part in name.replace(" ", "-")


def find_source(name: str, path: Path) -> Path:
    """The folder of a checkout that holds the package. ValueError where there is none."""
    for folder in (path, path / "src"):
        if (folder / "stretto" / "__init__.py").is_file():
            return folder.resolve()
    raise ValueError(f"--{name} is {str(path)!r}, which holds no package stretto: give a checkout, or its src")
