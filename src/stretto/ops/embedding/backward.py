# SPDX-License-Identifier: Apache-2.0
"""Host side of the embedding backward pass: exchange gradients on a side stream, sort lookups, reduce rows.

    sort_ahead          sort this rank's lookups beside what follows the forward pass
    stage_gradients     push gradients to the tables' owners (side stream); fill zeros, sort lookups if they are not yet
    reduce_rows         once both are done: add up each row's gradients, and store or apply the sum
    find_gradients      both, for dense or sparse gradients
    update_tables       both, for a fused step of an optimizer

`backward_kernel` has the kernels and a worked example.
"""

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.memory import failures
from stretto.memory.gpus import bound_blocks, count_multiprocessors
from stretto.ops.embedding.backward_kernel import (
    QUANTUM,
    LookupKeys,
    Segments,
    Target,
    begin_push,
    combine_chunks,
    count_chunks,
    find_keys,
    place_chunks,
    push_gradients,
    reduce_chunks,
)
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.embedding.launch_config import (
    LaunchConfig,
    cache_on_device,
    copy_to_device,
    describe_pooling,
    describe_shapes,
    find_kind,
    hold_for_replays,
    round_up_to_power,
)
from stretto.ops.embedding.output_ring import OutputRing, find_capture, limit_channels, round_size
from stretto.ops.embedding.placement import AGREED, GRADIENTS, EmbeddingPlacement, common_multiple, find_permit
from stretto.ops.embedding.pooling_kernel import Bags, KernelTables
from stretto.ops.embedding.scheduled import ScheduledMoves, find_way
from stretto.ops.embedding.table_set import TableSet
from stretto.ops.operator import find_group, find_kept, find_known, is_kept
from stretto.tiles.launches import find_launches

_CHANNELS = 8  # the most signals for each rank's rows of the gradient
_MAX_BY_32_BITS = 1 << 31  # places in a gradient, in QUANTUMs; more take 64 bits
_KEYS = LaunchConfig(bags=8, rows=1, slice=8, num_warps=2, programs=16, order="by_table")  # how keys are found


class BackwardConfig(NamedTuple):
    """Launch parameters of the backward pass. `limit`, `chunks` and `rows` may change its bits.

    limit: most lookups of a chunk. chunks, rows: of a tile of `reduce_chunks`. num_warps, programs (on each
    multiprocessor): of `reduce_chunks`. push_programs: programs that push gradients; all ranks have the same. block:
    sorted lookups that a program of `count_chunks` and `place_chunks` takes.
    """

    limit: int
    chunks: int
    rows: int
    num_warps: int
    programs: int
    push_programs: int
    block: int


class LookupInput(NamedTuple):
    """The input of a forward call that its backward pass needs. rows, dims: of this rank's tables."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    mode: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]


class TableBlock(NamedTuple):
    """The first row and column of a rank's part of table `number`: its random bits are those of the whole table."""

    number: int
    row: int = 0
    column: int = 0


class CachedRows(NamedTuple):
    """The look-ups of a call whose tables are caches of larger ones: its indices are slots of the caches.

    rows: [total], of the indices' dtype: the rows of the larger tables. slots: for each table int32 [its rows], 1 plus
    the slot of each row, and 0 for one that is not in the cache; None for a table that is no cache. Gradients are then
    added up in order of rows, and random bits are those of rows, so that results are those of the larger tables.
    """

    rows: Tensor
    slots: Sequence[Tensor | None]


class TableUpdate(NamedTuple):
    """An optimizer's step on this rank's tables: an argument of `embedding_all_to_all_update`.

    optimizer: "sgd"; "adagrad", row-wise: a row's state grows by the mean of its gradient's squares, and the row
    changes by -learning rate x gradient / (sqrt(state) + epsilon); "full-adagrad", torch's: a state for each number;
    "adam", torch's, of which only rows that were looked up take part in a step: their means do not decay in between.
    settings: fp32 on the device; [2], learning rate and epsilon of all tables, or [tables, 6], each table's (see
    `table_settings`), which adam takes, and whoever wants weight decay (of rows that were looked up, added to their
    gradients, as torch.optim does) or clipping (a row's gradient is scaled to at most so long a norm, before the
    decay). states: fp32, contiguous, of each table: adagrad's [rows]; full-adagrad's [rows, dim]; adam's two, [rows,
    dim] each: table 0's means of gradients and of their squares, then table 1's.
    clock: int64 [2] on the device, how many steps were made (calls, not look-ups of a row) and the seed of stochastic
    rounding; the call advances it. Adam takes it, and so does is_stochastic: fp16 and bf16 rows are then rounded to
    one of their two neighbours, so that the mean is the number, by random bits that are a hash of seed, step, and the
    number's table, row and column. blocks: which part of which table each is, for that hash; default: whole tables 0,
    1, ... of this rank. cached: of tables that are caches; not under torch.compile.
    """

    optimizer: str
    settings: Tensor
    states: Sequence[Tensor] = ()
    clock: Tensor | None = None
    blocks: Sequence[TableBlock] = ()
    is_stochastic: bool = False
    cached: CachedRows | None = None

    def find_rows(self, lookups: LookupInput) -> LookupInput:
        """The look-ups by rows of the larger tables, where tables are caches: their gradients are added up so."""
        if self.cached is None:
            return lookups
        rows, slots = self.cached
        numbers = zip(lookups.rows, slots, strict=True)
        whole = tuple(here if of_table is None else len(of_table) for here, of_table in numbers)
        return lookups._replace(indices=rows, rows=whole)


class StagedGradients(NamedTuple):
    """The input of `reduce_rows`.

    gradients: of the global batch, for this rank's tables. segments, uniques: the sorted lookups and each segment's
    key. bases: each table's first key, then the number of all rows. kind: everything in segments that kernels are
    compiled for. permit: the look-up's, see `backward_kernel.Target`.
    """

    gradients: Tensor
    segments: Segments
    uniques: Tensor
    bases: tuple[int, ...]
    config: BackwardConfig
    kind: Hashable
    permit: Tensor | None = None


class SortedLookups(NamedTuple):
    """Lookups that were sorted on a stream of their own, without gradients. ready: on a GPU, the sort's end."""

    staged: StagedGradients
    ready: "torch.cuda.Event | None"

    def take(self) -> StagedGradients:
        """The sorted look-ups, for the current stream."""
        if self.ready is not None:
            current = torch.cuda.current_stream(self.staged.uniques.device)
            current.wait_event(self.ready)
            for tensor in (*self.staged.segments, self.staged.uniques):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(current)
        return self.staged


class _Staging(NamedTuple):
    """Symmetric memory that peers push gradients into: the global batch's, for the columns of this rank's tables.

    own: this rank's, [batch, own columns]. everyones: the same memory as wide as the widest rank's, so that it has an
    address on ranks without tables. columns: int64 [world + 1], where each rank's begin.
    """

    channel: tiles.BlockChannel
    everyones: Tensor
    own: Tensor
    columns: Tensor
    index_errors: IndexErrors

    @classmethod
    def find(cls, group: str, device: torch.device, placement: EmbeddingPlacement) -> "_Staging":
        """Find the group's, or make it; all ranks call it."""
        widest, own = max(placement.widths), placement.widths[placement.rank]
        size = round_size(placement.batch * widest * placement.dtype.itemsize)

        def allocate() -> tiles.BlockChannel:
            members = find_group(group)
            channels = limit_channels(members.size(), _CHANNELS) * members.size()
            backend = "cuda" if device.type == "cuda" else "host"
            return tiles.BlockChannel.allocate(members, channels=channels, data_bytes=size, backend=backend)

        def make() -> _Staging:
            channel = find_kept(group, device, ("embedding gradients", size), allocate)
            columns = tuple((column,) for column in itertools.accumulate(placement.widths, initial=0))
            return cls(
                channel,
                # Never empty, as own may be: an empty tensor has no address.
                channel.tensor((placement.batch, widest), placement.dtype),
                channel.tensor((placement.batch, own), placement.dtype),
                cache_on_device(columns, device),
                IndexErrors(placement.rank, device),
            )

        return find_kept(group, device, ("embedding staging", placement), make)


class _MovedStaging(NamedTuple):
    """Moves that bring gradients between nodes, and the ring in whose memory they land."""

    ring: OutputRing
    moves: ScheduledMoves
    index_errors: IndexErrors


@functools.lru_cache
def choose_backward_config(block_bytes: int, device: torch.device) -> BackwardConfig:
    """Choose a config by a table, without measuring, for rows of so many bytes: about 2 KB in flight for each warp."""
    if device.type == "cpu":
        return BackwardConfig(8, 8, 4, 1, 2, 2, 256)
    num_warps = min(max(block_bytes // 1024, 1), 8)
    chunks, programs = 1 if block_bytes > 512 else 4, 32 // num_warps
    if 128 < block_bytes <= 512:
        # A warp a chunk: 3% to 7% faster than programs of a warp and two chunks (two H200). Many more programs than fit
        # take 4.15 ms for MLPerf's tables on one H200, 8 on each multiprocessor 5.04: none ends with several long ones.
        num_warps, programs = 4, 160
    push_programs = min(bound_blocks(count_multiprocessors(device)), 32)
    return BackwardConfig(1024, chunks, 2, num_warps, programs, push_programs, 1024)


def stage_gradients(
    grad: Tensor,
    lookups: LookupInput,
    placement: EmbeddingPlacement,
    group: str,
    zeros: Sequence[Tensor] = (),
    firsts: tuple[int, ...] | None = None,
    *,
    permit: Tensor | None = None,
    need: int = AGREED,
    ahead: SortedLookups | None = None,
) -> StagedGradients | None:
    """Push grad [batch / world, width] to the tables' owners; concurrently fill `zeros` and sort this rank's lookups.

    firsts: see `sort_lookups`. permit: the permit of the look-up; default: the placement's last. need: the bits of it
    without which nothing is pushed, and later stored. ahead: what `sort_ahead` has returned. Returns None where this
    rank has no lookups, and so has only pushed.
    """
    if placement.batch == 0 or placement.width == 0:
        fill_zeros(zeros)
        return None
    grad = grad.contiguous()
    device = grad.device
    permit = find_permit(group, device, placement) if permit is None else permit
    is_alone = placement.world_size == 1
    is_first = not is_alone and not is_kept(group, device, ("embedding staging", placement))
    way = "" if is_alone else find_way(group, device)
    if is_first and find_capture(device) is None and int(permit) & need != need:
        fill_zeros(zeros)  # ranks whose tables get no gradients do not reach the allocation of staging
        return None
    block = round_up_to_power(max(lookups.dims, default=4))
    config = choose_backward_config(block * placement.dtype.itemsize, device)
    channel = None
    if is_alone:  # the gradient is here; kernels take it as aligned as what is allocated
        own = grad.clone() if grad.data_ptr() % 16 else grad
        index_errors = _find_sort_errors(group, device, placement)
    elif way:  # between nodes

        def make() -> _MovedStaging:
            moves = ScheduledMoves.make(group, device, placement, way, is_back=True)
            return _MovedStaging(moves.ring, moves, IndexErrors(placement.rank, device))

        moved: _MovedStaging = find_kept(group, device, ("embedding staging", placement), make)
        channel, index_errors = moved.ring.channel, moved.index_errors
        own = moved.moves.send_gradients(grad, placement, permit, need)
    else:
        staging = _Staging.find(group, device, placement)
        channel, index_errors, own = staging.channel, staging.index_errors, staging.own
        with tiles.copy_engine(channel):
            _push(staging, grad, placement, config, permit, need)
    fill_zeros(zeros)
    staged = None
    if lookups.dims and lookups.indices.numel():
        # The forward pass has already reported errors in the input, so the errors recorded by this sort are not read.
        if ahead is None:
            staged = sort_lookups(lookups, placement, own, config, index_errors, firsts)
        else:
            staged = ahead.take()._replace(gradients=own)
        staged = staged._replace(permit=permit)
    if channel is not None:
        tiles.join_copies(channel)
    return staged


def sort_ahead(
    lookups: LookupInput, placement: EmbeddingPlacement, group: str, firsts: tuple[int, ...]
) -> SortedLookups | None:
    """Sort this rank's lookups for `stage_gradients` on a stream of their own, after the current one's work so far.

    None where there are none, and while a CUDA graph is captured, which may have no backward pass to join the stream.
    """
    device = lookups.offsets.device
    if not (lookups.dims and lookups.indices.numel() and placement.batch) or find_capture(device) is not None:
        return None
    config = choose_backward_config(round_up_to_power(max(lookups.dims)) * placement.dtype.itemsize, device)
    errors = _find_sort_errors(group, device, placement)
    like = torch.empty(0, placement.widths[placement.rank], dtype=placement.dtype, device=device)
    if device.type == "cpu":
        return SortedLookups(sort_lookups(lookups, placement, like, config, errors, firsts), None)
    side = _sort_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        staged = sort_lookups(lookups, placement, like, config, errors, firsts)
    for tensor in lookups[:3]:
        if tensor is not None:
            tensor.record_stream(side)
    return SortedLookups(staged, side.record_event())


def _find_sort_errors(group: str, device: torch.device, placement: EmbeddingPlacement) -> IndexErrors:
    """Return where a sort reports errors, which nobody reads."""
    return find_known(group, device, ("embedding sort", placement), lambda: IndexErrors(placement.rank, device))


@functools.cache
def _sort_stream(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


def _push(
    staging: _Staging,
    grad: Tensor,
    placement: EmbeddingPlacement,
    config: BackwardConfig,
    permit: Tensor,
    need: int,
) -> None:
    """Push each rank's columns to their owner, and wait for the columns that others push; on the current stream."""
    # A signal waits for the stores before it, so that large batches have more rows a signal.
    rows, steps = 4, 4 if placement.local_batch >= 16 * config.push_programs else 1
    groups = -(-placement.local_batch // (steps * rows))
    mapping = tiles.shard_tiles(
        groups, placement.world_size, 1, channels=min(limit_channels(placement.world_size, _CHANNELS), groups)
    )
    begun = staging.channel.begin("embedding_all_to_all's gradient", mapping, mapping, "p2p", launches=False)
    channels = round_up_to_power(staging.channel.channels)
    permit_kind = tiles.kind_of(permit)
    staging.channel.launch(
        begin_push, (placement, need, permit_kind), 1, (begun, mapping, None, permit, need, channels), num_warps=4
    )
    block = min(round_up_to_power(max(placement.widths)), 2048)
    arguments = begun, mapping, grad, staging.columns, staging.everyones, placement.local_batch, placement.width
    key = placement, tiles.kind_of(grad), need, permit_kind
    rest = permit, need, steps, rows, block
    staging.channel.launch(push_gradients, key, config.push_programs, (*arguments, *rest), num_warps=8)


@functools.lru_cache(maxsize=256)
def _describe_rows(
    rows: tuple[int, ...],
    dims: tuple[int, ...],
    itemsize: int,
    device: torch.device,
    firsts: tuple[int, ...] | None = None,
) -> tuple[KernelTables, tuple[int, ...], Tensor]:
    """Return (kernel argument of tables without addresses; each table's first key, then the number of all rows; the
    same on the device). firsts: see `sort_lookups`.
    """
    bases = tuple(itertools.accumulate(rows, initial=0))
    if firsts is not None:
        bases = *(bases[first] for first in firsts), bases[-1]
    shapes = [(0, *shape) for shape in zip(rows, dims, strict=True)]
    tables = describe_shapes(shapes, itemsize, 0, sum(dims), device)
    return tables, bases, cache_on_device(tuple((base,) for base in bases), device)


def sort_lookups(
    lookups: LookupInput,
    placement: EmbeddingPlacement,
    staging: Tensor,
    config: BackwardConfig,
    index_errors: IndexErrors,
    firsts: tuple[int, ...] | None = None,
) -> StagedGradients:
    """Sort this rank's lookups by table and row, and cut them into chunks; `staging` may be filled later.

    firsts: for each table, the first table that is the same memory; default: itself. Lookups of one table under several
    features then share keys, so that a row's gradients from all of them are added up.
    """
    device, total = staging.device, lookups.indices.numel()
    tables, bases, first_rows = _describe_rows(lookups.rows, lookups.dims, staging.element_size(), device, firsts)
    hold_for_replays(tables.meta)
    hold_for_replays(first_rows)
    rows = bases[-1]
    # The largest key is that of a lookup without a row.
    keys = torch.full((total,), rows, dtype=torch.int32 if rows < 2**31 - 1 else torch.int64, device=device)
    quanta = staging.shape[1] // QUANTUM.value
    by_32_bits = placement.batch * quanta <= _MAX_BY_32_BITS
    # A look-up in no bag, whose key says so, has no place: nobody reads it.
    places = torch.empty(total, dtype=torch.int32 if by_32_bits else torch.int64, device=device)
    is_scaled = lookups.weights is not None or lookups.mode == "mean"
    scales = torch.empty(total, dtype=torch.float32, device=device) if is_scaled else None
    groups = len(lookups.dims) * -(-placement.batch // _KEYS.bags)
    programs = 2 if device.type == "cpu" else min(_KEYS.programs * count_multiprocessors(device), groups)
    tables = tables._replace(batch=placement.local_batch, width=staging.shape[1], total=total)
    steps, world = 8 if device.type == "cpu" else 32, placement.world_size
    bags, found = Bags(*lookups[:3]), LookupKeys(keys, places, scales)
    pooling = describe_pooling(_KEYS, lookups.mode, True)
    # torch aligns all memory that is allocated here alike, so kernels are compiled for its dtypes only.
    position = torch.int32 if total < 2**31 - 2**20 else torch.int64  # programs look for chunks beyond the last, too
    sizes = config, keys.dtype, places.dtype, position, is_scaled, *map(tiles.kind_of, (total, rows, quanta))
    find_launches(device)(
        find_keys,
        (lookups.mode, find_kind(tables), tiles.kind_of(world), sizes, *map(tiles.kind_of, bags)),
        programs,
        (tables, pooling, bags, first_rows, found, world, rows, index_errors.report, steps),
        num_warps=_KEYS.num_warps,
    )
    keys, order = torch.sort(keys, stable=True)
    blocks = -(-total // config.block)
    # One row for both counts: torch scans several rows with few threads.
    counts = torch.empty(2 * blocks, dtype=torch.int64, device=device)
    find_launches(device)(
        count_chunks, sizes, blocks, (keys, counts, total, rows, config.limit, config.block), num_warps=4
    )
    sums = counts.cumsum(0)
    totals = torch.empty(2, dtype=torch.int64, device=device)
    dtypes = places.dtype, position, torch.int32, torch.int32, keys.dtype, places.dtype
    sorted_places, starts, numbers, of_chunks, chunk_keys, chunk_places = (
        torch.empty(total + 1, dtype=dtype, device=device) for dtype in dtypes
    )
    sorted_scales = None if scales is None else torch.empty_like(scales)
    uniques = torch.empty_like(keys)
    described = starts, numbers, of_chunks, chunk_keys, chunk_places
    segments = Segments(keys, sorted_places, sorted_scales, *described, totals, total, rows, quanta)
    tables_of = _find_tables_of(lookups.dims, device)
    hold_for_replays(tables_of)
    arguments = keys, order, places, scales, tables_of, sums, segments, uniques, config.limit, config.block
    find_launches(device)(place_chunks, sizes, blocks, arguments, num_warps=4)
    return StagedGradients(staging, segments, uniques, bases, config, sizes)


def reduce_rows(
    staged: StagedGradients,
    dims: Sequence[int],
    addresses: Sequence[int],
    lasts: Sequence[int],
    step: TableUpdate | None = None,
    *,
    by_number: bool = False,
) -> None:
    """Add up the gradients of each row, and store the sum or make an optimizer's step with it.

    addresses: where each table's target begins, the same in every call of a `step`, so that they are cached. lasts: the
    number of each table's first segment, or 0. by_number: as in `backward_kernel.Target`.
    """
    segments, config, gradients = staged.segments, staged.config, staged.gradients
    device, itemsize = gradients.device, gradients.element_size()
    action, settings, corrections, clock, failed = "store", None, None, None, None
    if step is None:
        parts = zip(addresses, staged.bases[:-1], dims, lasts, strict=True)
        meta = copy_to_device(tuple((*part, 0, 0, 0, 0, 0) for part in parts), device)
        multiple = common_multiple(tuple(dims), itemsize)  # memory that is allocated for a call is aligned
    else:
        action, settings, corrections = step.optimizer, step.settings, _correct_means(step)
        clock = step.clock if step.is_stochastic else None
        slots = () if step.cached is None else step.cached.slots
        found = tuple(0 if of_table is None else of_table.data_ptr() for of_table in slots)
        states = tuple(map(Tensor.data_ptr, step.states))
        shapes = tuple(addresses), staged.bases, tuple(dims), itemsize, device
        meta, multiple = _describe_step(action, *shapes, states, tuple(step.blocks), found)
        hold_for_replays(meta)
        failed = failures.failure_flag(device)
    by_table = settings is not None and settings.dim() == 2
    is_cached = step is not None and step.cached is not None
    target = _describe_target(tuple(dims), multiple, action, by_number, by_table, is_cached, device)
    hold_for_replays(target.tables_of)
    target = target._replace(
        meta=meta, settings=settings, corrections=corrections, clock=clock, failed=failed, permit=staged.permit
    )
    block = target.block.value
    cuts = (segments.total - 1) // config.limit
    partials = torch.empty((cuts + 2) * 2 * block, dtype=torch.float32, device=device)
    constants = action, by_number, by_table, target.dim.value, block, target.multiple.value, is_cached
    pointers = settings, corrections, clock, staged.permit
    kinds = staged.kind, gradients.dtype, tuple(map(tiles.kind_of, pointers)), constants
    arguments = segments, target, gradients, partials, config.limit
    programs = min(config.programs * count_multiprocessors(device), -(-segments.total // config.chunks))
    find_launches(device)(
        reduce_chunks,
        kinds,
        programs,
        (*arguments, config.chunks, config.rows),
        num_warps=config.num_warps,
        num_stages=1,
    )
    if cuts:
        find_launches(device)(combine_chunks, kinds, cuts, (*arguments, config.rows), num_warps=1, num_stages=1)


@functools.lru_cache(maxsize=256)
def _describe_step(
    action: str,
    addresses: tuple[int, ...],
    bases: tuple[int, ...],
    dims: tuple[int, ...],
    itemsize: int,
    device: torch.device,
    states: tuple[int, ...],
    blocks: tuple[TableBlock, ...],
    slots: tuple[int, ...],
) -> tuple[Tensor, int]:
    """Return (`Target.meta`, `Target.multiple`) of a step on tables that may have any address."""
    each = len(states) // len(dims)
    pairs = [(*states[each * place : each * (place + 1)], 0, 0)[:2] for place in range(len(dims))]
    blocks = blocks or tuple(TableBlock(place) for place in range(len(dims)))
    described = zip(addresses, bases[:-1], dims, pairs, blocks, slots or (0,) * len(dims), strict=True)
    words = tuple((*part, *both, *block, address) for *part, both, block, address in described)
    places = tuple(address // itemsize for address in addresses)
    if action not in ("sgd", "adagrad"):
        places += tuple(address // 4 for address in states)
    return cache_on_device(words, device), common_multiple((*dims, *places), itemsize)


@functools.lru_cache(maxsize=64)
def _describe_target(
    dims: tuple[int, ...],
    multiple: int,
    action: str,
    by_number: bool,
    by_table: bool,
    is_cached: bool,
    device: torch.device,
) -> Target:
    """Make a target without addresses and settings."""
    dim = dims[0] if len(set(dims)) == 1 else 0
    constants = (action, by_number, by_table, dim, round_up_to_power(max(dims)), multiple, is_cached)
    tables_of = _find_tables_of(dims, device)
    return Target(None, tables_of, None, None, None, None, None, *(tl.constexpr(value) for value in constants))


def _correct_means(step: TableUpdate) -> Tensor | None:
    """Return fp32 [tables, 2], 1 - beta ** steps of adam's two means with the step that is made; None for others.

    In fp64: 1 - 0.999 in fp32 is wrong by 2e-5 of it. Means of frozen tables do not forget, and are divided by no 0.
    """
    if step.optimizer != "adam" or step.clock is None:
        return None
    logarithms = torch.log1p(-step.settings[:, 4:].double()) * (step.clock[0] + 1)
    return torch.expm1(logarithms).neg_().float().clamp_(min=1e-38)


@functools.lru_cache(maxsize=64)
def _find_tables_of(dims: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the table of each `QUANTUM` of columns, int32."""
    repeats = torch.tensor([dim // QUANTUM.value for dim in dims], device="cpu")
    return torch.arange(len(dims), dtype=torch.int32, device="cpu").repeat_interleave(repeats).to(device)


def find_gradients(
    grad: Tensor,
    lookups: LookupInput,
    placement: EmbeddingPlacement,
    group: str,
    *,
    sparse: bool,
    permit: Tensor | None = None,
) -> list[Tensor]:
    """Return each table's gradient, given the output's gradient; all ranks call it. permit: see `stage_gradients`."""
    need = AGREED | GRADIENTS
    if sparse:
        staged = stage_gradients(grad, lookups, placement, group, permit=permit, need=need)
        return sparse_gradients(staged, lookups.rows, lookups.dims, grad)
    grads = [grad.new_empty(shape) for shape in zip(lookups.rows, lookups.dims, strict=True)]
    staged = stage_gradients(grad, lookups, placement, group, zeros=grads, permit=permit, need=need)
    if staged is not None:
        reduce_rows(staged, lookups.dims, [one.data_ptr() for one in grads], [0] * len(grads))
    return grads


def update_tables(
    grad: Tensor,
    lookups: LookupInput,
    placement: EmbeddingPlacement,
    group: str,
    tables: TableSet,
    step: TableUpdate,
    ahead: SortedLookups | None = None,
) -> None:
    """Make an optimizer's step on the rows that were looked up; all ranks call it. See `embedding_all_to_all_update`.

    A table that is given several times gets one step, with the gradients of all its lookups.
    """
    firsts, each = tables.firsts, len(step.states) // max(len(tables.dims), 1)
    for place, first in tables.repeated:
        own, other = ([s.data_ptr() for s in step.states[each * at : each * (at + 1)]] for at in (place, first))
        if own != other:
            raise ValueError(
                f"embedding_all_to_all_update: tables {first} and {place} are one table, so they have one state"
            )
    staged = stage_gradients(grad, step.find_rows(lookups), placement, group, firsts=firsts, ahead=ahead)
    if staged is not None:
        reduce_rows(staged, lookups.dims, tables.addresses, [0] * len(firsts), step)
    if step.clock is not None:
        step.clock[:1] += 1


def fill_zeros(tensors: Sequence[Tensor]) -> None:
    """Set the tensors to zero, in one launch."""
    if tensors:
        torch._foreach_zero_(list(tensors))


def sparse_gradients(
    staged: StagedGradients | None, rows: Sequence[int], dims: Sequence[int], like: Tensor
) -> list[Tensor]:
    """Return each table's gradient as a coalesced sparse tensor [rows, dim]; the host waits for their sizes."""
    if staged is None or (staged.permit is not None and not int(staged.permit)):
        empty = torch.empty(1, 0, dtype=torch.int64, device=like.device)
        return [
            torch.sparse_coo_tensor(
                empty, like.new_empty(0, dim), (count, dim), is_coalesced=True, check_invariants=False
            )
            for count, dim in zip(rows, dims, strict=True)
        ]
    found = int(staged.segments.totals[1])
    uniques = staged.uniques[:found].long()
    bases = torch.tensor(staged.bases, device=uniques.device)
    firsts = torch.searchsorted(uniques, bases).tolist()
    values = [
        like.new_empty(end - start, dim) for (start, end), dim in zip(itertools.pairwise(firsts), dims, strict=True)
    ]
    addresses = [value.data_ptr() for value in values]
    reduce_rows(staged, dims, addresses, firsts[:-1], by_number=True)
    return [
        torch.sparse_coo_tensor(
            (uniques[start:end] - base)[None], value, (count, dim), is_coalesced=True, check_invariants=False
        )
        for (start, end), base, value, count, dim in zip(
            itertools.pairwise(firsts), staged.bases[:-1], values, rows, dims, strict=True
        )
    ]
