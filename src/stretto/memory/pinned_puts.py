# SPDX-License-Identifier: Apache-2.0
"""Memory and a FIFO, both pinned, by which the kernels of a GPU put to ranks whose memory it cannot map."""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.memory.host import HostMemory
from stretto.memory.network.descriptors import CAPACITY, WORDS, Fifo
from stretto.memory.network.native import NativeProxy
from stretto.memory.network.proxy import Proxy
from stretto.memory.pinned import pin_shared


class PinnedPuts:
    """Host memory with an endpoint, whose buffer kernels of `device` put from, and whose signals they read.

    In pinned memory: words, int64 [lanes x CAPACITY x 4], and tail, int64 [lanes], of FIFOs; signals, int32, this
    rank's pad. On the device: tickets, int64 [lanes x 2], the next ticket and the tail that was seen last. by_lanes:
    there is a FIFO for each of the endpoint's lanes, not for the first alone. It closes the memory.
    """

    def __init__(self, memory: HostMemory, device: torch.device, by_lanes: bool = False) -> None:
        assert memory.endpoint is not None
        self.memory, self.endpoint = memory, memory.endpoint
        proxies = self.endpoint.lanes if by_lanes else self.endpoint.lanes[:1]
        self.lanes = len(proxies)
        whole, is_on_gpu = memory.whole(), device.type == "cuda"
        unpin = pin_shared(whole, device) if is_on_gpu else None
        self.words = torch.zeros(self.lanes * CAPACITY * WORDS, dtype=torch.int64, pin_memory=is_on_gpu, device="cpu")
        self.tail = torch.zeros(self.lanes, dtype=torch.int64, pin_memory=is_on_gpu, device="cpu")
        self.tickets = torch.zeros(2 * self.lanes, dtype=torch.int64, device=device)
        self.signals: Tensor = whole[: 4 * memory.world_size * memory.signals].view(torch.int32)
        words, tails = self.words.view(self.lanes, CAPACITY, WORDS), self.tail.view(self.lanes, 1)
        fifos = [(proxy, Fifo(words[lane], tails[lane])) for lane, proxy in enumerate(proxies)]
        for proxy, fifo in fifos:
            proxy.add_fifo(fifo, True)
        self._finalizer = weakref.finalize(self, _release, fifos, memory, unpin)
        self._finalizer.atexit = False

    def check(self) -> None:
        """Raise PeerError if a rank that is put to is lost."""
        for peer in range(self.memory.world_size):
            if peer != self.memory.rank:
                self.memory.check(peer)

    def wake(self) -> None:
        """Have the FIFOs looked at while a kernel runs that will post."""
        for proxy in self.endpoint.lanes[: self.lanes]:
            proxy.wake()

    def close(self) -> None:
        """Free the memory; no kernel that uses it may still be running."""
        self._finalizer()


def _release(
    fifos: Sequence[tuple[Proxy | NativeProxy, Fifo]], memory: HostMemory, unpin: Callable[[], None] | None
) -> None:
    """Free the memory, once the device has ended its kernels and no proxy reads a FIFO any more."""
    if unpin is not None:
        unpin()
    for proxy, fifo in fifos:
        proxy.remove_fifo(fifo)
    memory.close()
