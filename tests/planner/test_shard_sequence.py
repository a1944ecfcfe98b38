# SPDX-License-Identifier: Apache-2.0
"""Plans with activations that are sharded by tokens over x, against what `parallelize(shard_sequence=True)` sends."""

import json
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import stretto
from stretto.cli import app
from stretto.cluster import GPU, Cluster, FlopRates, NodeLink
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, checkpoint_activations, count_collectives, parallelize
from stretto.planner import GridPlan, predict

BATCH, SEQ_LEN = 8, 64
SHAPE = GPTConfig(layers=3, hidden=64, heads=8, vocab=96, positions="rotary", norm="rmsnorm", bias=False)
GATED = replace(SHAPE, kv_heads=4, ffn=160, activation="swiglu", tie_embeddings=False)
HUGGING_FACE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}
LARGE = GPTConfig(layers=10, hidden=4096, heads=32, vocab=4096, bias=False, norm="rmsnorm", positions="rotary")
# A byte takes a nanosecond, and nothing takes time to start.
MACHINE = Cluster(
    name="made up",
    gpus_per_node=8,
    nodes=4,
    nics_per_node=8,
    gpu=GPU(name="made up", memory=80e9, memory_bandwidth=1e12, peak_flops=FlopRates(bf16=100e12, fp32=100e12)),
    in_node=NodeLink(bandwidth=1e9, latency=1e-30),
    between_nodes=stretto.cluster.NetworkLink(bandwidth=1e9),
)
FAST = replace(MACHINE, in_node=NodeLink(bandwidth=100e9))


def bytes_sent(sizes: dict[str, int], config: GPTConfig | dict[str, Any], recomputes: bool) -> dict[str, int]:
    grid, is_gpt = Grid(**sizes), isinstance(config, GPTConfig)
    torch.manual_seed(0)
    whole = GPT(config) if is_gpt else AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).train()
    model = parallelize(whole, grid, shard_sequence=True)
    if recomputes:
        checkpoint_activations(model)
    text = torch.randint(96, (BATCH, SEQ_LEN + 1))
    with count_collectives(grid) as counts:
        loss = model(text[:, :-1], text[:, 1:]) if is_gpt else model(input_ids=text[:, 1:], labels=text[:, 1:]).loss
        loss.backward()
    return dict(counts.bytes_by_axis())


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "grid", "recomputes"),
    [
        pytest.param(SHAPE, {"x": 4}, False, marks=pytest.mark.long),
        (GATED, {"x": 2}, True),
        (GATED, {"x": 2, "y": 2}, False),
        (HUGGING_FACE, {"x": 2}, False),
    ],
    ids=["x=4", "gated, recomputed, x=2", "gated, x=2 y=2", "transformers, x=2"],
)
def test_the_bytes_that_are_predicted_are_those_that_ranks_send(ranks, config, grid, recomputes):
    sizes = {"data": 1, "x": 1, "y": 1, "z": 1} | grid
    sent = ranks(prod(grid.values())).run(bytes_sent, sizes, config, recomputes)[0]
    options = {"dtype": "fp32", "shard_sequence": True, "recompute": "full" if recomputes else "none"}
    plan = predict(config, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN, **options)
    for axis in grid:  # the norms' gradients, summed over x, and a little of y's statistics are not counted
        assert plan.communication[f"all_reduce_{axis}"] * 1e9 == pytest.approx(sent[axis], rel=0.015)


def both(machine: Cluster, grid: dict[str, int], **options: Any) -> list[GridPlan]:
    """Without and with the sequence sharded."""
    settings = {"batch": 16, "seq_len": 1024} | options
    return [predict(LARGE, machine, grid=grid, shard_sequence=shards, **settings) for shards in (False, True)]


def test_halves_of_all_reduces_hide_within_products_and_norms_hold_a_part_of_the_tokens():
    whole, sharded = both(FAST, {"x": 4})
    assert sharded.communication["all_reduce_x"] == pytest.approx(whole.communication["all_reduce_x"], rel=0.02)
    assert sharded.exposed["x"] < whole.exposed["x"]
    assert sharded.compute_time < whole.compute_time
    # Of two norms a block the inputs, of which 3/4 lie on other ranks; of the last norm the output too, but it is there
    # once more, gathered. Each norm keeps two fp32 statistics of a token, too.
    tokens, hidden = 16 * 1024, 4096
    of_norms = 10 * 2 * 3 / 4 * (hidden * 2 + 2 * 4)
    of_the_last = (2 * 3 / 4 - 1) * hidden * 2
    assert whole.memory["activations"] - sharded.memory["activations"] == tokens * (of_norms + of_the_last)
    assert not whole.shard_sequence
    assert sharded.shard_sequence


def test_without_overlap_and_across_nodes_all_of_it_is_waited_for():
    plain = both(FAST, {"x": 4}, overlaps=False)[1]
    assert sum(plain.exposed.values()) == pytest.approx(plain.communication["total"])
    across = both(FAST, {"x": 32})[1]
    assert across.exposed["x"] == pytest.approx(across.communication["all_reduce_x"])


def test_sums_over_y_are_waited_for():
    sharded = both(FAST, {"x": 2, "y": 2})[1]
    assert sharded.exposed["y"] == pytest.approx(sharded.communication["all_reduce_y"])


def search(**options: Any) -> list[GridPlan]:
    return stretto.plan(LARGE, FAST, **{"gpus": 8, "batch": 16, "seq_len": 1024, "cost": "full"} | options)


def test_it_is_tried_unless_it_is_given():
    usual, tried, always = search(shard_sequence=False), search(), search(shard_sequence=True)
    assert not any(plan.shard_sequence for plan in usual)
    assert tried[0].step_time <= usual[0].step_time
    of_grid = {str(plan.grid): plan for plan in usual}
    for plan in tried:
        assert plan.step_time <= of_grid[str(plan.grid)].step_time
        assert plan.grid["x"] > 1 or not plan.shard_sequence
    assert any(plan.shard_sequence for plan in tried)
    assert tried[0].shard_sequence
    grid, size = tried[0].grid, tried[0].micro_batch
    (note,) = (note for note in tried[0].notes if "shard_sequence" in note)
    whole, sharded = both(FAST, grid, micro_batch=size, recompute=tried[0].recompute, reshard=tried[0].reshard)
    assert f"{sharded.step_time:.4g} s and {sharded.peak_memory / 1e9:.3g} GB with" in note
    assert f"{whole.step_time:.4g} s and {whole.peak_memory / 1e9:.3g} GB without" in note
    for plan in always:
        assert plan.shard_sequence == (plan.is_possible and plan.grid["x"] > 1)


def test_micro_batches_are_those_whose_tokens_x_divides():
    plans = search(seq_len=129, shard_sequence=True)  # of odd length: x = 2 needs an even number of sequences
    for plan in plans:
        if plan.is_possible and plan.grid["x"] > 1:
            assert plan.micro_batch % plan.grid["x"] == 0
    assert any("with shard_sequence, x=8" in plan.why for plan in search(seq_len=129, batch=2, shard_sequence=True))
    with pytest.raises(ValueError, match="x=2 does not divide a rank's 129 tokens at once"):
        predict(LARGE, FAST, grid={"x": 2}, batch=4, seq_len=129, micro_batch=1, shard_sequence=True)


def test_a_grid_that_is_too_large_is_not_said_to_be_impossible_because_x_divides_no_tokens():
    small = replace(FAST, gpu=replace(FAST.gpu, memory=2e9))
    plans = stretto.plan("gpt2-xl", small, gpus=5, batch=4, seq_len=128)
    (plan,) = (plan for plan in plans if plan.grid["x"] == 5)  # 5 divides the 25 heads, but not 512 tokens
    assert plan.is_possible
    assert not plan.fits
    assert not plan.shard_sequence
    assert plan.why.startswith("does not fit")


def test_a_model_or_a_cost_that_does_not_know_it_is_refused_or_planned_without():
    options = {"gpus": 4, "batch": 4, "seq_len": 16, "cost": "full"}
    whole = GPTConfig(layers=2, hidden=64, heads=4, vocab=64, num_experts=4, experts_per_token=2, balance="sequence")
    for model, more in ((HUGGING_FACE | {"model_type": "phi3"}, {}), (HUGGING_FACE, {"pipe": 2}), (whole, {})):
        assert not any(plan.shard_sequence for plan in stretto.plan(model, FAST, **options, **more))
    assert not any(plan.shard_sequence for plan in search(cost="paper"))
    options["shard_sequence"] = True
    with pytest.raises(ValueError, match="does not take shard_sequence: its code"):
        stretto.plan(HUGGING_FACE | {"model_type": "phi3"}, FAST, **options)
    with pytest.raises(ValueError, match="does not take shard_sequence in a pipeline, but pipe is 2"):
        stretto.plan(HUGGING_FACE, FAST, pipe=2, **options)
    with pytest.raises(ValueError, match="a choice of cost='full'"):
        search(cost="paper", shard_sequence=True)


def test_the_command_tries_it_and_names_it_as_the_configuration_does(tmp_path):
    FAST.save(tmp_path / "mine.toml")
    (tmp_path / "model.toml").write_text("layers = 10\nhidden = 4096\nheads = 32\nvocab = 4096\n")
    arguments = ["plan", "--model", str(tmp_path / "model.toml"), "--cluster", str(tmp_path / "mine.toml")]
    arguments += ["--gpus", "8", "--batch", "16", "--seq-len", "1024", "--cost", "full"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0, text.output
    assert "+ with train.shard_sequence" in text.output
    plans = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert any(plan["shard_sequence"] for plan in plans)
    without = json.loads(CliRunner().invoke(app, [*arguments, "--no-shard-sequence", "--json"]).output)
    assert not any(plan["shard_sequence"] for plan in without)
