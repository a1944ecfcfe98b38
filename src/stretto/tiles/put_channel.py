# SPDX-License-Identifier: Apache-2.0
"""`PutChannel`, on the host: the pinned slots, FIFO and signals through which kernels put slices to other ranks."""

from collections.abc import Hashable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import triton.language as tl
from torch import Tensor

from stretto.memory import MAX_BYTES, MAX_SIGNALS, HostMemory, PeerError, failures, find_own_rank, group_timeout
from stretto.memory.network.descriptors import CAPACITY
from stretto.memory.network.endpoint import Endpoint
from stretto.memory.network.frames import MAX_PUT_BYTES
from stretto.memory.pinned_puts import PinnedPuts
from stretto.tiles.call_state import WaitLimit, make_state
from stretto.tiles.intrinsics import INTERPRETED, register_record
from stretto.tiles.launches import kind_of, launch_kernel
from stretto.tiles.puts import Puts, gather_slices
from stretto.tiles.waits import OF_CREDIT, OF_FIFO, OF_SLICE

_ALIGNMENT = 16
_MAX_SLOTS = 1024
_MAX_PIECE = 8192  # words that a program gathers at once


class PutChannel:
    """Slots, signals and a FIFO on every rank of a group, whose kernels put slices to each other through the proxy.

    Calls run one after another, on one stream, in the same order on all ranks. The group may have several nodes, or
    GPUs of one node without peer access. Create it with `allocate`.
    """

    def __init__(
        self, memory: HostMemory, slots: int, slot_bytes: int, slices: int, device: torch.device, timeout: float
    ) -> None:
        assert memory.endpoint is not None
        self.rank, self.world_size = memory.rank, memory.world_size
        self.slots, self.slot_bytes, self.slices, self.device = slots, slot_bytes, slices, device
        self._memory = memory
        self._endpoint = memory.endpoint
        pinned = self._pinned = PinnedPuts(memory, device, by_lanes=True)
        state = make_state(0, device)
        self.limit = WaitLimit(state, timeout)
        self._operators: list[str] = []
        self._described: dict[str, Puts] = {}  # by operator
        describe = partial(_describe_failure, self._endpoint, self._operators)
        self._record = failures.register(self, describe, device)
        register_record(self._record.words.data_ptr(), self)
        self._arguments = (
            self.rank,
            tl.constexpr(self.world_size),
            tl.constexpr(slots),
            tl.constexpr(slot_bytes),
            tl.constexpr(slices),
            tl.constexpr(CAPACITY),
            tl.constexpr(pinned.lanes),
            memory.region,
        )
        self._tensors = (
            pinned.signals,
            memory.buffer(),
            pinned.words,
            pinned.tail,
            pinned.tickets,
            torch.zeros(self.world_size * slots, dtype=torch.int32, device=device),
            torch.zeros(self.world_size * slices, dtype=torch.int32, device=device),
            state,
            self._record.words,
            self._record.failed,
        )

    @classmethod
    def allocate(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        slots: int,
        slot_bytes: int,
        slices: int | None = None,
        timeout: float | None = None,
        backend: str = "cuda",
    ) -> "PutChannel":
        """Create a channel. Collective, with the same arguments on all ranks; group: None for all ranks.

        slots: for each pair of ranks and direction, of slot_bytes each, a multiple of 16. slices: signals for each
        pair; None: one a slot. timeout: of a wait, in seconds; None: the group's. backend: "cuda", or "host" for
        processes whose kernels are interpreted. ValueError for sizes out of bounds, before anything is allocated;
        PeerError for ranks that do not arrive.
        """
        if (backend == "host") != bool(INTERPRETED.value):
            raise ValueError(
                f"kernels are {'' if INTERPRETED.value else 'not '}interpreted here: the backend is "
                f"{'host' if INTERPRETED.value else 'cuda'!r}, not {backend!r}"
            )
        if not 1 <= slots <= _MAX_SLOTS:
            raise ValueError(
                f"a pair of ranks has 1 to {_MAX_SLOTS} slots, not {slots}: {min(max(slots, 1), _MAX_SLOTS)} would do"
            )
        if slot_bytes % _ALIGNMENT or not _ALIGNMENT <= slot_bytes <= MAX_PUT_BYTES:
            nearest = min(max(-(-slot_bytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT), MAX_PUT_BYTES)
            raise ValueError(
                f"a slot has a multiple of {_ALIGNMENT} bytes, up to {MAX_PUT_BYTES}, not {slot_bytes}: {nearest} "
                "would do"
            )
        slices = slots if slices is None else slices
        if not 1 <= slices <= MAX_SIGNALS - slots:
            raise ValueError(f"a pair of ranks has 1 to {MAX_SIGNALS - slots} signals of slices, not {slices}")
        _, world = find_own_rank(group)
        size = 2 * world * slots * slot_bytes
        if size > MAX_BYTES:
            raise ValueError(
                f"{world} ranks with {slots} slots of {slot_bytes} bytes need {size} bytes, and there are {MAX_BYTES}"
            )
        timeout = group_timeout(group) if timeout is None else timeout
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "cuda" else torch.device("cpu")
        memory = HostMemory.allocate(
            size, slices + slots, group, timeout, f"{slots} slots of {slot_bytes} bytes", always_puts=True
        )
        return cls(memory, slots, slot_bytes, slices, device, timeout)

    def begin(self, operator: str) -> Puts:
        """Begin a call: wake the proxy and return the first argument of the call's kernels.

        operator: a name for the failure record. PeerError if a wait has failed before, or a peer is lost.
        """
        try:
            self.check()
        except PeerError as error:
            raise PeerError(f"{operator}: {error}") from error
        if not self._memory.is_open:
            raise ValueError("the channel is closed")
        if operator not in self._described:
            self._operators.append(operator)
            self._described[operator] = Puts(*self._arguments, len(self._operators) - 1, *self._tensors)
        self.limit.begin_call()
        self._pinned.wake()
        return self._described[operator]

    @property
    def kind(self) -> Hashable:
        """Everything about `begin`'s result that a kernel is compiled for, for the key of a launch."""
        numbers = map(kind_of, (self.rank, self._memory.region))
        return self.world_size, self.slots, self.slot_bytes, self.slices, self._pinned.lanes, *numbers

    def check(self) -> None:
        """Raise PeerError if a wait of this process has failed, or a peer can be put to no more."""
        failures.check()
        self._pinned.check()

    def require_own(self, address: int) -> None:
        """Accept any address: puts name offsets, which the proxy checks."""

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        """Gather contiguous shards of all ranks by puts alone, in one kernel; out: [world, *shard.shape].

        The bytes of a shard are a multiple of 4. ValueError for tensors that do not fit.
        """
        words = shard.nbytes // 4
        if shard.nbytes % 4 or not shard.is_contiguous() or not out.is_contiguous():
            raise ValueError(f"shard and out are contiguous, of a multiple of 4 bytes: not {list(shard.shape)}")
        if out.nbytes != shard.nbytes * self.world_size or out.dtype != shard.dtype:
            raise ValueError(
                f"out holds {self.world_size} shards of {list(shard.shape)} {shard.dtype}, not {list(out.shape)} "
                f"{out.dtype}"
            )
        block = min(1 << (self.slot_bytes // 4).bit_length() - 1, _MAX_PIECE)
        puts = self.begin("all_gather_by_puts")
        launch_kernel(
            gather_slices,
            min(self.slots, self.slices),
            puts,
            shard.view(-1).view(torch.int32),
            out.view(-1).view(torch.int32),
            words,
            block,
            on_load=self.limit.allow_loading,
            num_warps=4,
        )

    def slot_memory(self) -> Tensor:
        """This rank's slots, uint8 in host memory: [world, slots, slot_bytes] that arrive, and as many that leave."""
        return self._memory.buffer()

    def break_connection(self, peer: int) -> None:
        """Break the connections to a peer of another node, for tests: they are opened again, and nothing is lost."""
        for proxy in self._endpoint.lanes:
            proxy.break_connection(peer)

    def close(self) -> None:
        """Free the memory; no kernel of this channel may still be running."""
        self._record.close()
        self._pinned.close()

    def __enter__(self) -> "PutChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _describe_failure(endpoint: Endpoint, operators: Sequence[str], words: Sequence[int]) -> str:
    """Describe a channel's failure record: which wait of which operator has failed, and what its proxy knows."""
    kind, operator, _, tile, _, peer, seen, target = words[:8]
    if kind == failures.FOLLOWED:
        return (
            f"{endpoint.describe(endpoint.rank)}: {operators[operator]}: ended without what it waited for, since a "
            "wait of another group had failed. The channel is broken from here on"
        )
    what = {
        OF_SLICE.value: f"a slice with signal {tile} of",
        OF_CREDIT.value: f"the credit of slot {tile} of",
        OF_FIFO.value: "room in the proxy's FIFO, to put to",
    }[kind]
    why = endpoint.failure(peer)
    return (
        f"{endpoint.describe(endpoint.rank)}: {operators[operator]}: waited in vain for {what} "
        f"{endpoint.describe(peer)}, {failures.read_limit(words):g} s: its counter is at {seen}, the target is "
        f"{target}{f'; the proxy says: {why}' if why else ''}. The channel is broken from here on"
    )
