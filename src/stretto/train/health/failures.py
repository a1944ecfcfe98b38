# SPDX-License-Identifier: Apache-2.0
"""Kinds of failures of ranks, and which errors are consequences of another rank's failure.

The line that an error is judged by begins with its class: "RuntimeError: ... Connection closed by peer".
"""

from typing import Literal

# Errors of ranks that lost their connection to a peer: they are consequences of a failure and do not explain it.
LOST_PEER = (
    "closed by peer", "reset by peer", "broken pipe",  # gloo
    "remote process exited", "communicator was aborted",  # NCCL
    "distnetworkerror",  # the store
)  # fmt: skip
# Errors of ranks that waited for another one until a time limit: heartbeats tell for which.
TIME_LIMIT = (
    "timed out", "timeout",  # gloo, NCCL and the store
    "did not meet all ranks", "waited in vain", "has called nothing like it",  # Stretto's own
)  # fmt: skip

Kind = Literal["raised", "killed", "exited", "silent", "stalled", "lost connection", "diverged", "invalid"]
"""How a rank failed.

raised: an exception. killed: a signal that it did not handle. exited: a status other than 0, without an exception.
silent: no heartbeat arrives, since it is stopped, lost, or holds Python's interpreter lock. stalled: it makes no
progress. lost connection: ranks lost a connection between them, and all of them live. diverged: DivergenceError.
invalid: ValueError, so that the same run would fail again.
"""


def kind_of(reason: str) -> Kind:
    """The kind of failure that an exception is."""
    if _has_any(LOST_PEER, reason):
        return "lost connection"
    name = reason.partition(":")[0]
    return "diverged" if name == "DivergenceError" else "invalid" if name == "ValueError" else "raised"


def is_consequence(reason: str) -> bool:
    """Whether an exception says that this rank lost another one, or waited for it until a time limit."""
    return _has_any(LOST_PEER, reason) or _has_any(TIME_LIMIT, reason)


def _has_any(words: tuple[str, ...], reason: str) -> bool:
    return any(each in reason.lower() for each in words)
