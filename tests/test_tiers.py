# SPDX-License-Identifier: Apache-2.0
"""Tests of what `make test`, CI and `make nightly` run: nothing is left out of all of them,
and no file out of `make test`.
"""

import ast
import random
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems

ROOT = Path(__file__).parents[1]


class Item:
    """A case of a test, as conftest sees it."""

    def __init__(self, case: int) -> None:
        self.nodeid = f"tests/test_it.py::test_it[{case}]"
        self.sampled = pytest.mark.sampled(3).mark
        self.marks: set[str] = set()

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.sampled if name == "sampled" else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks.add(marker.name)


def test_all_but_a_sample_is_exhaustive():
    drawn = []
    for _ in range(2):
        items = [Item(case) for case in range(10)]
        pytest_collection_modifyitems(items)
        drawn.append([item.marks for item in items])
        random.random()
    assert drawn[0] == drawn[1], "everyone runs the same cases"
    assert drawn[0].count({"exhaustive"}) == 7
    assert drawn[0].count(set()) == 3


@pytest.mark.parametrize(
    ("target", "marks"),
    [
        ("test", ["not exhaustive and not long"]),
        ("test-long", ["long and not exhaustive"]),
        ("test-with-docs", []),  # pytest's own options leave out what is exhaustive
        ("test-exhaustive", ["exhaustive"]),
        ("nightly", ["exhaustive"]),
    ],
)
def test_each_command_runs_its_tiers(target, marks):
    commands = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    runs = [line for line in commands.splitlines() if "-m pytest" in line]
    assert len(runs) == (3 if target == "nightly" else 1)  # nightly's third: the site's
    assert re.findall(r' -m "?((?:not |long|exhaustive|and | )+)', "\n".join(runs)) == marks


def test_ci_runs_long_tests():
    assert "make test-with-docs" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_make_test_runs_something_of_each_file():
    left_out = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "mark.long" not in text or "gpu" in path.parts:
            continue
        tests = [
            node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
        ]
        marks = [{ast.unparse(each).partition("(")[0] for each in test.decorator_list} for test in tests]
        if all({"pytest.mark.long", "pytest.mark.exhaustive"} & each for each in marks):
            left_out.append(path.name)
    assert left_out == []
