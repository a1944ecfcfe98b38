# SPDX-License-Identifier: Apache-2.0
"""Tests of what mixtures of experts compute, send and keep on a grid, by hand; and how plans divide experts."""

from dataclasses import replace
from itertools import combinations
from statistics import mean
from typing import Any

import pytest
import torch
from tests.planner.test_blocks import MACHINE

import stretto
from stretto.axes import GridSizes
from stretto.execution import ExecutionOptions, Recomputation
from stretto.models import GPT, GPTConfig
from stretto.parallel import validate
from stretto.planner import predict, read_architecture
from stretto.planner.activations import recomputed_blocks
from stretto.planner.compute import Device
from stretto.planner.cost import PartTotals, PassTotals
from stretto.planner.experts.cost import (
    ALL_TO_ALL_PEER,
    expert_messages,
    group_of_replicas,
    group_of_shards,
    local_expert_parameters,
    ranks_in_node,
    weight_traffic,
)
from stretto.planner.experts.layers import MoeLayer, MoeShape, distinct_ranks, places_of_rank
from stretto.planner.grids import every_grid, list_expert_grids, why_impossible
from stretto.planner.memory import local_parameters
from stretto.planner.pipeline.space import make_pipeline_space
from stretto.planner.pipeline.stage_times import PipelineParts, cut_blocks
from stretto.planner.workload import StepWorkload

HIDDEN, FFN, EXPERTS, ACTIVE, VOCAB, SEQ_LEN, BATCH = 32, 48, 8, 2, 256, 16, 16
CONFIG = GPTConfig(
    layers=4,
    hidden=HIDDEN,
    heads=4,
    ffn=64,
    vocab=VOCAB,
    max_seq_len=SEQ_LEN,
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    positions="rotary",
    num_experts=EXPERTS,
    experts_per_token=ACTIVE,
    expert_ffn=FFN,
    moe_layers="every:2",
)
MODEL = read_architecture(CONFIG, SEQ_LEN)
LAYER = MoeLayer(HIDDEN, MoeShape(EXPERTS, ACTIVE, FFN, imbalance=1.0))
OF_EXPERT = 3 * HIDDEN * FFN
TOKENS = 64


def numbers(grid: GridSizes, **options: Any) -> dict[tuple[str, str, bool], float]:
    found: dict[tuple[str, str, bool], float] = {}
    for kind, axis, count, is_forward in expert_messages(LAYER, grid, TOKENS, ExecutionOptions(**options)):
        found[kind, axis, is_forward] = found.get((kind, axis, is_forward), 0.0) + count
    return found


def ranks_of_a_token(ranks: int) -> float:
    """Mean number of ranks that have experts of a token: of each choice of two of eight, counted."""
    choices = list(combinations(range(EXPERTS), ACTIVE))
    return mean(len({expert // (EXPERTS // ranks) for expert in choice}) for choice in choices)


def test_a_token_is_sent_to_each_rank_of_its_experts_and_back_in_both_passes():
    found = numbers(GridSizes(data=4, expert=4))
    # Two all-to-alls a pass, each of which keeps a quarter of what it is given.
    sent = 3 / 4 * TOKENS * ranks_of_a_token(4) * HIDDEN
    assert found == {("all_to_all", "expert", way): pytest.approx(2 * sent) for way in (True, False)}
    assert numbers(GridSizes(data=4)) == {}  # one rank has all experts
    choices = numbers(GridSizes(data=4, expert=4), expert_reduce="choice")["all_to_all", "expert", True]
    assert choices == pytest.approx(sent + 3 / 4 * TOKENS * ACTIVE * HIDDEN)  # once to a rank, back of each expert


@pytest.mark.parametrize(("experts", "active", "ranks"), [(128, 8, 4), (60, 4, 4), (8, 2, 8), (256, 8, 64)])
def test_a_token_has_as_many_ranks_as_in_random_routings(experts, active, ranks):
    grid = GridSizes(data=ranks, expert=ranks)
    drawn = torch.rand(20000, experts, generator=torch.Generator().manual_seed(0)).topk(active).indices
    has = torch.zeros(20000, ranks).scatter_(1, drawn // (experts // ranks), 1.0)
    shape = MoeShape(experts, active, FFN)
    assert distinct_ranks(shape, grid) == pytest.approx(float(has.sum(1).mean()), rel=0.005)
    # The busiest rank has at most each token of its group once.
    assert places_of_rank(replace(shape, imbalance=ranks), grid, 1.0) == ranks


def test_with_expert_rows_the_library_gathers_all_tokens_where_kernels_send_none():
    grid, rows = GridSizes(data=2, x=2, expert=2), {"expert_rows": 999}
    gathered = numbers(grid, **rows)
    of_rank = TOKENS / 2 * HIDDEN
    for way in (True, False):
        assert gathered["reduce_scatter", "expert", way] == gathered["all_gather", "expert", way] == of_rank
        assert gathered["reduce_scatter", "x", way] == 2 * of_rank  # and two ranks' again over x
    assert numbers(grid, **rows, drop_duplicates=False) == numbers(grid, drop_duplicates=False)
    grid = GridSizes(data=4, expert=4)
    assert numbers(grid, **rows) == numbers(grid)
    far = expert_messages(LAYER, grid, TOKENS, ExecutionOptions(expert_rows=999), gpus_per_node=2)
    assert {each.kind for each in far} == {"all_gather", "reduce_scatter"}
    assert {each.numbers for each in far} == {3 * TOKENS * HIDDEN}


def test_dropped_duplicates_send_an_xth_and_what_came_is_gathered_over_x():
    grid = GridSizes(data=2, x=4, expert=2)
    whole, dropped = numbers(grid, drop_duplicates=False), numbers(grid)
    rows, places = TOKENS * ACTIVE * HIDDEN, TOKENS * ranks_of_a_token(2) * HIDDEN
    for way in (True, False):
        assert whole["all_to_all", "expert", way] == 4 * dropped["all_to_all", "expert", way]
        assert whole["all_reduce", "x", way] == 2 * 3 / 4 * rows  # partial sums of all rows (step 6 of figure 7.3)
        assert dropped["reduce_scatter", "x", way] == pytest.approx(3 / 4 * places)
        # What came after the all-to-all, and tokens at the end; in the backward pass, gradients by both.
        assert dropped["all_gather", "x", way] == pytest.approx(3 / 4 * (places + TOKENS * HIDDEN))


def test_sharded_tokens_are_distinct_already_and_folded_ranks_gather_nothing_that_came():
    sharded = numbers(GridSizes(data=2, x=4, expert=2), shard_sequence=True)
    assert sharded["all_gather", "x", True] == pytest.approx(3 / 4 * TOKENS * ranks_of_a_token(2) * HIDDEN)
    folded = numbers(GridSizes(data=2, x=4, expert=8, expert_tensor="fold"))
    assert folded["all_to_all", "expert", True] == 2 * 7 / 8 * TOKENS * ACTIVE * HIDDEN / 4  # an expert a rank
    assert folded["all_gather", "x", True] == 3 / 4 * TOKENS * HIDDEN
    assert ("reduce_scatter", "x", True) not in folded
    alone = numbers(GridSizes(x=4))  # no token travels: whole outputs are summed
    assert alone["all_reduce", "x", True] == 2 * 3 / 4 * TOKENS * HIDDEN


def test_y_sums_the_outputs_of_gate_and_up_and_halves_what_is_sent():
    found, alone = numbers(GridSizes(data=2, y=2, expert=2)), numbers(GridSizes(data=2, expert=2))
    assert found["all_to_all", "expert", True] == alone["all_to_all", "expert", True] / 2
    assert found["all_reduce", "y", True] == TOKENS * ACTIVE * 2 * FFN  # 2 (y - 1) / y of gate and up
    assert found["all_reduce", "y", False] == TOKENS * ACTIVE * FFN
    assert found["all_gather", "y", True] == TOKENS * HIDDEN / 2  # the router takes whole features


def test_plans_of_experts_that_do_not_fit_say_why():
    plans = stretto.plan("qwen3-30b-a3b", "dgx-h100", gpus=6, batch=6, seq_len=512)
    assert all(plan.why.startswith("does not fit") for plan in plans if plan.is_possible)
    assert {"gathered_weights", "activations", "logits"} <= set.intersection(*(set(plan.memory) for plan in plans))


def test_y_halves_the_features_that_experts_keep_of_rows_and_not_what_the_router_takes():
    kept, alone = LAYER.kept(GridSizes(y=2), 1), LAYER.kept(GridSizes(), 1)
    assert alone - kept == 2 * ACTIVE * HIDDEN / 2 - HIDDEN  # inputs and outputs; whole tokens are gathered besides


def test_experts_weights_are_gathered_over_expert_z_and_summed_over_expert_data():
    grid = GridSizes(data=4, z=2, x=2, expert=4)  # all of data divides them: z is left
    block = MODEL.kinds[1].model
    traffic, weights = weight_traffic(block, grid), EXPERTS * OF_EXPERT / (4 * 2)
    assert traffic.all_gather == traffic.reduce_scatter == weights / 2
    assert traffic.data == 0
    assert group_of_shards(grid) == (2, 2)
    grid = GridSizes(data=4, z=2, x=2, expert=2)
    assert group_of_replicas(grid) == (2 * 2 * 2, 2)  # every second rank of data
    assert weight_traffic(block, grid).data == 2 * 1 / 2 * EXPERTS * OF_EXPERT / (2 * 2) / 2


GRIDS = [
    {"data": 4, "expert": 4},
    {"data": 2, "z": 2, "expert": 4},
    {"data": 2, "x": 2, "expert": 2},
    {"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"},
    {"y": 2, "z": 2, "expert": 2},
    {"z": 4},
    {"x": 2, "y": 2},
]


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_a_rank_holds_its_part_of_every_parameter(sizes):
    grid = GridSizes(**sizes)
    assert why_impossible(MODEL, grid, BATCH) is None
    x, y, z = grid.x, grid.y, grid.z
    # Of all ranks, those of data that expert does not take hold the same experts.
    replicas = grid.data // grid.expert_taken["data"]
    of_experts = 2 * EXPERTS * OF_EXPERT * replicas / grid.ranks
    assert local_expert_parameters(MODEL, grid) == pytest.approx(of_experts)
    linears = 4 * 4 * HIDDEN**2 + 2 * 3 * HIDDEN * 64
    tables = VOCAB * HIDDEN
    whole = 2 * EXPERTS * HIDDEN  # two routers
    norms = 9 * HIDDEN / y
    assert local_parameters(MODEL, grid) == pytest.approx((linears + tables) / (x * y * z) + whole + norms + of_experts)


def test_all_rank_compute_their_share_of_active_weights():
    def computed(**grid: Any) -> float:
        found = predict(CONFIG, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN, imbalance=1.0)
        assert found.compute_time is not None
        return found.compute_time

    one = computed()
    for grid in ({"data": 2, "expert": 2}, {"x": 2}, {"data": 2}):
        # The same work on two ranks, but for tiles of a rank's experts that are not full.
        assert one / 2 < computed(**grid) <= one


def test_grouped_products_reach_more_with_more_rows_an_expert():
    cluster = stretto.Cluster.preset("dgx-h100")
    device = Device(cluster, "bf16")
    rates = [2 * 8 * rows * 2048 * 768 / device.grouped_matmul(8, rows, 2048, 768) for rows in (1, 8, 64, 512, 8192)]
    assert rates == sorted(rates)
    assert rates[-1] < device.flops
    # A row an expert takes as long as its weights' way from memory.
    assert device.grouped_matmul(8, 1, 2048, 768) == pytest.approx(
        8 * 2048 * 768 * 2 / device.memory_bandwidth, rel=0.01
    )


def test_plans_take_longer_and_more_memory_the_less_rows_are_balanced():
    found = [
        predict(CONFIG, MACHINE, grid={"data": 4, "expert": 4}, batch=BATCH, seq_len=SEQ_LEN, imbalance=imbalance)
        for imbalance in (1.0, 1.2, 1.8)
    ]
    assert found[0].step_time < found[1].step_time < found[2].step_time
    assert found[0].peak_memory < found[1].peak_memory < found[2].peak_memory
    sent = [each.communication["all_to_all"] for each in found]
    assert (sent[2] - sent[0]) / (sent[1] - sent[0]) == pytest.approx(4)  # start-ups do not grow


def test_a_plan_says_what_imbalance_costs():
    grid = {"data": 4, "expert": 4}
    skewed, even = (
        predict(CONFIG, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN, imbalance=imbalance)
        for imbalance in (1.8, 1.0)
    )
    [note] = [note for note in skewed.notes if "imbalance" in note]
    longer = skewed.step_time - even.step_time
    assert f"1.8 times the mean's rows (imbalance), which makes a step {longer:.3g} s" in note
    assert not any("imbalance" in note for note in even.notes)


@pytest.mark.parametrize(("mode", "passes"), [("none", 4), ("full", 6), ("communication", 4), ("products", 6)])
def test_recomputation_sends_rows_again_unless_it_keeps_them(mode, passes):
    grid = {"data": 4, "expert": 4}
    found = predict(CONFIG, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN, recompute=mode, imbalance=1.0)
    tokens = BATCH * SEQ_LEN / 4
    each = (
        3 / 4 * tokens * ranks_of_a_token(4) * HIDDEN * 2 / 1e9 + 3 * ALL_TO_ALL_PEER
    )  # bytes over 1 GB/s, and three peers
    assert found.communication["all_to_all"] == pytest.approx(2 * passes * each)


def test_kept_rows_take_memory_between_the_passes():
    workload = StepWorkload(MODEL, BATCH, SEQ_LEN)
    for grid in (GridSizes(data=4, expert=4), GridSizes(data=4)):
        full, kept = (
            recomputed_blocks(workload, grid, Recomputation.parse(mode)).between for mode in ("full", "communication")
        )
        sent = ranks_of_a_token(4) * HIDDEN
        # Of 2 blocks, tokens as they came, as many times as the busiest rank has them, and outputs as they came back.
        assert kept - full == pytest.approx(2 * (1.1 * sent + sent) if grid.expert > 1 else 0)


def test_dense_and_mixed_blocks_are_cut_by_their_times():
    dense, mixed = (PartTotals(PassTotals(computation=seconds)) for seconds in (1.0, 3.0))
    pattern = (False, False, False, True, True, True)
    parts = PipelineParts((dense, mixed), pattern, PartTotals(), PartTotals())
    assert cut_blocks(parts, 2) == (0, 4, 6)  # 6 and 6
    assert parts.blocks(3, 1) == mixed.plus(dense, 2)


def test_stages_hold_their_own_experts():
    first, last = (MODEL.stage(2, is_first=is_first, is_last=not is_first, moe_blocks=1) for is_first in (True, False))
    assert first.parameters + last.parameters == MODEL.parameters + VOCAB * HIDDEN  # tied embeddings are on both
    dense = MODEL.stage(1, is_first=False, is_last=False, moe_blocks=0)
    assert dense.expert_parameters == 0
    assert dense.parameters == 4 * HIDDEN**2 + 3 * HIDDEN * 64 + 2 * HIDDEN


def test_every_way_to_divide_experts_is_listed_and_may_be_fixed():
    grid = GridSizes(data=2, x=2, z=2)
    listed = {(way.expert, way.expert_tensor) for way in list_expert_grids(MODEL, grid)}
    assert listed == {(1, "cut"), (2, "cut"), (4, "cut"), (2, "fold"), (4, "fold"), (8, "fold")}
    assert [way.expert for way in list_expert_grids(MODEL, grid, expert=4, expert_tensor="cut")] == [4]
    dense = replace(MODEL, moe=None, moe_pattern=())
    assert list_expert_grids(dense, grid) == [grid]


def test_neighbours_within_a_node_are_counted():
    assert ranks_in_node(GridSizes(z=16, expert=16), 8) == 8
    assert ranks_in_node(GridSizes(z=16, x=2, expert=4), 8) == 4
    assert ranks_in_node(GridSizes(data=16, x=8, expert=4), 8) == 1
    assert ranks_in_node(GridSizes(data=16, x=8, expert=16, expert_tensor="fold"), 8) == 8


@pytest.mark.parametrize("pipe", [None, 2])
def test_plans_divide_experts_where_that_is_fastest(pipe):
    plans = stretto.plan(CONFIG, "dgx-h100", gpus=8, batch=BATCH, seq_len=SEQ_LEN, pipe=pipe)
    best = plans[0]
    assert best.fits
    fixed = stretto.plan(CONFIG, "dgx-h100", gpus=8, batch=BATCH, seq_len=SEQ_LEN, pipe=pipe, expert=4)
    assert {each.grid.get("expert", 1) for each in fixed if each.is_possible} == {4}
    assert fixed[0].step_time >= best.step_time * 0.999


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert": 3}, "expert is 3, which does not divide 8 experts; 2 would do"),
        ({"expert": 0}, "expert is 0, but must be a whole number"),
        ({"expert_tensor": "split"}, "expert_tensor is 'split', but must be one of cut, fold"),
        ({"imbalance": 0.5}, "imbalance is 0.5, but rows of the busiest rank over the mean are from 1"),
        ({"expert": 8}, "expert is 8, which does not divide 2 GPUs; 2 would do"),
    ],
)
def test_experts_that_cannot_be_divided_so_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        stretto.plan(CONFIG, "dgx-h100", gpus=2, batch=BATCH, seq_len=SEQ_LEN, **options)


def test_a_dense_model_has_no_experts_to_divide():
    with pytest.raises(ValueError, match="has no experts that ranks divide"):
        stretto.plan("gpt2-small", "dgx-h100", gpus=2, batch=BATCH, seq_len=SEQ_LEN, expert=2)
    assert make_pipeline_space(MODEL, 4).pipes == (1,)


@pytest.mark.exhaustive
def test_deepseek_v3_on_2048_gpus_is_planned_and_compared_with_its_authors_layout():
    from lab.papers.experts import AUTHORS, CONFIGS

    plans = stretto.plan(CONFIGS["DeepSeek-V3"], "dgx-h100", gpus=2048, batch=15360, seq_len=4096, pipe="auto")
    best = plans[0]
    assert best.fits
    assert best.grid["pipe"] in (8, 16, 32)
    assert why_impossible(read_architecture(CONFIGS["DeepSeek-V3"], 4096), AUTHORS, 15360) is None


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_grid_is_possible_just_when_it_is_for_parallelize(ranks):
    config = replace(CONFIG, layers=2, num_experts=4, shared_ffn=24)
    with torch.device("meta"):
        model = GPT(config)
    found = read_architecture(config, SEQ_LEN)
    for grid in every_grid(ranks):
        for way in (GridSizes(**dict(grid), expert=n, expert_tensor=t) for n in (1, 2, 4, 8) for t in ("cut", "fold")):
            try:
                validate(model, way.sizes())
                refusal = None
            except ValueError as error:
                refusal = str(error)
            possible = why_impossible(found, way, 64)
            assert (possible is None) == (refusal is None), f"{way}: {possible}, and parallelize says {refusal}"
