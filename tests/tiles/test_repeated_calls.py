# SPDX-License-Identifier: Apache-2.0
"""Call after call on one channel: signals that count, slots that are used again, ranks that are ahead or behind."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from tests.processes import LIMIT
from tests.tiles import interpreted
from tests.tiles.channels import (
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

from stretto import tiles
from stretto.tiles.call_state import CLOCK, HEADER, USED


def mix_calls(calls, start):
    """Calls of all kinds and shapes on one channel, its counters beginning at `start`; what was not right."""
    choices = random.Random(0)
    wrong = []
    with make_channel() as channel:
        channel.signal_words(channel.rank).fill_(start)
        channel._state[: CLOCK.value] = channel._state[HEADER.value :] = start
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("calls", "start"),
    [(12, 2**31 - 10), *(pytest.param(24, start, marks=pytest.mark.exhaustive) for start in (0, 2**31 - 20, -20))],
)
def test_counters_serve_call_after_call_past_stragglers_and_around_their_end(interpret, calls, start):
    assert interpret(3, mix_calls, calls, start) == [[]] * 3


def test_counters_are_compared_and_added_around_their_end(interpret):
    interpret(1, interpreted.let_counters_wrap_around)


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slots", [[0, 1] * 6, [0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0]])
def test_slots_are_written_over_only_when_all_have_read_them(interpret, slots):
    assert interpret(3, take_turns, slots) == [[]] * 3


def use_a_slot_again(calls):
    """Calls in a slot that no call of so many before has used; PeerError for one that waits in vain."""
    with make_channel(timeout=LIMIT) as channel:
        mapping = map_gather(20, channel.world_size)
        channel.begin("first", *mapping, "broadcast", slot=1)
        epoch = (calls + 2**31) % 2**32 - 2**31  # as int32
        channel._state[0] = channel._state[USED.value] = epoch
        channel.signal_words(channel.rank)[-channel.world_size :] = epoch
        dist.barrier()
        for slot in (1, 0, 1):
            channel.begin("again", *mapping, "broadcast", slot=slot)
        channel.check()


@pytest.mark.parametrize("calls", [100, 2**30, 2**31 + 10, 2**32 - 1])
def test_a_slot_may_be_idle_for_any_number_of_calls(interpret, calls):
    interpret(2, use_a_slot_again, calls)


def use_peers_after(calls):
    """True if what peers exchange is waited for when no call of so many before has notified their tiles."""
    with make_channel() as channel:
        number = (calls + 2**31) % 2**32 - 2**31  # as int32
        words = channel.signal_words(channel.rank)
        words[: channel.world_size * channel.channels] = number
        words[-channel.world_size :] = number
        channel._state[: CLOCK.value] = channel._state[HEADER.value :] = number
        channel._state[1] = 0  # it is not broken
        dist.barrier()
        return [exchange(channel, call, pause=0.2 if call == channel.rank else 0.0) for call in range(2)]


@pytest.mark.parametrize("calls", [100, 2**31 + 10, 2**32 - 2**21])
def test_a_tile_between_peers_may_be_idle_for_many_calls(interpret, calls):
    assert interpret(2, use_peers_after, calls) == [[True, True]] * 2


def run_ahead():
    """True if a call in the other slot begins on rank 0 before any other rank begins it."""
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


def test_a_rank_that_is_ahead_by_a_call_does_not_wait(interpret):
    assert interpret(2, run_ahead) == [True] * 2
