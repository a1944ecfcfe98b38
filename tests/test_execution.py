# SPDX-License-Identifier: Apache-2.0
"""Options of how a step executes, which train, the planner and parallelize share."""

import subprocess
import sys
from dataclasses import fields

import pytest
from torch import nn

from stretto import parallel
from stretto.execution import ExecutionKeywords, ExecutionOptions, Overlap, option_help
from stretto.train.config import make_config
from stretto.train.config.gpt import RunConfig


def test_options_are_changed_by_name_and_overlap_may_be_a_bool():
    options = ExecutionOptions().replace(overlap=False, reshard="after_forward")
    assert options == ExecutionOptions(Overlap.parse(False), reshard="after_forward")
    assert options.replace(overlap=True) == ExecutionOptions(reshard="after_forward")
    with pytest.raises(TypeError, match="there is no option 'reshrad'; did you mean 'reshard'"):
        options.replace(reshrad="after_step")


def test_each_option_is_described_once_and_an_unknown_policy_is_refused():
    described = {each.name: each.metadata["help"] for each in fields(ExecutionOptions)}
    assert [*ExecutionKeywords.__annotations__] == [*described]
    of_file = {name: field.description for name, field in RunConfig.model_fields.items() if name in described}
    assert of_file == {name: described[name] for name in described if name not in ("overlap", "fp8", "stages")}
    for name in described:
        assert f"{name}: {option_help(name)}" in " ".join((ExecutionOptions.__doc__ or "").split())
    with pytest.raises(ValueError, match="reshard is 'never', but must be one of after_forward, after_backward"):
        ExecutionOptions(reshard="never")
    for wrong in ("yes", 1, None):
        with pytest.raises(ValueError, match=f"two_level is {wrong!r}, but must be 'auto', True or False"):
            ExecutionOptions(two_level=wrong)


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
        "train": {
            "steps": 1,
            "batch": 1,
            "seq_len": 8,
            "reshard": "after_forward",
            "recompute": "full",
            "two_level": "auto",
        },
        "overlap": {"data": False},
    }
    expected = ExecutionOptions(Overlap(data=False), reshard="after_forward", recompute="full", two_level="auto")
    assert make_config(content).execution == expected


def test_unknown_options_and_a_model_without_blocks_are_refused_before_anything_changes(ranks):
    assert ranks(1).run(refusals) == [True]


def refusals() -> bool:
    model = nn.Sequential(nn.Linear(4, 4))
    roles = {"0": "colwise"}
    with pytest.raises(TypeError, match="reshrad"):
        parallel.parallelize(model, parallel.Grid(), roles=roles, reshrad="after_step")
    with pytest.raises(ValueError, match=r"has no nn\.ModuleList"):
        parallel.parallelize(model, parallel.Grid(), roles=roles, options=ExecutionOptions(recompute="full"))
    return type(model[0]) is nn.Linear
