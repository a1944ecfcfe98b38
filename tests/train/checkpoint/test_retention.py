# SPDX-License-Identifier: Apache-2.0
"""Tests of which checkpoints are kept, by the rule alone; and that the others are deleted, whatever is in the way."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from stretto.train.checkpoint.folders import checkpoint_path, prepare_folder
from stretto.train.checkpoint.retention import Retention, remove_surplus

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 1.0, 60: 4.0}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(1), {60}),
        (Retention(3), {40, 50, 60}),
        (Retention(9), set(LOSSES)),
        (Retention(1, every=20), {20, 40, 60}),
        (Retention(1, every=7), {60}),
        (Retention(1, best=1), {20, 60}),  # of two equal losses the earlier
        (Retention(1, best=2), {20, 50, 60}),
        (Retention(1, best=9), {10, 20, 30, 50, 60}),  # one without an evaluation is never among the best
        (Retention(2, every=30, best=1), {20, 30, 50, 60}),
    ],
)
def test_a_checkpoint_is_kept_if_one_of_the_rules_applies(rule: Retention, kept: set[int]) -> None:
    assert rule.surplus(LOSSES) == sorted(set(LOSSES) - kept)


def test_the_newest_is_kept_even_if_it_is_the_worst_and_there_is_no_other() -> None:
    assert Retention(1, best=1).surplus({7: 9.0}) == []
    assert Retention().surplus({}) == []


# --- what is in the way of a deletion


def checkpoint_link(out: Path, step: int, target: Path) -> Path:
    """A checkpoint that its user has moved to another disk, with a link in its place."""
    target.mkdir(parents=True)
    (target / "metadata.json").write_text("{}")
    link = checkpoint_path(out, step)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return link


def test_of_a_linked_checkpoint_the_link_is_deleted_and_not_what_it_leads_to(tmp_path: Path) -> None:
    out, target = tmp_path / "out", tmp_path / "elsewhere"
    link = checkpoint_link(out, 1, target)
    for step in (2, 3):
        checkpoint_path(out, step).mkdir()
    remove_surplus(out, Retention(2))
    assert sorted(path.name for path in link.parent.iterdir()) == ["step-00000002", "step-00000003"]
    assert (target / "metadata.json").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link", "link to nothing"])
def test_whatever_an_interrupted_process_has_left_is_deleted(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    left, elsewhere = checkpoint_path(out, 1).with_name(".step-00000001.deleting"), tmp_path / "elsewhere"
    left.parent.mkdir(parents=True)
    match kind:
        case "folder":
            left.mkdir()
        case "file":
            left.touch()
        case "link":
            elsewhere.mkdir()
            left.symlink_to(elsewhere)
        case _:
            left.symlink_to(elsewhere)
    prepare_folder(out, 0)
    assert list(left.parent.iterdir()) == []
    assert elsewhere.exists() == (kind == "link")


def test_the_folder_for_checkpoints_of_an_earlier_run_is_a_new_one(tmp_path: Path) -> None:
    """Its number is not that of another, also if the user has deleted or renamed some."""
    folder = checkpoint_path(tmp_path, 5).parent
    for name in ("earlier-run-3", "earlier-run-mine", "step-00000005"):
        (folder / name).mkdir(parents=True)
    prepare_folder(tmp_path, 0)
    assert (folder / "earlier-run-4" / "step-00000005").is_dir()


def test_files_that_cannot_be_deleted_do_not_prevent_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where another machine reads a file of it on NFS, which then has another name until it is closed."""
    left = checkpoint_path(tmp_path, 1).with_name(".step-00000001.deleting")
    left.mkdir(parents=True)

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    prepare_folder(tmp_path, 0)
    assert "cannot be deleted: [Errno 39] Directory not empty" in caplog.text
