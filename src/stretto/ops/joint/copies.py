# SPDX-License-Identifier: Apache-2.0
"""Copy engines make a joint schedule's moves, pushing or pulling, on a side stream; kernels there add up sums.

No signal between GPUs is an atomic operation: a copy of 4 bytes follows each copy. So this is what groups run whose
GPUs PCIe connects.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.schedule import INPUT, NOBODY, NOWHERE, OUTPUT, Destination, Move, Rows


class Sums(NamedTuple):
    """Describes how a reduction's sums are formed, in `out` and among landed rows.

    counters, targets: the product's tiles of a channel are stored once its counter reaches its target. has_last: the
    last move follows the product and the other moves on the current stream. add: launches the sum of its first
    argument's tensors, to be stored in all of the second one's.
    """

    out: Tensor
    counters: Tensor
    targets: dict[int, int]
    has_last: bool
    add: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]


class CopiedMoves(NamedTuple):
    """A rank's moves in one call. landed: its own area, which begins `offset` bytes into every rank's buffer.

    inputs: x, or the product. sums: of reductions.
    """

    channel: tiles.BlockChannel
    moves: tuple[Move, ...]
    inputs: Tensor
    landed: Tensor
    offset: int
    sums: Sums | None = None

    def place_own_rows(self) -> None:
        """Copy own rows of x among the gathered ones, on the current stream: before a kernel that fills the GPU.

        A copy within a GPU may need a multiprocessor.
        """
        for move in self.moves:
            if self._is_of_own_rows(move):
                self._copy(move, self.inputs, move.sources[0].rows.start, self._keep(move))

    def make_others(self) -> None:
        """Make all other moves, in their order, on a side stream that is open already: `tiles.open_side_stream`.

        A copy waits there for what it passes on, after those before it. All ranks' moves are in one order, so no wait
        is for a copy that comes after it.
        """
        with tiles.copy_engine(self.channel, forks=False):
            for move in self.moves[: len(self.moves) - self._has_last]:
                if not self._is_of_own_rows(move):
                    self._await_tiles(move)
                    self._await_signals(move)
                    self._move(move)
                elif pushed := [to for to in move.destinations if to.rank != self.channel.rank]:
                    self._copy(move, self.inputs, move.sources[0].rows.start, pushed)
            if self.sums is not None and self.sums.targets:
                tiles.rank_reset_counts(self.sums.counters, len(self.sums.counters))
            if self._has_last:  # its tiles are complete when the kernel ends
                self._await_signals(self.moves[-1])

    def make_last(self) -> None:
        """Make a reduction's last move, if it is this rank's alone, on the current stream, which has the product."""
        if self._has_last:
            self._move(self.moves[-1])

    @property
    def _has_last(self) -> bool:
        return self.sums is not None and self.sums.has_last

    def _await_tiles(self, move: Move) -> None:
        """Make the stream wait for the tiles of the product that a move sends or adds."""
        for one in move.sources:
            if self.sums is not None and one.sender == self.channel.rank:
                tiles.rank_await_count(self.sums.counters, one.channel, self.sums.targets[one.channel])

    def _await_signals(self, move: Move) -> None:
        """Make the stream wait for what other moves bring to this one."""
        for one in move.sources:
            if one.sender != NOBODY and (self.sums is None or one.sender != self.channel.rank):
                tiles.rank_wait(self.channel, one.channel, one.sender)

    def _move(self, move: Move) -> None:
        kept, (source, *others) = self._keep(move), move.sources
        origin = self.inputs if source.rows.area == INPUT else self._find_landed(source.rank)
        if self.sums is None or not (kept or others):
            self._copy(move, origin, source.rows.start, move.destinations)
            return
        rows = slice(0, source.rows.stop - source.rows.start)
        totals = [self._find_kept(to.rows) for to in kept] or [self.inputs.new_empty(rows.stop, self.inputs.shape[1])]
        if len(kept) < len(move.destinations) and totals[0].dtype != self.inputs.dtype:  # as sums travel
            totals.append(torch.empty_like(totals[0], dtype=self.inputs.dtype))
        self.sums.add(tuple(self._find_kept(one.rows) for one in move.sources), tuple(totals))
        for to in kept:
            self._notify(to)
        self._copy(move, totals[-1], 0, [to for to in move.destinations if to not in kept])

    def _copy(self, move: Move, origin: Tensor, start: int, destinations: Iterable[Destination]) -> None:
        rows = move.sources[0].rows
        part = slice(start, start + rows.stop - rows.start)
        for to in destinations:
            if to.rows.area != NOWHERE:
                tiles.rank_copy_data(self._find_landed(to.rank), origin, rows=part, to=to.rows.start)
            self._notify(to)

    def _notify(self, to: Destination) -> None:
        if to.channel != NOBODY:
            tiles.rank_notify(self.channel, to.channel, to.rank)

    def _keep(self, move: Move) -> list[Destination]:
        return [to for to in move.destinations if to.rank == self.channel.rank]

    def _is_of_own_rows(self, move: Move) -> bool:
        return self.sums is None and move.sources[0].rows.area == INPUT

    def _find_kept(self, rows: Rows) -> Tensor:
        """Rows of this rank's memory, of a reduction."""
        assert self.sums is not None
        area = {INPUT: self.inputs, OUTPUT: self.sums.out}.get(rows.area, self.landed)
        return area[rows.start : rows.stop]

    def _find_landed(self, rank: int) -> Tensor:
        if rank in (NOBODY, self.channel.rank):
            return self.landed
        return self.channel.tensor(tuple(self.landed.shape), self.landed.dtype, offset=self.offset, rank=rank)
