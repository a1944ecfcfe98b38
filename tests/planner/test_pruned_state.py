# SPDX-License-Identifier: Apache-2.0
"""What the planner knows of pruned models: bytes a parameter, messages, stages."""

from dataclasses import replace
from typing import Any

import pytest

from stretto.execution import StateOptions
from stretto.models import GPTConfig
from stretto.planner import GridPlan, predict, read_architecture
from stretto.planner.optimizer_state import number_bytes, parameters_and_optimizer, take_over, update_bytes
from stretto.planner.workload import NumberTypes, StepWorkload

LARGE = GPTConfig(layers=32, hidden=2560, heads=32, vocab=50304, max_seq_len=2048)


def test_bytes_of_a_number_are_the_formulas() -> None:
    """14 f + 2 + 0.129 with a bitmap, 18 f + 2 with positions; of z shards also 2 f, and the whole rows' index."""
    types, options = NumberTypes(), StateOptions("device", sparsity=0.9)
    for found, expected in (
        (options, 14 * 0.1 + 2 + 0.129),
        (replace(options, index="int32"), 18 * 0.1 + 2),
        (replace(options, sparsity=0.0), 16),
        (replace(options, accumulates_fp32=True), 16 * 0.1 + 2 + 0.129),
    ):
        kept = sum(parameters_and_optimizer(types, found, 1e9).values()) + 1e9 * number_bytes(types, found).gradient
        assert kept == pytest.approx(expected * 1e9, rel=1e-3)
    alone, *sharded = (sum(parameters_and_optimizer(types, options, 1e9, z).values()) for z in (1, 2, 4))
    for z, each in zip((2, 4), sharded, strict=True):
        assert each - alone == pytest.approx(1e9 * (0.2 + z * 0.129), rel=1e-3)
    beginning = take_over(types, options, 1e9)
    assert beginning is not None
    assert sum(beginning.values()) == pytest.approx(1e9 * (4 + 0.4 + 0.129), rel=1e-3)
    # The norm, the gradient, the expanded weights with their buffer and index, and the state both ways.
    assert update_bytes(types, options) == pytest.approx(0.2 + 0.2 + 2 + 0.129 + 0.4 + 2 * 1.2, rel=1e-3)


def test_embeddings_and_norms_are_not_pruned() -> None:
    model = read_architecture(LARGE, 2048)
    blocks = 32 * 12 * 2560**2
    assert model.prunable_parameters == blocks
    workload = StepWorkload(model, 512, 2048)
    left = number_bytes(workload, StateOptions("device", sparsity=0.9)).gradient / 2
    assert left == pytest.approx(1 - 0.9 * blocks / model.parameters)
    ends = workload.stage(2, is_first=True, is_last=False)
    assert number_bytes(ends, StateOptions("device", sparsity=0.9)).gradient / 2 > left


def predict_on(grid: dict[str, int], sparsity: float, **options: Any) -> GridPlan:
    state = StateOptions("device", sparsity=sparsity)
    asked: dict[str, Any] = {"batch": 512, "seq_len": 2048, "micro_batch": 1, "dtype": "fp16", "recompute": "full"}
    return predict(LARGE, "summit", grid=grid, state=state, **(asked | options))


def test_messages_carry_what_is_left() -> None:
    """Over data and z: 0.147 of all parameters, as embeddings are sent whole."""
    for grid, kinds in (({"data": 64}, ("all_reduce_data",)), ({"z": 4}, ("all_gather_z", "reduce_scatter_z"))):
        dense, pruned = (predict_on(grid, sparsity, overlaps=False).communication for sparsity in (0.0, 0.9))
        for kind in kinds:
            share = pruned[kind] / dense[kind]
            assert 0.1 < share < 0.25, (kind, share)  # seconds, of latency too


def test_what_is_freed_buys_fewer_stages() -> None:
    """2.7B on 128 V100s: two stages do not fit dense, one does pruned, and it is faster than four (Singh, 4.2.2)."""
    assert not predict_on({"pipe": 2, "data": 64}, 0.0).fits
    dense = predict_on({"pipe": 4, "data": 32}, 0.0)
    pruned = predict_on({"data": 128}, 0.9)
    assert dense.fits
    assert pruned.fits
    assert pruned.step_time < 0.85 * dense.step_time


def test_an_explanation_has_the_bytes_of_a_pruned_parameter() -> None:
    formulas = {line.name: line.formula for line in predict_on({"data": 128}, 0.9).formulas}
    assert formulas["parameters"].startswith("2.12")
    assert formulas["optimizer"].startswith("1.") or formulas["optimizer"].startswith("2.")
