# SPDX-License-Identifier: Apache-2.0
"""A rank's heartbeat, as a value that is written to the job's store as JSON; and the names of the store's keys."""

import json
import linecache
import os
import re
import socket
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

from stretto.train.health.flight_recorder import OpenCollective

IN_TORCH_DISTRIBUTED = "torch.distributed:"  # before the source of lines of torch.distributed's own files
# A line of Python that waits for other ranks without an entry in the flight recorder: gloo's sends and receives.
WAITING_CALL = re.compile(
    rf"^{re.escape(IN_TORCH_DISTRIBUTED)}|\b(wait\w*|synchronize|\w*barrier|recv)\(|\bdist\.\w+\("
)
JOINING = re.compile(r"lock\.acquire\(|thread\.join\(|_handle\.join\(")  # the main thread waits for another one
MISSED = 5  # heartbeats in a row that are missed by a silent rank: a busy machine delays some


@dataclass(frozen=True)
class Save:
    """A checkpoint that a background thread of a rank writes.

    step: of the checkpoint. since: seconds without progress of that thread. where: its innermost Python frame.
    """

    step: int
    since: float
    where: str


class Window(NamedTuple):
    """What a rank measures in some steps, in which it is slow or is not.

    number: of the window. busy: seconds of a step in which the rank did not wait. step: seconds of a step. view: by
    what: "cpu" by the lines of Python that wait, and so does "host" where a GPU computes; "nccl" by NCCL's kernels.
    """

    number: int
    busy: float
    step: float
    view: Literal["cpu", "host", "nccl"]


@dataclass(frozen=True)
class Beat:
    """A heartbeat of one rank.

    host: the machine's name, for messages. processes: where its process is, as `process_space` says. number: of the
    heartbeat, from 1 on. since: seconds without progress, by the rank's own clock. saves: the checkpoint
    that is being written in the background. waits: the unfinished collectives that it has entered, if it makes no
    progress. entered: how many collectives each group has had on this rank, by the group's name. peers: the ranks of
    which the main thread waits for one outside of collectives, for a pipeline's `message` for example; empty if it is
    not known which, None if it does not. has_failed: a wait for another rank has failed, and the error is on its way.
    where: Python's frames of the main thread, innermost first. line: the source of the innermost one. cpu: seconds of
    CPU time since the last progress. stack_file, place_file: descriptors of those files that `stacks.read_stacks` and
    `progress.read_place` read. error_file: of torch.distributed.elastic. is_done: the rank has ended training. busy:
    see `slow_ranks`.
    """

    rank: int
    host: str
    pid: int
    number: int
    phase: str
    step: int | None
    since: float
    processes: str = ""
    device: str = "cpu"
    saves: "Save | None" = None
    waits: tuple[OpenCollective, ...] = ()
    entered: tuple[tuple[str, int], ...] = ()
    peers: tuple[int, ...] | None = None
    message: str = ""
    has_failed: bool = False
    where: tuple[str, ...] = ()
    line: str = ""
    cpu: float = 0.0
    stack_file: int | None = None
    place_file: int | None = None
    error_file: str = ""
    is_done: bool = False
    busy: tuple[Window, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether `pid` is the rank's process in this process's view, so that it may be inspected and signalled."""
        return self.processes == process_space()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes) -> "Beat":
        values: dict[str, Any] = json.loads(text)
        waits = (OpenCollective(**each | {"ranks": tuple(each["ranks"])}) for each in values["waits"])
        return replace(
            cls(**values),
            saves=None if values["saves"] is None else Save(**values["saves"]),
            waits=tuple(waits),
            entered=tuple((name, number) for name, number in values["entered"]),
            peers=None if values["peers"] is None else tuple(values["peers"]),
            where=tuple(values["where"]),
            busy=tuple(Window(*each) for each in values["busy"]),
        )

    @property
    def own_waits(self) -> tuple[OpenCollective, ...]:
        """The collectives that wait for other ranks in the threads that train, without those that write checkpoints."""
        return tuple(wait for wait in self.waits if not wait.is_background)

    def seems_to_wait(self) -> bool:
        """Whether the rank's main thread is in a call that waits for other ranks, as far as this rank knows."""
        return bool(self.own_waits) or self.peers is not None or WAITING_CALL.search(self.line) is not None

    def waits_for_thread(self) -> bool:
        """Whether the main thread waits for a thread that is in a collective, such as one that writes a checkpoint."""
        return any(wait.is_background for wait in self.waits) and self.waits_for_own_thread()

    def waits_for_own_thread(self) -> bool:
        """Whether the main thread waits for another thread of its process."""
        return JOINING.search(self.line) is not None


@cache
def process_space() -> str:
    """Identifies the scope in which process ids are valid: the machine, and on Linux the PID namespace.

    Containers on one machine may have one host name (as with Docker's or Kubernetes's host network) and see other
    processes under the same numbers; machines may have one name, too.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system than Linux
        return socket.gethostname()


def interval_of(timeout: float) -> float:
    """Seconds between two heartbeats."""
    return min(1.0, timeout / 20)


def attempt() -> str:
    """The number of this start of the job, from 0 on: the launcher's, or torchrun's."""
    return os.environ.get("STRETTO_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def prefix() -> str:
    """The prefix of all keys in the job's store."""
    return f"stretto/health/{attempt()}"


def list_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Format numbers of ranks: "rank 3", "ranks 0, 1 and 3", and runs of many as "ranks 0-6 and 9"."""
    parts: list[str] = []
    ordered = sorted(ranks)
    first = 0
    for index, rank in enumerate(ordered):
        if index + 1 < len(ordered) and ordered[index + 1] == rank + 1:
            continue
        if index - first >= 2:
            parts.append(f"{ordered[first]}-{rank}")
        else:
            parts += [str(each) for each in ordered[first : index + 1]]
        first = index + 1
    if len(ordered) == 1:
        return f"rank {parts[0]}"
    return "ranks " + (" and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0])


def line_of(frame: FrameType) -> str:
    """The source of the line that a frame is at, marked if the frame is torch.distributed's."""
    file = frame.f_code.co_filename
    line = linecache.getline(file, frame.f_lineno or 0).strip()
    return f"{IN_TORCH_DISTRIBUTED} {line}" if f"torch{os.sep}distributed{os.sep}" in file else line
