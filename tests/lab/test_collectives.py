# SPDX-License-Identifier: Apache-2.0
"""Tests that what the bench of collectives keeps is what communicators read,
and a file that is no table is left alone.
"""

from types import SimpleNamespace

import pytest
import torch

from stretto.bench import tuning
from stretto.bench.collectives import peers
from stretto.bench.collectives.settings import CollectivesSetting, CollectivesTuning
from stretto.bench.interleaved import Timed
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
    with pytest.raises(ValueError, match=r"absent\.json cannot be read"):
        CollectivesSetting(table=absent)


@pytest.mark.parametrize("has_nvlink", [True, False])
def test_tuned_choices_are_read_again_and_have_no_ll128_without_nvlink(tmp_path, monkeypatch, has_nvlink):
    timed: list[str] = []
    checked: list[int] = []

    def time_all(runs, size, **_):
        timed.extend(runs)
        return {name: Timed(2.0 if name == LIBRARY.name else 3.0 if " LL" in name else 1.0, 0.0) for name in runs}

    ranks = SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: 0, barrier=lambda: None)
    monkeypatch.setattr(tuning, "dist", ranks)
    monkeypatch.setattr(peers, "dist", ranks)
    monkeypatch.setattr(tuning, "time_interleaved", time_all)
    monkeypatch.setattr(tuning, "machine_name", lambda has_nvlink: "a machine")
    communicator = SimpleNamespace(
        workspace=SimpleNamespace(has_nvlink=has_nvlink, check=lambda: checked.append(len(timed))),
        world_size=2,
        kernel=lambda way, name, in_place: print,
    )
    store = TuningStore(tmp_path / "table.json")
    setting = CollectivesTuning(
        collectives=("allreduce", "alltoall"),
        dtypes=("bf16",),
        smallest=4096,
        largest=16 << 20,
        step=4096,
        table=store.path,
    )
    tuning.measure_collectives(communicator, setting, torch.device("cpu"))
    table = Table.load(store.path, "a machine", 2, has_nvlink=has_nvlink)
    assert {key: [size for size, _ in row] for key, row in table.rows.items()} == {
        ("allreduce", "bfloat16"): [4096, 16 << 20],
        ("alltoall", "bfloat16"): [4096, 16 << 20],
    }
    assert table.choose("allreduce", "bfloat16", 5000, 2).choice.protocol == "Simple"
    assert any("LL128" in name for name in timed) == has_nvlink
    assert len(set(checked)) == 4  # after each size: times of waits that were given up are none
    assert not any("Copy" in name for name in timed)  # so small, the host needs longer than the copies
