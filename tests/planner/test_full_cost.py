# SPDX-License-Identifier: Apache-2.0
"""The full cost model: measured tables are used as they are, and overlap hides what it can."""

import dataclasses
import itertools
import json
import random
import re

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import stretto
from stretto.axes import GridSizes
from stretto.cli import app
from stretto.cluster import (
    GPU,
    Cluster,
    FlopRates,
    HostTimes,
    InNodeBandwidth,
    Matmul,
    MeasuredCollective,
    NetworkLink,
    NodeLink,
)
from stretto.execution import BUCKET_BYTES, ExecutionOptions, Overlap
from stretto.models import GPTConfig
from stretto.parallel.comm import gradient_buckets
from stretto.parallel.layers import linear_plan
from stretto.planner import compute, predict, read_architecture, step_recorder
from stretto.planner.communication import bandwidths
from stretto.planner.step import GroupCollective, WeightCollectives
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.training import plan_simulated

CONFIG = GPTConfig(layers=10, hidden=1024, heads=8, vocab=1024, bias=False, norm="rmsnorm", positions="rotary")


def cluster(**options: object) -> Cluster:
    """Four GPUs of 100 TFLOP/s, 1 TB/s of memory and 100 GB/s of links."""
    gpu = {"memory": 80e9, "memory_bandwidth": 1e12, "peak_flops": FlopRates(bf16=100e12), "name": "made up"}
    of_gpu = {key: options.pop(key) for key in list(options) if key in GPU.__dataclass_fields__}
    made: dict[str, object] = {"name": "made up", "gpus_per_node": 4, "in_node": NodeLink(bandwidth=100e9)}
    return Cluster(gpu=GPU(**gpu | of_gpu), **made | options)


def step(machine: Cluster, grid: dict[str, int], **options: object) -> stretto.planner.GridPlan:
    return predict(CONFIG, machine, grid=grid, **{"batch": 16, "seq_len": 1024} | options)


GRIDS = [
    dict(zip(("data", "x", "y", "z"), sizes, strict=True))
    for sizes in itertools.product((1, 2, 4), repeat=4)
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] == 4
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_overlap_exposes_less_and_never_more(grid, recompute):
    hidden = step(cluster(), grid, recompute=recompute)
    plain = step(cluster(), grid, recompute=recompute, overlaps=False)
    assert plain.communication == hidden.communication
    assert sum(plain.exposed.values()) == pytest.approx(plain.communication["total"])
    assert plain.step_time == pytest.approx(plain.compute_time + plain.communication["total"])
    for axis, size in grid.items():
        assert (hidden.exposed[axis] > 0) == (size > 1)
        assert hidden.exposed[axis] <= plain.exposed[axis]
    assert hidden.step_time < plain.step_time


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("switches", "axis", "kinds"),
    [
        ({"all_reduce"}, "x", {"all_reduce_x"}),
        ({"all_gather", "reduce_scatter"}, "z", {"all_gather_z", "reduce_scatter_z"}),
        ({"data"}, "data", {"all_reduce_data"}),
    ],
    ids=["x", "z", "data"],
)
def test_a_single_switch_exposes_what_it_hid_and_nothing_else(switches, axis, kinds, recompute):
    overlap = Overlap(**dict.fromkeys(switches, False))
    for grid in ({axis: 4}, {axis: 2, "y": 2}):
        hidden = step(cluster(), grid, recompute=recompute)
        shown = step(cluster(), grid, recompute=recompute, options=ExecutionOptions(overlap))
        assert shown.exposed[axis] == pytest.approx(sum(shown.communication[kind] for kind in kinds))
        assert hidden.exposed[axis] < shown.exposed[axis]
        if axis != "x":  # sums over y are hidden by the same switch
            assert shown.exposed["y"] == hidden.exposed["y"]


def test_one_rank_exposes_nothing():
    alone = step(cluster(), {})
    assert alone.communication["total"] == 0
    assert alone.step_time == alone.compute_time


def test_recomputation_costs_a_forward_pass_and_freed_weights_a_gathering():
    grid = {"z": 4}
    plain = step(cluster(), grid)
    assert step(cluster(), grid, recompute="full").compute_time > 1.2 * plain.compute_time
    freed = step(cluster(), grid, reshard="after_forward")
    blocks = 10 * 12 * 1024**2 * 2 * 3 / 4 / 100e9  # bytes of the linears that a rank receives, over the bandwidth
    extra = freed.communication["all_gather_z"] - plain.communication["all_gather_z"]
    # Of 40 more gatherings, each starts with three hops of 3 us where the cluster does not say otherwise.
    assert extra == pytest.approx(blocks + 40 * 3 * 3e-6)


def test_half_of_a_large_output_is_summed_under_the_product_of_the_other_half():
    assert step_recorder.HALVED_BYTES == linear_plan.HALVED_BYTES
    assert step_recorder.HALVED_INPUTS == linear_plan.HALVED_INPUTS
    # On x=2 a block sums over x in the forward pass the outputs of `out` (512 inputs a rank) and `down` (2048).
    sequences = 16  # of 1024 tokens with 1024 numbers of 2 bytes: 32 MiB an output
    plain, hidden = (step(cluster(), {"x": 2}, batch=sequences, overlaps=overlaps) for overlaps in (False, True))
    product = 2 * sequences * 1024 * 2048 * 1024 / 75e12  # at three quarters of the peak
    # The sums of input gradients, of qkv and up, hide under products of their own.
    gradients = [2 * sequences * 1024 * n * 1024 / 75e12 for n in (3 * 1024 // 2, 4096 // 2)]
    # 2 x 3 us to start, two sends of half of it
    whole, half = (2 * 3e-6 + sequences * 1024 * 1024 * 2 / parts / 100e9 for parts in (1, 2))
    saved = min(2 * half, product) / 2 + sum(min(whole, gradient) for gradient in gradients)
    assert plain.exposed["x"] - hidden.exposed["x"] == pytest.approx(10 * saved, rel=1e-3)
    small = [step(cluster(), {"x": 2}, batch=4, overlaps=overlaps) for overlaps in (False, True)]  # 8 MiB: in one
    saved = sum(min(2 * 3e-6 + 4 * 1024 * 1024 * 2 / 100e9, gradient / 4) for gradient in gradients)
    assert small[0].exposed["x"] - small[1].exposed["x"] == pytest.approx(10 * saved, rel=1e-3)


def test_smaller_micro_batches_send_weights_more_often_and_gradients_over_data_once():
    whole = step(cluster(), {"data": 2, "z": 2}, micro_batch=4)
    split = step(cluster(), {"data": 2, "z": 2}, micro_batch=1)
    for kind in ("all_gather_z", "reduce_scatter_z"):
        assert split.communication[kind] == pytest.approx(4 * whole.communication[kind], rel=1e-6)
    assert split.communication["all_reduce_data"] == pytest.approx(whole.communication["all_reduce_data"])


def test_gradients_that_are_accumulated_unsharded_go_over_z_once_a_step():
    grid = {"data": 2, "z": 2}
    whole, split, once = (
        step(cluster(), grid, micro_batch=size, reshard=policy)
        for size, policy in ((4, "gradients_after_step"), (1, "after_backward"), (1, "gradients_after_step"))
    )
    kinds = ("all_gather_z", "reduce_scatter_z", "all_reduce_data")
    factors = [once.communication[kind] / whole.communication[kind] for kind in kinds]
    assert factors == pytest.approx([4, 1, 1], rel=1e-6)
    assert once.communication["all_gather_z"] == split.communication["all_gather_z"]
    hidden = [plan.communication["reduce_scatter_z"] + plan.communication["all_gather_z"] for plan in (split, once)]
    exposed = [plan.exposed["z"] for plan in (split, once)]
    assert 0 < exposed[1] < hidden[1]
    # Without micro-batches there is nothing to accumulate.
    assert step(cluster(), grid, micro_batch=4) == dataclasses.replace(whole, reshard="after_backward")


def test_a_measured_product_takes_the_time_that_was_measured():
    # On one rank the weight's gradient of qkv is [3072, tokens] x [tokens, 1024], and so on.
    tokens = 16 * 1024
    shapes = [
        *((tokens, n, k, "NT") for k, n in [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]),
        *((tokens, k, n, "NN") for k, n in [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]),
        *((n, k, tokens, "TN") for k, n in [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]),
        (tokens, 1024, 1024, "NT"), (tokens, 1024, 1024, "NN"), (1024, 1024, tokens, "TN"),  # the head's
    ]  # fmt: skip
    rows = tuple(Matmul(m, n, k, "bf16", layout, 1e-3) for m, n, k, layout in dict.fromkeys(shapes))
    slow = tuple(Matmul(row.m, row.n, row.k, "bf16", row.layout, 3e-3) for row in rows)
    difference = step(cluster(matmuls=slow), {}).step_time - step(cluster(matmuls=rows), {}).step_time
    assert difference == pytest.approx(2e-3 * (10 * 12 + 3))


def test_a_measured_collective_takes_the_time_that_was_measured_between_sizes_by_a_line():
    # x = 4: each of 10 blocks sums two outputs and two input gradients of 16 x 1024 x 1024 numbers of 2 bytes.
    sent = 2 * 3 / 4 * 16 * 1024 * 1024 * 2
    flat = tuple(MeasuredCollective("all_reduce", 1, 4, size, 5e-3) for size in (1000, 10**9))
    line = (
        MeasuredCollective("all_reduce", 1, 4, 1000, 5e-3),
        MeasuredCollective("all_reduce", 1, 4, int(2 * sent), 10e-3),
    )
    with_flat = step(cluster(transfers=flat), {"x": 4}, overlaps=False)
    with_line = step(cluster(transfers=line), {"x": 4}, overlaps=False)
    assert with_flat.communication["all_reduce_x"] == pytest.approx(5e-3 * (10 * 4 + 4))
    assert with_line.communication["all_reduce_x"] - with_flat.communication["all_reduce_x"] == pytest.approx(
        2.5e-3 * 42,
        rel=0.01,  # 40 of the blocks, the embedding's and the head's; the loss's statistics are small
    )


def test_a_collective_larger_than_all_that_were_measured_has_the_largest_ones_bandwidth():
    sent = 2 * 3 / 4 * 16 * 1024 * 1024 * 2
    measured = tuple(MeasuredCollective("all_reduce", 1, 4, int(size), size / 1e9) for size in (sent / 8, sent / 4))
    plan = step(cluster(transfers=measured), {"x": 4}, overlaps=False)
    # 1 GB/s: 40 sums of the blocks, the embedding's and the head's; the loss's statistics are small
    assert plan.communication["all_reduce_x"] == pytest.approx(42 * sent / 1e9, rel=0.02)


def test_an_untied_head_is_summed_over_data_and_a_tied_one_once():
    own, shared = (
        predict(dataclasses.replace(CONFIG, tie_embeddings=tied), cluster(), grid={"data": 4}, batch=16, seq_len=1024)
        for tied in (False, True)
    )
    table = 2 * 3 / 4 * 1024 * 1024 * 2 / 100e9  # vocabulary x hidden, of 2 bytes
    extra = own.communication["all_reduce_data"] - shared.communication["all_reduce_data"]
    assert extra == pytest.approx(table)  # in a bucket that is sent anyway


def test_gradients_over_data_are_counted_by_the_buckets_that_are_sent():
    # 2 layers of 12 x 256 x 256 weights and a table of 64 x 256 share one message, which nothing hides, since it starts
    # with the last gradient. 10 layers of 1024 fill 3 buckets and a part of another.
    machine = cluster(gpus_per_node=1, nics_per_node=1, between_nodes=NetworkLink(1e9, 1e-3))
    small = GPTConfig(layers=2, hidden=256, heads=8, vocab=64, max_seq_len=16, tie_embeddings=True)
    plan = predict(small, machine, grid={"data": 8}, batch=8, seq_len=16)
    sent = 2 * 7 / 8 * (2 * 12 * 256 * 256 + 64 * 256) * 2
    assert plan.communication["all_reduce_data"] == pytest.approx(14 * 1e-3 + sent / 1e9)
    assert plan.exposed["data"] == pytest.approx(plan.communication["all_reduce_data"])
    model = dataclasses.replace(CONFIG, tie_embeddings=True)
    large = predict(model, machine, grid={"data": 8}, batch=8, seq_len=16)
    sent = 2 * 7 / 8 * (10 * 12 + 1) * 1024 * 1024 * 2
    assert large.communication["all_reduce_data"] == pytest.approx(4 * 14 * 1e-3 + sent / 1e9)


def test_the_planner_fills_buckets_as_the_reducer_does(monkeypatch):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw, machine = random.Random(seed), cluster()
    monkeypatch.setattr(gradient_buckets, "local", lambda parameter: parameter)
    groups = {"replicas": ("replicas",), "expert_data": ("expert_data",), "copies": ("replicas", "x")}
    for _ in range(20):
        kinds = [draw.choice([*groups]) for _ in range(draw.randint(1, 30))]
        sizes = [draw.choice((1 << 10, 3 << 20, 20 << 20, 32 << 20, 50 << 20)) for _ in kinds]
        parameters = [nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device="meta")) for size in sizes]
        of = {parameter: groups[kind] for parameter, kind in zip(parameters, kinds, strict=True)}
        filled = gradient_buckets.BucketPlan.of(parameters, of, lambda each: each.dtype, BUCKET_BYTES).buckets
        sent = [(group, sum(each.numel() for each in held) * 2) for over, held in filled for group in over]
        config = StepConfig(GridSizes(data=2, x=2), 1)
        buckets = step_recorder.GradientBuckets(config, machine, bandwidths(machine, config.grid))
        found = []
        for kind, size in zip(kinds, sizes, strict=True):
            sums = tuple(GroupCollective("all_reduce", group, 2 * size, 1.0) for group in groups[kind])
            found += buckets.add(WeightCollectives(None, None, sums, 2 * size))
        assert [(each.group, each.num_bytes) for each in found + buckets.rest()] == sent


def test_the_loss_moves_six_bytes_a_logit_of_16_bits():
    def seconds(vocab: int, bandwidth: float) -> float:
        machine = cluster(memory_bandwidth=bandwidth)
        config = dataclasses.replace(CONFIG, vocab=vocab, layers=1)
        return predict(config, machine, grid={}, batch=16, seq_len=1024).compute_time

    # What a bandwidth of half costs a wider vocabulary: products take as long on both.
    extra = [seconds(vocab, 0.5e12) - seconds(vocab, 1e12) for vocab in (2048, 4096)]
    logits, rate = 2048 * 16 * 1024, 1e12 * compute.COPY_EFFICIENCY * compute.ELEMENT_WISE_EFFICIENCY
    of_weights = 2048 * 1024 * 40 / rate  # cast (6), their gradients made in fp32 (2), and updated (32)
    assert extra[1] - extra[0] == pytest.approx(logits * 6 / rate + of_weights, rel=0.05)


def test_the_fastest_comes_first_and_others_explain_their_difference():
    plans = stretto.plan(CONFIG, cluster(), gpus=4, batch=16, seq_len=1024, cost="full")
    assert [plan.step_time for plan in plans] == sorted(plan.step_time for plan in plans)
    assert "fastest" in plans[0].why
    for plan in plans[1:]:
        assert "slower than" in plan.why or "as fast as" in plan.why
    one = predict(
        CONFIG, cluster(), grid=plans[3].grid, batch=16, seq_len=1024, micro_batch=plans[3].micro_batch,
        recompute=plans[3].recompute, reshard=plans[3].reshard, shard_sequence=plans[3].shard_sequence,
    )  # fmt: skip
    assert one.step_time == plans[3].step_time


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("gpu.memory", {"memory": None}),
        ("gpu.memory_bandwidth", {"memory_bandwidth": None}),
        ("gpu.peak_flops.bf16", {"peak_flops": FlopRates()}),
        ("in_node.bandwidth", {"in_node": NodeLink()}),
    ],
)
def test_a_figure_that_is_missing_is_named(missing, options):
    with pytest.raises(ValueError, match=missing):
        stretto.plan(CONFIG, cluster(**options), gpus=4, batch=16, seq_len=1024, cost="full")


@pytest.mark.parametrize("ask", [stretto.plan, predict])
def test_a_cost_model_that_there_is_not_is_refused(ask):
    options = {"grid": {"data": 4}} if ask is predict else {"gpus": 4}
    with pytest.raises(ValueError, match="cost is 'whole', but must be 'paper' or 'full'"):
        ask(CONFIG, cluster(), **options, batch=16, seq_len=1024, cost="whole")


@pytest.mark.parametrize("cluster", [None, 3])
def test_what_is_no_cluster_or_grid_is_refused(cluster):
    with pytest.raises(ValueError, match="must be a Cluster"):
        stretto.plan("gpt2-small", cluster, gpus=4, batch=4, seq_len=128)
    with pytest.raises(ValueError, match="must be a Cluster"):
        predict("gpt2-small", cluster, grid={"x": 2}, batch=4, seq_len=128)
    with pytest.raises(ValueError, match="must be a mapping"):
        predict("gpt2-small", "perlmutter", grid=cluster, batch=4, seq_len=128)


def test_a_dtype_that_was_not_measured_is_named_with_those_that_were():
    probed = cluster(peak_flops=FlopRates(), empirical_flops=FlopRates(fp32=1e11))
    with pytest.raises(
        ValueError, match=r"was measured in fp32: plan for dtype fp32 \(--dtype fp32\), or measure bf16"
    ):
        stretto.plan(CONFIG, probed, gpus=4, batch=16, seq_len=1024, cost="full")
    assert stretto.plan(CONFIG, probed, gpus=4, batch=16, seq_len=1024, cost="full", dtype="fp32")


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
TERMS = re.compile(r"([\d.,e+-]+) (s|ms|us) (more|less) for ([a-z ]+?)(?=,|$)")


@pytest.mark.parametrize("cost_model", ["paper", "full"])
def test_a_steps_terms_add_up_to_its_time_and_the_explanation_to_the_difference(cost_model):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, explained = random.Random(seed), 0
    for _ in range(12):
        heads = rng.choice([4, 8, 12])
        model = GPTConfig(
            layers=rng.randint(1, 30),
            hidden=heads * rng.choice([32, 64, 128]),
            heads=heads,
            vocab=rng.choice([256, 50304]),
        )
        model = dataclasses.replace(read_architecture(model, 1024), is_sharded_by_blocks=rng.random() < 0.3)
        machine = cluster(
            in_node=NodeLink(bandwidth=rng.choice([10e9, 300e9])),
            between_nodes=NetworkLink(bandwidth=25e9),
            nics_per_node=4,
            overlap_slowdown=rng.choice([None, 0.1, 0.7]),
        )
        options = {"gpus": rng.choice([4, 8, 12]), "batch": rng.choice([24, 48]), "seq_len": rng.choice([128, 1024])}
        plans = stretto.plan(model, machine, cost=cost_model, **options)
        for plan in plans:
            assert sum(plan.terms.values()) == pytest.approx(plan.step_time, rel=1e-9)
            if not re.search(r"(slower|faster) than", plan.why):
                continue
            parts = {
                name: SECONDS[unit] * float(number.replace(",", "")) * (1 if sign == "more" else -1)
                for number, unit, sign, name in TERMS.findall(plan.why)
            }
            rounding = 0.006 * sum(map(abs, parts.values()))  # printed with three digits
            assert sum(parts.values()) == pytest.approx(plan.step_time - plans[0].step_time, abs=rounding), plan.why
            for name, time in parts.items():
                if name != "the rest":
                    assert time == pytest.approx(plan.terms[name] - plans[0].terms[name], rel=0.006), plan.why
            explained += 1
    assert explained > 20


def test_whole_steps_are_ranked_unless_the_papers_communication_is_asked_for():
    options = {"gpus": 4, "batch": 16, "seq_len": 1024}
    assert stretto.plan(CONFIG, cluster(), **options) == stretto.plan(CONFIG, cluster(), cost="full", **options)
    arguments = ["plan", "--model=gpt-5b", "--cluster=dgx-h200", "--gpus=8", "--batch=8", "--seq-len=128", "--top=3"]
    headings = {
        cost: next(
            line.split() for line in CliRunner().invoke(app, [*arguments, *cost]).output.splitlines() if "grid " in line
        )
        for cost in ((), ("--cost", "paper"))
    }
    assert headings[()] == ["grid", "micro", "step", "exposed", "ms:", "x/y/z/data", "memory", "fits"]
    assert headings["--cost", "paper"] == ["grid", "micro", "communication", "ms:", "x/y/z/data", "memory", "fits"]


def test_a_cluster_without_compute_figures_raises_with_the_model_that_needs_none():
    with pytest.raises(ValueError, match=r"does not say gpu\.peak_flops\.bf16.*--cost paper"):
        stretto.plan("gpt-5b", "summit", gpus=8, batch=8, seq_len=128)
    assert stretto.plan("gpt-5b", "summit", gpus=8, batch=8, seq_len=128, cost="paper")


def test_a_figure_so_small_that_times_have_no_number_is_refused(tmp_path):
    tiny = cluster(in_node=NodeLink(bandwidth=1e-300))
    with pytest.raises(ValueError, match=r"'made up' is larger than any number: one of its figures is far too small"):
        stretto.plan(CONFIG, tiny, gpus=4, batch=16, seq_len=1024, cost="full")
    tiny.save(tmp_path / "tiny.toml")
    arguments = ["plan", "--model", "gpt-5b", "--cluster", str(tmp_path / "tiny.toml"), "--gpus", "4", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--batch", "16", "--seq-len", "1024"])
    assert result.exit_code == 2
    assert "far too small" in json.loads(result.stdout)["error"]


def test_measured_bandwidths_need_no_figure_of_the_link():
    pairs = [(1, 2), (2, 2), (1, 4)]
    machine = cluster(in_node=NodeLink(), in_node_bandwidths=tuple(InNodeBandwidth(*pair, 50e9) for pair in pairs))
    plans = stretto.plan(CONFIG, machine, gpus=4, batch=16, seq_len=1024, cost="full")
    assert len(plans) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": "guess"}, "cost is 'guess'"),
        ({"gpus": 0}, "gpus is 0"),
        ({"gpus": 2.0}, "gpus is 2.0"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": True}, "batch is True"),
        ({"seq_len": -1}, "seq_len is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"micro_batch": 17}, "micro_batch is 17"),
        ({"gpus": None}, "say how many gpus"),
    ],
)
def test_bad_options_are_refused_with_their_value(options, message):
    with pytest.raises(ValueError, match=message):
        stretto.plan(CONFIG, cluster(), **{"gpus": 4, "batch": 16, "seq_len": 1024} | options)


def test_the_command_reads_a_training_configuration_and_a_cluster_file(tmp_path):
    cluster().save(tmp_path / "mine.toml")
    (tmp_path / "run.toml").write_text(
        'out = "unused"\n[grid]\nx = 4\n[model]\nlayers = 2\nhidden = 64\nheads = 4\n'
        '[data]\npath = "nowhere"\n[train]\nsteps = 5\nbatch = 8\nseq_len = 32\ndtype = "bf16"\n'
    )
    arguments = [
        "plan",
        str(tmp_path / "run.toml"),
        "--cluster",
        str(tmp_path / "mine.toml"),
        "--cost",
        "full",
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)
    assert len(plans) == 10  # of the four ranks that the grid has
    table = CliRunner().invoke(app, arguments[:-1])
    assert table.exit_code == 0
    assert "10 grids" in table.output


@pytest.mark.parametrize(
    ("options", "message"), [({"micro_batch": 3}, "micro-batch of 3"), ({"batch": 6}, "batch of 6")]
)
def test_a_prediction_of_what_cannot_run_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        step(cluster(), {"z": 4}, **options)


def test_the_command_names_what_is_missing():
    result = CliRunner().invoke(app, ["plan", "--model", "gpt-5b", "--cluster", "perlmutter", "--gpus", "4"])
    assert result.exit_code == 2
    assert "--batch, --seq-len are missing" in result.output


HOST = HostTimes(block_forward=1e-3, block_backward=2e-3, collective=1e-4)


@pytest.mark.parametrize(
    ("grid", "host_time"),
    [
        ({}, 10 * 3e-3),
        ({"z": 4}, 10 * (3e-3 + 8 * 1e-4)),  # four weights gathered, and four gradients scattered
        ({"pipe": 2, "data": 2}, 2 * 5 * 3e-3),  # two micro-batches of half of the blocks
        ({"x": 2, "data": 2}, 2 * 10 * (3e-3 + 4 * 1e-4)),  # outputs of two linears, and input gradients of two
    ],
    ids=str,
)
def test_a_step_of_few_tokens_takes_as_long_as_the_host_launches_it(grid, host_time):
    few = {"batch": 4, "seq_len": 16, "micro_batch": 1}
    bound, unknown = step(cluster(host=HOST), grid, **few), step(cluster(), grid, **few)
    if not grid:
        host_time *= 4
    assert bound.host_time == pytest.approx(host_time)
    assert (bound.is_host_bound, unknown.is_host_bound, unknown.host_time) == (True, False, None)
    assert bound.why.startswith("host-bound: launching takes the host")
    assert bound.step_time == pytest.approx(sum(bound.terms.values()))
    assert unknown.step_time < host_time < bound.step_time
    captured = step(cluster(host=HOST), grid, captured=True, **few)
    assert captured == unknown
    many = {"batch": 64, "seq_len": 4096, "micro_batch": 4}
    assert step(cluster(host=HOST), grid, **many).step_time == step(cluster(), grid, **many).step_time


@pytest.mark.parametrize(
    ("model", "grid", "options", "collectives"),
    [
        ("gpt2-xl", {"z": 2}, {}, 2),  # one of weights, and one of gradients
        ("gpt2-xl", {"data": 2, "z": 2}, {}, 2),
        ("gpt2-xl", {"z": 2}, {"reshard": "after_forward"}, 3),
        ("gpt2-xl", {"z": 2}, {"recompute": "full"}, 3 * 4),
        ("llama-3-8b", {"z": 2}, {}, 2 * 7),  # a weight of 112 MiB
    ],
    ids=str,
)
def test_blocks_of_small_weights_are_gathered_whole_as_parallelize_gathers_them(model, grid, options, collectives):
    host = HostTimes(block_forward=1e-9, block_backward=1e-9, collective=1e-3)
    machine = cluster(host=host, memory=500e9)
    batch = {"batch": 8, "seq_len": 16, "micro_batch": 8 // grid.get("data", 1) // grid["z"]}
    found = predict(model, machine, grid=grid, **batch, **options)
    assert found.host_time == pytest.approx(read_architecture(model, 16).layers * collectives * 1e-3, rel=1e-3)


def test_small_blocks_need_no_more_memory_than_one_more_block(monkeypatch):
    sizes = {"grid": {"z": 4}, "batch": 16, "seq_len": 1024}
    whole = predict("gpt2-xl", cluster(memory=500e9), **sizes)
    monkeypatch.setattr(StepWorkload, "as_sharded", lambda workload, config: workload)
    roles = predict("gpt2-xl", cluster(memory=500e9), **sizes)
    block = 2 * read_architecture("gpt2-xl", 1024).block_parameters
    assert abs(whole.peak_memory - roles.peak_memory) < 2 * block
    assert whole.memory["logits"] == roles.memory["logits"]
    assert roles.step_time < whole.step_time < 1.1 * roles.step_time  # copies out of messages and into them


@pytest.mark.parametrize(("operator", "of_each"), [(None, 2e-4), (7e-4, 7e-4)])
def test_operators_take_the_host_as_long_as_was_measured_or_two_collectives(operator, of_each):
    machine = cluster(host=dataclasses.replace(HOST, operator=operator))
    plan = step(machine, {"x": 4}, batch=1, seq_len=16, shard_sequence=True)
    assert plan.host_time == pytest.approx(10 * (3e-3 + 8 * of_each))  # two gathers and two scatters in each pass


def test_rows_of_a_table_are_read_from_the_ranks_that_have_them_where_copy_engines_gather_weights():
    tokens, vocab, hidden, world = 2 * 4096, 128_256, 4096, 4
    engines, without = (
        predict("llama-3-8b", "dgx-h100", grid={"z": world}, batch=8, seq_len=4096, copy_engines=copies)
        for copies in (True, False)
    )
    ids = [token * vocab // tokens for token in range(tokens)]  # of rank 0, whose part is the first fourth
    read = sum(each >= vocab // world for each in ids) * hidden * 2
    gathered = (world - 1) / world * vocab * hidden * 2
    less = without.communication["all_gather_z"] - engines.communication["all_gather_z"]
    assert less == pytest.approx((gathered - read) / 450e9)
    assert engines.communication["reduce_scatter_z"] == without.communication["reduce_scatter_z"]


def test_a_simulated_step_waits_for_its_host_and_the_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    few = {"gpus": 2, "batch": 2, "seq_len": 16}
    slow = plan_simulated(CONFIG, cluster(host=HOST), **few)[0]
    fast = plan_simulated(CONFIG, cluster(host=HOST), captured=True, **few)[0]
    launching = slow.step_time - slow.terms["the optimizer"]
    assert slow.host_time is not None
    assert fast.step_time < slow.host_time <= launching < 1.1 * slow.host_time
    cluster(host=HOST).save(tmp_path / "here.toml")
    asked = "--model gpt2-small --gpus 2 --batch 2 --seq-len 16 --cluster"
    text = CliRunner().invoke(app, ["plan", *asked.split(), str(tmp_path / "here.toml")]).output
    assert re.search(r"1 +data=2 +1 +0\.04\d* s\^", text), text
    assert "^ host-bound: the host takes longer to launch a step than the GPU to run it" in text


def test_fp8_gathers_half_the_bytes_and_multiplies_at_its_own_rate():
    options = {"grid": {"z": 8}, "batch": 16, "seq_len": 2048}
    in_bf16, in_fp8 = (predict("gpt-5b", "dgx-h100", **options, dtype=dtype).step_time for dtype in ("bf16", "fp8"))
    assert 0.5 < in_fp8 / in_bf16 < 0.85
    assert predict("gpt-5b", "dgx-h100", **options, fp8="rowwise").step_time == in_fp8
