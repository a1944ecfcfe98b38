# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab simulated-two-level`, `simulated-zero3`, `simulated-scaling` and `simulated-dlrm`."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, require_known, require_least

STUDIED = ("frontier", "perlmutter")


@dataclass(frozen=True)
class SimulatedTwoLevelSetting:
    """Which collectives of Singh's chapter 6 are simulated. Raises ValueError for numbers of ranks that nodes lack."""

    machines: Annotated[tuple[str, ...], Option("Of frontier and perlmutter.")] = STUDIED
    ranks: Annotated[tuple[int, ...], Option("Numbers of ranks (GCDs, GPUs).")] = (32, 64, 128, 256, 512, 1024, 2048)
    sizes: Annotated[tuple[int, ...], Option("MiB: an all-gather's output, a reduce-scatter's input.")] = (
        16, 32, 64, 128, 256, 512, 1024,
    )  # fmt: skip
    packet_kib: Annotated[int, Option("KiB of a packet of the event-driven network.")] = 64
    leaf_nodes: Annotated[int | None, Option("Nodes on one switch (default: all on one).")] = None
    oversubscription: Annotated[
        float, Option("How many times more these nodes send than their switch's links carry.")
    ] = 1.0

    def __post_init__(self) -> None:
        require_known("machine", self.machines, STUDIED)
        require_least(1, packet_kib=self.packet_kib)
        for count in self.ranks:
            if count < 16 or count % 8:
                near = max(16, round(count / 8) * 8)
                raise ValueError(
                    f"--ranks has {count}, but takes whole nodes, 2 or more: multiples of 8; {near} would do"
                )
        if self.leaf_nodes is not None:
            require_least(1, leaf_nodes=self.leaf_nodes)
        require_least(1, oversubscription=self.oversubscription)


@dataclass(frozen=True)
class SimulatedZero3Setting:
    """Which steps of figure 6.12 are simulated. Raises ValueError for a batch that ranks cannot share."""

    machines: Annotated[tuple[str, ...], Option("Of frontier and perlmutter.")] = STUDIED
    models: Annotated[tuple[str, ...], Option("Of 7B and 13B.")] = ("7B", "13B")
    batch: Annotated[int, Option("Global batch, in sequences of 2048 tokens.")] = 2048

    def __post_init__(self) -> None:
        require_known("machine", self.machines, STUDIED)
        require_known("model", self.models, ("7B", "13B"))
        require_least(1, batch=self.batch)
        most = max(count for _, counts in self.runs() for count in counts)
        if self.batch % most:
            near = max(most, round(self.batch / most) * most)
            raise ValueError(f"--batch is {self.batch}, which {most} ranks cannot share; {near} would do")

    def runs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Each machine, and the ranks of figure 6.12 there."""
        counts = {"frontier": (128, 256, 512, 1024, 2048), "perlmutter": (256, 512, 1024)}
        return [(machine, counts[machine]) for machine in self.machines]


@dataclass(frozen=True)
class SimulatedScalingSetting:
    """Which runs of Singh's chapter 5 are planned, and the global batch, which the text does not state."""

    clusters: Annotated[tuple[str, ...], Option("Of perlmutter, frontier and alps.")] = (
        "perlmutter",
        "frontier",
        "alps",
    )
    batch: Annotated[int, Option("Global batch, in sequences of 2048 tokens.")] = 8192

    def __post_init__(self) -> None:
        require_known("cluster", self.clusters, ("perlmutter", "frontier", "alps"))
        if self.batch < 4096 or self.batch % 4096:
            near = max(4096, round(self.batch / 4096) * 4096)
            raise ValueError(f"--batch is {self.batch}, which 4096 replicas cannot share; {near} would do")


@dataclass(frozen=True)
class SimulatedDlrmSetting:
    """Which runs of Punniyamurthy et al.'s section 4.4 are simulated. ValueError for ranks without a torus."""

    ranks: Annotated[tuple[int, ...], Option("Nodes of the study of growth: 128, 256, 512 or 1024.")] = (
        128, 256, 512, 1024,
    )  # fmt: skip
    kernels: Annotated[tuple[str, ...], Option("Whose kernel times, the first for all tables: mi210, h200.")] = (
        "mi210",
        "h200",
    )
    batch: Annotated[int, Option("Samples of each rank.")] = 512
    tables: Annotated[int, Option("Tables of each rank.")] = 4
    is_quick: Annotated[bool, Option("Leave out other shapes and assumptions.", flags="--quick/--full")] = False

    def __post_init__(self) -> None:
        require_known("kernels", self.kernels, ("mi210", "h200"))
        require_known("ranks", map(str, self.ranks), ("128", "256", "512", "1024"))
        require_least(1, batch=self.batch, tables=self.tables)
