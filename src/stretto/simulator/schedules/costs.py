# SPDX-License-Identifier: Apache-2.0
"""The costs of running a schedule other than its links': protocols and executors of one machine, in a file.

MSCCLang, section 6.1: LL has the lowest latency and bandwidth, Simple the highest, and LL128 is between. The figures
here say how much on one machine; `python -m lab simulated-collectives` fits them to measurements.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from stretto.cluster import Cluster, read_bounded
from stretto.collectives.schedule import PROTOCOLS
from stretto.simulator.network.clusters import of_cluster
from stretto.simulator.network.topology import NetworkTopology
from stretto.suggestions import name_known

MAX_FILE_BYTES = 1 << 20
_FOLDER = "stretto.simulator.schedules"
_COUNTS = ("slot_bytes", "tile_bytes", "slots", "instances", "max_blocks")


@dataclass(frozen=True)
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

    latency: float
    bandwidth_factor: float
    block_bandwidth: float = math.inf
    step_seconds: float = 0.0
    call_seconds: float = 0.0
    slot_bytes: int | None = None
    header_bytes: float = 0.0
    is_streaming: bool = False

    def __post_init__(self) -> None:
        for name in ("latency", "step_seconds", "call_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be seconds, at least 0")
        if not 0 <= self.header_bytes < math.inf:
            raise ValueError(f"header_bytes = {self.header_bytes}: must be bytes, at least 0")
        if self.slot_bytes is not None and self.slot_bytes < 1:
            raise ValueError(f"slot_bytes = {self.slot_bytes}: must be at least 1")
        if not 0 < self.bandwidth_factor <= 1:
            raise ValueError(f"bandwidth_factor = {self.bandwidth_factor}: must be greater than 0 and at most 1")
        if not self.block_bandwidth > 0:
            raise ValueError(f"block_bandwidth = {self.block_bandwidth}: must be bytes/s, greater than 0")


@dataclass(frozen=True)
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

    launch: float
    protocols: Mapping[str, ProtocolCosts]
    between_nodes: Mapping[str, ProtocolCosts] = field(default_factory=dict)
    tile_bytes: int | None = 256 << 10
    slots: int | None = None
    instances: int = 1
    copies_from_slots: bool = True
    host_seconds: float = 0.0
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("launch", "host_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be seconds, at least 0")
        for name, least in (("tile_bytes", 1), ("slots", 1), ("instances", 1), ("max_blocks", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        if not self.protocols:
            raise ValueError("an executor runs one protocol or more")

    def find(self, protocol: str, *, is_in_node: bool) -> ProtocolCosts:
        """The costs of a message. Raises ValueError for a protocol that this executor does not run."""
        if protocol not in self.protocols:
            raise ValueError(f"no costs are known of the protocol {protocol!r}: there are {', '.join(self.protocols)}")
        inside = self.protocols[protocol]
        return inside if is_in_node else self.between_nodes.get(protocol, inside)


@dataclass(frozen=True)
class MachineCosts:
    """The executors of one machine, by name, and where the figures are from (`source`).

    link_latency, network_latency: seconds from GPU to GPU in a node and between nodes that the figures were fitted
    with; they count where a cluster does not say its own.
    """

    machine: str
    source: str
    executors: Mapping[str, ExecutorCosts]
    link_latency: float
    network_latency: float

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
        try:
            text = read_bounded(path, MAX_FILE_BYTES, "a file of costs").decode("utf-8")
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> "MachineCosts":
        """Costs from the JSON of `to_json`. Raises ValueError that names `where` and what is wrong there."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        try:
            _require_keys(content, {each.name for each in fields(cls)})
            executors = {
                name: ExecutorCosts(
                    **_fields(ExecutorCosts, values)
                    | {
                        group: {key: ProtocolCosts(**_fields(ProtocolCosts, one)) for key, one in members.items()}
                        for group in ("protocols", "between_nodes")
                        if isinstance(members := values.get(group, {}), dict)
                    }
                )
                for name, values in content["executors"].items()
            }
            latencies = (float(content[name]) for name in ("link_latency", "network_latency"))
            return cls(str(content["machine"]), str(content["source"]), executors, *latencies)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{where}: {error}") from error

    def to_json(self) -> str:
        """The JSON that `parse` reads; figures without a limit are left out."""
        content = asdict(self)
        for executor in content["executors"].values():
            for group in ("protocols", "between_nodes"):
                executor[group] = {
                    name: {key: value for key, value in one.items() if value != math.inf}
                    for name, one in executor[group].items()
                }
        return json.dumps(content, indent=1) + "\n"

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


def _require_keys(content: Any, keys: set[str]) -> None:
    if not isinstance(content, dict) or content.keys() != keys:
        raise ValueError(f"costs have the keys {', '.join(sorted(keys))}")


def _fields(kind: type, values: Any) -> dict[str, Any]:
    known = [each.name for each in fields(kind)]
    if not isinstance(values, dict):
        raise ValueError(f"costs are a table, not {values!r}")
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"no figure is called {name!r}{name_known(name, known, 'there are')}")
        if name in ("protocols", "between_nodes"):
            if not isinstance(value, dict):
                raise ValueError(f"{name} is a table of protocols, not {value!r}")
            for protocol in value:
                if protocol not in PROTOCOLS and protocol != "Copy":
                    raise ValueError(f"the protocols are {', '.join(PROTOCOLS)} and Copy, not {protocol!r}")
        elif name in _COUNTS:
            if value is not None and type(value) is not int:
                raise ValueError(f"{name} is a whole number, not {value!r}")
        elif value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name} is a number, not {value!r}")
        elif value is not None:
            float(value)  # raises OverflowError for a whole number that no float can hold
    return dict(values)
