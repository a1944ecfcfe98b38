# SPDX-License-Identifier: Apache-2.0
"""Copy engines make a joint schedule's moves, pushing or pulling, on a side stream; kernels there add up sums.

No signal between GPUs is an atomic operation: a copy of 4 bytes follows each copy. So this is what groups run whose
GPUs PCIe connects.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.schedule import INPUT, NOBODY, NOWHERE, Destination, Move


class CopiedMoves(NamedTuple):
    """A rank's moves in one call. landed: its own area, which begins `offset` bytes into every rank's buffer.

    inputs: x, or the product. add: for reductions, launches the sum of a move's sources (`add_rows`), which it also
    stores where this rank keeps it; returns rows for the other ranks.
    """

    channel: tiles.BlockChannel
    moves: tuple[Move, ...]
    inputs: Tensor
    landed: Tensor
    offset: int
    add: Callable[[int], Tensor] | None = None

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
            for number, move in enumerate(self.moves):
                if not self._is_of_own_rows(move):
                    self._move(number, move)
                elif pushed := [to for to in move.destinations if to.rank != self.channel.rank]:
                    self._copy(move, self.inputs, move.sources[0].rows.start, pushed)

    def _move(self, number: int, move: Move) -> None:
        for one in move.sources:
            if one.sender != NOBODY:
                tiles.rank_wait(self.channel, one.channel, one.sender)
        source, kept = move.sources[0], self._keep(move)
        if self.add is None or not (kept or len(move.sources) > 1):
            origin = self.inputs if source.rows.area == INPUT else self._find_landed(source.rank)
            self._copy(move, origin, source.rows.start, move.destinations)
            return
        total = self.add(number)
        for to in kept:
            self._notify(to)
        self._copy(move, total, 0, [to for to in move.destinations if to not in kept])

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
        return self.add is None and move.sources[0].rows.area == INPUT

    def _find_landed(self, rank: int) -> Tensor:
        if rank in (NOBODY, self.channel.rank):
            return self.landed
        return self.channel.tensor(tuple(self.landed.shape), self.landed.dtype, offset=self.offset, rank=rank)
