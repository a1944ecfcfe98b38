"""Predicted memory against what was measured, and against arithmetic by hand."""

import json
from pathlib import Path

import pytest

import stretto
from stretto.models import GPTConfig

MEASURED = json.loads((Path(__file__).parents[2] / "results" / "train" / "train.json").read_text())
GRIDS = [row for row in MEASURED["rows"] if "FSDP" not in row["name"]]
H200X4 = stretto.Cluster(
    name="4 H200",
    nodes=1,
    gpus_per_node=4,
    gpu=stretto.cluster.GPU(name="NVIDIA H200", memory=141e9),
    in_node=stretto.cluster.NodeLink(bandwidth=450e9),
)


@pytest.mark.parametrize("row", GRIDS, ids=lambda row: row["name"])
def test_peak_memory_is_within_3_percent_of_what_was_measured_on_gpus(row):
    workload = MEASURED["workload"]
    grid = {"data": 1, "x": 1, "y": 1, "z": 1} | {
        axis: int(size) for axis, _, size in (part.partition("=") for part in row["name"].split())
    }
    plans = stretto.plan(
        GPTConfig(**workload["model"]),
        H200X4,
        gpus=4,
        batch=workload["batch"],
        seq_len=workload["seq_len"],
        micro_batch=workload["batch"] // (grid["data"] * grid["z"]),
        checkpoint_activations=False,
        keep_gathered=True,
    )
    (plan,) = (plan for plan in plans if plan.grid == grid)
    assert plan.peak_memory == pytest.approx(row["peak_memory_gib"] * 2**30, rel=0.03)


def plan_of(grid: dict[str, int], **options: object) -> stretto.planner.Plan:
    config = GPTConfig(layers=24, hidden=4096, heads=32, vocab=50304, bias=False, norm="rmsnorm", positions="rotary")
    plans = stretto.plan(config, H200X4, **{"gpus": 4, "batch": 8, "seq_len": 2048} | options)
    return next(plan for plan in plans if plan.grid == {"data": 1, "x": 1, "y": 1, "z": 1} | grid)


def test_parameters_and_adams_moments_are_shared_by_x_y_and_z_but_not_by_data():
    # 24 layers of 12 x 4096^2, an embedding of 50304 x 4096, 49 norms of 4096; all but the norms on every fourth rank.
    weights = 24 * 12 * 4096**2 + 50304 * 4096
    norms = 49 * 4096
    sharded = plan_of({"z": 4}).memory
    assert sharded["parameters"] == pytest.approx(4 * (weights / 4 + norms))
    assert sharded["optimizer"] == 2 * sharded["parameters"]
    whole = plan_of({"data": 4}).memory
    assert whole["parameters"] == pytest.approx(4 * (weights + norms))
    assert plan_of({"data": 4}, optimizer="sgd").memory["optimizer"] == 0


def test_weights_gathered_over_z_are_there_whole_unless_they_are_freed():
    kept = plan_of({"z": 4}, checkpoint_activations=False, keep_gathered=True).memory
    assert kept["gathered_weights"] == 2 * 24 * 12 * 4096**2
    freed = plan_of({"z": 4}, checkpoint_activations=False, keep_gathered=False).memory
    assert freed["gathered_weights"] == 2 * 2 * 4 * 4096**2  # two of the largest linear's


def test_checkpointing_keeps_one_input_a_block_and_one_block_whole():
    # So many tokens that activations weigh more than anything that is there at the backward pass's end.
    kept = plan_of({"z": 4}, batch=64, checkpoint_activations=False, micro_batch=16).memory["activations"]
    recomputed = plan_of({"z": 4}, batch=64, checkpoint_activations=True, micro_batch=16).memory["activations"]
    tokens, edges = 16 * 2048, 3 * 4096
    block = kept / 2 / tokens - edges  # numbers a token, of 24 blocks
    assert recomputed / 2 / tokens - edges == pytest.approx(24 * 4096 + block / 24)


def test_a_plan_that_does_not_fit_says_what_is_too_large_and_what_would_make_it_fit():
    small = stretto.Cluster(
        name="small",
        gpus_per_node=4,
        gpu=stretto.cluster.GPU(name="small", memory=24e9),
        in_node=stretto.cluster.NodeLink(bandwidth=100e9),
    )
    plans = stretto.plan(
        "gpt-5b", small, gpus=4, batch=8, seq_len=2048, checkpoint_activations=False, keep_gathered=True
    )
    assert not any(plan.fits for plan in plans)
    for plan in plans:
        if plan.is_possible:
            assert sum(plan.memory.values()) > 0.9 * 24e9
            assert "does not fit" in plan.why
            assert "activation checkpointing" in plan.why
    remedied = stretto.plan("gpt-5b", small, gpus=4, batch=8, seq_len=2048, keep_gathered=False)
    assert remedied[0].fits
    assert remedied[0].checkpoint_activations


def test_the_largest_micro_batch_that_fits_is_chosen():
    roomy = plan_of({"z": 4}, batch=64)
    assert roomy.fits
    assert plan_of({"z": 4}, batch=64, micro_batch=roomy.micro_batch, checkpoint_activations=False).fits or (
        roomy.checkpoint_activations
    )
    if roomy.micro_batch < 16:
        larger = plan_of(
            {"z": 4}, batch=64, micro_batch=2 * roomy.micro_batch, checkpoint_activations=roomy.checkpoint_activations
        )
        assert not larger.fits
