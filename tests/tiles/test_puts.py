# SPDX-License-Identifier: Apache-2.0
"""Kernels that put slices through the proxy, interpreted on ranks that are declared to be several nodes."""

import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from stretto import tiles
from stretto.memory import PeerError, pinned_puts
from stretto.memory.network.native import NativeProxy
from stretto.tiles import put_channel
from stretto.tiles.compile_only import compile_kernel
from stretto.tiles.launches import launch_kernel
from stretto.tiles.put_channel import PutChannel
from stretto.tiles.puts import Puts, gather_slices


def gather(proxy, sizes):
    """All-gathers of several sizes, by few slots and places of FIFOs that are used again and again; what was wrong.

    Ranks have cores for 3, 4 and 5 native proxies, and so use 3.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong: list[object] = []
    with (
        mock.patch.dict(os.environ, {"STRETTO_NODES": "2,1", "STRETTO_PROXY": proxy}),
        mock.patch.object(NativeProxy, "count_lanes", return_value=3 + rank),
        mock.patch.object(pinned_puts, "CAPACITY", 4),
        mock.patch.object(put_channel, "CAPACITY", 4),
        PutChannel.allocate(slots=3, slot_bytes=256, timeout=60.0, backend="host") as channel,
    ):
        for call, size in enumerate(sizes):
            shard = torch.arange(size, dtype=torch.int32) + 1000 * rank + call
            out = torch.full((world, size), -1, dtype=torch.int32)
            channel.all_gather(shard, out)
            right = torch.stack([torch.arange(size, dtype=torch.int32) + 1000 * peer + call for peer in range(world)])
            if not torch.equal(out, right):
                wrong.append((call, size))
            for peer in range(world) if call == 1 else ():
                channel.break_connection(peer)
        channel.check()
        posted, endpoint = channel._pinned.tail.tolist(), channel._endpoint
        if len(posted) != (3 if proxy == "native" else 1) or not all(posted):
            wrong.append(posted)
    wrong += [key for lane in endpoint.lanes if proxy == "native" for key in lane._kept if isinstance(key, int)]
    with PutChannel.allocate(slots=1, slot_bytes=16, timeout=60.0, backend="host") as channel:  # another region
        out = torch.full((world, 4), -1, dtype=torch.int32)
        channel.all_gather(torch.full((4,), rank, dtype=torch.int32), out)
        wrong += [] if torch.equal(out, torch.arange(world, dtype=torch.int32)[:, None].expand(-1, 4)) else [out]
        channel.check()
        dist.barrier()
        endpoint.lanes[len(endpoint.lanes) // 2].close(0.0)  # with any lane its peers are lost
        with pytest.raises(PeerError, match="has lost"):
            channel.check()
        dist.barrier()
    endpoint.close()
    return wrong + [lane for lane in endpoint.lanes if proxy == "native" and lane._handle is not None]


@pytest.mark.long
@pytest.mark.parametrize("proxy", ["native", pytest.param("python", marks=pytest.mark.exhaustive)])
def test_a_kernel_gathers_from_other_nodes_and_its_own_by_puts(interpret, proxy):
    assert interpret(3, gather, proxy, [1, 300, 64, 129]) == [[]] * 3


@triton.jit
def give_back(puts, slot):
    tiles.release_slice(puts, slot, 0, 0)


def fill_a_lane():
    """What a kernel's put by a full FIFO says, and what the FIFO has; one by another lane's has room."""
    with (
        mock.patch.object(NativeProxy, "count_lanes", return_value=2),
        mock.patch.object(NativeProxy, "add_fifo"),
        mock.patch.object(pinned_puts, "CAPACITY", 4),
        mock.patch.object(put_channel, "CAPACITY", 4),
    ):
        channel = PutChannel.allocate(slots=2, slot_bytes=16, timeout=0.3, backend="host")
        channel.limit.begin_call()
        pinned = channel._pinned
        pinned.tickets.copy_(torch.tensor([6, 4, 4, 0]))  # next ones, each before the tail that was seen last
        pinned.tail.copy_(torch.tensor([4, 0]))
        launch_kernel(give_back, 1, channel.begin("one"), 0)
        channel.check()
        before = pinned.words.clone()
        with pytest.raises(PeerError) as full:
            launch_kernel(give_back, 1, channel.begin("other"), 1)
        channel.close()
    return str(full.value), before.view(2, 4, 4).any(-1).tolist(), torch.equal(pinned.words, before)


def test_a_kernel_waits_for_room_in_the_fifo_of_its_own_lane(interpret):
    ((message, filled, is_unchanged),) = interpret(1, fill_a_lane)
    assert "other: waited in vain for room in the proxy's FIFO" in message
    assert (filled, is_unchanged) == ([[False, False, True, False], [False] * 4], True)


def lose_a_rank():
    """Rank 0 makes no second call; what the others' calls raise."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard, out = torch.arange(3, dtype=torch.int32), torch.zeros(world, 3, dtype=torch.int32)
    with mock.patch.dict(os.environ, {"STRETTO_NODES": "2x1"}):
        channel = PutChannel.allocate(slots=1, slot_bytes=16, timeout=1.0, backend="host")
    channel.limit.begin_call()
    message = ""
    if rank:
        with pytest.raises(PeerError) as lost:
            channel.all_gather(shard, out)
        message = str(lost.value)
    dist.barrier()
    channel.close()
    return message


@pytest.mark.long
def test_a_wait_for_a_slice_that_never_comes_names_rank_node_interface_and_operator(interpret):
    _, message = interpret(2, lose_a_rank)
    assert message.startswith(
        "rank 1 of 2 (node 1, NIC lo): all_gather_by_puts: waited in vain for a slice with signal 0 of rank 0 of 2 "
        "(node 0, NIC lo), 1 s: its counter is at 0, the target is 1"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"slots": 0, "slot_bytes": 16}, "1 to 1024 slots, not 0: 1 would do"),
        ({"slots": 1, "slot_bytes": 40}, "multiple of 16 bytes, up to 1073741824, not 40: 48 would do"),
        ({"slots": 1, "slot_bytes": 16, "slices": 0}, "1 to 1048575 signals of slices, not 0"),
        ({"slots": 1, "slot_bytes": 16, "backend": "host"}, "kernels are not interpreted here: the backend is 'cuda'"),
    ],
)
def test_sizes_out_of_bounds_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        PutChannel.allocate(**arguments)


def launch_gather():
    """The kernel, with its arguments and options."""
    numbers, words, octets = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    constants = [tl.constexpr(number) for number in (4, 8, 16384, 8, 1024, 2)]
    pinned = words, octets.to(torch.uint8), numbers, numbers
    puts = Puts(0, *constants, 3, 0, *pinned, numbers, words, words, words, words, words)
    return gather_slices, (puts, words, words, 100_000, 4096), {"num_warps": 4}


def test_a_descriptor_follows_the_barrier_and_its_first_word_is_a_release():
    ptx = compile_kernel(*launch_gather(), "sm_90")["ptx"]
    events = re.findall(r"bar\.sync|st\.global\.b64|st\.global\.v4\.b32|atom\S*release\S*exch\.b64", ptx)
    posts = [at for at, event in enumerate(events) if "release" in event]
    assert len(posts) == 2  # a slice and a credit
    for at in posts:
        assert "sys" in events[at]
        assert events[at - 3 : at] == ["st.global.b64"] * 3
        assert events[at - 4] == "bar.sync"
    assert "st.global.v4.b32" in events  # slots are written in whole words
    waits = [each for each in re.findall(r"(?:ld|atom)\.\S*sys\S*b32", ptx) if "exch" not in each]
    assert len(waits) >= 4  # for a credit and a slice, each at first and again
    assert all("acquire" in wait for wait in waits), waits


@triton.jit
def put_to(puts, peer):
    zero = tiles.await_credit(puts, 0, peer)
    tl.store(tiles.outgoing_slice(puts, 0, peer) + zero, 1)
    tiles.put_slice(puts, 0, 1, peer, 0)
    zero = tiles.wait_slice(puts, peer, 0)
    tl.store(tiles.outgoing_slice(puts, 0, peer) + zero, tl.load(tiles.arrived_slice(puts, 0, peer) + zero))
    tiles.release_slice(puts, 0, peer, 0)


def test_a_rank_of_1_which_triton_makes_a_constant_is_a_number_as_others():
    _, (puts, *_), options = launch_gather()
    assert compile_kernel(put_to, (puts._replace(rank=1), 1), options, "sm_90")["ptx"]
