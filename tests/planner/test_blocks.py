# SPDX-License-Identifier: Apache-2.0
"""Plans of models without roles, which are sharded block by block over z: what x and y do not split, they replicate."""

import math
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from tests.huggingface.test_config_json import config_of, model_of

import stretto
from stretto.axes import GridSizes
from stretto.cluster import GPU, Cluster, FlopRates, NodeLink
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, count_collectives, parallelize, validate
from stretto.planner import compute, predict, read_architecture
from stretto.planner.compute import matmul_shapes
from stretto.planner.grids import every_grid, why_impossible
from stretto.planner.memory import local_parameters

CONFIG = GPTConfig(layers=3, hidden=64, heads=4, vocab=96, positions="rotary", norm="rmsnorm", bias=False)
SPLIT = read_architecture(CONFIG, 32)
BLOCKS = replace(SPLIT, is_sharded_by_blocks=True, takes_sharded_sequence=False)
# A block: qkv, out, up, down, and two norms. Outside: the embedding, which is the head, and the last norm.
BLOCK = 64 * 192 + 64 * 64 + 2 * 64 * 256 + 2 * 64
OUTSIDE = 96 * 64 + 64
BATCH, SEQ_LEN = 8, 32
GRIDS = [{"z": 4}, {"data": 2, "z": 2}, {"data": 4}, {"x": 2, "z": 2}, {"x": 2, "y": 2}, {"data": 2, "y": 2}]
# A byte takes a nanosecond between GPUs and none in memory, a FLOP a picosecond, and nothing takes time to start.
MACHINE = Cluster(
    name="made up",
    gpus_per_node=8,
    gpu=GPU(name="made up", memory=80e9, memory_bandwidth=1e24, peak_flops=FlopRates(bf16=1e12 / 0.75, fp32=1e12)),
    in_node=NodeLink(bandwidth=1e9, latency=1e-30),
)


def predict_blocks(grid: dict[str, int], **options: Any) -> stretto.planner.GridPlan:
    return predict(BLOCKS, MACHINE, grid=grid, **{"batch": BATCH, "seq_len": SEQ_LEN} | options)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_z_alone_splits_parameters_gradients_and_optimizer_state(grid):
    assert BLOCKS.block_parameters == BLOCK
    assert BLOCKS.outside_parameters == OUTSIDE
    numbers = (3 * BLOCK + OUTSIDE) / grid.get("z", 1)
    assert local_parameters(BLOCKS, GridSizes(**grid)) == numbers
    memory = predict_blocks(grid, batch=16, micro_batch=1).memory  # earlier micro-batches' gradients are there
    assert (memory["parameters"], memory["optimizer"]) == (4 * numbers, 8 * numbers)
    assert memory["gradients"] == 4 * numbers


def test_ranks_of_x_and_y_hold_what_a_rank_without_them_holds():
    for options in ({}, {"recompute": "full"}, {"reshard": "after_forward"}):
        plans = [
            predict_blocks({"z": 2} | sizes, micro_batch=2, **options) for sizes in ({}, {"x": 2}, {"x": 2, "y": 2})
        ]
        assert plans[0].memory == plans[1].memory == plans[2].memory


def test_gathered_weights_are_whole_blocks():
    # So many tokens that the loss is the peak: all blocks, and what is in none.
    large = {"batch": 64, "micro_batch": 32}
    assert predict_blocks({"z": 2}, **large).memory["gathered_weights"] == 2 * (3 * BLOCK + OUTSIDE)
    assert predict_blocks({"z": 2}, **large, reshard="after_forward").memory["gathered_weights"] == 2 * OUTSIDE


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_rank_computes_all_of_the_model_for_its_rows(grid):
    tokens = BATCH * SEQ_LEN // (grid.get("data", 1) * grid.get("z", 1))
    weights = 3 * (BLOCK - 2 * 64) + 96 * 64  # and the head's
    # Attention's two products, half of each, at 0.6 of the rate, and 2.5 times as much in the backward pass.
    attention = 3 * (2 * tokens * SEQ_LEN * 64) * 3.5 / 0.6
    assert predict_blocks(grid).compute_time == pytest.approx((6 * weights * tokens + attention) * 1e-12)


def test_products_to_be_measured_are_those_of_whole_linears(monkeypatch):
    monkeypatch.setattr("stretto.planner.compute.read_architecture", lambda *_: BLOCKS)
    linears = {(64, 192), (64, 64), (64, 256), (256, 64)}
    for m, n, k in matmul_shapes(["made up"], [8], SEQ_LEN, gpus=8):
        assert (n, k) in linears or (k, n) in linears or (m, n) in linears or (n, m) in linears


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("gathers", [1, 2])
def test_whole_blocks_are_gathered_and_scattered_over_z_and_their_shards_summed_over_data(grid, gathers):
    z, data = grid.get("z", 1), grid.get("data", 1)
    over_z, over_data = (z - 1) / z, 2 * (data - 1) / data / z
    options = {"reshard": "after_backward" if gathers == 1 else "after_forward"}
    paper = predict_blocks(grid, **options, cost="paper").communication
    blocks = 3 * BLOCK * 2e-9  # bf16
    expected = {
        "all_gather_z": gathers * over_z * blocks,
        "reduce_scatter_z": over_z * blocks,
        "all_reduce_y": 0.0,
        "all_reduce_x": 0.0,
        "all_reduce_data": over_data * blocks,
    }
    assert paper == pytest.approx(expected | {"total": sum(expected.values())})
    full = predict_blocks(grid, **options).communication  # and what is in no block, which stays gathered
    expected["all_gather_z"] += over_z * OUTSIDE * 2e-9
    expected["reduce_scatter_z"] += over_z * OUTSIDE * 2e-9
    expected["all_reduce_data"] += over_data * OUTSIDE * 2e-9
    assert full == pytest.approx(expected | {"total": sum(expected.values())})


def test_a_block_is_one_message_so_latency_counts_once():
    slow = replace(MACHINE, in_node=NodeLink(bandwidth=1e24, latency=1.0))
    communication = predict(BLOCKS, slow, grid={"z": 2}, batch=BATCH, seq_len=SEQ_LEN).communication
    assert communication["all_gather_z"] == pytest.approx(3 + 1)
    assert communication["reduce_scatter_z"] == pytest.approx(3 + 1)


def bytes_sent(sizes: dict[str, int], **options: Any) -> dict[tuple[str, str], int]:
    grid = Grid(**sizes)
    torch.manual_seed(0)
    model = parallelize(GPT(CONFIG), grid, blocks=["blocks.*"], **options)
    text = torch.randint(96, (BATCH // grid.size("batch"), SEQ_LEN + 1))
    model(text[:, :-1], text[:, 1:]).backward()  # the first one compares orders over ranks
    with count_collectives(grid) as counts:
        model(text[:, :-1], text[:, 1:]).backward()
    return dict(counts.bytes_by_axis())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", [{"data": 2, "z": 2}, {"x": 2, "z": 2}, {"data": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("options", [{}, {"reshard": "after_forward"}, {"recompute": "full"}], ids=str)
def test_the_bytes_that_are_predicted_are_those_that_ranks_send(ranks, grid, options):
    sent = ranks(prod(grid.values())).run(bytes_sent, grid, **options)[0]
    predicted = predict_blocks(grid, dtype="fp32", **options).communication
    of_z = predicted["all_gather_z"] + predicted["reduce_scatter_z"]
    assert of_z * 1e9 == pytest.approx(sent.get("z", 0))
    # What z does not cut is summed over data x z. A number a gradient says whether a rank has it.
    assert predicted["all_reduce_data"] * 1e9 == pytest.approx(sent.get("data", 0) + sent.get("batch", 0), rel=1e-3)
    assert not sent.get("x")
    assert not sent.get("y")


@pytest.mark.parametrize("cost", ["full", "paper"])
@pytest.mark.parametrize("bandwidth", [1e9, 1e12])
def test_grids_whose_ranks_compute_the_same_come_after_all_others_with_a_note(cost, bandwidth):
    """Even where they send less, as with x alone, which sends nothing."""
    machine = replace(MACHINE, in_node=NodeLink(bandwidth=bandwidth))
    plans = stretto.plan(BLOCKS, machine, gpus=8, batch=64, seq_len=SEQ_LEN, cost=cost)
    copies = [plan.grid["x"] * plan.grid["y"] for plan in plans]
    assert len(plans) == 20
    assert copies[:4] == [1] * 4
    assert 1 not in copies[4:]
    for plan, number in zip(plans[4:], copies[4:], strict=True):
        assert f"x * y = {number} ranks compute the same, {number} times the work of x = y = 1" in plan.why
        if cost == "full":
            rows = 64 // plan.grid["data"] // plan.grid["z"]
            assert plan.compute_time > rows / 8 * 0.99 * plans[0].compute_time
    alone = next(plan for plan in plans if plan.grid["x"] == 8)
    if cost == "paper":
        assert alone.step_time == 0
        assert f"100.0% faster than {GridSizes(**plans[0].grid)}: " in alone.why


def test_ranks_compute_the_same_only_where_the_batch_leaves_nothing_else():
    machine = replace(MACHINE, in_node=NodeLink(bandwidth=1e12))
    plans = stretto.plan(BLOCKS, machine, gpus=6, batch=2, seq_len=SEQ_LEN)
    assert plans[0].grid["x"] * plans[0].grid["y"] == 3
    assert plans[0].is_possible
    assert plans[0].why.startswith("its x * y = 3 ranks compute the same, 3 times the work of x = y = 1; the fastest")
    assert not any(plan.is_possible for plan in plans if plan.grid["x"] * plan.grid["y"] == 1)


def test_plans_that_do_not_fit_recommend_ranks_of_z():
    small = replace(MACHINE, gpu=replace(MACHINE.gpu, memory=2e6))
    for plan in stretto.plan(BLOCKS, small, gpus=8, batch=64, seq_len=SEQ_LEN):
        if plan.fits:
            continue
        of_copies = plan.grid["x"] * plan.grid["y"] > 1
        wanted = "x and y to z" if of_copies else "data to z" if plan.grid["data"] > 1 else ""
        assert f"moving ranks from {wanted}" in plan.why or not wanted
        assert "of x, y" not in plan.why


FAMILIES = [
    ("glm", {}, "CausalLM"),
    ("olmo", {}, "CausalLM"),
    ("cohere", {"use_qk_norm": True}, "CausalLM"),
    ("llama", {"attention_dropout": 0.1}, "CausalLM"),
    ("gpt2", {"attn_pdrop": 0.1}, "CausalLM"),
    ("llama", {}, "SequenceClassification"),
]


@pytest.mark.parametrize(("kind", "options", "head"), FAMILIES, ids=str)
def test_a_grid_is_possible_just_when_parallelize_takes_it(kind, options, head):
    model = model_of(config_of(kind, **options), head)
    architecture = read_architecture(model, 16)
    assert architecture.is_sharded_by_blocks
    assert "and the plan counts that" in architecture.notes[0]
    for grid in every_grid(12):
        found, refusal = why_impossible(architecture, grid, batch=12), None
        try:
            validate(model, grid.sizes())
        except ValueError as error:
            refusal = str(error)
        assert (found is None) == (refusal is None), f"{grid}: planner says {found}, parallelize says {refusal}"


def test_large_parameters_that_copy_engines_gather_are_there_all_the_time_without_a_message():
    """Linears of 4096 x 4096 numbers and more, 32 MiB, where NVLink reaches z."""
    large = replace(BLOCKS, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=2048, fuses_qkv=False, vocab=3000)
    nvlink = replace(
        MACHINE,
        gpu=replace(MACHINE.gpu, name="NVIDIA H200", measured_memory_bandwidth=1e9 / compute.ELEMENT_WISE_EFFICIENCY),
        in_node=NodeLink(bandwidth=450e9),
    )
    options = {"grid": {"z": 2}, "batch": 4, "seq_len": 1, "micro_batch": 1}
    engines, without = (predict(large, nvlink, **options, copy_engines=copies) for copies in (True, False))
    copied, rest, outside = 3 * 4 * 4096**2, 3 * 2 * (4096 * 2048 + 4096), 3001 * 4096
    # The end of the backward pass, where gradients are there, too, but no other gathered weight.
    assert engines.memory["gathered_weights"] >= 2 * copied
    assert without.memory["gathered_weights"] <= 2 * (copied + rest + outside + 2 * (copied + rest) / 3 * 1.5)
    # And they are not copied out of a message, in either micro-batch.
    assert without.compute_time - engines.compute_time == pytest.approx(2 * 2 * copied * 2e-9, rel=1e-6)
    for changes in ({"reshard": "after_forward"}, {"recompute": "full"}):
        plans = [predict(large, nvlink, **options, copy_engines=copies, **changes) for copies in (True, False)]
        assert plans[0].memory == plans[1].memory
        assert plans[0].compute_time == plans[1].compute_time
    assert predict(BLOCKS, nvlink, **options).memory == predict(BLOCKS, nvlink, **options, copy_engines=False).memory


def test_norms_of_transformers_own_keep_more_and_take_longer_than_those_that_replace_them():
    architecture = read_architecture(config_of("llama"), 16)
    of_roles, of_blocks = architecture.block[0], replace(architecture, is_sharded_by_blocks=True).block[0]
    grid = GridSizes()
    # Of a 16-bit input a copy in fp32, and the normalized one; twice, of 32 features.
    assert of_blocks.kept(grid, 1) - of_roles.kept(grid, 1) == 2 * 2 * 32
    assert sum(of_blocks.element_wise(grid, 1)) > sum(of_roles.element_wise(grid, 1))


def test_copies_into_and_out_of_messages_take_their_time():
    slow = replace(MACHINE, gpu=replace(MACHINE.gpu, measured_memory_bandwidth=1e9 / compute.ELEMENT_WISE_EFFICIENCY))

    def seconds(architecture: Any, **options: Any) -> float:
        return predict(architecture, slow, grid={"z": 2}, batch=BATCH, seq_len=SEQ_LEN, **options).compute_time

    # In bf16 parameters are copied out once, read and written; gradients are copied in and divided.
    numbers = 3 * BLOCK + OUTSIDE
    split = replace(SPLIT, logits="sliced")
    assert seconds(BLOCKS) - seconds(split) == pytest.approx(3 * 2 * 2 * numbers * 1e-9, rel=1e-3)


def test_the_number_of_gpus_that_is_advised_is_one_that_divides_the_batch():
    dropout = replace(BLOCKS, refuses_copies=True)
    with pytest.raises(ValueError, match=r"x = y = 1 alone; .*; 5 GPUs would do"):
        stretto.plan(dropout, MACHINE, gpus=6, batch=5, seq_len=SEQ_LEN)
    assert math.isfinite(stretto.plan(dropout, MACHINE, gpus=5, batch=5, seq_len=SEQ_LEN)[0].step_time)
