# SPDX-License-Identifier: Apache-2.0
"""Matrices whose shards lie on several ranks of a grid, each brought together on one of them, and given back.

Muon computes with whole matrices. A gather to all ranks would send each matrix to every rank, and every rank would
compute the same. Here a matrix has one owner among the ranks that hold a part of it: shards go to the owner, and
results come back, by two all-to-alls. A rank sends and receives about as many numbers as its shards have.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory.plain_data import all_gather_data
from stretto.parallel.comm.collectives import Pending, start_all_to_all
from stretto.parallel.grid import Grid
from stretto.parallel.layout import Box, ParameterLayout

_ROUND = 1 << 24  # numbers that an owner has at once, or one matrix if that is larger: 32 MiB of bf16


@dataclass(frozen=True)
class _HeldPart:
    """A part of a matrix: boxes that all its holders have alike; one of them, the sender, sends it to the owner."""

    boxes: tuple[Box, ...]
    holders: tuple[int, ...]
    sender: int

    @property
    def numbers(self) -> int:
        """How many numbers of one matrix it carries; of several matrices it carries as many of each."""
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
        return next((part for part in self.parts if rank in part.holders), None)


class MatrixOwners:
    """Owners of parameters' matrices, in rounds of matrices that are sent together.

    layouts: of parameters [a, b], and of [e, a, b], whose e matrices are owned one by one. grid: theirs. group: of the
    stage's ranks (None: the grid's own). last_first: the last parameters are in the first round. Owners are balanced by
    the cost of Newton-Schulz iterations. Collective over the stage's ranks, as a `MatrixExchange` is; all give the same
    layouts in one order.
    """

    def __init__(
        self,
        layouts: Sequence[ParameterLayout],
        grid: Grid,
        group: dist.ProcessGroup | None = None,
        *,
        last_first: bool = False,
    ) -> None:
        self.group = group or grid.group("stage")
        self.rank, self.size = self.group.rank(), self.group.size()
        places = [dict(grid.layout_coordinates)]
        if self.size > 1:
            places = all_gather_data(places[0], self.group, dict[str, int])
        held = [[layout.boxes(grid.layout_sizes, place) for place in places] for layout in layouts]
        matrices = _find_matrices(layouts, held)
        if last_first:
            matrices.reverse()
        self.rounds = _assign(matrices, self.size)
        self.last_round = {matrix.parameter: number for number, of in enumerate(self.rounds) for matrix in of}

    def mine(self, matrices: Sequence[_Matrix]) -> list[_Matrix]:
        """Those that this rank owns."""
        return [matrix for matrix in matrices if matrix.owner == self.rank]


class MatrixExchange:
    """One pass of all matrices through their owners: shards are sent, and results come back, round by round.

    shard_of: this rank's shard of a parameter, of `dtype`; asked for when its first round starts. function: (matrix
    [a, b] of `dtype`, number of its parameter) -> [a, b], called on the owner. While one round's matrices are computed,
    the next round's come. stream: on which a GPU sends and computes, from when the caller's has made the shards; the
    caller enters it to take results, which are of its memory. None: the caller's.
    """

    def __init__(
        self,
        owners: MatrixOwners,
        shard_of: Callable[[int], Tensor],
        function: Callable[[Tensor, int], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.owners, self.stream = owners, stream
        self._shard_of, self._function, self._dtype, self._device = shard_of, function, dtype, device
        self._started = 0
        self._shards: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._arriving: deque[tuple[list[_Matrix], Pending]] = deque()
        self._returning: deque[tuple[list[_Matrix], Pending]] = deque()

    def start_ready(self, ready: Container[int]) -> None:
        """Start the next rounds all of whose parameters are in `ready`."""
        rounds = self.owners.rounds
        while self._started < len(rounds) and all(matrix.parameter in ready for matrix in rounds[self._started]):
            self._start()

    def finish(self) -> None:
        """Start all rounds, and compute them."""
        while self._started < len(self.owners.rounds):
            self._start()
        while self._arriving:
            self._compute()

    def take(self, number: int) -> list[tuple[int, Tensor]]:
        """Wait for the results of round `number`, which is the next one to be taken, after `finish`.

        Returns this rank's shards of the results that are complete, of an empty shard an empty one, with the numbers of
        their parameters.
        """
        matrices, pending = self._returning.popleft()
        for parameter in dict.fromkeys(matrix.parameter for matrix in matrices):
            if parameter not in self._results:
                shape = self._shapes[parameter]
                self._results[parameter] = torch.empty(shape, dtype=self._dtype, device=self._device)
        targets = [
            view
            for matrix in sorted(matrices, key=lambda one: one.owner)
            if (part := matrix.part_of(self.owners.rank)) is not None
            for view in _views(self._results[matrix.parameter], matrix, part, "local")
        ]
        _fill(targets, pending.wait())
        last = self.owners.last_round
        return [(each, self._results.pop(each)) for each in list(self._results) if last[each] == number]

    def discard(self) -> None:
        """Wait for what is on its way, and forget it."""
        with self.on_stream():
            for _, pending in (*self._arriving, *self._returning):
                pending.wait()
        self._arriving.clear()
        self._returning.clear()

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _start(self) -> None:
        """Send the shards of the next round to their owners, to each its matrices' in order; compute the round before.

        On a GPU shards are made and packed on the caller's stream, which makes gradients.
        """
        number, owners = self._started, self.owners
        matrices = owners.rounds[number]
        for parameter in dict.fromkeys(matrix.parameter for matrix in matrices):
            if parameter not in self._shapes:
                shard = self._shards[parameter] = self._shard_of(parameter)
                self._shapes[parameter] = shard.shape
        sends, receives, pieces = [0] * owners.size, [0] * owners.size, []
        for matrix in sorted(matrices, key=lambda one: one.owner):
            for part in matrix.parts:
                if part.sender == owners.rank:
                    sends[matrix.owner] += part.numbers
                    pieces += list(_views(self._shards[matrix.parameter], matrix, part, "local"))
                if matrix.owner == owners.rank:
                    receives[part.sender] += part.numbers
        sent = self._pack(pieces)
        for parameter in list(self._shards):
            if owners.last_round[parameter] == number:
                del self._shards[parameter]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            sent.record_stream(self.stream)
        with self.on_stream():
            self._arriving.append((matrices, self._send(sent, sends, receives)))
        self._started += 1
        if number:
            self._compute()

    def _compute(self) -> None:
        """Compute this rank's matrices of the round that was sent first, and begin to send the results back."""
        matrices, pending = self._arriving.popleft()
        with self.on_stream():
            mine = self.owners.mine(matrices)
            found = [
                self._function(whole, matrix.parameter)
                for matrix, whole in zip(mine, self._assemble(mine, pending.wait()), strict=True)
            ]
            self._returning.append((matrices, self._give_back(matrices, found)))

    def _assemble(self, mine: Sequence[_Matrix], came: Tensor) -> list[Tensor]:
        """This rank's matrices, whole: what came is in the order of senders, then of matrices and their parts."""
        wholes = [came.new_empty(matrix.shape) for matrix in mine]
        targets = [
            (part.sender, view)
            for matrix, whole in zip(mine, wholes, strict=True)
            for part in matrix.parts
            for view in _views(whole, matrix, part, "whole")
        ]
        _fill([view for _, view in sorted(targets, key=lambda target: target[0])], came)
        return wholes

    def _give_back(self, matrices: Sequence[_Matrix], found: Sequence[Tensor]) -> Pending:
        """Begin to send each part of this rank's results to all that hold it."""
        owners = self.owners
        sends, receives, pieces = [0] * owners.size, [0] * owners.size, []
        for holder in range(owners.size):
            for matrix, whole in zip(owners.mine(matrices), found, strict=True):
                if (part := matrix.part_of(holder)) is not None:
                    sends[holder] += part.numbers
                    pieces += list(_views(whole, matrix, part, "whole"))
        for matrix in matrices:
            if (part := matrix.part_of(owners.rank)) is not None:
                receives[matrix.owner] += part.numbers
        return self._send(self._pack(pieces), sends, receives)

    def _pack(self, pieces: Sequence[Tensor]) -> Tensor:
        sent = torch.empty(sum(piece.numel() for piece in pieces), dtype=self._dtype, device=self._device)
        if pieces:
            targets = sent.split([piece.numel() for piece in pieces])
            torch._foreach_copy_([t.view(p.shape) for t, p in zip(targets, pieces, strict=True)], list(pieces))
        return sent

    def _send(self, sent: Tensor, sends: list[int], receives: list[int]) -> Pending:
        if self.owners.size == 1:
            return Pending(sent)
        return start_all_to_all(sent.new_empty(sum(receives)), sent, receives, sends, self.owners.group)


_Held = tuple[int, int | None, tuple[int, ...], dict[tuple[Box, ...], list[int]]]
"""A matrix without an owner: number of its parameter, index in it, shape, and the ranks that hold each part."""


def _find_matrices(layouts: Sequence[ParameterLayout], held: Sequence[Sequence[Sequence[Box]]]) -> list[_Held]:
    matrices: list[_Held] = []
    for number, layout in enumerate(layouts):
        for index in range(layout.shape[0]) if len(layout.shape) == 3 else (None,):
            holders: dict[tuple[Box, ...], list[int]] = defaultdict(list)
            for rank, boxes in enumerate(held[number]):
                if of_matrix := tuple(box for box in boxes if _has(box, index)):
                    holders[of_matrix].append(rank)
            if prod(layout.shape[-2:]):
                matrices.append((number, index, layout.shape[-2:], holders))
    return matrices


def _assign(matrices: Sequence[_Held], ranks: int) -> list[list[_Matrix]]:
    """Rounds of matrices with their owners, in order: of each round the most expensive first, each to the rank that has
    the least to do in all rounds up to then, among those that hold a part of it."""
    rounds: list[list[_Matrix]] = []
    work = [0] * ranks
    for some in _divide(matrices, ranks):
        made = []
        for number, index, shape, holders in sorted(some, key=lambda one: -_cost(one[2])):
            owner = min((rank for one in holders.values() for rank in one), key=lambda rank: (work[rank], rank))
            work[owner] += _cost(shape)
            parts = tuple(
                _HeldPart(boxes, tuple(ranks), owner if owner in ranks else ranks[owner % len(ranks)])
                for boxes, ranks in holders.items()
            )
            made.append(_Matrix(number, index, shape, owner, parts))
        rounds.append(made)
    return rounds


def _divide(matrices: Sequence[_Held], ranks: int) -> list[list[_Held]]:
    """Cut a sequence of matrices into rounds of about `_ROUND` numbers an owner; each has a matrix, so that none waits
    while another iterates the only one of a round."""
    rounds: list[list[_Held]] = []
    most = max((prod(matrix[2]) for matrix in matrices), default=0)
    room = 0
    for matrix in matrices:
        if room <= 0:
            rounds.append([])
            room = max(_ROUND, most) * ranks
        rounds[-1].append(matrix)
        room -= prod(matrix[2])
    return rounds


def _cost(shape: tuple[int, ...]) -> int:
    """Count an iteration's work, up to a factor: products [s, l] x [l, s], [s, s] x [s, s], and [s, s] x [s, l]."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


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
