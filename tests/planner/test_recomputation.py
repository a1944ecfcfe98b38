# SPDX-License-Identifier: Apache-2.0
"""Tests of what modes of recomputation keep, send and compute: predictions against ranks,
and against arithmetic by hand.
"""

import gc
import json
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.peak_memory import PeakMemory
from torch import Tensor
from typer.testing import CliRunner

import stretto
from stretto.cli import app
from stretto.cluster import GPU, Cluster, FlopRates, NodeLink
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, count_collectives, parallelize
from stretto.planner import GridPlan, predict

BATCH, SEQ_LEN = 4, 128
CONFIG = GPTConfig(layers=6, hidden=128, heads=8, vocab=96, max_seq_len=SEQ_LEN, positions="rotary", norm="rmsnorm")
GATED = replace(CONFIG, kv_heads=4, ffn=192, activation="swiglu", tie_embeddings=False)
LARGE = GPTConfig(layers=24, hidden=4096, heads=32, vocab=50304, bias=False, norm="rmsnorm", positions="rotary")
# A byte takes a nanosecond, and nothing takes time to start.
MACHINE = Cluster(
    name="made up",
    gpus_per_node=8,
    gpu=GPU(name="made up", memory=80e9, memory_bandwidth=1e12, peak_flops=FlopRates(bf16=100e12, fp32=100e12)),
    in_node=NodeLink(bandwidth=1e9, latency=1e-30),
)
MODES = ("none", "full", "every:2", "every:4", "products", "communication", "host")


def measure(sizes: dict[str, int], config: GPTConfig, recompute: str, options: dict[str, Any]) -> dict[str, int]:
    """Bytes that the blocks keep alive between the passes, and bytes that a step sends, by axis."""
    grid = Grid(**sizes)
    torch.manual_seed(0)
    model = parallelize(GPT(config), grid, recompute=recompute, overlap=False, **options)
    text = torch.randint(config.vocab, (BATCH // grid.size("batch"), SEQ_LEN + 1))
    alive: list[int] = []

    def note(_: Any, args: tuple[Tensor, ...]) -> None:
        for _ in range(4):  # gloo's threads hold what they sent last
            dist.all_reduce(torch.zeros(1), group=grid.group("x"))
        gc.collect()
        alive.append(memory.now)

    model.blocks[0].register_forward_pre_hook(note)
    model.norm.register_forward_pre_hook(note)
    with count_collectives(grid) as counts, PeakMemory() as memory:
        for parameter in model.parameters():
            memory.note(parameter.to_local())
        model(text[:, :-1], text[:, 1:]).backward()
    return {"kept": alive[1] - alive[0]} | counts.bytes_by_axis()


@pytest.mark.parametrize(
    ("grid", "config", "options"),
    [
        pytest.param({"x": 2}, CONFIG, {}, marks=pytest.mark.exhaustive),
        pytest.param({"y": 2}, GATED, {}, marks=pytest.mark.long),
        pytest.param({"x": 2}, GATED, {"shard_sequence": True}, marks=pytest.mark.exhaustive),
        pytest.param({"x": 2, "y": 2}, CONFIG, {"shard_sequence": True}, marks=pytest.mark.exhaustive),
        pytest.param({"x": 2, "z": 2}, GATED, {}, marks=pytest.mark.exhaustive),
        pytest.param({"z": 2}, GATED, {"reshard": "after_forward"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: "gated" if value == GATED else str(value) if isinstance(value, dict) else "plain",
)
def test_kept_bytes_are_within_2_percent_and_sent_bytes_within_1_5_percent(ranks, grid, config, options):
    pool, sizes = ranks(prod(grid.values())), {"data": 1, "x": 1, "y": 1, "z": 1} | grid
    asked = {"grid": grid, "batch": BATCH, "seq_len": SEQ_LEN, "dtype": "fp32", "overlaps": False} | options
    for mode in ("full", "every:4", "products", "communication"):
        seen = pool.run(measure, sizes, config, mode, options)[0]
        plan = predict(config, MACHINE, recompute=mode, **asked)
        assert plan.kept_activations == pytest.approx(seen["kept"], rel=0.02), mode
        sent = {axis: plan.communication[f"all_reduce_{axis}"] for axis in ("x", "y")}
        sent["z"] = plan.communication["all_gather_z"] + plan.communication["reduce_scatter_z"]
        for axis in grid:
            assert sent[axis] * 1e9 == pytest.approx(seen[axis], rel=0.015), (mode, axis)


def plan_of(recompute: str, model: GPTConfig = LARGE, **changes: Any) -> GridPlan:
    options: dict[str, Any] = {"grid": {"x": 2, "y": 2}, "batch": 16, "seq_len": 2048, "micro_batch": 4} | changes
    return predict(model, MACHINE, recompute=recompute, **options)


def test_each_modes_kept_bytes_match_hand_computed_ones():
    """24 blocks of hidden 4096, x = y = 2, in bf16: qkv of 3, up of 4, hidden of 1 x 4096 features, each in halves."""
    tokens, half = 4 * 2048, 4096 // 2
    of_a_token = {
        "full": 24 * half,
        "every:4": 6 * half,
        "every:5": 5 * half,
        "products": 24 * (1 + 3 + 1 + 4 + 1) * half,
        "communication": 24 * ((1 + 3 + 1 + 4 + 1) * half + 2 * 2 * 2),
        "host": 24 * half,
    }
    for mode, numbers in of_a_token.items():
        assert plan_of(mode).kept_activations == numbers * tokens * 2, mode
        assert plan_of(mode).host_memory == (numbers * tokens * 2 if mode == "host" else 0)
    # Where x alone is cut, the rowwise linears' outputs are what was sent.
    assert plan_of("communication", grid={"x": 4}).kept_activations == 24 * 3 * 4096 * tokens * 2
    assert plan_of("communication", grid={"z": 4}).kept_activations == plan_of("full", grid={"z": 4}).kept_activations


def test_each_modes_communication_and_recomputation():
    plans = {mode: plan_of(mode) for mode in MODES}
    sent = {
        mode: plan.communication["all_reduce_x"] + plan.communication["all_reduce_y"] for mode, plan in plans.items()
    }
    # Equation 5.3: 2 (G - 1) / G x m n / G' numbers of each linear, over x where it is rowwise, in nanoseconds a byte.
    # A block that is computed again ends before its last linear, of which the sum would be one of these nine.
    again = 4 * 24 * 2 * (1 / 2) * 4 * 2048 * 4096 / 2 * 2 * 1e-9
    statistics = sent["products"] - sent["none"]
    assert sent["communication"] == sent["none"]
    assert sent["full"] == sent["host"] == pytest.approx(sent["none"] + (3 + 1 + 4) * again + statistics)
    assert sent["every:2"] == pytest.approx(sent["none"] + (3 + 1 + 4 + 1 / 2) * again + statistics)
    assert 0 < statistics < 0.01 * again
    computed = {mode: plan.compute_time for mode, plan in plans.items()}
    assert computed["none"] < computed["products"] == computed["communication"] < computed["full"]
    assert computed["full"] == computed["host"] < computed["every:2"] < computed["every:4"]
    dropping = plan_of("full", replace(LARGE, dropout=0.1))  # saves what it has dropped of the output
    assert dropping.compute_time > computed["every:4"]
    sums = dropping.communication["all_reduce_x"] + dropping.communication["all_reduce_y"]
    assert sums == pytest.approx(sent["none"] + (3 + 1 + 4 + 1) * again + statistics)
    only_x = {mode: plan_of(mode, grid={"x": 4}).compute_time for mode in ("products", "communication", "full")}
    assert only_x["products"] < only_x["communication"] < only_x["full"]
    gathered = {mode: plan_of(mode, grid={"z": 4}).communication["all_gather_z"] for mode in MODES}
    assert len({gathered[mode] for mode in MODES if mode != "none"}) == 1
    assert gathered["full"] > 1.9 * gathered["none"]


def test_peaks_are_in_the_order_of_what_is_kept():
    peaks = {mode: plan_of(mode, batch=64, micro_batch=64).peak_memory for mode in MODES}
    assert peaks["host"] < peaks["full"] < peaks["products"] <= peaks["communication"] < peaks["none"]
    # L I / k + k A, where A is 18 I: less for k = 2 from 36 blocks on.
    deep = replace(LARGE, layers=96)
    of_length = {
        length: predict(
            deep, MACHINE, grid={"x": 2, "y": 2}, batch=64, seq_len=2048, recompute=f"every:{length}"
        ).peak_memory
        for length in (1, 2, 12, 48)
    }
    assert of_length[2] < of_length[1] < of_length[12] < of_length[48]
    assert plan_of("every:1", batch=64, micro_batch=64).peak_memory == peaks["full"]
    assert plan_of("every:2", batch=64, micro_batch=64).peak_memory > peaks["full"]


def test_the_command_plans_a_mode_and_prints_all_of_them(tmp_path):
    MACHINE.save(tmp_path / "mine.toml")
    (tmp_path / "model.toml").write_text("layers = 6\nhidden = 1024\nheads = 16\nvocab = 4096\n")
    command = ["plan", "--model", str(tmp_path / "model.toml"), "--cluster", str(tmp_path / "mine.toml")]
    command += ["--gpus", "4", "--batch", "16", "--seq-len", "1024"]
    asked = json.loads(CliRunner().invoke(app, [*command, "--recompute", "communication", "--json"]).output)
    assert {plan["recompute"] for plan in asked} == {"communication"}
    printed = CliRunner().invoke(app, [*command, "--recompute", "host"]).output
    assert "* with activation checkpointing: host" in printed
    given = json.loads(CliRunner().invoke(app, [*command, "--reshard", "after_step", "--json"]).output)
    assert {plan["reshard"] for plan in given} == {"after_step"}
    modes = json.loads(CliRunner().invoke(app, [*command, "--modes", "--json"]).output)
    assert [plan["recompute"] for plan in modes] == list(MODES)
    assert "Modes of recomputation" in CliRunner().invoke(app, [*command, "--modes"]).output
    for mode, words in (("most", "must be one of none, full"), ("every:7", "the model has 6 blocks; every:6 would do")):
        refused = CliRunner().invoke(app, [*command, "--recompute", mode])
        assert refused.exit_code == 2
        assert words in " ".join(refused.output.split())


def test_unknown_modes_are_refused_by_plan_and_predict():
    for ask in (plan_of, lambda mode: stretto.plan(LARGE, MACHINE, gpus=4, batch=8, seq_len=64, recompute=mode)):
        with pytest.raises(ValueError, match="recompute is 'most', but must be one of"):
            ask("most")
        with pytest.raises(ValueError, match="the model has 24 blocks; every:24 would do"):
            ask("every:25")
