# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that wait for each other: each in a collective that the other never comes to.

So it ends where ranks make different kinds of passes: one alone runs a backward pass under `no_sync`, which sends less,
goes on to its next forward pass and waits there; the others wait in the sum that it has left out. Neither does anything
that is new to it, so `RankOrder` compares nothing.

Each rank counts the collectives that it has entered, by group. Once one has waited on its host for a second, it leaves
in the job's store for which collective, and those counts. Two ranks wait in vain if each has not entered the one in
which the other is, of a group of both, or if a collective of one number is of two kinds: no later work of either
can change that.
"""

import json

import torch.distributed as dist

from stretto import counters

_KEY = "stretto/waits/"
# Kinds that end on no rank before all have entered them.
_OF_ALL = ("all_reduce", "all_gather", "reduce_scatter")


class MutualWaits:
    """The waits of this rank, for `slow_waits`."""

    def look(self) -> None:
        """Raise RuntimeError if a rank waits for this one in a collective that this one has not come to, and the other
        way round."""
        wait = counters.waiting()
        if wait is None or wait.kind not in _OF_ALL or not dist.is_initialized():
            return
        store, own, entered = dist.distributed_c10d._get_default_store(), dist.get_rank(), counters.entered()
        store.set(f"{_KEY}{own}", json.dumps([*wait, entered]))
        for rank in wait.ranks:
            if rank == own or not store.check([f"{_KEY}{rank}"]):
                continue
            *their_wait, they_entered = json.loads(store.get(f"{_KEY}{rank}"))
            other = counters.CollectiveWait(*their_wait)
            is_ahead = own in other.ranks and entered.get(other.group, 0) < other.number
            is_other_kind = (other.group, other.number) == (wait.group, wait.number) and other.kind != wait.kind
            if is_other_kind or (is_ahead and they_entered.get(wait.group, 0) < wait.number):
                raise RuntimeError(
                    f"rank {own} waits for rank {rank} in {_describe(wait)}, and rank {rank} for rank {own} in "
                    f"{_describe(other)}: they make different passes. Every rank must make the same forward and "
                    "backward passes, and the same ones under no_sync"
                )


def _describe(wait: counters.CollectiveWait) -> str:
    return f"{wait.kind} {wait.number} over {wait.label}"


MUTUAL_WAITS = MutualWaits()  # of this process
