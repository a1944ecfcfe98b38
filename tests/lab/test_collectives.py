# SPDX-License-Identifier: Apache-2.0
"""Tests that what the bench of collectives keeps is what communicators read,
and a file that is no table is left alone.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stretto.bench import tuning
from stretto.bench.collectives import peers
from stretto.bench.collectives.settings import CollectivesSetting, CollectivesTuning
from stretto.bench.interleaved import Timed
from stretto.collectives import selection, write_schedule
from stretto.collectives.algorithms import find
from stretto.collectives.selection import LIBRARY, Table
from stretto.tuning import TuningStore


@pytest.mark.parametrize("setting", [CollectivesSetting, CollectivesTuning])
def test_a_file_that_is_no_table_is_neither_used_nor_overwritten(tmp_path, setting):
    file = tmp_path / "notes.txt"
    file.write_text("dear diary")
    with pytest.raises(ValueError, match=r"notes\.txt is no file of measured times"):
        setting(table=file)
    assert file.read_text() == "dear diary"


def test_a_table_that_is_absent_is_written_but_not_used(tmp_path):
    absent = tmp_path / "absent.json"
    CollectivesTuning(table=absent)
    with pytest.raises(ValueError, match=r"absent\.json: cannot be read"):
        CollectivesSetting(table=absent)


def measure(monkeypatch, setting, seconds_of, *, has_nvlink=False):
    """Tune with these seconds of a choice's name in place of measured ones; returns the names that were timed.

    Also how many had been, each time that waits were checked.
    """
    timed: list[str] = []
    checked: list[int] = []

    def time_all(runs, size, **_):
        timed.extend(runs)
        return {name: Timed(seconds_of(name), 0.0) for name in runs}

    ranks = SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: 0, barrier=lambda: None)
    monkeypatch.setattr(tuning, "dist", ranks)
    monkeypatch.setattr(peers, "dist", ranks)
    monkeypatch.setattr(tuning, "time_interleaved", time_all)
    monkeypatch.setattr(tuning, "machine_name", lambda has_nvlink: "a machine")
    communicator = SimpleNamespace(
        workspace=SimpleNamespace(has_nvlink=has_nvlink, check=lambda: checked.append(len(timed))),
        world_size=2,
        kernel=lambda way, name, in_place: way.compile(2, in_place=in_place) and print,
    )
    tuning.measure_collectives(communicator, setting, torch.device("cpu"))
    return timed, checked


def test_schedules_of_a_folder_are_timed_and_run_where_they_are_the_fastest(monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "_candidates", {})
    out_of_place = find("ring-all-gather").compile(ranks=2, instances=2, in_place=False)
    both = replace(out_of_place, name="mine")
    write_schedule(both, tmp_path / "mine.xml")
    write_schedule(replace(find("ring-all-gather").compile(ranks=3), name="of three"), tmp_path / "three.xml")
    store = TuningStore(tmp_path / "table.json")
    setting = CollectivesTuning(
        collectives=("allgather",), dtypes=("bf16",), smallest=4096, largest=4096, table=store.path, schedules=tmp_path
    )
    timed, _ = measure(monkeypatch, setting, lambda name: 1.0 if name.startswith("mine") else 2.0)
    assert [name.split()[0] for name in timed if name.split()[0] in ("mine", "of")] == ["mine"]
    choice = Table.load(store.path, "a machine", 2, has_nvlink=False).choose("allgather", "bfloat16", 4096, 2).choice
    assert choice.name.startswith("mine ")
    assert choice.compile(2, in_place=False).name == "mine"
    for options, words in (
        ({"in_place": True}, "does not run in place"),
        ({"in_place": False, "ranks": 3}, "a schedule of 2 ranks, not of 3"),
    ):
        assert words in choice.find_obstacle(**{"ranks": 2} | options)
        with pytest.raises(ValueError, match=words):
            choice.compile(**{"ranks": 2} | options)
    selection._candidates.clear()  # as in a process that adds none
    with pytest.raises(ValueError, match="or a schedule that `add_candidate` was given: not by 'mine'"):
        Table.load(store.path, "a machine", 2, has_nvlink=False)


def test_candidates_that_are_not_safe_or_never_chosen_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "_candidates", {})
    made = find("ring-all-gather").compile(ranks=2)
    block = made.ranks[0].thread_blocks[0]
    broken = made.ranks[0]._replace(
        thread_blocks=(block._replace(steps=block.steps[:-1]), *made.ranks[0].thread_blocks[1:])
    )
    for schedule, words in (
        (replace(made, ranks=(broken, *made.ranks[1:])), "is not safe to run"),
        (find("all-to-next").compile(nodes=1, gpus=2), "are tuned"),
    ):
        with pytest.raises(ValueError, match=words):
            selection.add_candidate(schedule)
    with pytest.raises(ValueError, match="it has no file"):
        CollectivesTuning(schedules=tmp_path)


@pytest.mark.parametrize("has_nvlink", [True, False])
def test_tuned_choices_are_read_again_and_have_no_ll128_without_nvlink(tmp_path, monkeypatch, has_nvlink):
    store = TuningStore(tmp_path / "table.json")
    setting = CollectivesTuning(
        collectives=("allreduce", "alltoall"),
        dtypes=("bf16",),
        smallest=4096,
        largest=16 << 20,
        step=4096,
        table=store.path,
    )
    timed, checked = measure(
        monkeypatch,
        setting,
        lambda name: 2.0 if name == LIBRARY.name else 3.0 if " LL" in name else 1.0,
        has_nvlink=has_nvlink,
    )
    table = Table.load(store.path, "a machine", 2, has_nvlink=has_nvlink)
    assert {key: [size for size, _ in row] for key, row in table.rows.items()} == {
        ("allreduce", "bfloat16"): [4096, 16 << 20],
        ("alltoall", "bfloat16"): [4096, 16 << 20],
    }
    assert table.choose("allreduce", "bfloat16", 5000, 2).choice.protocol == "Simple"
    assert any("LL128" in name for name in timed) == has_nvlink
    assert len(set(checked)) == 4  # after each size: times of waits that were given up are none
    assert not any("Copy" in name for name in timed)  # so small, the host needs longer than the copies
