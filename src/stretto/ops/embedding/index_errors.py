# SPDX-License-Identifier: Apache-2.0
"""Errors that kernels find in a call, such as bad indices: recorded on the device, and raised by the host."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

WORDS = 8
BAD_INDEX = tl.constexpr(1)
BAD_OFFSETS = tl.constexpr(2)
OTHER_TABLES = tl.constexpr(3)
OTHER_GRADIENTS = tl.constexpr(4)
REFUSED = tl.constexpr(5)


class IndexErrorReport(NamedTuple):
    """Kernel argument: where a kernel records an error.

    state: int32 [1], 1 once an error is recorded. words: int64, in pinned memory that the host reads.
    """

    state: Any
    words: Any


class FoundError(NamedTuple):
    """An error, and whether no other rank knows of it yet."""

    error: ValueError
    is_own: bool


class IndexErrors:
    """The first error that this rank's kernels found since the last one that was raised.

    report: the argument that kernels record errors through.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._state = torch.zeros(1, dtype=torch.int32, device=device)
        self._words = torch.zeros(WORDS, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self.report = IndexErrorReport(self._state, self._words)
        self._seen = self._words.numpy()  # the same memory, read in a tenth of the time

    def check(self) -> None:
        """Raise the recorded error as a ValueError, once; synchronize first to see errors of all kernels launched."""
        found = self.take()
        if found is not None:
            raise found.error

    def take(self) -> "FoundError | None":
        """Return the recorded error, once; None if there is none."""
        if not self._seen[0]:
            return None
        words = self._words.tolist()
        self._words.zero_()
        self._state.zero_()
        return FoundError(ValueError(self._describe(*words[:5])), words[0] in (BAD_INDEX.value, BAD_OFFSETS.value))

    def _describe(self, kind: int, table: int, position: int, value: int, bound: int) -> str:
        if kind == BAD_INDEX.value:
            return (
                f"rank {self._rank}: indices[{position}] is {value}, but table {table} of this rank has {bound} rows: "
                f"0 to {bound - 1} will do. It was looked up as a row of zeros"
            )
        if kind == OTHER_TABLES.value:
            return (
                f"rank {self._rank}: rank {table} has looked up other tables in this call, or sees this rank's as they "
                "were in another one: give each set of tables of a group a name=. Nothing was stored"
            )
        if kind == OTHER_GRADIENTS.value:
            return (
                f"rank {self._rank}: the tables of rank {table} need gradients in this call, and rank {position} will "
                "send none (its tables have requires_grad=False, or it looks up under no_grad): all ranks' tables get "
                "gradients, or none. Nothing was stored"
            )
        if kind == REFUSED.value:
            return (
                f"rank {self._rank}: rank {table} had bad indices or offsets in an earlier call and raised an error in "
                "this one, in which nothing was stored: see that rank's error"
            )
        return (
            f"rank {self._rank}: the offsets of bag {position} (table {table} of this rank) go from {value} to "
            f"{bound}: offsets begin at 0 or later, never fall, and end at the number of indices or "
            "before. It was taken for an empty bag"
        )


@triton.jit
def record_index_error(report, kind: tl.constexpr, table, position, value, bound):  # type: ignore[no-untyped-def]
    """Record an error unless one is recorded already.

    The first word, by which the host sees the record, is written last (barrier, then release at system scope).
    """
    if tl.atomic_cas(report.state, 0, 1, sem="relaxed", scope="gpu") == 0:
        tl.store(report.words + 1, table.to(tl.int64))
        tl.store(report.words + 2, position.to(tl.int64))
        tl.store(report.words + 3, value.to(tl.int64))
        tl.store(report.words + 4, bound.to(tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(report.words, kind, sem="release", scope="sys")
