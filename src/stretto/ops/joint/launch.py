# SPDX-License-Identifier: Apache-2.0
"""Launches joint schedules: finds the verified one for a call, writes it into tables on the device, and starts it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.rewrite import cross_nodes, cut_chunks, pull, read_own_rows
from stretto.collectives.joint.schedule import LANDED, NOBODY, JointSchedule, Rows, is_gather, join
from stretto.collectives.joint.verifier import verify_joint
from stretto.memory import group_timeout
from stretto.memory.gpus import count_processors, leave_room_for_copies, limit_waiting
from stretto.memory.groups import make_node_group, next_group_number
from stretto.ops.choices import find_agreed
from stretto.ops.config import KernelConfig
from stretto.ops.gemm import (
    Blocks,
    GroupProduct,
    Scales,
    count_store_parts,
    describe_gemm,
    describe_matrix,
    divide_up,
    fixed,
    make_stream_k,
    specialization_key,
    takes_tma,
)
from stretto.ops.joint.copies import CopiedRows, CopiedSums, find_landed_scales
from stretto.ops.joint.kernel import (
    ADDED_AT_ONCE,
    MOVED_AT_ONCE,
    PUT,
    CopiedTiles,
    MovedRows,
    MoveTables,
    add_rows,
    joint_gemm,
    joint_gemm_by_copies,
)
from stretto.ops.joint.registry import CANDIDATES, find_schedule, name_schedule
from stretto.ops.operator import (
    CHANNELS,
    abandon,
    count_bytes,
    exchange_text,
    find_group,
    find_kept,
    find_known,
    find_workspace,
)
from stretto.ops.prediction import MAX_PIECES
from stretto.tiles import kind_of

_MOST_MOVED = (1 << 31) - (1 << 24)  # elements of a move: with the last step of 2,048 programs, in 32 bits
_SLOTS = 4  # of each mover, for each rank of another node
_STEPS = 2 if tiles.INTERPRETED else 8  # in which a slot is filled: a put costs its proxy as much time as many bytes
_MAX_SLOTS_BYTES = 64 << 20
_ADDERS = 4  # programs of a sum, on a multiprocessor: as many as fit beside a product run, the others after it


class _CopiedTables(NamedTuple):
    """The tiles of a rank's product on its device, beside copy engines.

    counts: of `BlockChannel.begin`. own_tiles: rows of tiles that are of x. targets: the count of each channel whose
    tiles a stream awaits. has_last: whether the last move adds for this rank alone, and so may follow the kernel.
    has_bias: whether the product gets the bias; else a sum of all ranks' rows does, of which no part is formed before.
    """

    row_tiles: tiles.DynamicMapping
    counts: Tensor
    own_tiles: int
    targets: dict[int, int]
    has_last: bool
    has_bias: bool


class _Tables(NamedTuple):
    """A rank's part of a joint schedule on its device, as a kernel reads it. counts: of `BlockChannel.begin`."""

    row_tiles: tiles.DynamicMapping
    sources: tiles.DynamicMapping
    destinations: tiles.DynamicMapping
    lists: tuple[Tensor, Tensor, Tensor, Tensor]
    counts: Tensor


class _Entry(NamedTuple):
    """A source, a destination or a tile in a table: its rows, and the rank and the channel of its signal."""

    rows: Rows
    rank: int
    channel: int


def launch_joint(
    operator: str, config: KernelConfig, product: GroupProduct, dtype: torch.dtype, returned: Tensor | None = None
) -> None:
    """Launch the call by the configuration's schedule, or copies of the operator's first; sums travel in `dtype`.

    returned: gets the gathered rows. ValueError for a schedule that the operator cannot have.
    """
    config = config.with_power_of_two_tiles()
    if not config.schedule:
        first = name_schedule(operator, CANDIDATES[operator][0], "kernel", find_group(product.group).size())
        config = config._replace(schedule=first, transfer="copies")
    if config.transfer == "copies":
        _launch_by_copies(operator, config, product, dtype, returned)
        return
    landed = _launch_by_programs(operator, config, product, dtype)
    if returned is not None:
        returned.copy_(landed[: len(returned)])


def _launch_by_copies(
    operator: str, config: KernelConfig, product: GroupProduct, dtype: torch.dtype, returned: Tensor | None
) -> None:
    """Launch a call whose moves copy engines make, and kernels that add."""
    x, weight, bias, out, group, scales = product
    blocks, members = config.blocks, find_group(group)
    assert blocks is not None
    rank, gathers, pulls = members.rank(), is_gather(operator), config.direction == "pull"
    width = x.shape[1] if gathers else weight.shape[0]
    reads_own = gathers and not pulls and config.is_shifted and takes_tma(x)
    reads_own = reads_own and takes_tma(weight if weight.is_contiguous() else weight.t())
    joint = find_joint(
        operator, config.schedule, members.size(), x.shape[0], blocks.m, pulls=pulls, is_shifted=config.is_shifted,
        piece_rows=count_piece_rows(config, width * dtype.itemsize), reads_own=reads_own,
    )  # fmt: skip
    plan = joint.ranks[rank]
    size = count_bytes(joint.landed_rows, width, dtype=dtype)
    if gathers and scales is not None:  # behind the rows, aligned
        size += count_bytes(joint.landed_rows + 32, dtype=torch.float32)
    landing = find_landing(group, x.device, size)
    block_channel = landing.channel
    processors = count_processors(x.device.index) if x.is_cuda else 0
    if not gathers:
        _require_countable(joint, width)
    elif _passes_on(joint):
        # Kernels that wait on the side stream need multiprocessors, and tiles wait for them.
        config, blocks = _widen(config, blocks, processors)
        blocks = blocks._replace(programs=limit_waiting(blocks.programs, x.device))
    landed = block_channel.tensor((joint.landed_rows, width), dtype, offset=landing.offset)
    target = out if gathers else x.new_empty(x.shape[0], width, dtype=dtype)
    own_scales = None
    if gathers and scales is not None:
        own_scales = scales.rows.contiguous()
        scales = Scales(find_landed_scales(block_channel, landed, landing.offset), scales.columns)
    gemm, a, b, _ = describe_gemm(landed if gathers else x, weight, None, blocks, scales=scales)
    own = describe_matrix(x, (blocks.m, blocks.k)) if reads_own else None
    parts, stored = count_store_parts(blocks, x.element_size(), target.element_size()), target
    is_whole = bool(parts) and gemm.by_tma.value and takes_tma(target) and _has_whole_tiles(joint, rank)
    if is_whole:
        gemm = gemm._replace(stores_by_tma=fixed(True), out_parts=fixed(parts))
        stored = describe_matrix(target, (blocks.m, blocks.n // parts))
    column_tiles = divide_up(weight.shape[0], blocks.n)
    threads = 1 if tiles.INTERPRETED.value else 32 * blocks.num_warps
    tables: _CopiedTables = find_known(
        group, x.device,
        ("joint by copies", operator, config.schedule, *x.shape, weight.shape[0], config, reads_own, is_whole, threads,
         block_channel.channels, width * dtype.itemsize),
        lambda: _make_copied_tables(joint, block_channel.channels, rank, column_tiles * threads, x.device),
    )  # fmt: skip
    # A gather's tiles of own rows are multiplied in a loop over whole tiles. The first counters are the channels'.
    kept, arrivals = tables.own_tiles * column_tiles, landing.counters[divide_up(joint.channels, 4) * 4 :]
    stream_k, units = make_stream_k(len(plan.tiles) * column_tiles, x.shape[1], blocks, arrivals, kept)
    start, stop = _find_bias_rows(joint, rank)
    own_bias = bias if tables.has_bias else None
    order = CopiedTiles(
        len(plan.tiles), tables.own_tiles, rank * joint.rows, start, stop, landing.counters, threads, own_scales,
        fixed(gathers), fixed(is_whole),
    )  # fmt: skip
    adders = _ADDERS * processors or min(config.movers, blocks.programs)

    def add(sources: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> None:
        size, added = sources[0].numel(), None if tables.has_bias or len(sources) < members.size() else bias
        block_channel.launch(
            add_rows, (kind_of(sources), kind_of(totals), kind_of(added), width, kind_of(size)),
            min(adders, divide_up(size, ADDED_AT_ONCE.value)), (sources, totals, added, width, size), num_warps=4,
        )  # fmt: skip

    rows = CopiedRows(block_channel, joint, x, landed, landing.offset, own_scales, returned)
    sums = CopiedSums(
        block_channel, plan.moves, target, landed, landing.offset, out, landing.counters[: joint.channels],
        tables.targets, tables.has_last, add,
    )  # fmt: skip
    by_copies = find_agreed(group, x.device).signals_by_copies

    def begin() -> tiles.Channel:
        return block_channel.begin(
            operator, tables.row_tiles, tables.row_tiles, "p2p", counts=tables.counts, slot=landing.slot,
            by_copies=by_copies,
        )  # fmt: skip

    block_channel.check()
    try:
        if gathers:
            channel = begin()
            rows.place_own_rows()
            tiles.open_side_stream(block_channel, 0)
            rows.make_others()
        else:  # a product waits for nothing, so it does not wait for the beginning
            with tiles.copy_engine(block_channel):
                channel = begin()
        block_channel.launch(
            joint_gemm_by_copies,
            (config, dtype, is_whole, kind_of(order[:8]),
             specialization_key(config, x, weight, gemm, own if own is None else x, landed, own_bias, target)),
            min(leave_room_for_copies(blocks.programs, x.device), units),
            (channel, tables.row_tiles, order, gemm, stream_k, own, a, b, stored, own_bias),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )  # fmt: skip
        if not gathers:  # what its tiles count goes on at once, or, on the host, now
            sums.make_others()
    except BaseException:
        abandon(group, block_channel)
        raise
    finally:  # also after a failed launch: x may be freed once the current stream has passed here
        tiles.join_copies(block_channel)
    if not gathers:
        sums.make_last()


def _widen(config: KernelConfig, blocks: Blocks, processors: int) -> tuple[KernelConfig, Blocks]:
    """Two programs a multiprocessor, of which few may wait, become one of twice the columns."""
    if processors and blocks.programs > processors:
        blocks = blocks._replace(n=2 * blocks.n, num_warps=2 * blocks.num_warps, programs=processors)
    return config._replace(blocks=blocks), blocks


@lru_cache(maxsize=256)
def _passes_on(joint: JointSchedule) -> bool:
    """True if a rank's moves wait for others'."""
    return any(one.sender != NOBODY for plan in joint.ranks for move in plan.moves for one in move.sources)


@lru_cache(maxsize=256)
def _has_whole_tiles(joint: JointSchedule, rank: int) -> bool:
    """True if no tile but the last of the product has fewer rows than it may have."""
    return all(tile.stop in (tile.start + joint.block_rows, joint.product_rows) for tile in joint.ranks[rank].tiles)


def count_piece_rows(config: KernelConfig, row_bytes: int) -> int:
    """Rows of the pieces in which copy engines move chunks."""
    return max(1, config.piece_bytes // row_bytes)


def _launch_by_programs(operator: str, config: KernelConfig, product: GroupProduct, dtype: torch.dtype) -> Tensor:
    """Launch a call whose first programs run the moves; returns what moves have brought."""
    x, weight, bias, out, group, scales = product
    blocks = config.blocks
    assert blocks is not None
    members, nodes = find_group(group), find_agreed(group, x.device).nodes
    shape, pulls = (members.size(), x.shape[0], blocks.m), config.direction == "pull"
    joint = find_joint(operator, config.schedule, *shape, nodes, pulls=pulls, is_shifted=config.is_shifted)
    width = x.shape[1] if joint.is_gather else weight.shape[0]
    _require_countable(joint, width)
    group_here = find_node_group(group, x.device, nodes) if nodes else group
    landing = find_landing(group_here, x.device, count_bytes(joint.landed_rows, width, dtype=dtype))
    block_channel = landing.channel
    rank = members.rank()
    if joint.is_gather:
        config, blocks = _widen(config, blocks, count_processors(x.device.index) if x.is_cuda else 0)
    limit = limit_waiting if joint.is_gather else leave_room_for_copies  # a gather's tiles wait for peers' programs
    programs = max(3 if nodes else 2, limit(blocks.programs, x.device))
    # Beside movers, as many receive between nodes, and at least one multiplies.
    movers = min(config.movers, programs // 3 if nodes else programs // 2)
    put_channel = find_put_channel(group, x.device, movers) if nodes else None
    tables: _Tables = find_known(
        group, x.device,
        ("joint", operator, config.schedule, *x.shape, blocks.m, weight.shape[0], blocks.n, movers, config.is_shifted,
         block_channel.channels),
        lambda: _make_tables(
            joint, block_channel.channels, rank, width, divide_up(weight.shape[0], blocks.n), movers,
            MOVED_AT_ONCE.value if put_channel is None else put_channel.slot_bytes // 4, x.device,
        ),
    )  # fmt: skip
    landed = block_channel.tensor((joint.landed_rows, width), dtype, offset=landing.offset)
    inputs = x if joint.is_gather else x.new_empty(x.shape[0], width, dtype=dtype)
    gemm, a, b, _ = describe_gemm(landed if joint.is_gather else x, weight, None, blocks, scales=scales)
    start, stop = _find_bias_rows(joint, rank)
    plan = joint.ranks[rank]
    moves = MoveTables(
        *tables.lists, len(plan.moves), len(plan.receives), len(plan.tiles), movers, width, start, stop,
        fixed(joint.is_gather),
    )  # fmt: skip
    block_channel.check()
    try:
        channel = block_channel.begin(
            operator, tables.destinations, tables.row_tiles, "p2p", counts=tables.counts, slot=landing.slot
        )
        puts = None if put_channel is None else put_channel.begin(operator)
        block_channel.launch(
            joint_gemm,
            (*map(kind_of, moves[4:-1]), joint.is_gather, dtype,
             specialization_key(config, x, weight, gemm, inputs, landed, bias, out),
             None if put_channel is None else put_channel.kind),
            programs,
            (channel, puts, tables.row_tiles, tables.sources, tables.destinations, moves, gemm, a, b,
             MovedRows(inputs, landed, out), bias),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )  # fmt: skip
    except BaseException:
        abandon(group_here, block_channel)
        raise
    return landed


def find_node_group(group: str, device: torch.device, nodes: tuple[int, ...]) -> str:
    """Return the name of the group of the ranks on this rank's node. Collective at the first call, which makes it."""

    def make() -> dist.ProcessGroup:
        members = find_group(group)
        most = max(map(int, exchange_text(str(next_group_number()), group, device)))
        return make_node_group(members, nodes, dist.get_backend_config(members), most)

    made: dist.ProcessGroup = find_known(group, device, "group of a node", make)
    return made.group_name


def find_put_channel(group: str, device: torch.device, movers: int) -> tiles.PutChannel:
    """Slots for so many movers, through which they put to ranks of other nodes; collective where it is allocated.

    Slots are as large as the memory of all of them allows. Waits end a little before others', so that what fails names
    the nodes and their interfaces.
    """
    members, size, slots = find_group(group), 4 * MOVED_AT_ONCE.value, _SLOTS * movers
    fitting = max(_MAX_SLOTS_BYTES // (2 * members.size() * slots * size), 1)
    size *= min(_STEPS, 1 << fitting.bit_length() - 1)
    return find_kept(
        group,
        device,
        ("puts", movers),
        lambda: tiles.PutChannel.allocate(
            members,
            slots=slots,
            slot_bytes=size,
            timeout=0.9 * group_timeout(members),
            backend="cuda" if device.type == "cuda" else "host",
        ),
    )


class Landing(NamedTuple):
    """The memory where a call's moves land: `offset` bytes into each rank's buffer, in a slot of it, if there are two.

    counters: int32 on this device, 0 between calls.
    """

    channel: tiles.BlockChannel
    offset: int
    slot: int | None
    counters: Tensor


def find_landing(group: str, device: torch.device, size: int) -> Landing:
    """Find or allocate memory of `size` bytes for the next call's moves; collective where it allocates."""
    workspace = find_workspace(group, device, max(size, 1), "copy_engine")
    return Landing(workspace.channel, *workspace.take_slot(), workspace.arrivals)


@lru_cache(maxsize=256)
def find_joint(
    operator: str,
    schedule: str,
    ranks: int,
    rows: int,
    block_rows: int,
    nodes: tuple[int, ...] = (),
    *,
    pulls: bool = False,
    is_shifted: bool = True,
    piece_rows: int = 0,
    reads_own: bool = False,
) -> JointSchedule:
    """The operator's verified joint schedule for x of so many rows. ValueError for one that is refused.

    nodes: of each rank, where there are several. is_shifted: if not, tiles are in the order of rows on all ranks.
    piece_rows: of the pieces in which chunks travel; 0: chunks travel whole. reads_own: see `read_own_rows`.
    """
    joint = join(operator, find_schedule(operator, schedule, ranks), rows, block_rows)
    if piece_rows:
        joint = cut_chunks(joint, piece_rows, min(MAX_PIECES, CHANNELS * ranks // joint.channels))
    joint = read_own_rows(joint) if reads_own else joint
    joint = pull(joint) if pulls else joint
    if not is_shifted:
        joint = replace(joint, ranks=tuple(plan._replace(tiles=tuple(sorted(plan.tiles))) for plan in joint.ranks))
    return require_verified(cross_nodes(joint, nodes) if nodes else joint)


def require_verified(joint: JointSchedule) -> JointSchedule:
    """The joint schedule, which is verified, and whose signals fit. ValueError for any other."""
    operator, rows, ranks = joint.operator, joint.rows, len(joint.ranks)
    if errors := verify_joint(joint):
        raise ValueError(f"{operator}: {joint.name} is refused for {rows} rows: {errors[0]}")
    most = CHANNELS * min(len(joint.list_near(rank)) for rank in range(ranks))
    if joint.channels > most:
        raise ValueError(
            f"{operator}: {joint.name} has {joint.channels} chunks and messages on a rank, and there are {most} "
            "signals: compile it with fewer instances, or chunks"
        )
    return joint


@lru_cache(maxsize=256)
def count_signals(joint: JointSchedule, capacity: int, rank: int, signals: int = 1) -> Tensor:
    """Count how often ranks signal each other, without a product's tiles, as `BlockChannel.begin` takes it.

    The counts are on the CPU. signals: of a move to each destination.
    """
    near = joint.list_near(rank)
    counts = torch.zeros(2, len(near), capacity, dtype=torch.int32, device="cpu")
    for sender, of_sender in enumerate(joint.ranks):
        for one in (one for move in of_sender.moves for one in move.destinations if one.channel != NOBODY):
            giver = joint.find_giver(sender, one.rank)
            if one.rank == rank:
                counts[0, near.index(giver), one.channel] += signals
            if giver == rank:
                counts[1, near.index(one.rank), one.channel] += signals
    return counts


def _require_countable(joint: JointSchedule, width: int) -> None:
    """ValueError where programs would move more elements at a time than they can count."""
    if joint.rows * width <= _MOST_MOVED:  # no chunk has more rows
        return
    rows = max(
        (one.rows.stop - one.rows.start for plan in joint.ranks for move in plan.moves for one in move.sources),
        default=0,
    )
    if rows * width > _MOST_MOVED:
        times = divide_up(rows * width, _MOST_MOVED)
        raise ValueError(
            f"{joint.operator}: {joint.name} moves {rows} rows of {width} elements at a time, and programs up to "
            f"{_MOST_MOVED} elements: compile it with {times} times as many instances, or chunks"
        )


def _find_bias_rows(joint: JointSchedule, rank: int) -> tuple[int, int]:
    """The rows of a rank's product that get the bias, so that each sum gets it once."""
    match joint.operator:
        case "matmul_reduce_scatter":
            return rank * joint.output_rows, (rank + 1) * joint.output_rows
        case "matmul_all_reduce" if rank:
            return 0, 0
    return 0, joint.product_rows


def _table(numbers: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(numbers) or [0], dtype=torch.int32, device="cpu").to(device)


def _look_up(entries: list[_Entry], device: torch.device) -> tiles.DynamicMapping:
    """Rows, ranks and channels of each entry; NOBODY's has no channel."""
    channels = [(max(one.channel, 0), one.channel + 1 if one.channel != NOBODY else 0) for one in entries]
    columns = [(*one.rows[1:], one.rank, *of) for one, of in zip(entries, channels, strict=True)] or [(0,) * 5]
    return tiles.look_up_tiles(*(_table(column, device) for column in zip(*columns, strict=True)))


def _make_copied_tables(
    joint: JointSchedule, capacity: int, rank: int, threads: int, device: torch.device
) -> _CopiedTables:
    """Write a rank's tiles into tables on its device. threads: that count the tiles of one row of tiles."""
    plan = joint.ranks[rank]
    last = not joint.is_gather and bool(plan.moves) and all(to.rank == rank for to in plan.moves[-1].destinations)
    awaited = {
        one.channel
        for move in (plan.moves[:-1] if last else plan.moves)
        for one in move.sources
        if one.sender == rank and not joint.is_gather
    }
    entries = []
    targets: dict[int, int] = dict.fromkeys(sorted(awaited), 0)
    for tile in plan.tiles:
        signals = tile.sender != NOBODY and (joint.is_gather or tile.channel in awaited)
        entries.append(_Entry(Rows(LANDED, *tile[:2]), max(tile.sender, 0), tile.channel if signals else NOBODY))
        if tile.channel in awaited:
            targets[tile.channel] += threads
    return _CopiedTables(
        _look_up(entries, device),
        count_signals(joint, capacity, rank).to(device),
        sum(tile.sender == NOBODY for tile in plan.tiles),
        targets,
        last,
        joint.operator not in ("matmul_reduce_scatter", "matmul_all_reduce")
        or any(len(move.sources) not in (1, len(joint.ranks)) for every in joint.ranks for move in every.moves),
    )


def _make_tables(
    joint: JointSchedule,
    capacity: int,
    rank: int,
    width: int,
    column_tiles: int,
    signals: int,
    of_slice: int,
    device: torch.device,
) -> _Tables:
    """Write a rank's part of a joint schedule into tables on its device. signals: that a move gives a destination.
    of_slice: the most elements of a slice that is put (`_find_slice`).

    Ranks of this node have their number among its ranks, others that in the group.
    """
    plan, near = joint.ranks[rank], joint.list_near(rank)
    sources: list[_Entry] = []
    destinations: list[_Entry] = []
    put: Counter[int] = Counter()
    received: Counter[int] = Counter()

    def count_slices(rows: Rows) -> int:
        size, step = (rows.stop - rows.start) * width, MOVED_AT_ONCE.value
        share = divide_up(divide_up(size, signals), step) * step
        return divide_up(size, signals * min(max(share, step), of_slice))

    for move in plan.moves:
        for source in move.sources:
            giver = joint.find_giver(source.sender, rank)
            sources.append(_Entry(source.rows, 0 if giver == NOBODY else near.index(giver), source.channel))
        for to in move.destinations:
            if to.rank in near:
                destinations.append(_Entry(to.rows, near.index(to.rank), to.channel))
                continue
            first = put[to.rank]
            put[to.rank] += count_slices(to.rows)
            destinations.append(_Entry(Rows(PUT, first, put[to.rank]), to.rank, NOBODY))
    for receive in plan.receives:
        first = received[receive.sender]
        received[receive.sender] += count_slices(receive.rows)
        sources.append(_Entry(Rows(PUT, first, received[receive.sender]), receive.sender, NOBODY))
        destinations.append(_Entry(receive.rows, near.index(rank), receive.channel))

    counts = count_signals(joint, capacity, rank, signals).clone()
    if not joint.is_gather:
        for tile in plan.tiles:
            counts[:, near.index(rank), tile.channel] += column_tiles
    of_receives = [1] * len(plan.receives)
    return _Tables(
        _look_up(
            [
                _Entry(Rows(LANDED, *tile[:2]), near.index(joint.find_giver(tile.sender, rank)), tile.channel)
                for tile in plan.tiles
            ],
            device,
        ),
        _look_up(sources, device),
        _look_up(destinations, device),
        (
            _table(accumulate([*(len(move.sources) for move in plan.moves), *of_receives], initial=0), device),
            _table(accumulate([*(len(move.destinations) for move in plan.moves), *of_receives], initial=0), device),
            _table((one.rows.area for one in sources), device),
            _table((one.rows.area for one in destinations), device),
        ),
        counts.to(device),
    )
