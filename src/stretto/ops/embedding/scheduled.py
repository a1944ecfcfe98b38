# SPDX-License-Identifier: Apache-2.0
"""The look-up's exchange by a schedule: vectors are pooled here, move by any verified all-to-all, and are put in order.

    pool_alone      pools this rank's tables for the samples of each rank, and signals what is there
    move_rows       beside it, on a side stream: sends a rank's vectors as soon as they are pooled, passes others on
    torch.cat       the vectors of all ranks, side by side

Every rank pools for every other one, and so knows how many rows it has for it: vectors lie one after another as rows of
as many numbers as divide all ranks' columns, in memory of one slot. `begin_pooling` has received that all ranks have
begun the call, and so have read what the last one left there.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import NCCL_BLOCKS, limit_waiting
from stretto.ops.embedding.output_ring import CHANNELS, OutputRing, limit_channels
from stretto.ops.embedding.placement import EmbeddingPlacement
from stretto.ops.joint.routed import GivenRows, LandedRows, RoutedTables, find_routed, launch_moves, make_tables
from stretto.ops.operator import require_agreement

_PARTS = 128  # of all ranks' rows
_TILE_BYTES, _TILE_ROWS, _BLOCK = 65536, 64, 1024  # as of the experts' exchange


class ScheduledMoves(NamedTuple):
    """What all calls of a placement by one schedule share.

    table: int32 [source, target, 2], of which the first number says how many rows of `columns` numbers each rank has
    for each other one. landed: this rank's, in the ring's memory.
    """

    ring: OutputRing
    tables: RoutedTables
    table: Tensor
    columns: int
    landed: LandedRows

    @classmethod
    def make(cls, group: str, device: torch.device, placement: EmbeddingPlacement, schedule: str) -> "ScheduledMoves":
        """Make the group's; all ranks call it. ValueError for a schedule that is refused."""
        world, rank, batch = placement.world_size, placement.rank, placement.local_batch
        signals = (limit_channels(world, CHANNELS) - 1) * world  # beside those of what is pooled
        routed = find_routed("embedding_all_to_all", schedule, world, signals)
        require_agreement(f"embedding_all_to_all by {schedule}", False, group, device)
        columns = math.gcd(*placement.widths)
        rows = [batch * width // columns for width in placement.widths]
        landed = sum(rows), routed.forwarded_pairs * max(rows)
        size = sum(landed) * columns * placement.dtype.itemsize
        ring = OutputRing.find(group, device, size, of_schedule=schedule)
        pooled = (batch * len(placement.dims[rank]),) * world  # samples of each rank
        parts, channels = (max(CHANNELS, _PARTS // world), CHANNELS) if device.type == "cuda" else (4, 2)
        sizes = ring.channel.channels, parts, channels
        tables = make_tables(routed, rank, *sizes, device, pooled)
        table = torch.tensor(rows, dtype=torch.int32)[:, None, None].expand(world, world, 2).contiguous().to(device)
        memory = ring.slots.view(placement.dtype)[: sum(landed) * columns].view(-1, columns)
        return cls(ring, tables, table, columns, LandedRows(memory, *landed))

    def launch(self, channel: tiles.Channel, pooled: Tensor, permit: Tensor) -> None:
        """Launch `move_rows`, which sends vectors [world, samples, own columns] that the call pools."""
        device, itemsize = pooled.device, pooled.element_size()
        block = min(triton.next_power_of_2(self.columns), _BLOCK)
        rows = min(max(_TILE_BYTES // (block * itemsize), 1), _TILE_ROWS) if pooled.is_cuda else 4
        programs = limit_waiting(NCCL_BLOCKS, device) if pooled.is_cuda else 2
        given = GivenRows(pooled.view(-1, self.columns), None, self.columns)
        launch_moves(
            self.ring.channel, channel, self.tables, given, self.landed, self.table, programs, (rows, block),
            permit=permit,
        )  # fmt: skip

    def collect(self, placement: EmbeddingPlacement) -> Tensor:
        """The vectors of this rank's samples, [samples, all ranks' columns], once all have arrived."""
        counts = [placement.local_batch * width for width in placement.widths]
        parts = self.landed.rows.view(-1)[: sum(counts)].split(counts)
        return torch.cat([part.view(placement.local_batch, -1) for part in parts if len(part)], 1)
