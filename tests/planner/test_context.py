# SPDX-License-Identifier: Apache-2.0
"""Plans of sequences that are cut among ranks: memory, bytes, times and the search."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import stretto
from stretto.axes import GridSizes
from stretto.cli import app
from stretto.execution import ExecutionOptions
from stretto.planner import plan, predict, read_architecture
from stretto.planner.communication import bandwidths, keys_numbers
from stretto.planner.compute import BACKWARD_ATTENTION, Device, block_seconds
from stretto.planner.grid_plan import ChosenWay
from stretto.planner.memory import exchanged_keys
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.training import simulate_step

MODEL = "llama-3-8b"
H100 = stretto.Cluster.preset("dgx-h100")
SLOW = dataclasses.replace(H100, in_node=dataclasses.replace(H100.in_node, bandwidth=1e11, pair_bandwidth=1e11))
SLOWER = dataclasses.replace(H100, in_node=dataclasses.replace(H100.in_node, bandwidth=1e9, pair_bandwidth=1e9))


def test_a_rank_keeps_the_activations_of_its_part_and_the_keys_of_others_while_it_attends():
    cut = predict(MODEL, H100, grid={"context": 4}, batch=1, seq_len=65_536)
    short = predict(MODEL, H100, grid={}, batch=1, seq_len=16_384)
    assert cut.kept_activations == pytest.approx(short.kept_activations, rel=1e-12)
    workload = StepWorkload(read_architecture(MODEL, 65_536), 1, 65_536)
    of_rank = 16_384 * 2 * 8 * 128  # numbers of keys and values: 8 heads of 128
    of_pass, of_backward = exchanged_keys(workload, StepConfig(GridSizes(context=4), 1))
    assert of_pass == 3 * of_rank * 2
    assert of_backward == 3 * of_rank * (2 + 2)
    long = StepWorkload(read_architecture(MODEL, 1 << 21), 1, 1 << 21)  # 8 GiB of keys and values: two ranks' at a time
    assert exchanged_keys(long, StepConfig(GridSizes(context=4), 1))[0] == 2 * (1 << 19) * 2048 * 2


def test_ranks_of_context_that_shard_weights_hold_and_send_what_those_of_z_do():
    long = {"batch": 1, "seq_len": 65_536, "recompute": "full"}
    copied, sharded = (
        predict(MODEL, H100, grid={"context": 8, "context_weights": each}, **long) for each in ("copy", "shard")
    )
    over_z = predict(MODEL, H100, grid={"z": 8}, batch=8, seq_len=65_536, recompute="full")
    for part in ("parameters", "optimizer"):
        assert sharded.memory[part] == over_z.memory[part]
        assert sharded.memory[part] == pytest.approx(copied.memory[part] / 8, rel=0.01)  # all but norms
    assert sharded.kept_activations == copied.kept_activations
    for kind in ("all_gather_z", "reduce_scatter_z"):
        assert sharded.communication[kind] == over_z.communication[kind]
    assert sharded.communication["all_reduce_data"] < 1e-3 * copied.communication["all_reduce_data"]  # norms'
    assert sharded.communication["keys"] == copied.communication["keys"]
    assert [each.fits for each in (copied, sharded)] == [False, True]
    best = plan(MODEL, H100, gpus=8, batch=1, seq_len=65_536, context=8)[0]
    assert best.grid["context_weights"] == "shard"
    workload = StepWorkload(read_architecture(MODEL, 65_536), 1, 65_536)
    simulated = simulate_step(
        workload, StepConfig(GridSizes(**sharded.grid), 1, ExecutionOptions(recompute="full")), H100
    )
    assert simulated.step_time == pytest.approx(sharded.step_time, rel=0.1)


def test_attention_to_a_ranks_own_keys_hides_the_exchange_and_no_more():
    grid, seq_len = GridSizes(context=4), 16_384
    workload = StepWorkload(read_architecture(MODEL, seq_len), 1, seq_len)
    config = StepConfig(grid, 1)
    attention = block_seconds(workload, workload.model, config, Device(SLOW, "bf16")).attention
    numbers = keys_numbers(workload.model, grid, seq_len / 4)
    assert numbers == 3 * seq_len / 4 * 2048
    rate = bandwidths(SLOW, grid)["context"]
    start_up = 3 * 3e-6 if SLOW.in_node.latency is None else 3 * SLOW.in_node.latency
    keys = start_up + numbers * 2 / rate
    hidden = attention / 4 * (1 + BACKWARD_ATTENTION)  # each of the two exchanges of a backward pass by half of its own
    found = predict(MODEL, SLOW, grid={"context": 4}, batch=1, seq_len=seq_len, recompute="none")
    assert found.communication["keys"] == pytest.approx(32 * 3 * keys, rel=1e-9)
    assert found.exposed["context"] == pytest.approx(32 * (3 * keys - hidden), rel=1e-9)
    fast = predict(MODEL, H100, grid={"context": 4}, batch=1, seq_len=1 << 18, recompute="none")
    assert fast.exposed["context"] < 1e-9 < fast.communication["keys"]
    for mode in ("full", "communication"):  # no mode of recomputation keeps what has come
        again = predict(MODEL, SLOW, grid={"context": 4}, batch=1, seq_len=seq_len, recompute=mode)
        assert again.communication["keys"] == pytest.approx(32 * 4 * keys, rel=1e-9)


def test_a_plan_takes_the_way_that_attention_will_choose_and_says_why():
    grid, seq_len, heads = GridSizes(context=4), 16_384, 2 * 4096 + 2 * 1024  # queries, results, keys and values
    workload = StepWorkload(read_architecture(MODEL, seq_len), 1, seq_len)
    found = predict(MODEL, SLOWER, grid={"context": 4}, batch=1, seq_len=seq_len, recompute="none")
    sent = seq_len / 4 * heads * 3 / 4 * 2 / bandwidths(SLOWER, grid)["context"]
    assert found.attention_way == "ulysses"
    assert found.communication["keys"] == pytest.approx(64 * sent, rel=1e-2)
    config = StepConfig(grid, 1)
    attention = 32 * block_seconds(workload, workload.model, config, Device(SLOWER, "bf16")).attention
    hidden = attention * (1 + BACKWARD_ATTENTION)  # of half of the heads, under the other half
    assert found.exposed["context"] == pytest.approx(64 * sent - hidden, rel=1e-2)
    assert "attention over context exchanges heads (Ulysses) (+" in found.why
    assert "if it gathers keys" in found.why
    held = {
        way: exchanged_keys(workload, dataclasses.replace(StepConfig(grid, 1), attention_way=way))[0]
        for way in ("all_gather", "ring", "ulysses")
    }
    of_rank = seq_len / 4 * 2
    assert held == {"all_gather": 3 * 2048 * of_rank, "ring": 2 * 2048 * of_rank, "ulysses": heads * of_rank}
    cut_too_often = predict(
        MODEL, SLOWER, grid={"context": 4, "x": 4}, batch=1, seq_len=seq_len
    )  # 2 KV heads on a rank
    assert cut_too_often.attention_way == "ring"  # which hides more
    assert "Ulysses" not in cut_too_often.why
    long = predict(MODEL, H100, grid={"context": 4}, batch=1, seq_len=1 << 21)
    assert long.attention_way == "ring"
    assert "gathered keys would take more than 4 GiB a layer" in long.why
    equal = ChosenWay("ring", {"ring": 0.3, "ulysses": 0.1 + 0.2})
    assert "(+0 ms a step if it exchanges heads" in equal.explain()


def test_a_plan_of_a_pipeline_says_the_way_of_attention():
    options = {"batch": 4, "seq_len": 16_384, "recompute": "none"}
    found = {
        pipe: predict(MODEL, SLOWER, grid={"context": 4, "pipe": pipe}, micro_batch=1, **options) for pipe in (1, 2)
    }
    assert {each.attention_way for each in found.values()} == {"ulysses"}
    assert "attention over context exchanges heads (Ulysses) (+" in found[2].why
    halves = [each.communication["keys"] for each in found.values()]
    assert halves[1] == pytest.approx(halves[0] / 2)  # a rank's layers


@pytest.mark.parametrize("x", [1, 2])
def test_latents_travel_in_place_of_keys_where_blocks_are_recomputed_and_no_nvlink_hides_keys(x):
    model, seq_len, sizes = "deepseek-v3", 8192, {"context": 4, "x": x, "z": 2 // x}
    plain = dataclasses.replace(H100, in_node=dataclasses.replace(H100.in_node, bandwidth=50e9, pair_bandwidth=50e9))

    def sent(cluster: stretto.Cluster, recompute: str, seq_len: int = seq_len) -> float:
        found = predict(model, cluster, grid=sizes, batch=2 // x, seq_len=seq_len, recompute=recompute)
        return found.communication["keys"] * bandwidths(cluster, GridSizes(**sizes))["context"] / (seq_len / 4 * 3 * 2)

    latents, keys = 512 + 64, 128 * (128 + 64 + 128) / x  # numbers of a token
    assert not plain.has_nvlink
    # Forward, once more for the backward pass, and gradients; keys also come a third time.
    assert sent(plain, "full") == pytest.approx(61 * 3 * latents, rel=0.1)  # and start-ups
    assert sent(H100, "full") == pytest.approx(61 * 4 * keys, rel=0.1)
    assert sent(plain, "none") == pytest.approx(61 * 3 * keys, rel=0.1)
    assert sent(plain, "full", 65_536 * x) == pytest.approx(61 * 4 * keys, rel=0.1)  # too many keys to make
    workload = StepWorkload(read_architecture(model, seq_len), 2, seq_len)
    config = StepConfig(GridSizes(**sizes), 1, ExecutionOptions(recompute="full"))
    made = 128 * (128 + 128) / x
    assert exchanged_keys(workload, config)[0] == 3 * seq_len / 4 * (latents + made + keys) * 2
    assert exchanged_keys(workload, config, has_nvlink=True)[0] == 3 * seq_len / 4 * keys * 2
    step = predict(model, plain, grid=sizes, batch=2 // x, seq_len=seq_len, recompute="full")
    assert step.exposed["context"] == pytest.approx(step.communication["keys"])


@pytest.mark.parametrize("grid", [{"context": 4}, {"context": 2, "x": 2}])
def test_the_simulator_plays_the_exchange(grid):
    seq_len = 16_384
    workload = StepWorkload(read_architecture(MODEL, seq_len), 1, seq_len)
    predicted = predict(MODEL, SLOWER, grid=grid, batch=1, seq_len=seq_len)
    config = StepConfig(GridSizes(**grid), 1, attention_way=predicted.attention_way)
    simulated = simulate_step(workload, config, SLOWER)
    assert simulated.step_time < predicted.step_time  # which hides no collective of one group by another's
    assert simulated.exposed["context"] == pytest.approx(predicted.exposed["context"], rel=0.05)


@pytest.mark.long
def test_context_is_searched_for_long_sequences_or_where_it_is_asked_for():
    def contexts(seq_len: int, **options: object) -> set[int]:
        found = plan(MODEL, H100, gpus=8, batch=8, seq_len=seq_len, **options)
        return {each.grid.get("context", 1) for each in found}

    assert contexts(4096) == {1}
    assert contexts(4096, context=4) == {4}
    assert contexts(4096, context="auto") == {1, 2, 4, 8}
    assert contexts(32_768) == {1, 2, 4, 8}
    assert contexts(32_768 + 4) == {1, 2}
    pipelines = plan(MODEL, H100, gpus=8, batch=8, seq_len=4096, context=2, pipe=2)
    assert {(each.grid["pipe"], each.grid["context"]) for each in pipelines} == {(2, 2)}
    for asked, words in ((3, "3, but must divide the 8 GPUs"), (0, "0, but must be a whole number"), (2.0, "2.0, but")):
        with pytest.raises(ValueError, match=f"context is {words}"):
            contexts(4096, context=asked)
    with pytest.raises(ValueError, match=r"2 x context a sequence of 4090 tokens; 1 would do"):
        predict(MODEL, H100, grid={"context": 2}, batch=8, seq_len=4090)


def test_the_command_takes_context():
    arguments = ["plan", "--model", MODEL, "--cluster", "dgx-h100", "--gpus", "4", "--batch", "4", "--seq-len", "8192"]
    table = CliRunner().invoke(app, [*arguments, "--context", "2"])
    assert table.exit_code == 0, table.output
    assert "x/y/z/context/data" in table.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--context", "auto", "--json"]).stdout)
    assert {each["grid"].get("context", 1) for each in found} == {1, 2, 4}
    assert "context" not in CliRunner().invoke(app, arguments).output
    assert "--context is 'two'" in CliRunner().invoke(app, [*arguments, "--context", "two"]).output
