"""Symmetric memory between the GPUs of one machine, made by torch's symmetric memory."""

import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import shared_gpus
from stretto.memory.groups import find_own_rank, require_same
from stretto.memory.symmetric import MASK, PeerError, SymmetricMemory, has_reached

_ALIGNMENT = 128
_alive: weakref.WeakSet["CudaMemory"] = weakref.WeakSet()
_postponed: list[object] = []
"""Memory that was given back while a CUDA graph was captured, where torch, which waits for the device before it frees
any, would end the process."""


class CudaMemory(SymmetricMemory):
    """A buffer on every rank's GPU that all of them map; its signals are written and awaited in stream order.

    `signal` is enqueued on the current stream, after what was enqueued there before; `wait` keeps the host until the
    counter is there. Kernels take `addresses` and do both by themselves.
    """

    def __init__(self, storage: Tensor, handle: object, size: int, signals: int, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = find_own_rank(group)
        self.size = size
        self.signals = signals
        self.device = storage.device
        # Not the group itself: workspaces that are freed with their group would keep it alive.
        self._group = weakref.ref(group)
        self._storage: Tensor | None = storage
        self._handle = handle
        self._start = _pad_bytes(self.world_size, signals)
        self._counts: dict[tuple[int, int], int] = {}
        _alive.add(self)
        self._peers: dict[int, Tensor] = {}
        self.addresses = [int(address) + self._start for address in handle.buffer_ptrs]  # type: ignore[attr-defined]

    @classmethod
    def allocate(
        cls, size: int, signals: int, group: dist.ProcessGroup | None, timeout: float, what: str = ""
    ) -> "CudaMemory":
        """See `stretto.memory.allocate`; ranks that do not come are waited for as long as the group's own limit.

        what: for people, and the same on all ranks. ValueError on all ranks where one of them has no memory left.
        """
        import torch.distributed._symmetric_memory as symmetric

        if shared_gpus.is_enabled():
            shared_gpus.install()  # before the first allocation: torch reads its variable then
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError("symmetric memory on GPUs needs a process group: call init_process_group first")
        if not torch.cuda.is_available():
            raise ValueError("symmetric memory on GPUs needs GPUs, and this process sees none")
        device = torch.device("cuda", torch.cuda.current_device())
        rank, world_size = find_own_rank(group)
        _postponed.clear()
        storage = _try(_pad_bytes(world_size, signals) + max(size, 1), device)
        own = size, signals, what
        asked = [(own, "")] * world_size
        # What could not be had is raised when the others know, who would wait for this rank.
        dist.all_gather_object(asked, (own, str(storage) if isinstance(storage, Exception) else ""), group=group)
        for peer, (other, _) in enumerate(asked):
            require_same(own, other, rank, peer)
        for peer, (_, refusal) in enumerate(asked):
            if refusal:
                raise ValueError(f"rank {peer} has no symmetric memory to give: {refusal}")
        assert isinstance(storage, Tensor)
        storage.zero_()
        torch.cuda.synchronize(device)
        memory = cls(storage, symmetric.rendezvous(storage, group), size, signals, group)
        memory.meet()
        return memory

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group whose ranks share it; None once it was destroyed."""
        return self._group()

    def meet(self) -> None:
        """Wait on the host until all ranks have come here."""
        group = self.group
        if group is None:
            raise ValueError("the process group of this memory was destroyed: its ranks cannot meet")
        shared_gpus.barrier(group, self.device)

    def buffer(self, rank: int | None = None) -> Tensor:
        """See `SymmetricMemory.buffer`."""
        whole = self._whole(self.rank if rank is None else rank)
        return whole[self._start : self._start + self.size]

    def signal(self, peer: int, index: int) -> None:
        """See `SymmetricMemory.signal`."""
        count = self._counts[peer, index] = (self._counts.get((peer, index), 0) + 1) & MASK
        pad = self._whole(peer)[: self._start].view(torch.uint32)
        torch.ops.symm_mem.stream_write_value32_(pad, self.rank * self.signals + index, count)

    def wait(self, peer: int, index: int, target: int, timeout: float) -> None:
        """See `SymmetricMemory.wait`."""
        pad = self._whole(self.rank)[: self._start].view(torch.int32)
        began = time.monotonic()
        while not has_reached(seen := int(pad[peer * self.signals + index]) & MASK, target):
            if time.monotonic() - began > timeout:
                raise PeerError(
                    f"rank {self.rank} of {self.world_size} waits for signal {index} of rank {peer} to reach "
                    f"{target & MASK}: it is at {seen}, and it did not come within {timeout:g} s"
                )

    def close(self) -> None:
        """See `SymmetricMemory.close`."""
        if self._storage is not None:
            self._postpone()
        self._storage = None
        self._handle = None
        self._peers.clear()

    def __del__(self) -> None:
        # Whenever garbage is collected: workspaces of groups that are gone are part of cycles.
        if not sys.is_finalizing() and getattr(self, "_storage", None) is not None:
            self._postpone()

    def _postpone(self) -> None:
        """Keep the memory, which is to be freed, while a graph is captured; else free what was kept before."""
        if torch.cuda.is_current_stream_capturing():
            _postponed.append((self._storage, self._handle, *self._peers.values()))
        else:
            _postponed.clear()

    def held_bytes(self) -> int:
        """The bytes that this rank's part takes; 0 once it was closed."""
        return 0 if self._storage is None else self._storage.numel()

    def _whole(self, rank: int) -> Tensor:
        assert self._storage is not None, "this memory was closed"
        if rank == self.rank:
            return self._storage
        if rank not in self._peers:
            size = [self._storage.numel()]
            self._peers[rank] = self._handle.get_buffer(rank, size, torch.uint8)  # type: ignore[attr-defined]
        return self._peers[rank]


def allocated_bytes(device: torch.device) -> int:
    """What this process holds of symmetric memory on a GPU; torch.cuda.memory_allocated does not count it."""
    return sum(memory.held_bytes() for memory in list(_alive) if memory.device == device)


def _try(total: int, device: torch.device) -> Tensor | Exception:
    """`_allocate`, or why not."""
    try:
        return _allocate(total, device)
    except (ValueError, RuntimeError) as error:  # torch's errors of the driver are the latter
        return error


def _allocate(total: int, device: torch.device) -> Tensor:
    """uint8 [total], freed when it dies, on this rank by itself.

    torch's own `empty` takes it from a pool (since 2.11): a block of it that one rank has freed and another has not
    would be another one on each rank at the next allocation, and its old handle would be taken for the new one's.
    ValueError for NVSHMEM and NCCL as symmetric memory's backend, where freeing is a collective call.
    """
    import torch.distributed._symmetric_memory as symmetric

    backend = symmetric.get_backend(device)
    if backend != "CUDA":
        raise ValueError(f'Stretto takes the backend "CUDA" of torch\'s symmetric memory, and {backend!r} was chosen')
    return symmetric._SymmetricMemory.empty_strided_p2p((total,), (1,), torch.uint8, device)


def _pad_bytes(world_size: int, signals: int) -> int:
    return -(-4 * world_size * signals // _ALIGNMENT) * _ALIGNMENT
