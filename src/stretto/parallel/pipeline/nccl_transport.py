# SPDX-License-Identifier: Apache-2.0
"""Messages between GPUs by NCCL, on a communicator of two ranks for each direction of each pair that talks.

The header, and tensors on the CPU, go through gloo, as in `gloo_transport`. A send or a receive of NCCL occupies
multiprocessors of its GPU from its launch until the other side has come, so that both sides launch theirs late:

    sender's thread                                        receiver's thread for this source
    waits until the tensors have been computed
    sends the header (gloo)  -------------------------->   allocates the tensors
    launches the sends (NCCL)  . . . . . . . . . . . . .   launches the receives (NCCL)
    waits until they have ended                            waits until they have ended, and delivers the message

With one communicator for both directions, or for several pairs, operations would run in the order of their launch, and
two ranks that each first send would wait for each other. Communicators are made when a pair first talks, by the same
two threads. Few are in use at a time: a rank has one to and one from each neighbour, of a few thread blocks each.

A rank that dies in the middle of a transfer leaves its peer's operation running; it is aborted when the time limit of
the wait for it has passed, or when gloo reports the closed connection. Over a network NCCL may notice first; torch then
ends the process, unless TORCH_NCCL_ASYNC_ERROR_HANDLING=0.
"""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import shared_gpus
from stretto.parallel.pipeline.gloo_transport import GlooTransport, Staged
from stretto.parallel.pipeline.message_format import MessageHeader, TensorLayout, as_bytes

_WITHOUT_LIMIT = timedelta(days=30)
_ABORT_SECONDS = 5.0


class NCCLTransport(GlooTransport):
    """Carries messages between GPUs by NCCL, on one machine or several, one GPU a rank.

    All ranks of the group make it. device: this rank's GPU. ValueError for a CPU.
    """

    name = "nccl"

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cuda") -> None:
        self._check_device(torch.device(device))
        self._links: dict[tuple[int, int], _NCCLLink] = {}  # by source and destination
        super().__init__(group, device)

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"NCCL carries messages of tensors on GPUs, not on {device}: take gloo")
        if shared_gpus.is_enabled():
            raise ValueError(
                "NCCL needs one GPU per rank, but ranks share GPUs here: use the transport 'symmetric memory'"
            )

    def _layouts_to_send(self, header: MessageHeader) -> tuple[TensorLayout | None, ...]:
        return tuple(None if layout is not None and self._is_data(layout) else layout for layout in header.tensors)

    def _is_data(self, layout: TensorLayout) -> bool:
        return layout.is_on_gpu

    def post_staged(self, destination: int, staged: Staged) -> list[Any]:
        """Wait for a message's tensors; send the header by gloo, then those on a GPU by NCCL."""
        assert self._staging is not None
        staged.event.synchronize()
        data = [
            tensor
            for tensor, layout in zip(staged.tensors, staged.header.tensors, strict=True)
            if tensor is not None and layout is not None and self._is_data(layout) and tensor.nbytes
        ]
        works = self.post_message(destination, staged.header, staged.tensors)
        if data:
            self._link(self.rank, destination).send(data, staged.event)
        return works

    def _receive_data(
        self, source: int, header: MessageHeader, tensors: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Any]:
        places = [
            (place, layout)
            for place, layout in enumerate(header.tensors)
            if layout is not None and self._is_data(layout)
        ]
        event = None
        if places:
            received, event = self._link(source, self.rank).receive([layout for _, layout in places])
            for (place, _), tensor in zip(places, received, strict=True):
                tensors[place] = tensor
        return tensors, event

    def _link(self, source: int, destination: int) -> "_NCCLLink":
        """The link of one direction, made at its first use, by the one thread that sends or receives there.

        Both ends wait for each other in it, so a lock for all links would make links wait for each other.
        """
        link = self._links.get((source, destination))
        if link is None:
            store = dist.PrefixStore(f"{self._topic} nccl {source} {destination}", self._store)
            link = _NCCLLink(store, 0 if self.rank == source else 1, self.device)
            self._links[source, destination] = link
        return link

    def _break(self) -> None:
        super()._break()
        # An abort waits for the driver; if that hangs, this rank still learns why.
        thread = threading.Thread(target=self._abort_links, name="stretto-abort-links", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)

    def _abort_links(self) -> None:
        for link in list(self._links.values()):
            link.abort()

    def _close(self) -> None:
        super()._close()
        if not self.has_failed:
            self._abort_links()  # idle by now, and no rank waits for another to give its communicators back
        self._links.clear()


class _NCCLLink:
    """A communicator of two ranks, one direction between them; the sender is rank 0. Each end is used by one thread."""

    def __init__(self, store: dist.Store, rank: int, device: torch.device) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _WITHOUT_LIMIT  # the transport has its own limit, and names the rank that exceeds it
        with torch.cuda.device(device):
            self._nccl: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensors: list[Tensor], ready: Any) -> None:
        """Send tensors that `ready`, an event, precedes; returns when they have been sent."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            ready.wait(self._stream)
            for tensor in tensors:
                self._nccl.send([as_bytes(tensor)], 1, 0).wait()  # the stream waits, not the host
            self._finish()

    def receive(self, layouts: list[TensorLayout]) -> tuple[list[Tensor], Any]:
        """Receive tensors; returns them when they have come, and the event of that."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            tensors = [torch.empty(layout.shape, dtype=layout.dtype, device=self._device) for layout in layouts]
            for tensor in tensors:
                if tensor.nbytes:
                    self._nccl.recv([as_bytes(tensor)], 0, 0).wait()
            return tensors, self._finish()

    def _finish(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()
        return event

    def abort(self) -> None:
        """End what is running, with whatever result."""
        self._nccl.abort()
