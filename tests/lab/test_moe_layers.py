# SPDX-License-Identifier: Apache-2.0
"""`python -m lab moe-layers`: Stretto and its peers compute the same model."""

import json

import pytest
import torch
from tests.lab.workloads import start_on_pool

from lab.experts import layers
from lab.experts.layers import BENCH, MoeLayersSetting


@pytest.mark.parametrize("peer", ["transformers", "torch"])
def test_stretto_computes_what_its_peer_does(ranks, tmp_path, monkeypatch, peer):
    if peer == "transformers":
        pytest.importorskip("transformers")
    start_on_pool(monkeypatch, layers, ranks)
    few = {"layers": 2, "seq_len": 16, "vocab": 64, "warm_up": 0, "repeats": 1, "rounds": 1}
    setting = MoeLayersSetting(peer=peer, compiled=False, on_cpu=True, **few)
    BENCH(setting, tmp_path)
    rows = json.loads((tmp_path / "moe-layers.json").read_text())["rows"]
    assert [row["is_peer"] for row in rows] == [True, False, False]
    assert [row.get("error") for row in rows] == [None] * 3
    for row in rows[1:]:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(rows[0]["gradient_norm"], rel=1e-4)
    assert rows[1]["speed"] > 0
    assert rows[2]["predicted_memory_gib"] > 0


def test_grouped_experts_are_those_of_a_loop():
    torch.manual_seed(0)
    looped = layers.Experts(32, 16, 6, is_gated=True)
    grouped = layers.GroupedExperts(32, 16, 6, is_gated=True)
    grouped.load_state_dict(looped.state_dict())
    hidden, weights = torch.randn(24, 32), torch.rand(24, 2)
    ids = torch.rand(24, 5).topk(2).indices  # no token chooses the last expert
    torch.testing.assert_close(grouped(hidden, ids, weights), looped(hidden, ids, weights))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_explains_how_to_try_the_bench(tmp_path):
    with pytest.raises(ValueError, match="--cpu tries the command"):
        BENCH(MoeLayersSetting(), tmp_path)
