# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Chakra execution traces: one file a rank, PREFIX.RANK.et, as ASTRA-sim names them.

A file is a GlobalMetadata message and then the rank's nodes, each after its length. Traces come from elsewhere, so
every size has a limit that is checked before memory is taken.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stretto.atomic_files import naming_file
from stretto.cluster import read_bounded, reading
from stretto.simulator.chakra.schema import (
    ChakraNode,
    Metadata,
    NodeType,
    TensorInfo,
    messages,
    metadata_of,
    node_of,
    to_message,
)

MAX_FILE_BYTES = 1 << 30
MAX_GROUPS_BYTES = 1 << 22
MAX_NODES = 5_000_000  # of all ranks together: about 5 GB as Python objects
MAX_RANKS = 1 << 16
ALL_RANKS = "0"  # the group of all ranks, as PyTorch and ASTRA-sim name it


@dataclass(frozen=True)
class ChakraTrace:
    """The nodes of every rank, in the order of their files, and the groups that their collectives name.

    groups: the ranks of a process group by its name (the attribute pg_name), in group order. A name of "" or "0" that
    is not among them means all ranks.
    """

    nodes: tuple[tuple[ChakraNode, ...], ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=Metadata)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", MappingProxyType(dict(self.groups)))
        for name, ranks in self.groups.items():
            if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < len(self.nodes) for rank in ranks):
                raise ValueError(
                    f"group {name!r} is {list(ranks)}, but must be different ranks from 0 to {len(self.nodes) - 1}"
                )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.nodes)

    def group(self, name: str) -> tuple[int, ...]:
        """The ranks of a group. Raises ValueError for a name that the trace does not define."""
        if name in self.groups:
            return self.groups[name]
        if name in ("", ALL_RANKS):
            return tuple(range(self.ranks))
        raise ValueError(
            f"the trace has no group {name!r}; it has {', '.join(map(repr, self.groups)) or 'none'}: "
            "give a file of groups, {NAME: [RANK, ...]}"
        )


def read_chakra(prefix: str | Path, *, groups: str | Path | None = None) -> ChakraTrace:
    """Read PREFIX.0.et, PREFIX.1.et, ... to the last rank.

    groups: a JSON file {NAME: [RANK, ...]}, as ASTRA-sim takes it; without it, PREFIX.groups.json if that exists, and
    the process groups of the trace's metadata nodes. Raises ValueError that names the file and the byte for
    missing ranks, a truncated or foreign file, and sizes over the limits; and for a group that nodes define differently
    and no file does.
    """
    prefix = Path(prefix)
    found = _find_files(prefix)
    nodes: list[tuple[ChakraNode, ...]] = []
    metadata = Metadata()
    for rank, path in enumerate(found):
        about, of_rank = read_rank(path, max_nodes=MAX_NODES - sum(map(len, nodes)))
        metadata = about if rank == 0 else metadata
        nodes.append(of_rank)
    beside = prefix.with_name(prefix.name + ".groups.json")
    has_file = groups is not None or beside.is_file()
    given = _read_groups(beside if groups is None else Path(groups)) if has_file else {}
    return ChakraTrace(tuple(nodes), _groups_of_nodes(nodes, given), metadata)


def read_rank(path: Path, *, max_nodes: int = MAX_NODES) -> tuple[Metadata, tuple[ChakraNode, ...]]:
    """Read one rank's file. Raises ValueError as `read_chakra`."""
    with reading(path):
        data = read_bounded(path, MAX_FILE_BYTES, "a rank of a trace")
    classes = messages()
    from google.protobuf.message import DecodeError
    from google.protobuf.proto import parse_length_prefixed

    stream, start = BytesIO(data), 0
    nodes: list[ChakraNode] = []
    try:
        about = parse_length_prefixed(classes["Metadata"], stream)
        if about is None:
            raise ValueError("it is empty")
        metadata, start = metadata_of(about), stream.tell()
        while (message := parse_length_prefixed(classes["ChakraNode"], stream)) is not None and len(nodes) < max_nodes:
            nodes.append(node_of(message))
            start = stream.tell()
    except (DecodeError, ValueError, OverflowError) as error:  # the last for a length that no file has
        raise ValueError(f"{path} is no Chakra trace: near byte {start}, {error}") from error
    if message is not None:
        raise ValueError(f"{path}: the trace has more than {MAX_NODES:,} nodes")
    return metadata, tuple(nodes)


def write_chakra(trace: ChakraTrace, prefix: str | Path) -> list[Path]:
    """Write PREFIX.RANK.et for every rank, and PREFIX.groups.json where collectives have groups; returns the paths."""
    prefix = Path(prefix)
    if not prefix.parent.is_dir():
        raise ValueError(f"{prefix.parent} is no folder")
    messages()
    from google.protobuf.proto import serialize_length_prefixed

    names = [f"{prefix.name}.{rank}.et" for rank in range(len(trace.nodes))]
    with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=".stretto-") as folder:  # no mix of two traces
        for name, nodes in zip(names, trace.nodes, strict=True):
            with naming_file(prefix.with_name(name)), Path(folder, name).open("wb") as file:
                for message in (to_message(trace.metadata), *map(to_message, nodes)):
                    serialize_length_prefixed(message, file)
        if trace.groups:
            names.append(f"{prefix.name}.groups.json")
            with naming_file(prefix.with_name(names[-1])):
                groups = {name: list(ranks) for name, ranks in trace.groups.items()}
                Path(folder, names[-1]).write_text(json.dumps(groups) + "\n")
        for name in names:
            Path(folder, name).replace(prefix.with_name(name))
    return [prefix.with_name(name) for name in names]


def group_node(id: int, groups: Mapping[str, Sequence[int]]) -> ChakraNode:
    """The metadata node of process groups, in the format of PyTorch's execution traces."""
    rows = [{"pg_name": name, "ranks": list(ranks)} for name, ranks in groups.items()]
    return ChakraNode(
        id, "## process_group:init ##", NodeType.METADATA_NODE, inputs=TensorInfo(values=f"['{json.dumps(rows)}']")
    )


def _find_files(prefix: Path) -> list[Path]:
    pattern = re.compile(re.escape(prefix.name) + r"\.(\d{1,9})\.et")
    folder = prefix.parent
    found: dict[int, Path] = {}
    if folder.is_dir():
        for path in folder.iterdir():
            if matched := pattern.fullmatch(path.name):
                found[int(matched[1])] = path
    if not found:
        near = " (the prefix is the part of the name before .RANK.et)" if prefix.name.endswith(".et") else ""
        raise ValueError(f"there is no {prefix}.0.et{near}")
    if len(found) > MAX_RANKS:
        raise ValueError(f"{prefix} has {len(found):,} ranks, and at most {MAX_RANKS:,} are read")
    missing = next((rank for rank in range(max(found) + 1) if rank not in found), None)
    if missing is not None:
        raise ValueError(f"there is no {prefix}.{missing}.et, but there is {prefix}.{max(found)}.et")
    return [found[rank] for rank in range(len(found))]


def _read_groups(path: Path) -> dict[str, tuple[int, ...]]:
    with reading(path, (".json",)):
        text = read_bounded(path, MAX_GROUPS_BYTES, "a file of groups")
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict) or not all(_is_ranks(ranks) for ranks in content.values()):
        raise ValueError(f"{path} must be {{NAME: [RANK, ...]}}")
    return {str(name): tuple(ranks) for name, ranks in content.items()}


def _groups_of_nodes(
    nodes: Sequence[Sequence[ChakraNode]], given: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Add what metadata nodes say of other process groups than those given. Other metadata nodes are not simulated.

    Raises ValueError where nodes differ, since none of them comes before another.
    """
    groups = dict(given)
    for rank, of_rank in enumerate(nodes):
        for node in of_rank:
            if node.type == NodeType.METADATA_NODE and node.inputs.values.startswith("['["):
                try:
                    rows = json.loads(node.inputs.values[2:-2])
                except (ValueError, RecursionError):
                    continue
                for row in rows if isinstance(rows, list) else ():
                    if isinstance(row, dict) and "pg_name" in row and _is_ranks(row.get("ranks")):
                        name, ranks = str(row["pg_name"]), tuple(row["ranks"]) or tuple(range(len(nodes)))
                        if groups.setdefault(name, ranks) != ranks and name not in given:
                            raise ValueError(
                                f"{node.describe(rank)} says that group {name!r} is {list(ranks)}, but another node "
                                f"{list(groups[name])}: give a file of groups, {{NAME: [RANK, ...]}}"
                            )
    return groups


def _is_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(type(rank) is int for rank in value)
