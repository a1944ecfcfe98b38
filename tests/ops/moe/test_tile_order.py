# SPDX-License-Identifier: Apache-2.0
"""The order of tiles whose rows arrive, and products in that order, in Triton's interpreter."""

import re
import time
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from tests.ops.moe.oracle import draw, make_layer
from tests.ops.moe.test_exchange import Case, part
from tests.ops.moe.test_grouped_kernels import BLOCKS, launch, make_offsets
from tests.tiles.machine_code import ACQUIRE, Ptx, find_spills, make_channel

from stretto import tiles
from stretto.ops.moe import kernel_route
from stretto.ops.moe import places as module_of_places
from stretto.ops.moe.grouped.config import GroupedConfig
from stretto.ops.moe.grouped.kernels import differentiate_gate, multiply, multiply_gated
from stretto.ops.moe.grouped.tile_order import Arrivals, TileOrder, find_tile_order
from stretto.ops.moe.places import Places, find_places
from stretto.ops.moe.routes import call

SEED = 591


def list_tiles(counts, rank, places, offsets, channels, parts, part_rows, block_rows):
    """(distance, expert, first row, row after the last, farthest rank, first and next channel) of each tile."""
    sources = [source for source, count in enumerate(counts) for _ in range(count)]
    world, found = len(counts), []

    def find_channel(place):
        source = sources[place]
        each = -(-counts[source] // parts)
        part = (place - sum(counts[:source])) // (-(-each // part_rows) * part_rows)
        return source * channels + part // (parts // channels)

    for expert, (begin, end) in enumerate(pairwise(offsets)):
        for low in range(begin, end, block_rows):
            high = min(low + block_rows, end)
            first, last = places[low], places[high - 1]
            ranks = range(sources[first], sources[last] + 1)
            distance = max((source - rank) % world for source in ranks)
            if sources[first] < rank <= sources[last]:
                distance = world - 1
            farthest = (rank + distance) % world
            found.append((distance, expert, low, high, farthest, find_channel(first), find_channel(last) + 1))
    return sorted(found)


def compare_orders():
    """The numbers of random routings whose tables are wrong."""
    generator = torch.Generator().manual_seed(SEED)

    def choose(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    wrong = []
    for number in range(25):
        world, experts = choose(2, 3, 4, 5), choose(1, 3, 5)
        rank, counts = choose(*range(world)), [choose(0, 3, 17, 40) for _ in range(world)]
        table = torch.zeros(world, world, 2, dtype=torch.int32)
        table[:, rank, 0] = torch.tensor(counts)
        share = choose(0.05, 0.5, 1.0)
        rows = [
            (torch.rand(sum(counts), generator=generator) < share).nonzero().flatten().to(torch.int32)
            for _ in range(experts)
        ]
        places, offsets = torch.cat(rows), make_offsets([len(one) for one in rows])
        sizes = {"channels": 2, "parts": choose(2, 4), "part_rows": choose(1, 4), "block_rows": choose(4, 8)}
        order = find_tile_order(places, offsets, table, rank, **sizes)
        right = list_tiles(counts, rank, places.tolist(), offsets.tolist(), **sizes)
        mapping, count = order.mapping, len(right)
        tables = (
            order.experts,
            mapping.row_low,
            mapping.row_high,
            mapping.rank,
            mapping.channel_low,
            mapping.channel_high,
        )
        found = [tuple(each) for each in torch.stack(tables, 1)[:count].tolist()]
        ends = [sum(each[0] <= distance for each in right) for distance in range(world)]
        if found != [each[1:] for each in right] or order.ends.tolist() != ends or order.claimed.tolist() != [0]:
            wrong.append(number)
    return wrong


@pytest.mark.long
def test_tiles_of_near_ranks_come_first_with_the_parts_that_they_wait_for(interpret):
    assert interpret(1, compare_orders) == [[]]


def arrive_all(rows, counts, rank, near, channels=2):
    """Rows of which all have arrived: signals and their targets are zeros. near: ranks of each node."""
    table = torch.zeros(len(counts), len(counts), 2, dtype=torch.int32)
    table[:, rank, 0] = torch.tensor(counts)
    constants = (tl.constexpr(value) for value in (near, len(counts) * channels, 0, "p2p"))
    words = torch.zeros(256, dtype=torch.int32)
    channel = tiles.Channel(rank % near, *constants, 0, words, torch.zeros(8, dtype=torch.int64), words, words, words)
    block_channel = mock.Mock(rank=rank % near, world_size=near, launch=tiles.Launches(), open_side_streams=set())
    block_channel.side_stream.return_value = None
    mapping = tiles.shard_tiles(4, len(counts), 1, channels=channels, fixed=True)
    return Arrivals(rows, block_channel, channel, mapping, 4, table, None, rank=rank)


def compare_products():
    """Which products in the order of arrival, in one node and in two, have the bits of those expert by expert."""
    sizes, padding, counts = [5, 0, 33, 16, 1], 20, [20, 15]
    config, offsets, total = GroupedConfig(BLOCKS, is_flattened=True), make_offsets(sizes), sum(sizes)
    generator = torch.Generator().manual_seed(SEED)
    places = [torch.randperm(sum(counts), generator=generator)[:size].sort().values for size in sizes]
    places = torch.cat([*places, torch.full((padding,), 1 << 30)]).to(torch.int32)  # of padding, is not read
    x, wide, gate_up, down = (
        draw(SEED + number, *shape).bfloat16() / 2
        for number, shape in enumerate(((35, 24), (5, 40, 24), (5, 48, 24), (5, 24, 24)))
    )
    factors, same = draw(SEED, total + padding).float(), []
    for rank in range(2):
        found = []
        for arrivals in (None, arrive_all(x, counts, rank, near=2 - rank)):
            if arrivals is not None:  # the first product's, before all know how many places there are
                arrivals.find_order(torch.nn.functional.pad(places, (0, 64), value=1 << 30), offsets, BLOCKS.m)
            results = [multiply(config, x, each, offsets, places, arrivals) for each in (wide, wide.mT.contiguous().mT)]
            gated, inner = multiply_gated(config, x, gate_up, offsets, places, arrivals=arrivals)
            gradient = differentiate_gate(config, x, down, offsets, inner, places, factors, arrivals)
            results += [gated, gradient.inner]
            found.append([*results, inner[:total], gradient.activated[:total], gradient.products[:, :total]])
        same.append([torch.equal(*pair) for pair in zip(*found, strict=True)])
    return same


@pytest.mark.long
def test_products_in_the_order_of_arrival_have_the_same_bits(interpret):
    assert interpret(1, compare_products) == [[[True] * 7] * 2]


def multiply_while_rows_arrive(is_fixed):
    """Whether products of tokens on their way, one rank's of which come late, have the bits of those that are there."""
    case, rank, group = Case((9, 7, 40), 2, 6), dist.get_rank(), dist.group.WORLD
    tokens = [16] * 3 if is_fixed else case.tokens
    layer = make_layer(SEED, sum(tokens), case.k, case.experts, hidden=24)
    x, ids, weights = (part(one, tokens, rank).clone() for one in (layer.x.bfloat16(), layer.ids, layer.weights))
    weight, config = draw(SEED + 1, 2, 40, 24).bfloat16(), GroupedConfig(BLOCKS)
    options = {"max_rows": 100 if is_fixed else None, "implementation": "kernel"}
    places = find_places(x, ids, weights, case.experts, group, **options)
    push, same = kernel_route.GivenRows, []

    def push_late(*arguments):
        time.sleep(0.5 if rank == 1 else 0)
        return push(*arguments)

    for turn in range(4):  # of two slots each is used twice
        numbers, offsets = places.index.places, places.index.offsets
        with mock.patch.object(kernel_route, "GivenRows", push_late):
            kept, arrivals = places.start(x * (turn + 1))
            found = multiply(config, arrivals.rows, weight, offsets, numbers, arrivals)
        arrivals.wait()
        sent = places.route.send(lambda: x * (turn + 1), call)  # noqa: B023
        count = int(places.route.table[-1, rank, 0])
        right = multiply(config, kept, weight, offsets, numbers)
        same += [torch.equal(kept[:count], sent[:count]), torch.equal(found, right)]
        dist.barrier(group)
        arrivals.rows.fill_(torch.nan)
        dist.barrier(group)
    return same


@pytest.mark.long
@pytest.mark.parametrize("is_fixed", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_products_wait_for_the_rows_that_they_need(interpret, is_fixed):
    assert interpret(3, multiply_while_rows_arrive, is_fixed) == [[True] * 8] * 3


def return_in_parts():
    """Whether columns of experts' rows that return while the others are multiplied have the bits of all at once."""
    rank, group, generator = dist.get_rank(), dist.group.WORLD, torch.Generator().manual_seed(SEED + dist.get_rank())
    ids, weights = torch.rand(20, 4, generator=generator).topk(2).indices, draw(SEED + rank, 20, 2).float()
    x, weight = draw(SEED + 2 + rank, 20, 16).bfloat16(), draw(SEED + rank, 2, 40, 16).bfloat16()
    places = find_places(x, ids, weights, 4, group, implementation="kernel")
    sent, numbers = places.route.send(lambda: x, call), places.index.places
    config, parts = GroupedConfig(BLOCKS, is_flattened=True), []

    rows = sent[numbers.long()]

    def product(rows, of_part, offsets, room=0):
        parts.append((of_part.shape[1], room))
        return multiply(config, rows, of_part.contiguous(), offsets)

    everyones = places.send_weights(weights)
    side = mock.MagicMock()
    divides = {"_LEAST_COLUMNS": 16, "_LEAST_NUMBERS": 0, "_LEAST_OF_PART": 1, "SideStream": lambda _: side}
    with mock.patch.object(module_of_places, "grouped_matmul", product):
        whole = places.multiply_and_give_back(lambda: rows, weight, everyones)
        with mock.patch.multiple(module_of_places, **divides), mock.patch.object(Places, "room", 22):
            divided = places.multiply_and_give_back(lambda: rows, weight, everyones)
    assert parts == [(40, 0), (32, 0), (8, 22)]
    assert [name for name, *_ in side.mock_calls] == ["open", "__enter__", "__exit__"] * 2 + ["join"]
    return torch.equal(whole, divided)


def test_columns_of_sums_return_while_others_are_multiplied(interpret):
    assert interpret(2, return_in_parts) == [True] * 2


def launch_in_order(kind):
    """A launch of a product of this kind that waits for rows: kernel, arguments and options."""
    launches = []
    tables = torch.zeros(6, 64, dtype=torch.int32).unbind(0)
    order = TileOrder(tiles.look_up_tiles(*tables[:5]), tables[5], *torch.zeros(2, 4, dtype=torch.int32), 128)
    arrivals = mock.Mock(spec=Arrivals, channel=make_channel("p2p"), counters=None, constants=(32, 256))
    arrivals.order.return_value = order
    arrivals.run = lambda kernel, key, programs, arguments, options: launches.append((kernel, arguments, options))
    launch(kind, by_tokens=True, arrivals=arrivals)
    return launches[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["product", "gate", "gate gradient"])
def test_kernels_that_wait_are_compiled_to_pipelined_loops_without_spills(kind, tmp_path):
    from stretto.tiles.compile_only import compile_kernel, count_shared_bytes

    kernel, arguments, options = launch_in_order(kind)
    forms = compile_kernel(kernel, arguments, options, "sm_90")
    lines = Ptx(line.strip() for line in forms["ptx"].splitlines())
    lines.cubin = forms["cubin"]
    assert re.search(r"wgmma\.mma_async\S*\.m64n(128|256)k16", forms["ptx"])
    copies = [number for number, line in enumerate(lines) if re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", line)]
    assert copies
    looks = [number for number, line in enumerate(lines) if re.search(ACQUIRE, line)]
    assert len(looks) > 1
    assert looks[0] < copies[0]
    assert find_spills(lines, tmp_path) == 0
    assert count_shared_bytes(kernel, arguments, options, "sm_90") <= 227 << 10
