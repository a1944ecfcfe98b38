# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between the GPUs of one machine, allocated by torch's symmetric memory."""

import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import shared_gpus
from stretto.memory.groups import find_own_rank, require_same
from stretto.memory.plain_data import all_gather_data
from stretto.memory.symmetric import MASK, PeerError, SymmetricMemory, has_reached

_ALIGNMENT = 128
_alive: weakref.WeakSet["CudaMemory"] = weakref.WeakSet()
_postponed: list[object] = []
"""Memory that was released while a CUDA graph was captured. torch waits for the device before it frees memory, which
would end the process during a capture.
"""


class CudaMemory(SymmetricMemory):
    """A buffer on every rank's GPU that all ranks map; its signals are written and awaited in stream order.

    `signal` is enqueued on the current stream, after what was enqueued there before; `wait` blocks the host until the
    counter has arrived. Kernels take `addresses` and do both themselves.
    """

    def __init__(self, storage: Tensor, handle: object, size: int, signals: int, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = find_own_rank(group)
        self.size = size
        self.signals = signals
        self.device = storage.device
        # A weak reference: workspaces are freed with their group, and must not keep it alive.
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
        """Allocate on all ranks, as `stretto.memory.allocate`; waits for other ranks up to the group's own time limit.

        what: a description for error messages, the same on all ranks. ValueError on all ranks if one of them has no
        memory left.
        """
        import torch.distributed._symmetric_memory as symmetric

        if shared_gpus.is_enabled():
            shared_gpus.install()  # before the first allocation, where torch reads its variable
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
        # Raise a failed allocation only once the other ranks know, or they would wait for this one.
        offer = own, str(storage) if isinstance(storage, Exception) else ""
        asked = all_gather_data(offer, group, tuple[tuple[int, int, str], str])
        for peer, (other, _) in enumerate(asked):
            require_same(own, other, rank, peer)
        for peer, (_, refusal) in enumerate(asked):
            if refusal:
                raise ValueError(f"rank {peer} has no symmetric memory to give: {refusal}")
        assert isinstance(storage, Tensor)
        storage.zero_()
        torch.cuda.synchronize(device)
        memory = cls(storage, symmetric.rendezvous(storage, group), size, signals, group)
        memory.barrier()
        return memory

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group whose ranks share this memory; None once it has been destroyed."""
        return self._group()

    def barrier(self) -> None:
        """Wait on the host until all ranks have arrived."""
        group = self.group
        if group is None:
            raise ValueError("the process group of this memory was destroyed: its ranks cannot meet")
        shared_gpus.barrier(group, self.device)

    def buffer(self, rank: int | None = None) -> Tensor:
        """A rank's buffer (default: this rank's) as uint8 [size]."""
        whole = self._whole(self.rank if rank is None else rank)
        return whole[self._start : self._start + self.size]

    def signal(self, peer: int, index: int) -> None:
        """Enqueue a write of the next value of this rank's counter `index` at `peer` on the current stream."""
        count = self._counts[peer, index] = (self._counts.get((peer, index), 0) + 1) & MASK
        pad = self._whole(peer)[: self._start].view(torch.uint32)
        torch.ops.symm_mem.stream_write_value32_(pad, self.rank * self.signals + index, count)

    def wait(self, peer: int, index: int, target: int, timeout: float) -> None:
        """Poll on the host until `peer`'s counter `index` has reached `target`. PeerError after `timeout` seconds."""
        pad = self._whole(self.rank)[: self._start].view(torch.int32)
        began = time.monotonic()
        while not has_reached(seen := int(pad[peer * self.signals + index]) & MASK, target):
            if time.monotonic() - began > timeout:
                raise PeerError(
                    f"rank {self.rank} of {self.world_size} waits for signal {index} of rank {peer} to reach "
                    f"{target & MASK}: it is at {seen}, and it did not come within {timeout:g} s"
                )

    def close(self) -> None:
        """Release the memory; if a CUDA graph is being captured, after the capture."""
        if self._storage is not None:
            self._postpone()
        self._storage = None
        self._handle = None
        self._peers.clear()

    def __del__(self) -> None:
        # Runs at any garbage collection, since workspaces of destroyed groups are in reference cycles.
        if not sys.is_finalizing() and getattr(self, "_storage", None) is not None:
            self._postpone()

    def _postpone(self) -> None:
        """During a graph capture, keep the memory, which is to be freed; otherwise free what was kept before."""
        if torch.cuda.is_current_stream_capturing():
            _postponed.append((self._storage, self._handle, *self._peers.values()))
        else:
            _postponed.clear()

    def held_bytes(self) -> int:
        """The bytes of this rank's part; 0 once it is closed."""
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
    """Bytes of symmetric memory that this process holds on a GPU, which torch.cuda.memory_allocated does not count."""
    return sum(memory.held_bytes() for memory in list(_alive) if memory.device == device)


def _try(total: int, device: torch.device) -> Tensor | Exception:
    """Call `_allocate`; return its error, if any, instead of raising it."""
    try:
        return _allocate(total, device)
    except (ValueError, RuntimeError) as error:  # torch raises RuntimeError for driver errors
        return error


def _allocate(total: int, device: torch.device) -> Tensor:
    """Allocate uint8 [total], which each rank frees independently when the tensor dies.

    torch's own `empty` allocates from a pool (since 2.11). If one rank has freed a block of the pool and another rank
    has not, the next allocation would return different blocks on the ranks, and the old handle would be taken for the
    new one's. ValueError for NVSHMEM and NCCL as symmetric memory's backend, where freeing is a collective call.
    """
    import torch.distributed._symmetric_memory as symmetric

    backend = symmetric.get_backend(device)
    if backend != "CUDA":
        raise ValueError(f'Stretto takes the backend "CUDA" of torch\'s symmetric memory, and {backend!r} was chosen')
    return symmetric._SymmetricMemory.empty_strided_p2p((total,), (1,), torch.uint8, device)


def _pad_bytes(world_size: int, signals: int) -> int:
    return -(-4 * world_size * signals // _ALIGNMENT) * _ALIGNMENT
