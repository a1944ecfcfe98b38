# SPDX-License-Identifier: Apache-2.0
"""Default configurations where nothing was measured, and the configurations that `tune` tries.

The tables here are meant to be edited after measuring.
"""

from collections.abc import Iterator

import triton

from stretto.ops.gemm.config import (
    DIRECTIONS,
    EXCHANGES,
    LIBRARY,
    Blocks,
    GemmProblem,
    KernelConfig,
    Machine,
    bound_programs,
    divide_up,
)
from stretto.ops.gemm.stream_k import count_waves

SMALL_M_ROWS = 64
"""Up to so many rows a product takes as long as its weight takes to stream from memory."""

MOSTLY_BUSY = 0.7
"""If so large a part of the programs have one tile each, tiles are not split over k: memory bandwidth is the limit, and
a fix-up takes longer than the idle programs cost."""

# (rows of the whole up to, what moves them, programs that move): the first row that holds counts.
GATHER_TRANSFERS = ((512, "programs", 132), (1 << 62, "copies", 1))
SCATTER_COPIED_ROWS = 1024
"""From so many rows on, copy engines push a reduce-scatter's tiles. With fewer, where one wave of tiles is most of the
product, the kernel stores the tiles to their owners."""

SCATTER_PIECE_BYTES = 6 << 20

COOL_ROWS = 4096
"""Above, a gather is faster in tiles of 128 columns, by two programs on a multiprocessor: power is the limit."""

MAX_GATHERED_ROWS = 4
"""The most `group_rows` where copy engines bring the rows. fp8 has no such limit, since it reads the L2 cache at twice
the rate."""

NARROW_SPEED = 0.85
"""Speed of tiles of 128 columns relative to 256: they are taken where 256 would leave too many programs idle."""

ONE_SHOT_BYTES = 900_000
"""What one shot may send more than two shots do, which wait for each other: as much as travels in that time."""

_MIN_STAGES = 3  # of loads in flight, where memory bandwidth is the limit
_PAYING_BYTES = 164 << 10  # of shared memory on a multiprocessor: with more, products of 64 rows take 1% longer
_MAX_BYTES = 200 << 10


def default_config(problem: GemmProblem, machine: Machine) -> tuple[KernelConfig, str]:
    """The configuration where nothing was measured, and the reason for it.

    Kernels on Hopper for types of up to 16 bits that TMA takes: there Triton's GEMM is as fast as the library's. An
    all-reduce only for few rows: with many, each program would wait for all. Interpreted, always kernels.
    """
    blocks = default_blocks(problem, machine)
    config = KernelConfig(blocks=blocks)
    if not machine.processors:
        few = problem.m <= 16
        return config._replace(exchange="packets" if few else "tiles", transfer="programs" if few else "copies"), (
            "kernels are interpreted"
        )
    if not machine.is_hopper or problem.dtype.itemsize > 2 or not machine.by_tma:
        return LIBRARY, "kernels are for operands of up to 16 bits that TMA takes, on sm_90"
    weight_bytes = problem.n * problem.k * problem.dtype.itemsize
    match problem.operator:
        case "matmul_all_reduce":
            if problem.m > SMALL_M_ROWS:
                return LIBRARY, f"it has more than {SMALL_M_ROWS} rows"
            sums = problem.m * problem.n * max(2, problem.dtype.itemsize)
            more = (problem.world - 1) * sums - 2 * (problem.world - 1) * sums // problem.world
            config = config._replace(exchange="packets", shots=1 if more <= ONE_SHOT_BYTES else 2)
        case "matmul_reduce_scatter":
            copies = problem.m >= SCATTER_COPIED_ROWS and problem.world > 1
            config = config._replace(
                exchange="packets" if problem.m <= SMALL_M_ROWS else "tiles",
                transfer="copies" if copies else "programs",
                piece_bytes=SCATTER_PIECE_BYTES,
            )
        case _:
            transfer, movers = find_gather_transfer(problem.m)
            config = config._replace(transfer=transfer, movers=min(movers, count_usable(problem, machine)))
    return config, f"nothing was measured for {weight_bytes} bytes of weight, and it is the default"


def default_blocks(problem: GemmProblem, machine: Machine, transfer: str | None = None) -> Blocks:
    """Tile sizes where nothing was measured. transfer: what moves a gather's rows (None: the default for its rows)."""
    if not machine.processors:  # interpreted programs run in turns: a few, with small tiles
        return Blocks(16 if problem.m <= 16 else 32, 32, 32, 2, 4, 2, 3)
    itemsize = problem.dtype.itemsize
    is_gather = problem.operator == "all_gather_matmul"
    shards = problem.world if problem.operator == "matmul_reduce_scatter" else 1
    processors = count_usable(problem, machine, transfer)
    m = problem.m // shards
    if problem.m <= SMALL_M_ROWS:
        blocks = small_m_blocks(problem.m, problem.n, itemsize, machine.by_tma, processors)
    else:
        wide, narrow = (look_up_blocks(m, itemsize, machine.by_tma, is_wide, processors) for is_wide in (True, False))
        narrow_takes = _estimate(problem, shards, narrow) / NARROW_SPEED
        blocks = wide if _estimate(problem, shards, wide) <= narrow_takes else narrow
        if is_gather and problem.m > COOL_ROWS and machine.by_tma and itemsize == 2:
            blocks = Blocks(128, 128, 64, blocks.group_rows, 4, 3, 2 * machine.processors)
        most = MAX_GATHERED_ROWS if is_gather and itemsize > 1 else blocks.group_rows
        most = min(blocks.group_rows, most, count_grouped_rows(problem, transfer) // blocks.m)
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
    return _deepen_for_fp8(blocks, itemsize)


def _deepen_for_fp8(blocks: Blocks, itemsize: int) -> Blocks:
    """Blocks whose steps over k have as many bytes in fp8 as those for 16 bits have."""
    return blocks._replace(k=2 * blocks.k) if itemsize == 1 else blocks


def count_usable(problem: GemmProblem, machine: Machine, transfer: str | None = None) -> int:
    """The multiprocessors for a default's programs: fewer where programs occupy one while they wait for other ranks."""
    waits = problem.m <= SMALL_M_ROWS or _is_moved_by_programs(problem, transfer)
    return bound_programs(machine.processors) if waits else machine.processors


def find_gather_transfer(m: int) -> tuple[str, int]:
    """What moves the rows of a gather of m rows where nothing was measured, and how many programs do."""
    return next(row[1:] for row in GATHER_TRANSFERS if m <= row[0])


def _is_moved_by_programs(problem: GemmProblem, transfer: str | None) -> bool:
    transfer = transfer or find_gather_transfer(problem.m)[0]
    return problem.operator == "all_gather_matmul" and transfer == "programs"


def count_grouped_rows(problem: GemmProblem, transfer: str | None = None) -> int:
    """Rows whose tiles may be visited together: as a rule one rank's, or the first tile would wait for all ranks.

    Rows that programs push arrive from all ranks at about one time, and the weight is read once where tiles of all
    ranks are visited together.
    """
    return problem.m if _is_moved_by_programs(problem, transfer) else problem.m // problem.world


def _estimate(problem: GemmProblem, shards: int, blocks: Blocks) -> float:
    """How long the problem's tiles take, in elements of one wave of tiles."""
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
        columns = _find_width(rows, n, processors) or columns
    blocks = _small_m_blocks(rows, columns, 256, processors)
    if not is_converted and (rows > 32 or columns < 96 or blocks.k < 256):
        blocks = _small_m_blocks(rows, columns, 128, processors)
    return _deepen_for_fp8(blocks, itemsize)


def _find_width(rows: int, n: int, processors: int) -> int:
    """A tile's columns if every program has whole tiles; 0 where that leaves many programs without a tile.

    With few rows memory bandwidth is the limit, and a GPU with some programs less is as fast. Two things cost time: a
    wave in which most programs have no tile, and A, which each tile loads from the L2 cache.
    """
    if divide_up(n, 32) < MOSTLY_BUSY * processors:
        return 0
    return min(
        range(32, 257, 32), key=lambda columns: divide_up(divide_up(n, columns), processors) * (columns + rows // 4)
    )


def _small_m_blocks(rows: int, columns: int, depth: int, processors: int) -> Blocks:
    """Blocks with as many stages as pay; where these are too few, of half the depth."""
    stage = (rows + columns) * depth * 2
    stages = min(6, max(_PAYING_BYTES // stage, min(_MIN_STAGES, _MAX_BYTES // stage)))
    if stages < _MIN_STAGES:
        return _small_m_blocks(rows, columns, depth // 2, processors)
    return Blocks(rows, columns, depth, 1, 4, stages, processors)


def vary_blocks(problem: GemmProblem, machine: Machine) -> Iterator[KernelConfig]:
    """Configurations with other tiles, the default's first, which a tuner measures first."""
    default, _ = default_config(problem, machine)
    if default == LIBRARY:
        default = KernelConfig(blocks=default_blocks(problem, machine))
        if problem.m <= SMALL_M_ROWS or problem.operator == "matmul_all_reduce":
            default = default._replace(exchange="packets")
    yield default
    if not machine.processors:
        return
    for blocks in _vary_blocks(problem, machine):
        if blocks != default.blocks:
            yield default._replace(blocks=blocks)


def vary_transfers(problem: GemmProblem, machine: Machine, config: KernelConfig) -> Iterator[KernelConfig]:
    """Configurations with the same tiles but other transfers of rows or sums, which a tuner measures next."""
    others: list[KernelConfig] = []
    match problem.operator:
        case "matmul_all_reduce":
            others = [config._replace(shots=shots) for shots in (1, 2)]
        case "all_gather_matmul":
            movers = (8, 16, 32, count_usable(problem, machine)) if machine.processors else (1, 2)
            others = [
                config._replace(transfer="programs", movers=count, direction=direction)
                for direction in DIRECTIONS
                for count in movers
            ]
            if problem.m > SMALL_M_ROWS:
                others += [config._replace(transfer="copies", piece_bytes=size << 20) for size in (1, 2, 8)]
        case "matmul_reduce_scatter":
            if problem.m <= 4 * SMALL_M_ROWS:
                others = [config._replace(exchange=exchange) for exchange in EXCHANGES]
            if problem.m > SMALL_M_ROWS:
                tiles = config._replace(exchange="tiles")
                others += [tiles._replace(transfer="programs")]
                others += [tiles._replace(transfer="copies", piece_bytes=size << 20) for size in (3, 6, 12)]
    yield from (other for other in others if other != config)


def vary_order(problem: GemmProblem, config: KernelConfig) -> Iterator[KernelConfig]:
    """The same configuration with the other order of tiles, for a tuner's last round.

    Where all ranks begin with the same rows (not `is_shifted`), they meet at one rank's links, but may share its cache.
    """
    if problem.operator != "matmul_all_reduce" and problem.m > SMALL_M_ROWS:
        yield config._replace(is_shifted=not config.is_shifted)


def _vary_blocks(problem: GemmProblem, machine: Machine) -> Iterator[Blocks]:
    if problem.m <= SMALL_M_ROWS:
        rows = max(16, triton.next_power_of_2(problem.m))
        processors = count_usable(problem, machine)
        widths = dict.fromkeys((_find_width(rows, problem.n, processors) or 32, 32, 64, 128))
        for columns, depth in ((columns, depth) for columns in widths for depth in (256, 128, 64)):
            blocks = _small_m_blocks(rows, columns, depth, processors)
            if blocks.k == depth:
                yield _deepen_for_fp8(blocks, problem.dtype.itemsize)
        return
    rows = count_grouped_rows(problem)
    # Two programs with small tiles on a multiprocessor: one stores while the other multiplies.
    for m, n, depth, warps, stages, programs in (
        (128, 256, 64, 8, 4, 1),
        (128, 256, 64, 8, 3, 1),
        (256, 128, 64, 8, 4, 1),  # a tenth faster than 128 x 256 on a cool GPU, 4% slower at the power limit (one H200)
        (128, 128, 128, 8, 3, 1),
        (128, 128, 64, 4, 3, 2),
        (64, 256, 64, 4, 4, 1),
    ):
        for group in sorted({min(group, max(1, rows // m)) for group in (2, 4, 8)}, reverse=True):
            blocks = Blocks(m, n, depth, group, warps, stages, programs * machine.processors)
            yield _deepen_for_fp8(blocks, problem.dtype.itemsize)
