# SPDX-License-Identifier: Apache-2.0
"""Kernels that put slices through the proxy, interpreted on ranks that are declared to be several nodes."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.tiles.put_channel import PutChannel


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
