# SPDX-License-Identifier: Apache-2.0
"""What ranks run whose kernels are interpreted. Only they import this: see conftest."""

import itertools
import mmap
import os
import random
import re
import time

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from tests.tiles import example, kernels
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles
from stretto.memory import PeerError, failures
from stretto.tiles.call_state import LATE, RECORDED, USED
from stretto.tiles.waits import OF_HOST

assert tiles.INTERPRETED.value, "tests.tiles.programs is for processes that interpret their kernels"


def random_of(rank, *shape, dtype=torch.float32, seed=0):
    """The same numbers on whichever rank asks for them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def multiply_gathered(shapes, dtype, calls):
    """All-gather + GEMM, call after call with one channel; the largest error of any call, relative."""
    rank, world = dist.get_rank(), dist.get_world_size()
    worst = 0.0
    with tiles.BlockChannel.allocate(channels=2 * world, data_bytes=1 << 18, backend="host") as channel:
        for call in range(calls):
            rows, n, k = shapes[call % len(shapes)]
            shards = [random_of(peer, rows, k, dtype=dtype, seed=call) for peer in range(world)]
            weight = random_of(world + rank, n, k, dtype=dtype, seed=call)
            gathered = channel.tensor((rows * world, k), dtype)
            out = torch.full((rows * world, n), float("nan"), dtype=dtype)
            example.launch(channel, shards[rank], gathered, weight, out)
            expected = torch.cat(shards).double() @ weight.double().T
            worst = max(worst, ((out.double() - expected).abs().max() / expected.abs().max()).item())
    return worst


COLUMNS, BLOCK = 24, 32
HALF = 1 << 15


def make_channel(timeout=20.0, group=None, channels=None):
    return tiles.BlockChannel.allocate(
        group,
        channels=channels or 3 * dist.get_world_size(group),
        peer_tiles=8,
        data_bytes=2 * HALF,
        timeout=timeout,
        backend="host",
    )


def map_gather(rows, world, *, fixed=False, whole=False, channels=2):
    """Producer's tiles of 8 rows, consumer's of 16, either cut at ranks or not."""
    producer = tiles.shard_tiles(rows, world, 8, channels=channels, fixed=fixed)
    channel_rows = producer.channel_rows.value if fixed else producer.channel_rows
    make = tiles.whole_tiles if whole else tiles.shard_tiles
    return producer, make(rows, world, 16, channels=channels, channel_rows=channel_rows, fixed=fixed)


def gather(channel, rows, push, call, pause=0.0, **mapping):
    """All-gather [rows, COLUMNS] of every rank, by push or pull, and copy it tile by tile; whether that is right."""
    rank, world = channel.rank, channel.world_size
    shards = [random_of(peer, rows, COLUMNS, seed=call) for peer in range(world)]
    producer, consumer = map_gather(rows, world, **mapping)
    pieces, count = tiles.count_tiles(producer), tiles.count_tiles(consumer)
    out = torch.full((rows * world, COLUMNS), float("nan"))
    if push:
        gathered = channel.tensor((rows * world, COLUMNS), torch.float32)
        device = channel.begin("gather by push", producer, consumer, "broadcast")
        gathered[rank * rows : (rank + 1) * rows] = float("nan")  # nobody else writes here: poison
        time.sleep(pause)
        kernels.push_tiles[(2,)](device, producer, shards[rank], gathered, COLUMNS, 2, BLOCK)
    else:
        # Whoever begins call n has pulled all of call n - 1: two buffers in turn need one meeting a call.
        own = channel.tensor((rows, COLUMNS), torch.float32, offset=call % 2 * HALF)
        own.copy_(shards[rank])
        time.sleep(pause)
        device = channel.begin("gather by pull", producer, consumer, "local")
        gathered = torch.full((rows * world, COLUMNS), float("nan"))
        kernels.pull_tiles[(2,)](device, producer, own, gathered, COLUMNS, pieces, 2, BLOCK)
    kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 16, BLOCK)
    return torch.equal(out, torch.cat(shards))


def scatter(channel, rows, call, pause=0.0):
    """Reduce-scatter [world * rows, COLUMNS], added in rank order; whether every bit is that of the sum in order."""
    rank, world = channel.rank, channel.world_size
    inputs = [random_of(peer, world * rows, COLUMNS, seed=call) for peer in range(world)]
    producer = tiles.shard_tiles(rows, world, 8, channels=2)
    consumer = tiles.shard_tiles(rows, world, 16, channels=2, channel_rows=producer.channel_rows)
    staging = channel.tensor((world, rows, COLUMNS), torch.float32)
    out = torch.full((rows, COLUMNS), float("nan"))
    device = channel.begin("scatter", producer, consumer, "p2p")
    staging[rank] = float("nan")
    time.sleep(pause)
    kernels.scatter_tiles[(tiles.count_tiles(producer),)](
        device, producer, inputs[rank], staging, COLUMNS, tiles.count_tiles(producer), BLOCK
    )
    own = tiles.count_tiles(consumer) // world
    kernels.add_tiles[(own,)](device, consumer, staging, out, COLUMNS, own, 16, BLOCK)
    expected = torch.zeros(rows, COLUMNS)
    for values in inputs:
        expected += values[rank * rows : (rank + 1) * rows]
    return torch.equal(out, expected)


def gather_in_all_ways(rows):
    """Every kind of static mapping, by push and by pull; what was not right."""
    wrong = []
    with make_channel() as channel:
        for call, (push, fixed, whole) in enumerate(itertools.product((True, False), repeat=3)):
            if not gather(channel, rows, push, call, fixed=fixed, whole=whole):
                wrong.append((push, fixed, whole))
    return wrong


def scatter_some(rows):
    with make_channel() as channel:
        return [scatter(channel, r, call) for call, r in enumerate(rows)]


def mix_calls(calls, start):
    """Calls of all kinds and shapes on one channel, its counters beginning at `start`; what was not right."""
    choices = random.Random(0)
    wrong = []
    with make_channel() as channel:
        channel.signal_words(channel.rank).fill_(start)
        channel._state.fill_(start)
        channel._state[1] = 0  # it is not broken
        dist.barrier()
        for call in range(calls):
            kind, rows = choices.choice(("push", "pull", "scatter", "ring", "exchange")), choices.randint(1, 40)
            pause, late = choices.random() * 0.05, choices.randrange(3)
            pause = pause if late == channel.rank else 0.0
            match kind:
                case "scatter":
                    right = scatter(channel, rows, call, pause)
                case "ring":
                    right = sum_around(channel, call, pause)
                case "exchange":
                    right = exchange(channel, call, pause)
                case _:
                    channels = choices.randint(1, 3)
                    right = gather(channel, rows, kind == "push", call, pause, whole=rows > 20, channels=channels)
            if not right:
                wrong.append((call, kind, rows))
    return wrong


def sum_around(channel, call, pause=0.0):
    """The ring of `pass_around`; whether every rank has the sum."""
    world = channel.world_size
    values = [random_of(peer, COLUMNS, seed=call).mul(16).round() for peer in range(world)]
    out = torch.full((COLUMNS,), float("nan"))
    mapping = map_gather(8, world)
    device = channel.begin("ring", *mapping, "broadcast", meets=True)
    skip_producers(channel)
    time.sleep(pause)
    buffer = channel.tensor((world, COLUMNS), torch.float32)
    kernels.pass_around[(1,)](device, values[channel.rank], buffer, out, COLUMNS, BLOCK)
    return torch.equal(out, sum(values))


def exchange(channel, call, pause=0.0):
    """`exchange_all`; whether every rank has all."""
    world = channel.world_size
    values = [random_of(peer, COLUMNS, seed=call) for peer in range(world)]
    out = torch.full((world, COLUMNS), float("nan"))
    device = channel.begin("exchange", *map_gather(8, world), "broadcast")
    skip_producers(channel)
    buffer = channel.tensor((world, COLUMNS), torch.float32)
    buffer[channel.rank] = float("nan")
    time.sleep(pause)
    kernels.exchange_all[(1,)](device, values[channel.rank], buffer, out, COLUMNS, BLOCK)
    return torch.equal(out, torch.stack(values))


def skip_producers(channel):
    """Signal all tiles of a call that has no producers, so that the counters agree with the targets."""
    for rank in range(channel.world_size):
        for index in range(2 * channel.rank, 2 * channel.rank + 2):
            tiles.rank_notify(channel, index, rank)


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


def use_peers(calls):
    with make_channel() as channel:
        return [(sum_around(channel, 2 * call), exchange(channel, 2 * call + 1)) for call in range(calls)]


def use_peers_after(calls):
    """Whether what peers exchange is waited for when no call of so many before has notified their tiles."""
    with make_channel() as channel:
        number = (calls + 2**31) % 2**32 - 2**31  # as int32
        words = channel.signal_words(channel.rank)
        words[: channel.world_size * channel.channels] = number
        words[-channel.world_size :] = number
        channel._state.fill_(number)
        channel._state[1] = 0  # it is not broken
        dist.barrier()
        return [exchange(channel, call, pause=0.2 if call == channel.rank else 0.0) for call in range(2)]


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


def look_up(entries):
    columns = zip(*entries, strict=True) if entries else [()] * 5
    return tiles.look_up_tiles(*(torch.tensor(column, dtype=torch.int32) for column in columns))


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


def take_turns(slots):
    """All-gathers into one of two slots, past stragglers; what was not right.

    What was read is poisoned until the next call begins: who writes too early loses what it wrote.
    """
    rows, wrong = 20, []
    with make_channel() as channel:
        rank, world = channel.rank, channel.world_size
        mapping, pauses = map_gather(rows, world), random.Random(rank)
        for call, slot in enumerate(slots):
            shards = [random_of(peer, rows, COLUMNS, seed=call) for peer in range(world)]
            everyones = [
                channel.tensor((world, rows, COLUMNS), torch.float32, offset=slot * HALF, rank=peer)
                for peer in range(world)
            ]
            channel.begin("turns", *mapping, "broadcast", slot=slot)
            for peer in range(world):
                tiles.rank_copy_data(everyones[peer][rank], shards[rank])
                for index in (2 * rank, 2 * rank + 1):
                    tiles.rank_notify(channel, index, peer)
            time.sleep(pauses.choice([0, 0, 0.02]))
            for index in range(2 * world):
                tiles.rank_wait(channel, index, index // 2)
            if not torch.equal(everyones[rank], torch.stack(shards)):
                wrong.append(call)
            everyones[rank].fill_(float("nan"))
            time.sleep(pauses.choice([0, 0, 0.02]))
    return wrong


def use_a_slot_again(calls):
    """Calls in a slot that no call of so many before has used; PeerError for one that waits in vain."""
    with make_channel(timeout=2.0) as channel:
        mapping = map_gather(20, channel.world_size)
        channel.begin("first", *mapping, "broadcast", slot=1)
        epoch = (calls + 2**31) % 2**32 - 2**31  # as int32
        channel._state[0] = channel._state[USED.value] = epoch
        channel.signal_words(channel.rank)[-channel.world_size :] = epoch
        dist.barrier()
        for slot in (1, 0, 1):
            channel.begin("again", *mapping, "broadcast", slot=slot)
        channel.check()


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


def run_ahead():
    """Whether a call in the other slot begins on rank 0 before any other rank begins it."""
    with make_channel() as channel:
        mapping = map_gather(20, channel.world_size)
        channel.begin("first", *mapping, "broadcast", slot=0)
        if channel.rank:
            dist.barrier()
        channel.begin("second", *mapping, "broadcast", slot=1)
        if not channel.rank:
            dist.barrier()
        channel.check()
    return True


def give_up_a_poll():
    """What is said after the loop where a poll of tile 2 has given up, although all is there by now."""
    world = dist.get_world_size()
    producer, consumer = map_gather(24, world)
    with make_channel() as channel:
        device = channel.begin("late", producer, consumer, "broadcast")
        gathered = channel.tensor((24 * world, COLUMNS), torch.float32)
        kernels.push_tiles[(2,)](device, producer, torch.zeros(24, COLUMNS), gathered, COLUMNS, 2, BLOCK)
        for index in range(2 * world):
            tiles.rank_wait(channel, index, index // 2)
        tiles.finish_polls[(1,)](device, consumer)
        channel._state[LATE.value] = 3
        with pytest.raises(PeerError) as said:
            tiles.finish_polls[(1,)](device, consumer)
        dist.barrier()
    return str(said.value)


def lose(what, loser):
    """Rank `loser` leaves one thing out; what each of the others is told, twice: by the call and by the next one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    producer, consumer = map_gather(24, world)
    count = tiles.count_tiles(consumer)
    channel = make_channel(timeout=3.0)
    try:
        if what == "begin" and rank == loser:
            return None
        device = channel.begin("first", producer, consumer, "broadcast")
        gathered = channel.tensor((24 * world, COLUMNS), torch.float32)
        out = torch.zeros_like(gathered)
        x = torch.zeros(24, COLUMNS)
        if rank != loser:
            kernels.push_tiles[(2,)](device, producer, x, gathered, COLUMNS, 2, BLOCK)
        if what == "producer":
            kernels.copy_tiles[(count,)](device, consumer, gathered, out, COLUMNS, count, 16, BLOCK)
        elif what == "peer" and rank != loser:
            kernels.exchange_all[(1,)](device, x, gathered, out, COLUMNS, BLOCK)
        elif what == "host":
            tiles.rank_wait(channel, 2 * loser + 1, loser)
    except PeerError as error:
        first = str(error)
    else:
        return None
    finally:
        dist.barrier()
    try:
        channel.begin("second", producer, consumer, "broadcast")
    except PeerError as error:
        return first, str(error)
    return first, None


def follow_another_failure():
    """A wait ends since another channel's has failed. What the next call raises when that one is closed."""
    rank = dist.get_rank()
    shards = tiles.shard_tiles(16, 2, 8, channels=2)
    with make_channel(timeout=60.0) as channel:
        other = make_channel(timeout=60.0)
        other.describe("another operator")
        device = channel.begin("first", shards, shards, "broadcast")
        other._record.mark([OF_HOST.value, 0, 1, 0, 0, 1 - rank, 0, 1])
        with pytest.raises(PeerError, match="another operator, call 1: waited in vain"):
            kernels.wait_for_tile[(1,)](device, shards, 2 * (1 - rank), 1 - rank, None)
        other.close()
        with pytest.raises(PeerError) as told:
            channel.begin("second", shards, shards, "broadcast")
        dist.barrier()
    failures.check()  # nothing is left
    return str(told.value)


def give_up_beside_another_program():
    """A wait gives up after another program of its channel has set the flag, which has not marked the channel yet."""
    rank = dist.get_rank()
    shards = tiles.shard_tiles(16, 2, 8, channels=2)
    with make_channel(timeout=1.0) as channel:
        device = channel.begin("first", shards, shards, "broadcast")
        for _ in range(2):
            with pytest.raises(PeerError) as told:
                kernels.wait_for_tile[(1,)](device, shards, 2 * (1 - rank), 1 - rank, None)
            assert int(channel._record.failed) != 0
            device.state[RECORDED.value] = 0
            channel._record.words[0] = 0
        dist.barrier()
    return str(told.value)


def begin_after_another_failure():
    """LATE of a call that begins after a wait of this process has failed; the flag has a number of that channel's."""
    shards = tiles.shard_tiles(16, 2, 8, channels=2)
    with make_channel(timeout=60.0) as channel:
        device = channel.begin("first", shards, shards, "broadcast")
        channel._record.failed.fill_(123_456_789)
        with pytest.raises(PeerError):
            channel.begin("second", shards, shards, "broadcast")
        late = int(device.state[LATE.value])
        dist.barrier()
    return late


def ask_wrongly():
    """Every misuse, with the words that its error must have."""
    static, table = tiles.shard_tiles, torch.zeros(3, dtype=torch.int32)
    dynamic = tiles.look_up_tiles(*[table] * 5)
    with make_channel(channels=4) as channel:
        producer, consumer = map_gather(24, 2)
        whole = tiles.whole_tiles(24, 2, 8, channel_rows=24)

        def begin(producer, consumer, mode="p2p", **named):
            return lambda: channel.begin("x", producer, consumer, mode, **named)

        def allocate(**named):
            return lambda: tiles.BlockChannel.allocate(**{"channels": 1, "backend": "host", **named})

        for words, call in (
            ("one of local, p2p, broadcast, not 'all'", begin(producer, consumer, "all")),
            ("for 3 ranks", begin(static(24, 3, 8), consumer)),
            ("8 channels each", begin(static(24, 2, 8, channels=8), consumer)),
            ("share their channels", begin(producer, static(24, 2, 32, channels=2))),
            ("use shard_tiles", begin(whole, consumer)),
            ("multiple of the tile's", begin(static(24, 2, 16, channels=2, channel_rows=12), consumer)),
            ("counts are for", begin(dynamic, consumer)),
            ("counts are for", begin(producer, consumer, counts=table)),
            ("counts are contiguous int32 [2, 2, 4]", begin(dynamic, dynamic, counts=table)),
            ("no call that began by begin", lambda: tiles.rank_wait(channel, 0, 0)),
            ("channels 0 to 3, not 4", lambda: tiles.rank_notify(channel, 4, 0)),
            ("ranks 0 to 1, not 2", lambda: tiles.rank_notify(channel, 0, 2)),
            ("multiple of 128 bytes, not at 8", lambda: channel.tensor((1,), torch.int8, offset=8)),
            ("do not fit", lambda: channel.tensor((2 * HALF + 1,), torch.int8)),
            ("one shape, dtype and device", lambda: tiles.rank_copy_data(torch.zeros(2), torch.zeros(3))),
            ("contiguous tensors", lambda: tiles.rank_copy_data(torch.zeros(2, 2).T, torch.zeros(2, 2))),
            ("of 3 rows cannot go", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(1, 4))),
            ("of 3 rows cannot go", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(0, 3, 2))),
            ("to row 8 on of 9", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(1, 3), to=8)),
            ("to row -1 on", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(1, 3), to=-1)),
            ("to row 7 on of 9", lambda: tiles.rank_copy_data(torch.zeros(9), torch.zeros(3), rows=slice(None), to=7)),
            ("one shape", lambda: tiles.rank_copy_data(torch.tensor(0), torch.tensor(0), rows=slice(0, 1))),
            ("one shape", lambda: tiles.rank_copy_data(torch.zeros(9, 2), torch.zeros(3, 1), rows=slice(1, 3))),
            ("tile_rows: a whole number, 1 or more, not 0", lambda: static(24, 2, 0)),
            ("rows: a whole number, 0 or more, not -1", lambda: static(-1, 2, 8)),
            ("12 rows or more will do", lambda: static(24, 2, 8, channels=2, channel_rows=8)),
            ("row_low is torch.float32", lambda: tiles.look_up_tiles(*[torch.zeros(3)] * 5)),
            ("rank [2]", lambda: tiles.look_up_tiles(table, table, table[:2], table, table)),
            ('take backend="host"', allocate(backend="cuda")),
            ("1 or more channels", allocate(channels=0)),
            ("more than 0 seconds", allocate(timeout=0)),
            ("at most 1048576", allocate(channels=1 << 20)),
            ("slot is 0 or 1, or None", begin(producer, consumer, slot=2)),
            ("look_up_tiles makes, not NoneType", begin(None, consumer)),
            ("local, p2p, broadcast, not 'all'", lambda: channel.enter("x", "all")),
            ("ranks 0 to 1, not 2", lambda: channel.tensor((1,), torch.int8, rank=2)),
            ("ranks 0 to 1, not -1", lambda: channel.tensor((1,), torch.int8, rank=-1)),
            ("rows: a whole number, 0 or more, not 24.5", lambda: static(24.5, 2, 8)),
            ("columns: a whole number, 1 or more, not 0", lambda: tiles.look_up_tiles(*[table] * 5, columns=0)),
        ):
            with pytest.raises(ValueError, match=re.escape(words)):
                call()
        device = channel.begin("x", producer, consumer, "broadcast")
        x = channel.tensor((64, COLUMNS), torch.float32)
        with pytest.raises(InterpreterError, match="begin has counted for another mode"):
            kernels.pull_tiles[(1,)](device, producer, x, x, COLUMNS, 1, 1, BLOCK)
        with pytest.raises(InterpreterError, match="fewer peer_tiles"):
            kernels.notify_peer[(1,)](device, 8, 1)
        with pytest.raises(InterpreterError, match='"p2p" takes a rank'):
            kernels.notify_peer[(1,)](device, 0, None)
        with pytest.raises(ValueError, match="takes tensors on the CPU, not on meta"):
            kernels.notify_peer[(1,)](device, torch.zeros(1, device="meta"), 1)
        dist.barrier()


def launch_wrongly():
    """Kernels that name what there is not, or take what is not theirs, and the words that their errors must have."""
    static, table = tiles.shard_tiles(16, 2, 8, channels=2), torch.full((4,), 6, dtype=torch.int32)
    dynamic, none = tiles.look_up_tiles(*[table % 6] * 4, table % 6 + 1), tiles.look_up_tiles(*[table] * 5)
    with make_channel(channels=6) as channel, make_channel() as other:
        device = channel.begin("x", static, static, "p2p")
        inside = channel.enter("x", "p2p")
        own, packets = channel.tensor((16,), torch.float32), channel.tensor((16,), torch.int32)
        no_rank, no_tile = "no such rank", "none of the mapping's"
        push, notify, wait = kernels.push_16, kernels.notify_tile, kernels.wait_for_tile
        for words, kernel, arguments in (
            (no_rank, push, (device, own, 2)),
            (no_rank, push, (device, own, -1)),
            (no_rank, kernels.pull_16, (device, own, 2)),
            (no_rank, kernels.notify_peer, (device, 0, 2)),
            (no_rank, wait, (device, static, 0, 2, None)),
            (no_rank, kernels.push_packets_16, (device, packets, torch.full((16,), 2))),
            (no_tile, notify, (device, static, 4)),
            (no_tile, notify, (device, static, -1)),
            (no_tile, notify, (device, none, 0)),
            (no_tile, wait, (device, static, 1000, None, None)),
            ("fewer peer_tiles", kernels.notify_peer, (device, -1, 1)),
            ("make the tensor by BlockChannel.tensor", push, (device, torch.zeros(16), 1)),
            ("make the tensor by BlockChannel.tensor", push, (device, other.tensor((16,), torch.float32), 1)),
            ("without rank=", push, (device, channel.tensor((16,), torch.float32, rank=1 - channel.rank), 1)),
            ("make the tensor by BlockChannel.tensor", kernels.pull_16, (device, torch.zeros(16), 1)),
            ("packets are int32", kernels.push_packets_16, (device, own, torch.full((16,), 1))),
            ("the producer's mapping: producer=", wait, (inside, static, 0, None, None)),
            ("static mapping: begin takes counts", wait, (inside, dynamic, 0, 0, dynamic)),
            ("end_call is for calls by enter", kernels.end, (device, static)),
            ("static mapping: begin takes counts", kernels.end, (inside, dynamic)),
        ):
            with pytest.raises(InterpreterError, match=re.escape(words)):
                kernel[(1,)](*arguments)
        for call in (lambda: tiles.rank_notify(channel, 0, 0), lambda: tiles.rank_wait(channel, 0, 0)):
            with pytest.raises(ValueError, match="no call that began by begin"):
                call()
        assert channel.tensor([4, 4], torch.float32).shape == (4, 4)
        dist.barrier()
    for call in (
        lambda: channel.begin("x", static, static, "p2p"),
        lambda: channel.enter("x", "p2p"),
        lambda: channel.tensor((1,), torch.int8),
    ):
        with pytest.raises(ValueError, match="the channel is closed"):
            call()


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
