# SPDX-License-Identifier: Apache-2.0
"""Options of how a step executes, which train, the planner and parallelize share."""

import subprocess
import sys
from dataclasses import fields

import pytest
from torch import nn

from stretto import parallel
from stretto.execution import ExecutionKeywords, ExecutionOptions, Overlap, StageOptions, StateOptions, option_help
from stretto.models import GPTConfig
from stretto.recommendation import DLRMConfig, TableSize
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
    keywords = (parallel.parallelize.__doc__ or "").partition("keyword")[2]
    assert [name for name in described if name not in keywords] == []
    for name in described:
        assert f"{name}: {option_help(name)}" in " ".join((ExecutionOptions.__doc__ or "").split())
    with pytest.raises(ValueError, match="reshard is 'never', but must be one of after_forward, after_backward"):
        ExecutionOptions(reshard="never")
    for wrong in ("yes", 1, None):
        with pytest.raises(ValueError, match=f"two_level is {wrong!r}, but must be 'auto', True or False"):
            ExecutionOptions(two_level=wrong)


OF_ANOTHER_KIND = [
    (ExecutionOptions().replace, {"overlap": "off"}, "overlap is 'off', but must be True, False or an Overlap"),
    (ExecutionOptions, {"overlap": False}, "overlap is False, but must be Overlap"),
    (ExecutionOptions, {"shard_sequence": "no"}, "shard_sequence is 'no', but must be True or False"),
    (ExecutionOptions, {"tune_matmuls": None}, "tune_matmuls is None, but must be True or False"),
    (ExecutionOptions, {"drop_duplicates": 0}, "drop_duplicates is 0, but must be True or False"),
    (ExecutionOptions, {"expert_rows": 1.5}, "expert_rows is 1.5, but must be a whole number or None"),
    (ExecutionOptions, {"expert_reduce": "ranks"}, "expert_reduce is 'ranks', but .* choice; did you mean 'rank'"),
    (ExecutionOptions, {"stages": {"cuts": (1,)}}, r"stages is {'cuts': \(1,\)}, but must be StageOptions"),
    (Overlap, {"data": "no"}, "overlap's data is 'no', but must be True or False"),
    (StageOptions, {"cuts": 3}, r"stages' cuts is 3, but must be tuple\[int, ...\] or None"),
    (StageOptions, {"virtual_stages": "2"}, "stages' virtual_stages is '2', but must be a whole number"),
    (StageOptions, {"placement": "w"}, "stages' placement is 'w', but must be one of loops, v"),
    (StateOptions, {"splits_weights": "no"}, "splits_weights is 'no', but must be True or False"),
    (StateOptions, {"bucket_size": 64.0}, "bucket_size is 64.0, but must be a whole number"),
    (GPTConfig, {"positions": "rotry"}, "model.positions is 'rotry', .* did you mean 'rotary'"),
    (GPTConfig, {"layers": 1.5}, "model.layers is 1.5, but must be a whole number"),
    (GPTConfig, {"vocab": float("nan")}, "model.vocab is nan, but must be a whole number"),
    (GPTConfig, {"hidden": float("inf")}, "model.hidden is inf, but must be a whole number"),
    (GPTConfig, {"ffn": True}, "model.ffn is True, but must be a whole number or None"),
    (GPTConfig, {"dropout": float("nan")}, "model.dropout is nan, but must be a number"),
    (GPTConfig, {"bias": "no"}, "model.bias is 'no', but must be True or False"),
    (TableSize, {"rows": -1}, "a table's rows is -1, but must be at least 1"),
    (TableSize, {"pooling": float("nan")}, "a table's pooling is nan, but must be a number"),
    (DLRMConfig, {"rows": "x"}, r"model.rows is 'x', but must be tuple\[int, ...\]"),
]
NEEDED = {
    GPTConfig: {"layers": 2, "hidden": 32, "heads": 4},
    TableSize: {"rows": 8, "dim": 4},
    DLRMConfig: {"rows": (8,), "dim": 4, "bottom": (4,), "top": (1,)},
}


@pytest.mark.parametrize(("make", "wrong", "words"), OF_ANOTHER_KIND, ids=[words for *_, words in OF_ANOTHER_KIND])
def test_options_of_another_kind_than_their_annotation_are_refused(make, wrong, words):
    with pytest.raises(ValueError, match=words):
        make(**NEEDED.get(make, {}) | wrong)


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
