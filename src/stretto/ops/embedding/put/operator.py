# SPDX-License-Identifier: Apache-2.0
"""`embedding_all_to_all_put`: the look-up for ranks whose memory this GPU cannot map, by NVSHMEM's puts."""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto.memory import failures, group_timeout, shared_gpus
from stretto.ops.embedding.forward import count_programs, find_launch_config
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.embedding.launch_config import LaunchConfig, cache_on_device, describe_pooling, describe_tables
from stretto.ops.embedding.output_ring import CHANNELS, round_size
from stretto.ops.embedding.placement import EmbeddingPlacement, find_placement, require_input
from stretto.ops.embedding.pooling_kernel import Bags
from stretto.ops.embedding.table_set import TableSet, find_tables
from stretto.ops.operator import find_group, find_kept, find_name, list_kept
from stretto.tiles import INTERPRETED, Channel
from stretto.tiles.call_state import WaitLimit, make_state
from stretto.tiles.launches import launch_kernel
from stretto.tiles.waits import OF_BEGIN

NAME = "embedding_all_to_all_put"
STAGING_BYTES = 16 << 20
"""Bytes of staging memory. Each program has a tile in it, of up to 64 KB, so it bounds the number of programs."""

_ALIGNMENT = 128


def embedding_all_to_all_put(
    indices: Tensor,
    offsets: Tensor,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    weights: Tensor | None = None,
    mode: str = "sum",
    batch: int | None = None,
    name: str = "",
    checks: bool = True,
    peer_access: Sequence[bool] | None = None,
) -> Tensor:
    """Look up as `embedding_all_to_all` does, forward only, on GPUs that need not map each other's memory.

    Arguments, result, bits and errors are those of `embedding_all_to_all`. Vectors for a rank with peer access are
    stored into its memory; vectors for another rank are staged in this rank's memory, and put from there through
    NVSHMEM. peer_access: for each rank, whether to store to it; default: whether NVSHMEM could map its memory. False is
    valid for any rank.

    NVSHMEM is chosen for the whole process, before torch's symmetric memory is first used:
    torch.distributed._symmetric_memory.set_backend("NVSHMEM"). Stretto's other kernels on GPUs need the backend "CUDA"
    and refuse that one. The group has all ranks. The first call of a size allocates memory for two outputs, which is
    never freed; the result is a copy. This is no torch.library operator: torch.compile breaks its graph here.

    RuntimeError without NVSHMEM. ValueError for tensors that are not on GPUs, another backend, a group of some ranks
    only, a rank in `peer_access` that cannot be mapped, tables that need gradients, and in a CUDA graph. Punniyamurthy
    et al., section 3.
    """
    group_name = find_name(group)
    world = dist.get_world_size(group)
    device = offsets.device
    known = find_tables(tables, device)
    count = require_input(indices, offsets, len(tables), weights, mode, batch, world)
    require_nvshmem(device)
    _require_call(group_name, known, peer_access, world)
    placement = find_placement(group_name, device, name, known.dims, known.dtype, count, needs_grad=False)
    size = placement.local_batch * placement.width * placement.dtype.itemsize
    if size == 0:
        return torch.empty(placement.local_batch, placement.width, dtype=placement.dtype, device=device)
    slots = PutSlots.find(group_name, device, size)
    slots.check()
    reached = slots.find_peer_access(peer_access)
    config = find_launch_config(placement, len(tables), indices.numel(), device)
    return _launch(
        slots, indices, offsets, known, weights, placement, group_name, mode, checks, reached, config.check()
    )


def _launch(
    slots: "PutSlots",
    indices: Tensor,
    offsets: Tensor,
    tables: TableSet,
    weights: Tensor | None,
    placement: EmbeddingPlacement,
    group: str,
    mode: str,
    checks: bool,
    peer_access: tuple[bool, ...],
    config: LaunchConfig,
) -> Tensor:
    begin_putting, pool_and_put = _load_kernels()
    device = offsets.device
    counts = find_kept(group, device, ("embedding put counts", placement), lambda: _count(placement, device))
    first_column = placement.first_column(placement.rank)
    kernel_tables = describe_tables(tables, first_column, placement.local_batch, placement.width, indices.numel())
    programs = count_programs(config, placement, len(tables.dims), device)
    if not all(peer_access):
        programs = min(programs, STAGING_BYTES // (config.bags * kernel_tables.block.value * placement.dtype.itemsize))
        if programs == 0:
            raise ValueError(
                f"{NAME}: {STAGING_BYTES} bytes of staging hold no tile of a config with {config.bags} bags"
            )
    exchange = slots.describe(placement.dtype, peer_access)
    slots.limit.begin_call()
    launch_kernel(
        begin_putting,
        1,
        slots.channel,
        exchange,
        counts,
        placement.fingerprint,
        BLOCK=triton.next_power_of_2(counts.numel()),
        on_load=slots.limit.allow_loading,
        num_warps=1,
    )
    out = slots.take((placement.local_batch, placement.width), placement.dtype)
    launch_kernel(
        pool_and_put,
        programs,
        slots.channel,
        exchange,
        kernel_tables,
        describe_pooling(config, mode, checks),
        Bags(indices, offsets, weights),
        out,
        placement.fingerprint,
        slots.index_errors.report,
        ORDER=config.order,
        on_load=slots.limit.allow_loading,
        num_warps=config.num_warps,
        num_stages=1,
    )
    return out.clone()


class PutSlots:
    """Two outputs, staging and signals, in NVSHMEM's symmetric memory on all ranks; made by `find`.

    limit: of the calls' waits. channel: holds it, failure record and addresses for the kernels; its counters are not
    used, since NVSHMEM's signals have 64 bits. Its addresses are the distances to other ranks' memory, 0 for ranks
    without peer access.
    """

    def __init__(self, storage: Tensor, addresses: Sequence[int], rank: int, slot_bytes: int, timeout: float) -> None:
        world, device = len(addresses), storage.device
        self.rank, self.device = rank, device
        self.index_errors = IndexErrors(rank, device)
        self.mapped = tuple(bool(address) for address in addresses)
        own = addresses[rank]
        distances = [address - own if address else 0 for address in addresses]
        if any(distance % 16 for distance in distances):
            raise ValueError("the ranks' memories lie at distances that are no multiples of 16 bytes")
        words = storage[: _head_bytes(world)].view(torch.int64)
        self._signals = words[: world * CHANNELS]
        self._begun = words[world * CHANNELS : world * (CHANNELS + 2)]
        self._slots = storage[_head_bytes(world) :][: 2 * slot_bytes].view(2, slot_bytes)
        self._staging = storage[_head_bytes(world) + 2 * slot_bytes :]
        self._targets = torch.zeros(world * CHANNELS, dtype=torch.int64, device=device)
        self._tickets = torch.zeros(1, dtype=torch.int32, device=device)
        self._record = failures.register(self, functools.partial(_describe_failure, rank, world), device)
        self._calls = 0
        state = make_state(0, device)
        self.limit = WaitLimit(state, timeout)
        self.channel = Channel(
            rank,
            tl.constexpr(world),
            tl.constexpr(CHANNELS),
            tl.constexpr(0),
            tl.constexpr("p2p"),
            0,
            state,
            torch.tensor([0] * world + distances, dtype=torch.int64, device=device),
            state,
            self._record.words,
            self._record.failed,
        )

    @classmethod
    def find(cls, group: str, device: torch.device, size: int) -> "PutSlots":
        """Find or make the group's, for outputs of `size` bytes; all ranks call it with the same size."""
        slot_bytes = round_size(size)
        return find_kept(
            group, device, ("embedding puts", slot_bytes), lambda: cls._allocate(group, device, slot_bytes)
        )

    @classmethod
    def _allocate(cls, group: str, device: torch.device, slot_bytes: int) -> "PutSlots":
        import torch.distributed._symmetric_memory as symmetric

        process_group = find_group(group)
        total = _head_bytes(process_group.size()) + 2 * slot_bytes + STAGING_BYTES
        storage = symmetric._SymmetricMemory.empty_strided_p2p((total,), (1,), torch.uint8, device)
        # Freeing is collective and waits for all ranks, so no rank ever frees it, not even when Python ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(storage))
        storage.zero_()
        torch.cuda.synchronize(device)
        addresses = symmetric.rendezvous(storage, process_group).buffer_ptrs
        shared_gpus.barrier(process_group, device)
        torch.cuda.synchronize(device)
        return cls(storage, addresses, process_group.rank(), slot_bytes, group_timeout(process_group))

    @property
    def num_bytes(self) -> int:
        """The bytes of this rank's symmetric memory."""
        return _head_bytes(len(self.mapped)) + self._slots.nbytes + self._staging.nbytes

    def find_peer_access(self, asked: Sequence[bool] | None) -> tuple[bool, ...]:
        """Return whether to store to each rank: as given, else if it is mapped. ValueError if one is not."""
        if asked is None:
            return self.mapped
        for peer, (wanted, can) in enumerate(zip(asked, self.mapped, strict=True)):
            if wanted and not can:
                raise ValueError(
                    f"{NAME}: rank {self.rank} cannot store into rank {peer}'s memory: give False for it in peer_access"
                )
        return tuple(peer == self.rank or bool(wanted) for peer, wanted in enumerate(asked))

    def describe(self, dtype: torch.dtype, peer_access: tuple[bool, ...]) -> Any:
        """Make the kernel argument, for tables of a dtype."""
        from stretto.ops.embedding.put.kernel import PutExchange

        words = cache_on_device((tuple(int(is_near) for is_near in peer_access),), self.device).view(-1)
        return PutExchange(words, self._signals, self._begun, self._staging.view(dtype), self._targets, self._tickets)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the next call's output, which is overwritten two calls later: copy it in stream order."""
        self._calls += 1
        memory = self._slots[self._calls % 2]
        return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def check(self) -> None:
        """Raise errors that kernels have recorded; synchronize first to see those of all launched kernels."""
        self.index_errors.check()
        failures.check()


def _describe_failure(rank: int, world: int, words: Sequence[int]) -> str:
    """Describe the failure record: which wait has failed."""
    kind, _, call, _, channel, peer, seen, target = words[:8]
    if kind == failures.FOLLOWED:
        return (
            f"rank {rank} of {world}: {NAME}, call {call}: ended without what it waited for from rank {peer}, since a "
            "wait of another group had failed. The group's calls are broken from here on"
        )
    what = "the beginning of the call" if kind == OF_BEGIN.value else f"channel {channel}"
    return (
        f"rank {rank} of {world}: {NAME}, call {call}: waited in vain for rank {peer}, {what}, "
        f"{failures.read_limit(words):g} s: its signal is at {seen}, the target is {target}. The group's calls are "
        "broken from here on"
    )


def find_put_slots(group: str) -> list[PutSlots]:
    """Return all slots of a group."""
    return [kept for kept in list_kept(group) if isinstance(kept, PutSlots)]


def require_nvshmem(device: torch.device) -> None:
    """Raise a RuntimeError or ValueError that says what is missing, unless this process can put through NVSHMEM."""
    import torch.distributed._symmetric_memory as symmetric

    if device.type != "cuda" or INTERPRETED.value:
        raise ValueError(
            f"{NAME} puts between GPUs, by compiled kernels, and these tensors are on {device}"
            f"{' with TRITON_INTERPRET set' if INTERPRETED.value else ''}: take embedding_all_to_all on CPUs"
        )
    if not symmetric.is_nvshmem_available():
        raise RuntimeError(
            f"{NAME}: torch found no NVSHMEM. It comes with torch's CUDA builds, as the package nvidia-nvshmem-cu13 or "
            "-cu12: install one of those builds"
        )
    backend = symmetric.get_backend(device)
    if backend != "NVSHMEM":
        raise ValueError(
            f"{NAME}: the backend of torch's symmetric memory is {backend!r}: call "
            'torch.distributed._symmetric_memory.set_backend("NVSHMEM") before anything symmetric is allocated'
        )
    _load_kernels()


@functools.cache
def _load_kernels() -> tuple[Any, Any]:
    """Return `begin_putting` and `pool_and_put`, linked with NVSHMEM's device library. RuntimeError without it."""
    from torch.distributed._symmetric_memory import _nvshmem_triton as nvshmem

    if not hasattr(nvshmem, "putmem_signal_block"):
        raise RuntimeError(
            f"{NAME}: torch has no bindings of NVSHMEM for Triton here: it found no GPU that Triton knows"
        )
    from stretto.ops.embedding.put import kernel as put_kernel

    begin_putting, pool_and_put = put_kernel.begin_putting, put_kernel.pool_and_put
    return nvshmem.requires_nvshmem(begin_putting), nvshmem.requires_nvshmem(pool_and_put)


def _require_call(group: str, tables: TableSet, peer_access: Sequence[bool] | None, world: int) -> None:
    if dist.get_process_group_ranks(find_group(group)) != list(range(dist.get_world_size())):
        raise ValueError(f"{NAME}: NVSHMEM allocates on all ranks together: the group has all, in their order")
    if torch.is_grad_enabled() and tables.needs_grad():
        raise ValueError(f"{NAME} has no gradients: call it under torch.no_grad, or take embedding_all_to_all")
    if peer_access is not None and len(peer_access) != world:
        raise ValueError(f"{NAME}: peer_access has {len(peer_access)} values, but there are {world} ranks")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{NAME}: a CUDA graph would give all its replays one of the two outputs: call it outside")


def _count(placement: EmbeddingPlacement, device: torch.device) -> Tensor:
    """Return int64 [world x CHANNELS]: how many vectors each source sends here in a call, for each channel."""
    counts = torch.zeros(placement.world_size, CHANNELS, dtype=torch.int64)
    for source, dims in enumerate(placement.dims):
        if source != placement.rank:
            for table in range(len(dims)):
                counts[source, table % CHANNELS] += placement.local_batch
    return counts.view(-1).to(device)


def _head_bytes(world: int) -> int:
    """Return the bytes of signals and `begun`, before the slots."""
    return -(-8 * world * (CHANNELS + 2) // _ALIGNMENT) * _ALIGNMENT
