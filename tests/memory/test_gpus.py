"""Which GPUs' kernels can work together: every rank finds the same, whichever of them is the other one."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.memory.gpus import find_obstacle

H200 = ("NVIDIA H200", 132)
H100 = ("NVIDIA H100 PCIe", 114)


def look(gpus, hosts, visible, unreached):
    """gpus[rank]: (identity, (name, multiprocessors)). visible[rank]: the identities that a process sees, its own first
    where it is device 0. unreached: pairs that do not reach each other."""
    rank = dist.get_rank()
    seen = [next(gpu for gpu in gpus if gpu[0] == identity) for identity in visible[rank]]
    own = visible[rank].index(gpus[rank][0])

    def properties(device):
        identity, (name, count) = seen[device if isinstance(device, int) else device.index]
        return SimpleNamespace(uuid=identity, name=name, multi_processor_count=count)

    def reaches(device, peer):
        return {seen[device.index][0], seen[peer][0]} not in unreached

    with (
        mock.patch("socket.gethostname", return_value=hosts[rank]),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "device_count", return_value=len(seen)),
        mock.patch.object(torch.cuda, "can_device_access_peer", reaches),
    ):
        return find_obstacle(dist.group.WORLD, torch.device("cuda", own))


ALL = (["a", "b", "c"],) * 3


@pytest.mark.parametrize(
    ("gpus", "hosts", "visible", "unreached", "expected"),
    [
        ([("a", H200), ("b", H200), ("c", H200)], "xxx", ALL, [], None),
        ([("a", H200), ("b", H200), ("c", H200)], "xxx", (["a"], ["b"], ["c"]), [], None),  # each sees its own alone
        ([("a", H200), ("b", H200), ("c", H200)], "xyx", ALL, [], "its ranks are on 2 machines"),
        ([("a", H200), ("b", H200), ("b", H200)], "xxx", (["a", "b"],) * 3, [], "several of its ranks share a GPU"),
        (
            [("a", H200), ("b", H200), ("c", H100)],
            "xxx",
            ALL,
            [],
            "its GPUs are of 2 kinds: NVIDIA H100 PCIe with 114 multiprocessors, NVIDIA H200 with 132 multiprocessors",
        ),
        (
            [("a", H200), ("b", ("NVIDIA H200", 120)), ("c", H200)],
            "xxx",
            ALL,
            [],
            "its GPUs are of 2 kinds: NVIDIA H200 with 120 multiprocessors, NVIDIA H200 with 132 multiprocessors",
        ),
        (
            [("a", H200), ("b", H200), ("c", H200)],
            "xxx",
            ALL,
            [{"b", "c"}],
            "some of its GPUs do not reach each other's memory",
        ),
    ],
)
def test_every_rank_finds_what_keeps_gpus_apart(ranks, gpus, hosts, visible, unreached, expected):
    assert ranks(3).run(look, gpus, hosts, visible, unreached) == [expected] * 3


def look_with_switches(switches):
    """Two ranks on one GPU, each with a switch of its own, and a third on another."""
    rank = dist.get_rank()
    gpus = [("a", H200), ("a", H200), ("b", H200)]
    with mock.patch.dict("os.environ", {"STRETTO_SHARE_GPUS": switches[rank]}):
        return look(gpus, "xxx", (["a", "b"], ["a", "b"], ["b", "a"]), [])


@pytest.mark.parametrize(
    ("switches", "expected"),
    [("111", None), ("000", "several of its ranks share a GPU"), ("110", "several of its ranks share a GPU")],
)
def test_ranks_share_a_gpu_where_the_switch_is_on_for_all(ranks, switches, expected):
    assert ranks(3).run(look_with_switches, switches) == [expected] * 3
