# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab two-level`, the network that is made from them, and the job of its ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from lab.two_level.namespaces import Network
from stretto.bench.settings import Option, require_least

if TYPE_CHECKING:
    from stretto.collectives.two_level import Links

_MEGABIT = 1e6 / 8


@dataclass(frozen=True)
class TwoLevelJob:
    """Settings of the ranks. folder: for the ranks' store and for rank 0's result."""

    folder: str
    nodes: int
    ranks_per_node: int
    delay: float  # seconds
    shard_bytes: tuple[int, ...]
    collectives: tuple[str, ...]
    repeats: int

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class TwoLevelSetting:
    """The network (nodes, Mbit/s of the links, ms of delay), and the sizes that are measured on it.

    Links are slow and the delay is long, so that the software time of eight processes on few cores does not matter.
    `trunk` is the link between the two halves of the nodes. If it carries less than a half can send, distant nodes
    share it, as they do in most machines' networks.
    """

    ranks_per_node: Annotated[int, Option("Ranks in each of the namespaces.")] = 2
    nodes: Annotated[int, Option("Network namespaces.")] = 4
    bandwidth: Annotated[float, Option("Bandwidth of a node's link, Mbit/s.")] = 50.0
    loopback: Annotated[float, Option("Bandwidth inside a node, Mbit/s.")] = 200.0
    trunk: Annotated[float, Option("Bandwidth of the link between the halves of the nodes, Mbit/s.")] = 50.0
    delay: Annotated[float, Option("Delay of a message between nodes, ms.")] = 40.0
    smallest: Annotated[int, Option("Bytes a rank of the smallest collective.")] = 4096
    sizes: Annotated[int, Option("How many sizes, each twice the one before.")] = 8
    repeats: Annotated[int, Option("Runs of each; their median counts.")] = 7

    def __post_init__(self) -> None:
        if self.nodes % 2:
            raise ValueError(f"{self.nodes} nodes have no two halves; {self.nodes + 1} would do")
        require_least(0, delay=self.delay)
        require_least(1, ranks_per_node=self.ranks_per_node, repeats=self.repeats)
        require_least(2, sizes=self.sizes)
        require_least(4, smallest=self.smallest)
        self.network()

    def network(self) -> Network:
        """The network to make."""
        return Network(
            nodes=self.nodes,
            leaf_nodes=self.nodes // 2,
            node_bandwidth=self.bandwidth * _MEGABIT,
            loopback_bandwidth=self.loopback * _MEGABIT,
            trunk_bandwidth=self.trunk * _MEGABIT,
        )

    def links(self, overheads: dict[str, float]) -> "Links":
        """The links of the model: as set, plus the software time of a message (seconds, `inside`, `between`)."""
        from stretto.collectives.two_level import Links

        network = self.network()
        return Links(
            in_node_latency=overheads["inside"],
            in_node_bandwidth=network.loopback_bandwidth / self.ranks_per_node,
            latency=self.delay / 1e3 + overheads["between"],
            node_bandwidth=network.node_bandwidth,
            leaf_nodes=network.leaf_nodes,
            oversubscription=max(1.0, network.leaf_nodes * network.node_bandwidth / network.trunk_bandwidth),
        )

    def job(self, folder: str) -> TwoLevelJob:
        """The job of the ranks."""
        return TwoLevelJob(
            folder=folder,
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            delay=self.delay / 1e3,
            shard_bytes=tuple(self.smallest * 2**i for i in range(self.sizes)),
            collectives=("all_gather", "reduce_scatter"),
            repeats=self.repeats,
        )
