# SPDX-License-Identifier: Apache-2.0
"""Runs tests/versions with the oldest and the newest Python, torch and Triton: `make test-versions`.

oldest.txt and newest.txt pin torch and Triton; all other packages have the versions of constraints.txt. The oldest set
runs with the oldest Python that is installed, the newest with the newest. Each set has a virtual environment, which is
made anew only when its pins or its Python change. What is not installed here is reported as not run. This needs only
Python's standard library.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # those that torch's builds are for, from pyproject.toml's oldest on
TOOLS = ("triton", "matplotlib", "pytest", "pytest-timeout", "hypothesis")  # all that modules and tests import
GIGABYTES = 8  # of a virtual environment while it is installed: torch's builds for CUDA bring their libraries
SMOKE = ("tests/versions", "tests/ops/test_launches.py")
MORE = (
    "tests/tiles",
    "tests/ops/test_machine_code.py",
    "tests/ops/test_embedding_machine_code.py",
    "tests/collectives/backend",
    "tests/memory",
    "tests/parallel/test_parity.py",
)
REPORT = "import platform, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)"


class Outcome(NamedTuple):
    """Outcome of one set. ok: nothing failed. line: a line for the log's end. log: what the commands printed."""

    ok: bool
    line: str
    log: str = ""


class StepError(Exception):
    """A command failed; its text is what the command printed."""


def find_python(version: str) -> str | None:
    """The path of this Python, on PATH or under pyenv, if it can make virtual environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for program in (f"python{version}", *sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))):
        check = "import ensurepip, sys, venv; print(sys.executable, '{}.{}'.format(*sys.version_info))"
        try:  # pyenv's shims are on PATH also for versions that are not active, and fail
            found = subprocess.run([program, "-c", check], capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):
            continue
        if found[1] == version:
            return found[0]
    return None


def run(command: list[str], **variables: str) -> str:
    """Run a command in the root of the repository; returns what it prints, raises StepError with it if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ended.returncode != 0:
        raise StepError(f"$ {' '.join(command)}\n{ended.stdout}")
    return ended.stdout


def read_pins(name: str) -> list[str]:
    lines = (ROOT / "tests" / "versions" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def install(name: str, python: str, folder: Path) -> str | None:
    """Make the set's virtual environment, unless there is one; None, or why there is no room for it."""
    pins = read_pins(name)
    pinned = {pin.partition("==")[0] for pin in pins}
    others = (ROOT / "constraints.txt").read_text().splitlines()
    others = [line for line in others if not line.startswith("#") and line.partition("==")[0] not in pinned]
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = "\n".join([python, *packages, *TOOLS, *pins, *others])
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == hashlib.sha256(wanted.encode()).hexdigest():
        return None
    shutil.rmtree(folder, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < GIGABYTES:
        return f"{GIGABYTES} GB of disk are needed, and {free:.1f} GB are free"
    run([python, "-m", "venv", str(folder)])
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pins, *others]) + "\n")
    # As a variable, the constraints replace those of the machine's own configuration, which may exclude these versions.
    run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile",
         "--disable-pip-version-check", *packages, *TOOLS], PIP_CONSTRAINT=str(constraints))  # fmt: skip
    stamp.write_text(hashlib.sha256(wanted.encode()).hexdigest())
    return None


def check_versions(name: str, python: str) -> str:
    """The installed versions, for the log; StepError if they are not those that are pinned."""
    found = dict(zip(("Python", "torch", "triton"), run([python, "-c", REPORT]).splitlines()[-1].split(), strict=True))
    for pin in read_pins(name):
        package, _, version = pin.partition("==")
        if found[package].partition("+")[0] != version:
            raise StepError(f"{package} is {found[package]}, not {version}")
    return f"Python {found['Python']}, torch {found['torch']}, Triton {found['triton']}"


def try_set(name: str, version: str, python: str, folder: Path, tests: tuple[str, ...], marks: str) -> Outcome:
    """Install a set and run those of the tests with it that have these marks."""
    title = f"{name}: Python {version}, {', '.join(read_pins(name))}"
    try:
        missing = install(name, python, folder)
    except StepError as error:  # an index that does not have these versions, or none
        missing = f"its packages cannot be installed here: {str(error).splitlines()[-1]}"
    if missing:
        return Outcome(True, f"{title}: not run: {missing}")
    try:
        python = str(folder / "bin" / "python")
        title = f"{name}: {check_versions(name, python)}"
        log = run(
            [python, "-m", "pytest", *tests, "-m", marks, "--durations", "5"],
            PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="",
            TRITON_CACHE_DIR=str(folder / "kernels"),
        )  # fmt: skip
        summary = next(line for line in reversed(log.splitlines()) if " passed" in line)  # libraries may print after it
        return Outcome(True, f"{title}: {summary.strip('= ')}", log)
    except StepError as error:
        return Outcome(False, f"{title}: FAILED", str(error))


def find_newer() -> str | None:
    """A notice if the package index has a newer torch than newest.txt; None if not, or if it cannot be asked."""
    try:
        listed = run([sys.executable, "-m", "pip", "index", "versions", "torch"])
    except StepError:
        return None
    newest = re.search(r"^torch \(([\d.]+)\)", listed, re.MULTILINE)
    pinned = read_pins("newest")[0].partition("==")[2]
    if newest is None or newest[1] == pinned:
        return None
    return f"notice: the package index has torch {newest[1]}, and tests/versions/newest.txt pins {pinned}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="of virtual environments")
    parser.add_argument(
        "--exhaustive", action="store_true", help="more tests: kernels' machine code, the backend, grids"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    installed = {version: path for version in PYTHONS if (path := find_python(version))}
    if not installed:
        print(f"none of Python {', '.join(PYTHONS)} can make virtual environments here: install python3-venv")
        return 1
    tests = SMOKE + MORE if options.exhaustive else SMOKE
    marks = "not exhaustive" if options.exhaustive else "not exhaustive and not long"
    sets = [("oldest", min(installed, key=PYTHONS.index)), ("newest", max(installed, key=PYTHONS.index))]
    with open(folder / "lock", "w") as lock, ThreadPoolExecutor(len(sets)) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another checkout may use the same folder
        begun = [
            pool.submit(try_set, name, version, installed[version], folder / name, tests, marks)
            for name, version in sets
        ]
        outcomes = [one.result() for one in begun]
    for outcome in outcomes:
        print(outcome.log)
    for outcome in outcomes:
        print(outcome.line)
    for version in PYTHONS:
        if version not in installed and version in (PYTHONS[0], PYTHONS[-1]):
            print(f"Python {version}: not run: it is not installed here, or without its module venv")
    if notice := find_newer():
        print(notice)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
