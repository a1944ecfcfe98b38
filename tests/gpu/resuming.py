# SPDX-License-Identifier: Apache-2.0
"""Splits a long test run into parts, and resumes interrupted ones: pytest's options --shard K/N and --passed FILE.

The file has a line for the code that was tested, a hash of src/ and tests/, and one for each test that passed. With
other code it begins anew.

`python -m tests.gpu.resuming build/gpu-test-*-of-8.xml` stores what the tests of a run took, by which the next is
split; with --own, of a machine whose ranks had a GPU each.
"""

import argparse
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.gpu.sharing import count_gpus

ROOT = Path(__file__).parents[2]
SECONDS = Path(__file__).with_name("seconds.json")
_UNKNOWN_SECONDS = 15.0
_START_SECONDS = 12.0
"""What a pool of ranks takes to start, to import and to load its first kernels."""
_KEY = "stretto_passed"

Group = tuple[str, str]
"""A test file's path and a number of ranks, as in "4-ranks"."""


def configure(config: pytest.Config) -> None:
    """Read what has passed, once: pytest-xdist's workers, which must choose alike, get it from their controller."""
    path = config.getoption("--passed")
    workers_input = getattr(config, "workerinput", None)
    if workers_input is not None:
        passed = set(workers_input.get(_KEY, ()))  # a controller that was not given this folder has not read any
    else:
        passed = set() if path is None else _begin(Path(path))
        config.pluginmanager.register(_Recorder(None if path is None else Path(path), sorted(passed)))
    config.stash[_PASSED] = passed
    parse_shard(config.getoption("--shard"))


_PASSED = pytest.StashKey[set[str]]()


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of other shards, and tests that have passed; tests of one number of ranks follow each other.

    pytest puts tests of one parameter next to each other by its place in each test's list, and not by its value.
    """
    part, parts = parse_shard(config.getoption("--shard"))
    shards = assign_shards({_group_of(item.nodeid) for item in items}, parts, own_gpus=count_gpus() > 1)
    passed = config.stash[_PASSED]
    kept = [item for item in items if shards[_group_of(item.nodeid)] == part - 1 and item.nodeid not in passed]
    left_out = len(items) - len(kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = sorted(kept, key=lambda item: _group_of(item.nodeid)[1])


def assign_shards(groups: set[Group], parts: int, *, own_gpus: bool = False) -> dict[Group, int]:
    """The shard, 0 to parts - 1, of each group, such that all take about as long: the longest first, to the emptiest.

    A group is the tests of one file and one number of ranks, which share processes, and often a run. SECONDS has what
    `make gpu-test` was measured to spend on each, and, if each rank has a GPU of its own, on all tests of a file. A
    shard also starts a pool for each number of ranks that it has.
    """
    seconds = json.loads(SECONDS.read_text())
    estimates = {
        group: seconds.get(f"{Path(group[0]).name} {'own' if own_gpus else group[1]}", _UNKNOWN_SECONDS)
        for group in groups
    }
    filled = [0.0] * parts
    started: list[set[str]] = [set() for _ in range(parts)]
    shards = {}
    for group in sorted(groups, key=lambda group: (-estimates[group], group)):
        ends = [filled[part] + _START_SECONDS * (group[1] not in started[part]) for part in range(parts)]
        shards[group] = part = ends.index(min(ends))
        filled[part] = ends[part] + estimates[group]
        started[part].add(group[1])
    return shards


def measure(results: Sequence[Path], *, own_gpus: bool = False) -> dict[str, int]:
    """SECONDS of JUnit files, each of a shard: what their groups took without the starts of pools."""
    seconds: dict[str, float] = defaultdict(float)
    for path in results:
        ranks = None
        for case in ElementTree.parse(path).iter("testcase"):
            if "name" not in case.attrib:  # pytest could not collect a file
                continue
            file = case.attrib["classname"].rpartition(".")[2] + ".py"
            group, took = _group_of(f"{file}::{case.attrib['name']}"), float(case.attrib["time"])
            if group[1] != ranks and took >= _START_SECONDS:
                ranks, took = group[1], took - _START_SECONDS
            seconds[f"{file} {'own' if own_gpus else group[1]}"] += took
    return {name: max(1, round(each)) for name, each in seconds.items()}


def parse_shard(text: str) -> tuple[int, int]:
    """(part, of so many), from "1/4". pytest's UsageError for what is none."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--shard is {text!r}, but must be K/N with K from 1 to N, such as 1/4")
    return part, parts


def hash_code(root: Path) -> str:
    """A digest of all files of src/ and tests/ that git tracks or does not ignore."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _group_of(name: str) -> Group:
    ranks = re.search(r"\b(\d+-ranks)\b", name)
    return name.partition("::")[0], ranks[1] if ranks else ""


def _begin(path: Path) -> set[str]:
    """The tests that have passed with this code according to the file, which is started anew for other code."""
    code = hash_code(ROOT)
    lines = path.read_text().splitlines() if path.exists() else []
    if lines[:1] == [code]:
        return set(lines[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code + "\n")
    return set()


class _Recorder:
    """Records each test that passes at once, so that a run may be interrupted at any moment."""

    def __init__(self, path: Path | None, passed: list[str]) -> None:
        self._path, self._passed = path, passed
        self._failed: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        """Of pytest-xdist: a worker is about to start."""
        node.workerinput[_KEY] = self._passed  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self._failed.add(report.nodeid)
        if self._path is not None and report.when == "teardown" and report.nodeid not in self._failed:
            with self._path.open("a") as file:
                file.write(report.nodeid + "\n")
                file.flush()
                os.fsync(file.fileno())

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            print(f"\nall of it has passed before: delete {self._path} to run it again")
            session.exitstatus = pytest.ExitCode.OK


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--own", action="store_true", help="each rank had a GPU of its own")
    parser.add_argument("results", type=Path, nargs="+", help="pytest's JUnit files, of all shards")
    given = parser.parse_args()
    stored = json.loads(SECONDS.read_text()) | measure(given.results, own_gpus=given.own)
    files = {path.name for path in SECONDS.parent.glob("test_*.py")}
    stored = {name: each for name, each in sorted(stored.items()) if name.partition(" ")[0] in files}
    SECONDS.write_text(json.dumps(stored, indent=1) + "\n")
