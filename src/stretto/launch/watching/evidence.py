# SPDX-License-Identifier: Apache-2.0
"""Collects the stacks of a stuck run in a folder of the run, `out/stalls/<UTC time>/`.

- `report.txt`: what was found, and a table of all ranks.
- `rank-N-stack.txt`: the stacks of all threads of rank N, taken from outside.
"""

from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from stretto.launch.watching.monitor import Monitor
from stretto.launch.watching.ranks import write_stacks

FOLDER = "stalls"


def collect(out: Path, monitor: Monitor, text: str, running: Collection[int] | None = None) -> Path | None:
    """Write the report, and the stacks of this machine's ranks, which will be ended. Takes 50 ms a rank.

    Returns the folder, or None where it cannot be made (a full disk).
    """
    folder = out / FOLDER / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    try:
        folder.mkdir(parents=True, exist_ok=True)  # nodes that share a disk may share a folder
    except OSError:
        return None
    ranks = monitor.watched(running)
    with suppress(OSError):  # the disk may be full by now; the message goes to the screen in any case
        for rank in ranks:
            if monitor.local is not None and rank in monitor.local.counters:
                write_stacks(folder, monitor.local.counters[rank], may_signal=True)
        (folder / "report.txt").write_text(f"{text}\n\n{_table(monitor, ranks)}\n", encoding="utf-8")
    return folder


def _table(monitor: Monitor, ranks: list[int]) -> str:
    rows = [("rank", "host", "pid", "step", "phase", "no progress", "state", "waits in", "at")]
    for rank in ranks:
        state = monitor.states.get(rank)
        if state is None:
            rows.append((str(rank), "?", "?", "?", "?", f"{monitor.idle(rank):.1f} s", "not begun", "", ""))
            continue
        wait = state.wait
        doing = "silent" if rank in monitor.silent else "waiting" if state.waits else "running"
        rows.append(
            (
                str(rank),
                state.host,
                str(state.pid),
                "-" if state.step is None else str(state.step),
                state.phase,
                f"{monitor.idle(rank):.1f} s",
                doing if state.state is None else f"{doing}: {state.state}",
                "-" if wait is None else f"{wait.name} {wait.number} of {wait.group}" if wait.number else wait.name,
                state.where[0] if state.where else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
