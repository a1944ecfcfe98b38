# SPDX-License-Identifier: Apache-2.0
"""Messages between pipeline stages: the interface of their transports, and what all transports share.

A message holds the activations for one forward pass of a stage, or the gradients for one backward pass, of one
micro-batch. The schedule determines which messages a rank receives in a step, so `begin_step` is given their number
by source; which tensors they hold is written in each message's header (`message_format`).

    transport.begin_step({0: 8})                                  # pipe rank 0 will send 8 messages in this step
    transport.send(2, MessageKey("F", 2, 5), [hidden, mask])      # returns before the receiver has it
    (hidden, mask) = transport.take(MessageKey("F", 1, 5))        # waits for it
    transport.end_step()                                          # everything has been sent, and everything taken

Between two ranks, each direction is a separate channel, in which messages arrive in the order in which they were
sent; between channels there is no order. Messages are taken in any order: until then the transport holds them, as many
as the schedule has live micro-batches.

Failures. The first failure of a rank ends its transport: it writes a report to the group's store (`failure_reports`),
closes its channels, so that the other ranks notice, and each later call raises PeerError.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Condition
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from stretto.counters import waiting_for
from stretto.memory import PeerError, find_own_rank, group_timeout, next_number, store_all_gather
from stretto.memory.compilation import CallLimit
from stretto.memory.failures import register
from stretto.parallel.pipeline.failure_reports import FailureReports, Report
from stretto.parallel.pipeline.message_format import MessageHeader, MessageKey, ReceiveBuffers

__all__ = ["MessageKey", "MessageTransport"]


_FIRST_QUESTION = 1.0
"""Seconds of a wait after which the store is asked for failures, and again whenever the wait has doubled."""


class MessageTransport(ABC):
    """Carries tensors between the ranks of one group, the pipe axis'. All of its ranks make it, in the same order.

    A step begins with `begin_step` and ends with `end_step`. Ranks in all arguments are ranks in the group. A rank may
    send to itself: those tensors are passed without a copy. One thread calls the methods.

    Every wait has the group's time limit (`stretto.memory.group_timeout`), and on GPUs more in the first step and in
    one that follows the loading of a kernel (`stretto.memory.compilation`). PeerError, from any method, says that a
    rank died, or did not send or take a message within it; it names the message, and the rank from which the failure
    came. Each later call raises it again. `has_failed` returns this without raising.

    group: None for all ranks. device: the device of received tensors that were sent from a GPU, and for CPU ranks the
    CPU; tensors that were sent from a CPU are received on the CPU.
    """

    name: str
    """The transport's name in settings and errors."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> None:
        self.rank, self.size = find_own_rank(group)
        self.group = dist.group.WORLD if group is None else group
        assert isinstance(self.group, dist.ProcessGroup)
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.limit = group_timeout(self.group)
        self._step_limit = CallLimit(self.limit, loads_first=self.device.type == "cuda")
        self._global_ranks = dist.get_process_group_ranks(self.group)
        number = next_number(self.group, "message transports")
        asked = store_all_gather(f"{self.name} messages", self.group, "message transports", self.limit)
        if len(set(asked)) > 1:
            raise ValueError(f"all ranks must make the same transport of messages, not {', '.join(asked)}")
        self._topic = f"message transport {number}"
        self._store = _get_process_group_store(self.group)
        self._changed = Condition()  # guards what follows; notified at each change
        self._step = 0
        self._in_step = False
        self._is_closed = False
        self._outstanding: dict[int, int] = {}  # messages of this step that have not arrived yet, by source
        self._messages: dict[MessageKey, list[Tensor | None]] = {}  # that have arrived and were not taken
        self._arrived: deque[MessageKey] = deque()  # those of them that were not reported
        self._events: dict[MessageKey, torch.cuda.Event] = {}  # after which their tensors on a GPU hold their values
        self._taken: set[MessageKey] = set()
        self._buffers = ReceiveBuffers()
        self._unsent: dict[int, list[MessageKey]] = {}  # by destination, in the order of sending
        self._awaited: tuple[Collection[int], str, float] | None = None  # ranks, what of them, since when
        self._returned = time.monotonic()  # from the last wait, or since the step began
        self._failure: Report | None = None
        self._refused = 0  # steps
        self._reports = self._make_reports()
        self._failure_text = text = [""]
        self._record = register(self, lambda words: text[0], self.device)  # it may not refer to the transport itself

    # What a schedule calls.

    def begin_step(self, expected: Mapping[int, int]) -> None:
        """Begin a step. expected: how many messages each rank will send to this one; ranks that send none may lack.

        It does not wait. Messages of ranks that are already in this step may have been in flight.
        """
        self._require_usable(in_step=False)
        for source, count in expected.items():
            self._require_rank(source, "expected")
            if count < 0:
                raise ValueError(f"{count} messages are expected of pipe rank {source}: 0 or more can be")
        self._step_limit.seconds = group_timeout(self.group)
        self.limit = self._step_limit.of_call()
        with self._changed:
            self._step += 1
            self._in_step = True
            self._returned = time.monotonic()
            self._outstanding = {source: count for source, count in expected.items() if count}
            self._taken.clear()
        self._begin({source: count for source, count in self._outstanding.items() if source != self.rank})

    def send(self, destination: int, key: MessageKey, tensors: Sequence[Tensor | None]) -> None:
        """Send a message. It does not wait for the receiver.

        tensors: of any shapes, dtypes and strides; the receiver gets contiguous ones that require no gradient, and None
        where there is None. They are kept alive until they are sent; until `end_step` they must not be written.
        """
        self._require_usable(in_step=True)
        self._require_rank(destination, "destination")
        for tensor in tensors:
            if tensor is not None and tensor.device.type != "cpu" and tensor.device != self.device:
                raise ValueError(
                    f"{key} has a tensor on {tensor.device}: this transport's are on {self.device} or a CPU"
                )
        header = MessageHeader.of(self._step, key, tensors)
        values = [None if tensor is None else tensor.detach() for tensor in tensors]
        if destination == self.rank:
            self._deliver(self.rank, key, values, self._step)
            return
        values = [None if value is None else value.resolve_conj().resolve_neg().contiguous() for value in values]
        with self._changed:
            self._unsent.setdefault(destination, []).append(key)
        self._send(destination, header, values)
        self._require_usable(in_step=True)

    def wait_any(self) -> MessageKey:
        """Wait until a message is there that was neither reported nor taken, and report it: in the order of arrival."""
        self._require_usable(in_step=True)
        with self._changed:
            if not self._arrived:
                sources = self._sources()
                if not sources:
                    raise RuntimeError("wait_any would wait for ever: all messages of this step have been reported")
                self._wait(lambda: bool(self._arrived), sources, "any message")
            return self._arrived.popleft()

    def poll(self) -> list[MessageKey]:
        """Report the messages that are there and were neither reported nor taken. It waits for nothing."""
        self._require_usable(in_step=True)
        self._progress()
        self._require_usable(in_step=True)
        with self._changed:
            keys = list(self._arrived)
            self._arrived.clear()
        return keys

    def take(self, key: MessageKey, source: int | None = None) -> list[Tensor | None]:
        """Take the tensors of a message; waits until it has come.

        source: the rank that sends it, which an error will name; None: any that has messages left to send.
        """
        self._require_usable(in_step=True)
        with self._changed:
            if key not in self._messages:
                if key in self._taken:
                    raise ValueError(f"{key} has been taken in this step already")
                sources = self._sources() if source is None else [source]
                if not set(sources) & set(self._sources()):
                    raise ValueError(f"{key} cannot arrive: all messages announced in `begin_step` have been received")
                self._wait(lambda: key in self._messages, sources, str(key))
            if key in self._arrived:
                self._arrived.remove(key)
            self._taken.add(key)
            return self._make_ready(self._messages.pop(key), self._events.pop(key, None))

    def end_step(self) -> None:
        """Wait until all messages are sent, and end the step.

        RuntimeError if messages are left that were not taken, or that have not come; the transport is unusable then.
        """
        self._require_usable(in_step=True)
        with self._changed:
            if self._unsent:
                waited = min(self._unsent)
                self._wait(lambda: not self._unsent, self._unsent.keys(), str(self._unsent[waited][0]), taking=True)
        left = [str(key) for key in self._messages]
        left += [f"{count} messages of pipe rank {source}" for source, count in self._outstanding.items()]
        if left:
            text = f"the step ends, and these messages have not been taken: {', '.join(left[:8])}"
            self._fail([], f"{text} ({len(left)} in all)" if len(left) > 8 else text)
            self._record.was_raised = True
            raise RuntimeError(text)
        self._in_step = False
        self._end()
        self._buffers.trim()

    def fail(self, text: str) -> None:
        """Fail the step on all ranks, since something other than messages has failed here.

        text: what, in the past tense without a subject, for the other ranks' errors.
        """
        if self._in_step:
            self._fail([], text)

    def refuse_step(self, text: str) -> None:
        """Tell the ranks that begin the next step that this rank does not. If all refuse it, they can begin another.

        text: as of `fail`.
        """
        self._require_usable(in_step=False)
        self._reports.write(Report(blamed=[], text=text, waits_for=[], awaited=""))
        self._refused += 1
        self._reports = self._make_reports()

    def close(self) -> None:
        """Give everything back. After a clean step all ranks call it; in the middle of one it fails the others."""
        if self._is_closed:
            return
        if self._in_step and self._failure is None:
            self._fail([], "closed its transport of messages in the middle of a step")
        self._is_closed = True
        self._close()
        self._messages.clear()
        self._record.close()

    @property
    def has_failed(self) -> bool:
        """True if a failure has been noticed, which the next call raises."""
        return self._failure is not None

    def __enter__(self) -> "MessageTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a kind of transport does.

    @abstractmethod
    def _begin(self, expected: Mapping[int, int]) -> None:
        """Receive so many messages of each source, and `_deliver` each."""

    @abstractmethod
    def _send(self, destination: int, header: MessageHeader, tensors: list[Tensor | None]) -> None:
        """Send contiguous tensors, without waiting for the receiver, and call `note_sent` when that is done."""

    def _progress(self) -> bool:
        """Move what can be moved without waiting; returns whether anything was."""
        return False

    def _pause(self, seconds: float) -> None:
        """Wait for a change for at most so long; called with the condition's lock held."""
        self._changed.wait(seconds)

    def _end(self) -> None:  # noqa: B027
        """End what ran for the step; everything has been sent and has come."""

    @abstractmethod
    def _break(self) -> None:
        """Close all channels, so that peers notice, and so that this rank's threads end."""

    @abstractmethod
    def _close(self) -> None:
        """Give everything back; after a failure `_break` has been called."""

    # What a kind of transport calls.

    def _deliver(
        self, source: int, key: MessageKey, tensors: list[Tensor | None], step: int, event: Any = None
    ) -> None:
        """Hold a message that has come, of the sender's `step`; called from any thread.

        event: on the GPU, after which the tensors hold their values.
        """
        with self._changed:
            if self._failure is not None:
                return
            left = self._outstanding.get(source, 0)
            if step != self._step:
                problem = f"{self._name_rank(source)} sent {key} in step {step}, and this rank is in step {self._step}"
            elif left == 0 and source != self.rank:
                problem = f"pipe rank {source} sent {key}, one message more than expected"
            elif key in self._messages or key in self._taken:
                problem = f"pipe rank {source} sent {key} twice in a step"
            else:
                problem = ""
                if left > 1:
                    self._outstanding[source] = left - 1
                else:
                    self._outstanding.pop(source, None)
                self._messages[key] = tensors
                if event is not None:
                    self._events[key] = event
                self._arrived.append(key)
                self._changed.notify_all()
        if problem:
            self._fail([source], problem)
            if source == self.rank:
                self._raise_failure()

    def note_sent(self, destination: int, key: MessageKey) -> None:
        """Note that a message has left; called from any thread."""
        with self._changed:
            keys = self._unsent.get(destination, [])
            if key in keys:
                keys.remove(key)
            if not keys:
                self._unsent.pop(destination, None)
            self._changed.notify_all()

    def _fail(self, ranks: Collection[int], text: str) -> None:
        """Note a failure, unless there is one already; called from any thread.

        ranks: the ranks that caused it, as far as this rank can determine. text: what happened, in the past tense;
        without a subject where it is this rank that ends.
        """
        with self._changed:
            if self._failure is not None or self._is_closed:
                return
            waiting = self._awaited
            computed = f"it had computed for {time.monotonic() - self._returned:.1f} s"
            self._failure = Report(
                blamed=sorted(ranks),
                text=text,
                waits_for=[] if waiting is None else sorted(waiting[0]),
                awaited=computed if waiting is None else f"{waiting[1]} for {time.monotonic() - waiting[2]:.1f} s",
            )
            self._failure_text[0] = f"pipe rank {self.rank}: {text}"
            self._changed.notify_all()
        self._record.mark([1])
        self._reports.write(self._failure)  # before the channels close: peers that notice it read the report
        self._break()

    def _wait(self, is_there: Callable[[], bool], ranks: Collection[int], what: str, *, taking: bool = False) -> None:
        """Wait with the lock held until `is_there`; ranks: whom it depends on; what: the message, for errors."""
        since = time.monotonic()
        self._awaited = (list(ranks), what, since)
        try:
            with waiting_for([self._global_ranks[rank] for rank in ranks], what):
                asks = _FIRST_QUESTION
                while not is_there():
                    if self._failure is not None:
                        break
                    waited = time.monotonic() - since
                    if waited > self.limit:
                        self._time_out(ranks, what, taking)
                        break
                    if waited > asks:
                        asks = 2 * waited
                        if self._reports.has_any():  # of a rank that refuses the step: it does not close its channels
                            self._fail([], "noticed that another rank has refused the step or failed")
                            break
                    self._pause(min(self.limit, asks) - waited + 0.001)
        finally:
            self._awaited = None
            self._returned = time.monotonic()
        if self._failure is not None:
            self._raise_failure()

    def _make_reports(self) -> FailureReports:
        """The reports of the steps from now on, up to one that is refused."""
        topic = self._topic if not self._refused else f"{self._topic} after {self._refused} refusals"
        return FailureReports(self._store, topic, self.rank, self._name_rank)

    def _time_out(self, ranks: Collection[int], what: str, taking: bool) -> None:
        names = " or ".join(self._name_rank(rank) for rank in sorted(ranks))
        self._fail(ranks, f"{names} has not {'taken' if taking else 'sent'} {what} within {self.limit:g} s")

    def _raise_failure(self) -> None:
        assert self._failure is not None
        self._record.was_raised = True
        raise PeerError(self._reports.explain(self._failure))

    def _make_ready(self, tensors: list[Tensor | None], event: Any) -> list[Tensor | None]:
        """Let the current stream wait until the tensors hold their values."""
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            event.wait(stream)
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(stream)
        return tensors

    def _sources(self) -> list[int]:
        """The other ranks that have messages left to send in this step."""
        return sorted(source for source in self._outstanding if source != self.rank)

    def _name_rank(self, rank: int) -> str:
        return f"pipe rank {rank} (global rank {self._global_ranks[rank]})"

    def _require_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{what} names pipe rank {rank}: there are ranks 0 to {self.size - 1}")

    def _require_usable(self, *, in_step: bool) -> None:
        if self._is_closed:
            raise RuntimeError("this transport of messages has been closed")
        if self._failure is not None:
            self._raise_failure()
        if self._in_step != in_step:
            raise RuntimeError("call begin_step first" if in_step else "a step has begun: call end_step first")
