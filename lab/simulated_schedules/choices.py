# SPDX-License-Identifier: Apache-2.0
"""Compares the simulator's choices with the fastest ones that `stretto tune collectives` measured."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lab.harness import column
from lab.simulated_schedules.cases import MeasuredSchedule
from lab.simulated_schedules.fit import SchedulePredictor
from stretto.simulator.schedules import MachineCosts

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("one-shot-all-reduce", "two-shot-all-reduce"),
    "allgather": ("direct-all-gather",),
    "reducescatter": ("direct-reduce-scatter",),
    "alltoall": ("direct-all-to-all",),
}
"""Candidates of the tuner of GPU collectives, each by LL and LL128 and, the last of each collective, by copy engines.

The tuner also tries Simple, which was never the fastest: no result has a time of it, and no costs could be fitted.
"""


@dataclass(frozen=True)
class Choice:
    """The fastest choice of a collective at a size, measured and simulated.

    loss: by how much the measured choice is slower than the simulated one, in the simulation; None where they are one.
    """

    is_same: bool
    is_same_algorithm: bool
    is_close: bool
    collective: str = column("collective")
    ranks: int = column("ranks")
    bytes: int = column("bytes", "{:,}")
    measured: str = column("fastest, measured")
    simulated: str = column("fastest, simulated")
    loss: str | None = column("simulated: slower by")


def list_choices(cases: Sequence[MeasuredSchedule], predictor: SchedulePredictor, costs: MachineCosts) -> list[Choice]:
    """For each collective and size (bf16, in CUDA graphs): the fastest choice measured, and simulated."""
    contests: dict[str, list[MeasuredSchedule]] = defaultdict(list)
    for case in cases:
        if case.mode == "graph" and case.dtype == "bf16" and case.contest.split(",")[0] in ALGORITHMS:
            contests[case.contest].append(case)
    rows = []
    for contest, members in contests.items():
        collective = contest.split(",")[0]
        library = next(case for case in members if case.executor == "nccl")
        # Where Stretto called NCCL, that was the fastest, or less than 3% slower.
        chosen = next((case for case in members if case.executor != "nccl"), library)
        seconds = _simulate_candidates(library, predictor, costs)
        best = min(seconds, key=seconds.__getitem__)
        measured = _name(chosen)
        rows.append(
            Choice(
                collective=collective,
                ranks=library.ranks,
                bytes=library.num_bytes,
                measured=measured,
                simulated=best,
                loss=None if best == measured else f"{seconds[measured] / seconds[best] - 1:.1%}",
                is_same=best == measured,
                is_same_algorithm=best.split()[0] == measured.split()[0],
                is_close=seconds[measured] < 1.05 * seconds[best],
            )
        )
    return rows


@dataclass(frozen=True)
class Prediction:
    """The fastest choice of a collective at a size on GPUs that were not measured, beside NCCL."""

    collective: str = column("collective")
    bytes: int = column("bytes", "{:,}")
    choice: str = column("fastest, simulated")
    microseconds: float = column("us", "{:,.1f}")
    nccl: float = column("NCCL (us)", "{:,.1f}")
    speed: float = column("times faster", "{:.2f}")


def predict_choices(
    cases: Sequence[MeasuredSchedule], ranks: int, predictor: SchedulePredictor, costs: MachineCosts
) -> list[Prediction]:
    """For each collective and size that was measured on fewer GPUs (bf16, in CUDA graphs): the fastest on so many."""
    measured = [case for case in cases if (case.executor, case.mode, case.dtype) == ("nccl", "graph", "bf16")]
    of = {(case.contest.split(",")[0], case.num_bytes): case for case in measured}
    rows = []
    for (collective, size), case in of.items():
        library = replace(case, parameters=(("ranks", ranks),))
        seconds = _simulate_candidates(library, predictor, costs)
        best, nccl = min(seconds, key=seconds.__getitem__), 1e6 * seconds["NCCL"]
        microseconds = 1e6 * seconds[best]
        rows.append(Prediction(collective, size, best, microseconds, nccl, nccl / microseconds))
    return rows


def _simulate_candidates(
    library: MeasuredSchedule, predictor: SchedulePredictor, costs: MachineCosts
) -> dict[str, float]:
    """The simulated seconds of NCCL's case and of what the tuner would try in its place, by name."""
    *_, last = names = ALGORITHMS[library.contest.split(",")[0]]
    tried = [library]
    for algorithm in names:
        for protocol in ("LL", "LL128"):
            tried.append(replace(library, algorithm=algorithm, executor="fused", protocol=protocol))
    tried.append(replace(library, algorithm=last, executor="copy-engine", protocol="Copy"))
    return {_name(case): predictor.predict(case, costs) for case in tried}


def summarize_choices(rows: Sequence[Choice]) -> str:
    """One sentence: how often the simulator's choice is the measured one."""
    same, algorithm, close = (
        sum(getattr(row, key) for row in rows) for key in ("is_same", "is_same_algorithm", "is_close")
    )
    return (
        f"Of {len(rows)} sizes the simulator chooses the measured algorithm and protocol in {same}, the measured "
        f"algorithm in {algorithm}, and finds the measured choice at most 5% slower than its own in {close}."
    )


def _name(case: MeasuredSchedule) -> str:
    return "NCCL" if case.executor == "nccl" else f"{case.algorithm} {case.protocol}"
