# SPDX-License-Identifier: Apache-2.0
"""The schedule of a reduce-scatter's copies: in which pieces copy engines push tiles to their owners, and when.

A schedule depends on sizes alone, so that it is computed once for them.

The kernel (`matmul_reduce_scatter_copies._count_tile`) computes each tile's piece and counter from the same sizes, and
both must find the same numbers. An example: 2 ranks, 5 tiles per owner, 4 programs (a wave is 4 tiles), pieces of 2
tiles, owners in the order of ranks (is_shifted False). PieceSizes.number is 4: 3 pieces of up to 2 tiles, and one more
for the last wave.

    index                 0  1  2  3 |  4  5  6  7 |  8  9
    wave                  0  0  0  0 |  1  1  1  1 |  2  2    index // programs
    position              0  0  0  0    0  1  1  1    1  1    index // tiles_per_owner: of the owner, here its rank
    tile                  0  1  2  3    4  0  1  2    3  4    index % tiles_per_owner
    piece                 0  0  1  1    2  0  0  1    2  2    the last wave begins a new one
    counter on rank 0     0  0  1  1    2  4  4  5    6  6    position * number + piece
    counter on rank 1     0  0  1  1    2  4  4  5    -  -    own tiles of the last wave are not counted

Rank 0 pushes tiles 0-1, 2 and 3-4 to rank 1, when counters 4, 5 and 6 reach 2, 1 and 2 (times PieceSizes.threads), and
adds up its own tiles 0-1, 2-3 and 4 by counters 0, 1 and 2. Rank 1 pushes tiles 0-1, 2-3 and 4 to rank 0 by counters 0,
1 and 2, and adds up its own tiles 0-1 and 2 by counters 4 and 5; tiles 3 and 4 when the kernel has ended.
"""

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

from stretto import tiles
from stretto.ops.gemm.config import KernelConfig, divide_up

_MAX_PIECES = 8  # that an owner's tiles are split into, without the last wave's


class PieceSizes(NamedTuple):
    """How an owner's tiles are pushed or added up: in pieces of `size` tiles, up to `number` of them.

    The last wave of tiles begins a new piece, so that the tiles before it need not wait for it. threads: that count a
    tile.
    """

    number: Any
    size: Any
    threads: Any


@lru_cache(maxsize=4096)
def size_pieces(tiles_per_owner: int, tile_bytes: int, config: KernelConfig) -> PieceSizes:
    """The sizes of the pieces of `tiles_per_owner` tiles for each owner: of about the configuration's piece_bytes."""
    assert config.blocks is not None
    size = divide_up(
        tiles_per_owner, max(1, min(tiles_per_owner * tile_bytes // config.piece_bytes, _MAX_PIECES, tiles_per_owner))
    )
    threads = 1 if tiles.INTERPRETED.value else 32 * config.blocks.num_warps
    return PieceSizes(divide_up(tiles_per_owner, size) + 1, size, threads)


class CopyPiece(NamedTuple):
    """Tiles `start` to `stop` - 1 of an owner, which are stored once counter number `counter` reaches `target`."""

    start: int
    stop: int
    counter: int
    target: int


class CopySchedule(NamedTuple):
    """When which pieces are pushed and added up.

    own: this rank's position in the order in which owners' tiles are multiplied. push_order: (owner, its position, its
    pieces) in that order. adds: pieces of own tiles, without those of the last wave, which are complete when the kernel
    ends.
    """

    own: int
    push_order: tuple[tuple[int, int, tuple[CopyPiece, ...]], ...]
    adds: tuple[CopyPiece, ...]


@lru_cache(maxsize=4096)
def schedule_copies(
    rank: int, world: int, tiles_per_owner: int, programs: int, pieces: PieceSizes, is_shifted: bool
) -> CopySchedule:
    """The schedule of a call with `tiles_per_owner` tiles for each owner, multiplied by so many programs."""

    def find_position(owner: int) -> int:
        return (owner - rank - 1) % world if is_shifted else owner

    def split_tiles(position: int) -> tuple[CopyPiece, ...]:
        last_wave = (world * tiles_per_owner - 1) // programs * programs
        split = min(max(last_wave - position * tiles_per_owner, 0), tiles_per_owner)
        starts = [*range(0, split, pieces.size), split]
        if split < tiles_per_owner and position != find_position(rank):
            starts.append(tiles_per_owner)
        return tuple(
            CopyPiece(start, stop, position * pieces.number + piece, (stop - start) * pieces.threads)
            for piece, (start, stop) in enumerate(itertools.pairwise(starts))
        )

    others = sorted(set(range(world)) - {rank}, key=find_position)
    push_order = tuple((owner, find_position(owner), split_tiles(find_position(owner))) for owner in others)
    return CopySchedule(find_position(rank), push_order, split_tiles(find_position(rank)))


def find_place(source: int, owner: int, world: int) -> int:
    """The source's place in an owner's receive buffer."""
    return (owner - source - 1) % world
