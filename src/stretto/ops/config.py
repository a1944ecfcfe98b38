# SPDX-License-Identifier: Apache-2.0
"""The configuration of a call: what there is to choose, and defaults.

`KernelConfig` holds every choice that can be made for a call, each independent of the others (TileLink, section 3.1):
tile sizes, and how rows and partial sums are transferred. `encode` and `decode` turn it into text and back, for
operators' schemas and for tuning files. `stretto.ops.choices` chooses one for each call. The tables of defaults at the
end are meant to be edited after measuring.
"""

import json
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from stretto.memory.gpus import bound_blocks
from stretto.ops.gemm import Blocks, count_waves, divide_up, has_power_of_two_columns
from stretto.ops.prediction import (
    FEW_ROWS,
    NEVER_SLOWER,
    GemmCall,
    Speeds,
    count_pieces,
    predict_kernel,
    predict_library,
)

IMPLEMENTATIONS = ("auto", "kernel", "library")
TRANSFERS = ("copies", "programs")
DIRECTIONS = ("push", "pull")
EXCHANGES = ("tiles", "packets")


class GemmProblem(NamedTuple):
    """A call as far as a configuration's speed depends on it. m: rows of all ranks; n, k: of a rank's weight.

    returns_gathered: an all-gather's gathered rows are returned, too, for which copy engines must bring them. experts,
    top_k: of a grouped product, whose m are tokens, of which each has top_k rows.
    """

    operator: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    world: int
    returns_gathered: bool = False
    experts: int = 0
    top_k: int = 0

    @property
    def name(self) -> str:
        """The problem as text, for tables, logs and the keys of the tuning store."""
        order = " transposed" if self.transposed else ""
        dtype = str(self.dtype).removeprefix("torch.")
        gathered = "_gathered" if self.returns_gathered else ""
        experts = f" top-{self.top_k} of {self.experts} experts" if self.experts else ""
        return f"{self.operator}{gathered} m={self.m} n={self.n} k={self.k}{order} {dtype} {self.world} ranks{experts}"


class Machine(NamedTuple):
    """A machine as far as defaults depend on it.

    processors: multiprocessors; 0: kernels are interpreted. by_tma: whether TMA takes the operands. speeds: the slowest
    of the group's, on GPUs.
    """

    processors: int
    by_tma: bool
    is_hopper: bool
    speeds: Speeds | None = None


class KernelConfig(NamedTuple):
    """The kernel configuration of a call; an operator ignores the fields that do not apply to it.

    implementation: "kernel" or "library" (which ignores all other fields). blocks: the GEMM's tiles, whose columns are
    a multiple of 16; kernels that exchange tiles, or whose rows copy engines move, round them down to a power of two.
    transfer: what transfers rows, or partial sums: copy engines ("copies"), which by a schedule push or pull them
    (direction), or the first `movers` programs of the kernel ("programs"): of a schedule, or of a gather of few rows,
    before they multiply. piece_bytes: bytes that copy engines transfer per signal. exchange: partial sums are sent as
    "tiles", or, for few rows, as "packets". shots: of an all-reduce's packets: 1, all ranks send to all ranks; 2, an
    owner reduces and broadcasts. is_shifted: of copy engines and schedules: tiles that arrive, or are needed, first
    come first (Flux, section 4.1); if not, all ranks begin with rank 0's. schedule: the name of a collective's schedule
    that moves rows (`stretto.ops.joint`), "" for the operator's own. Tuning files contain these names: renaming a field
    makes earlier measurements unreadable.
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
    schedule: str = ""

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
    raise ValueError(f'implementation must be "auto", "kernel", "library" or a KernelConfig, not {implementation!r}')


@lru_cache(maxsize=4096)
def _encode(config: KernelConfig) -> str:
    if config == LIBRARY:
        return "library"
    return json.dumps(dict(config._asdict(), blocks=None if config.blocks is None else list(config.blocks)))


@torch.compiler.assume_constant_result  # torch.compile does not trace into json
def _encode_constant(config: KernelConfig) -> str:
    return _encode(config)


@lru_cache(maxsize=4096)
def decode(text: str, schedule: str = "") -> KernelConfig:
    """The configuration that `KernelConfig.encode` wrote as this text. ValueError for other text.

    schedule: to have in it, if any.
    """
    if text == "library":
        return LIBRARY
    try:
        fields = json.loads(text)
        if fields["blocks"] is not None:
            fields["blocks"] = Blocks(*fields["blocks"])
        config = KernelConfig(**fields)
        config = config._replace(schedule=schedule or config.schedule)
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
            raise ValueError(f"a configuration's {what} must be one of {', '.join(map(str, known))}, not {given!r}")
    if not isinstance(config.schedule, str):
        raise ValueError(f"a configuration's schedule must be its name, not {config.schedule!r}")
    if config.direction == "pull" and (config.transfer != "copies" or not config.schedule):
        raise ValueError('rows are pulled by a schedule and copy engines: "pull" goes with schedule= and "copies"')
    for what, number in (("movers", config.movers), ("piece_bytes", config.piece_bytes)):
        if not isinstance(number, int) or not 1 <= number <= MAX_PIECE_BYTES:
            raise ValueError(f"a configuration's {what} must be a whole number, 1 or more, not {number!r}")
    if config.blocks is not None:
        _require_blocks(config.blocks)


def _require_blocks(blocks: Blocks) -> None:
    for name, value in blocks._asdict().items():
        if not isinstance(value, int) or not 1 <= value <= 4096:
            raise ValueError(f"{name} of blocks must be a whole number from 1 to 4096, not {value!r}")
    if blocks.n % 16:
        raise ValueError(f"n of blocks must be a multiple of 16, not {blocks.n}")
    for name, value in (("m", blocks.m), ("k", blocks.k), ("num_warps", blocks.num_warps)):
        if value & (value - 1) or value < (1 if name == "num_warps" else 16):
            raise ValueError(f"{name} of blocks must be a power of two (tiles: 16 or more), not {value}")


def pin_backward(implementation: str) -> str:
    """The `implementation` of the backward pass's operator: a configuration fits one operator and its shapes alone."""
    if implementation in IMPLEMENTATIONS:
        return implementation
    return decode(implementation).implementation


MOSTLY_BUSY = 0.7
"""If so large a part of the programs have one tile each, tiles are not split over k: memory bandwidth is the limit, and
a fix-up takes longer than the idle programs cost."""

SUM_PIECE_BYTES = 6 << 20
MAX_PIECE_BYTES = 1 << 30
COOL_ROWS = 4096
"""Above, a gather is faster in tiles of 128 columns, by two programs on a multiprocessor: power is the limit."""

MAX_GATHERED_ROWS = 4
"""The most `group_rows` where copy engines bring the rows. fp8 has no such limit, since it reads the L2 cache at twice
the rate."""

NARROW_SPEED = 0.85
"""Speed of tiles of 128 columns relative to 256: they are taken where 256 would leave too many programs idle."""

PUSHED_ROWS = 4 * FEW_ROWS
"""The most rows of all ranks that programs push. Of 512 it took 10% longer than NCCL on four H100, and as long on four
H200; of 4,096 and 16,384, 49 and 40% longer than copy engines on two H200 (lab/results/joint-schedules)."""

ONE_SHOT_BYTES = 900_000
"""Bytes that one shot may send more than two shots do, which wait for each other: as many as travel in that time."""

_MIN_STAGES = 3  # of loads in flight, where memory bandwidth is the limit
_PAYING_BYTES = 164 << 10  # of shared memory on a multiprocessor: with more, products of 64 rows take 1% longer
_MAX_BYTES = 200 << 10


def default_config(problem: GemmProblem, machine: Machine) -> tuple[KernelConfig, str]:
    """The configuration where nothing was measured, and the reason for it.

    Kernels on Hopper for types of up to 16 bits that TMA takes: there Triton's GEMM is as fast as the library's; and
    where the machine's speeds say that a kernel is not slower. Interpreted, always kernels.
    Experts' products take the library: the model has no constants of their kernels.
    """
    if problem.experts:
        return LIBRARY, find_refusal(problem, machine) or "nothing was measured"
    if not machine.processors:
        return default_kernel(problem, machine), "kernels are interpreted"
    if refusal := find_refusal(problem, machine):
        return LIBRARY, refusal
    if machine.speeds is None:
        return LIBRARY, "the GPU's speeds are not known"
    config, call = default_kernel(problem, machine), _describe_call(problem)
    assert config.blocks is not None
    exchange = config.exchange if config.exchange == "packets" else config.transfer
    seconds = predict_kernel(call, machine.speeds, machine.processors, config.blocks, exchange, config.shots)
    library = predict_library(call, machine.speeds)
    why = f"nothing was measured: a kernel should take {seconds * 1e6:.1f} us, the library {library * 1e6:.1f}"
    return (config if NEVER_SLOWER * seconds <= library else LIBRARY), why


def find_refusal(problem: GemmProblem, machine: Machine) -> str:
    """Say why no kernel is a default, whatever the machine's speeds are; "" where one may be."""
    if problem.experts and (problem.dtype.itemsize != 2 or problem.n % 8 or problem.k % 8):
        return "kernels of experts are for 16 bits, and weights whose sizes are multiples of 8"
    if not machine.processors:
        return ""
    if not machine.is_hopper or problem.dtype.itemsize > 2 or not machine.by_tma:
        return "kernels are for operands of up to 16 bits that TMA takes, on sm_90"
    if problem.operator != "all_gather_matmul" and problem.m > FEW_ROWS and problem.world == 1:
        return f"it has more than {FEW_ROWS} rows, and one rank sends none"
    return ""


def _describe_call(problem: GemmProblem) -> GemmCall:
    return GemmCall(problem.operator, problem.m, problem.n, problem.k, problem.dtype.itemsize, problem.world)


def default_kernel(problem: GemmProblem, machine: Machine) -> KernelConfig:
    """The kernel where nothing was measured: of few rows by one launch, else by copy engines."""
    if problem.experts:
        return KernelConfig()
    if not machine.processors:  # tests take few rows for many
        few, blocks = problem.m <= 16, default_blocks(problem, machine)
        transfer = "programs" if few and not problem.returns_gathered else "copies"
        return KernelConfig(blocks=blocks, exchange="packets" if few else "tiles", transfer=transfer)
    config, gathers = KernelConfig(blocks=default_blocks(problem, machine)), problem.operator == "all_gather_matmul"
    if is_pushed(problem):
        return config._replace(transfer="programs", movers=count_usable(problem, machine))
    config = config if gathers else config._replace(piece_bytes=SUM_PIECE_BYTES)
    if gathers or problem.m > FEW_ROWS:
        return _size_pieces(config, problem, machine)
    sums = (problem.world - 1) * problem.m * problem.n * max(2, problem.dtype.itemsize)
    is_large = problem.operator == "matmul_all_reduce" and sums - 2 * sums // problem.world > ONE_SHOT_BYTES
    return config._replace(exchange="packets", shots=2 if is_large else 1)


def _size_pieces(config: KernelConfig, problem: GemmProblem, machine: Machine) -> KernelConfig:
    """The configuration with the largest pieces that hide what copy engines transfer (`count_pieces`)."""
    if machine.speeds is None:
        return config
    assert config.blocks is not None
    is_gather = problem.operator == "all_gather_matmul"
    shard = problem.m * (problem.k * problem.dtype.itemsize if is_gather else problem.n * 2) // problem.world
    count = count_pieces(_describe_call(problem), machine.speeds, machine.processors, config.blocks)
    return config._replace(piece_bytes=min(max(config.piece_bytes, shard // count), MAX_PIECE_BYTES))


def default_blocks(problem: GemmProblem, machine: Machine) -> Blocks:
    """Tile sizes where nothing was measured."""
    if not machine.processors:  # interpreted programs run in turns: a few, with small tiles
        return Blocks(16 if problem.m <= 16 else 32, 32, 32, 2, 4, 2, 3)
    itemsize = problem.dtype.itemsize
    is_gather = problem.operator == "all_gather_matmul"
    shards = problem.world if problem.operator == "matmul_reduce_scatter" else 1
    processors = count_usable(problem, machine)
    m = problem.m // shards
    if problem.m <= FEW_ROWS:
        blocks = small_m_blocks(problem.m, problem.n, itemsize, machine.by_tma, processors)
    else:
        wide, narrow = (look_up_blocks(m, itemsize, machine.by_tma, is_wide, processors) for is_wide in (True, False))
        narrow_takes = _estimate(problem, shards, narrow) / NARROW_SPEED
        blocks = wide if _estimate(problem, shards, wide) <= narrow_takes else narrow
        if is_gather and problem.m > COOL_ROWS and machine.by_tma and itemsize == 2:
            blocks = Blocks(128, 128, 64, blocks.group_rows, 4, 3, 2 * machine.processors)
        most = MAX_GATHERED_ROWS if is_gather and itemsize > 1 else blocks.group_rows
        most = min(blocks.group_rows, most, count_grouped_rows(problem) // blocks.m)
        blocks = blocks._replace(group_rows=max(1, most))
    return blocks if machine.is_hopper else blocks._replace(num_stages=min(blocks.num_stages, 3))


def look_up_blocks(m: int, itemsize: int, by_tma: bool, fills_gpu: bool, processors: int) -> Blocks:
    """Tile sizes for GPUs, one persistent program a multiprocessor: a table, not a measurement.

    Tiles are as wide as fp32 accumulators fit into registers (128 x 256 with 8 warps) if such tiles fill the GPU, else
    narrower; they have as few rows as tensor cores take where m is small; and they are smaller where pointers (no TMA)
    or products without tensor cores (fp32) take registers, since larger tiles would spill. itemsize: bytes of an
    operand's element.
    """
    few = max(16, triton.next_power_of_2(min(m, 64)))
    match itemsize == 4, by_tma, m <= 64, fills_gpu:
        case True, _, _, _:
            blocks = Blocks(few, 64, 32, 8, 4 if few == 16 else 8, 3, processors)
        case _, False, True, _:
            blocks = Blocks(few, 128, 64, 8, 4, 3, processors)
        case _, False, _, _:
            blocks = Blocks(128, 128, 32, 8, 8, 3, processors)
        case _, _, True, _:
            blocks = Blocks(few, 128, 128, 8, 4, 4, processors)
        case _, _, _, True:
            blocks = Blocks(128, 256, 64, 8, 8, 4, processors)
        case _:
            blocks = Blocks(128, 128, 128, 8, 8, 3, processors)
    return deepen_for_fp8(blocks, itemsize)


def deepen_for_fp8(blocks: Blocks, itemsize: int) -> Blocks:
    """Blocks whose steps over k have as many bytes in fp8 as those for 16 bits have."""
    return blocks._replace(k=2 * blocks.k) if itemsize == 1 else blocks


def count_usable(problem: GemmProblem, machine: Machine) -> int:
    """The multiprocessors for a default's programs: fewer where programs occupy one while they wait for other ranks."""
    waits = problem.m <= FEW_ROWS or is_pushed(problem)
    return bound_blocks(machine.processors) if waits else machine.processors


def is_pushed(problem: GemmProblem) -> bool:
    """True if programs push a gather's rows, in one launch: of more rows it was no faster than copy engines."""
    return problem.operator == "all_gather_matmul" and problem.m <= PUSHED_ROWS and not problem.returns_gathered


def count_grouped_rows(problem: GemmProblem) -> int:
    """Rows whose tiles may be visited together: as a rule one rank's, or the first tile would wait for all ranks.

    Rows that programs push arrive from all ranks at about one time, and the weight is read once where tiles of all
    ranks are visited together.
    """
    return problem.m if is_pushed(problem) else problem.m // problem.world


def _estimate(problem: GemmProblem, shards: int, blocks: Blocks) -> float:
    """Return how long the problem's tiles take, in elements of one wave of tiles."""
    count = shards * divide_up(problem.m // shards, blocks.m) * divide_up(problem.n, blocks.n)
    return count_waves(count, problem.k, blocks) * blocks.m * blocks.n


def small_m_blocks(m: int, n: int, itemsize: int, any_width: bool, processors: int) -> Blocks:
    """Tiles for few rows: columns so that all multiprocessors have a tile, and as many loads in flight as fit.

    any_width: whether columns may be other than a power of two.
    """
    rows = max(16, triton.next_power_of_2(m))
    if itemsize == 4:
        return Blocks(rows, 32, 64, 1, 4, 3, processors)
    columns = 64 if n >= 64 * processors * 0.9 else 32
    # Fewer rows of fp8 than 64 are converted for tensor cores: all columns of a tile at once, as a power of two.
    is_converted = itemsize == 1 and rows < 64
    if any_width and not is_converted:
        columns = find_width(rows, n, processors) or columns
    blocks = fit_blocks(rows, columns, 256, processors)
    if not is_converted and (rows > 32 or columns < 96 or blocks.k < 256):
        blocks = fit_blocks(rows, columns, 128, processors)
    return deepen_for_fp8(blocks, itemsize)


def find_width(rows: int, n: int, processors: int) -> int:
    """A tile's columns if every program has whole tiles; 0 where that leaves many programs without a tile.

    With few rows memory bandwidth is the limit, and a GPU with some programs less is as fast. Two things cost time: a
    wave in which most programs have no tile, and A, which each tile loads from the L2 cache.
    """
    if divide_up(n, 32) < MOSTLY_BUSY * processors:
        return 0
    return min(
        range(32, 257, 32), key=lambda columns: divide_up(divide_up(n, columns), processors) * (columns + rows // 4)
    )


def fit_blocks(rows: int, columns: int, depth: int, processors: int) -> Blocks:
    """Blocks with as many stages as pay; where these are too few, of half the depth."""
    stage = (rows + columns) * depth * 2
    stages = min(6, max(_PAYING_BYTES // stage, min(_MIN_STAGES, _MAX_BYTES // stage)))
    if stages < _MIN_STAGES:
        return fit_blocks(rows, columns, depth // 2, processors)
    return Blocks(rows, columns, depth, 1, 4, stages, processors)
