"""In which pieces copy engines push a reduce-scatter's tiles to their owners, and when: what depends on sizes alone."""

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

from stretto import tiles
from stretto.ops.gemm.config import KernelConfig
from stretto.ops.gemm.tile import divide_up

_MOST_PIECES = 8  # that an owner's tiles are cut into, but for the last round


class PieceSizes(NamedTuple):
    """How an owner's tiles are pushed or added up: in pieces of `size` tiles, up to `number` of them.

    A new one begins with the last round of tiles, so that the others need not wait for that. threads: that count a
    tile.
    """

    number: Any
    size: Any
    threads: Any


@lru_cache(maxsize=4096)
def size_pieces(count: int, tile_bytes: int, plan: KernelConfig) -> PieceSizes:
    """How `count` tiles for each owner are pushed and added up, in pieces of about the plan's piece_bytes."""
    assert plan.blocks is not None
    size = divide_up(count, max(1, min(count * tile_bytes // plan.piece_bytes, _MOST_PIECES, count)))
    threads = 1 if tiles.INTERPRETED.value else 32 * plan.blocks.num_warps
    return PieceSizes(divide_up(count, size) + 1, size, threads)


class CopyPiece(NamedTuple):
    """Tiles `start` to `stop` - 1 of an owner, once counter number `counter` has come to `target`."""

    start: int
    stop: int
    counter: int
    target: int


class CopySchedule(NamedTuple):
    """When what is pushed and added up, which depends on sizes alone.

    own: this rank's position in the order in which owners' tiles are multiplied. pushes: (owner, its position, its
    parts) in that order; adds: parts of own tiles; those of the last round are not there: the kernel's end tells of
    them.
    """

    own: int
    pushes: tuple[tuple[int, int, tuple[CopyPiece, ...]], ...]
    adds: tuple[CopyPiece, ...]


@lru_cache(maxsize=4096)
def schedule_copies(
    rank: int, world: int, count: int, programs: int, pieces: PieceSizes, is_shifted: bool
) -> CopySchedule:
    """The course of a call with `count` tiles for each owner."""

    def position(owner: int) -> int:
        return (owner - rank - 1) % world if is_shifted else owner

    def cut(place: int) -> tuple[CopyPiece, ...]:
        last_round = (world * count - 1) // programs * programs
        split = min(max(last_round - place * count, 0), count)
        starts = [*range(0, split, pieces.size), split]
        if split < count and place != position(rank):
            starts.append(count)
        return tuple(
            CopyPiece(start, stop, place * pieces.number + piece, (stop - start) * pieces.threads)
            for piece, (start, stop) in enumerate(itertools.pairwise(starts))
        )

    others = sorted(set(range(world)) - {rank}, key=position)
    pushes = tuple((owner, position(owner), cut(position(owner))) for owner in others)
    return CopySchedule(position(rank), pushes, cut(position(rank)))


def find_place(source: int, owner: int, world: int) -> int:
    """Which of an owner's places for what others push is the source's."""
    return (owner - source - 1) % world
