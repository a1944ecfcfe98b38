# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of the tile primitives: every form of notify, wait and data transfer, on device and host."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tests.stress import tile_kernels as kernels
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles

FAMILY = "tiles"
BEGIN = "tiles.calls.begin_call"
ENTRIES = 6
_LARGEST = 1 << 20  # of the numbers that are sent
_WARPS = 4
_MIN_NUMBERS = 2048


class TileCase(StressCase):
    """Calls that move every rank's x [rows, columns] int32, in tiles.

    A subclass makes the results of one input, and calls the kernels. slots: number of buffers of each rank that
    calls use in turn, each of `numbers` int32 numbers.
    """

    entries = ENTRIES
    peer_tiles = 0

    def __init__(self, team: Team) -> None:
        self.team = team
        self.rows, self.columns, self.tile_rows = (64, 128, 16) if team.is_cuda else (8, 16, 4)
        self.world, self.rank = team.world, team.rank
        self.numbers = self.world * max(self.rows * self.columns, _MIN_NUMBERS)
        self.channels = 2
        self.producer = tiles.shard_tiles(self.rows, self.world, self.tile_rows, channels=self.channels)
        self.own_tiles = self.rows // self.tile_rows
        self.channel = tiles.BlockChannel.allocate(
            team.group,
            channels=self.channels * self.world,
            peer_tiles=self.peer_tiles,
            data_bytes=2 * 4 * self.numbers,
            backend="cuda" if team.is_cuda else "host",
        )
        self.slot_cycle = itertools.cycle(range(2))
        self.inputs = [self.make_input(entry) for entry in range(ENTRIES)]
        self.expected = [self.expect(entry) for entry in range(ENTRIES)]

    def draw(self, entry: int, peer: int) -> Tensor:
        """The input of a rank, int32 [rows, columns]."""
        shape = (self.rows, self.columns)
        return self.team.integers(shape, entry, peer, low=-_LARGEST, high=_LARGEST).int()

    def make_input(self, entry: int) -> Tensor:
        return self.draw(entry, self.rank)

    def expect(self, entry: int) -> Tensor:
        """The expected result: by default all ranks' inputs in rank order."""
        return torch.cat([self.draw(entry, peer) for peer in range(self.world)])

    def buffer(self, *shape: int, slot: int = 0, rank: int | None = None) -> Tensor:
        """This rank's symmetric memory, or another rank's, from the beginning of a slot."""
        return self.channel.tensor(shape, torch.int32, offset=slot * 4 * self.numbers, rank=rank)

    def make_output(self) -> Tensor:
        """Allocate an output in the shape of the result."""
        return torch.empty_like(self.expected[0])

    def begin(self, mode: str, slot: int | None = None, *, by_copies: bool = False) -> tiles.Channel:
        """Begin a call of static mappings."""
        return self.channel.begin("stress", self.producer, self.producer, mode, slot=slot, by_copies=by_copies)

    def run(self, x: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def call(self, entry: int) -> Sequence[Check]:
        out = self.make_output()
        self.run(self.inputs[entry], out)
        return [Check(out, self.expected[entry])]

    def poison(self) -> None:
        self.buffer(2 * self.numbers).fill_(-1)

    def check(self) -> None:
        self.channel.check()


class PushCase(TileCase):
    """One kernel pushes tiles to all ranks, another reads them. has_slots: no wait for ranks one call behind."""

    def __init__(self, team: Team, *, has_slots: bool) -> None:
        self._has_slots = has_slots
        super().__init__(team)

    def run(self, x: Tensor, out: Tensor) -> None:
        slot = next(self.slot_cycle) if self._has_slots else 0
        channel = self.begin("broadcast", slot if self._has_slots else None)
        gathered = self.buffer(*out.shape, slot=slot)
        kernels.push_tiles[(2,)](channel, self.producer, x, gathered, BLOCK=self.columns, num_warps=_WARPS)
        grid = (self.own_tiles * self.world,)
        kernels.copy_tiles[grid](channel, self.producer, gathered, out, BLOCK=self.columns, num_warps=_WARPS)


class EnteredCase(TileCase):
    """One kernel begins the call, pushes tiles, waits for them and ends it."""

    def run(self, x: Tensor, out: Tensor) -> None:
        channel = self.channel.enter("stress", "broadcast")
        kernels.gather_by_one_kernel[(3,)](
            channel, self.producer, x, self.buffer(2 * self.numbers), self.numbers, out, BLOCK=self.columns,
            num_warps=_WARPS,
        )  # fmt: skip


class PullCase(TileCase):
    """A kernel pulls tiles from their owners' memory, which was written before the call began."""

    def run(self, x: Tensor, out: Tensor) -> None:
        buffer = self.buffer(*x.shape, slot=next(self.slot_cycle))  # others may still read the slot of the call before
        buffer.copy_(x)
        channel = self.begin("local")
        gathered = torch.empty_like(out)
        kernels.pull_tiles[(3,)](channel, self.producer, buffer, gathered, BLOCK=self.columns, num_warps=_WARPS)
        grid = (self.own_tiles * self.world,)
        kernels.copy_tiles[grid](channel, self.producer, gathered, out, BLOCK=self.columns, num_warps=_WARPS)


class TileScatterCase(TileCase):
    """A kernel pushes tiles to their owners, which add them up as they arrive."""

    def make_input(self, entry: int) -> Tensor:
        """The input of a rank, [world * rows, columns]: a part for each rank."""
        return self._draw_all(entry, self.rank)

    def _draw_all(self, entry: int, source: int) -> Tensor:
        return torch.cat([self.draw(100 * entry + source, peer) for peer in range(self.world)])

    def expect(self, entry: int) -> Tensor:
        parts = [self._draw_all(entry, source).view(self.world, self.rows, -1) for source in range(self.world)]
        return torch.stack(parts)[:, self.rank].sum(0).int()

    def run(self, x: Tensor, out: Tensor) -> None:
        channel = self.begin("p2p")
        staging = self.buffer(self.world, *out.shape)
        kernels.scatter_tiles[(3,)](channel, self.producer, x, staging, BLOCK=self.columns, num_warps=_WARPS)
        grid = (self.own_tiles,)
        kernels.add_tiles[grid](channel, self.producer, staging, out, BLOCK=self.columns, num_warps=_WARPS)


class RoutedCase(TileCase):
    """Tables route tiles: tile t of rank r is sent to rank (t + r) modulo world; the caller passes the counts."""

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        world, rank, rows = self.world, self.rank, self.tile_rows

        def table(*numbers: int) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=team.device)

        zeros, ones = table(*[0] * world), table(*[1] * world)
        starts = [tile * rows for tile in range(world)]
        ends = [start + rows for start in starts]
        targets = [(tile + rank) % world for tile in range(world)]
        self._sent = tiles.look_up_tiles(table(*starts), table(*ends), table(*targets), zeros, ones)
        self._taken = tiles.look_up_tiles(table(0), table(world * rows), table(world), table(0), table(1))
        self._counts = torch.zeros(2, world, self.channels * world, dtype=torch.int32, device=team.device)
        self._counts[:, :, 0] = 1

    def make_input(self, entry: int) -> Tensor:
        """The input of a rank, [world * tile rows, columns]: a tile for each rank."""
        return self._draw_all(entry, self.rank)

    def _draw_all(self, entry: int, source: int) -> Tensor:
        return torch.cat([self.draw(100 * entry + source, tile)[: self.tile_rows] for tile in range(self.world)])

    def expect(self, entry: int) -> Tensor:
        parts = []
        for source in range(self.world):
            tile = (self.rank - source) % self.world
            parts.append(self._draw_all(entry, source).view(self.world, self.tile_rows, -1)[tile])
        return torch.cat(parts)

    def run(self, x: Tensor, out: Tensor) -> None:
        channel = self.channel.begin("stress", self._sent, self._taken, "p2p", counts=self._counts)
        buffer = self.buffer(*out.shape)
        grid, sizes = (self.world,), {"ROWS": self.tile_rows, "BLOCK": self.columns, "num_warps": _WARPS}
        kernels.route_tiles[grid](channel, self._sent, x, buffer, **sizes)
        kernels.take_routed[grid](channel, self._taken, buffer, out, **sizes)


class RingCase(TileCase):
    """A ring all-reduce, by tiles between peers."""

    peer_tiles = 64

    def expect(self, entry: int) -> Tensor:
        return torch.stack([self.draw(entry, peer) for peer in range(self.world)]).sum(0).int()[0]

    def run(self, x: Tensor, out: Tensor) -> None:
        channel = self.begin("p2p")
        buffer = self.buffer(self.world, self.columns)
        kernels.pass_around[(1,)](channel, x, buffer, out, BLOCK=self.columns, num_warps=1)


class ExchangeCase(TileCase):
    """Every rank sends its row to all, signalled by one tile between peers; one kernel begins and ends the call."""

    peer_tiles = 1

    def expect(self, entry: int) -> Tensor:
        return torch.stack([self.draw(entry, peer)[0] for peer in range(self.world)])

    def run(self, x: Tensor, out: Tensor) -> None:
        channel = self.channel.enter("stress", "p2p")
        kernels.exchange_all[(1,)](
            channel, x, self.buffer(2 * self.numbers), self.numbers, out, BLOCK=self.columns, num_warps=_WARPS
        )


class PacketCase(TileCase):
    """Every rank sends its rows to all as packets."""

    def __init__(self, team: Team, *, packet_rows: int) -> None:
        self._packet_rows = packet_rows
        super().__init__(team)

    def expect(self, entry: int) -> Tensor:
        return torch.stack([self.draw(entry, peer)[: self._packet_rows] for peer in range(self.world)])

    def draw(self, entry: int, peer: int) -> Tensor:
        """A quarter of the numbers are 0, which packets carry as something else."""
        shape = (self.rows, self.columns)
        return self.team.integers(shape, entry, peer, low=-_LARGEST, high=_LARGEST, density=0.75).int()

    def run(self, x: Tensor, out: Tensor) -> None:
        channel = self.channel.enter("stress", "p2p")
        packets = self.buffer(2 * self.numbers)
        kernels.exchange_packets[(self.world,)](
            channel, x, packets, self.numbers, out, ROWS=self._packet_rows, BLOCK=self.columns, num_warps=_WARPS
        )

    def poison(self) -> None:
        """Check that the packets' memory is empty, as it must be between calls."""
        require_empty(self.buffer(2 * self.numbers))


class PacketSumCase(TileCase):
    """An all-reduce of numbers that travel as packets."""

    def __init__(self, team: Team, *, dtype: torch.dtype, chunk: int, in_fours: bool) -> None:
        self._dtype, self._chunk, self._in_fours = dtype, chunk, in_fours
        self._programs = 6 if team.is_cuda else 2
        super().__init__(team)

    def draw(self, entry: int, peer: int) -> Tensor:
        count = self._programs * self._chunk * 4 // self._dtype.itemsize
        return self.team.integers((count,), entry, peer, low=-15, high=15).to(self._dtype)

    def expect(self, entry: int) -> Tensor:
        return torch.stack([self.draw(entry, peer) for peer in range(self.world)]).sum(0)

    def run(self, x: Tensor, out: Tensor) -> None:
        channel = self.channel.enter("stress", "p2p")
        kernels.sum_by_packets[(self._programs,)](
            channel, x, self.buffer(2 * self.numbers), self.numbers, out, FOURS=self._in_fours, CHUNK=self._chunk,
            num_warps=min(_WARPS, self._chunk // 32),  # each packet is loaded by one thread
        )  # fmt: skip

    def poison(self) -> None:
        """Check that the packets' memory is empty, as it must be between calls."""
        require_empty(self.buffer(2 * self.numbers))


class CopyCase(TileCase):
    """Copy engines push rows and signal them; a kernel's tiles or the stream waits, for one rank or for all.

    begins: copies signal that calls begin, too.
    """

    def __init__(self, team: Team, *, waits: str, begins: bool = False) -> None:
        self._waits, self._begins = waits, begins
        super().__init__(team)

    def run(self, x: Tensor, out: Tensor) -> None:
        channel, slot = self.channel, next(self.slot_cycle)
        begun = self.begin("broadcast", slot, by_copies=self._begins)
        gathered = self.buffer(*out.shape, slot=slot)
        own = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
        gathered[own].copy_(x)
        for index in range(self.channels):
            tiles.rank_notify(channel, self.rank * self.channels + index, self.rank)
        with tiles.copy_engine(channel):
            for distance in range(1, self.world):
                self._push(x, (self.rank - distance) % self.world, slot)
            self._await()
            if self._waits != "kernel":
                tiles.rank_copy_data(out, gathered)
        if self._waits == "kernel":
            grid = (self.own_tiles * self.world,)
            kernels.copy_tiles[grid](begun, self.producer, gathered, out, BLOCK=self.columns, num_warps=_WARPS)
        tiles.join_copies(channel)

    def _push(self, x: Tensor, peer: int, slot: int) -> None:
        there = self.buffer(self.world * self.rows, self.columns, slot=slot, rank=peer)
        step = self.rows // self.channels
        for index in range(self.channels):
            rows = slice(index * step, (index + 1) * step)
            tiles.rank_copy_data(there, x, rows=rows, to=self.rank * self.rows + rows.start)
            tiles.rank_notify(self.channel, self.rank * self.channels + index, peer)

    def _await(self) -> None:
        """Wait on the stream; a rank's last signal covers all its rows."""
        last = self.channels - 1
        if self._waits == "all":
            tiles.rank_wait_all(self.channel, last, self.channels)
        elif self._waits == "each":
            for distance in range(1, self.world):
                peer = (self.rank + distance) % self.world
                tiles.rank_wait(self.channel, peer * self.channels + last, peer)


class DescriptorCase(TileCase):
    """TMA stores tiles before their signals, or loads tiles after a wait or a poll."""

    def __init__(self, team: Team, *, form: str) -> None:
        self._form = form
        super().__init__(team)

    def run(self, x: Tensor, out: Tensor) -> None:
        slot = next(self.slot_cycle)
        block = [self.tile_rows, self.columns]
        channel = self.begin("broadcast", None if self._form == "store" else slot)
        grid = (self.own_tiles * self.world,)
        if self._form == "store":
            buffer = self.buffer(*x.shape)
            source, target = (TensorDescriptor.from_tensor(one, block) for one in (x, buffer))
            kernels.store_by_descriptor[(self.own_tiles,)](
                channel, self.producer, source, target, ROWS=self.tile_rows, num_warps=_WARPS
            )
            kernels.pull_when_ready[grid](channel, self.producer, buffer, out, BLOCK=self.columns, num_warps=_WARPS)
            return
        gathered = self.buffer(*out.shape, slot=slot)
        source, target = (TensorDescriptor.from_tensor(one, block) for one in (gathered, out))
        kernels.push_tiles[(2,)](channel, self.producer, x, gathered, BLOCK=self.columns, num_warps=_WARPS)
        if self._form == "load":
            kernels.load_by_descriptor[grid](
                channel, self.producer, source, target, ROWS=self.tile_rows, num_warps=_WARPS
            )
        else:
            kernels.load_by_polls[(2,)](
                channel, self.producer, source, target, grid[0], ROWS=self.tile_rows, num_warps=_WARPS
            )


class CountedCase(TileCase):
    """A kernel's threads count stored tiles; the stream that copies them to peers waits for the count."""

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        self._counter = torch.zeros(1, dtype=torch.int32, device=team.device)
        self._threads = 32 * _WARPS if team.is_cuda else 1

    def run(self, x: Tensor, out: Tensor) -> None:
        channel, slot = self.channel, next(self.slot_cycle)
        begun = self.begin("broadcast", slot)
        gathered = self.buffer(*out.shape, slot=slot)
        own = slice(self.rank * self.rows, (self.rank + 1) * self.rows)
        stored = torch.empty_like(x)
        tiles.open_side_stream(channel, 0)
        kernels.store_and_count[(self.own_tiles,)](
            x, stored, self._counter, self._threads, ROWS=self.tile_rows, BLOCK=self.columns, num_warps=_WARPS
        )
        with tiles.copy_engine(channel, forks=False):
            tiles.rank_await_count(self._counter, 0, self.own_tiles * self._threads)
            for distance in range(self.world):
                peer = (self.rank - distance) % self.world
                there = self.buffer(*out.shape, slot=slot, rank=peer)
                tiles.rank_copy_data(there, stored, rows=slice(0, self.rows), to=own.start)
                for index in range(self.channels):
                    tiles.rank_notify(channel, self.rank * self.channels + index, peer)
            tiles.rank_reset_counts(self._counter, 1)
        tiles.join_copies(channel)
        grid = (self.own_tiles * self.world,)
        kernels.copy_tiles[grid](begun, self.producer, gathered, out, BLOCK=self.columns, num_warps=_WARPS)


def require_empty(packets: Tensor) -> None:
    """Raise AssertionError if packets were left in memory."""
    if packets.any():
        raise AssertionError("packets were left in memory that is empty between calls")


class PutCase(StressCase):
    """A kernel gathers shards by puts alone; with --nodes, 2x2 for example, between nodes, over sockets."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.entries = ENTRIES
        slot_bytes, self.words = (16384, 50_001) if team.is_cuda else (64, 90)
        self.channel = tiles.PutChannel.allocate(
            team.group, slots=3, slot_bytes=slot_bytes, backend="cuda" if team.is_cuda else "host"
        )
        drawn = [
            [
                team.integers((self.words,), entry, peer, low=-_LARGEST, high=_LARGEST).int()
                for peer in range(team.world)
            ]
            for entry in range(ENTRIES)
        ]
        self.inputs = [shards[team.rank] for shards in drawn]
        self.expected = [torch.stack(shards) for shards in drawn]

    def call(self, entry: int) -> Sequence[Check]:
        out = torch.full_like(self.expected[entry], -1)
        self.channel.all_gather(self.inputs[entry], out)
        return [Check(out, self.expected[entry])]

    def poison(self) -> None:
        self.channel.slot_memory().fill_(0xFF)

    def check(self) -> None:
        self.channel.check()


def list_configurations() -> list[Configuration]:
    bf16, fp32 = torch.bfloat16, torch.float32
    made: dict[str, tuple[str, tuple[str, ...], Callable[[Team], StressCase]]] = {
        "push": ("push, notify by broadcast, wait", (BEGIN,), partial(PushCase, has_slots=False)),
        "push-slots": ("the same in two slots", (BEGIN,), partial(PushCase, has_slots=True)),
        "push-entered": ("the same in one kernel: enter, claim, end_call", (), EnteredCase),
        "pull": ("pull, notify here, wait", (BEGIN,), PullCase),
        "scatter": ("push to an owner, notify it, wait for one source", (BEGIN,), TileScatterCase),
        "routed": ("mappings and counts by tables", (BEGIN,), RoutedCase),
        "peer-ring": ("tiles between two peers", (BEGIN,), RingCase),
        "peer-broadcast": ("a tile between all peers", (), ExchangeCase),
        "packets": ("several packets a thread", (), partial(PacketCase, packet_rows=4)),
        "packets-few": ("a packet a thread", (), partial(PacketCase, packet_rows=1)),
        "packet-sums": ("sums by packets, bf16", (), partial(PacketSumCase, dtype=bf16, chunk=128, in_fours=False)),
        "packet-sums-fours": ("four at a time", (), partial(PacketSumCase, dtype=bf16, chunk=256, in_fours=True)),
        "packet-sums-few": ("two warps, fp32", (), partial(PacketSumCase, dtype=fp32, chunk=64, in_fours=False)),
        "puts": ("slices by puts alone, through the proxy", ("tiles.puts.gather_slices",), PutCase),
        "copies": ("copy engines, whose signals a kernel awaits", (BEGIN,), partial(CopyCase, waits="kernel")),
        "copies-wait": (
            "the same, awaited by streams, rank by rank",
            (BEGIN, "tiles.signals.wait_for_channel"),
            partial(CopyCase, waits="each"),
        ),
        "copies-wait-all": (
            "the same, all ranks at once",
            (BEGIN, "tiles.signals.wait_for_all"),
            partial(CopyCase, waits="all"),
        ),
        "copies-begin": (
            "copies signal that a call begins, too",
            (BEGIN, "tiles.calls.await_beginning"),
            partial(CopyCase, waits="kernel", begins=True),
        ),
        "tma-store": ("stored by TMA, then signalled", (BEGIN,), partial(DescriptorCase, form="store")),
        "tma-load": ("waited for, then loaded by TMA", (BEGIN,), partial(DescriptorCase, form="load")),
        "tma-poll": ("polled for, then loaded by TMA", (BEGIN,), partial(DescriptorCase, form="poll")),
        "counted": ("threads count tiles for a stream", (BEGIN,), CountedCase),
    }
    return [
        Configuration(f"tiles/{name}", FAMILY, launched, covers, make, crosses_nodes=name == "puts")
        for name, (covers, launched, make) in made.items()
    ]
