# SPDX-License-Identifier: Apache-2.0
"""Sends rows of keys and values, or of their gradients, and heads, between ranks of a group, while kernels run.

By copy engines between GPUs that NVLink connects: the fastest attention kernels leave NCCL's no multiprocessors, or
lose some to them. Elsewhere by the functional collectives of torch.distributed, which NCCL runs on its own stream. One
rank in so many (`degree`) takes part in an exchange of rows; those between have other heads of the same sequence.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from stretto import tiles
from stretto.memory.copy_engine import SideStream, has_nvlink
from stretto.ops.attention.plan import ExchangeStep, Range, count_rows
from stretto.ops.choices import find_agreed
from stretto.ops.moe.routes import CollectiveWrapper
from stretto.ops.operator import abandon, count_bytes, find_group, find_known, find_workspace, require_agreement

_ALIGNMENT = 128  # bytes: tensors in a workspace begin at multiples of it


class Arriving(NamedTuple):
    """Rows that come while kernels run. sent: kept while they leave. channel: whose signals follow copies, if any."""

    rows: Tensor
    sent: Tensor
    channel: tiles.BlockChannel | None = None

    def wait(self) -> Tensor:
        """Have the current stream wait for the rows, and for copies of `sent`; returns the rows."""
        if self.channel is None:
            return torch.ops._c10d_functional.wait_tensor(self.rows)
        tiles.join_copies(self.channel)
        tiles.rank_wait_all(self.channel, 0, 1)
        return self.rows


class Peers(NamedTuple):
    """Every `degree`-th rank of the group, from this rank's remainder on.

    wrap: called in place of each collective. by_copies: whether copy engines push rows. areas: of memory for rows that
    copies bring: 1 if what has come is no longer needed when more may come, else 3, two for keys in turn and one for
    gradients. room: rows of an area.
    """

    group: str
    degree: int
    wrap: CollectiveWrapper
    by_copies: bool
    areas: int
    room: int

    def fork(self, steps: int, device: torch.device) -> SideStream | None:
        """Fork a stream for the kernels that wait for rows of the only step, and for what is made of them; None where
        these take turns with kernels of the current stream.

        Its blocks go first, so that what is sent back leaves early; the current stream's fill the places that they
        leave, such as those of the last blocks of a kernel. The caller joins it.
        """
        if not self.by_copies or steps != 1 or device.type != "cuda":
            return None
        side = find_known(self.group, device, "attention to others' rows", lambda: SideStream(device, priority=-1))
        side.open()
        return side

    def start(
        self, step: ExchangeStep, rows: Tensor, number: int, fill: Callable[[], object] | None = None
    ) -> Arriving:
        """Start to send rows [length, ...] as the step says. number: of the step. fill: writes the rows first, beside
        kernels of the current stream if copy engines send them."""
        if self.by_copies:
            area = number % max(self.areas - 1, 1)
            return self._copy(rows, step.sends, step.lands, _count(step.receives), area, fill, follows=True)
        if fill is not None:
            fill()
        parts = [rows[part.start : part.stop] for parts in step.sends for part in parts]
        return self._exchange(_join(parts, rows), _count(step.sends), _count(step.receives))

    def start_back(self, step: ExchangeStep, rows: Tensor) -> Arriving:
        """Start to send a row for each that came in the step, to where it came from."""
        counts = _count(step.receives)
        if self.by_copies:
            ends = [0, *accumulate(counts)]
            sends = [(Range(start, stop),) if start < stop else () for start, stop in pairwise(ends)]
            return self._copy(rows, sends, step.lands_back, _count(step.sends), self.areas - 1)
        return self._exchange(rows, counts, _count(step.sends))

    def _exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Arriving:
        functional, rest = torch.ops._c10d_functional, int(find_group(self.group).rank()) % self.degree

        def spread(counts: Sequence[int]) -> list[int]:
            """Counts of all ranks of the group."""
            return [count if other == rest else 0 for count in counts for other in range(self.degree)]

        def make() -> Tensor:
            return functional.all_to_all_single(rows, spread(receives), spread(sends), self.group)

        return Arriving(self.wrap("all_to_all", make), rows)

    def _copy(
        self,
        rows: Tensor,
        sends: Sequence[Sequence[Range]],
        lands: Sequence[int],
        receives: Sequence[int],
        area: int,
        fill: Callable[[], object] | None = None,
        follows: bool = False,
    ) -> Arriving:
        """Push rows into the ranks' workspaces by copy engines: to the rank before this one first, and so on.

        follows: whether this call is the first since the group's last one, which may have been on another stream.

        Reuse: a call begins with a barrier of the group, after the kernels that read what came before into its area.
        It is a whole barrier, since all calls here use one slot: kernels read it after the next call has begun. Barrier
        and copies are on a side stream, so that the current one computes at once; it joins that in `Arriving.wait`.
        """
        shape = self.room, *rows.shape[1:]
        area_bytes = -(-count_bytes(*shape, dtype=rows.dtype) // _ALIGNMENT) * _ALIGNMENT
        size = self.areas * area_bytes
        workspace = find_workspace(self.group, rows.device, size, "barrier", follows=follows)
        channel = workspace.channel
        slot, offset = 0 if workspace.slots == 2 else None, area * area_bytes
        mapping = tiles.shard_tiles(1, channel.world_size, 1)
        key = rows.shape, rows.stride(), rows.dtype, self.room, self.degree, offset, tuple(sends), tuple(lands)

        def list_copies() -> tiles.CopyList:
            copies = tiles.CopyList(rows)
            for distance in range(1, channel.world_size):
                peer = (channel.rank - distance) % channel.world_size
                if peer % self.degree == channel.rank % self.degree:
                    there = channel.tensor(shape, rows.dtype, offset=offset, rank=peer)
                    to = lands[peer // self.degree]
                    for part in sends[peer // self.degree]:
                        copies.copy(there, rows, rows=slice(*part), to=to)
                        to += count_rows(part)
                copies.notify(channel, channel.rank, peer)
            return copies

        def push() -> Tensor:
            # Without priority, barrier and packing would wait until no block of the current stream's kernel waits.
            with tiles.copy_engine(channel, stream_index=tiles.URGENT):
                channel.is_open = False  # what has not been joined is on this stream, too
                channel.begin("context attention", mapping, mapping, "broadcast", slot=slot)
                channel.is_open = True
                if fill is not None:
                    fill()
                tiles.find_copies(channel, key, list_copies).run(channel, rows)
            return channel.tensor(shape, rows.dtype, offset=offset)[: sum(receives)]

        try:
            return Arriving(self.wrap("all_to_all", push), rows, channel)
        except BaseException:
            abandon(self.group, channel)
            raise


def can_copy(group: str, device: torch.device) -> bool:
    """Check whether copy engines reach all ranks' memory, the same on all ranks. Collective at a group's first call."""
    if device.type != "cuda" or find_group(group).size() == 1 or find_agreed(group, device).obstacle:
        return False
    return bool(find_known(group, device, "nvlink", lambda: has_nvlink(find_group(group), device)))


def list_returned(step: ExchangeStep, returned: Tensor) -> list[tuple[Range, Tensor]]:
    """Returned rows, in the order of ranks, each with the rows that were sent."""
    sent = [part for parts in step.sends for part in parts]
    return list(zip(sent, returned.split([count_rows(part) for part in sent]), strict=True))


def _join(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    if not parts:
        return rows[:0]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _count(parts: Sequence[Sequence[Range]]) -> list[int]:
    return [sum(map(count_rows, each)) for each in parts]


class HeadExchange(NamedTuple):
    """Exchanges heads for positions among `degree` ranks that follow each other: DeepSpeed-Ulysses, section 3.

    They have their parts of the sequence together, each with other heads, so that they are as one rank of 1 / degree as
    many. chunks: the positions of their rows, rank by rank. Tensors are [b, degree, h, l, d], of a rank's positions and
    the heads of each rank, or [b, h, l * degree, d], of its own heads and all their positions in order. Those that
    travel together are next to each other in rows [l * degree, b, numbers], which `start` sends and `finish` awaits.
    """

    group: str
    degree: int
    chunks: Sequence[Range]
    wrap: CollectiveWrapper

    def start(self, tensors: Sequence[Tensor], gathers: bool) -> Tensor:
        """Start to send tensors: heads to their ranks if this gathers positions, else positions to theirs."""
        sizes = [(each.shape[2 if gathers else 1], each.shape[-1]) for each in tensors]
        count, first = sum(map(count_rows, self.chunks)), tensors[0]
        rows = first.new_empty(count, len(first), sum(heads * size for heads, size in sizes))
        for tensor, there in zip(tensors, _split_numbers(rows, sizes), strict=True):
            if gathers:
                there.unflatten(0, (self.degree, -1)).copy_(tensor.permute(1, 3, 0, 2, 4))
            else:
                order = self._order()
                pieces = tensor.permute(2, 0, 1, 3).split([count_rows(self.chunks[number]) for number in order])
                of_chunk = dict(zip(order, pieces, strict=True))
                torch.cat([of_chunk[number] for number in range(len(order))], out=there)
        return self._exchange(rows)

    def finish(self, rows: Tensor, sizes: Sequence[tuple[int, int]], gathers: bool) -> list[Tensor]:
        """The tensors that were sent to this rank. sizes: heads and numbers of each."""
        rows = torch.ops._c10d_functional.wait_tensor(rows)
        if gathers:
            pieces = rows.split([count_rows(chunk) for chunk in self.chunks])
            rows = torch.cat([pieces[number] for number in self._order()])
            return [each.permute(1, 2, 0, 3) for each in _split_numbers(rows, sizes)]
        parts = (each.unflatten(0, (self.degree, -1)) for each in _split_numbers(rows, sizes))
        return [each.permute(2, 0, 3, 1, 4) for each in parts]

    def _order(self) -> list[int]:
        """The numbers of the chunks, in the order of the sequence."""
        return sorted(range(len(self.chunks)), key=self.chunks.__getitem__)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Start to send as many rows to each of the `degree` ranks around this one."""
        require_agreement(f"exchange of heads {list(rows.shape)} {rows.dtype}", False, self.group, rows.device)
        members, degree = find_group(self.group), self.degree
        first = members.rank() // degree * degree
        counts = [len(rows) // degree * (first <= peer < first + degree) for peer in range(members.size())]
        functional = torch.ops._c10d_functional
        return self.wrap("all_to_all", lambda: functional.all_to_all_single(rows, counts, counts, self.group))


def _split_numbers(rows: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views [rows, b, heads, size] of rows [rows, b, numbers]."""
    parts = rows.split([heads * size for heads, size in sizes], -1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]
