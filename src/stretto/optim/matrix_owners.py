# SPDX-License-Identifier: Apache-2.0
"""Matrices whose shards lie on several ranks of a grid, each brought together on one of them, and given back.

Muon computes with whole matrices. A gather to all ranks would send each matrix to every rank, and every rank would
compute the same. Here a matrix has one owner among the ranks that hold a part of it: shards go to the owner, and
results come back, by two all-to-alls. A rank sends and receives about as many numbers as its shards have.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from stretto.memory.plain_data import all_gather_data
from stretto.parallel.comm.collectives import Pending, start_all_to_all
from stretto.parallel.grid import Grid
from stretto.parallel.layout import Box, ParameterLayout

_ROUND = 1 << 25  # numbers that an owner has at once: 64 MiB of bf16


@dataclass(frozen=True)
class _HeldPart:
    """A part of a matrix: the same boxes on all ranks that hold it, one of which sends it to the owner."""

    boxes: tuple[Box, ...]
    holders: tuple[int, ...]
    sender: int

    @property
    def numbers(self) -> int:
        """Of one matrix, whose boxes of several are as large."""
        return sum(prod(box.sizes[-2:]) for box in self.boxes)


@dataclass(frozen=True)
class _Matrix:
    """One matrix: that of a parameter [a, b], or one of a parameter [e, a, b]'s."""

    parameter: int
    index: int | None
    shape: tuple[int, ...]
    owner: int
    parts: tuple[_HeldPart, ...]

    def part_of(self, rank: int) -> _HeldPart | None:
        """Return the part that a rank holds, or None."""
        return next((part for part in self.parts if rank in part.holders), None)


class MatrixOwners:
    """Owners of parameters' matrices, and the all-to-alls to the owners and back.

    layouts: of parameters [a, b], and of [e, a, b], whose e matrices are owned one by one. grid: theirs. Owners are
    balanced by the cost of Newton-Schulz iterations. Collective over the stage's ranks, as `apply` is; all give the
    same layouts in one order.
    """

    def __init__(self, layouts: Sequence[ParameterLayout], grid: Grid) -> None:
        self.group = grid.group("stage")
        self.rank, self.size = self.group.rank(), self.group.size()
        places = [dict(grid.layout_coordinates)]
        if self.size > 1:
            places = all_gather_data(places[0], self.group, dict[str, int])
        held = [[layout.boxes(grid.layout_sizes, place) for place in places] for layout in layouts]
        self._rounds = _divide(_assign(layouts, held, self.size), self.size)

    def apply(
        self, shards: Sequence[Tensor], function: Callable[[Tensor, int], Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """Return this rank's shards of `function` of each matrix; of an empty shard, an empty one.

        shards: this rank's, of each parameter. They are sent and returned in `dtype`. function: (matrix [a, b] of
        `dtype`, number of its parameter) -> [a, b]; called on the owner. While one round's matrices are computed, the
        next round's come.
        """
        results = [torch.empty_like(shard, dtype=dtype, memory_format=torch.contiguous_format) for shard in shards]
        arriving = self._collect(self._rounds[0], shards, dtype) if self._rounds else None
        returning: list[tuple[list[_Matrix], Pending]] = []
        for number, matrices in enumerate(self._rounds):
            assert arriving is not None
            came, following = arriving.wait(), self._rounds[number + 1 : number + 2]
            arriving = self._collect(following[0], shards, dtype) if following else None
            wholes = self._assemble(matrices, came)
            found = [
                function(whole, matrix.parameter) for matrix, whole in zip(self._mine(matrices), wholes, strict=True)
            ]
            returning.append((matrices, self._give_back(matrices, found, dtype, shards[0].device)))
            if number:
                self._place(*returning.pop(0), results)
        for left in returning:
            self._place(*left, results)
        return results

    def _mine(self, matrices: Sequence[_Matrix]) -> list[_Matrix]:
        return [matrix for matrix in matrices if matrix.owner == self.rank]

    def _collect(self, matrices: Sequence[_Matrix], shards: Sequence[Tensor], dtype: torch.dtype) -> Pending:
        """Begin to send shards to owners: to each, its matrices' in order."""
        sends, receives, pieces = [0] * self.size, [0] * self.size, []
        for matrix in sorted(matrices, key=lambda one: one.owner):
            for part in matrix.parts:
                if part.sender == self.rank:
                    sends[matrix.owner] += part.numbers
                    pieces += [view.reshape(-1) for view in _views(shards[matrix.parameter], matrix, part, "local")]
                if matrix.owner == self.rank:
                    receives[part.sender] += part.numbers
        return self._exchange(pieces, sends, receives, dtype, shards[0].device)

    def _assemble(self, matrices: Sequence[_Matrix], came: Tensor) -> list[Tensor]:
        """This rank's matrices, whole: what came is in the order of senders, then of matrices and their parts."""
        mine = self._mine(matrices)
        wholes = [came.new_empty(matrix.shape) for matrix in mine]
        targets = [
            (part.sender, view)
            for matrix, whole in zip(mine, wholes, strict=True)
            for part in matrix.parts
            for view in _views(whole, matrix, part, "whole")
        ]
        _fill([view for _, view in sorted(targets, key=lambda target: target[0])], came)
        return wholes

    def _give_back(
        self, matrices: Sequence[_Matrix], found: Sequence[Tensor], dtype: torch.dtype, device: torch.device
    ) -> Pending:
        """Begin to send each part of this rank's results to all that hold it."""
        sends, receives = [0] * self.size, [0] * self.size
        pieces = []
        for holder in range(self.size):
            for matrix, whole in zip(self._mine(matrices), found, strict=True):
                if (part := matrix.part_of(holder)) is not None:
                    sends[holder] += part.numbers
                    pieces += [view.reshape(-1) for view in _views(whole, matrix, part, "whole")]
        for matrix in matrices:
            if (part := matrix.part_of(self.rank)) is not None:
                receives[matrix.owner] += part.numbers
        return self._exchange(pieces, sends, receives, dtype, device)

    def _place(self, matrices: Sequence[_Matrix], pending: Pending, results: Sequence[Tensor]) -> None:
        """Put what owners have sent back into this rank's shards of results."""
        targets = [
            view
            for matrix in sorted(matrices, key=lambda one: one.owner)
            if (part := matrix.part_of(self.rank)) is not None
            for view in _views(results[matrix.parameter], matrix, part, "local")
        ]
        _fill(targets, pending.wait())

    def _exchange(
        self, pieces: Sequence[Tensor], sends: list[int], receives: list[int], dtype: torch.dtype, device: torch.device
    ) -> Pending:
        sent = torch.empty(sum(sends), dtype=dtype, device=device)
        _fill_from(sent, pieces)
        if self.size == 1:
            return Pending(sent)
        return start_all_to_all(
            torch.empty(sum(receives), dtype=dtype, device=device), sent, receives, sends, self.group
        )


def _assign(layouts: Sequence[ParameterLayout], held: Sequence[Sequence[Sequence[Box]]], ranks: int) -> list[_Matrix]:
    """Matrices with their owners: the most expensive first, each to the rank with the least to do that holds a part."""
    matrices = []
    for number, layout in enumerate(layouts):
        for index in range(layout.shape[0]) if len(layout.shape) == 3 else (None,):
            holders: dict[tuple[Box, ...], list[int]] = defaultdict(list)
            for rank, boxes in enumerate(held[number]):
                if of_matrix := tuple(box for box in boxes if _has(box, index)):
                    holders[of_matrix].append(rank)
            if prod(layout.shape[-2:]):
                matrices.append((number, index, layout.shape[-2:], holders))
    work = [0] * ranks
    made = []
    for number, index, shape, holders in sorted(matrices, key=lambda one: (-_cost(one[2]), one[0], one[1] or 0)):
        owner = min((rank for one in holders.values() for rank in one), key=lambda rank: (work[rank], rank))
        work[owner] += _cost(shape)
        parts = tuple(
            _HeldPart(boxes, tuple(ranks), owner if owner in ranks else ranks[owner % len(ranks)])
            for boxes, ranks in holders.items()
        )
        made.append(_Matrix(number, index, shape, owner, parts))
    return made


def _cost(shape: tuple[int, ...]) -> int:
    """Of an iteration, up to a factor: a product [s, l] x [l, s], one [s, s] x [s, s], and one [s, s] x [s, l]."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def _divide(matrices: Sequence[_Matrix], ranks: int) -> list[list[_Matrix]]:
    """Rounds, in each of which an owner has matrices of at most `_ROUND` numbers, or one."""
    rounds: list[list[_Matrix]] = []
    for owner in range(ranks):
        number, numbers = 0, 0
        for matrix in matrices:
            if matrix.owner != owner:
                continue
            size = prod(matrix.shape)
            if numbers and numbers + size > _ROUND:
                number, numbers = number + 1, 0
            numbers += size
            while len(rounds) <= number:
                rounds.append([])
            rounds[number].append(matrix)
    return rounds


def _has(box: Box, index: int | None) -> bool:
    return index is None or box.offsets[0] <= index < box.offsets[0] + box.sizes[0]


def _views(tensor: Tensor, matrix: _Matrix, part: _HeldPart, place: str) -> Iterator[Tensor]:
    """The boxes of a part in a rank's shard ("local") or in the matrix ("whole")."""
    for box in part.boxes:
        offsets, view = box.local_offsets if place == "local" else box.offsets, tensor
        dims = list(zip(offsets, box.sizes, strict=True))
        if matrix.index is not None:
            if place == "local":
                view = view[offsets[0] + matrix.index - box.offsets[0]]
            dims = dims[1:]
        for dim, (start, size) in enumerate(dims):
            view = view.narrow(dim, start, size)
        yield view


def _fill(targets: Sequence[Tensor], source: Tensor) -> None:
    """Copy a flat tensor's numbers into targets, one after the other."""
    if targets:
        parts = source.split([target.numel() for target in targets])
        torch._foreach_copy_(
            list(targets), [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
        )


def _fill_from(target: Tensor, pieces: Sequence[Tensor]) -> None:
    if pieces:
        torch._foreach_copy_(list(target.split([piece.numel() for piece in pieces])), list(pieces))
