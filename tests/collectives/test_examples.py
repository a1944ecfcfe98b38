# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/collectives.md run as the page says."""

import importlib.util
import re
from pathlib import Path

import pytest

from stretto.collectives import verify

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "collectives.md").read_text()


@pytest.fixture(scope="module")
def examples():
    spec = importlib.util.spec_from_file_location("collective_examples", ROOT / "examples" / "collectives.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_examples_verify_and_are_drawn(examples, tmp_path, capsys):
    examples.main(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (ROOT / "docs" / "collectives").iterdir()
    )
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_pages_first_program_and_own_collective_run():
    first, own = (
        re.search(rf"```python\n(.*?{word}.*?)```", PAGE, re.DOTALL)[1] for word in ("AllGather, algorithm", "halves =")
    )
    names = {}
    exec(first, names)
    assert verify(names["schedule"]).ok
    own = own[own.rindex("```python\n") + 10 :] if "```python" in own else own
    exec(own, names)
    assert names["halves"].expected(1, 0) == ((1, 0), (3, 0))
