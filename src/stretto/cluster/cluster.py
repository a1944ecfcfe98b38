# SPDX-License-Identifier: Apache-2.0
"""`Cluster`: everything that planning or simulating work on a machine needs to know about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import gcd
from pathlib import Path

from stretto.atomic_files import write_atomically
from stretto.cluster import detection, files
from stretto.cluster.description import describe
from stretto.cluster.model import (
    GPU,
    HostLink,
    HostTimes,
    InNodeBandwidth,
    Matmul,
    MeasuredCollective,
    NetworkLink,
    NodeLink,
)
from stretto.cluster.schema import Checked, Kind, build, dotted_keys, figure, quantity, suggest, to_toml

_PCI_EXPRESS = 64e9  # bytes/s, one direction, of 16 lanes of the fifth generation


@dataclass(frozen=True, kw_only=True)
class Cluster(Checked):
    """A machine: nodes of equal GPUs, the links inside a node and those between nodes.

    Units are bytes, bytes/s in one direction, seconds and FLOP/s. An unknown value is `None`; use `require` for one
    that must be known. `sources` maps dotted keys to the source of each value. Raises ValueError for an invalid value.
    """

    name: str = field(metadata=figure(Kind.TEXT))
    description: str | None = field(default=None, metadata=figure(Kind.TEXT))
    nodes: int | None = field(default=None, metadata=figure(Kind.COUNT))  # None: not limited
    gpus_per_node: int = field(metadata=figure(Kind.COUNT))
    nics_per_node: int | None = field(default=None, metadata=figure(Kind.COUNT))
    library: str | None = field(default=None, metadata=figure(Kind.TEXT))  # of collectives; None: as good as NCCL
    host_memory: float | None = quantity("bytes a node")
    in_node_bandwidths: tuple[InNodeBandwidth, ...] = field(default=(), metadata=figure(Kind.ROWS, of=InNodeBandwidth))
    matmuls: tuple[Matmul, ...] = field(default=(), metadata=figure(Kind.ROWS, of=Matmul))
    transfers: tuple[MeasuredCollective, ...] = field(default=(), metadata=figure(Kind.ROWS, of=MeasuredCollective))
    gpu: GPU = field(metadata=figure(Kind.TABLE, of=GPU))
    host_link: HostLink = field(default=HostLink(), metadata=figure(Kind.TABLE, of=HostLink))
    host: HostTimes = field(default=HostTimes(), metadata=figure(Kind.TABLE, of=HostTimes))
    in_node: NodeLink = field(default=NodeLink(), metadata=figure(Kind.TABLE, of=NodeLink))
    between_nodes: NetworkLink = field(default=NetworkLink(), metadata=figure(Kind.TABLE, of=NetworkLink))
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, metadata=figure(Kind.NOTES))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_bandwidths()
        if self.gpus_per_node % self.domains:
            raise ValueError(
                f"in_node.domains = {self.domains}: must divide the node's {self.gpus_per_node} GPUs; "
                f"{gcd(self.domains, self.gpus_per_node)} would do"
            )
        keys = _figures()
        for key in self.sources:
            if key not in keys:
                raise ValueError(f"sources names an unknown figure {key!r}; {suggest(key, keys)}")

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names that `preset` accepts, sorted."""
        return files.preset_names()

    @classmethod
    def preset(cls, name: str) -> "Cluster":
        """Return a cluster that ships with Stretto. Raises ValueError for a name not in `presets()`."""
        if name not in cls.presets():
            raise ValueError(f"unknown cluster {name!r}; {suggest(name, cls.presets())}")
        return cls._from_toml(files.read_preset(name), f"preset {name}")

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read a cluster file (docs/cluster.md describes the format).

        Raises ValueError that names the file, the key, the value and the rule: for a path that is no file, a file that
        is too large or not TOML, a missing or unknown key, and a value that breaks its rule.
        """
        return cls._from_toml(files.read(Path(path), cls.presets()), str(path))

    @classmethod
    def find(cls, name: str) -> "Cluster":
        """The cluster of a preset's name or of a file: a name that ends in .toml, or a file whose name is no preset.

        Raises ValueError as `preset` and `load`.
        """
        is_file = Path(name).suffix == ".toml" or (name not in cls.presets() and Path(name).is_file())
        return cls.load(name) if is_file else cls.preset(name)

    @classmethod
    def detect(cls) -> "Cluster":
        """Detect the machine that this process runs on, as one node: its CUDA or ROCm GPUs, else its CPU.

        A CPU counts as one GPU for each core that the process may use, with an equal share of the memory. Memory is
        read from the machine (the host's is at most its cgroup's limit), and peak FLOP/s come from a known GPU's
        datasheet; links are unknown, since only a measurement finds them. Initializes CUDA in this process, so do not
        fork after it.
        """
        count, gpu, sources = detection.detect()
        memory, source = detection.find_host_memory()
        if memory is not None:
            sources["host_memory"] = source
        return cls(name="detected", nodes=1, gpus_per_node=count, gpu=gpu, host_memory=memory, sources=sources)

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads back as an equal cluster. Raises OSError where it cannot be written."""
        write_atomically(Path(path), to_toml(self))

    def describe(self) -> str:
        """A plain-text table for people: every figure with its unit, unknown ones, and the sources."""
        return describe(self)

    @property
    def has_nvlink(self) -> bool:
        """True if NVLink connects a node's GPUs, inferred from the name and a bandwidth above that of PCI Express."""
        is_nvidia = self.gpu.name.startswith(("NVIDIA", "Tesla"))
        return is_nvidia and (self.in_node.bandwidth or self.in_node.pair_bandwidth or 0) > _PCI_EXPRESS

    @property
    def host_link_or_default(self) -> HostLink:
        """`host_link`; where it has no figure, the default of the GPU's kind (docs/cluster.md), if that has one."""
        datasheet = detection.DATASHEETS.get(self.gpu.name)
        if self.host_link != HostLink() or datasheet is None:
            return self.host_link
        return datasheet.host_link

    @property
    def gpus(self) -> int | None:
        """The number of GPUs of the whole machine; None where the number of nodes is open."""
        return None if self.nodes is None else self.nodes * self.gpus_per_node

    @property
    def domains(self) -> int:
        """NUMA domains of a node, which have equal parts of its GPUs."""
        return self.in_node.domains or 1

    def ring_order(self, gpus: Sequence[int]) -> list[int]:
        """Ranks in the order of a ring that crosses nodes, then NUMA domains, as rarely as it can (Flux, section 4.3).

        gpus: the number of each rank's GPU; those of a node, and of a domain in it, follow each other.
        """
        size = self.gpus_per_node // self.domains
        return sorted(range(len(gpus)), key=lambda rank: (gpus[rank] // size, rank))

    @property
    def inter_node_bandwidth(self) -> float | None:
        """Bytes/s in one direction between two nodes, all NICs together: beta_inter in Singh's eq. 5.7."""
        if self.nics_per_node is None or self.between_nodes.bandwidth is None:
            return None
        return self.nics_per_node * self.between_nodes.bandwidth

    def measured_in_node_bandwidth(self, preceding: int, size: int) -> float | None:
        """The measured bytes/s of groups of `size` GPUs that are `preceding` apart; None if not measured."""
        for row in self.in_node_bandwidths:
            if (row.preceding, row.size) == (preceding, size):
                return row.bandwidth
        return None

    def measured_transfers(self, collective: str, preceding: int, size: int) -> tuple[MeasuredCollective, ...]:
        """The measured collectives of such groups, by increasing size of message; () if not measured."""
        rows = (
            row for row in self.transfers if (row.collective, row.preceding, row.size) == (collective, preceding, size)
        )
        return tuple(sorted(rows, key=lambda row: row.bytes))

    def require(self, key: str) -> float:
        """Return the value with a dotted key such as "between_nodes.bandwidth".

        Raises ValueError if the value is unknown, or if the key does not exist.
        """
        if key not in (keys := _figures()):
            raise ValueError(f"no figure of a cluster is called {key!r}; {suggest(key, keys)}")
        value: object = self
        for part in key.split("."):
            value = getattr(value, part)
        if value is None:
            raise ValueError(
                f"cluster {self.name!r} does not say {key}, which is needed here; measure the machine with "
                f"`stretto probe`, or save it to a file (Cluster.save), add the figure there and use that file"
            )
        if not isinstance(value, int | float):
            raise ValueError(f"{key} of a cluster is not one number")
        return value

    @classmethod
    def _from_toml(cls, text: str, where: str) -> "Cluster":
        return build(cls, files.parse(text, where), where)

    def _check_bandwidths(self) -> None:
        seen = set()
        for i, row in enumerate(self.in_node_bandwidths):
            place, pair = f"in_node_bandwidths[{i}]", (row.preceding, row.size)
            if row.size < 2:
                raise ValueError(f"{place}.size = {row.size}: must be 2 or more; one GPU sends nothing")
            if row.preceding * row.size > self.gpus_per_node:
                fitting = self.gpus_per_node // row.preceding
                raise ValueError(
                    f"{place}: preceding {row.preceding} x size {row.size} is more than the node's "
                    f"{self.gpus_per_node} GPUs" + (f"; size {fitting} would do" if fitting > 1 else "")
                )
            if pair in seen:
                raise ValueError(f"{place}: preceding {row.preceding}, size {row.size} is there twice; keep one")
            seen.add(pair)


@cache
def _figures() -> tuple[str, ...]:
    """The dotted keys of a cluster file."""
    return tuple(dotted_keys(Cluster))
