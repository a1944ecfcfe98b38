# SPDX-License-Identifier: Apache-2.0
"""`python -m lab two-level`: recursive, ring and flat collectives between network namespaces, and where they cross.

The Linux kernel limits the bandwidth (tbf on every link), and the transport adds the delay (`DelayedTransport`). The
prediction uses both settings, and only the software time of a message is measured, in the same run.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.two_level.crossovers import find_crossovers
from lab.two_level.namespaces import INTERFACE, namespace_of, require_namespaces, shaped_network
from lab.two_level.settings import TwoLevelSetting
from stretto.bench.harness import Column, append_to_table, markdown_table, print_table, write_result
from stretto.bench.pictures import draw_result
from stretto.collectives.two_level import Links, choose, predict
from stretto.collectives.two_level.model import Algorithm, Collective

ALGORITHMS: tuple[Algorithm, ...] = ("recursive", "ring", "flat")
PAIRS: tuple[tuple[Algorithm, Algorithm], ...] = (("recursive", "ring"), ("recursive", "flat"), ("ring", "flat"))
_START_LIMIT = 300.0  # seconds for eight processes to import torch on few cores, and to join
COLUMNS = (
    Column("collective", "collective"),
    Column("shard_kib", "a rank (KiB)", "{:g}"),
    *(
        column
        for name in ALGORITHMS
        for column in (Column(f"{name}_ms", f"{name} (ms)", "{:.1f}"), Column(f"{name}_model_ms", "model", "{:.1f}"))
    ),
    Column("library_ms", "gloo, no delay (ms)", "{:.1f}"),
    Column("fastest", "fastest"),
    Column("chosen", "chosen by the model"),
    Column("chosen_loss", "slower by", "{:.0%}"),
)
CROSSOVERS = (
    Column("collective", "collective"),
    Column("between", "from, to"),
    Column("measured_kib", "measured (KiB a rank)", "{:.0f}"),
    Column("predicted_kib", "predicted", "{:.0f}"),
    Column("ratio", "measured / predicted", "{:.2f}"),
)


def bench_two_level(setting: TwoLevelSetting, out: Path) -> dict[str, Any]:
    """Measure, print tables, and write two-level.json, .md and .png to `out`. Returns the rows and the crossovers.

    Raises ValueError, before anything is made, if this machine or user cannot make namespaces. They are always removed
    at the end.
    """
    require_namespaces()
    with shaped_network(setting.network()):
        measured = _run(setting)
    links = setting.links(measured["overheads"])
    rows = [_row(row, setting, links) for row in measured["rows"]]
    crossovers = list(_crossovers(rows, setting, links))
    title = (
        f"{setting.nodes} nodes of {setting.ranks_per_node} ranks, {setting.bandwidth:g} Mbit/s a node, "
        f"{setting.loopback:g} inside, {setting.trunk:g} between halves, {setting.delay:g} ms"
    )
    print_table(title, COLUMNS, rows)
    print_table("Where they cross", CROSSOVERS, crossovers)
    about = {"setting": asdict(setting), "links": asdict(links), "crossovers": crossovers}
    path = write_result(out, "two-level", COLUMNS, rows, **about)
    about_times = f"{title}. Times are medians of {setting.repeats}."
    append_to_table(path, [about_times, "", *markdown_table(CROSSOVERS, crossovers)])
    draw_result(path)
    return {"rows": rows, "crossovers": crossovers}


def _run(setting: TwoLevelSetting) -> dict[str, Any]:
    """Start one process a rank, each in its node's namespace. Returns rank 0's result."""
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        job = setting.job(folder)
        description = json.dumps(asdict(job))
        try:
            for rank in range(job.world):
                node = namespace_of(rank // setting.ranks_per_node)
                # OMP: eight ranks share the cores. In sessions of their own, Ctrl-C reaches this process only.
                environment = [f"GLOO_SOCKET_IFNAME={INTERFACE}", "OMP_NUM_THREADS=1"]
                command = ["env", *environment, sys.executable, "-P", "-m", "lab.two_level.rank"]
                ranks.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", node, *command, description, str(rank)],
                        stdin=subprocess.PIPE,
                        start_new_session=True,
                    )
                )
            _wait(ranks, _START_LIMIT + _longest(setting))
            result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
            return result
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], limit: float) -> None:
    """Wait for all ranks to end. Raises ValueError if one fails, or runs longer than `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise ValueError(f"rank {rank} of the bench ended with status {code}; its own words are above")
        if None not in codes:
            return
        if time.monotonic() > end:
            going = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise ValueError(f"rank {going} of the bench did not end within {limit:.0f} s")
        time.sleep(0.1)


def _longest(setting: TwoLevelSetting) -> float:
    """Seconds that the collectives may take: ten times the predicted time with 1 ms of software a message."""
    links = setting.links({"inside": 1e-3, "between": 1e-3})
    job = setting.job("")
    once = sum(
        predict("all_gather", name, size, setting.nodes, setting.ranks_per_node, links) + 0.1
        for size in job.shard_bytes
        for name in (*ALGORITHMS, ALGORITHMS[-1])
    )
    return 10 * once * len(job.collectives) * (setting.repeats + 1)


def _row(measured: dict[str, Any], setting: TwoLevelSetting, links: Links) -> dict[str, Any]:
    collective, size = measured["collective"], measured["shard_bytes"]
    seconds = measured["seconds"]
    shape = setting.nodes, setting.ranks_per_node, links
    row = {"collective": collective, "shard_bytes": size, "shard_kib": size / 1024}
    for name in ALGORITHMS:
        row |= {
            f"{name}_ms": seconds[name]["median"] * 1e3,
            f"{name}_least_ms": seconds[name]["least"] * 1e3,
            f"{name}_most_ms": seconds[name]["most"] * 1e3,
            f"{name}_model_ms": predict(collective, name, size, *shape) * 1e3,
        }
    row["library_ms"] = seconds["library"]["median"] * 1e3
    row["fastest"] = min(ALGORITHMS, key=lambda name: seconds[name]["median"])
    row["chosen"] = choose(collective, size, *shape)
    row["chosen_loss"] = row[f"{row['chosen']}_ms"] / row[f"{row['fastest']}_ms"] - 1
    return row


def _crossovers(rows: list[dict[str, Any]], setting: TwoLevelSetting, links: Links) -> Iterator[dict[str, Any]]:
    """For each pair of algorithms, the first size at which they cross, measured and predicted (None: never)."""
    for collective in dict.fromkeys(row["collective"] for row in rows):
        of_size = {row["shard_bytes"]: row for row in rows if row["collective"] == collective}
        sizes = sorted(of_size)
        fine = [low * (high / low) ** (i / 64) for low, high in pairwise(sizes) for i in range(64)] + [sizes[-1]]
        for first, second in PAIRS:
            found = find_crossovers(sizes, *(partial(_measured, of_size, name) for name in (first, second)))
            predicted = find_crossovers(
                fine, *(partial(_predicted, collective, name, setting, links) for name in (first, second))
            )
            yield {
                "collective": collective,
                "between": f"{first}, {second}",
                "measured_kib": found[0] / 1024 if found else None,
                "predicted_kib": predicted[0] / 1024 if predicted else None,
                "ratio": found[0] / predicted[0] if found and predicted else None,
                "all_measured_kib": [size / 1024 for size in found],
                "all_predicted_kib": [size / 1024 for size in predicted],
            }


def _measured(of_size: dict[float, dict[str, Any]], name: Algorithm, size: float) -> float:
    return of_size[size][f"{name}_ms"] / 1e3


def _predicted(collective: Collective, name: Algorithm, setting: TwoLevelSetting, links: Links, size: float) -> float:
    return predict(collective, name, size, setting.nodes, setting.ranks_per_node, links)
