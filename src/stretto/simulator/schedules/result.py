# SPDX-License-Identifier: Apache-2.0
"""The outcome of a simulated schedule: its time, what its thread blocks waited for, and the use of each link."""

from dataclasses import dataclass
from typing import Any

from stretto.quantities import whole_nanoseconds
from stretto.simulator.network import EventDrivenNetwork


@dataclass(frozen=True)
class BlockTime:
    """The seconds of one thread block by activity; for the rest of the schedule's time it had ended.

    busy: executing steps; message, slot, step: exposed waiting for a message from its receive peer, for a free FIFO
    slot at its send peer, and for another thread block's step.
    """

    rank: int
    block: int
    channel: int
    busy: float
    step: float
    message: float
    slot: float

    @property
    def exposed(self) -> float:
        """The seconds in which it waited."""
        return self.message + self.slot + self.step


@dataclass(frozen=True)
class LinkUse:
    """One link's bytes (flags included), and the seconds for which it was busy."""

    source: int
    target: int
    num_bytes: float
    busy: float


def list_link_use(network: EventDrivenNetwork) -> tuple[LinkUse, ...]:
    """The traffic of each link, in the order of the topology's links."""
    return tuple(
        LinkUse(link.source, link.target, busy * link.bandwidth, busy)
        for link, busy in zip(network.topology.links, network.link_busy, strict=True)
    )


@dataclass(frozen=True)
class ScheduleTime:
    """A simulated schedule. seconds: of the call, launch included; num_bytes: of a rank's larger buffer.

    fidelity: of the network ("event-driven" or "closed-form"); tiles: of each chunk; simulated_tiles: how many of them
    were simulated: fewer than `tiles` where the rest was extrapolated; events: how many there were.
    """

    fidelity: str
    seconds: float
    num_bytes: float
    tiles: int
    simulated_tiles: int
    events: int
    blocks: tuple[BlockTime, ...]
    links: tuple[LinkUse, ...]

    @property
    def is_extrapolated(self) -> bool:
        """True if only a part of the tiles was simulated."""
        return self.simulated_tiles < self.tiles

    @property
    def bandwidth(self) -> float:
        """Bytes of the larger buffer a second (what nccl-tests calls algorithm bandwidth)."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return what `stretto collective simulate --json` prints of it: times as whole nanoseconds."""
        return {
            "fidelity": self.fidelity,
            "time_ns": whole_nanoseconds(self.seconds),
            "bytes": self.num_bytes,
            "bandwidth": self.bandwidth,
            "tiles": self.tiles,
            "simulated_tiles": self.simulated_tiles,
            "thread_blocks": [
                {
                    "rank": each.rank,
                    "block": each.block,
                    "channel": each.channel,
                    "busy_ns": whole_nanoseconds(each.busy),
                    "message_ns": whole_nanoseconds(each.message),
                    "slot_ns": whole_nanoseconds(each.slot),
                    "step_ns": whole_nanoseconds(each.step),
                }
                for each in self.blocks
            ],
            "links": [
                {
                    "source": each.source,
                    "target": each.target,
                    "bytes": round(each.num_bytes),
                    "busy_ns": whole_nanoseconds(each.busy),
                    "use": each.busy / self.seconds if self.seconds else 0.0,
                }
                for each in self.links
            ],
        }
