# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors between real processes: peers' writes are seen, and they are gone when the tensors are."""

import gc
import re

import pytest
import torch
import torch.distributed as dist
from tests.memory.test_host import mapped

from stretto import memory
from stretto.memory import empty, find_symmetric, peer_tensor


def write_to_peers():
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = empty((world, 3, 2), torch.bfloat16)
    assert (mine.shape, mine.dtype, mine.device.type) == ((world, 3, 2), torch.bfloat16, "cpu")
    assert mine.is_contiguous()
    assert not mine.any()
    dist.barrier()
    for peer in range(world):
        peer_tensor(mine, peer)[rank] = rank + 1
    dist.barrier()
    assert mine[:, 0, 0].tolist() == [writer + 1.0 for writer in range(world)]
    assert torch.equal(peer_tensor(mine, (rank + 1) % world), mine)
    assert peer_tensor(mine, rank) is mine
    assert mapped() == world
    dist.barrier()


def test_peers_write_into_each_others_tensors(ranks):
    ranks(3).run(write_to_peers)


def let_go():
    rank = dist.get_rank()
    gc.disable()  # nothing but the last reference frees it
    try:
        mine, other = empty([5]), empty((4, 4), torch.int64)
        assert mapped() == 4
        del other
        assert mapped() == 2
        kept = mine[1:]
        theirs = peer_tensor(mine, 1 - rank)
        theirs[:] = rank + 7
        dist.barrier()
        del mine
        dist.barrier()
        assert kept.tolist() == [8.0 - rank] * 4  # a view keeps what it shows
        assert theirs.tolist() == [7.0 + rank] * 5
        del kept, theirs
        assert mapped() == 0
        for _ in range(50):
            empty((1 << 16,), torch.uint8)
        assert mapped() == 0
    finally:
        gc.enable()


def test_a_tensor_is_freed_when_it_dies_on_each_rank_separately(ranks):
    ranks(2).run(let_go)


def find_parts():
    mine, other = empty((4, 4), torch.float32), empty([3], torch.uint8)
    assert find_symmetric(mine) == (find_symmetric(mine).memory, 0, 0)
    assert find_symmetric(mine[1:])[1:] == (0, 16)
    assert find_symmetric(other[1:2])[1:] == (1, 1)
    assert find_symmetric(other).memory is not find_symmetric(mine).memory
    kept, replaced = mine[2], torch.zeros(4, 4)
    mine.data = replaced  # what peers know is still the memory that was there
    assert find_symmetric(mine) is find_symmetric(replaced) is find_symmetric(torch.zeros(4)) is None
    assert find_symmetric(kept)[1:] == (0, 32)
    del mine
    assert find_symmetric(kept) is None


def test_a_part_of_a_tensor_is_found_by_where_it_lies(ranks):
    ranks(2).run(find_parts)


def test_tensors_are_counted_from_zero_in_a_group_with_the_name_of_an_earlier_one():
    names = set()
    for _ in range(2):  # on other ranks the first one may not have been at all
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            names.add(dist.group.WORLD.group_name)
            kept = [empty([3]), empty([3])]
            assert [find_symmetric(tensor).number for tensor in kept] == [0, 1]
        finally:
            dist.destroy_process_group()
    assert len(names) == 1


def take_in_a_group():
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"this process \(rank 1\) is not in the group"):
            empty((3,), group=group)
    else:
        mine = empty((3,), group=group)
        peer_tensor(mine, 1 - dist.get_rank(group)).fill_(dist.get_rank() + 1)
        dist.barrier(group)
        assert mine.tolist() == [3.0 - dist.get_rank()] * 3
        with pytest.raises(ValueError, match="the group has ranks 0 to 1, not 2"):
            peer_tensor(mine, 2)
        dist.barrier(group)
    dist.barrier()


def test_a_group_has_its_own_tensors_and_others_raise(ranks):
    ranks(3).run(take_in_a_group)


def disagree():
    rank = dist.get_rank()
    for asked in (
        (((4, 2), torch.float32), ((4, 3), torch.float32)),
        (((4,), torch.float32), ((4,), torch.int32)),  # of the same bytes, as is the next
        (((4,), torch.float32), ((4, 1), torch.float32)),
    ):
        own, other = (f"{dtype} {list(shape)}" for shape, dtype in (asked[rank], asked[1 - rank]))
        message = f"all ranks must allocate the same: rank {rank} asks for {own}, rank {1 - rank} for {other}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            empty(*asked[rank])
    assert mapped() == 0
    assert empty((), torch.int8).shape == ()  # the group is still good
    assert empty((0, 5)).shape == (0, 5)


def test_ranks_that_request_different_tensors_all_raise(ranks):
    ranks(2).run(disagree)


def refuse():
    for shape, options, message in (
        ((3, -1), {}, r"no negative sizes: \[3, -1\]"),
        ((1 << 40, 2), {}, "up to 1099511627776 bytes, and .* has 8796093022208"),
        ((1 << 37,), {"dtype": torch.uint8}, "this machine has"),
        ((3,), {"device": "meta"}, "of type cpu or cuda, not meta"),
    ):
        with pytest.raises(ValueError, match=message):
            empty(shape, **options)
    mine = empty((3,))
    for tensor in (mine[:2], torch.zeros(3), mine.clone()):
        with pytest.raises(ValueError, match=r"the very tensor that stretto\.memory\.empty returned"):
            peer_tensor(tensor, 0)
    del mine
    assert mapped() == 0


def test_invalid_arguments_raise_before_anything_is_allocated(ranks):
    ranks(1).run(refuse)
    with pytest.raises(ValueError, match="no process group"):
        empty((3,))
    assert memory.empty is empty


def wait_for_one_who_does_not_come():
    if dist.get_rank() == 0:
        with pytest.raises(memory.PeerError, match=r"did not meet all ranks within 0\.5 s"):
            empty((3,), timeout=0.5)


def test_a_missing_rank_is_named(ranks):
    ranks(2).run(wait_for_one_who_does_not_come)


def test_on_gpus_it_needs_a_gpu(ranks):
    ranks(1).run(ask_for_a_gpu)


def ask_for_a_gpu():
    with pytest.raises(ValueError, match="needs GPUs, and this process sees none"):
        empty((3,), device="cuda")
