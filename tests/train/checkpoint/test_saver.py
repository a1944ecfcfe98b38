# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves: nothing overtakes the copy, one after another, and nothing is left of those that fail."""

import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from tests.train import runs
from tests.train.checkpoint import saver_runs

from stretto.launch import RankFailure
from stretto.launch.supervisor import StopTimeouts
from stretto.train.checkpoint import checkpoint_path, find_checkpoint
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.staging import Key, Ownership, Staging
from stretto.train.checkpoint.storage import LocalBox, ShardedState, read_tensor
from stretto.train.config import JobConfig
from stretto.train.job import launch
from stretto.train.observe.metrics import DivergenceError

MakeRanks = Callable[[int], Ranks]


def names(out: Path) -> list[str]:
    """Return what lies beside the checkpoints of a run, with hidden folders."""
    folder = out / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- the copy


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_async", "grid"),
    [
        (True, {"x": 2}),
        pytest.param(True, {"data": 2, "x": 2}, marks=pytest.mark.exhaustive),
        pytest.param(False, {"data": 2, "x": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_has_the_state_of_its_step_whatever_follows(
    ranks: MakeRanks, tmp_path: Path, is_async: bool, grid: dict[str, int]
) -> None:
    for differences in ranks(prod(grid.values())).run(saver_runs.change_while_it_is_written, tmp_path, grid, is_async):
        assert bool(differences.pop("memory of copies")) == is_async
        assert differences
        assert set(differences.values()) == {0.0}


@pytest.mark.long
def test_a_save_returns_before_it_is_written_and_waits_for_the_one_before(ranks: MakeRanks, tmp_path: Path) -> None:
    (happened,) = ranks(1).run(saver_runs.save_three_times, tmp_path)
    for step in (1, 2):
        assert happened.index(f"returned {step}") < happened.index(f"done {step}") < happened.index(f"write {step + 1}")
    assert happened[-2:] == ["done 3", "returned 3"]
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_several_writers_and_ranks_write_each_tensor_once(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(2).run(saver_runs.change_while_it_is_written, tmp_path, {"data": 2}, True)
    path = checkpoint_path(tmp_path, 1)
    files = sorted(file.name for file in path.glob("*.distcp"))
    assert files == ["__0_0.distcp", "__0_10.distcp", "__1_0.distcp", "__1_10.distcp"]
    entries = read_metadata(path).tensors
    assert all(read_tensor(path, entry).shape == entry.shape for entry in entries.values())
    assert all(len(entry.chunks) == 1 for entry in entries.values())
    memory = [differences.pop("memory of copies") for differences in found]
    assert sum(memory) == sum(prod(entry.shape) * entry.itemsize for entry in entries.values())
    assert max(memory) < 0.6 * sum(memory)


def test_the_rank_with_the_fewest_bytes_writes_a_box_that_several_hold() -> None:
    shared = {Key("large", (0,)): 10, Key("small", (0,)): 3, Key("tiny", (0,)): 1}
    held = [shared, shared | {Key("own", (0,)): 8}, {Key("large", (4,)): 5}]
    ownership = Ownership(held)
    assert ownership.owners == {
        Key("large", (0,)): 0,
        Key("own", (0,)): 1,
        Key("large", (4,)): 2,
        Key("small", (0,)): 1,
        Key("tiny", (0,)): 0,
    }
    assert ownership.bytes_of_ranks == [11, 11, 5]


def test_memory_of_copies_is_used_again_and_grows_with_the_state() -> None:
    def state(*sizes: int) -> dict[str, ShardedState]:
        values = {f"model.{size}": torch.arange(float(size)) for size in sizes}
        return {name: ShardedState((len(own),), (LocalBox((0,), own),)) for name, own in values.items()}

    staging = Staging(torch.device("cpu"))
    first = state(3, 200)
    staging.reserve(first)
    places = {name: whole.boxes[0].values.data_ptr() for name, whole in staging.copy(first).items()}
    second = state(3, 200, 7)
    staging.reserve(second)
    copy = staging.copy(second)
    assert {name: copy[name].boxes[0].values.data_ptr() for name in places} == places
    assert staging.num_bytes == 4 * (3 + 200 + 7)
    for name, whole in copy.items():
        assert torch.equal(whole.boxes[0].values, second[name].boxes[0].values)
        assert whole.boxes[0].values.untyped_storage().nbytes() == whole.boxes[0].values.nbytes


def test_boxes_without_numbers_and_single_numbers_are_copied() -> None:
    empty, count = torch.empty(0, 5), torch.tensor(7.0, dtype=torch.float64)
    state = {
        "model.empty": ShardedState((4, 5), (LocalBox((4, 0), empty),)),
        "optimizer.count": ShardedState((), (LocalBox((), count),)),
    }
    staging = Staging(torch.device("cpu"))
    staging.reserve(state)
    copy = staging.copy(state)
    count.fill_(8.0)
    assert copy["model.empty"].boxes[0].values.shape == (0, 5)
    assert torch.equal(copy["optimizer.count"].boxes[0].values, torch.tensor(7.0, dtype=torch.float64))


def test_a_state_that_grows_is_saved_whole(ranks: MakeRanks, tmp_path: Path) -> None:
    both = "model.own0 model.own1"
    for found in ranks(2).run(saver_runs.grow, tmp_path):
        assert found == [both, f"model.late {both}", f"model.both model.late {both}"]


# --- memory


def test_too_little_memory_on_one_machine_turns_asynchronous_saves_off_on_all(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(2).run(saver_runs.prepare_with_memory, tmp_path, 1000, "auto")
    for is_async, messages, error in found:
        assert (is_async, error) == (False, "")
        (line,) = messages
        assert re.search(r"between two steps: copies of the state take .* on node1, of which 1e-06 GB are left", line)
    assert names(tmp_path) == ["step-00000001"]


def test_asynchronous_saves_that_were_asked_for_and_do_not_fit_are_refused(ranks: MakeRanks, tmp_path: Path) -> None:
    for _, _, error in ranks(2).run(saver_runs.prepare_with_memory, tmp_path, 1000, True):
        assert re.match(r"train.async_save is true, but copies .* node1.*'auto' or false would do", error)
    assert names(tmp_path) == []


def test_enough_memory_turns_them_on_and_is_logged_once(ranks: MakeRanks, tmp_path: Path) -> None:
    for is_async, messages, error in ranks(2).run(saver_runs.prepare_with_memory, tmp_path, 1 << 40, "auto"):
        assert (is_async, error) == (True, "")
        assert len(messages) == 1
        assert messages[0].startswith("checkpoints are written asynchronously, from a copy of ")


# --- a full disk


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_begun(ranks: MakeRanks, tmp_path: Path) -> None:
    for kind, text in ranks(2).run(saver_runs.save_on_a_disk_of, tmp_path, 3100):
        assert kind == "NoSpaceError"
        pattern = r"no space left for a checkpoint in (.*): it needs [\d.,]+ [kM]B, and 3.1 kB are free"
        assert re.fullmatch(pattern, text)[1] == str(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_async", "step"),
    [
        ("true", 5),
        pytest.param("true", 1, marks=pytest.mark.exhaustive),
        pytest.param("false", 5, marks=pytest.mark.exhaustive),
    ],
)
def test_a_disk_that_fills_up_ends_all_ranks_after_one_step_and_leaves_nothing(
    ranks: MakeRanks, tmp_path: Path, is_async: str, step: int
) -> None:
    out = tmp_path / "run"
    config = runs.configure(
        out, "ranks=2", "grid.x=2", "train.steps=40", "train.checkpoint_every=2", f"train.async_save={is_async}"
    )
    found = ranks(2).run(saver_runs.train_until_full, config, 1, step)
    assert found[0] == found[1], "ranks end with different errors"
    kind, text = found[0]
    assert kind == "NoSpaceError"
    pattern = (
        r"no space left for a checkpoint in .*run: it needs [\d.]+ kB, and [\d.,]+ [MG]B were free when it began "
        r"\(rank 1: File too large\)"
    )
    assert re.fullmatch(pattern, text)
    assert len(runs.metrics_of(out)) < 10
    # The fourth step's may be written before the fifth step, or fail.
    assert [name for name in names(out) if name != "step-00000004"] == (["step-00000002"] if step > 1 else [])


@pytest.mark.long
def test_a_save_that_has_failed_ends_the_run_before_the_next_one(ranks: MakeRanks, tmp_path: Path) -> None:
    config = runs.configure(tmp_path / "run", "ranks=2", "grid.data=2", "train.steps=100", "train.checkpoint_every=40")
    assert {kind for kind, _ in ranks(2).run(saver_runs.train_until_full, config, 1, 1)} == {"NoSpaceError"}
    assert 40 <= len(runs.metrics_of(tmp_path / "run")) < 80


# --- ends


def test_a_checkpoint_that_is_written_when_all_ranks_diverge_becomes_whole(ranks: MakeRanks, tmp_path: Path) -> None:
    assert ranks(1).run(saver_runs.fail_while_it_is_written, tmp_path, DivergenceError) == [True]
    assert find_checkpoint(tmp_path, "latest") == checkpoint_path(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_write_that_outlasts_a_failed_rank_is_given_up_and_never_becomes_whole(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    assert ranks(1).run(saver_runs.fail_while_it_is_written, tmp_path, RuntimeError) == [False]
    assert names(tmp_path) == []


@pytest.mark.long
@pytest.mark.usefixtures("forks_processes")
@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        pytest.param(saver_runs.raise_while_it_is_written, "rank 1 .*had enough", marks=pytest.mark.exhaustive),
        (saver_runs.die_while_it_is_written, "rank 0 .*SIGKILL"),
    ],
)
def test_a_rank_that_fails_while_a_checkpoint_is_written_leaves_nothing_of_it(
    tmp_path: Path, entry: Callable[[JobConfig], None], reason: str
) -> None:
    out = tmp_path / "run"
    config = runs.configure(out, "ranks=2", "grid.data=2", "train.steps=40", "train.checkpoint_every=2")
    with pytest.raises(RankFailure, match=reason):
        launch(entry, config, StopTimeouts(stop=20.0, report=0.3, end=1.0))
    assert names(out) == []


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_signal_while_a_checkpoint_is_written_leaves_it_and_that_of_the_stop(
    ranks: MakeRanks, tmp_path: Path, rank: int
) -> None:
    out = tmp_path / "run"
    config = runs.configure(out, "ranks=2", "grid.data=2", "train.steps=40", "train.checkpoint_every=3")
    ranks(2).run(runs.train_and_stop, config, 4, rank)
    newest = len(runs.metrics_of(out))
    assert newest < 8
    assert (
        names(out)
        == sorted({"step-00000003", f"step-{newest:08d}"} | ({"step-00000006"} if newest > 6 else set()))[-2:]
    )


# --- which are kept


@pytest.mark.long
def test_a_run_keeps_the_newest_some_for_ever_and_the_best(ranks: MakeRanks, tmp_path: Path) -> None:
    out = tmp_path / "run"
    overrides = ["train.steps=7", "train.checkpoint_every=1", "train.evaluate_every=1", "data.evaluation_sequences=8"]
    kept = ["train.keep_checkpoints=1", "train.keep_every=3", "train.keep_best=2", "train.lr=0.3"]
    config = runs.configure(out, *overrides, *kept)
    ranks(1).run(runs.train_quietly, config)
    losses = {line["step"]: line["evaluation_loss"] for line in runs.metrics_of(out)}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert names(out) == [f"step-{step:08d}" for step in sorted({3, 6, 7, *best})]
    for step in best:
        assert read_metadata(checkpoint_path(out, step)).evaluation["evaluation_loss"] == losses[step]


def test_a_run_goes_on_where_old_checkpoints_cannot_be_deleted(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2).run(saver_runs.save_where_nothing_can_be_deleted, tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def refused(out: Path, *overrides: str) -> Any:
    with pytest.raises(ValueError) as error:
        runs.configure(out, *overrides)
    return str(error.value)


def test_rules_of_what_is_kept_name_what_would_do(tmp_path: Path) -> None:
    message = refused(tmp_path / "run", "train.checkpoint_every=4", "train.keep_every=10")
    assert "train.keep_every is 10, but must be a multiple of train.checkpoint_every, which is 4; 8 would do" in message
    assert "which is none; set train.checkpoint_every" in refused(tmp_path / "run", "train.keep_every=10")
    message = refused(tmp_path / "run", "train.checkpoint_every=4", "train.evaluate_every=3", "train.keep_best=1")
    assert (
        "train.checkpoint_every (4) must be a multiple of train.evaluate_every (3); train.evaluate_every=4" in message
    )


def test_checkpoints_that_are_removed_while_the_run_trains_are_told_once(ranks: MakeRanks, tmp_path: Path) -> None:
    (lines,) = ranks(1).run(saver_runs.save_where_the_folder_is_removed, tmp_path)
    assert lines == [
        f"{tmp_path / 'checkpoints'} was removed while the run trains: earlier checkpoints are lost, new ones go there"
    ]
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000002", "step-00000003"]
