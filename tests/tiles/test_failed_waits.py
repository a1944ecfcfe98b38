# SPDX-License-Identifier: Apache-2.0
"""Waits for signals that never come: who is named, and what the next call of the channel raises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.processes import LIMIT
from tests.tiles import kernels
from tests.tiles.channels import BLOCK, COLUMNS, make_channel, map_gather

from stretto import tiles
from stretto.memory import PeerError, failures
from stretto.tiles.call_state import LATE, RECORDED
from stretto.tiles.waits import OF_HOST


def give_up_a_poll():
    """The error after the loop where a poll of tile 2 has given up, although all tiles have arrived by now."""
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
        with pytest.raises(PeerError) as error:
            tiles.finish_polls[(1,)](device, consumer)
        dist.barrier()
    return str(error.value)


def test_a_poll_that_gave_up_is_reported_even_if_its_signal_has_come(interpret):
    for rank, message in enumerate(interpret(2, give_up_a_poll)):
        assert message.startswith(f"rank {rank} of 2: late, call 1: waited in vain for rank 1, tile 2 (channel 2)")


def lose(what, loser):
    """Rank `loser` leaves one thing out; two errors of each of the others: of the call and of the next one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    producer, consumer = map_gather(24, world)
    count = tiles.count_tiles(consumer)
    channel = make_channel(timeout=4.0)
    try:
        if what == "begin" and rank == loser:
            return None
        device = channel.begin("first", producer, consumer, "broadcast")
        gathered = channel.tensor((24 * world, COLUMNS), torch.float32)
        out = torch.zeros_like(gathered)
        x = torch.zeros(24, COLUMNS)
        if rank != loser:
            kernels.push_tiles[(2,)](device, producer, x, gathered, COLUMNS, 2, BLOCK)
        if what == "peer":
            dist.barrier()  # on a busy machine a rank that is not lost must not be late either
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


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("begin", r"rank 1, the beginning of the call"),
        ("producer", r"rank 1, tile (2 \(channel 2|3 \(channel 3)\)"),  # whichever program's time is over first
        ("peer", r"rank 1, tile 0 between peers"),
        ("host", r"rank 1, channel 3 \(rank_wait\)"),
    ],
)
def test_a_rank_that_never_arrives_is_named_with_operator_and_tile(interpret, what, words):
    outcomes = interpret(3, lose, what, 1)
    for rank in (0, 2):
        first, second = outcomes[rank]
        assert re.match(f"rank {rank} of 3: first, call 1: waited in vain for {words}, 4 s: its signal is at ", first)
        assert second == first  # the channel is broken


def follow_another_failure():
    """A wait ends since another channel's has failed. What the next call raises when that one is closed."""
    rank = dist.get_rank()
    shards = tiles.shard_tiles(16, 2, 8, channels=2)
    with make_channel(timeout=LIMIT) as channel:
        other = make_channel(timeout=LIMIT)
        other.describe("another operator")
        device = channel.begin("first", shards, shards, "broadcast")
        other._record.mark([OF_HOST.value, 0, 1, 0, 0, 1 - rank, 0, 1])
        with pytest.raises(PeerError, match="another operator, call 1: waited in vain"):
            kernels.wait_for_tile[(1,)](device, shards, 2 * (1 - rank), 1 - rank, None)
        other.close()
        with pytest.raises(PeerError) as error:
            channel.begin("second", shards, shards, "broadcast")
        dist.barrier()
    failures.check()  # nothing is left
    return str(error.value)


def test_a_channel_whose_wait_ended_with_another_groups_failure_stays_broken_when_that_is_over(interpret):
    for rank, message in enumerate(interpret(2, follow_another_failure)):
        awaited = f"ended without what it waited for from rank {1 - rank}, since a wait of another group had failed"
        assert message.startswith(f"rank {rank} of 2: first, call 1: {awaited}")


def give_up_beside_another_program():
    """A wait gives up after another program of its channel has set the flag, which has not marked the channel yet."""
    rank = dist.get_rank()
    shards = tiles.shard_tiles(16, 2, 8, channels=2)
    with make_channel(timeout=1.0) as channel:
        device = channel.begin("first", shards, shards, "broadcast")
        for _ in range(2):
            with pytest.raises(PeerError) as error:
                kernels.wait_for_tile[(1,)](device, shards, 2 * (1 - rank), 1 - rank, None)
            assert int(channel._record.failed) != 0
            device.state[RECORDED.value] = 0
            channel._record.words[0] = 0
        dist.barrier()
    return str(error.value)


@pytest.mark.long
def test_programs_of_a_channel_that_give_up_together_do_not_take_each_other_for_another_group(interpret):
    for rank, text in enumerate(interpret(2, give_up_beside_another_program)):
        assert text.startswith(f"rank {rank} of 2: first, call 1: waited in vain for rank {1 - rank}, tile ")


def begin_after_another_failure():
    """LATE of a call that begins after a wait of this process has failed; the flag has a number of that channel's."""
    shards = tiles.shard_tiles(16, 2, 8, channels=2)
    with make_channel(timeout=LIMIT) as channel:
        device = channel.begin("first", shards, shards, "broadcast")
        channel._record.failed.fill_(123_456_789)
        with pytest.raises(PeerError):
            channel.begin("second", shards, shards, "broadcast")
        late = int(device.state[LATE.value])
        dist.barrier()
    return late


def test_polls_of_a_call_that_begins_after_a_failure_give_up_on_a_tile_that_there_is(interpret):
    assert interpret(2, begin_after_another_failure) == [1, 1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks_torch_processes")
def test_the_call_after_a_kernel_was_loaded_has_time_for_a_peer_that_compiles_it(tmp_path: Path) -> None:
    """With an empty cache on disk, and with a warm one, as the rank has that waits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    for _ in range(2):
        command = [sys.executable, "-m", "tests.tiles.limits"]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
