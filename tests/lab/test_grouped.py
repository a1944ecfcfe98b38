# SPDX-License-Identifier: Apache-2.0
"""`python -m lab grouped`: all ways compute the same, and predictions need no GPU."""

import pytest
import torch

from lab.cases import measure_rows
from lab.experts import MODELS
from lab.experts.grouped import BENCH, PARTS, GroupedSetting, measure
from lab.experts.routing import count_rows_sent, draw_routing, load_of, take_recorded


def test_all_parts_of_a_step_are_computed_as_by_torch(ranks):
    cases = GroupedSetting(models=("qwen3-30b-a3b",), tokens=(16,), routing=("skewed",)).cases()
    rows = ranks(1).run(measure_rows, 1, "cpu", cases, [None] * 5 + [1.0], measure, len)[0]
    assert [row["part"] for row in rows] == list(PARTS)
    for row in rows:
        assert row.get("failed") is None
        assert row["difference"] < 2e-2
        assert row["to_torch"] > 0
    assert [row.get("predicted") for row in rows[-2:]] == [None, 1.0]
    assert rows[-1]["megabytes"] >= rows[-1]["formula_megabytes"] > 0


def test_a_skewed_routing_is_the_same_on_all_ranks_and_tokens_are_sent_once_to_a_rank():
    device = torch.device("cpu")
    loads = [load_of(draw_routing(4096, 64, 4, routing, device)[0], 64) for routing in ("uniform", "skewed")]
    assert 1 < loads[0] < 1.5 < loads[1] < 6
    busiest = [draw_routing(4096, 64, 4, "skewed", device, seed)[0].flatten().bincount().argmax() for seed in (1, 2)]
    assert busiest[0] == busiest[1]
    for experts, top_k in ((64, 4), (8, 2)):
        ids = draw_routing(4096, experts, top_k, "1.5x", device, 1)[0]
        assert load_of(ids * 4 // experts, 4) == pytest.approx(1.5, abs=0.08)
    ids = torch.tensor([[0, 1, 4], [2, 6, 7]])  # of 8 experts on 4 ranks
    assert [count_rows_sent(ids, 8, 4, rank) for rank in (0, 1)] == [(4, 3), (5, 3)]


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2), (256, 8), (9, 9)])
def test_a_recorded_routing_is_scaled_to_other_numbers_of_experts_with_its_ranks_loads(experts, top_k):
    ids = take_recorded(4096, experts, top_k)
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    assert 0 <= ids.min() <= ids.max() < experts
    assert torch.equal(take_recorded(100, experts, top_k, first=4090)[6:], ids[:94])  # from the start again
    if experts >= 128:  # the same neighbours
        assert torch.equal(ids * 128 // experts, take_recorded(4096, 128, 8))


def test_predictions_need_no_gpu(tmp_path):
    said = BENCH(GroupedSetting(cluster="dgx-h200"), tmp_path)
    assert len(said["rows"]) == len(MODELS) * 2 * 2 * len(PARTS)
    assert all(0 < row["predicted"] <= row["dense"] < 989 for row in said["rows"])
    assert said["rows"][5]["formula_megabytes"] == pytest.approx((2 * 4096 * 8192 + 4 * 8192 * 2 * 14336) / 1e6)
