# SPDX-License-Identifier: Apache-2.0
"""Collects stacks and flight records of a stuck run in a folder of the run: `out/stalls/<UTC time>/`.

- `report.txt`: what was found, and a table of all ranks by their last heartbeats.
- `rank-N-stack.txt`: the stacks of all threads of rank N.
- `rank-N-flight.json`: torch's flight recorder of rank N, if the rank can still write it.

A rank whose heartbeat's thread runs writes its own files when the store asks it to. The stacks of the others are taken
by a process on their machine: by a signal, else by py-spy, else the file has the state of the process.
"""

import json
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from stretto.train.health import flight_recorder, stacks
from stretto.train.health.beat import Beat
from stretto.train.health.monitor import Monitor

REQUEST = "dump"  # the key of the store by which ranks are asked for their files
ANSWERS = 2.0  # seconds, and two heartbeats, that ranks have to write them
FOLDER = "stalls"


def answer_key(request: str, rank: int) -> str:
    """The key of the store that says that a rank has written its files."""
    return f"{REQUEST} {json.loads(request)['time']} {rank}"


def write_own(folder: Path, rank: int) -> None:
    """Write this process's stacks and its flight recorder."""
    stacks.write_own(folder / f"rank-{rank}-stack.txt")
    if recorded := flight_recorder.dump():
        (folder / f"rank-{rank}-flight.json").write_text(json.dumps(recorded))


def collect(
    out: Path,
    monitor: Monitor,
    text: str,
    running: Collection[int] | None = None,
    *,
    own_rank: int | None = None,
) -> Path | None:
    """Write all files that can be obtained. Returns the folder, or None where it cannot be made (a full disk).

    own_rank: this process's, if its own heartbeat's thread calls this. It takes seconds: ranks answer after their next
    heartbeat. RuntimeError if the store does not answer.
    """
    folder = _make_folder(out)
    if folder is None:
        return None
    ranks = monitor.watched(running)
    table = _table(monitor, ranks)
    request = json.dumps({"folder": str(folder.absolute()), "time": time.time()})
    monitor.store.set(REQUEST, request)
    if own_rank is not None:
        with suppress(OSError):
            write_own(folder, own_rank)
        monitor.store.set(answer_key(request, own_rank), "1")
    beating = [rank for rank in ranks if rank in monitor.beats and not monitor.is_silent(rank)]
    deadline = time.monotonic() + ANSWERS + 2 * monitor.interval
    while not _have_answered(monitor, request, beating) and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(OSError):  # the disk may be full by now; the message goes to the screen in any case
        write_missing_stacks(folder, [monitor.beats[rank] for rank in ranks if rank in monitor.beats])
        (folder / "report.txt").write_text(f"{text}\n\n{table}\n")
    return folder


def write_missing_stacks(folder: Path, beats: Iterable[Beat]) -> None:
    """Write the stacks of the ranks on this machine that have not written their own."""
    for beat in beats:
        path = folder / f"rank-{beat.rank}-stack.txt"
        if beat.is_here and not path.exists():
            path.write_text(stacks.read_stacks(beat.pid, beat.stack_file) or stacks.spy(beat.pid) or _last_known(beat))


def _have_answered(monitor: Monitor, request: str, ranks: list[int]) -> bool:
    return not ranks or monitor.store.check([answer_key(request, rank) for rank in ranks])


def _last_known(beat: Beat) -> str:
    """What is known of a process that gives no stacks."""
    state = stacks.process_state(beat.pid) or "its process runs, but does not answer"
    frames = "".join(f"  {frame}\n" for frame in beat.where)
    return (
        f"rank {beat.rank}, process {beat.pid}: {state}. py-spy, which can read its stacks, is not there or may "
        f"not. By its last heartbeat its main thread was at (innermost first):\n{frames}"
    )


def _make_folder(out: Path) -> Path | None:
    name = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = out / FOLDER / f"{name}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            return None
        return folder
    return None


def _table(monitor: Monitor, ranks: list[int]) -> str:
    """The last heartbeats of all ranks."""
    rows = [("rank", "host", "pid", "step", "phase", "no progress", "state", "unfinished collectives", "at")]
    for rank in ranks:
        beat = monitor.beats.get(rank)
        if beat is None:
            rows.append((str(rank), "?", "?", "?", "?", f"{monitor.idle(rank):.1f} s", "no heartbeat yet", "", ""))
            continue
        waits = ", ".join(f"{wait.name} {wait.number} of {wait.group}" for wait in beat.waits)
        phase, step = monitor.place_of(rank)
        silent = "silent" if monitor.is_silent(rank) else "waiting" if beat.seems_to_wait() else "running"
        state = monitor.state_of(rank)
        rows.append(
            (
                str(rank),
                beat.host,
                str(beat.pid),
                "-" if step is None else str(step),
                phase,
                f"{monitor.idle(rank):.1f} s",
                silent if state is None else f"{silent}: {state}",
                waits or "-",
                beat.where[0] if beat.where else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
