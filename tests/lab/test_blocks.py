# SPDX-License-Identifier: Apache-2.0
"""`python -m lab blocks`: Stretto and FSDP2 train each model the same, and ratios are between runs that are alike."""

import json

import pytest
from tests.lab.workloads import start_on_pool
from typer.testing import CliRunner

from lab.commands import app
from lab.training import blocks
from lab.training.blocks import BLOCK_MODELS, BlocksSetting


def row(name: str, milliseconds: float, memory: float | None) -> dict[str, object]:
    return {
        "name": name,
        "is_peer": name.startswith("FSDP2"),
        "seconds": [milliseconds / 1e3],
        "step_milliseconds": milliseconds,
        "peak_memory_gib": memory,
    }


def test_ratios_are_to_fsdp2_with_the_same_setting_for_weights():
    rows = [
        row("FSDP2", 10, 4),
        row("FSDP2, weights kept", 8, 5),
        row("Stretto", 9, 4),
        row("Stretto, weights kept", 6, 5),
    ]
    found = blocks._compare([*rows[:3], rows[3] | {"peak_memory_gib": None}])
    assert [(each.get("time_ratio"), each.get("memory_ratio")) for each in found] == [
        (None, None), (None, None), (0.9, 1.0), (0.75, None),
    ]  # fmt: skip
    failed = {"name": "FSDP2", "is_peer": True, "error": "out of memory"}
    assert "time_ratio" not in blocks._compare([failed, row("Stretto", 9, 4)])[1]


@pytest.mark.long
@pytest.mark.parametrize("model", [pytest.param(name, marks=pytest.mark.sampled(1)) for name in BLOCK_MODELS])
def test_both_compute_the_same(ranks, tmp_path, monkeypatch, model):
    start_on_pool(monkeypatch, blocks, ranks)
    blocks.BENCH(BlocksSetting((model,), ranks=2, warm_up=1, repeats=1, rounds=1), tmp_path)
    rows = json.loads((tmp_path / "blocks.json").read_text())["rows"]
    assert [each["name"] for each in rows] == ["FSDP2", "Stretto", "FSDP2, weights kept", "Stretto, weights kept"]
    for key in ("loss", "gradient_norm", "last_loss"):
        assert [each[key] for each in rows] == pytest.approx([rows[0][key]] * 4, rel=1e-3), key


def test_an_unknown_model_is_refused():
    result = CliRunner().invoke(app, ["blocks", "--ranks", "2", "--models", "unet"])
    assert result.exit_code == 2
    assert "there is no model 'unet'" in result.output
