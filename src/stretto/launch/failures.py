# SPDX-License-Identifier: Apache-2.0
"""Says how a rank has failed: by its error's class where that is a JobError, by its text where it is torch's."""

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from stretto.atomic_files import write_atomically
from stretto.launch.job import LaunchJob
from stretto.launch.watching.monitor import Stall

# Errors of ranks that lost their connection to a peer: they are consequences of a failure and do not explain it. torch
# raises them as RuntimeError, with no other sign.
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

Kind = Literal["raised", "killed", "exited", "silent", "stalled", "lost connection", "diverged", "corrupted", "invalid"]
"""Kind of a rank's failure.

raised: an exception. killed: a signal that it did not handle. exited: a status other than 0, without an exception.
silent: nothing comes from its host any more. stalled: it makes no progress. lost connection: ranks lost a connection
between them, and all of them live. diverged: numbers that are not finite. corrupted: replicas of a weight differ.
invalid: ValueError, so that the same run would fail again.
"""


class JobError(Exception):
    """An error that all ranks of a job raise alike, and that says more of it than its text.

    rank: the one that has failed; None if that is not known. blames_rank: no other rank may be the cause. is_whole: its
    text, without its class, is the whole message. has_advice: its text says how to continue. would_recur: from the same
    checkpoint.
    """

    kind: Kind = "raised"
    rank: int | None = None
    blames_rank = True
    is_whole = has_advice = would_recur = False


@dataclass(frozen=True)
class Failure:
    """The reason why a rank failed, in a line, and `trace` if it wrote one. That with the lowest `order` is the first.

    is_consequence: the rank only waited for another one, or lost it. The others: as of a JobError.
    """

    rank: int
    reason: str
    trace: str | None
    order: tuple[int, float]
    kind: Kind = "raised"
    is_consequence: bool = False
    blames_rank: bool = True
    is_whole: bool = False
    has_advice: bool = False
    would_recur: bool = False

    @classmethod
    def of_stall(cls, stall: Stall) -> "Failure":
        """The failure that a stall is, since its last progress: the first of its culprits stands for all."""
        order, has_lost = (0, time.time() - stall.seconds), stall.kind == "lost connection"
        return cls(stall.culprits[0], stall.text, None, order, stall.kind, blames_rank=not has_lost, is_whole=True)

    @classmethod
    def of_error(cls, rank: int, error: Exception) -> "Failure":
        reason = next(iter(f"{type(error).__name__}: {error}".splitlines()))
        has_lost, only_waited = _has_any(LOST_PEER, reason), is_consequence(reason)
        found = cls(
            rank,
            reason,
            "".join(traceback.format_exception(error)),
            (1 + only_waited, time.time()),
            "lost connection" if has_lost else "invalid" if type(error) is ValueError else "raised",
            only_waited,
            blames_rank=not has_lost,
            would_recur=type(error) is ValueError,
        )
        if not isinstance(error, JobError):
            return found
        said = {name: getattr(error, name) for name in ("kind", "blames_rank", "is_whole", "has_advice", "would_recur")}
        own = reason.partition(": ")[2] if error.is_whole else reason
        return replace(found, rank=rank if error.rank is None else error.rank, reason=own, **said)


def is_consequence(reason: str) -> bool:
    """Check whether an exception, as "Class: text", is of a rank that lost another, or waited until a time limit."""
    return _has_any(LOST_PEER + TIME_LIMIT, reason)


def _has_any(words: tuple[str, ...], reason: str) -> bool:
    return any(each in reason.lower() for each in words)


def write_error(file: Path, failure: Failure) -> None:
    write_atomically(file, json.dumps(asdict(failure)))


def read_error(file: Path) -> Failure:
    values = json.loads(file.read_text())
    return Failure(**values | {"order": tuple(values["order"])})


ERROR_FILE = "STRETTO_ERROR_FILE"
"""The environment variable by which a rank gets the name of its error file."""


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


class RanksFailed(RuntimeError):
    """Ranks that only measure have failed: which one first, and how."""


class RankFailure(RuntimeError):
    """A rank failed. `kind`: how (`Kind`). `reason`: its signal, its exception, or where it is stuck.

    `checkpoint`: the newest complete one that can be loaded. `stopped_by`: the signal that had asked the ranks to stop
    before.
    """

    stopped_by: signal.Signals | None = None

    def __init__(self, failure: Failure, job: LaunchJob, trace_file: Path | None) -> None:
        self.failure, self.rank, self.kind, self.reason = failure, failure.rank, failure.kind, failure.reason
        self.checkpoint, advice = job.where_to_continue(failure.reason)
        lines = [failure.reason if failure.is_whole else f"rank {failure.rank} of {job.ranks} failed: {failure.reason}"]
        if not failure.has_advice:
            lines.append(advice)
        if trace_file is not None:
            lines.append(f"the rank's traceback is in {trace_file}")
        super().__init__("\n".join(lines))
