# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-collectives`: simulated schedules compared with measured ones, costs fitted to half of them.

The measurements are those of lab/results/collectives, lab/results/collectives-2-gpus and lab/results/ablations (2 and 4
H200), and of 8 processes over shaped links, which this bench measures. One set of costs a machine is fitted to
every second size; the other sizes are predicted.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pictures import draw_result
from lab.simulated_schedules.cases import MeasuredSchedule, read_gpu_cases
from lab.simulated_schedules.choices import CHOICES, list_choices, summarize_choices
from lab.simulated_schedules.fit import Parameter, SchedulePredictor, fit
from lab.simulated_schedules.settings import TILE_BYTES, SimulatedCollectivesSetting
from lab.simulated_schedules.sockets import (
    list_two_level,
    measure_sockets,
    read_socket_cases,
    socket_topology,
)
from stretto.atomic_files import write_atomically
from stretto.bench.harness import Column, markdown_table, print_table, write_result
from stretto.bench.interleaved import name_size
from stretto.cluster import Cluster
from stretto.simulator.schedules import ExecutorCosts, MachineCosts, ProtocolCosts

CLUSTER = "dgx-h200"
CLOSE = 1.05  # contests whose best two differ by less have no winner
COLUMNS = (
    Column("contest", "contest"),
    Column("schedule", "schedule"),
    Column("ran", "ran as"),
    Column("measured_us", "measured (us)", "{:,.1f}"),
    Column("predicted_us", "simulated (us)", "{:,.1f}"),
    Column("error", "error", "{:+.0%}"),
    Column("use", "size was"),
)
GROUPS = (
    Column("group", "ran as"),
    Column("fitted", "fitted sizes"),
    Column("fitted_median", "their median error", "{:.1%}"),
    Column("others", "other sizes"),
    Column("others_median", "their median error", "{:.1%}"),
    Column("others_most", "largest", "{:.0%}"),
)
WINNERS = (
    Column("group", "contests"),
    Column("contests", "with a winner"),
    Column("right", "simulated right"),
    Column("share", "share", "{:.0%}"),
)
_EXECUTOR_FIGURES = ("launch", "host_seconds")
START = MachineCosts(
    "dgx-h200, 2 or 4 of its GPUs",
    "",
    {
        # A kernel for the whole schedule, whose CUDA blocks each process a part of all chunks; mailboxes, so no slots.
        "fused": ExecutorCosts(
            2e-6,
            {
                "LL": ProtocolCosts(1e-6, 0.33, is_streaming=True),
                "LL128": ProtocolCosts(1e-6, 0.67, is_streaming=True),
            },
            tile_bytes=None,
            instances=16,
            slots=1024,
            host_seconds=17e-6,
        ),
        "copy-engine": ExecutorCosts(
            20e-6, {"Copy": ProtocolCosts(3e-6, 0.83)}, tile_bytes=None, instances=16, slots=1024, host_seconds=17e-6
        ),
        "interpreter": ExecutorCosts(
            6e-6,
            {"LL128": ProtocolCosts(1e-6, 0.67, 4.5e9, 5e-6, is_streaming=True)},
            tile_bytes=64 << 10,
            host_seconds=17e-6,
            max_blocks=132,
        ),
        "nccl": ExecutorCosts(
            8e-6,
            {
                "LL": ProtocolCosts(0.5e-6, 0.25, is_streaming=True),
                "LL128": ProtocolCosts(1.5e-6, 0.6, is_streaming=True),
                "Simple": ProtocolCosts(3e-6, 0.8),
            },
            tile_bytes=256 << 10,
            instances=16,
            host_seconds=45e-6,
        ),
    },
    link_latency=0.5e-6,
    network_latency=2e-6,
)
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


def bench_simulated_collectives(setting: SimulatedCollectivesSetting, out: Path) -> dict[str, Any]:
    """Fit, predict, print tables, and write simulated-collectives.json, .md, .png and the costs to `out`.

    Raises ValueError, before anything is fitted, where results are missing or namespaces cannot be made.
    """
    gpu_cases = read_gpu_cases(setting.results)
    sockets = out / "sockets.json"
    if setting.measures:
        measured = measure_sockets(setting)
        sockets_columns = tuple(Column(name, name) for name in measured[0])
        write_result(out, "sockets", sockets_columns, measured)
    elif not sockets.is_file():
        raise ValueError(f"{sockets} is not there: run this once with --measure, as root")
    socket_cases = read_socket_cases(json.loads(sockets.read_text())["rows"])
    cluster = Cluster.preset(CLUSTER)
    on_gpus = SchedulePredictor(lambda ranks: START.topology(cluster, ranks))
    gpu_costs = START
    for executor, figures in FITTED.items():
        protocols = START.executors[executor].protocols
        parameters = [(executor, "", name) for name in _EXECUTOR_FIGURES if _is_seen(gpu_cases, executor, name)]
        parameters += [(executor, protocol, name) for protocol in protocols for name in figures]
        gpu_costs = _fit(gpu_cases, executor, gpu_costs, parameters, on_gpus)
    links = socket_topology()
    on_sockets = SchedulePredictor(lambda ranks: links)
    parameters = [("sockets", "", "launch"), *(("sockets", "Simple", name) for name in _SOCKET_FIGURES)]
    socket_costs = _fit(socket_cases, "sockets", SOCKETS, parameters, on_sockets)
    rows = [
        _row(case, predictor.predict(case, costs))
        for cases, predictor, costs in ((gpu_cases, on_gpus, gpu_costs), (socket_cases, on_sockets, socket_costs))
        for case in cases
    ]
    rows += list_two_level(setting.results)
    groups, winners = list_groups(rows), list_winners(rows)
    choices = list_choices(gpu_cases, on_gpus, gpu_costs)
    source = (
        f"python -m lab simulated-collectives, fitted to every second size of lab/results/collectives, "
        f"collectives-2-gpus and ablations with {1e6 * START.link_latency:g} us from GPU to GPU"
    )
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "h200.json", MachineCosts.to_json(_named(gpu_costs, source)))
    write_atomically(
        out / "namespaces.json",
        MachineCosts.to_json(_named(socket_costs, "python -m lab simulated-collectives, every second size")),
    )
    print_table("Simulated beside measured, by what ran", GROUPS, groups)
    print_table("The winner of each contest", WINNERS, winners)
    print(summarize_choices(choices))
    path = write_result(out, "simulated-collectives", COLUMNS, rows, groups=groups, winners=winners, choices=choices)
    table = path.with_suffix(".md")
    heading, _, every = table.read_text().partition("\n\n")
    parts = [
        [heading],
        markdown_table(GROUPS, groups),
        markdown_table(WINNERS, winners),
        [summarize_choices(choices)],
        markdown_table(CHOICES, choices),
        [every.rstrip()],
    ]
    write_atomically(table, "\n\n".join("\n".join(part) for part in parts) + "\n")
    draw_result(path)
    return {"groups": groups, "winners": winners, "choices": choices}


def _named(costs: MachineCosts, source: str) -> MachineCosts:
    return MachineCosts(costs.machine, source, costs.executors, costs.link_latency, costs.network_latency)


def _is_seen(cases: Sequence[MeasuredSchedule], executor: str, name: str) -> bool:
    """Whether the cases determine a figure: the host's time only shows in calls that are shorter."""
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


def _row(case: MeasuredSchedule, predicted: float) -> dict[str, Any]:
    tile = "" if case.tile_bytes is None else f", tiles of {name_size(case.tile_bytes)}"
    return {
        "contest": case.contest,
        "schedule": case.algorithm,
        "ran": f"{case.executor} {case.protocol}".strip() + tile,
        "executor": case.executor,
        "ranks": case.ranks,
        "bytes": case.num_bytes,
        "mode": case.mode,
        "measured_us": case.seconds * 1e6,
        "predicted_us": predicted * 1e6,
        "error": predicted / case.seconds - 1,
        "use": "fitted" if case.is_fitted else "predicted",
    }


def list_groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The errors of each executor, of sizes that were fitted and of the others; then of a machine's all."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["executor"]].append(row)
        groups[_machine_of(row)].append(row)
    found = []
    for group, members in groups.items():
        fitted, others = (
            [abs(row["error"]) for row in members if row["use"] == use] for use in ("fitted", "predicted")
        )
        found.append(
            {
                "group": group,
                "fitted": len(fitted),
                "fitted_median": statistics.median(fitted) if fitted else None,
                "others": len(others),
                "others_median": statistics.median(others) if others else None,
                "others_most": max(others, default=None),
            }
        )
    return sorted(found, key=lambda group: group["group"].startswith("all"))


def list_winners(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Count, of contests whose best two differ by more than 5%, those in which simulation and measurement agree."""
    contests: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        contests[row["contest"]].append(row)
    groups: dict[str, list[bool]] = defaultdict(list)
    for name, members in contests.items():
        ranked = sorted(members, key=lambda row: row["measured_us"])
        if len(ranked) < 2 or ranked[1]["measured_us"] < CLOSE * ranked[0]["measured_us"]:
            continue
        is_right = min(members, key=lambda row: row["predicted_us"]) is ranked[0]
        groups[_contest_group(name, members[0])].append(is_right)
        groups[_machine_of(members[0])].append(is_right)
    found = [
        {"group": group, "contests": len(each), "right": sum(each), "share": sum(each) / len(each)}
        for group, each in groups.items()
    ]
    return sorted(found, key=lambda group: group["group"].startswith("all"))


def _machine_of(row: Mapping[str, Any]) -> str:
    return "all on 8 processes" if row["executor"] in ("sockets", "two-level") else "all on 2 and 4 H200"


def _contest_group(name: str, row: Mapping[str, Any]) -> str:
    if row["executor"] == "two-level":
        return "two-level collectives and a flat ring (lab/results/two-level)"
    if row["executor"] == "sockets":
        return f"schedules of {name.split(',')[0]} over sockets"
    match name.split(",")[0]:
        case "composition":
            return "algorithms and executors (lab/results/ablations, composition)"
        case "pipelining":
            return "algorithms and tiles (lab/results/ablations, pipelining)"
        case _:
            return "Stretto or NCCL (lab/results/collectives)"
