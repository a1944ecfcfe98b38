"""How a call of an operator is done: all that may be chosen apart from each other (TileLink, section 3.1).

A `KernelConfig` names the GEMM's tiles and, apart from them, how rows travel. `default_config` is the choice where
nothing was measured; what it is made of stands in tables, which are meant to be edited after measuring.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from stretto.ops.gemm.stream_k import count_rounds
from stretto.ops.gemm.tile import Blocks, bound_programs, deepen, divide_up, is_even, limit_waiting, look_up_blocks

IMPLEMENTATIONS = ("auto", "kernel", "library")
TRANSFERS = ("copies", "programs")
DIRECTIONS = ("push", "pull")
EXCHANGES = ("tiles", "packets")
SMALL_M_ROWS = 64
"""Up to so many rows a product is as fast as its weight streams from memory."""

MOSTLY_BUSY = 0.7
"""Of the programs: if so many have one tile each, tiles are whole: memory is the limit, and joining takes longer."""


class GemmProblem(NamedTuple):
    """What is computed: all that decides how fast a plan is. m: rows of the whole; n, k: of a rank's weight."""

    operator: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    world: int

    @property
    def name(self) -> str:
        """For tables, logs and the store's keys."""
        order = " transposed" if self.transposed else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operator} m={self.m} n={self.n} k={self.k}{order} {dtype} {self.world} ranks"


class Machine(NamedTuple):
    """What a default depends on: multiprocessors (0: kernels are interpreted), and whether TMA takes the operands."""

    processors: int
    by_tma: bool
    is_hopper: bool


class KernelConfig(NamedTuple):
    """How a call is done; an operator leaves out what it has not.

    implementation: "kernel" or "library" (which takes nothing else). blocks: the GEMM's tiles, whose columns are a
    multiple of 16; where sums go as tiles, or copy engines move rows, they are rounded down to a power of two.
    transfer: what moves the gathered rows: copy engines ("copies"), or the first `movers` programs of the kernel,
    before they multiply ("programs"), which push or pull them (direction); and what moves tiles of partial sums: copy
    engines, or the program that has multiplied them. piece_bytes: what is moved before a signal. exchange: how partial
    sums go to the ranks: in "tiles", or in "packets", for few rows. shots: of an all-reduce: 1, all send all to all; 2,
    an owner adds up and sends. is_shifted: tiles begin with another rank's rows on every rank (Flux, section 4.1);
    without, all begin with rank 0's.
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

    def with_even_tiles(self) -> "KernelConfig":
        """For a kernel whose tiles have a power of two of columns: with those, no wider than these."""
        if self.blocks is None or is_even(self.blocks):
            return self
        return self._replace(blocks=self.blocks._replace(n=1 << (self.blocks.n.bit_length() - 1)))

    def encode(self) -> str:
        """As text, for the operators' schemas and the store."""
        return _encode(self)


LIBRARY = KernelConfig(implementation="library")


def encode_implementation(implementation: str | KernelConfig) -> str:
    """What an operator's schema takes of its caller's choice. ValueError for what is none."""
    if isinstance(implementation, KernelConfig):
        return _encode_constant(implementation)
    if isinstance(implementation, str) and (implementation in IMPLEMENTATIONS or implementation.startswith("{")):
        return implementation  # the latter is a plan's text, which `decode` reads
    raise ValueError(f'implementation is "auto", "kernel", "library" or a KernelConfig, not {implementation!r}')


@lru_cache(maxsize=4096)
def _encode(plan: KernelConfig) -> str:
    if plan == LIBRARY:
        return "library"
    return json.dumps(dict(plan._asdict(), blocks=None if plan.blocks is None else list(plan.blocks)))


@torch.compiler.assume_constant_result  # torch.compile does not look into json
def _encode_constant(plan: KernelConfig) -> str:
    return _encode(plan)


@lru_cache(maxsize=4096)
def decode(text: str) -> KernelConfig:
    """The plan that `encode` has made text of. ValueError for other text."""
    if text == "library":
        return LIBRARY
    try:
        fields = json.loads(text)
        if fields["blocks"] is not None:
            fields["blocks"] = Blocks(*fields["blocks"])
        plan = KernelConfig(**fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} is no plan: {error}") from error
    require_config(plan)
    return plan


def require_config(plan: KernelConfig) -> None:
    """ValueError for a plan that names what there is not."""
    options = (
        ("implementation", plan.implementation, IMPLEMENTATIONS[1:]),
        ("transfer", plan.transfer, TRANSFERS),
        ("direction", plan.direction, DIRECTIONS),
        ("exchange", plan.exchange, EXCHANGES),
        ("shots", plan.shots, (1, 2)),
        ("is_shifted", plan.is_shifted, (False, True)),
    )
    for what, given, known in options:
        if given not in known:
            raise ValueError(f"a plan's {what} is one of {', '.join(map(str, known))}, not {given!r}")
    if plan.transfer == "copies" and plan.direction == "pull":
        raise ValueError('copy engines push: "pull" goes with transfer="programs"')
    for what, number in (("movers", plan.movers), ("piece_bytes", plan.piece_bytes)):
        if not isinstance(number, int) or not 1 <= number <= 1 << 30:
            raise ValueError(f"a plan's {what} is a whole number, 1 or more, not {number!r}")
    if plan.blocks is not None:
        _require_blocks(plan.blocks)


def _require_blocks(blocks: Blocks) -> None:
    for name, value in blocks._asdict().items():
        if not isinstance(value, int) or not 1 <= value <= 4096:
            raise ValueError(f"{name} of blocks is a whole number from 1 to 4096, not {value!r}")
    if blocks.n % 16:
        raise ValueError(f"n of blocks is a multiple of 16, not {blocks.n}")
    for name, value in (("m", blocks.m), ("k", blocks.k), ("num_warps", blocks.num_warps)):
        if value & (value - 1) or value < (1 if name == "num_warps" else 16):
            raise ValueError(f"{name} of blocks is a power of two (tiles: 16 or more), not {value}")


def default_config(call: GemmProblem, machine: Machine) -> tuple[KernelConfig, str]:
    """The plan where nothing was measured, and why.

    Kernels on Hopper for 16-bit types that TMA takes: there Triton's GEMM is as fast as the library's. All-reduce for
    few rows only: of many rows each program would wait for all. Where kernels are interpreted, always kernels.
    """
    blocks = default_blocks(call, machine)
    plan = KernelConfig(blocks=blocks)
    if not machine.processors:
        few = call.m <= 16
        return plan._replace(exchange="packets" if few else "tiles", transfer="programs" if few else "copies"), (
            "kernels are interpreted"
        )
    if not machine.is_hopper or call.dtype.itemsize > 2 or not machine.by_tma:
        return LIBRARY, "kernels are for operands of up to 16 bits that TMA takes, on sm_90"
    weight_bytes = call.n * call.k * call.dtype.itemsize
    match call.operator:
        case "matmul_all_reduce":
            if call.m > SMALL_M_ROWS:
                return LIBRARY, f"it has more than {SMALL_M_ROWS} rows"
            sums = call.m * call.n * max(2, call.dtype.itemsize)
            more = (call.world - 1) * sums - 2 * (call.world - 1) * sums // call.world
            plan = plan._replace(exchange="packets", shots=1 if more <= ONE_SHOT_BYTES else 2)
        case "matmul_reduce_scatter":
            copies = call.m >= SCATTER_COPIED_ROWS and call.world > 1
            plan = plan._replace(
                exchange="packets" if call.m <= SMALL_M_ROWS else "tiles",
                transfer="copies" if copies else "programs",
                piece_bytes=SCATTER_PIECE_BYTES,
            )
        case _:
            transfer, movers = find_gather_transfer(call.m)
            plan = plan._replace(transfer=transfer, movers=min(movers, count_usable(call, machine)))
    return plan, f"nothing was measured for {weight_bytes} bytes of weight, and it is the default"


# (rows of the whole up to, who moves them, programs that move): the first row that holds counts.
GATHER_TRANSFERS = ((512, "programs", 132), (1 << 62, "copies", 1))
SCATTER_COPIED_ROWS = 1024
"""Of a reduce-scatter of so many rows or more, copy engines push the tiles; of fewer, where a round of tiles is most of
the product, the kernel stores them to their owners."""

SCATTER_PIECE_BYTES = 6 << 20

COOL_ROWS = 4096
"""Of a gather of more, tiles of 128 columns are faster, by two programs on a multiprocessor: power is the limit."""

MOST_GATHERED_ROWS = 4
"""Of tiles that are gone through together, where copy engines bring rows; of fp8, which takes twice as much from the
L2 cache in a time, as many as elsewhere."""

NARROW_SPEED = 0.85
"""Of tiles of 128 columns, beside those of 256: they are taken where those leave too many programs without work."""

_LEAST_STAGES = 3  # of loads on the way, where memory is the limit
_PAYING_BYTES = 164 << 10  # in these, on a multiprocessor: with more, products of 64 rows take 1% longer
_MOST_BYTES = 200 << 10

ONE_SHOT_BYTES = 900_000
"""What one shot may send more than two do, which wait for each other: as much as travels meanwhile."""


def count_usable(call: GemmProblem, machine: Machine) -> int:
    """The multiprocessors that a default plan's programs may have: fewer where they wait for other ranks in place."""
    by_programs = call.operator == "all_gather_matmul" and find_gather_transfer(call.m)[0] == "programs"
    waits = call.m <= SMALL_M_ROWS or by_programs
    return bound_programs(machine.processors) if waits else machine.processors


def limit_programs(plan: KernelConfig, device: torch.device) -> KernelConfig:
    """The plan with no more programs than may wait at once on the device: see `bound_programs`."""
    assert plan.blocks is not None
    programs = limit_waiting(plan.blocks.programs, device)
    return plan._replace(blocks=plan.blocks._replace(programs=programs), movers=min(plan.movers, programs))


def find_gather_transfer(m: int) -> tuple[str, int]:
    """Who moves the rows of a gather of m rows where nothing was measured, and how many programs do."""
    return next(row[1:] for row in GATHER_TRANSFERS if m <= row[0])


def default_blocks(call: GemmProblem, machine: Machine) -> Blocks:
    """Tile sizes where nothing was measured."""
    if not machine.processors:  # interpreted programs run in turns: a few, with small tiles
        return Blocks(16 if call.m <= 16 else 32, 32, 32, 2, 4, 2, 3)
    itemsize = call.dtype.itemsize
    shards = call.world if call.operator == "matmul_reduce_scatter" else 1
    processors = count_usable(call, machine)
    m = call.m // shards
    if call.m <= SMALL_M_ROWS:
        blocks = small_m_blocks(call.m, call.n, itemsize, machine.by_tma, processors)
    else:
        wide, narrow = (look_up_blocks(m, itemsize, machine.by_tma, is_wide, processors) for is_wide in (True, False))
        narrow_takes = _estimate(call, shards, narrow) / NARROW_SPEED
        blocks = wide if _estimate(call, shards, wide) <= narrow_takes else narrow
        if call.operator == "all_gather_matmul" and call.m > COOL_ROWS and machine.by_tma and itemsize == 2:
            blocks = Blocks(128, 128, 64, blocks.group_rows, 4, 3, 2 * machine.processors)
        most = MOST_GATHERED_ROWS if call.operator == "all_gather_matmul" and itemsize > 1 else blocks.group_rows
        blocks = blocks._replace(group_rows=max(1, min(blocks.group_rows, most, count_grouped_rows(call) // blocks.m)))
    return blocks if machine.is_hopper else blocks._replace(num_stages=min(blocks.num_stages, 3))


def count_grouped_rows(call: GemmProblem) -> int:
    """Rows whose tiles may be gone through together, one rank's as a rule: the first would wait for all ranks.

    What programs push comes from all ranks at about one time, and the weight is read once where their tiles go
    together.
    """
    is_gather = call.operator == "all_gather_matmul"
    by_programs = is_gather and find_gather_transfer(call.m)[0] == "programs"
    return call.m if by_programs else call.m // call.world


def _estimate(call: GemmProblem, shards: int, blocks: Blocks) -> float:
    """How long the call's tiles take, in elements of one round of them."""
    count = shards * divide_up(call.m // shards, blocks.m) * divide_up(call.n, blocks.n)
    return count_rounds(count, call.k, blocks) * blocks.m * blocks.n


def small_m_blocks(m: int, n: int, itemsize: int, any_width: bool, processors: int) -> Blocks:
    """Tiles for few rows: columns so that all multiprocessors have a tile, and as many loads on the way as fit.

    any_width: whether columns need be no power of two.
    """
    rows = max(16, triton.next_power_of_2(m))
    if itemsize == 4:
        return Blocks(rows, 32, 64, 1, 4, 3, processors)
    columns = 64 if n >= 64 * processors * 0.9 else 32
    # Fewer rows of fp8 than 64 are converted for tensor cores: all columns of a tile at once, as a power of two.
    is_converted = itemsize == 1 and rows < 64
    if any_width and not is_converted:
        columns = _find_width(rows, n, processors) or columns
    blocks = _small_m_blocks(rows, columns, 256, processors)
    if not is_converted and (rows > 32 or columns < 96 or blocks.k < 256):
        blocks = _small_m_blocks(rows, columns, 128, processors)
    return deepen(blocks, itemsize)


def _find_width(rows: int, n: int, processors: int) -> int:
    """How many columns a tile has if every program has whole ones; 0 where that leaves many programs without any.

    With few rows memory is the limit, and a GPU with some programs less is as fast. What costs is a round in which
    most have no tile, and A, which each tile loads from the L2 cache.
    """
    if divide_up(n, 32) < MOSTLY_BUSY * processors:
        return 0
    return min(
        range(32, 257, 32), key=lambda columns: divide_up(divide_up(n, columns), processors) * (columns + rows // 4)
    )


def _small_m_blocks(rows: int, columns: int, depth: int, processors: int) -> Blocks:
    """With as many stages as pay; where these are too few, of half the depth."""
    stage = (rows + columns) * depth * 2
    stages = min(6, max(_PAYING_BYTES // stage, min(_LEAST_STAGES, _MOST_BYTES // stage)))
    if stages < _LEAST_STAGES:
        return _small_m_blocks(rows, columns, depth // 2, processors)
    return Blocks(rows, columns, depth, 1, 4, stages, processors)


def vary_blocks(call: GemmProblem, machine: Machine) -> Iterator[KernelConfig]:
    """Plans of other tiles, the default's first, that a tuner measures first."""
    default, _ = default_config(call, machine)
    if default == LIBRARY:
        default = KernelConfig(blocks=default_blocks(call, machine))
        if call.m <= SMALL_M_ROWS or call.operator == "matmul_all_reduce":
            default = default._replace(exchange="packets")
    yield default
    if not machine.processors:
        return
    for blocks in _vary_blocks(call, machine):
        if blocks != default.blocks:
            yield default._replace(blocks=blocks)


def vary_transfers(call: GemmProblem, machine: Machine, plan: KernelConfig) -> Iterator[KernelConfig]:
    """Plans of the same tiles whose rows or sums travel in other ways, that a tuner measures next."""
    others: list[KernelConfig] = []
    match call.operator:
        case "matmul_all_reduce":
            others = [plan._replace(shots=shots) for shots in (1, 2)]
        case "all_gather_matmul":
            movers = (8, 16, 32, count_usable(call, machine)) if machine.processors else (1, 2)
            others = [plan._replace(transfer="programs", movers=count) for count in movers]
            if call.m > SMALL_M_ROWS:
                others += [plan._replace(transfer="copies", piece_bytes=size << 20) for size in (1, 2, 8)]
        case "matmul_reduce_scatter":
            if call.m <= 4 * SMALL_M_ROWS:
                others = [plan._replace(exchange=exchange) for exchange in EXCHANGES]
            if call.m > SMALL_M_ROWS:
                tiles = plan._replace(exchange="tiles")
                others += [tiles._replace(transfer="programs")]
                others += [tiles._replace(transfer="copies", piece_bytes=size << 20) for size in (3, 6, 12)]
    yield from (other for other in others if other != plan)


def _vary_blocks(call: GemmProblem, machine: Machine) -> Iterator[Blocks]:
    if call.m <= SMALL_M_ROWS:
        rows = max(16, triton.next_power_of_2(call.m))
        processors = count_usable(call, machine)
        widths = dict.fromkeys((_find_width(rows, call.n, processors) or 32, 32, 64, 128))
        for columns, depth in ((columns, depth) for columns in widths for depth in (256, 128, 64)):
            blocks = _small_m_blocks(rows, columns, depth, processors)
            if blocks.k == depth:
                yield deepen(blocks, call.dtype.itemsize)
        return
    rows = count_grouped_rows(call)
    # Two programs of small tiles on a multiprocessor: one stores while the other multiplies.
    for m, n, depth, warps, stages, share in (
        (128, 256, 64, 8, 4, 1),
        (128, 256, 64, 8, 3, 1),
        (256, 128, 64, 8, 4, 1),  # a tenth faster than 128 x 256 on a cool GPU, 4% slower at the power limit (one H200)
        (128, 128, 128, 8, 3, 1),
        (128, 128, 64, 4, 3, 2),
        (64, 256, 64, 4, 4, 1),
    ):
        for group in sorted({min(group, max(1, rows // m)) for group in (2, 4, 8)}, reverse=True):
            blocks = Blocks(m, n, depth, group, warps, stages, share * machine.processors)
            yield deepen(blocks, call.dtype.itemsize)
