# SPDX-License-Identifier: Apache-2.0
"""Tests of operators' choices in checkpoints."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops import confirmed
from tests.train import runs

from stretto.ops import choices
from stretto.parallel.layers.linear_plan import ShardedTokens
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


class Killed(BaseException):
    """Ends a rank as a signal does."""


def train_timed(folder, out, times, options, kills=None):
    """(how often first calls were timed, numbers, losses and norms of all steps in the run's folder).

    By kernels, interpreted here, where a GPU would have them. kills: which timing of first calls ends the run.
    """
    sizes = "train.batch_ramp=[[3, 2]]", "train.batch=4", "train.steps=4", "train.checkpoint_every=2", "model.layers=1"
    config = runs.configure(folder / out, "grid.x=2", "train.shard_sequence=true", "model.hidden=64", *sizes, *options)
    with (
        mock.patch.object(ShardedTokens, "has_kernel", return_value=True),
        confirmed.timed_by(times, folder / f"{out} cache of {options} {dist.get_rank()}") as timed,
    ):

        def kill():
            if timed.count == kills:
                raise Killed

        timed.after = kill
        with contextlib.nullcontext() if kills is None else pytest.raises(Killed):
            trainer.train(config, display="none")
    return timed.count, [(step["step"], step["loss"], step["grad_norm"]) for step in runs.metrics_of(config.out)]


@pytest.mark.long
def test_a_run_that_is_killed_while_it_times_first_calls_resumes_to_the_same_bits(interpret, tmp_path):
    """Of a larger batch, in its fourth step; it resumes after the second one, and its third is of known calls."""

    def train(out, times, *options, kills=None):
        of_rank, other = interpret(2, train_timed, tmp_path, out, times, options, kills, timeout=300)
        assert of_rank == other
        return of_rank

    timed, steps = train("whole", [2.0, 1.0])
    of_small_batch, otherwise = train("otherwise", [1.0, 2.0], "train.steps=1")
    assert 0 < of_small_batch < timed
    assert otherwise != steps[:1]  # the other choice has other bits
    _, before = train("killed", [2.0, 1.0], kills=of_small_batch + 1)
    assert before == steps[: len(before)]
    assert len(before) < 4
    assert train("killed", [2.0, 1.0], "train.resume=latest") == (timed - of_small_batch, steps)
