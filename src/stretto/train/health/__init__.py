# SPDX-License-Identifier: Apache-2.0
"""Finds stuck ranks: heartbeats of all ranks, the monitor that reads them, and the stacks it collects (docs/stalls.md).

`note`, `phase` and `advance` say what this process works on; they need no torch. The rest is imported on first use.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach
from stretto.train.health.progress import advance, note, phase

if TYPE_CHECKING:
    from stretto.train.health.heartbeat import Heartbeat, heartbeats
    from stretto.train.health.monitor import Monitor, Stall

__all__ = ["Heartbeat", "Monitor", "Stall", "advance", "heartbeats", "note", "phase"]

__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(("Heartbeat", "heartbeats"), "stretto.train.health.heartbeat")
    | dict.fromkeys(("Monitor", "Stall"), "stretto.train.health.monitor"),
)
