# SPDX-License-Identifier: Apache-2.0
"""Stretto overlaps communication with computation in distributed deep learning.

The front door is five names: `Cluster` (what the machine is), `plan` (which grid suits it), `Grid` (how its ranks are
laid out), `parallelize` (put a model on a grid) and the command `stretto`. They are imported on first use, so that
`import stretto` costs nothing and parts that need no GPU library stay free of it. It makes the name "stretto" known to
torch.distributed as a backend (stretto.collectives.backend).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from stretto.registration import register

if TYPE_CHECKING:
    from stretto.cluster import Cluster
    from stretto.parallel.api import parallelize
    from stretto.parallel.grid import Grid
    from stretto.planner import plan

__version__ = "0.1.0"
__all__ = ["Cluster", "Grid", "__version__", "parallelize", "plan"]

_HOMES = {
    "Cluster": "stretto.cluster",
    "Grid": "stretto.parallel",
    "parallelize": "stretto.parallel",
    "plan": "stretto.planner",
}


register()


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stretto' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
