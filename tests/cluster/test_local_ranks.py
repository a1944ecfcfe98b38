# SPDX-License-Identifier: Apache-2.0
"""Tests of which ranks are on this machine, under torchrun, srun and launchers that tell nothing."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.processes import find_free_port

from stretto.cluster import local_ranks
from stretto.cluster.local_ranks import count_local_ranks, find_local_rank, is_rank, require_rendezvous

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "20", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
# srun --ntasks 20 on 3 nodes, for a script that sets RANK=$SLURM_PROCID and WORLD_SIZE=$SLURM_NTASKS
SRUN = {
    "RANK": "17",
    "WORLD_SIZE": "20",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
}
# srun starts one task a node, and that starts its ranks itself: they inherit the task's variables.
SPAWNED = SRUN | {"RANK": "2", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}


@pytest.mark.parametrize(
    ("environment", "local_rank", "count"),
    [
        (TORCHRUN, 1, 4),
        (SRUN | TORCHRUN, 1, 4),  # torchrun under srun
        (SRUN, 1, 4),
        (SRUN | {"SLURM_NODEID": "1"}, 1, 8),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "nonsense"}, 1, None),
        (SPAWNED, None, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None, None),
        ({}, None, None),
    ],
)
def test_launchers_variables_are_understood(environment, local_rank, count):
    assert (find_local_rank(environment), count_local_ranks(environment)) == (local_rank, count)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="LOCAL_RANK is '-1', but must be a whole number, at least 0"):
        find_local_rank({"LOCAL_RANK": "-1"})
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is 'two'"):
        count_local_ranks({"LOCAL_WORLD_SIZE": "two"})
    with pytest.raises(ValueError, match="WORLD_SIZE is 'x', but must be a whole number"):
        is_rank({"RANK": "0", "WORLD_SIZE": "x"})
    with pytest.raises(ValueError, match="RANK is 2, but must be less than WORLD_SIZE, 2"):
        is_rank({"RANK": "2", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(("address", "port"), [({}, "29500"), ("here", {}), ("here", "77777"), ("here", "abc")])
def test_a_rank_that_cannot_meet_the_others_is_refused(address, port):
    found = {"MASTER_ADDR": address, "MASTER_PORT": port}
    rank = {"RANK": "0", "WORLD_SIZE": "2"} | {name: value for name, value in found.items() if value}
    with pytest.raises(ValueError, match="start the ranks by torchrun, or unset RANK"):
        require_rendezvous(rank)
    require_rendezvous(rank | {"MASTER_ADDR": "here", "MASTER_PORT": "29500"})
    require_rendezvous({})


def nodes(declared: str, world_size: int) -> list[int]:
    """The node of each rank, numbered in the order of ranks."""
    names = [local_ranks.name_node(rank, world_size, {"STRETTO_NODES": declared}) for rank in range(world_size)]
    local_ranks.require_declared(names)
    return [list(dict.fromkeys(names)).index(name) for name in names]


def test_ranks_of_one_machine_are_declared_to_be_several_nodes():
    assert nodes("", 3) == [0, 0, 0]
    assert nodes("2x2", 4) == [0, 0, 1, 1]
    assert nodes("4x1", 4) == nodes("1,1,1,1", 4) == [0, 1, 2, 3]
    assert nodes("3,1", 4) == [0, 0, 0, 1]
    with mock.patch.object(local_ranks.platform, "node", return_value="far"):  # two machines stay two nodes
        far = local_ranks.name_node(1, 2, {"STRETTO_NODES": "1x2"})
    assert far != local_ranks.name_node(0, 2, {"STRETTO_NODES": "1x2"})
    for wrong in ("2x", "x2", "0x4", "2x-2", "1,,3", "4,0", "two", "2X2", "9" * 99 + "x1"):
        with pytest.raises(ValueError, match=r"STRETTO_NODES is .*, but must be the number of nodes .*; 1x4 would do"):
            nodes(wrong, 4)
    for wrong, declared in (("2x3", 6), ("2,1", 3), ("1x2", 2)):
        with pytest.raises(ValueError, match=f"declares nodes for {declared} ranks, but the job has 4; 1x4 would do"):
            nodes(wrong, 4)


def make_grids(port: int | None) -> list[Any]:
    """The GPU of two grids without variables of a launcher; ranks 0 and 3, and ranks 1 and 2, share a machine."""
    from stretto.memory import shared_gpus
    from stretto.parallel import grid

    rank = dist.get_rank()
    host = "far" if rank in (1, 2) else "near"
    environment = {"RANK": str(rank), "WORLD_SIZE": "4"}
    if port is not None:
        dist.destroy_process_group()
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        mock.patch.dict("os.environ", environment, clear=True),
        mock.patch.object(local_ranks.platform, "node", return_value=host),
        mock.patch.object(shared_gpus, "choose_gpu", lambda local_rank: local_rank),
        mock.patch.object(shared_gpus, "default_backend", return_value="gloo"),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        devices = [grid._initialize(4, torch.device("cuda"), None) for _ in range(2)]
    total = torch.ones(1)
    dist.all_reduce(total)  # the group works
    return [*devices, int(total)]


@pytest.mark.long
@pytest.mark.parametrize("has_group", [False, True])
def test_ranks_whose_launcher_tells_nothing_have_a_gpu_each(ranks, has_group):
    found = ranks(4).run(make_grids, None if has_group else find_free_port())
    devices = [torch.device("cuda", index) for index in (0, 0, 1, 1)]
    assert found == [[device, device, 4] for device in devices]
