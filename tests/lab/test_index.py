# SPDX-License-Identifier: Apache-2.0
"""The list of committed runs, and the lab's benches as their files declare them."""

import subprocess
import sys
from importlib import import_module

import pytest

from lab.commands import app
from lab.harness import _read, columns_of, find_benches
from lab.index import INDEX, RESULTS, write_index


def test_the_index_of_committed_runs_is_up_to_date():
    assert INDEX.read_text() == write_index(), "python -m lab index writes it again"


def test_the_index_has_every_folder_of_results():
    lines = [line for line in write_index().splitlines() if line.startswith("| [")]
    assert len(lines) == sum(path.is_dir() for path in RESULTS.iterdir()) > 40


@pytest.mark.parametrize("found", find_benches(), ids=lambda found: found.name)
def test_a_benchs_file_declares_what_it_is(found):
    module = import_module(found.module)
    bench = module.BENCH
    assert (bench.name, bench.summary, bench.needs) == (found.name, found.summary, found.needs)
    assert bench.settings is getattr(module, found.settings)
    plots = bench.plot if isinstance(bench.plot, dict) else {bench.name: bench.plot} if bench.plot else {}
    assert plots == {pattern: getattr(module, plot) for pattern, plot in found.plots}
    assert found.name in app.lazy
    assert columns_of(bench.row)


def test_options_of_benches_are_known_without_torch():
    program = (
        "import sys, lab\n"
        "assert 'typer' not in sys.modules\n"
        "from lab.harness import find_benches\n"
        "for found in find_benches():\n"
        "    found.load_settings()\n"
        "    assert 'torch' not in sys.modules, found.module\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=INDEX.parents[2], check=True)


@pytest.mark.parametrize("arguments", ['NAME, "What.", Setting', '"name", "What.", Setting, plot=lambda: None'])
def test_a_declaration_that_the_listing_cannot_show_is_refused(arguments):
    path = INDEX.parents[1] / "made_up.py"
    with pytest.raises(ValueError, match=r"made_up\.py: BENCH"):
        _read(path, f"\nBENCH = Bench(\n    {arguments},\n)\n")
