# SPDX-License-Identifier: Apache-2.0
"""The configuration of a grouped product: kernel or library, and tiles. Tables of defaults, to edit after measuring.

An expert's last tile is rarely full, and neither is the last wave of tiles. `estimate_efficiency` counts both for equal
experts, which is what the host knows: the sizes are on the device.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stretto.memory.gpus import count_processors, find_capability
from stretto.ops.config import IMPLEMENTATIONS
from stretto.ops.gemm import TMA_BYTES, Blocks, divide_up
from stretto.tiles import INTERPRETED

Kind = Literal["product", "gate", "gate gradient", "weight gradient"]

DTYPES = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)
_MOST_ROWS = 1 << 30  # see `describe_ragged`

# Of the peak, for shapes that fill their tiles; and of the library's, with many rows an expert. A kernel is taken where
# it is estimated to be faster.
KERNEL_RATE = 0.85
LIBRARY_RATE = 0.97
LIBRARY_ROWS = 180  # rows an expert at which the library reaches half of its rate
MAX_LIBRARY_ROWS = 1024  # from here on the library is near a dense product's speed


class GroupedConfig(NamedTuple):
    """How a grouped product is launched.

    blocks: tiles. n: columns of the result (with a gate, of gate and of up each); k: the step of the sum; of a weights'
    gradient, tiles are m x n of a weight, and k are rows. halves: the last rows of an expert, if they fit, take a tile
    of half the rows. is_flattened: the compiler joins loops over tiles and steps, so that a tile's loads begin before
    the last one's stores; not with halves. stores_by_tma: whether whole tiles of plain products are.
    """

    blocks: Blocks
    halves: bool = False
    is_flattened: bool = False
    stores_by_tma: bool = False


class GroupedWork(NamedTuple):
    """A grouped product, as far as its speed depends on it: rows n of all experts, columns and depth of a weight."""

    kind: Kind
    n: int
    columns: int
    depth: int
    experts: int
    by_tokens: bool


TABLE: dict[Kind, GroupedConfig] = {
    "product": GroupedConfig(Blocks(128, 256, 64, 8, 8, 4, 1), halves=True),
    "gate": GroupedConfig(Blocks(128, 128, 64, 8, 8, 4, 1), halves=True),
    "gate gradient": GroupedConfig(Blocks(128, 128, 64, 8, 8, 4, 1), halves=True),
    "weight gradient": GroupedConfig(Blocks(128, 256, 64, 8, 8, 3, 1)),
}


def find_config(work: GroupedWork, processors: int) -> GroupedConfig:
    """The tiles of a product on a GPU with so many multiprocessors; 0: it is interpreted."""
    config = TABLE[work.kind]
    if processors == 0:
        return config._replace(blocks=config.blocks._replace(m=32, n=32, k=32, num_stages=2, programs=4))
    return config._replace(blocks=config.blocks._replace(programs=processors * config.blocks.programs))


@lru_cache(maxsize=4096)
def is_faster(work: GroupedWork, processors: int) -> bool:
    """True if the kernel is estimated to be faster than the library: the choice of implementation="auto"."""
    rows = work.n // max(work.experts, 1)
    if rows >= MAX_LIBRARY_ROWS:
        return False
    library = LIBRARY_RATE * rows / (rows + LIBRARY_ROWS)
    return estimate_efficiency(work, processors) * KERNEL_RATE > library


def estimate_efficiency(work: GroupedWork, processors: int) -> float:
    """The part of the tiles' time that is spent on what the product needs, for experts of equally many rows."""
    config = find_config(work, processors)
    blocks, rows = config.blocks, max(1, work.n // max(work.experts, 1))
    if work.kind == "weight gradient":
        tiles = work.experts * divide_up(work.columns, blocks.m) * divide_up(work.depth, blocks.n)
        return rows / (divide_up(rows, blocks.k) * blocks.k) * _fill_waves(tiles, blocks.programs)
    grain = blocks.m // 2 if config.halves else blocks.m
    column_tiles = divide_up(work.columns, blocks.n)
    tiles = work.experts * divide_up(rows, blocks.m) * column_tiles
    filled = rows / (divide_up(rows, grain) * grain) * work.columns / (column_tiles * blocks.n)
    return filled * _fill_waves(tiles, blocks.programs)


def _fill_waves(tiles: int, programs: int) -> float:
    return tiles / (divide_up(tiles, programs) * programs)


def choose_config(
    implementation: str,
    kind: Kind,
    n: int,
    weight: tuple[int, int, int],
    operands: tuple[Tensor, ...],
    *,
    by_tokens: bool,
) -> GroupedConfig | None:
    """The configuration of a call, or None for the library. ValueError where "kernel" is asked for in vain.

    weight: [experts, columns, depth]; with a gate, columns are those of gate and up together. operands: all tensors
    that TMA loads or stores.
    """
    if implementation == "library":
        return None
    first = operands[0]
    obstacle = _find_obstacle(n, operands)
    if obstacle is not None:
        if implementation == "kernel":
            raise ValueError(f'implementation="kernel": {obstacle}; "auto" takes the library')
        return None
    experts, columns, depth = weight
    work = GroupedWork(kind, n, columns // 2 if kind == "gate" else columns, depth, experts, by_tokens)
    processors = count_processors(first.device.index) if first.is_cuda else 0
    # The library takes fp16 expert by expert, and the host waits for the offsets.
    is_taken = first.is_cuda and (first.dtype == torch.float16 or is_faster(work, processors))
    return find_config(work, processors) if implementation == "kernel" or is_taken else None


def _find_obstacle(n: int, operands: tuple[Tensor, ...]) -> str | None:
    """Why the kernels cannot take a call, None if they can."""
    first = operands[0]
    if first.dtype not in DTYPES:
        return f"grouped kernels take {' or '.join(map(str, DTYPES))}, not {first.dtype}"
    if first.is_cuda:
        if find_capability(first.device.index) != _HOPPER or torch.version.cuda is None:
            return "grouped kernels are for GPUs of compute capability 9.0"
    elif not INTERPRETED:
        return f"grouped kernels run on GPUs, not on {first.device}"
    if n > _MOST_ROWS:
        return f"grouped kernels take up to {_MOST_ROWS} rows, not {n}"
    for operand in operands:
        if any(size * operand.element_size() % TMA_BYTES for size in operand.shape[1:]):
            return f"grouped kernels take rows and weights whose sizes are multiples of 8, not {list(operand.shape)}"
        if operand.data_ptr() % TMA_BYTES:
            return f"grouped kernels take tensors that begin at multiples of {TMA_BYTES} bytes"
    return None


def require_implementation(implementation: str) -> None:
    """ValueError for an unknown name."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}")
