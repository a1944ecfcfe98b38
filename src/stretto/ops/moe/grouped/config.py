# SPDX-License-Identifier: Apache-2.0
"""The configuration of a grouped product: kernel or library, and tiles."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stretto.memory.gpus import count_processors, find_capability
from stretto.ops.config import IMPLEMENTATIONS
from stretto.ops.gemm import TMA_BYTES, Blocks
from stretto.tiles import INTERPRETED

Kind = Literal["product", "gate", "gate gradient", "weight gradient"]

DTYPES = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)
MOST_ROWS = 1 << 30  # see `describe_ragged`

# Rows an expert, on average. What is chosen from them was measured on H200, of 8 to 128 experts, uniform and skewed.
_FEW_ROWS = 256
_MANY_ROWS = 1536


class GroupedConfig(NamedTuple):
    """The tiles of a grouped product, and the form of its loops and stores.

    blocks: tiles. n: columns of the result (with a gate, of gate and of up each); k: the step of the sum; of a weights'
    gradient, tiles are m x n of a weight, and k are rows. halves: the last rows of an expert, if they fit, take a tile
    of half the rows. is_flattened: of products; the compiler joins loops over tiles and steps, so that a tile's loads
    begin before the last one's stores, which are TMA's; not with halves.
    """

    blocks: Blocks
    halves: bool = False
    is_flattened: bool = False


TABLE: dict[Kind, GroupedConfig] = {
    "product": GroupedConfig(Blocks(128, 256, 64, 8, 8, 3, 1), is_flattened=True),
    "gate": GroupedConfig(Blocks(128, 128, 64, 8, 8, 4, 1), halves=True),
    "gate gradient": GroupedConfig(Blocks(128, 128, 64, 8, 8, 4, 1), halves=True),
    "weight gradient": GroupedConfig(Blocks(128, 128, 32, 8, 4, 6, 2)),
}
_WEIGHT_GRADIENT_OF_MANY_ROWS = GroupedConfig(Blocks(128, 256, 64, 8, 8, 3, 1))


def find_config(kind: Kind, rows_of_expert: float, processors: int) -> GroupedConfig:
    """The tiles of a product on so many multiprocessors of a GPU; 0: it is interpreted."""
    has_many = kind == "weight gradient" and rows_of_expert >= _MANY_ROWS
    config = _WEIGHT_GRADIENT_OF_MANY_ROWS if has_many else TABLE[kind]
    if processors == 0:
        return config._replace(blocks=config.blocks._replace(m=32, n=32, k=32, num_stages=2, programs=4))
    return config._replace(blocks=config.blocks._replace(programs=processors * config.blocks.programs))


def is_faster(kind: Kind, rows_of_expert: float) -> bool:
    """True if the kernel is faster than the library with its passes that gather and gate: the choice of "auto".

    A gate's epilogue takes as long as its pass does, so that it pays only where there is little else.
    """
    return kind in ("product", "weight gradient") or rows_of_expert < _FEW_ROWS


def choose_config(
    implementation: str, kind: Kind, n: int, experts: int, operands: tuple[Tensor, ...], *, room: int = 0
) -> GroupedConfig | None:
    """The configuration of a call, or None for the library. ValueError where "kernel" is asked for in vain.

    n: rows of all experts. operands: all tensors that TMA loads or stores. room: multiprocessors that it leaves free.
    """
    if implementation == "library":
        return None
    first = operands[0]
    obstacle = _find_obstacle(n, operands)
    if obstacle is not None:
        if implementation == "kernel":
            raise ValueError(f'implementation="kernel": {obstacle}; "auto" takes the library')
        return None
    rows_of_expert = n / max(experts, 1)
    processors = max(count_processors(first.device.index) - room, 1) if first.is_cuda else 0
    # The library takes fp16 expert by expert, and the host waits for the offsets.
    is_taken = first.is_cuda and (first.dtype == torch.float16 or is_faster(kind, rows_of_expert))
    return find_config(kind, rows_of_expert, processors) if implementation == "kernel" or is_taken else None


def _find_obstacle(n: int, operands: tuple[Tensor, ...]) -> str | None:
    """Say why the kernels cannot take a call, None if they can."""
    first = operands[0]
    if first.dtype not in DTYPES:
        return f"grouped kernels take {' or '.join(map(str, DTYPES))}, not {first.dtype}"
    if first.is_cuda:
        if find_capability(first.device.index) != _HOPPER or torch.version.cuda is None:
            return "grouped kernels are for GPUs of compute capability 9.0"
    elif not INTERPRETED:
        return f"grouped kernels run on GPUs, not on {first.device}"
    if n > MOST_ROWS:
        return f"grouped kernels take up to {MOST_ROWS} rows, not {n}"
    for operand in operands:
        if any(size * operand.element_size() % TMA_BYTES for size in operand.shape[1:]):
            return f"grouped kernels take rows and weights whose sizes are multiples of 8, not {list(operand.shape)}"
        if operand.data_ptr() % TMA_BYTES:
            return f"grouped kernels take tensors that begin at multiples of {TMA_BYTES} bytes"
    return None


def require_implementation(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}")
