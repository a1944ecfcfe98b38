# SPDX-License-Identifier: Apache-2.0
"""The costs of running a schedule other than its links': protocols and executors of one machine, in a file.

MSCCLang, section 6.1: LL has the lowest latency and bandwidth, Simple the highest, and LL128 is between. The figures
here say how much on one machine; `python -m lab simulated-collectives` fits them to measurements.
"""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from stretto.cluster import Cluster, read_bounded, reading
from stretto.simulator.network.clusters import of_cluster
from stretto.simulator.network.topology import NetworkTopology
from stretto.suggestions import name_known

MAX_FILE_BYTES = 1 << 20
_FOLDER = "stretto.simulator.schedules"
_RULES = ConfigDict(extra="forbid", strict=True)

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Protocol = Annotated[str, Field(pattern="^(Simple|LL|LL128|Copy)$")]


@dataclass(frozen=True, config=_RULES)
class ProtocolCosts:
    """One protocol on one machine.

    latency: seconds from the last byte's arrival until the receiver has seen it (flags, fences, polling), for each
    message; bandwidth_factor: data bytes a second of an idle link over the link's bandwidth (at most 0.5 for LL, whose
    words are half flags); block_bandwidth: bytes/s that one thread block sends, receives or reduces; step_seconds: of
    each step of a thread block; call_seconds: of a call, in addition to the executor's launch; slot_bytes: what a FIFO
    slot holds of one message (None: a tile of its chunks); header_bytes: overhead of a message on its links, as bytes
    (headers, and the time to post it to a NIC); is_streaming: whether a receiver handles a message while it arrives (LL
    and LL128, which have a flag a word or a line) and not once it is there (Simple). Raises ValueError for figures that
    cannot be.
    """

    latency: Seconds
    bandwidth_factor: Annotated[float, Field(gt=0, le=1)]
    block_bandwidth: Annotated[float, Field(gt=0)] = math.inf
    step_seconds: Seconds = 0.0
    call_seconds: Seconds = 0.0
    slot_bytes: Count | None = None
    header_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    is_streaming: bool = False


@dataclass(frozen=True, config=_RULES)
class ExecutorCosts:
    """Costs of one executor that runs schedules on one machine.

    launch: seconds of a call before the first step and after the last one; protocols: inside a node; between_nodes: of
    messages that leave the node (a protocol that is not there costs the same as inside); tile_bytes: of each chunk,
    what a step handles at once (None: whole chunks); slots: of a FIFO (None: the protocol's); instances: how many sets
    of thread blocks share the data of one instance of a schedule (an executor with one CUDA block a thread block: 1);
    copies_from_slots: whether a receiver copies a message out of a slot (False: senders write to its destination);
    host_seconds: host time to issue a call outside of a CUDA graph; max_blocks: the most thread blocks of a
    rank (None: any number). Raises ValueError for figures that cannot be.
    """

    launch: Seconds
    protocols: Annotated[Mapping[Protocol, ProtocolCosts], Field(min_length=1)]
    between_nodes: Mapping[Protocol, ProtocolCosts] = field(default_factory=dict)
    tile_bytes: Count | None = 256 << 10
    slots: Count | None = None
    instances: Count = 1
    copies_from_slots: bool = True
    host_seconds: Seconds = 0.0
    max_blocks: Count | None = None

    def find(self, protocol: str, *, is_in_node: bool) -> ProtocolCosts:
        """The costs of a message. Raises ValueError for a protocol that this executor does not run."""
        if protocol not in self.protocols:
            raise ValueError(f"no costs are known of the protocol {protocol!r}: there are {', '.join(self.protocols)}")
        inside = self.protocols[protocol]
        return inside if is_in_node else self.between_nodes.get(protocol, inside)


@dataclass(frozen=True, config=_RULES)
class MachineCosts:
    """The executors of one machine, by name, and where the figures are from (`source`).

    link_latency, network_latency: seconds from GPU to GPU in a node and between nodes that the figures were fitted
    with; they count where a cluster does not say its own.
    """

    machine: str
    source: str
    executors: Mapping[str, ExecutorCosts]
    link_latency: Seconds
    network_latency: Seconds

    @classmethod
    def known(cls) -> tuple[str, ...]:
        """The names of the machines whose costs ship with Stretto."""
        folder = files(_FOLDER)
        return tuple(
            sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json"))
        )

    @classmethod
    def find(cls, name: str) -> "MachineCosts":
        """Costs by the name of a machine of `known()`, or of a file. ValueError where there are none, or bad ones."""
        if name in cls.known():
            return cls.parse(files(_FOLDER).joinpath(f"{name}.json").read_text(encoding="utf-8"), name)
        path = Path(name)
        if path.suffix != ".json":
            raise ValueError(f"no costs are known of the machine {name!r}{name_known(name, cls.known(), 'there are')}")
        with reading(path, (".json",)):
            return cls.parse(read_bounded(path, MAX_FILE_BYTES, "a file of costs"), str(path))

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> "MachineCosts":
        """Costs from the JSON of `to_json`. Raises ValueError that names `where` and what is wrong there."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{where}: {place or 'costs'}: {first['msg']}, not {str(first['input'])[:80]}") from error

    def to_json(self) -> str:
        """The JSON that `parse` reads; figures that are not given are left out."""
        return TypeAdapter(type(self)).dump_json(self, indent=1, exclude_defaults=True).decode() + "\n"

    def topology(self, cluster: Cluster, gpus: int) -> NetworkTopology:
        """The network of a cluster's first GPUs, with these latencies where it does not say its own.

        Raises ValueError as `of_cluster`.
        """
        in_node, between = cluster.in_node, cluster.between_nodes
        if in_node.latency is None:
            in_node = replace(in_node, latency=self.link_latency)
        if between.latency is None:
            between = replace(between, latency=self.network_latency)
        return of_cluster(replace(cluster, in_node=in_node, between_nodes=between), gpus)

    def executor(self, name: str) -> ExecutorCosts:
        """An executor by name. Raises ValueError for one whose costs are not known."""
        if name not in self.executors:
            raise ValueError(
                f"no costs are known of the executor {name!r} on {self.machine}"
                f"{name_known(name, tuple(self.executors), 'there are')}"
            )
        return self.executors[name]
