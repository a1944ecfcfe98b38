# SPDX-License-Identifier: Apache-2.0
"""The order in which a grouped product takes its tiles, when rows arrive while it runs, or leave.

Which rows a tile has, of which rank, and by which signals they come follows from the routing, so that a kernel fills
TileLink's dynamic mapping (section 4.1: f_S, f_R and f_C as tables) at run time: tiles of own rows first, then of the
next rank's, and so on, and among them expert after expert. Backward, it is the order in which results leave: those of
the farthest rank first, and own ones last.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import limit_waiting
from stretto.tiles.call_state import HEADER
from stretto.tiles.intrinsics import INTERPRETED, opaque_zero, read_acquire
from stretto.tiles.launches import launch_cached
from stretto.tiles.waits import OF_CONSUMER, wait_until

_TABLES = 6  # rows (two), rank and channels (two) of the mapping, and experts
_TILES = tl.constexpr(32)  # of an expert, that a program writes at once
_MANY_EXPERTS = 64  # up to so many, one compiled kernel is for any number
_WARPS = 8  # of kernels that call `await_channels`: no more, so that each lane is one thread's


@dataclass(frozen=True)
class TileOrder:
    """Row tiles of a grouped product, in order.

    mapping: tile t has rows f_S of expert experts[t]; f_R is the farthest rank that they come from (ranks are as far as
    this rank's next ones follow it), and f_C the range of channels that signal them, of all ranks' one after
    another. ends: int32 [ranks], how many tiles have rows of ranks up to each distance. claimed: int32 [1], 0, of one
    product's programs. block_rows: of a tile, at most.
    """

    mapping: tiles.DynamicMapping
    experts: Tensor
    ends: Tensor
    claimed: Tensor
    block_rows: int


class Arrivals:
    """Rows of places that are on their way to this rank, for products of experts that gather them by index.

    rows: [places, h], the staging buffer to which they are pushed. block_channel, channel: of the call of `push_rows`
    that sends them, by `mapping`, in parts of a multiple of part_rows rows. table: int32 [., destination, 2], of each
    source first the number of places. sent: what must not be freed before all rows have been pushed. counters: of
    `await_channels`. rank: this one's among the table's; default: among the channel's. copies: functions that copy the
    rows, called once when all have arrived. Nothing else is called on the group before `run` or `wait`.
    """

    def __init__(
        self,
        rows: Tensor,
        block_channel: tiles.BlockChannel,
        channel: tiles.Channel,
        mapping: tiles.StaticMapping,
        part_rows: int,
        table: Tensor,
        sent: Any,
        counters: Tensor | None = None,
        rank: int | None = None,
    ) -> None:
        self.rows, self.channel, self.counters = rows, channel, counters
        channels, ranks = mapping.channels.value, table.shape[1]
        # Between nodes the channel has fewer ranks, which then have the other nodes' channels, too.
        near = channels * ranks // block_channel.world_size
        self.constants = near, max(triton.next_power_of_2(ranks * channels), 32 * _WARPS)
        self._rank = block_channel.rank if rank is None else rank
        self._sizes = {"channels": channels, "parts": mapping.rows.value, "part_rows": part_rows}
        self._block_channel, self._table, self._sent = block_channel, table, sent
        self._are_here = False
        self._order: TileOrder | None = None
        self.copies: list[Callable[[], object]] = []

    def order(self, places: Tensor, offsets: Tensor, block_rows: int) -> TileOrder:
        """Take the order that `find_order` has found, or find it now. places: int32 [n], each row's place."""
        if self._order is None or self._order.block_rows != block_rows:
            self.find_order(places, offsets, block_rows)
        order, self._order = self._order, None  # one product's
        assert order is not None
        return order

    def find_order(self, places: Tensor, offsets: Tensor, block_rows: int) -> None:
        """Find the order of tiles of so many rows now. More places may lie behind the last expert's rows."""
        self._order = find_tile_order(places, offsets, self._table, self._rank, block_rows=block_rows, **self._sizes)

    def run(
        self, kernel: Any, key: Hashable, programs: int, arguments: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        """Launch a persistent kernel whose programs claim work, and wait for rows: beside the exchange, and after it.

        Some programs run beside the exchange, on as many multiprocessors as may wait (`limit_waiting`), and leave it
        the others, so that rows are pushed whichever kernel begins first. The other programs wait for nothing: on the
        exchange's side stream, they follow the arrival of all rows, and the copies of them, for which a few
        multiprocessors suffice. programs: as many as there are multiprocessors.
        """
        launch, device = self._block_channel.launch, self.rows.device
        beside = programs if device.type != "cuda" else limit_waiting(programs, device) - 1  # one waits for all rows
        if device.type == "cuda":
            tiles.open_side_stream(self._block_channel, 0)  # after what the kernel needs, such as the order of tiles
        if beside > 0:
            launch(kernel, key, beside, arguments, **options)
        with tiles.copy_engine(self._block_channel, forks=False):
            self._await()
            self._copy()
            if programs > beside:
                launch(kernel, key, programs - max(beside, 0), arguments, **options)
        self._join()

    def wait(self) -> None:
        """Make the current stream wait until all rows are there."""
        if not self._are_here:
            with tiles.copy_engine(self._block_channel, forks=False):
                self._await()
            self._join()
        self._copy()

    def drop(self) -> None:
        """Give up what arrives: the current stream waits until this rank's rows have left, and for nothing else."""
        self._join()

    def copy_to(self, memory: Tensor) -> None:
        """Have the rows, of which the group's next call overwrites the buffer, copied to memory that nobody has read.

        Autograd may have saved it: this is no new version of it.
        """
        self.copies.append(lambda: memory.data.copy_(self.rows[: len(memory)]))

    def _copy(self) -> None:
        while self.copies:
            self.copies.pop(0)()

    def _await(self) -> None:
        key, arguments = (tiles.kind_of(self.counters), *self.constants), (self.channel, self.counters, *self.constants)
        self._block_channel.launch(await_all_channels, key, 1, arguments, num_warps=_WARPS)

    def _join(self) -> None:
        tiles.join_copies(self._block_channel)
        self._are_here, self._sent = True, None


def find_tile_order(
    places: Tensor,
    offsets: Tensor,
    table: Tensor,
    rank: int,
    *,
    channels: int,
    parts: int,
    part_rows: int,
    block_rows: int,
) -> TileOrder:
    """Find the order of the row tiles of experts' rows. places: int32 [n], each row's place.

    offsets: int32 [experts + 1]. table: int32 [., destination, 2], of each source first the number of places, which are
    in the order of their sources. A source's places come in `parts` parts of a multiple of part_rows rows each, which
    so many channels signal. block_rows: of a tile. Nothing waits for the device.
    """
    world, experts, n = table.shape[1], offsets.shape[0] - 1, places.shape[0]
    capacity = triton.cdiv(n // block_rows + experts, 4) * 4  # tables begin at multiples of 16 bytes
    tables = torch.empty(_TABLES * capacity + world + 1, dtype=torch.int32, device=places.device)
    with torch.cuda.device_of(places):
        launch_cached(
            fill_tile_tables, experts, places, offsets.contiguous(), table, tables, rank, capacity,
            EXPERTS=max(triton.next_power_of_2(experts), _MANY_EXPERTS), WORLD=world, CHANNELS=channels, PARTS=parts,
            PART_ROWS=part_rows, BLOCK_ROWS=block_rows, num_warps=4,
        )  # fmt: skip
    *mapped, of_experts, ends, claimed = tables.split([capacity] * _TABLES + [world, 1])
    return TileOrder(tiles.look_up_tiles(*mapped), of_experts, ends, claimed, block_rows)


@triton.jit(do_not_specialize=["rank", "capacity"])
def fill_tile_tables(  # type: ignore[no-untyped-def]
    places, offsets, table, tables, rank, capacity, EXPERTS: tl.constexpr, WORLD: tl.constexpr, CHANNELS: tl.constexpr,
    PARTS: tl.constexpr, PART_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write tables int32 [6, capacity] of `TileOrder`, then ends, then 0: each program those of one expert's tiles.

    An expert's rows are in the order of their sources, so its tiles that wait for the same rank follow each other, from
    where that source's rows begin. A tile with rows of sources before this rank and from it on waits for a rank before
    it, as those are farther.
    Synchronization: none: each program finds the numbers of all experts' tiles by itself.
    """
    expert = tl.program_id(0)
    experts, most = tl.num_programs(0), capacity * BLOCK_ROWS
    source, at = tl.arange(0, triton.next_power_of_2(WORLD)), tl.arange(0, EXPERTS)
    count = tl.load(table + (source * WORLD + rank) * 2, mask=source < WORLD, other=0)
    after = tl.cumsum(count, 0)
    begins = tl.load(offsets + at, mask=at < experts, other=0)
    rows = tl.load(offsets + at + 1, mask=at < experts, other=0) - begins
    # One search for where each source's rows begin and end, as its loads depend on each other.
    bounds = tl.join(after - count, after)[None, :, :]
    found = _count_before(places, begins[:, None, None], rows[:, None, None], bounds, most)  # [experts, sources, 2]
    first, last = tl.split(found)
    rows = rows[:, None]
    own_tile = tl.cdiv(tl.sum(tl.where((source == rank)[None, :], first, 0), 1), BLOCK_ROWS)[:, None]
    first = _find_tile(first, rows, source[None, :], rank, own_tile, BLOCK_ROWS)
    last = _find_tile(last, rows, source[None, :] + 1, rank, own_tile, BLOCK_ROWS)
    tiles_of = tl.where((source < WORLD)[None, :], last - first, 0)
    distance = tl.where(source < WORLD, (source - rank + WORLD) % WORLD, WORLD)
    total = tl.sum(tiles_of, 0)
    nearer = tl.sum(tl.where(distance[:, None] < distance[None, :], total[:, None], 0), 0)
    if expert == 0:
        tl.store(tables + 6 * capacity + distance, nearer + total, mask=source < WORLD)
        tl.store(tables + 6 * capacity + WORLD, 0)
    is_mine = (at == expert)[:, None]
    start = nearer + tl.sum(tl.where((at < expert)[:, None], tiles_of, 0), 0)  # the first of mine, of each source
    first = tl.sum(tl.where(is_mine, first, 0), 0)
    last = tl.sum(tl.where(is_mine, last, 0), 0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    row_tiles = tl.cdiv(end - begin, BLOCK_ROWS)
    for at_tile in range(0, row_tiles, _TILES):
        tile = at_tile + tl.arange(0, _TILES)
        is_tile = tile < row_tiles
        waits = (tile[:, None] >= first[None, :]) & (tile[:, None] < last[None, :]) & (source < WORLD)[None, :]
        place = tables + tile + tl.sum(tl.where(waits, (start - first)[None, :], 0), 1)
        low = begin + tile * BLOCK_ROWS
        high = tl.minimum(low + BLOCK_ROWS, end)
        first_place = tl.load(places + low, mask=is_tile, other=0)
        last_place = tl.load(places + high - 1, mask=is_tile, other=0)
        first_channel = _find_channel(first_place, after, count, CHANNELS, PARTS, PART_ROWS)
        last_channel = _find_channel(last_place, after, count, CHANNELS, PARTS, PART_ROWS)
        tl.store(place, low, mask=is_tile)
        tl.store(place + capacity, high, mask=is_tile)
        tl.store(place + 2 * capacity, tl.sum(tl.where(waits, source[None, :], 0), 1), mask=is_tile)
        tl.store(place + 3 * capacity, first_channel, mask=is_tile)
        tl.store(place + 4 * capacity, last_channel + 1, mask=is_tile)
        tl.store(place + 5 * capacity, tile * 0 + expert, mask=is_tile)


@triton.jit
def _count_before(places, begins, rows, bound, most):  # type: ignore[no-untyped-def]
    """Count each expert's rows, `most` or fewer, whose places are below a bound, by binary search."""
    low = begins + bound * 0
    high = low + rows
    while most > 0:
        middle = (low + high) // 2
        place = tl.load(places + middle, mask=low < high, other=0)
        is_below = (low < high) & (place < bound)
        high = tl.where((low < high) & (place >= bound), middle, high)
        low = tl.where(is_below, middle + 1, low)
        most = most // 2
    return low - begins


@triton.jit
def _find_tile(row, rows, source, rank, own_tile, BLOCK_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first of an expert's tiles that waits for `source` or a later one, whose rows begin at its `row`."""
    tile = tl.where(row < rows, row // BLOCK_ROWS, tl.cdiv(rows, BLOCK_ROWS))
    return tl.where(source == rank, own_tile, tl.where(source > rank, tl.maximum(tile, own_tile), tile))


@triton.jit
def _find_channel(  # type: ignore[no-untyped-def]
    place, after, count, CHANNELS: tl.constexpr, PARTS: tl.constexpr, PART_ROWS: tl.constexpr
):
    """The channel, of all sources', that signals each place [.]; after: where each source's places end."""
    comes_before = after[None, :] <= place[:, None]
    is_source = (after - count)[None, :] <= place[:, None]
    source = tl.sum(comes_before.to(tl.int32), 1)
    within = place - tl.sum(tl.where(comes_before, count[None, :], 0), 1)
    own_count = tl.sum(tl.where(is_source & (comes_before == 0), count[None, :], 0), 1)
    part_rows = tl.maximum(tl.cdiv(tl.cdiv(own_count, PARTS), PART_ROWS) * PART_ROWS, 1)
    return source * CHANNELS + within // (part_rows * ((PARTS + CHANNELS - 1) // CHANNELS))


@triton.jit
def await_channels(channel, counters, low, high, CHANNELS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the rows of channels `low` to `high` - 1, of all sources' CHANNELS each, have arrived ("p2p").

    counters: int32 [world * CHANNELS], the counter of each channel among all of this rank, where rows come from another
    rank than their source; None for each source's own. Between nodes these are the channels of all their ranks.

    Returns (an int32 0 to add to the offset of what is loaded after, whether all rows of all sources have arrived).
    LANES: a power of two, at least the channels of all and the program's threads. One look reads all signals at once.
    Order: what is loaded through the zero, after the stores before the signals: each thread reads its signals with
    acquire at system scope, and the sum over threads that makes the zero has a barrier of the block.
    """
    lane = tl.arange(0, LANES)
    is_channel = lane < channel.world * CHANNELS
    if counters is None:
        counter = lane // CHANNELS * channel.capacity + channel.rank * CHANNELS + lane % CHANNELS
    else:
        counter = tl.load(counters + lane, mask=is_channel, other=0)
    target = tl.load(channel.state + HEADER + counter, mask=is_channel, other=0)
    if INTERPRETED:
        seen = tl.atomic_add(channel.signals + counter, 0, mask=is_channel, sem="acquire", scope="sys")
    else:
        seen = read_acquire(channel.signals + tl.where(is_channel, counter, 0))
    is_late = is_channel & ((seen.to(tl.int64) - target.to(tl.int64)).to(tl.int32) < 0)
    ready = tl.sum(opaque_zero(seen, False) + lane * 0, 0)
    has_all = tl.sum(is_late.to(tl.int32), 0) == 0
    late = tl.max(tl.where(is_late & (lane >= low) & (lane < high), lane, -1), 0)
    while late >= 0:
        if counters is None:
            word = late // CHANNELS * channel.capacity + channel.rank * CHANNELS + late % CHANNELS
        else:
            word = tl.load(counters + late)
        source, index = word // channel.capacity, word % channel.capacity
        ready += wait_until(
            channel, word, tl.load(channel.state + HEADER + word), OF_CONSUMER, index, index, source, False
        )
        late = tl.max(tl.where(is_late & (lane >= low) & (lane < late), lane, -1), 0)
    return ready, has_all


@triton.jit
def await_all_channels(channel, counters, CHANNELS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: what follows it on its stream comes after all rows of all sources have arrived."""
    await_channels(channel, counters, 0, channel.world * CHANNELS, CHANNELS, LANES)
