# SPDX-License-Identifier: Apache-2.0
"""Memory and a FIFO, both pinned, by which the kernels of a GPU put to ranks whose memory it cannot map."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from stretto.memory.host import HostMemory
from stretto.memory.network.descriptors import CAPACITY, WORDS, Fifo
from stretto.memory.network.endpoint import Endpoint
from stretto.memory.pinned import pin_shared


class PinnedPuts:
    """Host memory with an endpoint, whose buffer kernels of `device` put from, and whose signals they read.

    In pinned memory: words, int64 [CAPACITY x 4], and tail, int64 [1], of the FIFO; signals, int32, this rank's pad. On
    the device: tickets, int64 [2], the next ticket and the tail that a kernel saw last. It closes the memory.
    """

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        assert memory.endpoint is not None
        self.memory, self.endpoint = memory, memory.endpoint
        whole, is_on_gpu = memory.whole(), device.type == "cuda"
        unpin = pin_shared(whole, device) if is_on_gpu else None
        self.words = torch.zeros(CAPACITY * WORDS, dtype=torch.int64, pin_memory=is_on_gpu, device="cpu")
        self.tail = torch.zeros(1, dtype=torch.int64, pin_memory=is_on_gpu, device="cpu")
        self.tickets = torch.zeros(2, dtype=torch.int64, device=device)
        self.signals: Tensor = whole[: 4 * memory.world_size * memory.signals].view(torch.int32)
        fifo = Fifo(self.words.view(CAPACITY, WORDS), self.tail)
        self.endpoint.proxy.add_fifo(fifo, True)
        self._finalizer = weakref.finalize(self, _release, self.endpoint, fifo, memory, unpin)
        self._finalizer.atexit = False

    def check(self) -> None:
        """Raise PeerError if a rank that is put to is lost."""
        for peer in range(self.memory.world_size):
            if peer != self.memory.rank:
                self.memory.check(peer)

    def close(self) -> None:
        """Free the memory; no kernel that uses it may still be running."""
        self._finalizer()


def _release(endpoint: Endpoint, fifo: Fifo, memory: HostMemory, unpin: Callable[[], None] | None) -> None:
    """Free the memory, once the device has ended its kernels and the proxy reads the FIFO no more."""
    if unpin is not None:
        unpin()
    endpoint.proxy.remove_fifo(fifo)
    memory.close()
