# SPDX-License-Identifier: Apache-2.0
"""`python -m lab moe-demo` compares models that compute as much for each token."""

from pathlib import Path

import pytest

from lab.training.moe_demo import DENSE, MIXTURE, MoeDemoSetting, configure


def test_both_models_cost_as_many_flops_and_differ_in_their_experts_alone(tmp_path: Path) -> None:
    mixture, dense = (configure(name, MoeDemoSetting(), tmp_path) for name in (MIXTURE, DENSE))
    shapes = [config.model.to_gpt(data_vocab=256, seq_len=128) for config in (mixture, dense)]
    assert shapes[0].flops_per_token(128) == pytest.approx(shapes[1].flops_per_token(128), rel=0.01)
    assert (mixture.grid.expert, dense.grid.expert, dense.model.num_experts) == (2, 1, None)
    assert mixture.train == dense.train
    assert mixture.data == dense.data
    of_experts = {"num_experts", "experts_per_token", "expert_ffn", "router_scores", "expert_weight_scale"}
    differ = {name for name, value in mixture.model if value != getattr(dense.model, name)}
    assert differ == of_experts | {"balance", "bias_rate"}
