# SPDX-License-Identifier: Apache-2.0
"""`python -m lab pruned`, in small on the CPU: what is measured, and what is written."""

import json
from contextlib import suppress
from unittest import mock

import pytest
from tests.lab.workloads import start_on_pool

from lab.training import curves, pruned, pruned_curves
from lab.training.pruned import PrunedSetting
from lab.training.pruned_curves import AT_ONCE, EARLY, NEVER, PrunedCurvesSetting
from stretto.parallel import Grid


def test_an_unknown_part_is_refused_before_anything_is_trained():
    with pytest.raises(ValueError, match=r"largst.*largest"):
        PrunedSetting(parts=("state", "largst"))
    with pytest.raises(ValueError, match=r"no width '1024'.*2048"):
        PrunedSetting(widths=(1024,))


@pytest.mark.long
def test_pruned_models_send_what_is_left(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, pruned, ranks)
    setting = PrunedSetting(parts=("state", "steps", "networks"), ranks=2, batch=4, images=4, steps=3, cpu=True)
    pruned.BENCH(setting, tmp_path)
    assert (tmp_path / "pruned-state.png").exists()
    names = ("state", "steps", "networks")
    rows = {name: json.loads((tmp_path / f"pruned-{name}.json").read_text())["rows"] for name in names}
    assert not any("error" in row for each in rows.values() for row in each)
    assert len(rows["state"]) == 11
    dense, left = rows["steps"][:2]
    assert left["megabytes_sent"] < 0.5 * dense["megabytes_sent"]  # embeddings are not pruned
    assert len(rows["steps"]) == 6
    dense, left = rows["networks"]
    assert left["megabytes_sent"] < 0.2 * dense["megabytes_sent"]


def measure_until_it_fails():
    """The rows that were kept, of a part that fails after two."""

    def fail(_):
        yield from ({"name": "one"}, {"name": "two"})
        raise KeyError

    Grid(device="cpu")
    kept = []
    with mock.patch.dict(pruned._MEASURES, {"state": fail}), suppress(KeyError):
        pruned._measure_part("state", PrunedSetting(cpu=True), lambda rows: kept.append(rows[-1]["name"]))
    return kept


def test_rows_are_kept_as_they_come(ranks):
    assert ranks(1).run(measure_until_it_fails) == [["one", "two"]]


@pytest.mark.exhaustive
def test_losses_of_pruned_runs_are_of_equal_tokens(ranks, tmp_path, monkeypatch):
    start_on_pool(monkeypatch, curves, ranks)
    setting = PrunedCurvesSetting(steps=10, batch=2, megabytes=1, cpu=True)
    pruned_curves.BENCH(setting, tmp_path)
    found = json.loads((tmp_path / "pruned-curves.json").read_text())
    assert [(row["pruned"], row["sparsity"]) for row in found["rows"]] == [(NEVER, 0.0), (AT_ONCE, 0.9), (EARLY, 0.9)]
    dense, at_once, early = found["curves"].values()
    assert [tokens for tokens, _ in dense] == [tokens for tokens, _ in at_once] == [tokens for tokens, _ in early]
    assert dense[0] == early[0]  # not pruned yet
    assert len({dense[-1][1], at_once[-1][1], early[-1][1]}) == 3
