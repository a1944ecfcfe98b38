# SPDX-License-Identifier: Apache-2.0
"""Plans of pipelines: stages, times by closed forms and by replays, messages, memory, the search, and Summit's runs."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tests.schedules.bubbles import bubble_time
from typer.testing import CliRunner

import stretto
from lab.papers import model_flops
from lab.papers.pipelines import CHOICES, MEASURED_PHASE, MODELS, plan_stages, predict_pipeline
from stretto.axes import GridSizes
from stretto.cli import app
from stretto.cluster import GPU, Cluster, FlopRates, HostLink, NetworkLink, NodeLink
from stretto.execution import ExecutionOptions, StageOptions, StateOptions
from stretto.models import GPTConfig
from stretto.planner import predict, read_architecture
from stretto.planner.communication import bandwidths, leaves_node, message_rate
from stretto.planner.compute import Device
from stretto.planner.cost import PartTotals
from stretto.planner.memory import local_parameters
from stretto.planner.pipeline.cost import (
    PAPER_MESSAGE_FACTOR,
    PipelineEstimate,
    StagePasses,
    estimate,
    phase_time,
    replay,
)
from stretto.planner.pipeline.memory import checkpoint_interval, count_live, pipeline_memory
from stretto.planner.pipeline.stage_times import HopTimes, PipelineParts, StageLayout, place_stages, stages_of_ranks
from stretto.planner.workload import ScheduleChoice, StepConfig, StepWorkload
from stretto.schedules import build_schedule, live_micro_batches

MODEL = GPTConfig(layers=16, hidden=1024, heads=16, vocab=32000, max_seq_len=1024)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def cluster(**changes: Any) -> Cluster:
    figures: dict[str, Any] = {
        "name": "made up",
        "nodes": 16,
        "gpus_per_node": 4,
        "nics_per_node": 2,
        "gpu": GPU(name="made up", memory=80e9, memory_bandwidth=2e12, peak_flops=FlopRates(bf16=400e12)),
        "in_node": NodeLink(bandwidth=300e9, pair_bandwidth=100e9, latency=4e-6),
        "between_nodes": NetworkLink(bandwidth=25e9, latency=10e-6),
        "host_link": HostLink(duplex_bandwidth=40e9),
    }
    return Cluster(**figures | changes)


def predicted(pipe: int = 4, **options: Any) -> stretto.planner.GridPlan:
    given: dict[str, Any] = {"grid": {"pipe": pipe}, "batch": 32, "seq_len": 1024, "micro_batch": 1}
    return predict(MODEL, cluster(), **given | options)


def made_up(schedule: ScheduleChoice, pipe: int, count: int, passes: tuple[float, ...], latency: float = 0.0) -> Any:
    """An estimate of equal stages whose passes F, I and W take these times a rank, and messages a latency."""
    placed = place_stages(schedule, pipe)
    each = [time / schedule.virtual_stages for time in passes]
    layout = StageLayout(tuple(range(len(placed) + 1)), placed)
    config = StepConfig(GridSizes(pipe=pipe), 1, schedule=schedule)
    times = StagePasses(*(tuple([time] * len(placed)) for time in each))
    nothing = PipelineParts((PartTotals(),), (False,) * len(placed), PartTotals(), PartTotals())
    hops = (HopTimes(latency, 0.0),) * pipe
    return PipelineEstimate(config, count, nothing, layout, tuple(stages_of_ranks(layout, pipe)), times, {}, hops)


# Stages.


def test_llama_3_8b_on_four_stages_has_stages_as_even_as_whole_blocks_can_be():
    workload = StepWorkload(read_architecture(LLAMA, 8192), 64, 8192)
    config = StepConfig(GridSizes(pipe=4), 1, schedule=ScheduleChoice("1f1b"))
    machine = Cluster.preset("dgx-h200")
    found = estimate(workload, config, Device(machine, "bf16"), bandwidths(machine, config.grid))
    times = [sum(of_stage) for of_stage in zip(*found.passes, strict=True)]
    assert max(times) <= 1.08 * sum(times) / 4
    # The head takes what a block or two do, so the last stage has fewer; no other cuts have a shorter longest stage.
    blocks = [end - start for start, end in pairwise(found.layout.cuts)]
    assert sum(blocks) == 32
    assert blocks[-1] < min(blocks[:-1])
    block, head = found.parts.kinds[0].whole, found.parts.last.whole
    best = min(max(-(-(32 - last) // 3) * block, last * block + head) for last in range(1, 30))
    assert max(times) == pytest.approx(best)


def test_cuts_that_are_given_are_taken_and_uneven_ones_take_longer():
    usual = predicted()
    uneven = predicted(options=ExecutionOptions(stages=StageOptions(cuts=(1, 2, 3))))
    assert uneven.stages == (0, 1, 2, 3, 16)
    assert usual.stages[0] == 0
    assert usual.stages[-1] == 16
    assert uneven.step_time > 1.5 * usual.step_time


# Times.


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize(("pipe", "count"), [(4, 16), (8, 32)])
def test_closed_forms_are_those_of_schedules_for_equal_stages(name, pipe, count):
    virtual = 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1
    plan = made_up(ScheduleChoice(name, virtual), pipe, count, (1.0, 1.0, 1.0))
    part = 1 / virtual
    bubble = bubble_time(name, pipe, count, forward=part, backward_input=part, backward_weight=part)
    assert phase_time(plan) == pytest.approx(3 * count + bubble, rel=1e-9)
    assert replay(plan).time == pytest.approx(3 * count + bubble, rel=1e-9)


def test_latency_of_messages_is_hidden_by_more_micro_batches_in_flight():
    # 8 stages, 64 micro-batches, F = 1, B = 2, a latency of a quarter of a forward pass: the issue's own figures.
    times = {
        choice: phase_time(made_up(choice, 8, 64, (1.0, 1.0, 1.0), 0.25))
        for choice in (
            ScheduleChoice("1f1b"),
            ScheduleChoice("1f1b", extra_warm_up=7),
            ScheduleChoice("message-driven", limit=16, serve_first="backward"),
        )
    }
    assert list(times.values()) == pytest.approx([244.0, 216.5, 216.5], rel=1e-3)
    for choice in times:
        assert replay(made_up(choice, 8, 64, (1.0, 1.0, 1.0), 0.25)).time == pytest.approx(times[choice], rel=1e-3)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "message-driven"])
def test_a_long_schedule_is_replayed_in_part_and_goes_on_as_it_did(name, monkeypatch):
    virtual = 2 if name in ("interleaved", "zb-v") else 1
    choice = ScheduleChoice(name, virtual, limit=8 if name == "message-driven" else None)
    plan = made_up(choice, 4, 202 if name != "interleaved" else 200, (1.0, 1.2, 0.8), 0.1)
    whole = replay(plan).time
    monkeypatch.setattr("stretto.planner.pipeline.cost.MAX_REPLAYED", 10)
    assert replay(plan).time == pytest.approx(whole, rel=2e-3)


def test_a_prediction_replays_its_schedule_and_its_terms_are_its_time():
    plan = predicted(grid={"pipe": 4, "data": 2, "z": 2}, schedule="interleaved", virtual_stages=2)
    assert plan.is_replayed
    assert (plan.schedule, plan.virtual_stages) == ("interleaved", 2)
    assert len(plan.stages) == 9
    assert sum(plan.terms.values()) == pytest.approx(plan.step_time, rel=1e-9)
    assert plan.terms["pipeline bubbles"] == pytest.approx(plan.bubble, rel=1e-6)
    assert plan.exposed["pipe"] > 0
    assert plan.communication["messages_pipe"] == pytest.approx(plan.message_time, rel=1e-9)
    assert json.dumps(plan.as_dict())


def test_a_pipeline_computes_what_one_stage_does_and_more_micro_batches_shorten_its_bubble():
    whole = predicted(pipe=1, grid={"data": 1})
    few, many = (predicted(batch=batch, schedule="1f1b") for batch in (8, 64))
    assert 4 * few.compute_time * 4 == pytest.approx(whole.compute_time, rel=0.15)  # a batch of 8, not 32
    # (p - 1) of (m + p - 1) parts: 3 of 11, and 3 of 67, but for uneven stages.
    for plan, share in ((few, 3 / 11), (many, 3 / 67)):
        passes = plan.step_time - plan.terms["the optimizer"]
        assert plan.bubble / passes == pytest.approx(share, abs=0.07)


def test_messages_take_the_level_of_bandwidths_that_their_links_have():
    machine = cluster()
    # Two ranks a stage: stages 0 and 1 share a node of four GPUs, stages 1 and 2 do not, and the last is on another.
    grid = GridSizes(pipe=4, x=2)
    assert [leaves_node(machine, grid, rank) for rank in range(4)] == [False, True, False, True]
    assert message_rate(machine, grid, leaves=False) == 100e9
    assert message_rate(machine, grid, leaves=True) == 50e9 / 2  # equation 5.7: both ranks of a stage share the network
    alone = GridSizes(pipe=4)
    assert not any(leaves_node(machine, alone, rank) for rank in range(4))
    assert message_rate(machine, GridSizes(pipe=4, data=8), leaves=True) == 50e9 / 4


def test_a_message_is_the_hidden_activations_that_a_rank_has():
    whole = predicted(grid={"pipe": 2, "data": 4}).message_time
    halved = predicted(grid={"pipe": 2, "data": 4, "y": 2}).message_time
    tokens = 1024
    for time, hidden in ((whole, 1024), (halved, 512)):
        each = 10e-6 + tokens * hidden * 2 / (50e9 / 4)
        assert time == pytest.approx((32 // 4) * each, rel=1e-9)


def test_weights_are_gathered_over_z_once_a_step_unless_they_are_freed():
    grid = {"pipe": 2, "z": 4}
    kept, freed = (predicted(grid=grid, reshard=policy) for policy in ("after_backward", "after_forward"))
    assert freed.communication["all_gather_z"] > 10 * kept.communication["all_gather_z"]
    assert kept.memory["gathered_weights"] > 3 * freed.memory["gathered_weights"]
    # Recomputation gathers nothing again.
    halves = ExecutionOptions(stages=StageOptions(cuts=(8,)))
    plain, again = (predicted(grid=grid, options=halves.replace(recompute=mode)) for mode in ("none", "full"))
    assert again.communication["all_gather_z"] == pytest.approx(plain.communication["all_gather_z"])


# Memory.


@pytest.mark.parametrize(
    ("name", "virtual", "extra"),
    [
        ("gpipe", 1, 0), ("1f1b", 1, 0), ("1f1b", 1, 3), ("interleaved", 2, 0), ("interleaved", 3, 0), ("zb-h1", 1, 0),
        ("zb-v", 2, 0), ("dualpipe-v", 2, 0),
    ],
)  # fmt: skip
def test_live_micro_batches_are_those_of_the_schedule(name, virtual, extra):
    checked = 0
    for pipe in (1, 2, 3, 4, 8):
        for count in (1, 2, 3, 4, 6, 8, 16, 40):
            try:
                schedule = build_schedule(name, pipe, count, virtual, extra)
            except ValueError:
                continue
            choice = ScheduleChoice(name, virtual, extra)
            found = [sum(count_live(choice, pipe, rank, count)) for rank in range(pipe)]
            assert found == list(live_micro_batches(schedule).ranks), (pipe, count)
            checked += 1
    assert checked > 10


def memories(schedule: ScheduleChoice, recompute: str = "none", **changes: Any) -> dict[int, Any]:
    """The memory of each rank of four that is the only one of its kind, or keeps most of its kind."""
    model = read_architecture(replace(MODEL, **changes), 1024)
    workload = StepWorkload(model, 32, 1024)
    config = StepConfig(GridSizes(pipe=4), 2, ExecutionOptions(recompute=recompute), schedule=schedule)
    ranks = stages_of_ranks(StageLayout((0, 4, 8, 12, 16), (0, 1, 2, 3)), 4)
    return {memory.rank: memory for memory in pipeline_memory(workload, config, ranks)}


def test_a_stage_keeps_its_blocks_activations_of_each_live_micro_batch():
    plain, filled = memories(ScheduleChoice("1f1b")), memories(ScheduleChoice("gpipe"))
    one = plain[3].kept  # the last stage keeps one micro-batch of four blocks
    assert [plain[rank].live for rank in (0, 1, 3)] == [(4,), (3,), (1,)]
    assert plain[0].kept == pytest.approx(4 * one)
    # With all forward passes first, all 16 are live before there are gradients.
    gradients = min(one, filled[0].in_step["gradients"])
    assert filled[0].kept == pytest.approx(16 * one - gradients)
    grown = filled[0].in_step["activations"] - plain[0].in_step["activations"]
    assert grown == pytest.approx(12 * one - gradients)
    driven = memories(ScheduleChoice("message-driven", limit=6))
    assert driven[0].kept == pytest.approx(6 * one)
    assert driven[3].kept == pytest.approx(one)


@pytest.mark.parametrize("tied", [True, False])
def test_the_ends_hold_the_embeddings_and_the_head_and_tied_ones_are_on_both(tied):
    found = memories(ScheduleChoice("1f1b"), tie_embeddings=tied)
    inner, table = found[1].parameters, 32000 * 1024
    assert found[0].parameters - inner == table + 1024 * 1024  # positions too
    assert found[3].parameters - inner == table + 2 * 1024  # the last norm
    model = read_architecture(replace(MODEL, tie_embeddings=tied), 1024)
    held = found[0].parameters + 2 * inner + found[3].parameters
    assert held - local_parameters(model, GridSizes()) == (table if tied else 0)


def test_full_checkpointing_of_several_blocks_keeps_what_equation_3_1_predicts():
    # N = 48 blocks: of 8 blocks a stage the factor nearest to sqrt(48) = 6.9 is 8, of 2 it is 2.
    assert [checkpoint_interval(48, pipe) for pipe in (6, 12, 24, 48)] == [8, 4, 2, 1]
    assert checkpoint_interval(96, 8) == 12
    # M ~ G_inter (N / (G_inter ac) + 1) + ac, in inputs of a block: 4 live micro-batches with N / (4 ac) inputs each
    # (the "+ 1", a stage's own input, is one of them here), and ac blocks while they are computed again.
    block_input = 2 * 1024 * 1024 * 2
    for interval in (1, 2, 4):
        found = memories(ScheduleChoice("1f1b"), f"every:{interval}" if interval > 1 else "full")
        assert found[0].kept == pytest.approx(4 * 4 / interval * block_input)
    again = [memories(ScheduleChoice("1f1b"), f"every:{n}")[0].in_step["activations"] for n in (2, 4)]
    kept = [memories(ScheduleChoice("1f1b"), f"every:{n}")[0].kept for n in (2, 4)]
    of_blocks = memories(ScheduleChoice("1f1b"))[3].kept / 4
    assert again[1] - kept[1] - (again[0] - kept[0]) == pytest.approx(2 * of_blocks, rel=0.3)


def test_the_rank_that_needs_most_decides_and_more_stages_need_less():
    peaks = [predicted(pipe=pipe).peak_memory for pipe in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    plan = predicted(pipe=4, schedule="message-driven", limit=12)
    assert plan.live_micro_batches == (12,)
    assert plan.kept_activations > 2.9 * predicted(pipe=4).kept_activations
    assert sum(plan.memory.values()) == plan.peak_memory


# The search.


def test_a_search_of_pipelines_ranks_them_with_grids_without_and_replays_the_first():
    plans = stretto.plan(MODEL, cluster(), gpus=8, batch=32, seq_len=1024, pipe="auto")
    of_one = stretto.plan(MODEL, cluster(), gpus=8, batch=32, seq_len=1024)
    assert {plan.grid["pipe"] for plan in plans} == {1, 2, 4, 8}
    assert len(plans) == 20 + 10 + 4 + 1  # 8, 4, 2 and 1 ranks a stage into four ordered factors
    assert [plan.grid for plan in of_one] == [plan.grid for plan in plans if plan.grid["pipe"] == 1]
    assert [plan.step_time for plan in of_one] == [plan.step_time for plan in plans if plan.grid["pipe"] == 1]
    fitting = [plan for plan in plans if plan.fits]
    assert [plan.step_time for plan in fitting] == sorted(plan.step_time for plan in fitting)
    assert all(plan.is_replayed for plan in plans[:10] if plan.grid["pipe"] > 1)
    assert any(plan.schedule not in ("1f1b", None) for plan in plans)
    for plan in plans[:10]:
        if plan.schedule is not None:
            options = {name: getattr(plan, name) for name in ("virtual_stages", "limit", "serve_first")}
            again = predicted(
                grid=plan.grid, micro_batch=plan.micro_batch, recompute=plan.recompute, schedule=plan.schedule,
                reshard=plan.reshard, extra_warm_up=plan.extra_warm_up or None, shard_sequence=plan.shard_sequence,
                **options,
            )  # fmt: skip
            assert again.step_time == pytest.approx(plan.step_time, rel=1e-9)
            assert again.peak_memory == plan.peak_memory


def test_fixed_options_are_used():
    options: dict[str, Any] = {"gpus": 16, "batch": 64, "seq_len": 1024}
    plans = stretto.plan(MODEL, cluster(), pipe=4, schedule="message-driven", limit=6, **options)
    assert {(plan.grid["pipe"], plan.schedule, plan.limit) for plan in plans if plan.is_possible} == {
        (4, "message-driven", 6)
    }
    assert {plan.serve_first for plan in plans if plan.is_possible} <= {"backward", "arrival"}
    plans = stretto.plan(MODEL, cluster(), pipe="auto", schedule="interleaved", virtual_stages=4, **options)
    assert {(plan.grid["pipe"], plan.virtual_stages) for plan in plans if plan.is_possible} == {(2, 4), (4, 4)}


def test_memory_that_is_short_is_answered_by_recomputation_or_a_schedule_that_keeps_less():
    options: dict[str, Any] = {"gpus": 4, "batch": 64, "seq_len": 1024, "pipe": 4}
    (large,) = stretto.plan(MODEL, cluster(), **options)
    for part in (0.95, 0.8):
        small = cluster(gpu=replace(cluster().gpu, memory=part * large.reserved_memory))
        (plan,) = stretto.plan(MODEL, small, **options)
        assert plan.fits
        assert plan.step_time > large.step_time
        assert plan.peak_memory < large.peak_memory
    (plan,) = stretto.plan(MODEL, cluster(gpu=replace(cluster().gpu, memory=1e9)), **options)
    assert not plan.fits
    assert "does not fit" in plan.why


@pytest.mark.long
def test_many_grids_are_searched_by_their_bounds_and_a_note_names_what_was_skipped(monkeypatch):
    options: dict[str, Any] = {"gpus": 16, "batch": 16, "seq_len": 1024, "pipe": "auto"}
    whole = stretto.plan(MODEL, cluster(), **options)
    monkeypatch.setattr("stretto.planner.pipeline.search.MAX_LISTED", 5)
    found = stretto.plan(MODEL, cluster(), **options)
    assert len(found) < len(whole)
    assert [(plan.grid, plan.step_time) for plan in found[:5]] == [(plan.grid, plan.step_time) for plan in whole[:5]]
    assert "grids with pipeline stages were left out" in found[0].notes[-1]
    assert not any("left out" in note for note in whole[0].notes)


@pytest.mark.exhaustive
def test_32768_gpus_with_pipelines_are_searched_with_few_looks_at_a_grid(monkeypatch):
    from stretto.planner.pipeline import search as module

    looks = []
    measure = module.measure_parts
    monkeypatch.setattr(module, "measure_parts", lambda *given: looks.append(1) or measure(*given))
    plans = stretto.plan("gpt-320b", "frontier", gpus=32768, batch=8192, seq_len=2048, pipe="auto")
    assert plans[0].fits
    assert plans[0].grid["pipe"] > 1
    assert len(looks) < 4000  # a third of a millisecond each


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipe": 3}, "pipe=3 does not divide 8 GPUs; 4 would do"),
        ({"pipe": 0}, "pipe is 0, but must be a whole number, at least 1, or 'auto'"),
        ({"pipe": 8, "virtual_stages": 4, "schedule": "interleaved"}, "makes 32 stages, but .* has 16 blocks.*pipe=4"),
        ({"pipe": "auto", "schedule": "interleaved", "virtual_stages": 16}, "leaves each of its stages one of the 16"),
        ({"schedule": "1f1b"}, "without pipeline stages nothing is scheduled; pipe='auto'"),
        ({"pipe": 4, "schedule": "1f1"}, "'1f1' is not known; did you mean '1f1b'"),
        ({"pipe": 4, "limit": 4}, "limit is an option only of schedule='message-driven'"),
        ({"pipe": 4, "schedule": "gpipe", "extra_warm_up": 2}, "extra_warm_up is an option only of schedule='1f1b'"),
        ({"pipe": 4, "schedule": "message-driven", "serve_first": "last"}, "must be one of arrival"),
        ({"pipe": 4, "schedule": "dualpipe-v", "micro_batch": 16}, "at least as many micro-batches as stages, 8"),
        ({"pipe": 4, "schedule": "1f1b", "virtual_stages": 2}, "1f1b has 1 stages on each rank, not 2"),
    ],
)
def test_pipelines_that_nothing_can_run_are_refused_with_what_would_do(options, message):
    with pytest.raises(ValueError, match=message):
        stretto.plan(MODEL, cluster(), gpus=8, batch=32, seq_len=1024, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipe": 32}, r"pipe=32 makes 32 stages, but .* has 16 blocks, and each stage needs one; pipe=16 would do"),
        ({"schedule": "interleaved", "batch": 11}, r"10 or 12 would do"),
        ({"pipe": 1, "schedule": "zb-v"}, "the grid has one pipeline stage; pipe=2 has two"),
        ({"schedule": "message-driven", "virtual_stages": 2}, "takes one stage a rank; virtual_stages=1 would do"),
    ],
)
def test_a_grid_that_cannot_run_its_schedule_is_refused_by_predict(options, message):
    with pytest.raises(ValueError, match=message):
        predicted(**options)


def test_a_model_that_is_sharded_by_blocks_takes_no_schedule_that_splits_backward_passes():
    blocks = replace(read_architecture(MODEL, 1024), is_sharded_by_blocks=True)
    plans = stretto.plan(blocks, cluster(), gpus=8, batch=32, seq_len=1024, pipe=4)
    assert plans[0].schedule in ("1f1b", "interleaved", "message-driven", "gpipe")
    with pytest.raises(ValueError, match="zb-h1 computes weights' gradients by themselves"):
        predict(blocks, cluster(), grid={"pipe": 4}, batch=32, seq_len=1024, micro_batch=1, schedule="zb-h1")


# The paper's model and its runs on Summit.


def test_the_papers_model_has_bubbles_by_equation_4_7_and_messages_by_equation_4_10():
    plans = [predicted(grid={"pipe": pipe, "data": 16 // pipe}, cost="paper") for pipe in (2, 4, 8)]
    weights = 16 * 12 * 1024**2 + 32000 * 1024
    whole = 6 * weights * 1024 / (0.75 * 400e12)
    for plan, pipe in zip(plans, (2, 4, 8), strict=True):
        assert plan.bubble == pytest.approx(whole * (1 - 1 / pipe), rel=1e-9)
        sent = 4 * 32 * pipe / 16 * PAPER_MESSAGE_FACTOR * 1024 * 1024 * 2 / 50e9
        assert plan.message_time == pytest.approx(sent, rel=1e-9)
        assert sum(plan.terms.values()) == pytest.approx(plan.step_time)
        assert not plan.is_replayed


@pytest.mark.long
def test_figures_3_3_and_3_4_more_stages_take_longer_and_send_more():
    rows = {stages: plan_stages(stages) for stages in (6, 12, 24, 48)}
    phases = [rows[stages].planned_seconds for stages in rows]
    assert phases == sorted(phases)
    # Lemma 3.3.1: what an inner rank sends is proportional to the number of stages. Theorem 3.3.3: so computation to
    # communication is inversely proportional to it, but for the head, which makes stages of few blocks uneven.
    sent = [row.message_gigabytes for row in rows.values()]
    assert sent == pytest.approx([sent[0], 2 * sent[0], 4 * sent[0], 8 * sent[0]])
    ratios = [row.compute_over_messages for row in rows.values()]
    for fewer, more in pairwise(ratios):
        assert 0.45 < more / fewer < 0.7
    for stages, measured in MEASURED_PHASE.items():
        # The planner has Stretto's kernels for the loss.
        assert rows[stages].planned_seconds == pytest.approx(measured, rel=0.18)
    # Equations 4.7 and 4.10, with their constant, give the measured difference of the two.
    paper = [rows[stages].paper_seconds for stages in (24, 6)]
    assert paper[0] - paper[1] == pytest.approx(MEASURED_PHASE[24] - MEASURED_PHASE[6], rel=0.01)
    gained = 1 - rows[6].planned_step_seconds / rows[24].planned_step_seconds
    assert 0.13 <= gained <= 0.2


@pytest.mark.exhaustive
def test_the_choices_of_table_3_1_reach_about_half_of_the_peak():
    for billions, framework, micro_batch, _, stages, data in CHOICES:
        if framework == "AxoNN":
            grid = GridSizes(pipe=stages, data=data)
            found = predict_pipeline(billions, grid, 16384, micro_batch)
            share = model_flops(MODELS[billions], 16384, 512) / found.step_time / grid.ranks / 125e12
            assert 0.5 < share < 0.64, billions


@pytest.mark.long
def test_axonns_choice_of_24b_is_within_5_percent_of_the_best_stages_and_replicas():
    options: dict[str, Any] = {"gpus": 96, "batch": 16384, "seq_len": 512, "dtype": "fp16"}
    plans = stretto.plan(MODELS[24], "summit", pipe=12, state=StateOptions("host"), **options)
    best = min(plan.step_time for plan in plans if plan.fits and plan.grid["data"] == 8)
    chosen = predict(
        MODELS[24], Cluster.preset("summit"), grid={"pipe": 12, "data": 8}, batch=16384, seq_len=512, micro_batch=4,
        dtype="fp16", state=StateOptions("host"), schedule="message-driven", recompute="every:4",
    )  # fmt: skip
    assert chosen.fits
    assert chosen.step_time <= 1.05 * best


# The command, and runs.


def test_the_command_prints_schedules_and_the_cut():
    arguments = ["plan", "--model=gpt-10b", "--cluster=dgx-h200", "--gpus=8", "--batch=64", "--seq-len=1024"]
    result = CliRunner().invoke(app, [*arguments, "--pipe=4", "--top=3"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    heading = next(line for line in result.output.splitlines() if "grid " in line)
    assert "x/y/z/data/pipe" in heading
    assert "schedule" in heading
    assert "bubble" in heading
    cut = next(line for line in result.output.splitlines() if "blocks of each stage" in line)
    assert sum(map(int, cut.rpartition(":")[2].split())) == 32
    answer = json.loads(CliRunner().invoke(app, [*arguments, "--pipe=auto", "--json"]).stdout)
    found = next(plan for plan in answer if plan["grid"]["pipe"] > 1)
    assert {"schedule", "virtual_stages", "limit", "stages", "bubble", "message_time"} <= set(found)
    assert math.isfinite(found["step_time"])
    bad = CliRunner().invoke(app, [*arguments, "--pipe=some", "--json"])
    assert bad.exit_code == 2
    assert "--pipe is 'some'" in json.loads(bad.stdout)["error"]


RUN = """
cluster = "dgx-h200"
out = "run"
[model]
layers = 8
hidden = 512
heads = 8
vocab = 1000
[data]
path = "none"
[grid]
pipe = 4
[train]
batch = 16
seq_len = 256
micro_batch = 1
steps = 1
[pipeline]
schedule = "gpipe"
"""


def test_a_run_is_predicted_with_its_schedule(tmp_path):
    from stretto.train.config import load_config
    from stretto.train.gpt.preflight import predict_run

    file = tmp_path / "run.toml"
    file.write_text(RUN)
    config = load_config(file)
    model = config.model.to_gpt(data_vocab=1000, seq_len=256)
    source = SimpleNamespace(architecture=lambda seq_len: read_architecture(model, seq_len))
    answers = {}
    for schedule in ("gpipe", "zb-h1"):
        changed = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"schedule": schedule})})
        answers[schedule] = predict_run(changed, source)  # type: ignore[arg-type]
    assert answers["zb-h1"]["step_time"] < answers["gpipe"]["step_time"]
    assert answers["zb-h1"]["peak_memory"] < answers["gpipe"]["peak_memory"]
    assert answers["gpipe"]["exposed"]["pipe"] > 0
