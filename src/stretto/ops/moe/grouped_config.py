# SPDX-License-Identifier: Apache-2.0
"""The configuration of a grouped product: kernel or library, and tiles. Tables of defaults, to edit after measuring.

An expert's last tile is rarely full, and neither is the last wave of tiles: `estimate_efficiency` counts both.
"""

import math
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

# The speed beside a dense product's where all tiles are full. Until they are measured, the library's is what it reaches
# with many rows (H200: 783 of 808 TFLOP/s), and the kernel's is a cautious guess. By the dtype of bf16 alone: the
# library takes fp16 expert by expert.
KERNEL_RATE = 0.87
LIBRARY_RATE = 0.97
LIBRARY_TILES = Blocks(128, 256, 64, 8, 8, 4, 1)


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
    kernel = estimate_efficiency(work, find_config(work, processors))
    whole = work._replace(columns=2 * work.columns) if work.kind == "gate" else work  # the library has no gates
    library = estimate_efficiency(whole, GroupedConfig(LIBRARY_TILES._replace(programs=processors)))
    return KERNEL_RATE * kernel > LIBRARY_RATE * library


def estimate_efficiency(work: GroupedWork, config: GroupedConfig) -> float:
    """The part of the tiles' time that is spent on what the product needs.

    The host does not know experts' sizes: half of each expert's last tile is taken to be empty.
    """
    blocks, experts = config.blocks, max(work.experts, 1)
    rows, column_tiles = work.n / experts, divide_up(work.columns, blocks.n)
    if work.kind == "weight gradient":
        tiles, empty = divide_up(work.columns, blocks.m) * divide_up(work.depth, blocks.n), blocks.k / 2
        filled = work.columns * work.depth / (tiles * blocks.m * blocks.n)
    else:
        empty = blocks.m / (4 if config.halves else 2)
        tiles = max(1, round((rows + empty) / blocks.m)) * column_tiles
        filled = work.columns / (column_tiles * blocks.n)
    waves = experts * tiles / blocks.programs
    return filled * rows / (rows + empty) * waves / math.ceil(waves)


def choose_config(
    implementation: str,
    kind: Kind,
    n: int,
    weight: tuple[int, ...],
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
