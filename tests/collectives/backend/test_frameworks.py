# SPDX-License-Identifier: Apache-2.0
"""Calls of DDP, FSDP2, DTensor, functional collectives and compiled code reach the schedules."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.collectives.backend import operations
from tests.processes import find_free_port

from stretto.collectives import call_counts, install
from stretto.collectives.algorithms import find

SCRIPTS = Path(__file__).parents[3] / "examples" / "backend"
# By their names from torch 2.13 on, and before.
all_gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
all_gather_single_coalesced = (
    getattr(functional, "all_gather_single_coalesced", None) or functional.all_gather_into_tensor_coalesced
)
CALLS = {
    "ddp": {"allgather", "broadcast", "allreduce"},
    "fsdp2": {"_allgather_base", "_reduce_scatter_base", "allreduce"},
    "dtensor": {"broadcast", "allreduce", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"},
}
"""Operations that each framework must have run by schedules."""


def start_again(backend, store):
    """Leave the pool's group for a default group of this backend, as a script has it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)


def train(script, backend, store):
    """The script's losses, and what its calls ran as (without a backend that counts: nothing)."""
    start_again(backend, store)
    sys.path.insert(0, str(SCRIPTS))
    try:
        module = runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name=script)
    finally:
        sys.path.remove(str(SCRIPTS))
    if backend == "stretto":
        module["install_schedules"]()
    losses = module["train"]()
    return losses, dict(call_counts()) if backend == "stretto" else {}


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=pytest.mark.long if script == "dtensor" else ()) for script in CALLS]
)
def test_training_scripts_lose_what_they_lose_on_gloo_by_schedules(ranks, tmp_path, script):
    right = ranks(2).run(train, script, "gloo", str(tmp_path / "gloo"))
    found = ranks(2).run(train, script, "stretto", str(tmp_path / "stretto"))
    for (losses, ran_as), (losses_on_gloo, _) in zip(found, right, strict=True):
        assert len(losses) >= 5
        assert losses == pytest.approx(losses_on_gloo, rel=1e-6)
        by_schedules = {operation for operation, ran in ran_as if ran.startswith("schedule ")}
        assert by_schedules == CALLS[script], ran_as
        others = {operation for operation, ran in ran_as if not ran.startswith("schedule ")}
        assert others <= {"scatter"}, ran_as  # distribute_tensor's, which no schedule does


def gather_shards(store):
    """A ShardedTensor asks the group for a device and finds the CPU, as on gloo, where torch knows no GPUs."""
    from torch.distributed._shard.sharded_tensor import full
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    start_again("stretto", store)
    rank = dist.get_rank()
    sharded = full(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), (4, 3), 7.0)
    whole = torch.zeros(4, 3) if rank == 0 else None
    sharded.gather(0, whole)
    assert whole is None or whole.unique().tolist() == [7.0]


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="torch knows GPUs")
def test_a_sharded_tensor_is_gathered_where_torch_knows_no_gpus(ranks, tmp_path):
    ranks(2).run(gather_shards, str(tmp_path / "store"))


@pytest.mark.long
@pytest.mark.usefixtures("forks_torch_processes")
def test_a_script_under_torchrun_needs_nothing_but_the_backends_name(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={find_free_port()}"]
    command += ["--log-dir", str(tmp_path)]  # it leaves its own behind
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(SCRIPTS / "ddp.py"), "stretto"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "('allreduce', 'schedule ring-all-reduce'): 10" in done.stdout
    assert "Traceback" not in done.stderr


def call_functional():
    """Each functional collective, and what it must have reached."""
    group = dist.new_group(backend="stretto")
    size, rank = dist.get_world_size(), dist.get_rank()
    operations.install_all(group, even_sizes=True)
    given = torch.arange(6.0) + rank
    total = sum(torch.arange(6.0) + peer for peer in range(size))
    assert functional.all_reduce(given, "sum", group).tolist() == total.tolist()
    assert functional.all_reduce(given, "avg", group).tolist() == (total / size).tolist()
    assert functional.broadcast(given, 0, group).tolist() == torch.arange(6.0).tolist()
    gathered = all_gather_single(given, 0, group)
    assert gathered.tolist() == torch.cat([torch.arange(6.0) + peer for peer in range(size)]).tolist()
    scattered = reduce_scatter_single(given, "sum", 0, group)
    assert scattered.tolist() == total[3 * rank : 3 * rank + 3].tolist()
    first, second = functional.all_reduce_coalesced([given, given], "max", group)
    assert first.tolist() == second.tolist() == (torch.arange(6.0) + size - 1).tolist()
    (whole,) = all_gather_single_coalesced([given], group)
    assert torch.equal(whole, gathered)
    turned = functional.all_to_all_single(given, None, None, group)
    assert turned.tolist() == [3.0 * rank + at + peer for peer in range(size) for at in range(3)]
    assert call_counts(group) == {
        ("allreduce", "schedule ring-all-reduce"): 2,
        ("broadcast", "schedule binomial-broadcast"): 1,
        ("allgather_into_tensor_coalesced", "schedule ring-all-gather"): 2,
        ("reduce_scatter_tensor_coalesced", "schedule ring-reduce-scatter"): 1,
        ("allreduce_coalesced", "schedule ring-all-reduce"): 1,
        ("alltoall_base", "schedule direct-all-to-all"): 1,
    }, call_counts(group)


def test_functional_collectives_reach_the_schedules(ranks):
    ranks(2).run(call_functional)


def call_compiled(compiler):
    """Compiled code, forwards and backwards."""
    group = dist.new_group(backend="stretto")
    install(find("ring-all-reduce").compile(ranks=2), group)
    install(find("ring-all-gather").compile(ranks=2), group)

    def compute(tensor):
        summed = functional.all_reduce(tensor * 2, "sum", group)
        return all_gather_single(summed + 1, 0, group).sum()

    given = torch.arange(4.0)
    assert torch.compile(compute, backend=compiler, fullgraph=True)(given) == compute(given) == 56
    ran_as = call_counts(group)
    assert ran_as["allreduce", "schedule ring-all-reduce"] == 2
    assert sum(count for (name, ran), count in ran_as.items() if ran == "schedule ring-all-gather") == 2
    assert sum(ran_as.values()) == 4


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_code_reaches_the_schedules(ranks, compiler):
    ranks(2).run(call_compiled, compiler, timeout=120)
