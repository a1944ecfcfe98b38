# SPDX-License-Identifier: Apache-2.0
"""Kernel configurations: tile sizes, and how rows and partial sums are transferred (TileLink, section 3.1).

`KernelConfig` holds every choice that can be made for a call, each independent of the others; `encode` and `decode`
turn it into text and back, for operators' schemas and for tuning files. `gemm.defaults` has the tables of defaults.
"""

import json
from functools import lru_cache
from typing import NamedTuple

import torch

from stretto.memory import shared_gpus
from stretto.memory.gpus import bound_blocks

FP8 = torch.float8_e4m3fn
"""The dtype of 8 bits that products take: 4 of exponent, 3 of mantissa, up to 448."""

IMPLEMENTATIONS = ("auto", "kernel", "library")
TRANSFERS = ("copies", "programs")
DIRECTIONS = ("push", "pull")
EXCHANGES = ("tiles", "packets")


class Blocks(NamedTuple):
    """Tile sizes, and how a kernel with such tiles is launched.

    group_rows: rows of tiles that are processed together (Triton's GROUP_SIZE_M), so that the operands they share stay
    in the L2 cache. programs: programs of the persistent kernel.
    """

    m: int
    n: int
    k: int
    group_rows: int
    num_warps: int
    num_stages: int
    programs: int


class GemmProblem(NamedTuple):
    """What determines a configuration's speed for a call. m: rows of all ranks; n, k: of a rank's weight."""

    operator: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    world: int

    @property
    def name(self) -> str:
        """The problem as text, for tables, logs and the keys of the tuning store."""
        order = " transposed" if self.transposed else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operator} m={self.m} n={self.n} k={self.k}{order} {dtype} {self.world} ranks"


class Machine(NamedTuple):
    """What a default depends on: multiprocessors (0: kernels are interpreted), and whether TMA takes the operands."""

    processors: int
    by_tma: bool
    is_hopper: bool


class KernelConfig(NamedTuple):
    """The kernel configuration of a call; an operator ignores the fields that do not apply to it.

    implementation: "kernel" or "library" (which ignores all other fields). blocks: the GEMM's tiles, whose columns are
    a multiple of 16; kernels that exchange tiles, or whose rows copy engines move, round them down to a power of two.
    transfer: how gathered rows are transferred: by copy engines ("copies"), or by the first `movers` programs of the
    kernel before they multiply ("programs"), which push or pull them (direction); and how tiles of partial sums are
    transferred: by copy engines, or by the program that has computed them. piece_bytes: bytes transferred per signal.
    exchange: partial sums are sent as "tiles", or, for few rows, as "packets". shots: of an all-reduce: 1, all ranks
    send to all ranks; 2, an owner reduces and broadcasts. is_shifted: each rank begins with another rank's tiles (Flux,
    section 4.1); if not, all begin with rank 0's. Tuning files contain these names: renaming a field makes earlier
    measurements unreadable.
    """

    implementation: str = "kernel"
    blocks: Blocks | None = None
    transfer: str = "copies"
    direction: str = "push"
    movers: int = 16
    piece_bytes: int = 8 << 20
    exchange: str = "tiles"
    shots: int = 1
    is_shifted: bool = True

    def with_power_of_two_tiles(self) -> "KernelConfig":
        """The configuration for kernels whose tiles have a power of two of columns: rounded down to one."""
        if self.blocks is None or has_power_of_two_columns(self.blocks):
            return self
        return self._replace(blocks=self.blocks._replace(n=1 << (self.blocks.n.bit_length() - 1)))

    def encode(self) -> str:
        """The configuration as text, which `decode` reads: for operators' schemas and the tuning store."""
        return _encode(self)


LIBRARY = KernelConfig(implementation="library")


def encode_implementation(implementation: str | KernelConfig) -> str:
    """The user's `implementation` as an operator's schema takes it. ValueError for anything else."""
    if isinstance(implementation, KernelConfig):
        return _encode_constant(implementation)
    if isinstance(implementation, str) and (implementation in IMPLEMENTATIONS or implementation.startswith("{")):
        return implementation  # the latter is an encoded configuration, which `decode` reads
    raise ValueError(f'implementation is "auto", "kernel", "library" or a KernelConfig, not {implementation!r}')


@lru_cache(maxsize=4096)
def _encode(config: KernelConfig) -> str:
    if config == LIBRARY:
        return "library"
    return json.dumps(dict(config._asdict(), blocks=None if config.blocks is None else list(config.blocks)))


@torch.compiler.assume_constant_result  # torch.compile does not trace into json
def _encode_constant(config: KernelConfig) -> str:
    return _encode(config)


@lru_cache(maxsize=4096)
def decode(text: str) -> KernelConfig:
    """The configuration that `KernelConfig.encode` wrote as this text. ValueError for other text."""
    if text == "library":
        return LIBRARY
    try:
        fields = json.loads(text)
        if fields["blocks"] is not None:
            fields["blocks"] = Blocks(*fields["blocks"])
        config = KernelConfig(**fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} is no configuration of a kernel: {error}") from error
    require_config(config)
    return config


def require_config(config: KernelConfig) -> None:
    """ValueError for a configuration whose fields have unknown or impossible values."""
    options = (
        ("implementation", config.implementation, IMPLEMENTATIONS[1:]),
        ("transfer", config.transfer, TRANSFERS),
        ("direction", config.direction, DIRECTIONS),
        ("exchange", config.exchange, EXCHANGES),
        ("shots", config.shots, (1, 2)),
        ("is_shifted", config.is_shifted, (False, True)),
    )
    for what, given, known in options:
        if given not in known:
            raise ValueError(f"a configuration's {what} is one of {', '.join(map(str, known))}, not {given!r}")
    if config.transfer == "copies" and config.direction == "pull":
        raise ValueError('copy engines push: "pull" goes with transfer="programs"')
    for what, number in (("movers", config.movers), ("piece_bytes", config.piece_bytes)):
        if not isinstance(number, int) or not 1 <= number <= 1 << 30:
            raise ValueError(f"a configuration's {what} is a whole number, 1 or more, not {number!r}")
    if config.blocks is not None:
        _require_blocks(config.blocks)


def _require_blocks(blocks: Blocks) -> None:
    for name, value in blocks._asdict().items():
        if not isinstance(value, int) or not 1 <= value <= 4096:
            raise ValueError(f"{name} of blocks is a whole number from 1 to 4096, not {value!r}")
    if blocks.n % 16:
        raise ValueError(f"n of blocks is a multiple of 16, not {blocks.n}")
    for name, value in (("m", blocks.m), ("k", blocks.k), ("num_warps", blocks.num_warps)):
        if value & (value - 1) or value < (1 if name == "num_warps" else 16):
            raise ValueError(f"{name} of blocks is a power of two (tiles: 16 or more), not {value}")


def has_power_of_two_columns(blocks: Blocks) -> bool:
    """Whether a tile's columns are a power of two, as Triton's own tiles are."""
    return not blocks.n & (blocks.n - 1)


def count_column_parts(blocks: Blocks) -> int:
    """In how many parts a tile's columns are multiplied: each of a power of two, up to 64 or 128."""
    return blocks.n // min(blocks.n & -blocks.n, 64 if blocks.m <= 64 else 128)


def divide_up(number: int, by: int) -> int:
    """number / by, rounded up. `triton.cdiv` is made for kernels, and takes the host microseconds."""
    return -(-number // by)


@lru_cache
def find_capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU of this process."""
    return torch.cuda.get_device_capability(index)


@lru_cache
def count_processors(index: int) -> int:
    """The multiprocessors of a GPU of this process."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def bound_programs(processors: int) -> int:
    """The most programs of a kernel that may hold multiprocessors while they wait for other ranks (`bound_blocks`).

    The rest is left to kernels of other groups, NCCL's among them, that a peer may have launched first. If both filled
    their GPUs, each would wait for a kernel that cannot be scheduled on the other GPU.
    """
    return bound_blocks(processors)


def limit_waiting(programs: int, device: torch.device) -> int:
    """`programs`, but at most `bound_programs` of the GPU's multiprocessors; interpreted programs wait in turns."""
    return min(programs, bound_programs(count_processors(device.index))) if device.type == "cuda" else programs


@lru_cache
def leave_room_for_copies(programs: int, device: torch.device) -> int:
    """`programs` of a kernel that waits for copies of peers, limited like `limit_waiting` if ranks share GPUs.

    Between GPUs, copy engines copy. A copy within a GPU may need a multiprocessor of the rank that issues it, which a
    kernel that fills the rank's share while it waits would never give back.
    """
    return limit_waiting(programs, device) if shared_gpus.is_enabled() else programs


@lru_cache(maxsize=4096)
def limit_programs(config: KernelConfig, device: torch.device) -> KernelConfig:
    """The configuration with no more programs than may wait at once on the device (`bound_programs`)."""
    assert config.blocks is not None
    programs = limit_waiting(config.blocks.programs, device)
    return config._replace(blocks=config.blocks._replace(programs=programs), movers=min(config.movers, programs))
