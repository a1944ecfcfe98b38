# SPDX-License-Identifier: Apache-2.0
"""`BlockChannel`, on the host: the signals and the buffer through which a group's kernels exchange tiles."""

from collections.abc import Hashable, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor

from stretto.memory import MAX_SIGNALS, SymmetricMemory, allocate, failures, find_own_rank, group_timeout
from stretto.memory.copy_engine import SideStream, set_flag
from stretto.tiles.call_state import EPOCH, HEADER, WaitLimit, make_state
from stretto.tiles.calls import await_beginning, begin_call
from stretto.tiles.intrinsics import INTERPRETED, register_record
from stretto.tiles.launches import Launches, launch_kernel
from stretto.tiles.mapping import DynamicMapping, Mapping, StaticMapping
from stretto.tiles.waits import OF_BEGIN, OF_CONSUMER, OF_HOST, OF_PACKETS, OF_PEER

_ALIGNMENT = 128
_MAX_KEPT = 1024  # tensors that a channel knows
_MODES = ("local", "p2p", "broadcast")
URGENT = 7
"""The index of the side stream whose kernels go before all others: small ones, for which another rank waits."""


class Channel(NamedTuple):
    """Kernel argument: a `BlockChannel` in one call; made by `BlockChannel.begin`, `enter` and `describe`.

    rank, world: this rank and the number of ranks. capacity: of channels. peer_tiles: tiles between peers. mode: whom
    producers notify. operator: its number in the failure record. signals: this rank's counters, int32. addresses: int64
    [2 * world]: the address of each rank's counters, then the distance from this rank's buffer to each rank's, in
    bytes. state: int32, see `call_state`. report, failed: int32 [16] and [1], the channel's failure record and the
    process's failure flag (`stretto.memory.failures`). begun_in_kernel: whether the call's kernel begins and ends the
    call by itself (`BlockChannel.enter`).

    Mappings are separate arguments, since Triton 3.6 loses the constants of a tuple within a tuple.
    """

    rank: Any
    world: Any
    capacity: Any
    peer_tiles: Any
    mode: Any
    operator: Any
    signals: Tensor
    addresses: Tensor
    state: Tensor
    report: Tensor
    failed: Tensor
    begun_in_kernel: Any = tl.constexpr(False)


class BlockChannel:
    """A symmetric buffer and signals on every rank of a group, for kernels that wait for tiles of other ranks.

    Calls run one after another, on one stream, in the same order on all ranks. Create a channel with `allocate`.

    distances: bytes from this rank's buffer to each rank's, as they are mapped here. launch: launches the channel's
    kernels. limit: of the calls' waits. copy_lists: see `tiles.find_copies`. open_side_streams: the side streams that
    the current call has used. is_open: kernels on them use the call's signals, so that `begin` joins them if nobody
    has, as after an error.
    """

    def __init__(self, memory: SymmetricMemory, channels: int, peer_tiles: int, timeout: float) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self.channels = channels
        self.peer_tiles = peer_tiles
        self._memory = memory
        self._signal_bytes = _signal_bytes(self.world_size, channels, peer_tiles)
        self.device = memory.buffer().device
        regions = [memory.buffer(rank) for rank in range(self.world_size)]
        first = [region.data_ptr() for region in regions]
        distances = [address - first[self.rank] for address in first]
        if any(distance % 16 for distance in distances):
            raise ValueError("the ranks' buffers lie at distances that are no multiples of 16 bytes")
        self.distances = tuple(distances)
        self._signals = [region[: self._signal_bytes].view(torch.int32) for region in regions]
        counters = self.world_size * channels
        self._addresses = torch.tensor(first + distances, dtype=torch.int64, device=self.device)
        self._state = make_state(counters, self.device)
        self.limit = WaitLimit(self._state, timeout)
        self._operators: list[str] = []
        describe = partial(describe_failure, self.rank, self.world_size, self._operators)
        self._record = failures.register(self, describe, self.device)
        self.launch = Launches(self.limit.allow_loading)
        self._tensors: dict[Hashable, Tensor] = {}
        self._notified: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.copy_lists: dict[Hashable, Any] = {}
        self._described: dict[tuple[str, str, bool], Channel] = {}
        self._fitted: tuple[object, ...] = (None,) * 4  # the arguments of the last call that was checked
        self._current: Channel | None = None
        self._sides: dict[int, SideStream] = {}
        self.open_side_streams: set[int] = set()
        self.is_open = False
        register_record(self._record.words.data_ptr(), self)

    @classmethod
    def allocate(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        channels: int,
        peer_tiles: int = 0,
        data_bytes: int = 0,
        timeout: float | None = None,
        backend: str = "cuda",
    ) -> "BlockChannel":
        """Create a channel. Collective, with the same arguments on all ranks; group: None for all ranks.

        channels: number of channels of all ranks together. peer_tiles: number of tiles for `peer_tile_notify`.
        data_bytes: the size of each rank's buffer. timeout: timeout of a wait in seconds; None: the group's timeout.
        backend: "cuda", or "host" for processes whose kernels are interpreted. ValueError for sizes out of bounds;
        PeerError for ranks that do not arrive.
        """
        if backend == "host" and not INTERPRETED.value:
            raise ValueError(
                "on the host backend kernels are interpreted: set TRITON_INTERPRET=1 before stretto.tiles is imported"
            )
        if backend == "cuda" and INTERPRETED.value:
            raise ValueError('TRITON_INTERPRET is set, and interpreted kernels take backend="host", not "cuda"')
        if channels < 1 or peer_tiles < 0 or data_bytes < 0:
            raise ValueError(
                "a channel has 1 or more channels, 0 or more peer_tiles and 0 or more data_bytes, not "
                f"{channels}, {peer_tiles} and {data_bytes}"
            )
        if timeout is not None and not timeout > 0:
            raise ValueError(f"a wait may last more than 0 seconds, not {timeout}")
        _, world_size = find_own_rank(group)
        words = world_size * (channels + peer_tiles + 1)
        if words > MAX_SIGNALS:
            raise ValueError(
                f"{world_size} ranks with {channels} channels and {peer_tiles} peer_tiles need {words} counters, and "
                f"there are at most {MAX_SIGNALS}"
            )
        size = _signal_bytes(world_size, channels, peer_tiles) + data_bytes
        timeout = group_timeout(group) if timeout is None else timeout
        return cls(allocate(size, group, backend=backend), channels, peer_tiles, timeout)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0, rank: int | None = None) -> Tensor:
        """Return a contiguous tensor in a rank's buffer (default: this rank's), `offset` bytes from its beginning.

        offset is a multiple of 128. `tile_push_data` and `tile_pull_data` reach the tensor with the same offset on the
        other rank. The same arguments return the same tensor. ValueError for a tensor that does not fit.
        """
        key = tuple(shape), dtype, offset, rank
        found = self._tensors.get(key)
        if found is None:
            if len(self._tensors) == _MAX_KEPT:
                self._tensors.clear()
            found = self._tensors[key] = self._find_tensor(shape, dtype, offset, rank)
        return found

    def _find_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int, rank: int | None) -> Tensor:
        if offset % _ALIGNMENT or offset < 0:
            raise ValueError(f"a tensor begins at a multiple of {_ALIGNMENT} bytes, not at {offset}")
        self._require_open()
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"the group has ranks 0 to {self.world_size - 1}, not {rank}")
        size = torch.Size(shape).numel() * dtype.itemsize
        data = self._memory.buffer(rank)[self._signal_bytes :]
        if offset + size > data.numel():
            raise ValueError(f"{size} bytes at {offset} do not fit into a buffer of {data.numel()} bytes")
        return data[offset : offset + size].view(dtype).view(shape)

    def begin(
        self,
        operator: str,
        producer: Mapping,
        consumer: Mapping,
        mode: str,
        *,
        counts: Tensor | None = None,
        slot: int | None = None,
        with_barrier: bool = True,
        launches: bool = True,
        by_copies: bool = False,
    ) -> Channel:
        """Begin a call: on the device, increment the call's number, and advance the targets of all counters.

        All ranks must begin the same calls, in the same order. operator: a name for the failure record. mode: which
        ranks a producer notifies of a tile: "local" (a rank's producer has all ranks' tiles, for its own consumers:
        pull), "broadcast" (it has this rank's tiles, for all ranks' consumers: push), "p2p" (it has all ranks' tiles,
        each for the consumers of the rank that the tile belongs to).

        counts: None for a static mapping of the producer that notifies every tile once. Else int32 [2, world,
        channels], which may be filled on the device: [0, r, c] how often rank r will notify channel c here in this
        call, [1, r, c] how often this rank will notify channel c of rank r. with_barrier: wait on the device until all
        ranks have begun, so that the call may overwrite the previous call's buffers; without it the kernels must ensure
        this themselves. slot: 0 or 1, the same on all ranks, for double-buffered calls: a rank that is one call ahead
        then need not wait. Any order of slots is safe. launches: False if the caller's next kernel, of one program,
        calls `begin_call` itself, which saves a launch. by_copies: the barrier's signals are copies of 4 bytes in
        stream order, not atomic operations, for GPUs that have no native ones on each other's memory; it is a whole
        barrier, whichever slot the call uses.

        Returns the first argument of the call's kernels; the mappings are separate arguments. PeerError if a wait has
        failed before.
        """
        self.check()
        if self.is_open:
            self.join_side_streams()
        # Arguments that were checked before are not checked again.
        described = self.describe(operator, mode)
        with_barrier = with_barrier and not by_copies
        key = None if counts is not None else (operator, mode, id(producer), id(consumer), slot, with_barrier)
        fitted = producer, consumer, counts, slot
        if key is None or not self.launch.knows(begin_call, key):
            if not all(map(is_, fitted, self._fitted)):
                self._require_fitting(*fitted)
            self._fitted = fitted
        self.limit.begin_call()
        channel = self._current = described
        arguments = channel, producer, counts, slot, with_barrier, 1 << (self.channels - 1).bit_length()
        if launches and key is not None:
            self.launch(begin_call, key, 1, arguments, kept=(producer, consumer), num_warps=4)
        elif launches:
            launch_kernel(begin_call, 1, *arguments, on_load=self.limit.allow_loading, num_warps=4)
        if by_copies:
            for distance in range(1, self.world_size):
                peer = (self.rank + distance) % self.world_size
                set_flag(self.slot_word(peer, self.peer_tiles), self._state[EPOCH.value : EPOCH.value + 1])
            launch_kernel(await_beginning, 1, channel, on_load=self.limit.allow_loading, num_warps=1)
        return channel

    def enter(self, operator: str, mode: str) -> Channel:
        """Begin a call of a single kernel, which begins and ends the call itself: no launch, no barrier.

        The kernel takes the call's number from `call_number`, passes the producer's mapping to its waits, and each of
        its programs calls `end_call` last. Because there is no barrier between ranks, the kernel must alternate between
        two slots when it writes to peers: see `call_slot`. PeerError if a wait has failed before.
        """
        self.check()
        self.limit.begin_call(is_restored=True)
        self._current = None  # the kernel's end advances its targets, so the host cannot notify for it
        return self.describe(operator, mode, begun_in_kernel=True)

    def describe(self, operator: str, mode: str = "p2p", *, begun_in_kernel: bool = False) -> Channel:
        """Make the argument of kernels that begin no call, and use peer tiles with their own call numbers.

        begun_in_kernel: for a call that its kernel begins and ends; see `enter`.
        """
        known = self._described.get((operator, mode, begun_in_kernel))
        if known is not None:  # Triton also compares the constants of one object faster than those of equal objects
            return known
        self._require_open()
        if mode not in _MODES:
            raise ValueError(f"whom producers notify must be one of {', '.join(_MODES)}, not {mode!r}")
        if operator not in self._operators:
            self._operators.append(operator)
        made = self._described[operator, mode, begun_in_kernel] = Channel(
            self.rank,
            tl.constexpr(self.world_size),
            tl.constexpr(self.channels),
            tl.constexpr(self.peer_tiles),
            tl.constexpr(mode),
            self._operators.index(operator),
            self._signals[self.rank],
            self._addresses,
            self._state,
            self._record.words,
            self._record.failed,
            tl.constexpr(begun_in_kernel),
        )
        self.launch.remember(made)
        return made

    def require_own(self, address: int) -> None:
        """ValueError for an address outside of this rank's buffer; `tensor` makes tensors inside."""
        self._require_open()
        own = self._memory.buffer()
        if not 0 <= address - own.data_ptr() <= own.numel():
            raise ValueError(
                "a kernel pushes to peers, or pulls from them, by a pointer that is not into this channel's memory on "
                "this rank: make the tensor by BlockChannel.tensor, of the same channel and without rank="
            )

    def slot_word(self, rank: int, tile: int) -> Tensor:
        """Return this rank's slot of a peer tile at that rank: int32 [1]."""
        at = self.world_size * self.channels + tile * self.world_size + self.rank
        return self._signals[rank][at : at + 1]

    def check(self) -> None:
        """Raise PeerError if a wait of this process has failed, with its operator, call, tile and the awaited rank.

        It reads memory that kernels write to, and does not wait: synchronize first to see failures of launched kernels.
        """
        failures.check()

    @property
    def current(self) -> Channel:
        """Return the call that `begin` began last. ValueError before the first, and in a call that `enter` began."""
        if self._current is None:
            raise ValueError(
                "no call that `begin` has begun is active: call begin first (calls of `enter` have no host operations)"
            )
        return self._current

    def side_stream(self, index: int = 0) -> SideStream | None:
        """Return one of the channel's side streams for copies; None on the host backend."""
        if self.device.type != "cuda":
            return None
        if index not in self._sides:
            self._sides[index] = SideStream(self.device, priority=-2 if index == URGENT else 0)
        return self._sides[index]

    def join_side_streams(self) -> None:
        """Make the current stream wait for the side streams that the current call has used."""
        for index in sorted(self.open_side_streams):
            side = self.side_stream(index)
            if side is not None:
                side.join()
        self.open_side_streams.clear()
        self.is_open = False

    def notified_words(self, index: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return int32 [1] twice: this rank's counter of a channel at `rank`, and its value in `sends`."""
        found = self._notified.get((index, rank))
        if found is None:
            counter = self.rank * self.channels + index
            words = self._signals[rank][counter : counter + 1], self.sends()[rank, index : index + 1]
            found = self._notified[index, rank] = words
        return found

    def signal_words(self, rank: int) -> Tensor:
        """Return that rank's counters, int32: [world, channels] of producers, then [peer_tiles + 1, world] of peers."""
        return self._signals[rank]

    def sends(self) -> Tensor:
        """Return int32 [world, channels]: this rank's counters at each rank as the current call will leave them."""
        counters = self.world_size * self.channels
        return self._state[HEADER.value + counters :].view(self.world_size, self.channels)

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank's symmetric memory, signals included; 0 once the channel is closed."""
        return self._memory.buffer().nbytes if self._signals else 0

    def close(self) -> None:
        """Free the memory; no kernel of this channel may still be running."""
        self._signals = []
        self._current = None
        for known in (self._described, self.launch, self._tensors, self._notified, self.copy_lists):
            known.clear()
        self._record.close()
        self._memory.close()

    def __enter__(self) -> "BlockChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._signals:
            raise ValueError("the channel is closed")

    def _require_fitting(self, producer: Mapping, consumer: Mapping, counts: Tensor | None, slot: int | None) -> None:
        if slot not in (None, 0, 1):
            raise ValueError(f"a call's slot must be 0 or 1, or None for one slot, not {slot!r}")
        for mapping in (producer, consumer):
            if not isinstance(mapping, StaticMapping | DynamicMapping):
                kind = type(mapping).__name__
                raise ValueError(f"a mapping must be of shard_tiles, whole_tiles or look_up_tiles, not {kind}")
        if isinstance(producer, DynamicMapping) and counts is None:
            raise ValueError("a producer with a dynamic mapping needs counts: give how often ranks notify each other")
        if counts is not None and (
            counts.dtype != torch.int32
            or counts.shape != (2, self.world_size, self.channels)
            or not counts.is_contiguous()
        ):
            raise ValueError(
                f"counts must be contiguous int32 [2, {self.world_size}, {self.channels}], not {counts.dtype} "
                f"{list(counts.shape)}"
            )
        for name, mapping in (("producer", producer), ("consumer", consumer)):
            if not isinstance(mapping, StaticMapping):
                continue
            used = mapping.world.value * mapping.channels.value
            if mapping.world.value != self.world_size or used > self.channels:
                raise ValueError(
                    f"the {name}'s mapping is for {mapping.world.value} ranks with {mapping.channels.value} channels "
                    f"each, and this channel for {self.world_size} ranks and {self.channels} channels in all"
                )
        if isinstance(producer, StaticMapping):
            if not producer.aligned.value:
                raise ValueError("a producer's tiles have rows of one rank: use shard_tiles, not whole_tiles")
            if _value(producer.channel_rows) % producer.tile_rows.value:
                raise ValueError(
                    f"a producer's tile of {producer.tile_rows.value} rows ends where its channel of "
                    f"{_value(producer.channel_rows)} rows does: make channel_rows a multiple of the tile's"
                )
            if isinstance(consumer, StaticMapping) and (
                consumer.channels.value != producer.channels.value
                or _value(consumer.channel_rows) != _value(producer.channel_rows)
                or _value(consumer.rows) != _value(producer.rows)
            ):
                raise ValueError(
                    "producer and consumer share their channels: rows, channels and channel_rows of their mappings "
                    f"must agree; they are {_geometry(producer)} and {_geometry(consumer)}"
                )


def describe_failure(rank: int, world: int, operators: Sequence[str], words: Sequence[int]) -> str:
    """Describe a channel's failure record: which wait of which operator's call has failed."""
    kind, operator, epoch, tile, index, peer, seen, target = words[:8]
    if kind == failures.FOLLOWED:
        return (
            f"rank {rank} of {world}: {operators[operator]}, call {epoch & 0xFFFFFFFF}: ended without what it waited "
            f"for from rank {peer}, since a wait of another group had failed. The channel is broken from here on"
        )
    what = {
        OF_CONSUMER.value: f"tile {tile} (channel {index})",
        OF_PEER.value: f"tile {tile} between peers",
        OF_BEGIN.value: "the beginning of the call",
        OF_HOST.value: f"channel {index} (rank_wait)",
        OF_PACKETS.value: f"packets of part {tile}",
    }[kind]
    return (
        f"rank {rank} of {world}: {operators[operator]}, call {epoch & 0xFFFFFFFF}: waited in vain for rank {peer}, "
        f"{what}, {failures.read_limit(words):g} s: its signal is at {seen}, the target is {target}. The "
        "channel is broken from here on"
    )


def _value(number: Any) -> int:
    return number.value if isinstance(number, tl.constexpr) else number


def _geometry(mapping: StaticMapping) -> tuple[int, int, int]:
    return _value(mapping.rows), mapping.channels.value, _value(mapping.channel_rows)


def _signal_bytes(world_size: int, channels: int, peer_tiles: int) -> int:
    """Return the bytes of counters: producers' [world, channels], peers' [peer_tiles + 1, world] (last: `begin`'s)."""
    words = world_size * (channels + peer_tiles + 1)
    return -(-4 * words // _ALIGNMENT) * _ALIGNMENT
