# SPDX-License-Identifier: Apache-2.0
"""The look-up's exchange by a schedule: vectors are pooled here, move by any verified all-to-all, and are put in order.

    pool_alone      pools this rank's tables for the samples of each rank, and signals what is there
    move_rows       beside it, on a side stream: sends parts of others' vectors as they are pooled, passes others on
    collect         the vectors of all ranks, side by side

Every rank pools for every other one, and so knows how many rows it has for it: vectors lie one after another, those of
a table together, as rows of as many numbers as divide all ranks' columns, in memory of one slot. Its own go where they
would arrive. `begin_pooling` has received that all ranks have begun the call, and so have read what the last one left
there.
"""

import math
from itertools import chain, groupby
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import NCCL_BLOCKS, limit_waiting
from stretto.ops.choices import find_agreed
from stretto.ops.embedding.backward_kernel import begin_push
from stretto.ops.embedding.output_ring import CHANNELS, OutputRing, limit_channels
from stretto.ops.embedding.placement import EmbeddingPlacement
from stretto.ops.joint.launch import find_node_group, find_put_channel
from stretto.ops.joint.registry import name_between_nodes
from stretto.ops.joint.routed import (
    GivenRows,
    LandedRows,
    MadeRows,
    RoutedTables,
    find_routed,
    launch_moves,
    make_tables,
)
from stretto.ops.operator import find_group, require_agreement

_PARTS = 128  # of all ranks' rows
_TILE_BYTES, _TILE_ROWS, _BLOCK = 65536, 64, 1024  # as of the experts' exchange


class ScheduledMoves(NamedTuple):
    """Holds what all calls of a placement by one schedule share.

    table: int32 [source, target, 2], of which the first number says how many rows of `columns` numbers each rank has
    for each other one; gradients return as many. tile: rows and numbers that a program moves at once. landed: this
    rank's, in the ring's memory. puts: to ranks of other nodes; the ring is then of this node's ranks.
    """

    ring: OutputRing
    tables: RoutedTables
    table: Tensor
    columns: int
    tile: tuple[int, int]
    landed: LandedRows
    puts: tiles.PutChannel | None
    is_back: bool

    @classmethod
    def make(
        cls,
        group: str,
        device: torch.device,
        placement: EmbeddingPlacement,
        schedule: str,
        *,
        is_back: bool = False,
    ) -> "ScheduledMoves":
        """Make the group's; all ranks call it. ValueError for a schedule that is refused. is_back: of gradients."""
        world, rank, batch = placement.world_size, placement.rank, placement.local_batch
        nodes = find_agreed(group, device).nodes
        here = find_node_group(group, device, nodes) if nodes else group
        near = find_group(here).size()
        signals = limit_channels(near, CHANNELS) * near - world  # beside those of what is pooled
        routed = find_routed("embedding_all_to_all", schedule, world, signals)
        require_agreement(f"embedding_all_to_all by {schedule}", False, group, device)
        columns = math.gcd(*placement.widths)
        rows = [batch * width // columns for width in placement.widths]
        landed = max(rows) * world if is_back else sum(rows), routed.forwarded_pairs * max(rows)
        size = sum(landed) * columns * placement.dtype.itemsize
        name = f"{schedule} back" if is_back else schedule
        ring = OutputRing.find(here, device, size, rank=rank, of_schedule=name)
        block = min(triton.next_power_of_2(columns), _BLOCK)
        at_once = min(max(_TILE_BYTES // (block * placement.dtype.itemsize), 1), _TILE_ROWS)
        tile = at_once if device.type == "cuda" else 4, block
        spans = tuple(batch * dim for dim in placement.dims[rank])
        pooled = None if is_back else MadeRows(spans, batch, columns, tile[0])
        parts, channels = (max(CHANNELS, _PARTS // world), CHANNELS) if device.type == "cuda" else (4, 2)
        sizes = ring.channel.channels, parts, channels
        movers = max(_count_programs(device) // 2, 1) if nodes else 0
        tables = make_tables(routed, rank, *sizes, device, pooled, nodes=nodes, movers=movers)
        puts = find_put_channel(group, device, movers) if nodes else None
        table = (
            torch.tensor(rows, dtype=torch.int32, device="cpu")[:, None, None]
            .expand(world, world, 2)
            .contiguous()
            .to(device)
        )
        memory = ring.slots.view(placement.dtype)[: sum(landed) * columns].view(-1, columns)
        return cls(ring, tables, table, columns, tile, LandedRows(memory, *landed), puts, is_back)

    def launch(self, channel: tiles.Channel, pooled: Tensor, permit: Tensor) -> None:
        """Launch `move_rows`, which sends what the call pools (`pool_alone`), or what it is given, for each rank."""
        given = GivenRows(pooled.view(-1, self.columns), None, self.columns)
        launch_moves(
            self.ring.channel, channel, self.tables, given, self.landed, self.table, _count_programs(pooled.device),
            self.tile, by=(0, self.is_back), permit=permit, puts=self.puts,
        )  # fmt: skip

    def find_own(self, placement: EmbeddingPlacement) -> Tensor:
        """Find the vectors that this rank pools for itself."""
        first = placement.local_batch * placement.first_column(placement.rank)
        return self.landed.rows.view(-1)[first : first + placement.local_batch * placement.widths[placement.rank]]

    def collect(self, placement: EmbeddingPlacement) -> Tensor:
        """The vectors of this rank's samples, [samples, all ranks' columns], once all have arrived, table by table."""
        samples, landed = placement.local_batch, self.landed.rows.view(-1)
        out, column = landed.new_empty(samples, placement.width), 0
        for dim, tables in groupby(chain.from_iterable(placement.dims)):
            width = dim * len(list(tables))
            arrived = landed[samples * column : samples * (column + width)].view(-1, samples, dim)
            out[:, column : column + width].view(samples, -1, dim).copy_(arrived.transpose(0, 1))
            column += width
        return out

    def send_gradients(self, grad: Tensor, placement: EmbeddingPlacement, permit: Tensor, need: int) -> Tensor:
        """Send grad [samples, all ranks' columns] to the tables' owners: the global batch's, for this rank's columns.

        permit, need: as of `begin_push`.
        """
        given = torch.cat([part.reshape(-1) for part in grad.split(placement.widths, 1)])
        mapping, counts = self.tables.destinations, self.tables.counts
        channel = self.ring.channel.begin(
            "embedding_all_to_all's gradient", mapping, mapping, "p2p", counts=counts, launches=False
        )
        key, block = (placement, need, tiles.kind_of(permit)), triton.next_power_of_2(self.ring.channel.channels)
        self.ring.channel.launch(begin_push, key, 1, (channel, mapping, counts, permit, need, block), num_warps=4)
        self.launch(channel, given, ((permit & need) == need).to(torch.int32))
        width = placement.widths[placement.rank]
        return self.landed.rows.view(-1)[: placement.batch * width].view(placement.batch, width)


def _count_programs(device: torch.device) -> int:
    return limit_waiting(NCCL_BLOCKS, device) if device.type == "cuda" else 2


def find_way(group: str, device: torch.device, schedule: str = "") -> str:
    """The schedule of a call: the caller's, else that of a group of several nodes; "" for the kernels' own exchange."""
    nodes = find_agreed(group, device).nodes
    return schedule or (name_between_nodes("embedding_all_to_all", nodes) if nodes else "")
