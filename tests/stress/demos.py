# SPDX-License-Identifier: Apache-2.0
"""Runs the demo's short form again and again: `python tests/stress/demos.py [--times 100] [-- OPTIONS]`.

A run that does not end with status 0, that prints a traceback or a warning of a stall, or that leaves a process, shared
memory or a temporary file behind is a failure. It stops at none: all runs are counted, and the logs of failures kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIGNS = ("Traceback", "Segmentation fault", "is stuck", "silent", "core dumped")


# Each run has a /dev/shm of its own, where this user may mount one: other programs' files are not taken for its own.
ISOLATE = 'mount -t tmpfs tmpfs /dev/shm && { "$@"; status=$?; ls -A /dev/shm > $TMPDIR/../shared; exit $status; }'


def isolation() -> list[str]:
    """The beginning of a command with a /dev/shm of its own; empty where that is not allowed."""
    command = ["unshare", "--mount", "--", "sh", "-c", ISOLATE, "sh"]
    with tempfile.TemporaryDirectory() as folder:
        (inner := Path(folder, "tmp")).mkdir()
        tried = subprocess.run([*command, "true"], env=os.environ | {"TMPDIR": str(inner)}, capture_output=True)
    return command if tried.returncode == 0 else []


def children(variable: str) -> list[str]:
    """The processes whose environment has this variable: those of a demo."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
        except OSError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the demo again and again.")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    parser.add_argument("options", nargs="*", help="of stretto demo, after --")
    given = parser.parse_args()
    failures, seconds, isolated = [], [], isolation()
    with tempfile.TemporaryDirectory(prefix="stretto-demos-") as folder:
        started = time.monotonic()
        for number in range(given.times):
            if time.monotonic() - started > given.seconds:
                break
            mark = f"STRETTO_DEMO_NUMBER={os.getpid()}-{number}"
            began, temporary, shared = time.monotonic(), Path(folder, "tmp"), Path(folder, "shared")
            temporary.mkdir(exist_ok=True)
            shared.write_text("")
            command = ["-m", "stretto", "demo", "--steps", str(given.steps), "--out", f"{folder}/out", *given.options]
            done = subprocess.run(
                [*isolated, sys.executable, *command],
                env=os.environ | dict([mark.split("=")]) | {"TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
            seconds.append(time.monotonic() - began)
            problems = [] if done.returncode == 0 else [f"status {done.returncode}"]
            problems += [f"it says {sign!r}" for sign in SIGNS if sign in done.stdout + done.stderr]
            deadline = time.monotonic() + 10.0  # a watcher ends a moment after its launcher
            while (running := children(mark)) and time.monotonic() < deadline:
                time.sleep(0.05)
            problems += [f"left a process: {each}" for each in running]
            problems += [f"left in /dev/shm: {name}" for name in shared.read_text().split()]
            left = [path.name for path in temporary.iterdir() if "torchinductor" not in path.name]  # which is a cache
            problems += [f"left a temporary file: {name}" for name in left]
            if problems:
                failures.append({"run": number + 1, "problems": problems, "end": (done.stdout + done.stderr)[-2000:]})
                print(json.dumps(failures[-1]), file=sys.stderr, flush=True)
    ordered = sorted(seconds)
    print(
        json.dumps(
            {
                "runs": len(seconds),
                "failures": len(failures),
                "seconds, median": round(ordered[len(ordered) // 2], 1),
                "seconds, longest": round(ordered[-1], 1),
            }
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
