"""The schedule of a reduce-scatter's copies: in which pieces copy engines push tiles to their owners, and when.

A schedule depends on sizes alone, so that it is computed once for them.
"""

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

from stretto import tiles
from stretto.ops.gemm.config import KernelConfig, divide_up

_MOST_PIECES = 8  # that an owner's tiles are split into, without the last wave's


class PieceSizes(NamedTuple):
    """How an owner's tiles are pushed or added up: in pieces of `size` tiles, up to `number` of them.

    The last wave of tiles begins a new piece, so that the tiles before it need not wait for it. threads: that count a
    tile.
    """

    number: Any
    size: Any
    threads: Any


@lru_cache(maxsize=4096)
def size_pieces(count: int, tile_bytes: int, config: KernelConfig) -> PieceSizes:
    """The sizes of the pieces of `count` tiles for each owner: of about the configuration's piece_bytes."""
    assert config.blocks is not None
    size = divide_up(count, max(1, min(count * tile_bytes // config.piece_bytes, _MOST_PIECES, count)))
    threads = 1 if tiles.INTERPRETED.value else 32 * config.blocks.num_warps
    return PieceSizes(divide_up(count, size) + 1, size, threads)


class CopyPiece(NamedTuple):
    """Tiles `start` to `stop` - 1 of an owner, which are stored once counter number `counter` reaches `target`."""

    start: int
    stop: int
    counter: int
    target: int


class CopySchedule(NamedTuple):
    """When which pieces are pushed and added up.

    own: this rank's position in the order in which owners' tiles are multiplied. pushes: (owner, its position, its
    pieces) in that order. adds: pieces of own tiles, without those of the last wave, which are complete when the kernel
    ends.
    """

    own: int
    pushes: tuple[tuple[int, int, tuple[CopyPiece, ...]], ...]
    adds: tuple[CopyPiece, ...]


@lru_cache(maxsize=4096)
def schedule_copies(
    rank: int, world: int, count: int, programs: int, pieces: PieceSizes, is_shifted: bool
) -> CopySchedule:
    """The schedule of a call with `count` tiles for each owner, multiplied by so many programs."""

    def position(owner: int) -> int:
        return (owner - rank - 1) % world if is_shifted else owner

    def split_tiles(place: int) -> tuple[CopyPiece, ...]:
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
    pushes = tuple((owner, position(owner), split_tiles(position(owner))) for owner in others)
    return CopySchedule(position(rank), pushes, split_tiles(position(rank)))


def find_place(source: int, owner: int, world: int) -> int:
    """The source's place in an owner's receive buffer."""
    return (owner - source - 1) % world
