# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a run, watch them, and stop them. `devices` needs no torch; the rest is imported on first use."""

from typing import TYPE_CHECKING

from stretto.lazy import attach
from stretto.train.launch.devices import resolve_device

if TYPE_CHECKING:
    from stretto.train.launch.launcher import (
        RankFailure,
        allocator_environment,
        changed_environment,
        launch,
        loopback_environment,
        rank_variables,
        remove_traces,
    )

__all__ = [
    "RankFailure",
    "allocator_environment",
    "changed_environment",
    "launch",
    "loopback_environment",
    "rank_variables",
    "remove_traces",
    "resolve_device",
]

_OF_LAUNCHER = tuple(name for name in __all__ if name != "resolve_device")
__getattr__, __dir__ = attach(__name__, dict.fromkeys(_OF_LAUNCHER, "stretto.train.launch.launcher"))
