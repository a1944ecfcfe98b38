# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups between real processes, whose kernels are interpreted, against fp64."""

import gc
import os
import random
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.ops.embedding.jagged import is_close, look_up_case, make_case, own_rows

from stretto import ops
from stretto.memory import MAX_SIGNALS, allocate_in_process
from stretto.ops.embedding import autotune, backward, forward, launch_config
from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.launch_config import LaunchConfig, LookupSize
from stretto.ops.embedding.output_ring import CHANNELS, OutputRing, find_output_rings, limit_channels
from stretto.ops.embedding.placement import EmbeddingPlacement
from stretto.ops.embedding.table_set import find_tables
from stretto.tiles import BlockChannel, shard_tiles
from stretto.tiles.call_state import HEADER
from stretto.tuning import TuningStore

SEED = random.randrange(10**6)


def take_random_configs(generator, order):
    """Have the operator launch itself with another config, on this rank."""
    draws = [1 << int(torch.randint(0, 3, (1,), generator=generator)) for _ in range(4)]
    config = LaunchConfig(draws[0], draws[1], draws[0] * draws[2], 1, draws[3], order)
    forward.choose_launch_config = lambda *_: config


def look_up_random_batches(first, calls):
    """Look up so many random batches, in all orders, past stragglers; the seeds of those that are wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chosen = forward.choose_launch_config
    wrong = []
    for seed in range(first, first + calls):
        case = make_case(seed, world)
        if seed % 3:
            take_random_configs(torch.Generator().manual_seed(seed * world + rank), ORDERS[seed % len(ORDERS)])
        if seed % 7 == rank:
            time.sleep(0.02)
        out = look_up_case(case)
        if not is_close(out, own_rows(case, case.expected()), out.dtype):
            wrong.append((seed, "wrong"))
        if seed % 5 == 0 and not torch.equal(out, look_up_case(case)):
            wrong.append((seed, "another time"))
        forward.choose_launch_config = chosen
    return wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "calls"), [(1, 6), (2, 4), (2, 40), (3, 12), (4, 8)])
def test_random_jagged_batches_are_pooled_where_they_belong(interpret, ranks, calls):
    print("seed", SEED)
    assert interpret(ranks, look_up_random_batches, SEED, calls) == [[]] * ranks


def look_up_on_some_of_many_ranks(world):
    """Return what the first, the middle and the last of very many ranks store into all ranks' outputs,
    and how they signal it.

    All ranks' memory is in this process. The others have begun the call, and nobody waits for slices.
    """
    senders, dims = (1, world // 2 | 1, world - 1), tuple((4,) * (1 + rank % 3) for rank in range(world))
    slots, channels = 1 << 16, limit_channels(world, CHANNELS) * world
    head, data = -(-4 * world * (channels + 2) // 128) * 128, -(-32 * world // 128) * 128
    memories = allocate_in_process(world, head + data + 3 * slots)
    counters = [memories[0].buffer(rank)[: 4 * world * (channels + 2)].view(torch.int32) for rank in range(world)]
    launches = {}
    for rank in senders:
        placement = EmbeddingPlacement(rank, dims, torch.float32, 2 * world)
        ring = OutputRing(BlockChannel(memories[rank], channels, 1, 30.0), slots, 2, rank)
        counts = forward._count_signals(placement, torch.device("cpu"))
        mapping = shard_tiles(of_rank := forward.count_channels(placement), world, 1, channels=of_rank, fixed=True)
        permit, first = torch.zeros(1, dtype=torch.int32), placement.first_column(rank)
        pointers = forward.RingPointers(ring.slots.view(torch.float32), ring.destinations, ring.tickets, permit)
        launches[rank] = (
            placement,
            forward._ForwardLaunch(ring, pointers, counts, mapping, first),
        )
        ring.destinations[1, :, 1] = placement.announce(needs_grad=False)
        counters[rank][world * channels : world * (channels + 1)] = 1  # all ranks have begun call 1
    out, right = [memory.buffer()[head + data :].view(torch.float32) for memory in memories], []
    for rank, (placement, launch) in launches.items():
        tables = [torch.full((2 * world, 4), float(number)) for number in range(len(dims[rank]))]
        tables = [table + torch.arange(2.0 * world)[:, None] for table in tables]
        indices = torch.arange(2 * world).repeat(len(tables))
        offsets = torch.arange(len(indices) + 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward._ForwardLaunch, "find", lambda *_, launch=launch: launch)
            patch.setattr(forward, "limit_waiting", lambda *_: 0)
            found = find_tables(tables, torch.device("cpu"))
            forward.look_up_and_send(indices, offsets, found, None, placement, "", "sum")
        columns = slice(launch.first_column, launch.first_column + 4 * len(tables))
        for reader in range(world):
            stored = out[reader][: 2 * placement.width].view(2, -1)[:, columns]
            numbers = torch.arange(len(tables)).repeat_interleave(4) + 2 * reader + torch.arange(2)[:, None]
            seen = counters[reader][rank * channels : (rank + 1) * channels]
            own = EmbeddingPlacement(reader, dims, torch.float32, 2 * world)
            expected = forward._count_signals(own, torch.device("cpu"))[0, rank]
            right.append(torch.equal(stored, numbers.float()) and torch.equal(seen, expected))
        right.append(
            torch.equal(launch.counts[0].view(-1), launch.ring.channel._state[HEADER.value :][: world * channels])
        )
        launch.ring.channel.close()
    return len(right), all(right)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [65, 128, 200])
def test_more_than_64_ranks_are_sent_what_is_theirs(interpret, ranks):
    assert interpret(1, look_up_on_some_of_many_ranks, ranks) == [(3 * (ranks + 1), True)]


@pytest.mark.parametrize("ranks", [2, 64, 65, 128, 180, 181, 200, 500])
def test_the_signals_of_many_ranks_fit_into_memory(ranks):
    for most in (CHANNELS, backward._CHANNELS):
        channels = limit_channels(ranks, most)
        assert 1 <= channels <= most
        assert channels == most or 2 * channels * ranks**2 > MAX_SIGNALS - 2 * ranks
        assert ranks * (channels * ranks + 2) <= MAX_SIGNALS


def hold_outputs(count):
    """Keep `count` outputs alive; whether each still holds what it did, and how many lie in the ring."""
    world = dist.get_world_size()
    held, right = [], True
    for call_number in range(count):
        if dist.get_rank() == 0 and call_number % 3 == 2:
            held.pop(0)  # this rank's slots are free at other times than the others'
        tables = [torch.full((1, 4), float(call_number))]
        offsets = torch.arange(world + 1)
        held.append(
            (float(call_number), ops.embedding_all_to_all(torch.zeros(world, dtype=torch.int64), offsets, tables))
        )
        right = right and all(torch.equal(out, torch.full_like(out, value)) for value, out in held)
    rings = find_output_rings(dist.group.WORLD.group_name)
    assert len(rings) == 1
    slots = rings[0].slots
    inside = [slots.data_ptr() <= out.data_ptr() < slots.data_ptr() + slots.numel() for _, out in held]
    return right, sum(inside)


def test_an_output_is_not_written_over_while_it_lives_however_many_do(interpret):
    for is_right, inside in interpret(2, hold_outputs, 7):
        assert is_right
        assert inside >= 2


def keep_a_part():
    """A slot is not taken again while a view of its output lives, or its storage, and is when that dies."""
    table, offsets = [torch.ones(1, 4)], torch.arange(2)

    def look_up():
        return ops.embedding_all_to_all(torch.zeros(1, dtype=torch.int64), offsets, table)

    found = []
    for take_part in (lambda out: out[0, 1:], torch.Tensor.untyped_storage):
        first = look_up()
        address, part = first.data_ptr(), take_part(first)
        del first
        second = look_up()
        found.append(second.data_ptr() != address)
        del part, second
        found.append(look_up().data_ptr() == address)
    return found


def test_a_view_keeps_its_output_and_a_dead_output_gives_its_place_back(interpret):
    assert interpret(1, keep_a_part) == [[True] * 4]


def change_tables_between_calls():
    """Return what is looked up in tables that others replace, or that are moved, filled and resized in place."""
    indices, offsets = torch.tensor([0, 1]), torch.arange(3)

    def look_up(table):
        return ops.embedding_all_to_all(indices, offsets, [table]).unique().tolist()

    found = [look_up(torch.full((2, 4), value)) for value in (1.0, 2.0, 3.0)]  # which may be at one address
    table = torch.full((2, 4), 4.0)
    found.append(look_up(table))
    table.data = torch.full((2, 4), 5.0)
    found.append(look_up(table))
    table.fill_(6.0)
    found.append(look_up(table))
    table.resize_(1, 4)
    with pytest.raises(ValueError, match="is 1, but table 0 of this rank has 1 rows"):
        look_up(table)
    table.data = torch.ones(4, 2).t()
    with pytest.raises(ValueError, match="table 0 is no contiguous tensor"):
        look_up(table)
    return found


def test_tables_that_change_between_calls_are_seen_as_they_are(interpret):
    assert interpret(1, change_tables_between_calls) == [[[float(n)] for n in range(1, 7)]]


def look_up_many_sets_of_tables(after_capture):
    """Of the words that one step had kernels read, how many live when many other tables have been described.

    after_capture: whether a CUDA graph, of which CPUs have none, would have been captured from the step.
    """
    launch_config._kept.clear()  # what earlier programs of this process have made
    for function in (
        launch_config._describe_tables,
        backward._describe_rows,
        backward._describe_target,
        backward._find_tables_of,
    ):
        function.cache_clear()
    layer = ops.EmbeddingAllToAll([(3, 4), (5, 8)], optimizer="sgd", learning_rate=0.5)

    def step():
        layer(torch.tensor([0, 1]), torch.tensor([0, 1, 2])).sum().backward()

    step()
    kept = [*launch_config._kept.values(), backward._find_tables_of((4, 8), torch.device("cpu"))]
    words = [weakref.ref(word) for word in kept]
    del kept
    if after_capture:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch_config, "_is_capturing", lambda device: True)
            step()
    for number in range(300):
        shape = (number + 1, 4 * (number + 1))
        launch_config.describe_tables(find_tables([torch.empty(shape)], torch.device("cpu")), 0, 1, shape[1], 1)
        backward._describe_rows((number,), (4,), 4, torch.device("cpu"))
        backward._describe_target((shape[1],), 4, "sgd", False, False, False, torch.device("cpu"))
    gc.collect()
    return sum(word() is not None for word in words), len(words)


def test_memory_that_cuda_graphs_read_is_never_freed_and_other_caches_are_bounded(interpret):
    ((living, of_all),) = interpret(1, look_up_many_sets_of_tables, True)
    assert living == of_all >= 4
    ((living, of_all),) = interpret(1, look_up_many_sets_of_tables, False)
    assert living < of_all


def tune(folder):
    """A look-up is launched as was measured to be fastest, and files that hold no configs change nothing."""
    os.environ["STRETTO_CACHE"] = folder
    autotune._load.cache_clear()
    indices, offsets, tables = torch.zeros(2, dtype=torch.int64), torch.arange(3), [torch.ones(2, 4)]
    before = forward.find_tuned_config(LookupSize(2, 16, 1, 2, 2), offsets.device)
    config = ops.tune_embedding(indices, offsets, tables)
    found = forward.find_tuned_config(LookupSize(2, 16, 1, 2, 2), offsets.device)
    other = forward.find_tuned_config(LookupSize(2, 16, 1, 4, 2), offsets.device)
    store = TuningStore()
    machine = autotune._autotuner(offsets.device).machine
    store.add(machine, {"embedding x, 3/1/1/1/1/by_table": [1.0], "embedding y, z": [1.0]})
    autotune._load.cache_clear()
    again = forward.find_tuned_config(LookupSize(2, 16, 1, 2, 2), offsets.device)
    del os.environ["STRETTO_CACHE"]
    autotune._load.cache_clear()
    return before is None, found == config == again, other is None


def test_the_fastest_way_is_measured_and_kept(interpret, tmp_path):
    assert interpret(2, tune, str(tmp_path)) == [(True, True, True)] * 2
