# SPDX-License-Identifier: Apache-2.0
"""Runs `make test` as on a slow machine: a fresh clone, empty caches, one core with a busy loop on it.

`python tests/slow_machine.py` installs everything into the clone, too; `--venv .venv` uses an environment that there
is. `--tests tests/collectives/backend` runs a part. Only what is committed is tested. The exit status is that of
`make`, or 1 if a process is left. All of it is in one temporary folder, which is removed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TMPDIR": "tmp",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="the virtual environment to use (default: a new one in the clone)")
    parser.add_argument("--tests", nargs="+", help="what pytest collects (default: as make test)")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="the core to run on")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is temporary is removed
    with tempfile.TemporaryDirectory(prefix="stretto-slow-", ignore_cleanup_errors=True) as folder:
        clone = Path(folder, "stretto")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for name in CACHES.values():
            Path(folder, name).mkdir()
        variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "STRETTO_CACHE")}
        variables |= {name: str(Path(folder, place)) for name, place in CACHES.items()}
        variables["PYTHONPATH"] = str(clone / "src")  # not the checkout that the environment was made for
        command = ["make", "test"]
        if options.venv is not None:
            venv = options.venv.absolute()
            command += [f"VENV={venv}", f"--old-file={venv}/.installed"]
        if options.tests:
            command.append(f"CODE_TESTS={' '.join(options.tests)}")
        os.sched_setaffinity(0, {options.core})  # and of all that it starts
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            status = subprocess.run(command, cwd=clone, env=variables).returncode
        finally:
            busy.kill()
            busy.wait()
        for _ in range(60):  # what was told to end ends, slowly
            left = find_processes(folder)
            if not left:
                break
            time.sleep(1)
        for pid, line in left:
            print(f"process {pid} is left: {line}", file=sys.stderr)
    return status or bool(left)


def find_processes(folder: str) -> list[tuple[int, str]]:
    """The processes whose environment names the folder: their ids and commands."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and folder.encode() in (process / "environ").read_bytes():
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(process.name), line[:200]))
        except OSError:  # it has ended, or is another user's
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
