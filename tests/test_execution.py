"""Options of how a step executes, which train, the planner and parallelize share."""

import subprocess
import sys

import pytest

from stretto import parallel
from stretto.execution import ExecutionOptions, Overlap


def test_options_are_changed_by_name_and_overlap_may_be_a_bool():
    options = ExecutionOptions().replace(overlap=False, keep_gathered=False)
    assert options == ExecutionOptions(Overlap.parse(False), keep_gathered=False)
    assert options.replace(overlap=True) == ExecutionOptions(keep_gathered=False)
    with pytest.raises(TypeError, match="keep_gatherd"):
        options.replace(keep_gatherd=True)


def test_copy_engines_alone_hide_nothing():
    assert Overlap().hides_any
    assert not Overlap.parse(False).hides_any
    assert Overlap.parse(False).copy_engines
    assert parallel.Overlap is Overlap


def test_neither_options_nor_planner_import_torch():
    program = "import sys, stretto.execution, stretto.planner, stretto.axes; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
