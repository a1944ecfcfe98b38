"""What runs schedules on a kind of device, behind one interface."""

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
    """What the fastest known way made of a call: its Work, or None for what the backend inside is to run; why."""

    work: "Work | None"
    name: str
    why: str


class Runner(Protocol):
    """Runs schedules on one group's tensors of one device type. All ranks of the group make the same calls of it."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that it can run."""

    @property
    def reductions(self) -> frozenset[str]:
        """The reductions that it can run, of "sum", "avg", "prod", "min" and "max"."""

    def prepare(self, schedule: Schedule, group: dist.ProcessGroup | None, timeout: float) -> None:
        """Allocate what runs of this schedule need, once. All ranks call it together, with the same schedule.

        ValueError where this schedule cannot be run here; PeerError for ranks that do not come in `timeout` seconds.
        """

    def start(self, schedule: Schedule, call: BackendCall) -> "Work":
        """Begin to run a prepared schedule on a call's tensors, after all calls before it, and return at once.

        The Work's wait raises what went wrong: ValueError where ranks disagree, with nothing written; PeerError and
        ExecutionError for ranks that do not come, stop or die within `call.timeout` seconds, after which every later
        call of this group raises.
        """

    def start_fastest(self, call: BackendCall) -> FastestRun | None:
        """Begin to run a call for which nothing was installed by the fastest way that is known; None: there is none.

        Its work is None where the backend inside is the fastest, or alone can do it.
        """

    def after_schedules(self, barrier: "Work") -> "Work":
        """A Work that ends when this one has, and all calls before that schedules run."""

    def discard(self, schedule: Schedule) -> None:
        """Free what `prepare` has allocated, once the calls before have ended."""

    def close(self, seconds: float) -> None:
        """Start nothing any more, wait so long for what has begun, and free everything. May be called twice."""


def runner_for(device_type: str, member: Member) -> Runner | None:
    """A new runner for this group's tensors on devices of this type; None where Stretto has none.

    The one place where a device's executor is plugged in.
    """
    match device_type:
        case "cpu":
            from stretto.collectives.backend.host_runner import HostRunner

            return HostRunner(member)
        case "cuda":
            from stretto.collectives.backend.cuda_runner import CudaRunner

            return CudaRunner(member)
        case _:
            return None
