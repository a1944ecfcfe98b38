# SPDX-License-Identifier: Apache-2.0
"""Stretto and torch's own ways train the same model: what the bench says of them is of equal runs."""

import json
from dataclasses import replace
from unittest import mock

import pytest
from tests.lab.workloads import WORKLOAD, start_on_pool

from lab.training import peers
from lab.training.models import LLAMA_7B, model_config, parse_grids
from lab.training.peers import BENCH, PeersSetting, measure_peers, speedup


def test_the_default_model_has_the_parameters_that_it_is_named_after():
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert 32 * layer + 2 * 32_000 * 4096 + 4096 == pytest.approx(7.24e9, rel=1e-3)
    assert (LLAMA_7B.layers, model_config("llama-7b", 2, 512).layers) == (32, 2)


@pytest.mark.exhaustive
def test_every_way_to_train_gives_the_same_losses_and_gradient_norm(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, peers, ranks)
    monkeypatch.setattr(PeersSetting, "workloads", lambda self: [("tiny", WORKLOAD)])
    found = BENCH(PeersSetting(ranks=2, with_compiled=False), tmp_path)["rows"]
    written = json.loads((tmp_path / "peers-tiny-2.json").read_text())
    assert written["rows"] == json.loads(json.dumps(found))
    rows = {row["name"]: row for row in written["rows"]}
    assert set(rows) == {
        "FSDP2=2",
        "FSDP2=2, bf16 reduction",
        "FSDP2=2, weights kept",
        "FSDP2=2, weights kept, bf16 reduction",
        "TP=2",
        "TP=2, autocast",
        "TP=2, bf16 weights",
        "Stretto data=2",
        "Stretto x=2",
        "Stretto x=2, sequence sharded",
        "Stretto y=2",
        "Stretto z=2",
    }
    assert {name for name, row in rows.items() if row["is_peer"]} == {name for name in rows if "Stretto" not in name}
    for name, row in rows.items():
        assert "error" not in row, name
        assert row["loss"] == pytest.approx(rows["FSDP2=2"]["loss"], abs=1e-2), name
        assert row["last_loss"] == pytest.approx(rows["FSDP2=2"]["last_loss"], abs=1e-2), name
        assert row["gradient_norm"] == pytest.approx(rows["FSDP2=2"]["gradient_norm"], rel=2e-2), name
        assert row["tokens_per_second_per_gpu"] == pytest.approx(2 * 16 / 2 / row["step_milliseconds"] * 1e3), name
        assert row["peak_memory_gib"] is None
    assert written["speedup"] == pytest.approx(speedup(found))
    assert (tmp_path / "peers-tiny-2.png").stat().st_size > 1000
    assert "| TP=2 |" in (tmp_path / "peers-tiny-2.md").read_text()


@pytest.mark.exhaustive
def test_fsdp_with_tensor_parallelism_trains_equally(ranks):
    only = ("FSDP2=2 TP=2, weights kept", "Stretto x=2 z=2")
    rows = ranks(4).run(measure_peers, WORKLOAD, 4, "x=2 z=2", only, False, False)[0]
    assert [row["name"] for row in rows] == [
        only[0],
        f"{only[0]}, bf16 reduction",
        only[1],
        f"{only[1]}, sequence sharded",
    ]
    for row in rows:
        assert row["loss"] == pytest.approx(rows[-1]["loss"], abs=1e-2)
        assert row["gradient_norm"] == pytest.approx(rows[-1]["gradient_norm"], rel=2e-2)


@pytest.mark.long
def test_a_grid_that_cannot_split_the_batch_is_a_row_with_the_reason(ranks):
    one = replace(WORKLOAD, batch=1)
    rows = ranks(2).run(measure_peers, one, 2, None, ("FSDP2=2, weights kept", "Stretto"), False, False)[0]
    errors = {row["name"]: row.get("error") for row in rows}
    assert errors["FSDP2=2, weights kept"] == "a batch of 1 cannot be cut into 2 parts"
    # Which of the two is faster is no matter here.
    assert {name for name, error in errors.items() if error is None} == {
        "Stretto y=2",
        "Stretto x=2",
        "Stretto x=2, sequence sharded",
    }


def test_a_speedup_is_of_the_fastest_over_the_fastest():
    rows = [
        {"is_peer": True, "step_milliseconds": 12.0},
        {"is_peer": True, "step_milliseconds": 9.0},
        {"is_peer": True, "error": "no"},
        {"is_peer": False, "step_milliseconds": 6.0},
        {"is_peer": False, "step_milliseconds": 10.0},
    ]
    assert speedup(rows) == 1.5
    assert speedup(rows[:3]) is None


def test_grids_are_read_as_people_write_them():
    assert parse_grids("z=4,x=2 z=2", 4) == [
        {"pipe": 1, "data": 1, "x": 1, "y": 1, "z": 4},
        {"pipe": 1, "data": 1, "x": 2, "y": 1, "z": 2},
    ]
    with pytest.raises(ValueError, match="the grid x=2 has 2 ranks, but 4 are used"):
        parse_grids("x=2", 4)
    with pytest.raises(ValueError, match="'w=4' is not a grid; write grids as"):
        parse_grids("w=4", 4)


def test_a_selection_of_nothing_is_refused(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, peers, ranks)
    monkeypatch.setattr(PeersSetting, "workloads", lambda self: [("tiny", WORKLOAD)])
    with pytest.raises(ValueError, match="no run has 'DeepSpeed' in its name"):
        BENCH(PeersSetting(ranks=2, only=("DeepSpeed",), with_compiled=False), tmp_path)


def name_runs():
    """The names of what would be measured; nothing is built."""
    with mock.patch.object(peers, "measure", lambda runs, *_, **__: [{"name": run.name} for run in runs]):
        return [row["name"] for row in measure_peers(WORKLOAD, 2, "z=2", (), True, False)]


def test_every_compilation_is_recorded(ranks):
    names = ranks(2).run(name_runs)[0]
    assert names[-2:] == ["Stretto z=2", "Stretto z=2, compiled"]
    assert [name for name in names if "compiled" in name] == [f"{name}, compiled" for name in names[::2]]
