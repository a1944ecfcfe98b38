# SPDX-License-Identifier: Apache-2.0
"""Kernels that put slices through the proxy, interpreted on ranks that are declared to be several nodes."""

import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

from stretto.tiles.compile_only import compile_kernel
from stretto.tiles.put_channel import PutChannel
from stretto.tiles.puts import Puts, gather_slices


def gather(proxy, sizes):
    """All-gathers of several sizes, by few slots that are used again and again; those that were wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    with (
        mock.patch.dict(os.environ, {"STRETTO_NODES": "2,1", "STRETTO_PROXY": proxy}),
        PutChannel.allocate(slots=2, slot_bytes=256, timeout=60.0, backend="host") as channel,
    ):
        for call, size in enumerate(sizes):
            shard = torch.arange(size, dtype=torch.int32) + 1000 * rank + call
            out = torch.full((world, size), -1, dtype=torch.int32)
            channel.all_gather(shard, out)
            right = torch.stack([torch.arange(size, dtype=torch.int32) + 1000 * peer + call for peer in range(world)])
            if not torch.equal(out, right):
                wrong.append((call, size))
        channel.check()
    return wrong


@pytest.mark.parametrize("proxy", ["native", pytest.param("python", marks=pytest.mark.long)])
def test_a_kernel_gathers_from_other_nodes_and_its_own_by_puts(interpret, proxy):
    assert interpret(3, gather, proxy, [1, 300, 64, 129]) == [[]] * 3


def launch_gather():
    """The kernel, with its arguments and options."""
    numbers, words, octets = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    constants = [tl.constexpr(number) for number in (4, 8, 16384, 8, 1024)]
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
