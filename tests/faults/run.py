# SPDX-License-Identifier: Apache-2.0
"""`python -m lab faults`: runs the jobs of a campaign concurrently, and writes the outcome of every fault."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from lab.pictures import draw_result
from stretto.bench.harness import print_table, write_result
from stretto.cluster.detection import machine_kind
from tests.faults.judge import judge, judge_end
from tests.faults.plan import Job, draw_jobs, estimate_seconds
from tests.faults.report import COLUMNS, print_job, summarize
from tests.faults.settings import KINDS, FaultsSetting
from tests.faults.watch import RECORDED_FILE, isolation, write_job

RESULT = "faults"  # the name of its JSON, table and picture


class Campaign:
    """The outcome of the jobs so far, written whenever a job ends: a campaign can be cut short, or run in parts.

    The rows of jobs that `--only` leaves out are those of the result in `out`, if that is of the same draw.
    """

    def __init__(self, setting: FaultsSetting, out: Path) -> None:
        self._setting, self._out = setting, out
        self._began, self._lock = time.monotonic(), Lock()
        self._of_draw = {
            name: getattr(setting, name) for name in ("ranks", "seed", "timeout", "grace", "faults_a_job")
        } | {"kinds": list(setting.kinds), "planned": setting.faults}
        self._minutes = 0.0
        self.rows: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        before = out / f"{RESULT}.json"
        if setting.only and before.exists():
            known = json.loads(before.read_text())
            if all(known.get(name) == value for name, value in self._of_draw.items()):
                self._minutes = known["minutes"]
                self.rows = [row for row in known["faults"] if row["job"] not in setting.only]
                self.ends = [end for end in known["ends"] if end["job"] not in setting.only]

    def add(self, rows: list[dict[str, Any]], end: dict[str, Any]) -> Path:
        """Add a job, and write the result. Returns the JSON's path."""
        with self._lock:
            self.rows = sorted([*self.rows, *rows], key=lambda row: (row["job"], row["fault"]))
            self.ends = [each for each in self.ends if each["job"] != end["job"]] + [end]
            about = self._of_draw | {
                "machine": machine_kind() | {"devices": f"{os.cpu_count()} CPU cores"},
                "limit": self._setting.timeout + self._setting.grace,
                "jobs_at_once": self._setting.jobs_at_once,
                "minutes": self._minutes + (time.monotonic() - self._began) / 60,
                "ends": self.ends,
                "faults": self.rows,
            }
            return write_result(self._out, RESULT, COLUMNS, self.table(), **about)

    def table(self) -> list[dict[str, Any]]:
        """A row for each kind of fault, and one for all."""
        table = [summarize(kind, [row for row in self.rows if row["kind"] == kind]) for kind in KINDS.values()]
        return [row for row in table if row["faults"]] + [summarize("all", self.rows)]


def bench_faults(setting: FaultsSetting, out: Path) -> dict[str, Any]:
    """Run the campaign. Returns its rows by kind and by fault; `failure` states how many did not pass.

    Raises ValueError where a job cannot have a disk and /dev/shm of its own.
    """
    isolation()  # or refuse at once
    jobs = [job for job in draw_jobs(setting) if not setting.only or job.number in setting.only]
    jobs.sort(key=lambda job: estimate_seconds(job, setting.timeout), reverse=True)  # so that all end together
    work = Path(tempfile.mkdtemp(prefix="stretto-faults-"))
    campaign = Campaign(setting, out)
    with ThreadPoolExecutor(setting.jobs_at_once) as pool:
        plain = {str(job.grid): Job(0, job.grid, job.steps, ()) for job in jobs}
        undisturbed = dict(
            zip(plain, pool.map(lambda job: _run_undisturbed(job, work, setting), plain.values()), strict=True)
        )
        for key, record in undisturbed.items():
            if len(record["metrics"]) != plain[key].steps:
                raise ValueError(f"the undisturbed run on {key} did not train: see {work}")
            difference, problems = judge_end(plain[key], record, record["metrics"])
            problems += [f"it failed: {ended['message']}" for ended in record["ended"] if ended["message"]]
            campaign.add([], {"job": f"undisturbed, {key}", "loss_difference": difference, "problems": problems})

        def run(job: Job) -> Path:
            expected = undisturbed[str(job.grid)]["metrics"]
            record = _run_job(job, work / f"job-{job.number}", setting)
            rows = judge(job, record, expected, setting.timeout, setting.grace)
            # Messages contain the job's paths and this machine's name, which a result must not.
            text = json.dumps(rows).replace(f"{work}/", "")
            rows = json.loads(text.replace(f"(host {socket.gethostname()},", "(host localhost,"))
            difference, problems = judge_end(job, record, expected)
            end = {"job": job.number, "loss_difference": difference, "problems": problems}
            print_job(rows, end)
            return campaign.add(rows, end)

        written = list(pool.map(run, jobs))
    draw_result(written[-1])
    print_table(f"Faults in jobs of {setting.ranks} ranks", COLUMNS, campaign.table())
    wrong = [row for row in campaign.rows if row["problems"]]
    bad_ends = [end for end in campaign.ends if end["problems"]]
    failure = None
    if wrong or bad_ends:
        failure = (
            f"{len(wrong)} of {len(campaign.rows)} faults and {len(bad_ends)} of {len(campaign.ends)} ends of jobs did "
            f"not pass; the jobs' records are in {work}"
        )
    else:
        shutil.rmtree(work)
    return {"rows": campaign.table(), "faults": campaign.rows, "ends": campaign.ends, "failure": failure}


def _run_undisturbed(job: Job, work: Path, setting: FaultsSetting) -> dict[str, Any]:
    name = "-".join(f"{axis}{size}" for axis, size in job.grid.items())
    return _run_job(job, work / f"undisturbed-{name}", setting, limit=120.0)


def _run_job(job: Job, folder: Path, setting: FaultsSetting, limit: float | None = None) -> dict[str, Any]:
    """Run a job in a process of its own, and return its records. limit: replaces train.timeout."""
    folder.mkdir()
    write_job(folder, job, limit or setting.timeout)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # ranks on the CPU, also where there are GPUs
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    with open(folder / "watch.txt", "wb") as log:
        ended = subprocess.run(
            [*isolation(), sys.executable, "-P", "-m", "tests.faults.watch", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    if ended.returncode or not (folder / RECORDED_FILE).exists():
        raise RuntimeError(f"job {job.number} was not watched to its end: see {folder / 'watch.txt'}")
    recorded: dict[str, Any] = json.loads((folder / RECORDED_FILE).read_text())
    return recorded
