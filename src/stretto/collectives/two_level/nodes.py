# SPDX-License-Identifier: Apache-2.0
"""Finds which ranks of a group share a node."""

import os
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from stretto.cluster.local_ranks import name_node, require_declared
from stretto.memory import exchange
from stretto.memory.plain_data import all_gather_data


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by node: `ranks[node][place]` is a rank of the group; all nodes have equally many.

    Nodes are in the order of their lowest rank, and the ranks of a node ascend. Raises ValueError for nodes of unequal
    size and for ranks that are not exactly 0, 1, ... of the group.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        sizes = [len(node) for node in self.ranks]
        if not sizes or min(sizes) != max(sizes) or not sizes[0]:
            raise ValueError(
                f"the group's nodes have {', '.join(map(str, sizes)) or 'no'} ranks, and two levels need equally many "
                "on each: use a group of equally many ranks a node, or torch.distributed's own collectives"
            )
        if sorted(rank for node in self.ranks for rank in node) != list(range(self.world)):
            raise ValueError(f"the nodes {self.ranks} must hold each of the ranks 0 to {self.world - 1} once")

    @classmethod
    def of_consecutive(cls, world: int, ranks_per_node: int) -> "Nodes":
        """Put ranks 0 to ranks_per_node - 1 on the first node, and so on. ValueError if they do not fill them."""
        if not 1 <= ranks_per_node <= world or world % ranks_per_node:
            fitting = [size for size in range(1, world + 1) if world % size == 0]
            nearest = min(fitting, key=lambda size: abs(size - ranks_per_node))
            raise ValueError(
                f"ranks_per_node is {ranks_per_node}, but the group's {world} ranks must fill whole nodes; "
                f"{nearest} would do"
            )
        return cls(tuple(tuple(range(first, first + ranks_per_node)) for first in range(0, world, ranks_per_node)))

    @classmethod
    def of_hosts(cls, hosts: Sequence[Hashable]) -> "Nodes":
        """Put ranks with equal `hosts` on one node; they need not be neighbours. ValueError for unequal nodes."""
        by_host: dict[Hashable, list[int]] = defaultdict(list)
        for rank, host in enumerate(hosts):
            by_host[host].append(rank)
        return cls(tuple(tuple(ranks) for ranks in by_host.values()))

    @property
    def count(self) -> int:
        """The number of nodes."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks on each node."""
        return len(self.ranks[0])

    @property
    def world(self) -> int:
        """The number of ranks of the group."""
        return self.count * self.size

    @cached_property
    def is_consecutive(self) -> bool:
        """True if rank = node x size + place, so that the shuffle is one transposition."""
        return [rank for node in self.ranks for rank in node] == list(range(self.world))

    def place_of(self, rank: int) -> tuple[int, int]:
        """The (node, place on it) of a rank of the group. ValueError for a rank that the group does not have."""
        for node, ranks in enumerate(self.ranks):
            if rank in ranks:
                return node, ranks.index(rank)
        raise ValueError(f"rank {rank} is on no node; there are ranks 0 to {self.world - 1}")


@dataclass(frozen=True)
class Host:
    """The place of a process: its node's name, and the rank count and agent number that torchrun gave it there."""

    machine: str
    local_world_size: int | None
    agent: int | None

    @classmethod
    def of_this_process(cls) -> "Host":
        """Name this rank's node, and read torchrun's LOCAL_WORLD_SIZE and GROUP_RANK where they are set."""
        node = name_node(dist.get_rank(), dist.get_world_size())
        return cls(node, _integer("LOCAL_WORLD_SIZE"), _integer("GROUP_RANK"))


def name_nodes(hosts: Sequence[Host]) -> list[Hashable]:
    """Name the node of each of these ranks of a job.

    A node is what `name_node` says: a machine, or what STRETTO_NODES declares. If one seems to have more ranks than its
    launcher started there (several machines with one name, or several agents that stand for nodes), each of torchrun's
    agents is a node instead.
    """
    machines = [host.machine for host in hosts]
    require_declared(machines)
    is_crowded = any(
        host.local_world_size is not None and machines.count(host.machine) > host.local_world_size for host in hosts
    )
    if is_crowded and all(host.agent is not None for host in hosts):
        return [(host.machine, host.agent) for host in hosts]
    return list(machines)


def find_nodes(hosts: Sequence[Host]) -> Nodes:
    """The nodes of ranks with these hosts, by `name_nodes`. ValueError for nodes of unequal size."""
    return Nodes.of_hosts(name_nodes(hosts))


def exchange_hosts(group: dist.ProcessGroup, timeout: float, what: str = "") -> list[tuple[str, Host]]:
    """All-gather `what` and the host of each rank of the group, in rank order. PeerError for ranks that do not come."""
    mine, kind = (what, Host.of_this_process()), tuple[str, Host]
    if "gloo" in dist.get_backend_config(group):
        return exchange(mine, group, timeout, kind)
    return all_gather_data(mine, group, kind)  # only gloo has a barrier that names the missing ranks


def _integer(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
