# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench simulated-two-level`, `simulated-zero3` and `simulated-scaling`."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, require_known, require_least

STUDIED = ("frontier", "perlmutter")


@dataclass(frozen=True)
class SimulatedTwoLevelSetting:
    """Which collectives of Singh's chapter 6 are simulated. Raises ValueError for numbers of ranks that nodes lack."""

    machines: Annotated[tuple[str, ...], Option("Of frontier and perlmutter.")] = STUDIED
    ranks: Annotated[tuple[int, ...], Option("Numbers of ranks (GCDs, GPUs).")] = (32, 64, 128, 256, 512, 1024, 2048)
    sizes: Annotated[tuple[int, ...], Option("MB (2^20 bytes) of an all-gather's output, a reduce-scatter's input.")] = (
        16, 32, 64, 128, 256, 512, 1024,
    )  # fmt: skip
    packet_kib: Annotated[int, Option("KiB of a packet of the event-driven network.")] = 64
    leaf_nodes: Annotated[int | None, Option("Nodes on one switch (default: all on one).")] = None
    oversubscription: Annotated[float, Option("How many times more these nodes send than their switch's links carry.")] = (
        1.0
    )

    def __post_init__(self) -> None:
        require_known("machine", self.machines, STUDIED)
        require_least(1, packet_kib=self.packet_kib)
        for count in self.ranks:
            if count < 16 or count % 8:
                near = max(16, round(count / 8) * 8)
                raise ValueError(f"--ranks has {count}, but takes whole nodes, 2 or more: multiples of 8; {near} would do")
        if self.leaf_nodes is not None:
            require_least(1, leaf_nodes=self.leaf_nodes)
        require_least(1, oversubscription=self.oversubscription)
