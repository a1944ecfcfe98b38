# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory in large allocations, which copy engines read and write while kernels run.

torch's own allocator of pinned memory rounds each size up to a power of two, so that 80 GB take 128 GiB.
`allocate_pinned` rounds up to pages only. It maps anonymous memory, of which a killed process leaves nothing behind,
touches its pages with several threads, and registers it with CUDA. How much there is to allocate is what
`host_memory_limit` and `host_memory_available` say, which can be imported from here too.
"""

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto.cluster.detection import usable_cores
from stretto.cluster.host_memory import HostMemoryLimit, host_memory_available, host_memory_limit

__all__ = ["BLOCK_BYTES", "HostMemoryLimit", "allocate_pinned", "host_memory_available", "host_memory_limit"]

BLOCK_BYTES = 256 << 30
"""The most bytes that are registered by one call; a larger allocation is registered in blocks of so many.

NVIDIA's driver allocates a table of a call's pages, and fails for 512 GiB. A copy that touches two registered blocks
may fail too (cudaErrorInvalidValue), so blocks are so large that few allocations have more than one.
"""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU that the process uses
_TOUCHED_AT_ONCE = 1 << 30  # bytes, of one task of a thread
_MAX_THREADS = 16

_registered: dict[int, int] = {}
"""The bytes of each registered block of this process, by its address."""
_postponed: list[tuple[list[int], torch.device, object]] = []
"""Memory that was released while a CUDA graph was captured, when it cannot be unregistered."""
_of_parent: list[object] = []
"""Forget, in a forked process, what its parent has mapped: unmapping it here would hit what may lie there now."""


def allocate_pinned(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate zeroed host memory, uint8 [num_bytes], that copies to and from a CUDA device asynchronously.

    A copy between it and the device, with `non_blocking=True`, returns before it has ended, and overlaps with kernels
    of other streams. One copy must not cross a multiple of BLOCK_BYTES from the tensor's start. The memory is freed
    with the last tensor that views it, once the device has done all that was enqueued. Forked processes do not have it.

    device: a CUDA device, or the CPU, for which it is ordinary memory. Raises ValueError for a size that is negative or
    exceeds this machine's available memory, RuntimeError if CUDA does not register it. What other ranks
    allocate at the same time is not known here: a caller on all ranks checks the sum.
    """
    if num_bytes < 0:
        raise ValueError(f"pinned memory of {num_bytes} bytes: must be 0 or more")
    if num_bytes:
        _require_left(num_bytes)
    if device.type != "cuda" or num_bytes == 0:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    _free_postponed()
    buffer, mapping = _map(num_bytes)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    _touch(tensor)
    blocks: list[int] = []
    # The tensor's storage holds the buffer, which dies with the last view; the callback's arguments hold the mapping.
    weakref.finalize(buffer, _release, os.getpid(), blocks, device, mapping)
    _register(tensor.data_ptr(), num_bytes, device, blocks)
    return tensor


def pin_shared(memory: Tensor, device: torch.device) -> Callable[[], None]:
    """Pin memory that processes share, uint8 and from the beginning of a page, for a CUDA device's kernels.

    Returns the function that unpins it, and keeps the memory mapped until then. RuntimeError if CUDA does not pin it.
    """
    _free_postponed()
    blocks: list[int] = []
    _register(memory.data_ptr(), memory.nbytes, device, blocks)
    return partial(_release, os.getpid(), blocks, device, memory)


def _require_left(num_bytes: int) -> None:
    """Raise ValueError if the memory is not there: touching its pages would end the process, or another one."""
    left = host_memory_available()
    if num_bytes > left.bytes:
        raise ValueError(
            f"{num_bytes} bytes of pinned memory are more than the {left.bytes} left on this machine ({left.source}); "
            f"this process has pinned {sum(_registered.values())} already"
        )


def _map(num_bytes: int) -> tuple[Any, mmap.mmap]:
    """Map anonymous memory of this process alone, in huge pages where the system has them.

    A fork would share its pages until one side writes: the device would then continue to use pages that are no longer
    the tensor's. So a forked process does not get them.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ValueError(f"{num_bytes} bytes of pinned memory cannot be mapped: {error.strerror}") from error
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_uint8 * num_bytes).from_buffer(mapping), mapping


def _touch(tensor: Tensor) -> None:
    """Write to each page with several threads; CUDA would fault in one after the other when it pins them."""
    parts = tensor.split(_TOUCHED_AT_ONCE)
    threads = min(usable_cores(), len(parts), _MAX_THREADS)
    with ThreadPoolExecutor(threads, "stretto-touch") as pool:
        list(pool.map(lambda part: part[:: mmap.PAGESIZE].zero_(), parts))  # torch releases the interpreter's lock


def _register(address: int, num_bytes: int, device: torch.device, blocks: list[int]) -> None:
    """Register memory with CUDA in blocks, all or none, whose addresses are appended to `blocks`."""
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        for start in range(0, num_bytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, num_bytes - start)
            result = runtime.cudaHostRegister(address + start, size, _PORTABLE)
            if int(result) != 0:
                _clear_error(device)
                _unregister(blocks, device)
                raise RuntimeError(
                    f"CUDA does not pin bytes {start} to {start + size} of an allocation of {num_bytes} bytes: "
                    f"{runtime.cudaGetErrorString(result)} (cudaHostRegister, error {int(result)}). Besides it, this "
                    f"process has pinned {sum(_registered.values())} bytes; {host_memory_available().bytes} are left "
                    "on this machine"
                )
            _registered[address + start] = size
            blocks.append(address + start)


def _unregister(blocks: list[int], device: torch.device) -> None:
    """Unregister blocks, once the device has done all copies that were enqueued. For finalizers: it never raises."""
    with torch.cuda.device(device):
        with contextlib.suppress(RuntimeError):  # an error of a kernel, which the next call raises too
            torch.cuda.synchronize(device)
        while blocks:
            block = blocks.pop()
            del _registered[block]
            if int(torch.cuda.cudart().cudaHostUnregister(block)) != 0:
                _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Clear the error that the CUDA runtime keeps of a failed call: torch would raise it after its next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)


def _release(owner: int, blocks: list[int], device: torch.device, mapping: object) -> None:
    """Unregister the memory of a freed tensor, or of any when the process ends; it is unmapped after that."""
    if os.getpid() != owner:  # a forked process, which has neither the memory nor CUDA
        _of_parent.append(mapping)
    elif torch.cuda.is_current_stream_capturing():
        _postponed.append((blocks, device, mapping))
    else:
        _free_postponed()
        _unregister(blocks, device)


def _free_postponed() -> None:
    while _postponed and not torch.cuda.is_current_stream_capturing():
        blocks, device, _ = _postponed.pop()
        _unregister(blocks, device)
