# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of each test, with those of all processes that it starts: `pytest -p tests.cpu_times --cpu-times FILE`.

On a shared machine a test's wall time says little. FILE gets a line of JSON for each test, from every xdist worker:
its name, its CPU seconds, and its wall seconds, which exceed the first where a test waits. Servers and pools of
processes are paid by the first test that uses them. `python -m tests.cpu_times FILE` prints the sums by folder and the
dearest tests as Markdown.
"""

import ctypes
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="write each test's CPU seconds into this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-times"):
        set_child_subreaper = 36  # processes whose parents have ended become this process's children
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    file = item.config.getoption("--cpu-times")
    if not file:
        return (yield)
    cpu, wall = _measure_tree(), time.monotonic()
    try:
        return (yield)
    finally:
        used = {"test": item.nodeid, "cpu": _measure_tree() - cpu, "wall": time.monotonic() - wall}
        with Path(file).open("a") as lines:
            lines.write(json.dumps(used) + "\n")


def _measure_tree() -> float:
    """CPU seconds of this process, of its descendants, and of those that their parents have waited for."""
    children, seconds = defaultdict(list), {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children[int(fields[1])].append(int(name))
            seconds[int(name)] = sum(map(int, fields[11:15])) / TICKS
    total, left = 0.0, [os.getpid()]
    while left:
        process = left.pop()
        total += seconds.get(process, 0.0)
        left += children[process]
    return total


def _summarize(file: str) -> None:
    tests = [json.loads(line) for line in Path(file).read_text().splitlines()]
    folders: dict[str, list[dict]] = defaultdict(list)
    for test in tests:
        folders["/".join(test["test"].partition("::")[0].split("/")[1:-1][:2]) or "."].append(test)
    print("| folder | tests | CPU s | wall s |\n|---|---:|---:|---:|")
    for name, inside in sorted(folders.items()):
        print(f"| {name} | {len(inside)} | {_sum(inside, 'cpu'):.0f} | {_sum(inside, 'wall'):.0f} |")
    print(f"| all | {len(tests)} | {_sum(tests, 'cpu'):.0f} | {_sum(tests, 'wall'):.0f} |")
    for quantity, title in (("cpu", "CPU s"), ("wall", "wall s")):
        print(f"\n| test | {title} |\n|---|---:|")
        for test in sorted(tests, key=lambda test: -test[quantity])[:10]:
            print(f"| `{test['test'].removeprefix('tests/')}` | {test[quantity]:.1f} |")


def _sum(tests: list[dict], quantity: str) -> float:
    return sum(test[quantity] for test in tests)


if __name__ == "__main__":
    _summarize(sys.argv[1])
