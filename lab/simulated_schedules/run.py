# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-collectives`: simulated schedules compared with measured ones, costs fitted to half of them.

The measurements are those of lab/results/collectives, lab/results/collectives-2-gpus and lab/results/ablations (2 and 4
H200), and of 8 processes over shaped links. One set of costs a machine is fitted to every second size; the other sizes
are predicted.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lab.harness import ANY_CPU, LAB, Bench, Measured, Table, column
from lab.pictures import describe_origin, select
from lab.simulated_schedules.cases import MeasuredSchedule, read_gpu_cases
from lab.simulated_schedules.choices import Choice, Prediction, list_choices, predict_choices, summarize_choices
from lab.simulated_schedules.fit import Parameter, SchedulePredictor, fit
from lab.simulated_schedules.sockets import TILE_BYTES, list_two_level, read_socket_cases, socket_topology
from stretto.atomic_files import write_atomically
from stretto.bench.interleaved import name_size
from stretto.bench.settings import Option
from stretto.cluster import Cluster
from stretto.simulator.schedules import ExecutorCosts, MachineCosts, ProtocolCosts

RESULTS = LAB / "results"
CLUSTER = "dgx-h200"
CLOSE = 1.05  # contests whose best two differ by less have no winner
_EXECUTOR_FIGURES = ("launch", "host_seconds")
START = MachineCosts.find(str(Path(__file__).with_name("start.json")))
"""The initial values of the fit; figures not listed in `FITTED` are fixed."""
FITTED: dict[str, tuple[str, ...]] = {
    "fused": ("latency", "bandwidth_factor"),
    "copy-engine": ("bandwidth_factor",),
    "interpreter": ("latency", "block_bandwidth", "step_seconds"),
    "nccl": ("latency", "bandwidth_factor"),
}
"""The figures of each executor's protocols that are fitted, in addition to its launch and host times."""
SOCKETS = MachineCosts(
    "8 processes in network namespaces",
    "",
    {"sockets": ExecutorCosts(1e-3, {"Simple": ProtocolCosts(2e-4, 0.99, 2e8, 1e-4)}, tile_bytes=TILE_BYTES)},
    link_latency=0.0,
    network_latency=0.0,
)
_SOCKET_FIGURES = ("latency", "step_seconds", "block_bandwidth")


@dataclass(frozen=True)
class SimulatedCollectivesSetting:
    """Settings of `python -m lab simulated-collectives`."""

    gpus: Annotated[
        int | None, Option("Only predict the fastest choices on so many H200 of a node, beside NCCL.", least=2)
    ] = None


@dataclass(frozen=True)
class Row:
    """A measured time of a schedule, and the simulated one. use: whether costs were fitted to its size, or not."""

    executor: str
    ranks: int
    bytes: int
    mode: str
    contest: str = column("contest")
    schedule: str = column("schedule")
    ran: str = column("ran as")
    measured_us: float = column("measured (us)", "{:,.1f}")
    predicted_us: float = column("simulated (us)", "{:,.1f}")
    error: float = column("error", "{:+.0%}")
    use: str = column("size was")


@dataclass(frozen=True)
class ErrorGroup:
    """Deviations of an executor or a machine: of sizes that were fitted, and of the others."""

    group: str = column("ran as")
    fitted: int = column("fitted sizes")
    fitted_median: float | None = column("their median error", "{:.1%}")
    others: int = column("other sizes")
    others_median: float | None = column("their median error", "{:.1%}")
    others_most: float | None = column("largest", "{:.0%}")


@dataclass(frozen=True)
class WinnerGroup:
    """Contests with a winner, and in how many the simulated winner is the measured one."""

    group: str = column("contests")
    contests: int = column("with a winner")
    right: int = column("simulated right")
    share: float = column("share", "{:.0%}")


def simulate_cases(setting: SimulatedCollectivesSetting, out: Path) -> Measured:
    """Fit costs, which are written to `out` too, and predict."""
    gpu_cases, socket_cases = read_gpu_cases(RESULTS), read_socket_cases(RESULTS)
    cluster, links = Cluster.preset(CLUSTER), socket_topology()
    on_gpus = SchedulePredictor(lambda ranks: START.topology(cluster, ranks))
    if setting.gpus is not None:
        predicted = predict_choices(gpu_cases, setting.gpus, on_gpus, MachineCosts.find("h200"))
        about, name = {"gpus": setting.gpus, "machine": ANY_CPU}, f"predictions-collectives-{setting.gpus}"
        return Measured(predicted, about, name=name, title=f"Collectives on {setting.gpus} H200", row=Prediction)
    on_sockets = SchedulePredictor(lambda ranks: links)
    gpu_costs = START
    for executor, figures in FITTED.items():
        protocols = START.executors[executor].protocols
        parameters = [(executor, "", name) for name in _EXECUTOR_FIGURES if _is_seen(gpu_cases, executor, name)]
        parameters += [(executor, protocol, name) for protocol in protocols for name in figures]
        gpu_costs = _fit(gpu_cases, executor, gpu_costs, parameters, on_gpus)
    parameters = [("sockets", "", "launch"), *(("sockets", "Simple", name) for name in _SOCKET_FIGURES)]
    socket_costs = _fit(socket_cases, "sockets", SOCKETS, parameters, on_sockets)
    rows = [_make_row(case, on_gpus.predict(case, gpu_costs)) for case in gpu_cases]
    rows += [_make_row(case, on_sockets.predict(case, socket_costs)) for case in socket_cases]
    rows += [Row(**row) for row in list_two_level(RESULTS)]
    source = (
        f"python -m lab simulated-collectives, fitted to every second size of lab/results/collectives, "
        f"collectives-2-gpus and ablations with {1e6 * START.link_latency:g} us from GPU to GPU"
    )
    socket_source = "python -m lab simulated-collectives, every second size"
    out.mkdir(parents=True, exist_ok=True)
    for name, costs, said in (("h200", gpu_costs, source), ("namespaces", socket_costs, socket_source)):
        write_atomically(out / f"{name}.json", MachineCosts.to_json(replace(costs, source=said)))
    choices = list_choices(gpu_cases, on_gpus, gpu_costs)
    tables = (
        Table("Simulated beside measured, by what ran", list_groups(rows), ErrorGroup, "groups"),
        Table("The winner of each contest", list_winners(rows), WinnerGroup, "winners"),
        Table("The fastest choice", choices, Choice, "choices"),
    )
    return Measured(rows, lines=(summarize_choices(choices),), tables=tables)


def _is_seen(cases: Sequence[MeasuredSchedule], executor: str, name: str) -> bool:
    """True if the cases determine a figure: the host's time only shows in calls that are shorter."""
    return name != "host_seconds" or any(case.executor == executor and case.mode == "eager" for case in cases)


def _fit(
    cases: Sequence[MeasuredSchedule],
    executor: str,
    costs: MachineCosts,
    parameters: Sequence[Parameter],
    predictor: SchedulePredictor,
) -> MachineCosts:
    fitted = [case for case in cases if case.executor == executor and case.is_fitted]
    return fit(fitted, costs, parameters, predictor.predict)


def _make_row(case: MeasuredSchedule, predicted: float) -> Row:
    tile = "" if case.tile_bytes is None else f", tiles of {name_size(case.tile_bytes)}"
    return Row(
        contest=case.contest,
        schedule=case.algorithm,
        ran=f"{case.executor} {case.protocol}".strip() + tile,
        executor=case.executor,
        ranks=case.ranks,
        bytes=case.num_bytes,
        mode=case.mode,
        measured_us=case.seconds * 1e6,
        predicted_us=predicted * 1e6,
        error=predicted / case.seconds - 1,
        use="fitted" if case.is_fitted else "predicted",
    )


def list_groups(rows: Sequence[Row]) -> list[ErrorGroup]:
    """The errors of each executor, of sizes that were fitted and of the others; then of a machine's all."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.executor].append(row)
        groups[_machine_of(row)].append(row)
    found = []
    for group, members in groups.items():
        fitted, others = ([abs(row.error) for row in members if row.use == use] for use in ("fitted", "predicted"))
        medians = [statistics.median(errors) if errors else None for errors in (fitted, others)]
        found.append(ErrorGroup(group, len(fitted), medians[0], len(others), medians[1], max(others, default=None)))
    return sorted(found, key=lambda each: each.group.startswith("all"))


def list_winners(rows: Sequence[Row]) -> list[WinnerGroup]:
    """Count, of contests whose best two differ by more than 5%, those in which simulation and measurement agree."""
    contests: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        contests[row.contest].append(row)
    groups: dict[str, list[bool]] = defaultdict(list)
    for members in contests.values():
        ranked = sorted(members, key=lambda row: row.measured_us)
        if len(ranked) < 2 or ranked[1].measured_us < CLOSE * ranked[0].measured_us:
            continue
        is_right = min(members, key=lambda row: row.predicted_us) is ranked[0]
        groups[_contest_group(members[0])].append(is_right)
        groups[_machine_of(members[0])].append(is_right)
    found = [WinnerGroup(group, len(each), sum(each), sum(each) / len(each)) for group, each in groups.items()]
    return sorted(found, key=lambda each: each.group.startswith("all"))


def _machine_of(row: Row) -> str:
    return "all on 8 processes" if row.executor in ("sockets", "two-level") else "all on 2 and 4 H200"


def _contest_group(row: Row) -> str:
    if row.executor == "two-level":
        return "two-level collectives and a flat ring (lab/results/two-level)"
    name = row.contest.split(",")[0]
    if row.executor == "sockets":
        return f"schedules of {name} over sockets"
    match name:
        case "composition":
            return "algorithms and executors (lab/results/ablations, composition)"
        case "pipelining":
            return "algorithms and tiles (lab/results/ablations, pipelining)"
        case _:
            return "Stretto or NCCL (lab/results/collectives)"


_PANELS = (
    ("2 and 4 H200", ("fused", "copy-engine", "interpreter", "nccl")),
    ("8 processes over shaped links", ("sockets", "two-level")),
)
_NAMES = {
    "fused": "one kernel, fused",
    "copy-engine": "copy engines",
    "interpreter": "one kernel, interpreted",
    "nccl": "NCCL",
    "sockets": "schedules over sockets",
    "two-level": "two-level collectives",
}


def plot_simulated_collectives(data: dict[str, Any], picture: Path) -> None:
    """A panel a machine: simulated over measured time by size, of fitted sizes hollow and of the others filled."""
    from lab.style import drawing, plain_log
    from stretto.report.style import GUIDE, SERIES

    with drawing(picture, 9.5, 3.4) as drawn:
        panels = drawn.panels(1, 2, sharey=True)[0]
        looks = dict(zip(_NAMES, SERIES, strict=False))
        for panel, (title, executors) in zip(panels, _PANELS, strict=True):
            rows = [row for row in data["rows"] if row["executor"] in executors]
            for executor in executors:
                _plot_ratios(panel, select(rows, executor=executor), executor, looks[executor])
            panel.axhline(1, **GUIDE)
            panel.axhspan(0.85, 1.15, color="#e4e4e4", zorder=0)
            panel.set_xscale("log", base=2)
            drawn.log_ticks(panel.xaxis, sorted({row["bytes"] for row in rows}), name_size)
            panel.set(xlabel="bytes of the larger buffer", title=title)
        plain_log(panels[0].yaxis)
        panels[0].set_ylabel("simulated / measured time")
        drawn.title = "Simulated schedules beside measured ones"
        drawn.subtitle = describe_origin(data, simulated="the machines above the panels")
        drawn.caption = (
            "Hollow: sizes that the costs of protocols were fitted to; filled: the others. Grey: within 15%. "
            + " ".join(
                f"{group['group'][0].upper()}{group['group'][1:]}: median error of the other sizes "
                f"{group['others_median']:.1%}."
                for group in data["groups"]
                if group["group"].startswith("all")
            )
        )


def _plot_ratios(panel: Any, rows: Sequence[Mapping[str, Any]], executor: str, look: Any) -> None:
    for use, face in (("fitted", "white"), ("predicted", look.colour)):
        chosen = select(rows, use=use)
        if chosen:
            panel.plot(
                [row["bytes"] for row in chosen],
                [row["predicted_us"] / row["measured_us"] for row in chosen],
                linestyle="none",
                marker=look.marker,
                markersize=3.5,
                markerfacecolor=face,
                markeredgecolor=look.colour,
                label=_NAMES[executor] if use == "predicted" else None,
            )


BENCH = Bench(
    "simulated-collectives",
    "Simulated and measured schedules, on H200 and on 8 processes over shaped links (needs no GPU).",
    SimulatedCollectivesSetting,
    simulate_cases,
    Row,
    title="Simulated schedules beside measured ones",
    plot=plot_simulated_collectives,
    about=lambda setting: {},
)
