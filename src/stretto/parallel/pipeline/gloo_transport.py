# SPDX-License-Identifier: Apache-2.0
"""Messages over a gloo group of the pipe's ranks; those of GPUs are staged in pinned host memory.

A message is up to three kinds of gloo messages, each kind with its own tag, in this order:

    FIRST   the header, and behind it the tensors that fit into FIRST_BYTES with it: the smallest ones first
    LEAD    the largest of the others
    REST    each one of the rest, and the lead if no receive was posted for it

gloo moves bytes only once the receive is posted. The receiver posts FIRST ahead, and LEAD too if the channel's last
message had one: with as many bytes as that had. The sender knows this size, and sends what is smaller by up to half
into the same receive; for a lead of another size it ends the posted receive by a single byte, and sends the lead as
REST.

gloo's `Work.is_completed` says nothing before `Work.wait` has returned, which has no time limit that would not also
close all of the group's connections. So threads wait without a limit: for each source that sends anything in a step
one that receives, for each destination one that waits for what was sent. They end with the step. To end them before,
`_break` lets a receive time out, by which gloo closes all connections; peers notice this immediately.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import PeerError
from stretto.parallel.pipeline.message_format import MessageHeader, TensorLayout, as_bytes
from stretto.parallel.pipeline.messages import MessageKey, MessageTransport

FIRST_BYTES = 1 << 16
"""The most bytes of the first part of a message."""

_FIRST, _LEAD, _REST, _NEVER = range(4)  # tags; nothing is ever sent with the last
_ALIGNMENT = 64
_WITHOUT_LIMIT = timedelta(days=30)
_JOIN_SECONDS = 10.0


class GlooTransport(MessageTransport):
    """Sends messages over its own gloo group, between ranks on any machines.

    All ranks of the group make it; they wait for each other, and connect. PeerError if some do not come.
    """

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        super().__init__(group, device)
        store = dist.PrefixStore(f"{self._topic} gloo", self._store)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timedelta(seconds=self.limit))
        except RuntimeError as error:
            self._record.close()
            raise PeerError(f"pipe rank {self.rank} did not connect to the others of {self.size}: {error}") from error
        self._posting = threading.Lock()  # a ProcessGroupGloo counts its calls without a lock
        self._posted_bytes: dict[tuple[int, int], int] = {}  # size of the last LEAD, by source and destination
        self._receivers: list[threading.Thread] = []
        self._senders: dict[int, _Sender] = {}
        self._staging = self._make_staging()
        # A process that ends in the middle of a step may not leave threads in gloo.
        self._finalizer = weakref.finalize(self, _close_connections, self._gloo, self.rank, self.size)

    def _make_staging(self) -> "HostStaging | None":
        return HostStaging(self.device) if self.device.type == "cuda" else None

    def _begin(self, expected: Mapping[int, int]) -> None:
        self._receivers = [
            threading.Thread(
                target=self._receive_all, args=(source, count), name=f"stretto-messages-from-{source}", daemon=True
            )
            for source, count in expected.items()
        ]
        for thread in self._receivers:
            thread.start()

    def _end(self) -> None:
        for sender in self._senders.values():
            sender.messages.put(None)
        for thread in (*self._receivers, *(sender.thread for sender in self._senders.values())):
            thread.join(_JOIN_SECONDS)
        self._receivers, self._senders = [], {}

    def _break(self) -> None:
        _close_connections(self._gloo, self.rank, self.size)
        for sender in self._senders.values():
            sender.messages.put(None)

    def _close(self) -> None:
        if not self.has_failed:
            # Whoever closes its connections while others still read from them may take their last bytes away.
            with contextlib.suppress(RuntimeError):  # nothing that was sent is lost by a rank that has ended
                self._gloo.monitored_barrier(timedelta(seconds=self.limit))
        self._end()
        self._finalizer.detach()
        self._gloo = None

    # Sending.

    def _send(self, destination: int, header: MessageHeader, tensors: list[Tensor | None]) -> None:
        sender = self._senders.get(destination)
        if sender is None:
            sender = self._senders[destination] = _Sender(self, destination)
        if self._staging is not None:
            sender.messages.put((header.key, Staged(header, tensors, self._staging.record())))
            return
        try:
            works = self.post_message(destination, header, tensors)
        except RuntimeError as error:
            self.explain(destination, error)
            self._raise_failure()
        sender.messages.put((header.key, works))

    def post_message(self, destination: int, header: MessageHeader, tensors: list[Tensor | None]) -> list[Any]:
        """Post the sends of a message whose tensors are on the host; returns (Work, memory) of each."""
        packed = header.pack()
        layouts = self._layouts_to_send(header)
        inline, others = _place(layouts, packed.numel())
        lead = _find_lead(layouts, others)
        parts = {index: as_bytes(tensors[index]) for index in others}  # type: ignore[arg-type]
        posted = self._posted_bytes.get((self.rank, destination), 0)
        self._posted_bytes[self.rank, destination] = 0 if lead is None else parts[lead].numel()
        sends = []
        if posted:
            if lead is not None and posted // 2 < parts[lead].numel() <= posted:
                packed.view(torch.int64)[MessageHeader.CHOICE] = 1
                sends.append((_LEAD, parts.pop(lead)))
            else:
                sends.append((_LEAD, torch.zeros(1, dtype=torch.uint8, device="cpu")))
        ends = [start + layouts[index].num_bytes for index, start in inline.items()]  # type: ignore[union-attr]
        first = torch.empty(max([packed.numel(), *ends]), dtype=torch.uint8, device="cpu")
        first[: packed.numel()] = packed
        for index, start in inline.items():
            data = as_bytes(tensors[index])  # type: ignore[arg-type]
            first[start : start + data.numel()] = data
        sends = [(_FIRST, first), *sends, *((_REST, part) for part in parts.values())]
        with self._posting:
            return [(self._gloo.send([part], destination, tag), part) for tag, part in sends]

    def post_staged(self, destination: int, staged: "Staged") -> list[Any]:
        """Wait for a message's tensors on a GPU, and post it as `post_message`."""
        assert self._staging is not None
        tensors = self._staging.to_host(staged.tensors, staged.event)
        return self.post_message(destination, staged.header, tensors)

    def _layouts_to_send(self, header: MessageHeader) -> tuple[TensorLayout | None, ...]:
        """The tensors of a message that gloo sends: None for the others."""
        return header.tensors

    # Receiving.

    def _receive_all(self, source: int, count: int) -> None:
        """Receive a step's messages of one source, in a separate thread."""
        try:
            posted = self._post_ahead(source)
            for left in reversed(range(count)):
                posted = self._receive(source, posted, is_last=left == 0)
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller must learn of it)
            self.explain(source, error)

    def _receive(self, source: int, posted: "_Posted", *, is_last: bool) -> "_Posted":
        """Receive a message and deliver it; returns what has been posted for the next one."""
        posted.first_work.wait(_WITHOUT_LIMIT)
        header, header_bytes = MessageHeader.unpack(posted.first)
        layouts = self._layouts_to_send(header)
        inline, others = _place(layouts, header_bytes)
        lead = _find_lead(layouts, others)
        buffers: dict[int, Tensor] = {}
        works = [] if posted.lead_work is None else [posted.lead_work]
        if header.choice and lead is not None and posted.lead is not None:
            buffers[lead] = posted.lead
        for index in others:
            if index not in buffers:
                layout = layouts[index]
                assert layout is not None
                buffers[index] = self._host_buffer(layout.num_bytes)
                works.append(self._post_receive(source, _REST, buffers[index]))
        layout = None if lead is None else layouts[lead]
        self._posted_bytes[source, self.rank] = 0 if layout is None else layout.num_bytes
        following = posted if is_last else self._post_ahead(source)
        tensors: list[Tensor | None] = []
        for index, layout in enumerate(layouts):
            if layout is None:
                tensors.append(None)
            elif index in inline:
                start = inline[index]
                tensors.append(layout.view(posted.first[start : start + layout.num_bytes].clone()))
            else:
                tensors.append(layout.view(buffers[index]))
        for work in works:
            work.wait(_WITHOUT_LIMIT)
        tensors, event = self._receive_data(source, header, tensors)
        self._deliver(source, header.key, tensors, header.step, event)
        return following

    def _receive_data(
        self, source: int, header: MessageHeader, tensors: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Any]:
        """Bring tensors to the GPU that were sent from one; returns all tensors, and the event of the copies."""
        return (tensors, None) if self._staging is None else self._staging.to_device(tensors, header.tensors)

    def _post_ahead(self, source: int) -> "_Posted":
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8, device="cpu")
        first_work = self._post_receive(source, _FIRST, first)
        size = self._posted_bytes.get((source, self.rank), 0)
        if not size:
            return _Posted(first, first_work, None, None)
        lead = self._host_buffer(size)
        return _Posted(first, first_work, lead, self._post_receive(source, _LEAD, lead))

    def _post_receive(self, source: int, tag: int, buffer: Tensor) -> Any:
        with self._posting:
            return self._gloo.recv([buffer], source, tag)

    def _host_buffer(self, num_bytes: int) -> Tensor:
        try:
            if self._staging is None:
                return self._buffers.take(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:  # gloo's errors have the same type, and another cause
            raise MemoryError(f"no host memory for a message of {num_bytes} bytes: {error}") from error

    def explain(self, rank: int, error: Exception) -> None:
        """Note that a message from or to a rank has failed: gloo's RuntimeErrors report that the connection is lost."""
        text = str(error).splitlines()[0][:200] if str(error) else ""
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            self._fail([rank], f"{self._name_rank(rank)} closed its connection ({text})")
        else:
            self._fail([], f"failed at a message of {self._name_rank(rank)}: {type(error).__name__}: {text}")


class _Posted(NamedTuple):
    """The receives that are posted for a message that has yet to come."""

    first: Tensor
    first_work: Any
    lead: Tensor | None
    lead_work: Any


class Staged(NamedTuple):
    """A message of tensors on a GPU, and the event after which they hold their values."""

    header: MessageHeader
    tensors: list[Tensor | None]
    event: torch.cuda.Event


class _Sender:
    """The thread that waits for one destination's sends in a step, in order, and then drops their tensors."""

    def __init__(self, transport: GlooTransport, destination: int) -> None:
        self.messages: queue.SimpleQueue[tuple[MessageKey, list[Any] | Staged] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._run, args=(transport, destination), name=f"stretto-messages-to-{destination}", daemon=True
        )
        self.thread.start()

    def _run(self, transport: GlooTransport, destination: int) -> None:
        try:
            while (item := self.messages.get()) is not None:
                key, works = item
                if isinstance(works, Staged):
                    works = transport.post_staged(destination, works)
                del item
                while works:
                    work, _ = works[-1]
                    work.wait(_WITHOUT_LIMIT)
                    works.pop()
                transport.note_sent(destination, key)
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller must learn of it)
            transport.explain(destination, error)


class HostStaging:
    """Copies between a GPU and pinned host memory, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def record(self) -> torch.cuda.Event:
        """An event after all work so far of the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def to_host(self, tensors: list[Tensor | None], event: torch.cuda.Event) -> list[Tensor | None]:
        """Copy tensors to the host after the event, and wait for the copies."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            event.wait()
            copies = [
                tensor
                if tensor is None or not tensor.is_cuda
                else torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            copied = torch.cuda.Event(blocking=True)  # the host's other threads get the core
            copied.record()
        copied.synchronize()
        return copies

    def to_device(
        self, tensors: list[Tensor | None], layouts: tuple[TensorLayout | None, ...]
    ) -> tuple[list[Tensor | None], torch.cuda.Event]:
        """Start to copy tensors that were sent from a GPU to this one; returns them and the event of the copies."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            copies = [
                tensor
                if tensor is None or layout is None or not layout.is_on_gpu
                else tensor.to(self.device, non_blocking=True)
                for tensor, layout in zip(tensors, layouts, strict=True)
            ]
            event = torch.cuda.Event()
            event.record()
        return copies, event


def _place(layouts: tuple[TensorLayout | None, ...], header_bytes: int) -> tuple[dict[int, int], list[int]]:
    """The tensors in a message's first part, with the byte at which each begins; and those that are sent separately.

    The smallest ones come first. Sender and receiver compute it from the header alone.
    """
    sizes = sorted((layout.num_bytes, index) for index, layout in enumerate(layouts) if layout is not None)
    inline: dict[int, int] = {}
    end = header_bytes
    for size, index in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if start + size > FIRST_BYTES:
            break
        inline[index] = start
        end = start + size
    return inline, [index for index, layout in enumerate(layouts) if layout is not None and index not in inline]


def _find_lead(layouts: tuple[TensorLayout | None, ...], others: list[int]) -> int | None:
    return max(others, key=lambda index: layouts[index].num_bytes, default=None)  # type: ignore[union-attr]


def _close_connections(gloo: Any, rank: int, size: int) -> None:
    """Close all connections of a gloo group, by receives that time out; all of its waits raise then."""
    for peer in range(size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _NEVER).wait(
                    timedelta(milliseconds=1)
                )
