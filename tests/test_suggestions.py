# SPDX-License-Identifier: Apache-2.0
"""Tests of what a misspelt name or path was probably meant to be."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto import optim, parallel, recommendation
from stretto.collectives.algorithms import ALGORITHMS
from stretto.models.gpt_config import PRESETS
from stretto.suggestions import are_missing, did_you_mean, did_you_mean_file, name_known, similar_names


@pytest.mark.parametrize(
    ("given", "known", "similar"),
    [
        ("gpt3", PRESETS, []),  # other digits are another model
        ("gpt-30b", PRESETS, []),
        ("gpt-5", PRESETS, ["gpt-5b"]),
        ("GPT_20B", PRESETS, ["gpt-20b"]),
        ("gpt2", PRESETS, ["gpt2-small"]),
        ("rong-all-reduce", ALGORITHMS, ["ring-all-reduce"]),
        ("ring-allreduce", ALGORITHMS, ["ring-all-reduce"]),
        ("ring", ALGORITHMS, ["ring-all-reduce", "ring-all-gather", "ring-reduce-scatter"]),
        ("nonsense", ALGORITHMS, []),
        ("all-reduce", ALGORITHMS, ["ring-all-reduce", "two-shot-all-reduce", "one-shot-all-reduce"]),
        ("bf61", ["fp32", "bf16", "fp64"], ["bf16"]),
        ("fp7", ["fp32", "bf16", "fp64"], []),
        ("", ["x", "y"], []),
        ("", ["", "x"], []),
        (" ", ["", "x"], []),
        (".", ["", "x"], []),
        ("x", ["", " ", "x"], ["x"]),
    ],
)
def test_similar_names_are_those_that_a_misspelling_may_have_meant(given, known, similar):
    assert similar_names(given, known) == similar


def test_messages_name_what_was_meant_and_what_there_is():
    assert did_you_mean("gpt-5", PRESETS) == "; did you mean 'gpt-5b'?"
    assert did_you_mean("gpt3", PRESETS) == ""
    assert did_you_mean("ring", ["ring-all-gather", "ring-all-reduce"]) == (
        "; did you mean 'ring-all-gather' or 'ring-all-reduce'?"
    )
    assert name_known("gahter", ["gather", "scatter"]) == "; did you mean 'gather'? There are gather, scatter"
    assert name_known("x", ["gather", "scatter"], "it takes") == ": it takes gather, scatter"
    assert are_missing(["a"]) == "a is missing"
    assert are_missing(["a", "b"]) == "a, b are missing"


def test_a_missing_file_is_compared_with_those_of_its_folder(tmp_path: Path):
    for name in ("ring.xml", "ring.toml", "else.xml"):
        (tmp_path / name).touch()
    (tmp_path / "rinh.xml").symlink_to(tmp_path / "gone.xml")  # a link to nothing would not do either
    assert did_you_mean_file(tmp_path / "rimg.xml", (".xml",)) == f"; did you mean {tmp_path / 'ring.xml'}?"
    assert did_you_mean_file(tmp_path / "ring.tmol") == f"; did you mean {tmp_path / 'ring.toml'}?"
    assert did_you_mean_file(tmp_path / "nothing-like-it.xml", (".xml",)) == ""
    assert did_you_mean_file(tmp_path / "nowhere" / "ring.xml") == ""


def entered(context: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    return lambda *arguments: context(*arguments).__enter__()


def test_what_is_no_module_or_grid_is_refused_by_name() -> None:
    layer, grid = nn.Linear(1, 1), 3
    there = object.__new__(stretto.Grid)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (stretto.parallelize, (3, grid), "model is 3, of type int, but must be a Module"),
        (stretto.parallelize, (layer, grid), "grid is 3, of type int, but must be a Grid"),
        (partial(stretto.parallelize, seed="x"), (layer, there), "seed is 'x', .* must be a whole number or None"),
        (partial(stretto.parallelize, sharded_loss="no"), (layer, there), "sharded_loss is 'no', .* must be a bool"),
        (partial(stretto.parallelize, options={"z": 1}), (layer, there), "options is {'z': 1}, .* a ExecutionOptions"),
        (parallel.validate, (3, {}), "model is 3"),
        (entered(parallel.full_parameters), (None,), "module is None"),
        (entered(parallel.no_sync), (None,), "model is None"),
        (entered(partial(parallel.no_sync, unsharded="no")), (layer,), "unsharded is 'no', .* True or False or None"),
        (entered(parallel.gather_once), ([],), r"model is \[\]"),
        (entered(parallel.count_collectives), (None,), "grid is None"),
        (partial(parallel.Pipeline, micro_batch_size=1), (None, there), "model is None"),
        (parallel.gather, (None,), "tensor is None, of type NoneType, but must be a Tensor"),
        (parallel.clip_grad_norm_, (layer, 1.0, there), "parameters must be tensors, of model.* not Linear"),
        (partial(parallel.gradient_norm, norm_type="2"), ([], there), "norm_type is '2', .* a float"),
        (parallel.mean_over_batch, (torch.zeros(()), "1", there), "count is '1'"),
        (optim.guard, (3,), "optimizer is 3"),
        (parallel.checkpoint_activations, (3,), "model is 3"),
        (parallel.balance_experts, (3,), "model is 3"),
        (parallel.clip_grad_norm_, ([], 1.0, grid), "grid is 3"),
        (parallel.gradient_norm, ([], grid), "grid is 3"),
        (parallel.cut_sequences, ([], grid), "grid is 3"),
        (parallel.mean_over_batch, (torch.zeros(()), 1, grid), "grid is 3"),
        (optim.hidden_matrices, (3,), "model is 3"),
        (recommendation.distribute_embeddings, (3, grid), "model is 3"),
        (recommendation.distribute_embeddings, (layer, grid), "grid is 3"),
        (recommendation.prefetch_embeddings, (3, []), "model is 3"),
    ]
    for function, arguments, words in calls:
        with pytest.raises(TypeError, match=words):
            function(*arguments)
