# SPDX-License-Identifier: Apache-2.0
"""The interface of what runs schedules on one type of device."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from stretto.collectives.backend.calls import BackendCall
from stretto.collectives.schedule import Schedule

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work


@dataclass(frozen=True)
class Member:
    """This process in a group: its rank, the group's size, and the group's name."""

    rank: int
    size: int
    name: str


class FastestRun(NamedTuple):
    """A call that was started by the fastest known implementation.

    work: None if the inner backend is to run the call; name: of the implementation; why: the reason for the choice.
    is_settled: whether the same holds for all calls of such tensors.
    """

    work: "Work | None"
    name: str
    why: str
    is_settled: bool = False


class Runner(Protocol):
    """Runs schedules on one group's tensors of one device type. All ranks of the group make the same calls of it."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that it supports."""

    @property
    def reductions(self) -> frozenset[str]:
        """The reductions that it supports, of "sum", "avg", "prod", "min" and "max"."""

    def prepare(
        self, schedule: Schedule, group: dist.ProcessGroup | None, timeout: float, tile_bytes: int | None = None
    ) -> None:
        """Allocate what this schedule needs to run, once. All ranks call it together, with the same schedule.

        tile_bytes: bytes of each chunk per step, None for the executor's default.

        ValueError for a schedule that cannot run here; PeerError for ranks that do not arrive in `timeout` seconds.
        """

    def start(self, schedule: Schedule, call: BackendCall) -> "Work":
        """Start a prepared schedule on a call's tensors, after all earlier calls, and return immediately.

        The Work's `wait` raises errors: ValueError where ranks disagree, with nothing written; PeerError and
        ExecutionError for ranks that do not arrive, stop or die within `call.timeout` seconds, after which every later
        call of this group raises.
        """

    def start_fastest(self, call: BackendCall) -> FastestRun | None:
        """Start a call that no installed schedule matches by the fastest known implementation; None: there is none.

        The result's work is None where the inner backend is the fastest, or the only one that can run the call.
        """

    def begin_barrier(self, on_gpu: bool, is_async: bool) -> None:
        """Have a barrier of an inner backend, which begins next, come after all schedules of earlier calls.

        on_gpu: it follows the current stream. Otherwise the host waits here; if is_async, `after_schedules` waits.
        """

    def after_schedules(self, barrier: "Work") -> "Work":
        """A Work that ends when this one has, and all schedules of earlier calls."""

    def discard(self, schedule: Schedule) -> None:
        """Free what `prepare` has allocated, once earlier calls have ended."""

    def close(self, seconds: float) -> None:
        """Accept no more calls, wait up to `seconds` for those that have started, and free everything. Idempotent."""
