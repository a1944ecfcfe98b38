# SPDX-License-Identifier: Apache-2.0
"""`python -m lab exchange`: passes compute the same as by NCCL, and bytes are counted."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lab.cases import measure_rows
from lab.experts import TENSOR_KINDS
from lab.experts.exchange import BENCH, KINDS, ExchangeSetting, list_cases, measure
from lab.experts.peers import ExchangedExperts, torch_experts
from lab.experts.routing import draw_routing


def _measure(ranks, setting):
    cases = list_cases(setting)
    return ranks(2).run(measure_rows, 2, None, cases, [None] * len(cases), measure, len)[0]


def test_passes_compute_the_same_as_by_the_public_way(ranks):
    rows = _measure(ranks, ExchangeSetting(routing=("skewed",), ranks=2))
    assert [row["kind"] for row in rows] == list(KINDS)
    for row in rows:
        assert row.get("failed") is None
        assert 0 < row["megabytes"] < row["choice_megabytes"]
    for row in rows[:2]:
        assert row["counted_megabytes"] > 0
        assert row["rate"] > 0
        assert row["fixed"] > 0
    assert all(row["difference"] < 2e-2 for row in rows[2:])


def test_tensor_parallel_passes_compute_the_same_as_by_nccl(ranks, tmp_path):
    setting = ExchangeSetting(only=TENSOR_KINDS, routing=("skewed",), ranks=2)
    rows = _measure(ranks, setting)
    assert [row["kind"] for row in rows] == list(TENSOR_KINDS)
    assert [row.get("failed") for row in rows] == [None] * 4
    assert all(row["difference"] < 2e-2 for row in rows[2:])
    said = BENCH(replace(setting, ranks=4, cluster="dgx-h200", tokens=2048, models=("mixtral-8x7b",)), tmp_path)["rows"]
    assert all(row["products"] <= row["predicted"] < row["nccl"] for row in said)


def _differentiate() -> list[torch.Tensor]:
    """This rank's mean gradients of two experts, by NCCL's way, and by all experts on each rank."""
    module = nn.Module()
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("gate_up_proj", (4, 16, 8)), ("down_proj", (4, 8, 8))):
        module.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    ids, weights = draw_routing(6, 4, 2, "skewed", x.device, dist.get_rank())
    exchanged = ExchangedExperts(module, init_device_mesh("cpu", (2,)))
    exchanged(x, ids, weights).square().sum().backward()
    torch_experts(x, ids, weights, *module.parameters()).square().sum().backward()
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
    plain = [parameter.grad[own] / 2 for parameter in module.parameters()]
    return [parameter.grad.to_local() for parameter in exchanged.parameters()] + plain


def test_experts_divided_by_nccl_have_the_mean_gradients_of_whole_ones(ranks):
    for up, down, plain_up, plain_down in ranks(2).run(_differentiate):
        torch.testing.assert_close((up, down), (plain_up, plain_down), rtol=1e-4, atol=1e-3)


def test_predictions_have_one_row_a_token_and_rank(tmp_path):
    said = BENCH(ExchangeSetting(ranks=4, cluster="dgx-h200", megabytes=4, tokens=2048), tmp_path)["rows"]
    dispatch, forward = said[0], said[2]
    assert dispatch["megabytes"] == pytest.approx(4 * 2**20 / 1e6, rel=0.02)
    assert dispatch["choice_megabytes"] / dispatch["megabytes"] == pytest.approx(6 / 2.72, rel=0.05)
    assert forward["products"] < forward["predicted"] < forward["nccl"]
