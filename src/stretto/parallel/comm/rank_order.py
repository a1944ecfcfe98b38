# SPDX-License-Identifier: Apache-2.0
"""Ensures that all ranks of a group communicate about the same parameters in the same order.

A collective does not say what it sends: if one rank gathered another module's weight, or skipped one, ranks would
compute with each other's numbers, or wait for each other. Passes repeat, so each rank knows what comes next, and
comparing with that sends nothing. What is not as before is compared through the job's store, before it is sent:

    as in an earlier pass      nothing is sent
    anything else              the rank sets its event in the store, and waits for those of all others, which must be
                               equal; where they are not, all raise RuntimeError, which names ranks and modules
    a rank that goes on as     looks into the store once it has waited for a collective of gloo for a second, finds the
    before meanwhile           other's event, and raises; so does the other
    a first pass               is recorded, and compared at the end of the first backward pass, or where the next one
                               begins; where a rank waits for a second before, too. By gloo, each event is compared
                               before it is sent: a message of another size than expected would abort the process

NCCL's collectives do not let the host wait: there the rank that does something else raises after the group's limit.
"""

import json
import sys
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from stretto import counters
from stretto.memory import group_timeout
from stretto.parallel.comm.collectives import collective, slow_waits

Event = tuple[Any, ...]

END: Event = ("the end of the pass",)
RULE = (
    "every rank must go through the same submodules in the same order, and freeze the same parameters. Where a rank "
    "has no input for a module, call it on zeros and add 0 times its output to the loss"
)
_CPU = torch.device("cpu")
_MAX_SEQUENCES = 64
_MAX_DONE = 1024


@dataclass
class _Passes:
    """The sequences of events of one kind of pass.

    current, position: which one the running pass repeats so far. following: which came after which the last time.
    """

    sequences: list[list[Event]] = field(default_factory=list)
    following: dict[int, int] = field(default_factory=dict)
    current: int = -1
    position: int = 0
    is_compared: bool = False

    def expects(self, event: Event) -> bool:
        """True if the sequence goes on with this event."""
        return self.current >= 0 and self.sequences[self.current][self.position : self.position + 1] == [event]

    def learn(self, event: Event) -> None:
        """Find a sequence that begins like the running pass and goes on with this event, or begin one."""
        done = [*self.done, event]
        for number, sequence in enumerate(self.sequences):
            if sequence[: len(done)] == done:
                self.current = number
                return
        if self.current >= 0 and len(self.sequences[self.current]) == self.position:
            self.sequences[self.current].append(event)
            return
        if len(self.sequences) == _MAX_SEQUENCES:
            self.sequences.clear()
            self.following.clear()
        self.sequences.append(done)
        self.current = len(self.sequences) - 1

    @property
    def done(self) -> list[Event]:
        """The events of the running pass."""
        return self.sequences[self.current][: self.position] if self.current >= 0 else []


class RankOrder:
    """Follows what this rank does in each pass, and compares it with the group's other ranks where it is not as before.

    An event is a tuple of words and of parameters' numbers (`place`). Made in one order on all ranks. about: of which
    communication, for messages. `kind`: of backward passes. `names`: of the parameters, by number.
    """

    def __init__(self, group: dist.ProcessGroup, about: str) -> None:
        self.about = about
        self.kind: Hashable = None
        self.names: dict[int, str] = {}
        self._places: dict[nn.Parameter, int] = {}
        self._kinds: dict[Hashable, _Passes] = {}
        self._passes: _Passes | None = None
        self._first: list[Event] = []  # the events of passes that have not been compared
        self._before = self._task = -1
        self._done: deque[Event] = deque(maxlen=_MAX_DONE)
        self._events = self._agreements = 0
        self._is_on = group.size() > 1
        if self._is_on:
            self._group = group
            self._ranks = dist.get_process_group_ranks(group)
            self._own = self._ranks[group.rank()]
            on_hosts = [*group._device_types] == [_CPU] or dist.get_backend(group) == "gloo"
            self._host_backend = group._get_backend(_CPU) if on_hosts else None
            store = self._job = dist.distributed_c10d._get_default_store()
            topic = f"{group.group_name}/{self._ranks[0]}"
            made = _made.setdefault(store, Counter())
            made[topic] += 1
            self._store = dist.PrefixStore(f"stretto/order/{topic}/{made[topic]}", store)
            slow_waits.add(self)

    def place(self, parameter: nn.Parameter) -> int:
        return self._places.setdefault(parameter, len(self._places))

    def name(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.names = {self.place(parameter): name for name, parameter in named}

    def begin(self, kind: Hashable) -> None:
        """Begin a pass; this ends the one before."""
        if not self._is_on:
            return
        self.end()
        passes = self._passes = self._kinds.setdefault(kind, _Passes())
        if passes.sequences and not passes.is_compared:
            self._compare_first()
        self._before = passes.current
        passes.current, passes.position = passes.following.get(passes.current, passes.current), 0

    def begin_backward(self) -> None:
        """Begin a backward pass, unless the running one has begun."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.begin(("backward", self.kind))

    def follow(self, event: Event) -> None:
        """Do this next. RuntimeError, on all ranks, if another rank does something else."""
        passes = self._passes
        if passes is None:  # submodules that are called on their own
            return
        if not passes.expects(event):
            if passes.is_compared:
                self._agree([event])
            passes.learn(event)
        if not passes.is_compared:
            self._first.append(event)
            self._compare_one(event)
        passes.position += 1
        self._events += 1
        self._done.append(event)

    def end(self, *, compares: bool = False) -> None:
        """End the pass, if one is running. compares: first passes are compared now."""
        passes = self._passes
        if passes is None:
            return
        if sys.exception() is None:  # else this rank has failed
            self.follow(END)
            if self._before >= 0:
                passes.following[self._before] = passes.current
            if compares and self._first:
                self._compare_first()
        self._passes = None

    def _compare_one(self, event: Event) -> None:
        """Compare an event of a first pass with the other ranks', by gloo itself."""
        if self._host_backend is None:
            return
        mine = torch.tensor([zlib.crc32(repr(event).encode())], device=_CPU)
        found = mine.new_empty(len(self._ranks))
        with collective("all_gather", self._group) as issued:  # of the backend: nobody counts it as the model's
            work = self._host_backend._allgather_base(found, mine)  # type: ignore[attr-defined]
            started = issued.watch(work, mine)
        if started is not None:
            started.wait()
        if (found != mine).any():
            self._compare_first()

    def _compare_first(self) -> None:
        self._agree(self._first)
        self._first = []
        for passes in self._kinds.values():
            passes.is_compared = True

    def _agree(self, events: Sequence[Event]) -> None:
        """Wait until all ranks have come to the same place, and compare these events."""
        self._agreements += 1
        self._say(events)
        limit = timedelta(seconds=group_timeout(self._group))
        others = [rank for rank in self._ranks if rank != self._own]
        try:
            with counters.waiting_for(others, f"the order of {self.about}"):
                self._store.wait([self._key(rank) for rank in others], limit)
        except RuntimeError as error:
            late = [rank for rank in others if not self._store.check([self._key(rank)])]
            raise RuntimeError(
                f"{self.about}: rank {self._own} goes on with {_shorten(self._describe(events[-1]), '')}, and rank"
                f"{'s' * (len(late) > 1)} {', '.join(map(str, late))} did not come to the same place within the "
                f"group's limit of {limit}: {RULE}"
            ) from error
        reports = self._read(self._ranks)
        if len({(report["at"], report["digest"]) for report in reports.values()}) > 1:
            self._raise(reports)
        if self._agreements > 1:  # all ranks have read it: they have set a later one
            self._store.delete_key(self._key(self._own, -1))

    def look(self) -> None:
        """Raise RuntimeError if another rank does something else. Called while this one waits for a collective.

        A rank that has set an event waits there: if this rank has come further, it did something else.
        """
        if not dist.is_initialized() or self._job is not dist.distributed_c10d._get_default_store():
            return  # of a job that has ended
        others = [rank for rank in self._ranks if rank != self._own]
        if self._first:
            self._store.set(f"first/{self._key(self._own)}", json.dumps([*map(self._describe, self._first)]))
            for rank in others:
                if self._store.check([key := f"first/{self._key(rank)}"]):
                    self._compare_first_with(rank, json.loads(self._store.get(key)))
        self._agreements += 1
        ahead = self._read([rank for rank in others if self._store.check([self._key(rank)])])
        behind = min((report["at"] for report in ahead.values()), default=self._events)
        if behind < self._events:
            self._say(self._first or [self._done[max(behind - self._events, -len(self._done))]])
            self._raise(ahead | self._read([self._own]))
        self._agreements -= 1

    def _compare_first_with(self, rank: int, theirs: Sequence[str]) -> None:
        """Raise RuntimeError where events of first passes differ; a rank that waits in `_agree` reads this rank's."""
        try:
            self._compare(rank, [*map(self._describe, self._first)], theirs)
        except RuntimeError:
            self._agreements += 1
            self._say(self._first)
            raise

    def _raise(self, reports: dict[int, dict[str, Any]]) -> NoReturn:
        """Raise for the first rank whose report differs from this rank's."""
        own = reports.pop(self._own)
        rank = min(rank for rank in reports if any(reports[rank][key] != own[key] for key in ("at", "digest")))
        self._compare(rank, own["names"], reports[rank]["names"])
        self._fail(f"ranks {self._own} and {rank} have done {own['at']} and {reports[rank]['at']} steps")

    def _compare(self, rank: int, own: Sequence[str], other: Sequence[str]) -> None:
        """Raise RuntimeError where the names of this rank's events and those of another rank's differ."""
        for mine, theirs in zip(own, other, strict=False):
            if mine != theirs:
                shown = _shorten(mine, theirs), _shorten(theirs, mine)
                self._fail(f"rank {self._own} has come to {shown[0]}, and rank {rank} to {shown[1]}")

    def _fail(self, what: str) -> NoReturn:
        raise RuntimeError(f"{self.about}: {what}: {RULE}")

    def _say(self, events: Sequence[Event]) -> None:
        """Leave in the store what this rank is about to do, or has done."""
        names = [*map(self._describe, events)]
        report = {"at": self._events, "digest": zlib.crc32(repr(names).encode()), "names": names}
        self._store.set(self._key(self._own), json.dumps(report))

    def _key(self, rank: int, back: int = 0) -> str:
        return f"{self._agreements + back}/{rank}"

    def _read(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        keys = [self._key(rank) for rank in ranks]
        found = self._store.multi_get(keys) if keys else []
        return {rank: json.loads(each) for rank, each in zip(ranks, found, strict=True)}

    def _describe(self, event: Event) -> str:
        what, *places = event
        names = [self.names.get(place, str(place)) for place in places if isinstance(place, int)]
        return f"{what} {', '.join(names)}".strip()


def _shorten(text: str, other: str) -> str:
    """A description with few names: the first, and one that the other description lacks."""
    first, *names = text.split(", ")
    if len(names) < 2:
        return text
    return f"{first}, {min(names, key=set(other.split(', ')).__contains__)} and {len(names) - 1} more"


_made: "weakref.WeakKeyDictionary[dist.Store, Counter[str]]" = weakref.WeakKeyDictionary()
