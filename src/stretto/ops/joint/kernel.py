# SPDX-License-Identifier: Apache-2.0
"""The kernel of a joint schedule: a persistent GEMM whose first programs run a rank's moves; and its launch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.schedule import (
    INPUT,
    LANDED,
    NOBODY,
    NOWHERE,
    OUTPUT,
    JointSchedule,
    Rows,
    cross_nodes,
    join,
    pull,
)
from stretto.collectives.joint.verifier import verify_joint
from stretto.memory import group_timeout
from stretto.memory.gpus import count_processors, leave_room_for_copies, limit_waiting
from stretto.memory.groups import make_node_group, next_group_number
from stretto.ops.choices import find_agreed
from stretto.ops.config import KernelConfig
from stretto.ops.gemm import (
    GroupProduct,
    describe_gemm,
    divide_up,
    fixed,
    load_bias,
    multiply_tile,
    order_tiles,
    specialization_key,
    store_tile,
)
from stretto.ops.joint.copies import CopiedMoves
from stretto.ops.joint.registry import find_schedule
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
from stretto.tiles import kind_of
from stretto.tiles.launches import launch_kernel

_MOVED_AT_ONCE = tl.constexpr(256 if tiles.INTERPRETED.value else 8192)  # elements that a program adds and stores
_MOST_MOVED = (1 << 31) - (1 << 24)  # elements of a move: with the last step of 2,048 programs, in 32 bits
_SLOTS = 4  # of each mover, for each rank of another node
_PUT = NOWHERE + 1  # the area of a destination at a rank of another node
_INPUT = tl.constexpr(INPUT)
_OUTPUT = tl.constexpr(OUTPUT)
_PUT_AREA = tl.constexpr(_PUT)


class MoveTables(NamedTuple):
    """A rank's moves as a kernel reads them: int32 tables. Sources' and destinations' rows, ranks and channels are
    dynamic mappings beside it.

    first_source, first_destination: [moves + 1], of each move; source_areas, destination_areas: of each of those.
    moves, receives, row_tiles: how many there are; movers: programs that run moves; width: elements of a row;
    bias_start, bias_stop: the rows of the product that get the bias. is_gather, has_movers: compiled in.

    Between nodes receives follow the moves, each with a source, the sender, and a destination. Of what is put, the
    rows are the numbers of slices: the first one of this move, among those of the two ranks in this call.
    """

    first_source: Any
    first_destination: Any
    source_areas: Any
    destination_areas: Any
    moves: Any
    receives: Any
    row_tiles: Any
    movers: Any
    width: Any
    bias_start: Any
    bias_stop: Any
    is_gather: Any
    has_movers: Any


class MovedRows(NamedTuple):
    """Rows that moves read and write: inputs (x, or the product), what moves have brought, and the output."""

    inputs: Any
    landed: Any
    out: Any


@triton.jit
def joint_gemm(  # type: ignore[no-untyped-def]
    channel, puts, row_tiles, sources, destinations, tables, gemm, a, b, moved, bias
):
    """C [m, n] = a @ b.T, + bias, while the first `movers` programs run the schedule's moves; persistent.

    A gather's tiles multiply rows of `landed` (a), and are stored in `out`. Others multiply x (a) and are stored in
    `inputs`, the product, which moves add up and send; `out` gets the sums.
    Order: tiles in the order of `row_tiles`, as programs claim them, or where copy engines move rows each P-th;
    moves in their order, of which each mover does a part of the elements.
    Signals: each mover signals every destination once its part is stored (p2p); tiles of a product signal their chunk
    on this rank.
    Waits: movers for the sources of a move, which are moves of others that come before it in one order of all ranks'
    moves, or tiles, which other programs multiply; a gather's tiles for moves. Movers are a launch's first programs,
    which run when any do, and a product's tiles wait for nothing, so there is no cycle (`verify_joint`).
    Reuse: `landed` is one of two slots, in turn. Peers write to it only when all ranks have begun the call after the
    last one that used it.

    Between nodes (puts is not None; the channel is then of this rank's node): a mover puts its part of a move to
    another node's rank in slices, through slots of its own, each after its credit. The next `movers` programs receive:
    the p-th what each rank's p-th mover has put, slice after slice, which it stores in its place and releases; then it
    signals this rank, as a mover of this node would. A receiver waits for slices alone, in one order of all ranks'
    moves, so every put finds a slot, however few there are. Only this rank writes to its `landed` what was put.
    """
    inputs, landed, out = moved.inputs, moved.landed, moved.out
    if tl.program_id(0) < tables.movers:
        for move in range(tables.moves):
            run_move(channel, puts, sources, destinations, tables, inputs, landed, out, move)
    if puts is not None:  # noqa: SIM102  (a constant, and a number of the device)
        if (tl.program_id(0) >= tables.movers) & (tl.program_id(0) < 2 * tables.movers):
            for number in range(tables.moves, tables.moves + tables.receives):
                receive_move(channel, puts, sources, destinations, tables, landed, number)
    count = tables.row_tiles * tl.cdiv(gemm.n, gemm.block_n)
    if tables.has_movers:
        tile = tiles.claim(channel)
        while tile < count:
            _make_tile(channel, row_tiles, tables, gemm, a, b, moved, bias, tile)
            tile = tiles.claim(channel)
    else:  # in a `for`, Triton overlaps a tile's stores with the next tile's loads
        for tile in range(tl.program_id(0), count, tl.num_programs(0)):
            _make_tile(channel, row_tiles, tables, gemm, a, b, moved, bias, tile)


@triton.jit
def _make_tile(channel, row_tiles, tables, gemm, a, b, moved, bias, tile):  # type: ignore[no-untyped-def]
    """Multiply a tile, once its rows are there, and store it."""
    row_tile, column_tile = order_tiles(tile, tables.row_tiles, tl.cdiv(gemm.n, gemm.block_n), gemm.group_rows)
    low, high = tiles.tile_rows(row_tiles, row_tile)
    column = column_tile * gemm.block_n
    if tables.is_gather:
        ready = tiles.consumer_tile_wait(channel, row_tiles, row_tile, before_tma=gemm.by_tma)
        total = multiply_tile(gemm, a, b, low + ready, column, 0)
    else:
        total = multiply_tile(gemm, a, b, low, column, 0)
    if bias is not None:
        rows = low + tl.arange(0, gemm.block_m)
        has_bias = (rows >= tables.bias_start) & (rows < tables.bias_stop)
        added = load_bias(bias, column, gemm.n, gemm.block_n)
        total += tl.where(has_bias[:, None], added, 0.0)
    if tables.is_gather:
        store_tile(gemm, moved.out, total, low, column, high)
    else:
        store_tile(gemm, moved.inputs, total, low, column, high)
        tiles.producer_tile_notify(channel, row_tiles, row_tile, "p2p")


@triton.jit
def run_move(channel, puts, sources, destinations, tables, inputs, landed, out, move):  # type: ignore[no-untyped-def]
    """Wait for a move's sources, add up this program's part of them, store it to all destinations, and signal."""
    first, last = tl.load(tables.first_source + move), tl.load(tables.first_source + move + 1)
    first_to, last_to = tl.load(tables.first_destination + move), tl.load(tables.first_destination + move + 1)
    ready = first * 0
    for source in range(first, last):
        ready += tiles.consumer_tile_wait(channel, sources, source)
    low, high = tiles.tile_rows(sources, first)
    size = (high - low) * tables.width
    for start in range(tl.program_id(0) * _MOVED_AT_ONCE, size, tables.movers * _MOVED_AT_ONCE):
        offsets = start + tl.arange(0, _MOVED_AT_ONCE)
        mask = offsets < size
        total = _add_up(sources, tables, inputs, landed, first, last, ready, offsets, mask)
        for to in range(first_to, last_to):
            low, high = tiles.tile_rows(destinations, to)
            begin = tl.cast(low, tl.int64) * tables.width
            area, peer = tl.load(tables.destination_areas + to), tiles.tile_rank(destinations, to)
            if area == _OUTPUT:
                tl.store(out + begin + offsets, total.to(out.dtype.element_ty), mask=mask)
            elif puts is None:
                value = total.to(landed.dtype.element_ty)
                tiles.tile_push_data(channel, landed + begin, offsets, value, rank=peer, mask=mask)
            elif area == _PUT_AREA:
                _put_part(puts, tables, low, start, size, total.to(landed.dtype.element_ty), peer, mask)
            else:
                value = total.to(landed.dtype.element_ty)
                tiles.tile_push_data(channel, landed + begin, offsets, value, rank=peer, mask=mask)
    for to in range(first_to, last_to):
        low, high = tiles.tile_channels(destinations, to)
        if high > low:
            tiles.producer_tile_notify(channel, destinations, to, "p2p")
    tl.debug_barrier()  # a later move of this program may read, by other threads, what this one has stored here


@triton.jit
def _put_part(puts, tables, first, start, size, value, peer, mask):  # type: ignore[no-untyped-def]
    """Put these elements of a move, from `start` on, of `size`; first: the number of the move's first slice."""
    slot = _find_slot(puts, tables, tl.program_id(0), first, start)
    zero = tiles.await_credit(puts, slot, peer)
    place = tiles.outgoing_slice(puts, slot, peer).to(tl.pointer_type(value.dtype))
    tl.store(tl.multiple_of(place + zero, 16) + tl.arange(0, _MOVED_AT_ONCE), value, mask=mask)
    num_bytes = tl.minimum(size - start, _MOVED_AT_ONCE) * (value.dtype.primitive_bitwidth // 8)
    tiles.put_slice(puts, slot, num_bytes, peer, slot)


@triton.jit
def receive_move(channel, puts, sources, destinations, tables, landed, number):  # type: ignore[no-untyped-def]
    """Store this program's part of what a rank of another node has put in its place, and signal this rank."""
    source, to = tl.load(tables.first_source + number), tl.load(tables.first_destination + number)
    peer, program = tiles.tile_rank(sources, source), tl.program_id(0) - tables.movers
    first, _ = tiles.tile_rows(sources, source)
    low, high = tiles.tile_rows(destinations, to)
    begin, size = tl.cast(low, tl.int64) * tables.width, (high - low) * tables.width
    for start in range(program * _MOVED_AT_ONCE, size, tables.movers * _MOVED_AT_ONCE):
        slot = _find_slot(puts, tables, program, first, start)
        zero = tiles.wait_slice(puts, peer, slot)
        place = tiles.arrived_slice(puts, slot, peer).to(tl.pointer_type(landed.dtype.element_ty))
        at = tl.arange(0, _MOVED_AT_ONCE)
        mask = start + at < size
        value = tl.load(tl.multiple_of(place + zero, 16) + at, mask=mask)
        tl.store(landed + begin + start + at, value, mask=mask & tiles.may_publish(channel))
        tiles.release_slice(puts, slot, peer, slot)
    tiles.producer_tile_notify(channel, destinations, to, "p2p")


@triton.jit
def _find_slot(puts, tables, program, first, start):  # type: ignore[no-untyped-def]
    """The slot, which is also the signal, of the slice of a mover's elements from `start` on: its own, in turn."""
    own = puts.slots // tables.movers
    return program * own + (first + start // (tables.movers * _MOVED_AT_ONCE)) % own


@triton.jit(do_not_specialize=["move"])
def add_rows(sources, destinations, tables, inputs, landed, staged, out, move, rank):  # type: ignore[no-untyped-def]
    """Add up a move's sources; store the sum where `rank`, this one, keeps it, and in `staged`, if others get it.

    Synchronization: none. The stream of the launch has waited for the sources before it, and copies `staged` after it.
    Programs share a move's elements.
    """
    first, last = tl.load(tables.first_source + move), tl.load(tables.first_source + move + 1)
    first_to, last_to = tl.load(tables.first_destination + move), tl.load(tables.first_destination + move + 1)
    low, high = tiles.tile_rows(sources, first)
    size = (high - low) * tables.width
    for start in range(tl.program_id(0) * _MOVED_AT_ONCE, size, tl.num_programs(0) * _MOVED_AT_ONCE):
        offsets = start + tl.arange(0, _MOVED_AT_ONCE)
        mask = offsets < size
        total = _add_up(sources, tables, inputs, landed, first, last, 0, offsets, mask)
        for to in range(first_to, last_to):
            if tiles.tile_rank(destinations, to) == rank:
                low, high = tiles.tile_rows(destinations, to)
                begin = tl.cast(low, tl.int64) * tables.width
                if tl.load(tables.destination_areas + to) == _OUTPUT:
                    tl.store(out + begin + offsets, total.to(out.dtype.element_ty), mask=mask)
                else:
                    tl.store(landed + begin + offsets, total.to(landed.dtype.element_ty), mask=mask)
        tl.store(staged + offsets, total.to(staged.dtype.element_ty), mask=mask)


@triton.jit
def _add_up(sources, tables, inputs, landed, first, last, ready, offsets, mask):  # type: ignore[no-untyped-def]
    """The sum in fp32 of these elements of a move's sources, first to last - 1. ready: what waits for them returned."""
    total = tl.zeros((_MOVED_AT_ONCE,), tl.float32)
    for source in range(first, last):
        low, _ = tiles.tile_rows(sources, source)
        begin = tl.cast(low, tl.int64) * tables.width + ready
        if tl.load(tables.source_areas + source) == _INPUT:
            value = tl.load(inputs + begin + offsets, mask=mask)
        else:
            value = tl.load(landed + begin + offsets, mask=mask)
        total += value.to(tl.float32)
    return total


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


def launch_joint(operator: str, config: KernelConfig, product: GroupProduct, dtype: torch.dtype) -> Tensor:
    """Launch the call by the configuration's schedule; partial sums travel in `dtype`.

    Returns what moves have brought, a gather's rows first, in memory that later calls overwrite. ValueError for a
    schedule that the operator cannot have.
    """
    config = config.with_power_of_two_tiles()
    x, weight, bias, out, group, _ = product
    blocks = config.blocks
    assert blocks is not None
    by_copies, pulls = config.transfer == "copies", config.direction == "pull"
    members, nodes = find_group(group), find_agreed(group, x.device).nodes
    shape = members.size(), x.shape[0], blocks.m
    shifts = config.is_shifted
    joint = find_joint(operator, config.schedule, *shape, nodes, pulls=pulls, is_shifted=shifts)
    width = x.shape[1] if joint.is_gather else weight.shape[0]
    if not (by_copies and joint.is_gather):
        _require_countable(joint, width)
    group_here = find_node_group(group, x.device, nodes) if nodes else group
    landing = find_landing(group_here, x.device, count_bytes(joint.landed_rows, width, dtype=dtype))
    block_channel = landing.channel
    rank = members.rank()
    # Beside copy engines, waits and sums on side streams need multiprocessors; other gathers' tiles wait for peers.
    fills = joint.is_gather and not _waits(joint) if by_copies else not joint.is_gather
    limit = leave_room_for_copies if fills else limit_waiting
    if not fills and x.is_cuda and blocks.programs > (processors := count_processors(x.device.index)):
        # Two programs a multiprocessor, of which few may wait, become one of twice the columns.
        blocks = blocks._replace(n=2 * blocks.n, num_warps=2 * blocks.num_warps, programs=processors)
        config = config._replace(blocks=blocks)
    programs = max(3 if nodes else 2, limit(blocks.programs, x.device))
    # Beside movers, as many receive between nodes, and at least one multiplies.
    movers = 0 if by_copies else min(config.movers, programs // 3 if nodes else programs // 2)
    put_channel = find_put_channel(group, x.device, movers) if nodes else None
    tables: _Tables = find_known(
        group, x.device,
        ("joint", operator, config.schedule, *x.shape, blocks.m, weight.shape[0], blocks.n, movers, pulls, shifts,
         block_channel.channels),
        lambda: _make_tables(
            joint, block_channel.channels, rank, width, divide_up(weight.shape[0], blocks.n), max(movers, 1), x.device
        ),
    )  # fmt: skip
    landed = block_channel.tensor((joint.landed_rows, width), dtype, offset=landing.offset)
    inputs = x if joint.is_gather else x.new_empty(x.shape[0], width, dtype=dtype)
    gemm, a, b, _ = describe_gemm(landed if joint.is_gather else x, weight, None, blocks)
    start, stop = _find_bias_rows(joint, rank)
    plan = joint.ranks[rank]
    moves = MoveTables(
        *tables.lists, len(plan.moves), len(plan.receives), len(plan.tiles), movers, width, start, stop,
        fixed(joint.is_gather), fixed(movers > 0),
    )  # fmt: skip
    copied = CopiedMoves(block_channel, plan.moves, inputs, landed, landing.offset)
    if by_copies and not joint.is_gather:
        staged = inputs.new_empty(_count_moved_rows(joint, rank), width)
        adders = min(config.movers, programs)

        def add(move: int) -> Tensor:
            operands = tables.sources, tables.destinations, moves, inputs, landed, staged, out
            launch_kernel(add_rows, adders, *operands, move, rank, on_load=block_channel.limit.allow_loading)
            return staged

        copied = copied._replace(add=add)
    block_channel.check()
    try:
        channel = block_channel.begin(
            operator, tables.destinations, tables.row_tiles, "p2p", counts=tables.counts, slot=landing.slot,
            by_copies=find_agreed(group, x.device).signals_by_copies,
        )  # fmt: skip
        puts = None if put_channel is None else put_channel.begin(operator)
        if by_copies:
            copied.place_own_rows()
            tiles.open_side_stream(block_channel, 0)
        if by_copies and joint.is_gather:
            copied.make_others()
        block_channel.launch(
            joint_gemm,
            (*map(kind_of, moves[4:-2]), joint.is_gather, movers > 0, dtype,
             specialization_key(config, x, weight, gemm, inputs, landed, bias, out),
             None if put_channel is None else put_channel.kind),
            programs,
            (channel, puts, tables.row_tiles, tables.sources, tables.destinations, moves, gemm, a, b,
             MovedRows(inputs, landed, out), bias),
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )  # fmt: skip
        if by_copies and not joint.is_gather:  # what its tiles signal goes on at once, or, on the host, now
            copied.make_others()
    except BaseException:
        abandon(group_here, block_channel)
        raise
    finally:  # also after a failed launch: x may be freed once the current stream has passed here
        tiles.join_copies(block_channel)
    return landed[: joint.product_rows]


def _waits(joint: JointSchedule) -> bool:
    """True if some rank's move waits for a signal."""
    return any(one.sender != NOBODY for plan in joint.ranks for move in plan.moves for one in move.sources)


def find_node_group(group: str, device: torch.device, nodes: tuple[int, ...]) -> str:
    """The name of the group of those ranks that are on this one's node; collective where it is made."""

    def make() -> dist.ProcessGroup:
        members = find_group(group)
        most = max(map(int, exchange_text(str(next_group_number()), group, device)))
        return make_node_group(members, nodes, dist.get_backend_config(members), most)

    made: dist.ProcessGroup = find_known(group, device, "group of a node", make)
    return made.group_name


def find_put_channel(group: str, device: torch.device, movers: int) -> tiles.PutChannel:
    """Slots for so many movers, through which they put to ranks of other nodes; collective where it is allocated.

    Its waits end a little before others', so that what fails names the nodes and their interfaces.
    """
    members = find_group(group)
    return find_kept(
        group,
        device,
        ("puts", movers),
        lambda: tiles.PutChannel.allocate(
            members,
            slots=_SLOTS * movers,
            slot_bytes=4 * _MOVED_AT_ONCE.value,
            timeout=0.9 * group_timeout(members),
            backend="cuda" if device.type == "cuda" else "host",
        ),
    )


class Landing(NamedTuple):
    """Where a call's moves land: `offset` bytes into every rank's buffer, in a slot of its own, if there are two."""

    channel: tiles.BlockChannel
    offset: int
    slot: int | None


def find_landing(group: str, device: torch.device, size: int) -> Landing:
    """Find or allocate memory of `size` bytes for the next call's moves; collective where it allocates."""
    workspace = find_workspace(group, device, max(size, 1), "copy_engine")
    return Landing(workspace.channel, *workspace.take_slot())


def _count_moved_rows(joint: JointSchedule, rank: int) -> int:
    """The most rows of one of a rank's moves."""
    return max((one.rows.stop - one.rows.start for move in joint.ranks[rank].moves for one in move.sources), default=0)


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
) -> JointSchedule:
    """The operator's verified joint schedule for x of so many rows. ValueError for one that is refused.

    nodes: of each rank, where there are several. is_shifted: if not, tiles are in the order of rows on all ranks.
    """
    joint = join(operator, find_schedule(operator, schedule, ranks), rows, block_rows)
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
    """How often ranks signal each other, as `BlockChannel.begin` takes it, but on the CPU; without a product's tiles.

    signals: of a move to each destination.
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


def _make_tables(
    joint: JointSchedule, capacity: int, rank: int, width: int, column_tiles: int, signals: int, device: torch.device
) -> _Tables:
    """Write a rank's part of a joint schedule into tables on its device. signals: that a move gives a destination.

    Ranks of this node have their number among its ranks, others that in the group.
    """
    plan, near = joint.ranks[rank], joint.list_near(rank)
    sources: list[_Entry] = []
    destinations: list[_Entry] = []
    put: Counter[int] = Counter()
    received: Counter[int] = Counter()

    def count_slices(rows: Rows) -> int:
        return divide_up((rows.stop - rows.start) * width, signals * _MOVED_AT_ONCE.value)

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
            destinations.append(_Entry(Rows(_PUT, first, put[to.rank]), to.rank, NOBODY))
    for receive in plan.receives:
        first = received[receive.sender]
        received[receive.sender] += count_slices(receive.rows)
        sources.append(_Entry(Rows(_PUT, first, received[receive.sender]), receive.sender, NOBODY))
        destinations.append(_Entry(receive.rows, near.index(rank), receive.channel))

    def table(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers) or [0], dtype=torch.int32, device="cpu").to(device)

    def look_up(entries: list[_Entry]) -> tiles.DynamicMapping:
        """Rows, ranks and channels of each entry; NOBODY's has no channel."""
        channels = [(max(one.channel, 0), one.channel + 1 if one.channel != NOBODY else 0) for one in entries]
        columns = zip(*((*one.rows[1:], one.rank, *of) for one, of in zip(entries, channels, strict=True)), strict=True)
        return tiles.look_up_tiles(*map(table, columns)) if entries else tiles.look_up_tiles(*[table(())] * 5)

    counts = count_signals(joint, capacity, rank, signals).clone()
    if not joint.is_gather:
        for tile in plan.tiles:
            counts[:, near.index(rank), tile.channel] += column_tiles
    of_receives = [1] * len(plan.receives)
    return _Tables(
        look_up(
            [
                _Entry(Rows(LANDED, *tile[:2]), near.index(joint.find_giver(tile.sender, rank)), tile.channel)
                for tile in plan.tiles
            ]
        ),
        look_up(sources),
        look_up(destinations),
        (
            table(accumulate([*(len(move.sources) for move in plan.moves), *of_receives], initial=0)),
            table(accumulate([*(len(move.destinations) for move in plan.moves), *of_receives], initial=0)),
            table(one.rows.area for one in sources),
            table(one.rows.area for one in destinations),
        ),
        counts.to(device),
    )
