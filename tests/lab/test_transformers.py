# SPDX-License-Identifier: Apache-2.0
"""`python -m lab transformers`: all ways train one model, from predictions that are written first."""

import itertools
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from lab.commands import app
from lab.experts import ROUTINGS
from lab.experts.routing import load_of
from lab.training import context_peer
from lab.training.unmodified import (
    BENCH,
    TransformersSetting,
    _keep,
    _make_workload,
    list_context_ways,
    list_replica_ways,
    list_ways,
    measure_model,
)
from stretto import ops
from stretto.parallel.context.cutting import cut_part

pytest.importorskip("transformers")


@pytest.mark.long
@pytest.mark.parametrize("model", [pytest.param("gpt2-xl", marks=pytest.mark.exhaustive), "gemma-7b"])
def test_all_ways_train_the_same_model(ranks, tmp_path, model):
    setting = TransformersSetting(models=(model,), ranks=2, small=True, layers=1, warm_up=0, repeats=1, rounds=1)
    narrow = [f"{which}, gradients in the compute dtype, compiled" for which in ("FSDP2", "Stretto z=2")]
    tensor = "TP=2, sequence sharded, compiled"
    names = ("FSDP2, eager", "FSDP2, compiled, resharded", tensor, *narrow, "Stretto z=2")
    ways = list_ways(2, has_experts=False)
    chosen = {name: replace(ways[name], compiles="") for name in (*names, "Stretto z=2 by blocks")}
    without = {"FSDP2, torchao's fp8 rowwise": replace(ways["FSDP2, torchao's fp8 rowwise, compiled"], compiles="")}
    keep = partial(_keep, tmp_path, "kept", {}, {"Stretto z=2": {"predicted_milliseconds": 1.0}})
    arguments = _make_workload(model, setting), chosen | without, 2, keep
    *rows, missing = ranks(2).run(measure_without_torchao, *arguments)[0]
    assert "torchao cannot be imported" in missing["error"]
    assert [row.get("error") for row in rows] == [None] * len(chosen)
    for row in rows[1:]:
        for number in ("loss", "gradient_norm", "last_loss"):
            assert row[number] == pytest.approx(rows[0][number], rel=1e-4), (row["name"], number)
    kept = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [row["name"] for row in kept] == [*chosen, *without]
    assert [row.get("predicted_milliseconds") for row in kept[-3:]] == [1.0, None, None]


@contextmanager
def cut_in_place(mesh, buffers, buffer_seq_dims):
    """Stands for torch's context parallelism, which has no kernel for CPUs."""
    for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
        part = cut_part(buffer.clone(), mesh.size(), mesh.get_local_rank(), "zigzag", dim)
        buffer.resize_(part.shape).copy_(part)

    def attend(query, key, value, is_causal, scale):
        return ops.context_attention(
            query, key, value, mesh.get_group(), causal=is_causal, layout="zigzag", scale=scale
        )

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield


def measure_context(*arguments):
    with mock.patch.object(context_peer.experimental, "context_parallel", cut_in_place):
        return measure_model(*arguments)


@pytest.mark.long
def test_sequences_that_ranks_cut_train_the_same_model(ranks):
    setting = TransformersSetting(ranks=2, small=True, context=True, layers=1, warm_up=0, repeats=1, rounds=1)
    ways = {name: replace(way, compiles="") for name, way in list_context_ways(2).items() if "compiled" in name}
    assert len(ways) == 5  # gathering, a ring, context=2 (with and without sharded weights), x=2
    rows = ranks(2).run(measure_context, _make_workload("llama-3.75b", setting), ways, 2, len)[0]
    assert [row.get("error") for row in rows] == [None] * len(ways)
    for row, number in itertools.product(rows[1:], ("loss", "gradient_norm", "last_loss")):
        assert row[number] == pytest.approx(rows[0][number], rel=1e-4), (row["name"], number)


def measure_without_torchao(*arguments):
    with mock.patch.dict(sys.modules, {"torchao": None}):
        return measure_model(*arguments)


@pytest.mark.long
@pytest.mark.parametrize("model", ["qwen2-57b-a14b", pytest.param("mixtral-8x7b", marks=pytest.mark.exhaustive)])
def test_divided_and_cut_experts_train_as_those_of_fsdp2_with_a_skewed_routing(ranks, model):
    setting = TransformersSetting(models=(model,), ranks=2, small=True, layers=1, warm_up=0, repeats=1, rounds=1)
    ways = list_ways(2, has_experts=True)
    names = (
        "FSDP2, eager",
        "FSDP2, experts by NCCL's all-to-all",
        "TP=2, sequence sharded, compiled",
        "Stretto x=2, sequence sharded, compiled",
        "Stretto z=2 expert=2",
    )
    chosen = {name: replace(ways[name], compiles="") for name in names}
    rows = ranks(2).run(measure_model, _make_workload(model, setting, "skewed"), chosen, 2, len)[0]
    assert [row.get("error") for row in rows] == [None] * len(names)
    for row, number in itertools.product(rows[1:], ("loss", "gradient_norm", "last_loss")):
        assert row[number] == pytest.approx(rows[0][number], rel=1e-4), (row["name"], number)


def test_weights_alone_route_tokens_evenly_or_not():
    setting = TransformersSetting(models=("qwen3-30b-a3b",), ranks=2, small=True)
    loads: dict[str, list[torch.Tensor]] = {routing: [] for routing in ROUTINGS}
    for routing, of_layers in loads.items():
        model = _make_workload("qwen3-30b-a3b", setting, routing).make()
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda _, inputs, output, found=of_layers: found.append(output[2]))
        model(input_ids=torch.randint(256, (2, 256), generator=torch.Generator().manual_seed(0)))
    uniform, *skewed = ([load_of(ids, 8) for ids in of_layers] for of_layers in loads.values())
    assert len(uniform) == 2
    assert max(uniform) < 1.4
    assert all(min(each) > 1.4 for each in skewed)


@pytest.mark.long
def test_replicas_of_hot_experts_even_out_ranks_and_leave_the_losses_bits(ranks):
    setting = TransformersSetting(
        models=("qwen3-30b-a3b",), ranks=2, small=True, layers=1, warm_up=0, repeats=2, rounds=1, replicas=True
    )
    chosen = {
        name.removesuffix(", compiled"): replace(way, compiles="")
        for name, way in list_replica_ways(2).items()
        if way.replicas < 4 and way.routing != "1.5x"
    }
    rows = ranks(2).run(measure_model, _make_workload("qwen3-30b-a3b", setting), chosen, 2, len)[0]
    assert [row["name"].removeprefix("Stretto z=2 expert=2, ") for row in rows] == [
        "uniform",
        "recorded",
        "recorded, 1 replicas",
        "recorded, 1 replicas, sums by choices",
    ]
    assert [row["is_peer"] for row in rows] == [True, False, False, False]
    _, skewed, *replicated = rows
    for row, number in itertools.product(replicated, ("loss", "gradient_norm", "last_loss")):
        assert row[number] == pytest.approx(skewed[number], rel=1e-5), (row["name"], number)
    assert rows[-1]["same_bits"] == "yes"
    assert all(row["balanced_load"] < 1.2 for row in replicated)


def test_measuring_takes_predictions_of_the_same_model(tmp_path):
    setting = TransformersSetting(ranks=4, layers=2)
    with pytest.raises(ValueError, match="write it first, with --cluster"):
        BENCH(setting, tmp_path)
    rows = {row["name"]: row for row in BENCH(replace(setting, cluster="dgx-h100"), tmp_path)["rows"]}
    assert all(name.startswith("Stretto") for name in rows)
    assert rows["Stretto z=4, compiled"]["predicted_milliseconds"] > 0
    assert rows["Stretto z=4 by blocks"]["reason"] == "the planner predicts models with roles"
    with pytest.raises(ValueError, match="predicts layers=2, not 3"):
        BENCH(replace(setting, layers=3), tmp_path)


def test_one_gpu_is_compared_with_plain_pytorch_and_several_with_tensor_parallelism():
    one, four = (set(list_ways(ranks, has_experts=True)) for ranks in (1, 4))
    assert {"PyTorch, autocast, model compiled", "PyTorch, bf16 weights", "Stretto z=1, compiled"} <= one
    assert {"FSDP2=2 TP=2, sequence sharded, compiled", "TP=4, sequence sharded, async, compiled"} <= four
    assert "TP=4, sequence sharded, eager" in four
    assert {
        "Stretto x=4, sequence sharded, compiled",
        "Stretto data=4 expert=4",
        "Stretto z=4 by blocks, compiled",
    } <= four


def measure_at_a_large_rate(*arguments):
    with mock.patch("lab.training.unmodified_steps.LEARNING_RATE", 1e-3):
        return measure_model(*arguments)


@pytest.mark.long
def test_muon_hidden_or_exposed_trains_as_plain_loops_over_fsdp2_do(ranks):
    setting = TransformersSetting(ranks=2, small=True, layers=1, warm_up=2, repeats=1, rounds=1, micro_batches=2)
    every = {name: replace(way, compiles="") for name, way in list_ways(2, has_experts=False).items() if "Muon" in name}
    workload = _make_workload("llama-3.75b", setting)
    rows = ranks(2).run(measure_at_a_large_rate, workload, every, 2, len)[0]
    assert [row["name"] for row in rows] == [
        "FSDP2, Muon on gathered matrices, compiled",
        "FSDP2, Muon by all-to-all, compiled",
        "Stretto z=2, Muon, compiled",
        "Stretto z=2, Muon, not clipped, compiled",
        "Stretto z=2, Muon exposed, compiled",
    ]
    assert [row.get("error") for row in rows] == [None] * 5
    for row in rows[1:]:
        for number in ("loss", "gradient_norm", "last_loss"):
            assert row[number] == pytest.approx(rows[0][number], rel=5e-4), (row["name"], number)
    assert rows[0]["last_loss"] < rows[0]["loss"] - 0.05


@pytest.mark.long
def test_the_hosts_time_and_calls_are_those_of_stretto_and_of_its_peer_in_one_process(tmp_path):
    for axis, peer in (("z", "FSDP2"), ("data", "DDP")):
        given = ["host-time", "--cpu", "--eager", "--layers", "2", "--axis", axis, "--rounds", "1", "--repeats", "1"]
        result = CliRunner().invoke(app, [*given, "--out", str(tmp_path), "--json"])
        assert result.exit_code == 0, result.output
        first, default, *_ = rows = json.loads((tmp_path / f"gpt2-xl-{axis}-2-1x16-eager-cpu.json").read_text())["rows"]
        assert (first["name"], default["name"], first["ratio"]) == (peer, f"Stretto {axis}=2", 1.0)
        assert all(row["host_milliseconds"] > 0 and row["c_calls"] > 0 for row in rows)
        assert axis == "data" or default["python_calls"] < min(first["python_calls"], rows[2]["python_calls"])
