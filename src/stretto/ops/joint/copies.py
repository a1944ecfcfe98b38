# SPDX-License-Identifier: Apache-2.0
"""Copy engines make a joint schedule's moves, pushing or pulling, on a side stream; kernels there add up sums.

No signal between GPUs is an atomic operation: a copy of 4 bytes follows each copy. So this is what groups run whose
GPUs PCIe connects.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.rewrite import join_rows
from stretto.collectives.joint.schedule import INPUT, NOBODY, NOWHERE, OUTPUT, Destination, JointSchedule, Move, Rows
from stretto.ops.gemm import divide_up

_ALIGNMENT = 128  # bytes: what follows the landed rows begins at a multiple of it


def find_landed_scales(channel: tiles.BlockChannel, landed: Tensor, offset: int, rank: int | None = None) -> Tensor:
    """The factors of fp8 rows, fp32, one for each landed row, behind these in a rank's buffer. offset: of the rows."""
    behind = divide_up(landed.nbytes, _ALIGNMENT) * _ALIGNMENT
    return channel.tensor((len(landed),), torch.float32, offset=offset + behind, rank=rank)


class CopiedRows(NamedTuple):
    """A gather's moves in one call: of this rank's rows of x, and of landed ones. Listed once for calls that are alike.

    landed: this rank's area, which begins `offset` bytes into every rank's buffer. scales: of fp8 rows, [rows], which
    go to a rank before the rows do: by a direct algorithm. returned: gets all rows, beside the product.
    """

    channel: tiles.BlockChannel
    joint: JointSchedule
    x: Tensor
    landed: Tensor
    offset: int
    scales: Tensor | None = None
    returned: Tensor | None = None

    def place_own_rows(self) -> None:
        """Copy own rows of x among the gathered ones, on the current stream: before a kernel that fills the GPU.

        A copy within a GPU may need a multiprocessor.
        """
        self._run(is_own=True)

    def make_others(self) -> None:
        """Make all other moves, in their order, on a side stream that is open already: `tiles.open_side_stream`.

        A copy waits there for what it passes on, after those before it. All ranks' moves are in one order, so no wait
        is for a copy that comes after it.
        """
        with tiles.copy_engine(self.channel, forks=False):
            self._run(is_own=False)

    def _run(self, *, is_own: bool) -> None:
        given = [one for one in (self.x, self.scales, self.returned) if one is not None]
        landed, returns = self.landed, self.returned is not None
        key = "moves", self.joint, landed.shape, landed.dtype, self.offset, is_own, returns
        tiles.find_copies(self.channel, key, partial(self._list, given, is_own)).run(self.channel, *given)

    def _list(self, given: list[Tensor], is_own: bool) -> tiles.CopyList:
        copies, channel, rank = tiles.CopyList(*given), self.channel, self.channel.rank
        for move in self.joint.ranks[rank].moves:
            (source,) = move.sources
            is_input, rows = source.rows.area == INPUT, slice(*source.rows[1:])
            destinations = [to for to in move.destinations if (is_input and to.rank == rank) == is_own]
            if destinations and source.sender != NOBODY:
                copies.then(partial(tiles.rank_wait, index=source.channel, rank=source.sender))
            for to in destinations:
                if self.scales is not None and is_input and rows.start == 0:
                    there = find_landed_scales(channel, self.landed, self.offset, to.rank)
                    copies.copy(there, self.scales, rows=slice(0, len(self.x)), to=rank * len(self.x))
                if to.rows.area != NOWHERE:
                    origin = self.x if is_input else find_landed(channel, self.landed, self.offset, source.rank)
                    there = find_landed(channel, self.landed, self.offset, to.rank)
                    copies.copy(there, origin, rows=rows, to=to.rows.start)
                if to.channel != NOBODY:
                    copies.notify(channel, to.channel, to.rank)
        if self.returned is not None and not is_own:
            self._list_returned(copies, self.returned)
        return copies

    def _list_returned(self, copies: tiles.CopyList, returned: Tensor) -> None:
        """Copy the rows out of memory that the next call overwrites. A rank's signals come in its moves' order."""
        rank, rows = self.channel.rank, len(self.x)
        copies.copy(returned, self.x, rows=slice(0, rows), to=rank * rows)
        for distance, _ in enumerate(self.joint.ranks):  # the rank before this one is the first to send
            sender = (rank - distance) % len(self.joint.ranks)
            moves = self.joint.ranks[sender].moves
            brought = [to for move in moves for to in move.destinations if to.rank == rank]
            brought = [to for to in brought if to.rows.area != NOWHERE and to.rows.start // rows != rank]
            if brought and sender != rank:  # own copies are on this stream
                copies.then(partial(tiles.rank_wait, index=brought[-1].channel, rank=sender))
            for start, stop in join_rows(to.rows[1:] for to in brought):
                copies.copy(returned, self.landed, rows=slice(start, stop), to=start)


class CopiedSums(NamedTuple):
    """A reduction's moves in one call; sums are formed in `out`, and among landed rows. landed: as of `CopiedRows`.

    counters, targets: the product's tiles of a channel are stored once its counter reaches its target. has_last: the
    last move follows the product and the other moves on the current stream. add: launches the sum of its first
    argument's tensors, to be stored in all of the second one's.
    """

    channel: tiles.BlockChannel
    moves: tuple[Move, ...]
    product: Tensor
    landed: Tensor
    offset: int
    out: Tensor
    counters: Tensor
    targets: dict[int, int]
    has_last: bool
    add: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]

    def make_others(self) -> None:
        """Make all moves but a last one that is this rank's alone, as `CopiedRows.make_others`."""
        with tiles.copy_engine(self.channel, forks=False):
            for move in self.moves[: len(self.moves) - self.has_last]:
                for one in move.sources:
                    if one.sender == self.channel.rank:
                        tiles.rank_await_count(self.counters, one.channel, self.targets[one.channel])
                self._await_signals(move)
                self._move(move)
            if self.targets:
                tiles.rank_reset_counts(self.counters, len(self.counters))
            if self.has_last:  # its tiles are complete when the kernel ends
                self._await_signals(self.moves[-1])

    def make_last(self) -> None:
        """Make the last move, if it is this rank's alone, on the current stream, which has the product."""
        if self.has_last:
            self._move(self.moves[-1])

    def _await_signals(self, move: Move) -> None:
        """Make the stream wait for what other moves bring to this one."""
        for one in move.sources:
            if one.sender not in (NOBODY, self.channel.rank):
                tiles.rank_wait(self.channel, one.channel, one.sender)

    def _move(self, move: Move) -> None:
        kept, (source, *others) = [to for to in move.destinations if to.rank == self.channel.rank], move.sources
        if not (kept or others):
            self._send(self._find(source.rows), move.destinations)
            return
        count = source.rows.stop - source.rows.start
        totals = [self._find(to.rows) for to in kept] or [self.product.new_empty(count, self.product.shape[1])]
        if len(kept) < len(move.destinations) and totals[0].dtype != self.product.dtype:  # as sums travel
            totals.append(torch.empty_like(totals[0], dtype=self.product.dtype))
        self.add(tuple(self._find(one.rows) for one in move.sources), tuple(totals))
        for to in kept:
            self._notify(to)
        self._send(totals[-1], [to for to in move.destinations if to not in kept])

    def _send(self, rows: Tensor, destinations: Iterable[Destination]) -> None:
        for to in destinations:
            there = find_landed(self.channel, self.landed, self.offset, to.rank)
            tiles.rank_copy_data(there, rows, rows=slice(0, len(rows)), to=to.rows.start)
            self._notify(to)

    def _notify(self, to: Destination) -> None:
        if to.channel != NOBODY:
            tiles.rank_notify(self.channel, to.channel, to.rank)

    def _find(self, rows: Rows) -> Tensor:
        """Rows of this rank's memory."""
        area = {INPUT: self.product, OUTPUT: self.out}.get(rows.area, self.landed)
        return area[rows.start : rows.stop]


def find_landed(channel: tiles.BlockChannel, landed: Tensor, offset: int, rank: int) -> Tensor:
    """A rank's area of landed rows, which begins `offset` bytes into its buffer; NOBODY: this rank's, `landed`."""
    if rank in (NOBODY, channel.rank):
        return landed
    return channel.tensor(tuple(landed.shape), landed.dtype, offset=offset, rank=rank)
