# SPDX-License-Identifier: Apache-2.0
"""Runs torch's own tests of backends, which its wheel brings, with the backend stretto: part of `make nightly`.

    python tests/backend_suite/run.py           on CPUs, in the place of gloo and of MPI
    python tests/backend_suite/run.py --gpus    on two GPUs, in the place of NCCL

With arguments, only tests whose names contain one of them. suite.py imports the suite, and expected.py lists the tests
that fail, with the reasons: this fails if one of them passes, or if another fails. The variable STRETTO_SUITE_PASSED
names a file of what has passed: a run that was cut off goes on. Each backend's place is another part
of the suite: MPI's has all-to-alls of CPU tensors.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    """One run of the suite. backend: whose place stretto takes; schedules: whether they run calls of all sizes."""

    backend: str
    ranks: int
    schedules: bool = False


# Some tests need more than 3 ranks, 4 exactly or 8.
ON_CPUS = (Run("gloo", 3), Run("gloo", 4, schedules=True), Run("gloo", 8), Run("mpi", 3), Run("mpi", 4, schedules=True))
ON_GPUS = (Run("nccl", 2), Run("nccl", 2, schedules=True))


def write_schedules(folder: Path, most_ranks: int) -> None:
    """Write schedules of all collectives into the folder, for groups of 2 to `most_ranks` ranks and for each root."""
    from stretto.collectives.algorithms import find
    from stretto.collectives.xml import write_schedule

    for ranks in range(2, most_ranks + 1):
        for name in ("ring-all-gather", "two-shot-all-reduce", "direct-reduce-scatter", "direct-all-to-all"):
            write_schedule(find(name).compile(ranks=ranks), folder / f"{name}-{ranks}.xml")
        for root in range(ranks):
            for name in ("binomial-broadcast", "binomial-reduce"):
                write_schedule(find(name).compile(ranks=ranks, root=root), folder / f"{name}-{ranks}-{root}.xml")


def run(which: Run, patterns: list[str], jobs: int) -> bool:
    """Run the suite once, in `jobs` parts side by side. Returns whether all is as expected."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "BACKEND": which.backend,
        "WORLD_SIZE": str(which.ranks),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else torch's import uses the GPU, and ranks are forked after it
    }
    environment.pop("STRETTO_SCHEDULES", None)
    with tempfile.TemporaryDirectory() as folder:
        environment["INIT_METHOD"] = f"file://{folder}/init"
        if which.schedules:
            write_schedules(Path(folder), which.ranks)
            environment["STRETTO_SCHEDULES"] = folder
        suite = [sys.executable, str(Path(__file__).with_name("suite.py")), *patterns]
        if jobs == 1:
            return subprocess.run(suite, env=environment, check=False).returncode == 0
        outputs = [Path(folder, f"part-{part}") for part in range(jobs)]
        running = []
        for part, output in enumerate(outputs, 1):
            inits = {"INIT_METHOD": f"file://{folder}/init-{part}"}
            with output.open("w") as file:
                command = [*suite, "--part", f"{part}/{jobs}"]
                running.append(subprocess.Popen(command, env=environment | inits, stdout=file, stderr=file))
        try:
            failed = [process.wait() != 0 for process in running]
        finally:  # also of a run that is cut off
            for process in running:
                process.terminate()
            for output in outputs:
                print(output.read_text(errors="replace"), flush=True)
        return not any(failed)


def leave(*_: object) -> None:
    """Leave by an exception, once: `timeout` sends its signal twice."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--gpus", action="store_true", help="on two GPUs, in the place of NCCL")
    parser.add_argument("--only", type=int, metavar="N", help="the N-th of the runs alone, from 1 on")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="parts of a run side by side")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    sys.path[:0] = [str(ROOT / "src")]
    runs = ON_GPUS if options.gpus else ON_CPUS
    failed = []
    for which in runs if options.only is None else runs[options.only - 1 : options.only]:
        with_schedules = ", with schedules" if which.schedules else ""
        title = f"in the place of {which.backend} with {which.ranks} ranks{with_schedules}"
        print(f"== stretto {title}", flush=True)
        if not run(which, options.patterns, options.jobs):
            failed.append(title)
    for title in failed:
        print(f"not as expected: {title}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
