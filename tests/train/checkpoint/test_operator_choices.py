# SPDX-License-Identifier: Apache-2.0
"""Tests of operators' choices in checkpoints."""

from unittest import mock

import pytest
import torch
from tests.ops import confirmed
from tests.train import runs

from stretto.ops import choices
from stretto.train import trainer
from stretto.train.checkpoint.metadata import OperatorChoices, read_metadata
from stretto.train.checkpoint.operator_choices import gather_choices, restore_choices

LIBRARY = {"all_gather_matmul m=16 n=16 k=32 float32 2 ranks by TMA auto": "library"}


def choose_and_gather(folder):
    """(what all ranks have chosen, how often a run times calls that restores it)."""
    with confirmed.timed_by([2.0, 1.0], folder):
        confirmed.call_all()
        gathered = gather_choices()
    stored = {ranks: OperatorChoices(**one) for ranks, one in gathered.items()}
    with confirmed.timed_by([1.0, 2.0], folder + " elsewhere") as timed:
        restore_choices(mock.Mock(operators=stored), torch.device("cpu"))
        confirmed.call_all()
        return gathered, timed.count, gather_choices() == gathered


@pytest.mark.long
def test_all_ranks_gather_the_choices_that_a_resumed_run_makes(interpret, tmp_path):
    (gathered, timed, is_same), other = interpret(2, choose_and_gather, str(tmp_path))
    assert other == (gathered, timed, is_same) == (gathered, 0, True)
    assert set(gathered["0,1"]["choices"].values()) == {"library"}
    assert len(gathered["0,1"]["confirmed"]) == 4


def train_twice(out):
    """The operators of the checkpoint of a run, and what a run that resumes from it restores."""
    chosen = {"0,1": {"choices": LIBRARY, "confirmed": {}}}
    with mock.patch.object(trainer, "gather_choices", return_value=chosen):
        trainer.train(runs.configure(out, "train.steps=1"))
    choices.restore_choices({})
    trainer.train(runs.configure(out, "train.steps=2", "train.resume=latest"))
    try:
        return read_metadata(out / "checkpoints" / "step-00000001").operators, dict(choices._restored)
    finally:
        choices.restore_choices({})


@pytest.mark.long
def test_a_run_restores_its_checkpoints_choices(ranks, tmp_path):
    [(stored, restored)] = ranks(1).run(train_twice, tmp_path / "run")
    assert stored["0,1"].choices == restored["0,1"].choices == LIBRARY


def test_choices_of_another_version_are_made_anew_with_a_warning(caplog):
    stored = {"0": OperatorChoices(choices={"a call": "{}"}, confirmed={})}
    restore_choices(mock.Mock(operators=stored), torch.device("cpu"))
    assert "operators choose anew, and sums may differ in their last bits" in caplog.text
    assert not choices._restored
