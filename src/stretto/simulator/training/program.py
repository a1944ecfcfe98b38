# SPDX-License-Identifier: Apache-2.0
"""One rank's program of a training step, in order: computation, collectives over its groups, and messages.

A program is recorded on a `Tape` as the host would issue it: kernels on the compute stream one after another, each
collective on the stream of its group, and waits of the compute stream for what it needs. Nothing here knows times of
starts and ends: `lowering` makes a graph of programs, which is executed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.execution import SCATTERS_IN_FLIGHT, Overlap
from stretto.planner.step import COMPUTE, HOST, GroupCollective, Prefetch, WeightCollectives
from stretto.planner.step_recorder import GradientBuckets

PIPE = "pipe"


class StageMessage(NamedTuple):
    """Activations of a micro-batch, or their gradient, from one rank of pipe to another.

    stage: that receives it. Both are None of the gradient of tied embeddings, which the first and the last stage
    exchange.
    """

    source: int
    target: int
    stage: int | None
    is_forward: bool
    micro_batch: int | None


class StepOperation(NamedTuple):
    """One operation of a rank. `after`: places in the same program; those before it on its stream end first besides.

    seconds: of computation, on an undisturbed GPU. collective, sent, received: of other operations; `received` takes no
    time, and ends when the message arrives. is_barrier: ends when all ranks of pipe have reached it.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...]
    collective: GroupCollective | None = None
    sent: StageMessage | None = None
    received: StageMessage | None = None
    is_barrier: bool = False


@dataclass
class Tape:
    """Records a rank's operations.

    merges: consecutive computations become one operation where nothing else depends on the end of the first, which
    changes no time, and keeps long pipelines cheap.
    """

    merges: bool = False
    operations: list[StepOperation] = field(default_factory=list)
    _pending: list[int] = field(default_factory=list)  # operations for which the next computation waits
    _last: int | None = None  # the last computation
    _may_merge: bool = False

    def compute(self, name: str, seconds: float, stream: str = COMPUTE) -> None:
        """Compute for so many seconds, once all that is waited for has ended. What is on HOST holds up computation."""
        if seconds <= 0:
            return
        if self.merges and self._may_merge and not self._pending and self._last is not None and stream == COMPUTE:
            last = self.operations[self._last]
            self.operations[self._last] = last._replace(seconds=last.seconds + seconds)
            return
        after = list(self._pending)
        if self._last is not None and self.operations[self._last].stream != stream:
            after.append(self._last)
        self._last = self._add(StepOperation(name, stream, seconds, tuple(after)))
        self._pending.clear()
        self._may_merge = stream == COMPUTE

    def launch(self, seconds: float) -> None:
        """Let the next computation wait until the host has launched the last pass, beside what runs meanwhile."""
        self.wait(self._add(StepOperation("launch kernels", HOST, seconds, ())))

    def start(self, name: str, collective: GroupCollective | None, after: Sequence[int] = ()) -> int | None:
        """Issue a collective of the last computation's result; it overlaps with what follows. None for none.

        after: other operations that have to end first.
        """
        if collective is None:
            return None
        return self._add(StepOperation(name, collective.group, 0.0, (*self._done(), *after), collective))

    def wait(self, *operations: int | None) -> None:
        """Let the next computation wait for these."""
        self._pending += [each for each in operations if each is not None and each not in self._pending]

    def send(self, message: StageMessage) -> int:
        """Send what was computed last to another stage."""
        what = "activations" if message.is_forward else "gradient"
        if message.micro_batch is None:
            what = "gradient of tied embeddings"
        return self._add(StepOperation(f"send {what}", PIPE, 0.0, self._done(), sent=message))

    def receive(self, message: StageMessage) -> None:
        """Let the next computation wait for a message."""
        self.wait(self._add(StepOperation("receive", PIPE, 0.0, (), received=message)))

    def barrier(self) -> None:
        """Wait until all ranks of pipe have come here."""
        self.wait(self._add(StepOperation("norm of all stages' gradients", PIPE, 0.0, self._done(), is_barrier=True)))

    def _done(self) -> tuple[int, ...]:
        """Operations that have ended when the host's stream comes here."""
        return tuple(self._pending) if self._last is None else (self._last, *self._pending)

    def _add(self, operation: StepOperation) -> int:
        self._may_merge = False
        self.operations.append(operation)
        return len(self.operations) - 1


class WeightGathers:
    """All-gathers of weights over z, in the order of use.

    prefetch: "all" issues them together, as copy engines do at the beginning of a forward pass; "next" issues the next
    weight's when this one is used; "none" issues each where it is needed.
    """

    def __init__(self, tape: Tape, gathers: Sequence[GroupCollective | None], prefetch: Prefetch) -> None:
        self._tape, self._gathers, self._prefetch = tape, gathers, prefetch
        self._started: list[int | None] = []
        self._used = 0

    def use(self) -> None:
        """Let the next computation wait for the next weight."""
        ahead = {"all": len(self._gathers), "next": self._used + 2, "none": self._used + 1}[self._prefetch]
        while len(self._started) < min(ahead, len(self._gathers)):
            self._started.append(self._tape.start("gather weight", self._gathers[len(self._started)]))
        self._tape.wait(self._started[self._used])
        self._used += 1


class GradientSums:
    """Sends weights' gradients: over z in each micro-batch, or in the last alone; over data in the last.

    scatters, is_last: of the micro-batch whose backward pass is recorded.
    """

    def __init__(self, overlap: Overlap, buckets: GradientBuckets, in_flight: int = SCATTERS_IN_FLIGHT) -> None:
        self.scatters = self.is_last = True
        self._overlap, self._buckets, self._in_flight = overlap, buckets, in_flight
        self._on_the_way: list[int] = []
        self._sums: list[int] = []
        self._left: list[GroupCollective] = []

    @property
    def on_the_way(self) -> tuple[int, ...]:
        """The last of the scatters over z: all others have ended before it."""
        return tuple(self._on_the_way[-1:])

    def throttle(self, tape: Tape) -> None:
        """Let the next gradient wait until there is room for another on its way over z."""
        if len(self._on_the_way) >= self._in_flight:
            tape.wait(self._on_the_way[-self._in_flight])

    def add(self, tape: Tape, weight: WeightCollectives) -> None:
        """Send the gradient that was computed last."""
        scattered = tape.start("scatter weight gradient", weight.scatter) if self.scatters else None
        if scattered is not None:
            self._on_the_way.append(scattered)
            if not self._overlap.reduce_scatter:
                tape.wait(scattered)
        for each in self._buckets.add(weight) if self.is_last else ():
            self.sum_over_data(tape, each, self.on_the_way)

    def sum_over_data(self, tape: Tape, collective: GroupCollective, after: Sequence[int] = ()) -> None:
        """Sum gradients that are final on this rank, once `after` have ended."""
        if not self._overlap.data:
            self._left.append(collective)
            return
        summed = tape.start("sum gradients", collective, after)
        assert summed is not None
        self._sums.append(summed)

    def finish(self, tape: Tape) -> list[int]:
        """Let what follows wait for all gradients. Returns the sums over data, in order."""
        tape.wait(*self.on_the_way)
        for collective in (*self._left, *self._buckets.rest()):
            summed = tape.start("sum gradients", collective)
            assert summed is not None
            self._sums.append(summed)
        self._left.clear()
        return self._sums
