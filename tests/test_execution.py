# SPDX-License-Identifier: Apache-2.0
"""Options of how a step executes, which train, the planner and parallelize share."""

import subprocess
import sys

import pytest
from torch import nn

from stretto import parallel
from stretto.execution import ExecutionOptions, Overlap
from stretto.train.config import make_config


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


def test_a_run_file_sets_how_its_steps_execute():
    content = {
        "out": "runs/one",
        "model": {"layers": 1, "hidden": 8, "heads": 1},
        "data": {"path": "python-docs"},
        "train": {"steps": 1, "batch": 1, "seq_len": 8, "keep_gathered": False, "checkpoint_activations": True},
        "overlap": {"data": False},
    }
    expected = ExecutionOptions(Overlap(data=False), keep_gathered=False, checkpoint_activations=True)
    assert make_config(content).execution == expected


def test_unknown_options_and_a_model_without_blocks_are_refused_before_anything_changes(ranks):
    assert ranks(1).run(refusals) == [True]


def refusals() -> bool:
    model = nn.Sequential(nn.Linear(4, 4))
    roles = {"0": "colwise"}
    with pytest.raises(TypeError, match="keep_gatherd"):
        parallel.parallelize(model, parallel.Grid(), roles=roles, keep_gatherd=True)
    with pytest.raises(ValueError, match=r"has no nn\.ModuleList"):
        parallel.parallelize(model, parallel.Grid(), roles=roles, options=ExecutionOptions(checkpoint_activations=True))
    return type(model[0]) is nn.Linear
