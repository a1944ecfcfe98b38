# SPDX-License-Identifier: Apache-2.0
"""The primitives between real processes, whose kernels are interpreted: what is there when a wait returns."""

import itertools
import mmap
import os
import random

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from tests.tiles import kernels
from tests.tiles.channels import (
    BLOCK,
    COLUMNS,
    HALF,
    exchange,
    gather,
    make_channel,
    map_gather,
    random_of,
    scatter,
    sum_around,
)
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles


def gather_in_all_ways(rows):
    """Every kind of static mapping, by push and by pull; what was not right."""
    wrong = []
    with make_channel() as channel:
        for call, (push, fixed, whole) in enumerate(itertools.product((True, False), repeat=3)):
            if not gather(channel, rows, push, call, fixed=fixed, whole=whole):
                wrong.append((push, fixed, whole))
    return wrong


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [16, 37])
def test_every_static_mapping_gathers_by_push_and_by_pull(interpret, ranks, rows):
    assert interpret(ranks, gather_in_all_ways, rows) == [[]] * ranks


def scatter_some(rows):
    with make_channel() as channel:
        return [scatter(channel, r, call) for call, r in enumerate(rows)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_tiles_sent_to_their_owners_are_added_in_rank_order_as_they_come(interpret, ranks):
    assert interpret(ranks, scatter_some, [16, 21, 5]) == [[True, True, True]] * ranks


def look_up(entries):
    columns = zip(*entries, strict=True) if entries else [()] * 5
    return tiles.look_up_tiles(*(torch.tensor(column, dtype=torch.int32) for column in columns))


def route(mode, calls):
    """Tiles of uneven size go where tables say that are made anew for each call; what was not right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, pieces, channels = 40, 5, 3
    wrong = []
    with make_channel(channels=channels) as channel:
        for call in range(calls):
            choices = random.Random(call)  # the same tables on all ranks, which know each other's so
            sent = []  # (source, destination, channel, row_low, row_high)
            for source in range(world):
                cuts = sorted(choices.sample(range(1, rows), pieces - 1))
                for low, high in itertools.pairwise([0, *cuts, rows]):
                    at = source * rows
                    to = choices.randrange(world)
                    sent.append((source, to, choices.randrange(channels), at + low, at + min(high, low + 16)))
            mine = [piece for piece in sent if piece[0] == rank]
            coming = [piece for piece in sent if mode == "broadcast" or piece[1] == rank]
            counts = torch.zeros(2, world, channels, dtype=torch.int32)
            for source, _, index, _, _ in coming:
                counts[0, source, index] += 1
            for _, to, index, _, _ in mine:
                for destination in range(world) if mode == "broadcast" else [to]:
                    counts[1, destination, index] += 1
            x = torch.cat([random_of(peer, rows, COLUMNS, seed=call) for peer in range(world)])
            buffer = channel.tensor((world * rows, COLUMNS), torch.float32)
            producer = look_up([(low, high, to, index, index + 1) for _, to, index, low, high in mine])
            # The last tile's rows come from one rank too, but it waits for all ranks and channels.
            waits = [(low, high, source, index, index + 1) for source, _, index, low, high in coming]
            waits = [*waits[:-1], (*waits[-1][:2], world, 0, channels)] if waits else []
            consumer = look_up(waits)
            device = channel.begin("route", producer, consumer, mode, counts=counts)
            buffer.view(world, rows, COLUMNS)[rank] = float("nan")
            kernels.move_rows[(pieces,)](device, producer, x, buffer, COLUMNS, mode, 16, BLOCK)
            out = torch.full_like(x, float("nan"))
            if waits:
                kernels.copy_tiles[(len(waits),)](device, consumer, buffer, out, COLUMNS, len(waits), 16, BLOCK)
            for _, _, _, low, high in coming:
                if not torch.equal(out[low:high], x[low:high]):
                    wrong.append((call, low, high))
    return wrong


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", ["p2p", "broadcast"])
def test_tables_that_are_filled_at_run_time_send_tiles_anywhere(interpret, ranks, mode):
    assert interpret(ranks, route, mode, 4) == [[]] * ranks


def use_peers(calls):
    with make_channel() as channel:
        return [(sum_around(channel, 2 * call), exchange(channel, 2 * call + 1)) for call in range(calls)]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_peers_signal_each_other_one_by_one_and_all_at_once(interpret, ranks):
    assert interpret(ranks, use_peers, 3) == [[(True, True)] * 3] * ranks


def move_by_descriptors():
    """A rank alone stores tiles by one descriptor and loads them by another, with and without what TMA needs."""
    for call, orders in enumerate((True, False)):
        with make_channel() as channel:
            x = random_of(0, 64, 64, dtype=torch.bfloat16, seed=call)
            kept, out = channel.tensor((64, 64), torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
            source, target, result = (TensorDescriptor.from_tensor(tensor, [8, 64]) for tensor in (x, kept, out))
            producer, _ = map_gather(64, 1)
            device = channel.begin("descriptors", producer, producer, "broadcast")
            kernels.store_by_descriptor[(8,)](device, producer, source, target, orders, 8)
            kernels.load_by_descriptor[(8,)](device, producer, target, result, orders, 8)
            assert torch.equal(out, x)


def test_descriptors_store_and_load_tiles_too(interpret):
    interpret(1, move_by_descriptors)


def copy_by_the_host(direction, calls):
    """All-gather by rank_copy_data, rank_notify and then either a kernel's wait or rank_wait; what was not right."""
    rows, wrong = 20, []
    with make_channel() as channel:
        rank, world = channel.rank, channel.world_size
        producer, consumer = map_gather(rows, world)
        count = tiles.count_tiles(consumer)
        for call in range(calls):
            shards = [random_of(peer, rows, COLUMNS, seed=call) for peer in range(world)]
            offset = call % 2 * HALF
            own = channel.tensor((rows, COLUMNS), torch.float32, offset=offset)
            own.copy_(shards[rank])
            device = channel.begin("copy", producer, consumer, "broadcast" if direction == "push" else "local")
            if direction == "push":
                gathered = channel.tensor((world * rows, COLUMNS), torch.float32, offset=HALF // 2)
                with tiles.copy_engine(channel):
                    for distance in range(world):
                        peer = (rank + distance) % world
                        there = channel.tensor((world * rows, COLUMNS), torch.float32, offset=HALF // 2, rank=peer)
                        # In two parts, of which each comes to where it belongs.
                        for part in (slice(0, 7), slice(7, rows)):
                            tiles.rank_copy_data(there, shards[rank], rows=part, to=rank * rows + part.start)
                        for index in (2 * rank, 2 * rank + 1):
                            tiles.rank_notify(channel, index, peer)
            else:
                gathered = torch.full((world * rows, COLUMNS), float("nan"))
                with tiles.copy_engine(channel):
                    for peer in range(world):
                        there = channel.tensor((rows, COLUMNS), torch.float32, offset=offset, rank=peer)
                        tiles.rank_copy_data(gathered[peer * rows : (peer + 1) * rows], there)
                        for index in (2 * peer, 2 * peer + 1):
                            tiles.rank_notify(channel, index, rank)
            out = torch.full_like(gathered, float("nan"))
            if call % 2:
                for index in range(2 * world):
                    tiles.rank_wait(channel, index, index // 2 if direction == "push" else rank)
                out.copy_(gathered)
            else:
                kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 16, BLOCK)
            tiles.join_copies(channel)
            if not torch.equal(out, torch.cat(shards)):
                wrong.append(call)
    return wrong


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_the_host_copies_signals_and_waits(interpret, direction):
    assert interpret(3, copy_by_the_host, direction, 4) == [[]] * 3


def sum_packets_of_large_products():
    """Three ranks' packets, 2^30 apart, in memory of which the machine has but what is touched."""
    world, stride = 3, 1 << 30
    size = 4 * (world - 1) * stride + 4096
    descriptor = os.memfd_create("packets")
    os.ftruncate(descriptor, size)
    packets = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.int32)
    os.close(descriptor)
    out = torch.zeros(16)
    for rank in range(world):
        packets[rank * stride :][:16] = random_of(rank, 16).view(torch.int32)
    with make_channel() as channel:
        device = channel.describe("large", begun_in_kernel=True)._replace(world=tl.constexpr(world))
        kernels.sum_packets_apart[(1,)](device, packets, out, stride)
    assert torch.equal(out, random_of(0, 16) + random_of(1, 16) + random_of(2, 16))
    assert not any(packets[rank * stride :][:16].any() for rank in range(world))


def test_packets_may_be_further_apart_than_32_bits_count(interpret):
    interpret(1, sum_packets_of_large_products)


def use_groups_at_once(calls):
    """A channel of all ranks and one of each half, with calls of both under way; what was not right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(start, world, 2))) for start in (0, 1)]
    wrong = []
    with make_channel() as whole, make_channel(group=halves[rank % 2]) as half:
        for call in range(calls):
            state = {}
            for channel in (whole, half):
                producer, consumer = map_gather(24, channel.world_size)
                gathered = channel.tensor((24 * channel.world_size, COLUMNS), torch.float32)
                device = channel.begin("gather", producer, consumer, "broadcast")
                state[channel] = device, gathered, producer, consumer
            for device, gathered, producer, _ in reversed(state.values()):
                x = random_of(rank, 24, COLUMNS, seed=call)
                kernels.push_tiles[(2,)](device, producer, x, gathered, COLUMNS, 2, BLOCK)
            for channel, (device, gathered, _, consumer) in state.items():
                out, count = torch.full_like(gathered, float("nan")), tiles.count_tiles(consumer)
                kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 16, BLOCK)
                members = range(world) if channel is whole else range(rank % 2, world, 2)
                expected = torch.cat([random_of(peer, 24, COLUMNS, seed=call) for peer in members])
                if not torch.equal(out, expected):
                    wrong.append((call, channel is whole))
    return wrong


@pytest.mark.long
def test_two_groups_have_calls_under_way_at_once(interpret):
    assert interpret(4, use_groups_at_once, 3) == [[]] * 4


def exchange_blocks(calls):
    """Blocks of two dims as packets, zeros among them; what was not right."""
    wrong = []
    with make_channel() as channel:
        packets = channel.tensor((2, channel.world_size, 4, 8), torch.int32)
        for call in range(calls):
            x = [random_of(rank, 4, 8, seed=call).int() for rank in range(channel.world_size)]
            out = torch.full((channel.world_size, 4, 8), -1, dtype=torch.int32)
            device = channel.enter("packets", "p2p")
            kernels.exchange_packets[(channel.world_size,)](device, x[channel.rank], packets, out, 4, 8)
            if not torch.equal(out, torch.stack(x)):
                wrong.append(call)
    return wrong


def test_packets_may_be_a_block_of_two_dims(interpret):
    assert interpret(3, exchange_blocks, 4) == [[]] * 3


TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 5e-3}

SHAPES = [(40, 48, 40), (16, 32, 32), (33, 40, 24)]  # rows of a rank, n, k
