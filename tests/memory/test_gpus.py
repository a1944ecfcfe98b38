# SPDX-License-Identifier: Apache-2.0
"""Every rank finds the same of GPUs whose kernels can work together, whichever of them is the other one."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.memory import gpus as gpus_module
from stretto.memory.gpus import find_obstacle

H200 = ("NVIDIA H200", 132)
H100 = ("NVIDIA H100 PCIe", 114)


def look(gpus, hosts, visible, unreached, without_atomics=(), needs_atomics=True):
    """gpus[rank]: (identity, (name, multiprocessors)). visible[rank]: the identities that a process sees, its own first
    where it is device 0. unreached: pairs that do not reach each other; without_atomics: pairs without native ones."""
    rank = dist.get_rank()
    seen = [next(gpu for gpu in gpus if gpu[0] == identity) for identity in visible[rank]]
    own = visible[rank].index(gpus[rank][0])

    def properties(device):
        identity, (name, count) = seen[device if isinstance(device, int) else device.index]
        return SimpleNamespace(uuid=identity, name=name, multi_processor_count=count)

    def reaches(device, peer):
        return {seen[device.index][0], seen[peer][0]} not in unreached

    def has_atomics(device, peer):
        return {seen[device][0], seen[peer][0]} not in without_atomics

    def supports(capability, own, others):
        assert capability == gpus_module.NVML_ATOMICS
        return not any({own, other} in without_atomics for other in others)

    with (
        mock.patch.object(gpus_module, "has_native_atomics", has_atomics),
        mock.patch.object(gpus_module, "nvml_supports", supports),
        mock.patch("platform.node", return_value=hosts[rank]),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "device_count", return_value=len(seen)),
        mock.patch.object(torch.cuda, "can_device_access_peer", reaches),
    ):
        return find_obstacle(dist.group.WORLD, torch.device("cuda", own), needs_atomics=needs_atomics)


ALL = (["a", "b", "c"],) * 3


@pytest.mark.parametrize(
    ("gpus", "hosts", "visible", "unreached", "expected"),
    [
        ([("a", H200), ("b", H200), ("c", H200)], "xxx", ALL, [], None),
        ([("a", H200), ("b", H200), ("c", H200)], "xxx", (["a"], ["b"], ["c"]), [], None),  # each sees its own alone
        ([("a", H200), ("b", H200), ("c", H200)], "xyx", ALL, [], "its ranks are on 2 nodes"),
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
def test_every_rank_finds_what_prevents_peer_access(ranks, gpus, hosts, visible, unreached, expected):
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


def look_with_queues(variables):
    gpus, own = [("a", H200), ("b", H200), ("c", H200)], variables if dist.get_rank() == 1 else {}
    with mock.patch.dict("os.environ", own):
        return look(gpus, "xxx", ALL, [])


@pytest.mark.parametrize(
    ("variables", "queues"),
    [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1 queue to"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "3"}, "3 queues to"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "4", "CUDA_MPS_PIPE_DIRECTORY": "mps"}, None),
        ({"CUDA_MPS_PIPE_DIRECTORY": "mps"}, "2 queues to"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "few"}, None),
    ],
)
def test_kernels_of_two_groups_need_queues_of_their_own(ranks, variables, queues):
    """A rank with few queues, as scripts for other libraries set them, is enough for a deadlock."""
    found = ranks(3).run(look_with_queues, variables)
    assert found[0] == found[1] == found[2]
    assert found[0] is None if queues is None else f"streams share {queues} a GPU" in found[0]


@pytest.mark.parametrize("visible", [ALL, (["a"], ["b"], ["c"])])
@pytest.mark.parametrize("needs_atomics", [True, False])
def test_kernels_that_signal_by_atomic_operations_need_native_ones(ranks, visible, needs_atomics):
    gpus = [("a", H200), ("b", H200), ("c", H200)]
    expected = "some of its GPUs have no native atomic operations on each other's memory, as over PCIe"
    found = ranks(3).run(look, gpus, "xxx", visible, [], [{"b", "c"}], needs_atomics)
    assert found == [expected if needs_atomics else None] * 3


def test_the_driver_is_asked_for_the_attribute_of_the_pair():
    class Driver:
        def cuDeviceGetP2PAttribute(self, answer, attribute, device, peer):
            assert attribute == 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
            answer._obj.value = int((device, peer) == (0, 2))
            return 101 if peer == 9 else 0

    with mock.patch("ctypes.CDLL", return_value=Driver()):
        assert [gpus_module.has_native_atomics(0, peer) for peer in (1, 2, 9)] == [False, True, False]
