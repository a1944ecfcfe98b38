"""Which way to run a collective: the fastest of the verified schedules and the library, by what was measured once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stretto.tuning import Store

NEVER = 1e9
"""Stands in a table of seconds for a way that does not exist at that size."""


@dataclass(frozen=True)
class Way:
    """An algorithm by a protocol, with so many lanes a thread; algorithm None: the library (NCCL)."""

    algorithm: str | None = None
    protocol: str = ""
    unroll: int = 1

    @property
    def name(self) -> str:
        """For tables and logs."""
        if self.algorithm is None:
            return "library"
        return f"{self.algorithm} {self.protocol}" + (f" x{self.unroll}" if self.unroll > 1 else "")


LIBRARY = Way()
_VARIANTS = (("LL", 1), ("LL", 2), ("LL128", 1), ("LL128", 2), ("Simple", 1), ("Simple", 4))
ALGORITHMS_OF: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("one-shot-all-reduce", "two-shot-all-reduce"),
    "allgather": ("direct-all-gather",),
    "reducescatter": ("direct-reduce-scatter",),
    "alltoall": ("direct-all-to-all",),
}
# Copy engines are for arrays so large that what is sent counts alone: two shots, not one.
_BY_COPIES: Mapping[str, Way] = {collective: Way(names[-1], "Copy", 4) for collective, names in ALGORITHMS_OF.items()}
WAYS: Mapping[str, tuple[Way, ...]] = {
    collective: (LIBRARY, *(Way(name, *variant) for name in names for variant in _VARIANTS), _BY_COPIES[collective])
    for collective, names in ALGORITHMS_OF.items()
}
"""All ways of each collective; a table's seconds are in this order."""

# Of GPUs that are linked directly: what a message costs besides its bytes, and what a GPU sends (docs/decisions/005).
_LATENCY = 1.3e-6
_BANDWIDTH = 300e9
_LARGEST = 16 << 20


def default_way(collective: str, num_bytes: int, world_size: int) -> Way:
    """A sound choice where nothing was measured. num_bytes: of the whole array, a rank's largest buffer."""
    if collective not in WAYS or num_bytes > _LARGEST or world_size < 2:
        return LIBRARY
    part = num_bytes / world_size
    match collective:
        case "allreduce":
            # One shot sends (W - 1) S in one message's time, two shots 2 (W - 1) S / W in the time of two.
            more = (world_size - 1) * (1 - 2 / world_size) * num_bytes
            is_one_shot = more / _BANDWIDTH < _LATENCY
            sent = num_bytes * (world_size - 1) if is_one_shot else 2 * part * (world_size - 1)
            algorithm = "one-shot-all-reduce" if is_one_shot else "two-shot-all-reduce"
        case _:
            sent = part * (world_size - 1)
            (algorithm,) = ALGORITHMS_OF[collective]
    # LL sends every byte twice over, LL128 15 of 16; below some size that is less than what LL128's warps wait.
    return Way(algorithm, "LL" if sent < 64 << 10 else "LL128")


def store_key(collective: str, dtype: str, world_size: int, num_bytes: int) -> str:
    """The name of a measured row in the store."""
    return f"collective {collective} {dtype} {world_size} ranks {num_bytes} bytes {len(WAYS[collective])} ways"


@dataclass(frozen=True)
class Table:
    """The fastest way at measured sizes: {(collective, dtype): ((bytes, way), ...) by size}."""

    rows: Mapping[tuple[str, str], Sequence[tuple[int, Way]]] = field(default_factory=dict)

    @classmethod
    def read(cls, machine: str, world_size: int, store: Store | None = None) -> "Table":
        """What the store knows of this machine and number of ranks."""
        rows: dict[tuple[str, str], list[tuple[int, Way]]] = {}
        for key, seconds in (store or Store()).read(machine).items():
            fields = key.split()
            if len(fields) != 9 or fields[0] != "collective" or fields[1] not in WAYS or fields[3] != str(world_size):
                continue
            ways = WAYS[fields[1]]
            if len(seconds) == len(ways) and fields[5].isdigit():
                fastest = min(range(len(ways)), key=lambda way: seconds[way])
                rows.setdefault((fields[1], fields[2]), []).append((int(fields[5]), ways[fastest]))
        return cls({key: tuple(sorted(row, key=lambda entry: entry[0])) for key, row in rows.items()})

    def choose(self, collective: str, dtype: str, num_bytes: int, world_size: int) -> Way:
        """The way that was fastest at the nearest size (by ratio), or of another dtype; else the default."""
        rows = self.rows.get((collective, dtype))
        if rows is None:
            rows = next((row for (name, _), row in self.rows.items() if name == collective), None)
        if not rows:
            return default_way(collective, num_bytes, world_size)
        size = math.log2(max(num_bytes, 1))
        return min(rows, key=lambda entry: abs(math.log2(entry[0]) - size))[1]
