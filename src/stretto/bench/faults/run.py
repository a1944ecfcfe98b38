# SPDX-License-Identifier: Apache-2.0
"""`stretto bench faults`: runs the jobs of a campaign side by side, and writes what came of every fault."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stretto.bench.faults.judge import judge, judge_end
from stretto.bench.faults.plan import Job, draw_jobs
from stretto.bench.faults.settings import KINDS, FaultsSetting
from stretto.bench.faults.watch import RECORDED_FILE, isolated, write_job
from stretto.bench.harness import Column, print_table, write_result
from stretto.bench.pictures import draw_result

_SECONDS = "{:.1f}"
COLUMNS = (
    Column("kind", "fault"),
    Column("faults", "faults"),
    Column("right", "as it should"),
    Column("named_median", "until named (s), median", _SECONDS),
    Column("named_largest", "largest", _SECONDS),
    Column("again_median", "until training again (s), median", _SECONDS),
    Column("again_largest", "largest", _SECONDS),
    Column("lost_largest", "steps lost, largest"),
    Column("loss_difference", "loss, largest difference", "{:.1g}"),
)


def bench_faults(setting: FaultsSetting, out: Path) -> dict[str, Any]:
    """Run the campaign. Returns its rows by kind and by fault; `failure` says how many did not go as they should.

    Raises ValueError where a job cannot have a disk and /dev/shm of its own.
    """
    _require_namespaces()
    began = time.monotonic()
    jobs = [job for job in draw_jobs(setting) if not setting.only or job.number in setting.only]
    work = Path(tempfile.mkdtemp(prefix="stretto-faults-"))
    with ThreadPoolExecutor(setting.jobs_at_once) as pool:
        grids = {str(job.grid): job for job in reversed(jobs)}
        plain = {key: Job(0, job.grid, job.steps, ()) for key, job in grids.items()}
        folders = [work / f"undisturbed-{number}" for number, _ in enumerate(plain, start=1)]
        recorded = pool.map(lambda job, folder: _run_job(job, folder, setting, limit=120.0), plain.values(), folders)
        undisturbed = {key: record["metrics"] for key, record in zip(plain, recorded, strict=True)}
        for key, job in grids.items():
            if len(undisturbed[key]) != job.steps:
                raise ValueError(f"the undisturbed run on {key} did not train: see {work}")

        def run(job: Job) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            expected = undisturbed[str(job.grid)]
            record = _run_job(job, work / f"job-{job.number}", setting)
            rows = judge(job, record, expected, setting.timeout + setting.grace)
            difference, problems = judge_end(job, record, expected)
            end = {"job": job.number, "loss_difference": difference, "problems": problems}
            _report_job(rows, end)
            return rows, end

        found = list(pool.map(run, jobs))
    rows = [row for of_job, _ in found for row in of_job]
    ends = [end for _, end in found]
    table = [_summarize(kind, [row for row in rows if row["kind"] == kind]) for kind in KINDS.values()]
    table = [row for row in table if row["faults"]]
    table.append(_summarize("all", rows))
    print_table(f"Faults in jobs of {setting.ranks} ranks", COLUMNS, table)
    about = {
        "ranks": setting.ranks,
        "seed": setting.seed,
        "timeout": setting.timeout,
        "limit": setting.timeout + setting.grace,
        "jobs_at_once": setting.jobs_at_once,
        "minutes": (time.monotonic() - began) / 60,
        "ends": ends,
        "faults": rows,
    }
    draw_result(write_result(out, "faults", COLUMNS, table, **about))
    wrong = [row for row in rows if row["problems"]]
    bad_ends = [end for end in ends if end["problems"]]
    failure = None
    if wrong or bad_ends:
        failure = (
            f"{len(wrong)} of {len(rows)} faults and {len(bad_ends)} of {len(ends)} ends of jobs did not go as they "
            f"should; the jobs' records are in {work}"
        )
    else:
        shutil.rmtree(work)
    return {"rows": table, "faults": rows, "ends": ends, "failure": failure}


def _require_namespaces() -> None:
    """Raise ValueError unless processes can be started in a mount namespace of their own."""
    try:
        made = subprocess.run(isolated(["true"]), capture_output=True, text=True)
        why = made.stderr.strip() if made.returncode else ""
    except FileNotFoundError:
        why = "there is no command unshare"
    if why:
        raise ValueError(
            "each job gets a disk and /dev/shm of its own, for which processes must be allowed to make user "
            f"namespaces (or be root's): {why}"
        )


def _run_job(job: Job, folder: Path, setting: FaultsSetting, limit: float | None = None) -> dict[str, Any]:
    """Run a job in a process of its own, and return what was recorded. limit: replaces train.timeout."""
    folder.mkdir()
    write_job(folder, job, limit or setting.timeout)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    with open(folder / "watch.txt", "wb") as log:
        ended = subprocess.run(
            isolated([sys.executable, "-m", "stretto.bench.faults.watch", str(folder)]),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    if ended.returncode or not (folder / RECORDED_FILE).exists():
        raise RuntimeError(f"job {job.number} was not watched to its end: see {folder / 'watch.txt'}")
    recorded: dict[str, Any] = json.loads((folder / RECORDED_FILE).read_text())
    return recorded


def _report_job(rows: Sequence[Mapping[str, Any]], end: Mapping[str, Any]) -> None:
    """Print what came of a job's faults, a line each."""
    for row in rows:
        named, again = (
            "-" if row.get(name) is None else f"{row[name]:.1f} s" for name in ("seconds_named", "seconds_again")
        )
        what = f"{row['kind']} {row['variant']}".strip()
        verdict = "; ".join(row["problems"]) or "right"
        print(
            f"job {row['job']} ({row['grid']}), fault {row['fault']}: {what} of rank {row['rank']} in step "
            f"{row.get('step', '-')}, {row['place']}: named {named}, again {again}: {verdict}",
            file=sys.stderr,
        )
    for problem in end["problems"]:
        print(f"job {end['job']}: {problem}", file=sys.stderr, flush=True)


def _summarize(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table's row for one kind of fault."""
    summary: dict[str, Any] = {
        "kind": kind,
        "faults": len(rows),
        "right": sum(not row["problems"] for row in rows),
    }
    for name in ("named", "again"):
        seconds = [row[f"seconds_{name}"] for row in rows if row.get(f"seconds_{name}") is not None]
        if seconds:
            summary |= {f"{name}_median": statistics.median(seconds), f"{name}_largest": max(seconds)}
    for key, source in (("lost_largest", "steps_lost"), ("loss_difference", "loss_difference")):
        values = [row[source] for row in rows if row.get(source) is not None]
        summary[key] = max(values, default=None)
    return summary
