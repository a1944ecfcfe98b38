"""A schedule that somebody has installed, and the calls that it is for."""

from dataclasses import dataclass

import torch

from stretto.collectives.backend.calls import Call
from stretto.collectives.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Installed:
    """A verified schedule in a group, for calls of its collective from min_bytes to max_bytes (both inclusive).

    max_bytes: 0 for any; dtypes: None for all that the device's runner has; even_sizes: also for all-to-alls that are
    given sizes, which somebody has promised to be equal on all ranks.
    """

    schedule: Schedule
    min_bytes: int
    max_bytes: int
    dtypes: frozenset[torch.dtype] | None
    even_sizes: bool = False

    def find_obstacle(self, call: Call, dtypes: frozenset[torch.dtype], reductions: frozenset[str]) -> str | None:
        """Why it does not run this call, on a runner of these dtypes and reductions; None where it does."""
        schedule = self.schedule
        if schedule.collective.name != call.collective:
            return f"it does {schedule.collective.name}"
        if call.bytes < self.min_bytes:
            return f"it is for at least {self.min_bytes} bytes"
        if self.max_bytes and call.bytes > self.max_bytes:
            return f"it is for at most {self.max_bytes} bytes"
        if call.dtype not in (dtypes if self.dtypes is None else dtypes & self.dtypes):
            return f"it is not for {str(call.dtype)[6:]}"
        if call.reduction and call.reduction not in reductions:
            return f"its executor has no {call.reduction}"
        wanted = "sum" if call.reduction == "avg" else call.reduction
        if call.reduction and schedule.reduction not in (None, wanted):
            return f"it is made for {schedule.reduction}"
        if call.collective in ("broadcast", "reduce") and schedule.collective.root != call.root:
            return f"its root is rank {schedule.collective.root}"
        if call.note.endswith("sizes") and not self.even_sizes:
            return "sizes are given, and may be others on other ranks (even_sizes=True promises that they are equal)"
        return None
