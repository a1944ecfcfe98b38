# SPDX-License-Identifier: Apache-2.0
"""Kinds of failures of ranks, and which errors are consequences of another rank's failure.

The line that an error is judged by begins with its class: "RuntimeError: ... Connection closed by peer".
"""

import json
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stretto.launch.job import Job
from stretto.launch.watching.monitor import Stall

# Errors of ranks that lost their connection to a peer: they are consequences of a failure and do not explain it.
LOST_PEER = (
    "closed by peer", "reset by peer", "broken pipe",  # gloo
    "remote process exited", "communicator was aborted",  # NCCL
    "distnetworkerror",  # the store
)  # fmt: skip
# Errors of ranks that waited for another one until a time limit: counters identify which.
TIME_LIMIT = (
    "timed out", "timeout",  # gloo, NCCL and the store
    "did not meet all ranks", "waited in vain", "has called nothing like it",  # Stretto's own
)  # fmt: skip
# Errors that all ranks raise when one of them could not write its part of a checkpoint (`checkpoint.writing`).
WRITE_OF_RANK = re.compile(r" could not be written: on rank (\d+), |^NoSpaceError: .*\(rank (\d+): ")

NO_SPACE = "NoSpaceError: "  # how the reason of a failure begins that a full disk has caused

Kind = Literal["raised", "killed", "exited", "silent", "stalled", "lost connection", "diverged", "corrupted", "invalid"]
"""How a rank failed.

raised: an exception. killed: a signal that it did not handle. exited: a status other than 0, without an exception.
silent: nothing comes from its host any more. stalled: it makes no progress. lost connection: ranks lost a connection
between them, and all of them live. diverged: DivergenceError.
corrupted: CorruptionError, replicas of a weight differ. invalid: ValueError, so that the same run would fail again.
"""

_KINDS: Mapping[str, Kind] = {"DivergenceError": "diverged", "CorruptionError": "corrupted", "ValueError": "invalid"}


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: `reason` in a line, `trace` if it wrote one. The one with the lowest `order` is the first.

    is_consequence: the rank only waited for another one, or lost it.
    """

    rank: int
    reason: str
    trace: str | None
    order: tuple[int, float]
    kind: Kind = "raised"
    is_consequence: bool = False

    @classmethod
    def of_stall(cls, stall: Stall) -> "Failure":
        """The failure that a stall is, since its last progress: the first of its culprits stands for all."""
        return cls(stall.culprits[0], stall.text, None, (0, time.time() - stall.seconds), stall.kind)


class RankFailure(RuntimeError):
    """A rank failed. `kind`: how (`Kind`). `reason`: its signal, its exception, or where it is stuck.

    `checkpoint`: the newest complete one that can be loaded. `failed_at`: by time.time(). `stopped_by`: the signal that
    had asked the ranks to stop before.
    """

    def __init__(self, failure: Failure, job: Job, trace_file: Path | None) -> None:
        self.rank, self.kind, self.reason = failure.rank, failure.kind, failure.reason
        self.failed_at, self.stopped_by = failure.order[1], None
        self.checkpoint = newest = job.newest_checkpoint()
        if newest is not None and failure.reason.partition(": ")[2].startswith(job.unreadable(newest)):
            self.checkpoint = job.newest_checkpoint(before=newest)  # the newest is damaged
        names_ranks = failure.kind in ("silent", "stalled") or failure.reason.startswith(
            ("rank ", "ranks ", "pairs of ranks ")
        )
        lines = [failure.reason if names_ranks else f"rank {failure.rank} of {job.ranks} failed: {failure.reason}"]
        if failure.reason.startswith("CorruptionError: "):  # every rank raises it, and it names the rank
            lines = [failure.reason.partition(": ")[2]]
            self.rank = int(lines[0].split()[1].rstrip(","))
        elif failure.reason.startswith(NO_SPACE):  # every rank raises it, and no rank is to blame
            lines = [failure.reason.removeprefix(NO_SPACE)]
        # These messages say how to continue.
        if not failure.reason.startswith(("DivergenceError: ", "DamagedCheckpointError: ")):
            lines.append(job.where_to_continue(self.checkpoint, is_latest=self.checkpoint == newest))
        if trace_file is not None:
            lines.append(f"the rank's traceback is in {trace_file}")
        super().__init__("\n".join(lines))


def kind_of(reason: str) -> Kind:
    """The kind of failure that an exception is."""
    if _has_any(LOST_PEER, reason):
        return "lost connection"
    return _KINDS.get(reason.partition(":")[0], "raised")


def is_consequence(reason: str) -> bool:
    """Whether an exception says that this rank lost another one, or waited for it until a time limit."""
    return _has_any(LOST_PEER, reason) or _has_any(TIME_LIMIT, reason)


def put_writer_first(failures: list[Failure]) -> list[Failure]:
    """Put the rank first that could not write its part of a checkpoint, if the first failure says which it was."""
    found = WRITE_OF_RANK.search(failures[0].reason)
    if found is None:
        return failures
    first = failures[0]
    rank = int(found[1] or found[2])
    own = next((each for each in failures if each.rank == rank and each.reason == first.reason), None)
    return [own or replace(first, rank=rank), *(each for each in failures if each is not own)]


def _has_any(words: tuple[str, ...], reason: str) -> bool:
    return any(each in reason.lower() for each in words)


def read_error(error_file: Path) -> tuple[str, str | None]:
    """Read the type and first line of a rank's exception, and its traceback; None for that if the file is not whole."""
    try:
        content = json.loads(error_file.read_text())["message"]
        lines = str(content["message"]).strip().splitlines()
        return lines[0], str(content["extraInfo"]["py_callstack"])
    # The rank was killed while it wrote the file, or writes it still.
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return "an exception", None


def seen_file(error_file: Path) -> Path:
    """The file by which the launcher notifies a rank that it has read the errors of all ranks."""
    return error_file.with_suffix(".seen")


def describe_signal(number: int) -> str:
    """Say in words that a signal has ended a rank."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hints = {signal.SIGKILL: ", as when memory runs out", signal.SIGBUS: ", as when a mapped file is cut short"}
    hint = next((text for each, text in hints.items() if each == number), "")
    return f"it was killed by {name}{hint}"
