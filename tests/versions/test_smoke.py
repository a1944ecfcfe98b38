# SPDX-License-Identifier: Apache-2.0
"""Tests of what a user does first, for versions of Python, torch and Triton that CI only tries: `make test-versions`.

It imports everything, runs a collective as a program, operators, training on a grid and the backend. The whole suite
runs with the versions of constraints.txt.
"""

import importlib
import json
import math
import pkgutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.parallel.training import PRECISIONS, Case, disagreements, train_plainly

import stretto
from stretto.models import GPT, GPTConfig
from stretto.ops import moe

PACKAGES = ("", ".cluster", ".collectives", ".models", ".ops", ".optim", ".parallel", ".planner", ".tiles", ".tuning")


def test_every_module_is_imported_and_every_public_name_is_there():
    modules = {module.name for module in pkgutil.walk_packages(stretto.__path__, "stretto.")}
    for name in modules - {"stretto.__main__"}:
        importlib.import_module(name)
    for package in PACKAGES:
        module = importlib.import_module(f"stretto{package}")
        assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def sum_by_a_schedule():
    """This rank's sum of all ranks' numbers, by a ring that is compiled and verified here."""
    from stretto.collectives import verify
    from stretto.collectives.algorithms import find
    from stretto.collectives.executor import run_on_host

    schedule = find("ring-all-reduce").compile(ranks=dist.get_world_size(), instances=2)
    assert verify(schedule).ok
    given = torch.arange(1001.0) * (dist.get_rank() + 1)
    return run_on_host(schedule, given, None)


def test_a_collective_is_compiled_verified_and_run(ranks):
    for found in ranks(4).run(sum_by_a_schedule):
        assert torch.equal(found, torch.arange(1001.0) * (1 + 2 + 3 + 4))


def multiply_what_is_gathered(plan):
    """(the product by the kernel, the one by torch, what ran)."""
    from stretto import ops

    rank, world = dist.get_rank(), dist.get_world_size()
    shards = [torch.randn(32, 64, generator=torch.Generator().manual_seed(peer)) for peer in range(world)]
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(world + rank))
    blocks = ops.Blocks(m=16, n=16, k=16, group_rows=2, num_warps=4, num_stages=2, programs=4)
    config = ops.KernelConfig(blocks=blocks, transfer=plan)
    out = ops.all_gather_matmul(shards[rank], weight, implementation=config)
    return out, torch.cat(shards) @ weight.T, dict(ops.counts())


@pytest.mark.parametrize("transfer", ["copies", "programs"])
def test_an_operators_kernel_is_interpreted(interpret, transfer):
    for out, expected, ran in interpret(2, multiply_what_is_gathered, transfer):
        assert torch.allclose(out, expected, atol=1e-4)
        assert ("all_gather_matmul", "kernel") in ran


def pool_bags():
    """(this rank's pooled rows of all ranks' tables, those by torch)."""
    from stretto import ops

    rank, world, batch = dist.get_rank(), dist.get_world_size(), 8
    tables = [torch.randn(10, 4, generator=torch.Generator().manual_seed(peer)) for peer in range(world)]
    indices = torch.arange(2 * batch) % 10
    offsets = torch.arange(0, 2 * batch + 1, 2)
    out = ops.embedding_all_to_all(indices, offsets, [tables[rank]], mode="sum", batch=batch)
    pooled = [torch.nn.functional.embedding_bag(indices, table, offsets[:-1], mode="sum") for table in tables]
    own = slice(rank * batch // world, (rank + 1) * batch // world)
    return out, torch.cat(pooled, 1)[own]


def test_the_embedding_is_interpreted(interpret):
    for out, expected in interpret(2, pool_bags):
        assert torch.allclose(out, expected, atol=1e-5)


def test_training_on_a_grid_of_2_x_2_equals_training_on_one_rank(ranks):
    case, precision = Case(GPT, (GPTConfig(layers=2, hidden=32, heads=8, vocab=61, max_seq_len=16),)), "fp64-adamw"
    expected = train_plainly(case, PRECISIONS[precision])
    assert ranks(4).run(disagreements, (1, 2, 1, 2), case, PRECISIONS[precision], expected) == [{}] * 4


def test_a_compiled_mixture_of_experts_has_the_gradients_of_an_uncompiled_one():
    torch.manual_seed(0)
    x = torch.randn(6, 8, requires_grad=True)
    ids, weights = torch.randint(3, (6, 2)), torch.rand(6, 2, requires_grad=True)
    up, down = (torch.randn(3, *size, requires_grad=True) for size in ((4, 8), (8, 4)))

    def loss() -> torch.Tensor:
        sent = moe.dispatch(x, ids, 3)
        rows = moe.grouped_matmul(moe.grouped_matmul(sent.rows, up, sent.offsets), down, sent.offsets)
        return moe.combine(rows, sent.handle, weights).square().sum()

    inputs = (x, weights, up, down)
    expected = torch.autograd.grad(loss(), inputs)
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(), inputs)
    torch.testing.assert_close(found, expected)


def test_the_command_trains_3_steps_writes_a_checkpoint_and_resumes_it_on_another_grid(tmp_path, request):
    """Two ranks are forked from a process that has imported torch; one rank then resumes in Pythons of its own."""

    def train(python, *options):
        command = [python, "-m", "stretto", "train", "src/stretto/configs/demo.toml"]
        for option in (f"out={tmp_path / 'run'}", *options):
            command += ["--set", option]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}

    python = sys.executable
    request.getfixturevalue("forks_torch_processes")
    losses = train(sys.executable, "ranks=2", "grid.x=1", "grid.z=2", "train.steps=3")
    assert sorted(losses) == [1, 2, 3]
    again = train(python, "ranks=1", "grid.x=1", "grid.z=1", "train.steps=4", "train.resume=latest")
    assert sorted(again) == [1, 2, 3, 4]
    assert all(math.isfinite(loss) for loss in again.values())
    assert again[3] == losses[3]


def sum_by_the_backend():
    """(this rank's sum of all ranks' numbers, what ran)."""
    from stretto.collectives import call_counts, install
    from stretto.collectives.algorithms import find

    group = dist.new_group(backend="stretto")
    install(find("ring-all-reduce").compile(ranks=dist.get_world_size()), group)
    found = torch.full((1001,), float(dist.get_rank() + 1))
    dist.all_reduce(found, group=group)
    return found, call_counts(group)


def make_and_destroy_groups(count):
    """Groups of the backend whose last call gloo runs: its threads may still drop tensors when the group ends."""
    for _ in range(count):
        group = dist.new_group(backend="stretto")
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, dist.get_rank(), group=group)
        assert found == list(range(dist.get_world_size()))
        dist.destroy_process_group(group)
        del group


def test_groups_of_the_backend_end_while_gloos_threads_still_drop_tensors(ranks):
    ranks(2).run(make_and_destroy_groups, 40, timeout=240.0)


def test_the_backend_runs_a_schedule_by_its_name(ranks):
    for found, ran in ranks(2).run(sum_by_the_backend):
        assert torch.equal(found, torch.full((1001,), 3.0))
        assert ran == {("allreduce", "schedule ring-all-reduce"): 1}
