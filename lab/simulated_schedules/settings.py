# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab simulated-collectives` and `simulated-msccl`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lab.two_level.namespaces import Network
from stretto.bench.settings import Option, require_least

NODES, RANKS_PER_NODE = 4, 2
RANKS = NODES * RANKS_PER_NODE
TILE_BYTES = 64 << 10
_BOTH = {"nodes": NODES, "gpus": RANKS_PER_NODE}
SCHEDULES: dict[str, dict[str, int]] = {
    "ring-all-reduce": {"ranks": RANKS},
    "two-shot-all-reduce": {"ranks": RANKS},
    "recursive-halving-all-reduce": {"ranks": RANKS},
    "hierarchical-all-reduce": _BOTH,
    "ring-all-gather": {"ranks": RANKS},
    "direct-all-gather": {"ranks": RANKS},
    "recursive-doubling-all-gather": {"ranks": RANKS},
    "hierarchical-all-gather": _BOTH,
    "ring-reduce-scatter": {"ranks": RANKS},
    "direct-reduce-scatter": {"ranks": RANKS},
    "recursive-halving-reduce-scatter": {"ranks": RANKS},
    "hierarchical-reduce-scatter": _BOTH,
    "direct-all-to-all": {"ranks": RANKS},
    "two-step-all-to-all": _BOTH,
}
NETWORK = Network(nodes=NODES, leaf_nodes=2, node_bandwidth=6.25e6, loopback_bandwidth=25e6, trunk_bandwidth=6.25e6)
"""50 Mbit/s a node and between the halves of the nodes, 200 inside a node."""
_SMALLEST = 4096


@dataclass(frozen=True)
class SimulatedCollectivesSetting:
    """Where the measurements are, and which sizes 8 processes measure anew: each twice the one before."""

    results: Annotated[Path, Option("Folder of the committed results.")] = Path("lab/results")
    measures: Annotated[
        bool,
        Option(
            "Measure 8 processes over shaped links (needs root), or take sockets.json of an earlier run.",
            "--measure/--no-measure",
        ),
    ] = True
    smallest: Annotated[int, Option("Bytes of the smallest buffer of the 8 processes.")] = 16 << 10
    sizes: Annotated[int, Option("How many sizes of the 8 processes.")] = 7
    repeats: Annotated[int, Option("Runs of each; their median counts.")] = 5

    def __post_init__(self) -> None:
        require_least(_SMALLEST, smallest=self.smallest)
        require_least(2, sizes=self.sizes)
        require_least(1, repeats=self.repeats)

    def require_results(self) -> None:
        """Raise ValueError if the folder lacks the measurements."""
        for name in ("collectives/collectives.json", "collectives-2-gpus/collectives.json", "two-level/two-level.json"):
            if not (self.results / name).is_file():
                raise ValueError(f"{self.results / name} is not there: name the folder of results with --results")

    @property
    def all_bytes(self) -> tuple[int, ...]:
        """The sizes in bytes that the processes measure."""
        return tuple(self.smallest << step for step in range(self.sizes))


@dataclass(frozen=True)
class SimulatedMscclSetting:
    """How finely the pipelining loop of large buffers is simulated."""

    tiles: Annotated[int, Option("Tiles of a chunk that are simulated; further ones are extrapolated.")] = 4

    def __post_init__(self) -> None:
        require_least(2, tiles=self.tiles)
