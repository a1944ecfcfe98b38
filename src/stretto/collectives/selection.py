# SPDX-License-Identifier: Apache-2.0
"""Selects how to run a collective: the fastest measured schedule or the library, else a default."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from stretto.collectives.algorithms import find
from stretto.collectives.executor.plan import digest
from stretto.collectives.schedule import PROTOCOLS, Schedule
from stretto.collectives.verifier import verify
from stretto.collectives.xml import named_collective, read_schedule
from stretto.tuning import Autotuner, TimeKeys, TuningStore, read_times

TABLE_VARIABLE = "STRETTO_COLLECTIVES_TABLE"
"""The environment variable with the file of measured times that communicators read by default."""


@dataclass(frozen=True)
class AlgorithmChoice:
    """An algorithm, a protocol, and how many 16-byte vectors a thread holds; None: the library (NCCL)."""

    algorithm: str | None = None
    protocol: str = ""
    unroll: int = 1

    @property
    def name(self) -> str:
        """Its name in tables, logs and files."""
        if self.algorithm is None:
            return "library"
        return f"{self.algorithm} {self.protocol}" + (f" x{self.unroll}" if self.unroll > 1 else "")

    def compile(self, ranks: int, *, in_place: bool) -> Schedule:
        """Compile its algorithm for so many ranks, one of two levels for two halves. ValueError if it cannot be."""
        assert self.algorithm is not None
        if self.algorithm in _candidates:
            if obstacle := self.find_obstacle(ranks, in_place=in_place):
                raise ValueError(obstacle)
            return _candidates[self.algorithm]
        algorithm = find(self.algorithm)
        if "nodes" not in algorithm.parameters:
            return algorithm.compile(ranks=ranks, in_place=in_place)
        if ranks < 4 or ranks % 2:
            raise ValueError(f"{self.algorithm} is for two halves of the ranks, of two or more each, not for {ranks}")
        return algorithm.compile(nodes=2, gpus=ranks // 2, in_place=in_place)

    def find_obstacle(self, ranks: int, *, in_place: bool, reduction: str = "sum") -> str:
        """Say why a candidate's schedule is for no such call; "" if it is, and for algorithms."""
        schedule = _candidates.get(self.algorithm or "")
        if schedule is None:
            return ""
        if schedule.collective.ranks != ranks:
            return f"{schedule.name} is a schedule of {schedule.collective.ranks} ranks, not of {ranks}"
        if not (schedule.in_place if in_place else schedule.out_of_place):
            return f"{schedule.name} does not run {'in' if in_place else 'out of'} place"
        if schedule.reduction not in (None, reduction):
            return f"{schedule.name} is a schedule of {schedule.reduction!r}, not of {reduction!r}"
        return ""


_candidates: dict[str, Schedule] = {}
"""Users' schedules, by the name that their choices have."""

LIBRARY = AlgorithmChoice()
_VARIANTS = (("LL", 1), ("LL", 2), ("LL128", 1), ("LL128", 2), ("Simple", 1), ("Simple", 4))
ALGORITHMS_OF: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("one-shot-all-reduce", "two-shot-all-reduce"),
    "allgather": ("direct-all-gather",),
    "reducescatter": ("direct-reduce-scatter",),
    "alltoall": ("direct-all-to-all",),
}
"""The algorithms of each collective that may be defaults."""
_TIMED_ALGORITHMS_OF: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("ring-all-reduce", "recursive-halving-all-reduce", "hierarchical-all-reduce"),
    "allgather": ("ring-all-gather", "recursive-doubling-all-gather", "hierarchical-all-gather"),
    "reducescatter": ("ring-reduce-scatter", "recursive-halving-reduce-scatter", "hierarchical-reduce-scatter"),
    "alltoall": ("two-step-all-to-all",),
}
"""Others, which run only where they were measured to be the fastest."""
_TIMED_VARIANTS = (("LL", 1), ("LL128", 1), ("Simple", 4))
# Copy engines are for arrays so large that only the bytes sent count: two shots, not one.
_BY_COPY_ENGINE: Mapping[str, AlgorithmChoice] = {
    collective: AlgorithmChoice(names[-1], "Copy", 4) for collective, names in ALGORITHMS_OF.items()
}
CHOICES: Mapping[str, tuple[AlgorithmChoice, ...]] = {
    collective: (
        LIBRARY,
        *(AlgorithmChoice(name, *variant) for name in names for variant in _VARIANTS),
        *(AlgorithmChoice(name, *variant) for name in _TIMED_ALGORITHMS_OF[collective] for variant in _TIMED_VARIANTS),
        _BY_COPY_ENGINE[collective],
    )
    for collective, names in ALGORITHMS_OF.items()
}
"""All choices for each collective."""

# Of GPUs that are linked directly: a message's fixed cost, and the bandwidth of a GPU (docs/decisions/005).
_LATENCY = 1.3e-6
_BANDWIDTH = 300e9
_LARGEST = 16 << 20  # up to which the costs above decide
COPY_ENGINE_MIN_BYTES = 128 << 20
"""The bytes from which copy engines may be best: below, issuing the copies takes the host as long as they take."""
_GAIN = 0.97  # of the library's time: a choice that gains less may be slower than the library in the next run
# Of the same kernel without unrolling: it uses more registers, for which concurrent products wait. An all-gather of
# 64 MB, 1% faster alone, delays products by 130 us, and without unrolling by 60 (4x H100, 2026-11-26).
_UNROLLED_GAIN = 0.98
_LARGEST_LL = 64 << 10
_KEY = re.compile(r"collective (\w+) (\w+) (\d{1,9}) ranks (\d{1,15}) bytes by (.+)")


def add_candidate(schedule: Schedule | Path | str) -> AlgorithmChoice:
    """Have a schedule, or that of an MSCCL XML file, run the calls at whose sizes it was measured to be the fastest.

    `stretto tune collectives --schedules FOLDER` measures a folder's files that run out of place. All ranks add the
    same, before the group's first collective on GPUs; one that was not measured runs nothing. ValueError for a
    collective that is not tuned, and for a schedule that fails verification; ScheduleFileError for an invalid file.
    """
    made = schedule if isinstance(schedule, Schedule) else read_schedule(Path(schedule))
    kind, ranks, chunks = made.collective.name, made.collective.ranks, made.collective.chunks_per_loop
    if kind not in CHOICES:
        raise ValueError(f"{made.name} is a schedule of {kind!r}, and {', '.join(CHOICES)} are tuned")
    made = replace(made, collective=replace(named_collective(kind, ranks, chunks), in_place=made.collective.in_place))
    found = verify(made)
    if not found.ok:
        raise ValueError(f"{made.name} is not safe to run: {found.errors[0]}")
    name = f"{made.name} {digest(made)}"
    _candidates[name] = made
    return AlgorithmChoice(name, made.protocol)


def _list_choices(collective: str) -> tuple[AlgorithmChoice, ...]:
    """All choices for a collective, candidates among them."""
    given = (
        AlgorithmChoice(name, one.protocol) for name, one in _candidates.items() if one.collective.name == collective
    )
    return *CHOICES[collective], *given


class Selection(NamedTuple):
    """The choice for a call, and the reason for it, for logs."""

    choice: AlgorithmChoice
    why: str


def find_choices(collective: str, *, has_nvlink: bool, ranks: int | None = None) -> tuple[AlgorithmChoice, ...]:
    """The choices that are safe on these links: LL128 needs stores of 128 bytes that NVLink alone keeps whole.

    ranks: leaves out those whose algorithm is not for so many; None for all.
    """
    return tuple(
        choice
        for choice in _list_choices(collective)
        if (has_nvlink or choice.protocol != "LL128") and (ranks is None or _can_compile(choice, ranks))
    )


def _can_compile(choice: AlgorithmChoice, ranks: int) -> bool:
    if choice.algorithm in _candidates:
        return not choice.find_obstacle(ranks, in_place=False)
    return _is_for(choice.algorithm, ranks)


@lru_cache(maxsize=1024)
def _is_for(algorithm: str | None, ranks: int) -> bool:
    try:
        return algorithm is None or bool(AlgorithmChoice(algorithm).compile(ranks, in_place=False))
    except ValueError:
        return False


def default_choice(collective: str, num_bytes: int, world_size: int, *, has_nvlink: bool) -> AlgorithmChoice:
    """The choice where nothing was measured. num_bytes: of the whole array, a rank's largest buffer.

    Without NVLink, only arrays below LL's limit run by a schedule: the costs above are those of NVLink.
    """
    if collective not in CHOICES or world_size < 2:
        return LIBRARY
    if num_bytes > _LARGEST:
        return _default_for_large(collective, num_bytes, world_size) if has_nvlink else LIBRARY
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
    # LL sends every byte twice, LL128 16 bytes for 15; below some size that costs less than the waits of LL128's warps.
    if sent < _LARGEST_LL:
        return AlgorithmChoice(algorithm, "LL")
    return AlgorithmChoice(algorithm, "LL128") if has_nvlink else LIBRARY


def _default_for_large(collective: str, num_bytes: int, world_size: int) -> AlgorithmChoice:
    """Over NVLink. In all-reduces of more than two ranks, ranks drift apart, and two send to a third concurrently."""
    if collective == "allreduce" and world_size > 2:
        return LIBRARY
    by_copies = _BY_COPY_ENGINE[collective]
    return by_copies if num_bytes >= COPY_ENGINE_MIN_BYTES else AlgorithmChoice(by_copies.algorithm, "LL128")


def time_key(collective: str, dtype: str, world_size: int, num_bytes: int, choice: AlgorithmChoice) -> str:
    """The key of one choice's seconds in the tuning store."""
    return f"collective {collective} {dtype} {world_size} ranks {num_bytes} bytes by {choice.name}"


class TimedCall(NamedTuple):
    """A call of a collective whose choices were timed. num_bytes: of a rank's largest buffer."""

    collective: str
    dtype: str
    world_size: int
    num_bytes: int


_Times = Mapping[TimedCall, Mapping[AlgorithmChoice, float]]


def time_keys(*, has_nvlink: bool) -> TimeKeys[TimedCall, AlgorithmChoice]:
    """Names of a store for the seconds of a call's choices; those that are not safe on these links are refused."""
    return TimeKeys(lambda call, choice: time_key(*call, choice), partial(_parse_key, has_nvlink=has_nvlink))


@dataclass(frozen=True)
class Table:
    """The fastest choice at measured sizes: {(collective, dtype): ((bytes, choice), ...) by size}.

    has_nvlink: whether NVLink links all ranks' GPUs, for the defaults; source: where the times are from, for logs.
    """

    rows: Mapping[tuple[str, str], Sequence[tuple[int, AlgorithmChoice]]] = field(default_factory=dict)
    has_nvlink: bool = False
    source: str = "here"

    @classmethod
    def read(cls, machine: str, world_size: int, *, has_nvlink: bool, store: TuningStore | None = None) -> "Table":
        """The table of the store's times for this machine and number of ranks; all other entries are ignored."""
        times = Autotuner(machine, time_keys(has_nvlink=has_nvlink), store).read()
        return cls(_find_fastest(times, world_size), has_nvlink)

    @classmethod
    def load(cls, path: Path, machine: str, world_size: int, *, has_nvlink: bool) -> "Table":
        """The table of a file that the user has named, as `stretto tune collectives --table FILE` writes it.

        Raises ValueError, which names the file, if it is no such file, was measured on another machine or number of
        ranks, or names a choice that does not exist or is not safe here.
        """
        measured = read_times(path)
        remedy = f"measure here with `stretto tune collectives --table {path} --ranks {world_size}`"
        if machine not in measured:
            others = "; ".join(measured) or "nothing"
            raise ValueError(f"{path} was measured on {others}, and this is {machine}: {remedy}")
        times: dict[TimedCall, dict[AlgorithmChoice, float]] = {}
        for key, seconds in measured[machine].items():
            if not key.startswith("collective "):
                continue  # the store holds other measured choices too
            try:
                call, choice = _parse_key(key, has_nvlink=has_nvlink)
                if len(seconds) != 1:
                    raise ValueError(f"a choice has one time, not {len(seconds)}")
            except ValueError as error:
                raise ValueError(f"{path} has a row {key!r}: {error}") from error
            times.setdefault(call, {})[choice] = seconds[0]
        sizes = sorted({call.world_size for call in times})
        if world_size not in sizes:
            known = ", ".join(map(str, sizes)) or "no"
            raise ValueError(f"{path} was measured on {known} ranks, and this group has {world_size}: {remedy}")
        rows = _find_fastest(times, world_size)
        try:
            for choice in {choice for row in rows.values() for _, choice in row}:
                _require_runnable(choice, world_size)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return cls(rows, has_nvlink, str(path))

    def choose(self, collective: str, dtype: str, num_bytes: int, world_size: int) -> Selection:
        """Select the fastest choice at the nearest measured size, perhaps of another dtype; else the default."""
        measured = dtype
        rows = self.rows.get((collective, dtype))
        if rows is None:
            found = ((other, row) for (name, other), row in self.rows.items() if name == collective)
            measured, rows = next(found, (dtype, None))
        if not rows:
            choice = default_choice(collective, num_bytes, world_size, has_nvlink=self.has_nvlink)
            links = "NVLink" if self.has_nvlink else "links other than NVLink"
            return Selection(
                choice, f"nothing was measured for it, and it is the default on {world_size} ranks over {links}"
            )
        size = math.log2(max(num_bytes, 1))
        nearest, choice = min(rows, key=lambda entry: abs(math.log2(entry[0]) - size))
        return Selection(choice, f"it was the fastest at {nearest} bytes of {measured}, measured {self.source}")


def find_table_file(given: Path | str | None) -> Path | None:
    """The file of measured times, from the argument or else the environment; None for the tuning store."""
    named = given if given is not None else os.environ.get(TABLE_VARIABLE)
    return Path(named) if named else None


def _find_fastest(times: _Times, world_size: int) -> dict[tuple[str, str], tuple[tuple[int, AlgorithmChoice], ...]]:
    """The fastest choice at each size on so many ranks; the library where none gains enough over it."""
    best: dict[tuple[str, str], dict[int, AlgorithmChoice]] = {}
    for call, seconds in times.items():
        if call.world_size == world_size:
            counted = {choice: time * (_GAIN if choice == LIBRARY else 1) for choice, time in seconds.items()}
            fastest = min(counted, key=counted.__getitem__)
            plain = replace(fastest, unroll=1)
            if plain in counted and counted[fastest] > _UNROLLED_GAIN * counted[plain]:
                fastest = plain
            best.setdefault((call.collective, call.dtype), {})[call.num_bytes] = fastest
    return {key: tuple((size, sizes[size]) for size in sorted(sizes)) for key, sizes in best.items()}


def _parse_key(key: str, *, has_nvlink: bool) -> tuple[TimedCall, AlgorithmChoice]:
    """Parse the key of a row. Raises ValueError with what is wrong with it."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError("a row is `collective NAME DTYPE N ranks N bytes by CHOICE`")
    collective, dtype, world_size, num_bytes = match[1], match[2], int(match[3]), int(match[4])
    if collective not in CHOICES:
        raise ValueError(f"there is no collective {collective!r}: there are {', '.join(CHOICES)}")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"there is no dtype {dtype!r}")
    if world_size < 1 or num_bytes < 1:
        raise ValueError("it has at least one rank and one byte")
    return TimedCall(collective, dtype, world_size, num_bytes), _parse_choice(collective, match[5], has_nvlink)


def _parse_choice(collective: str, name: str, has_nvlink: bool) -> AlgorithmChoice:
    choices = {choice.name: choice for choice in _list_choices(collective)}
    if name not in choices:
        algorithm, _, protocol = name.partition(" ")
        protocol = protocol.partition(" ")[0]
        names = ALGORITHMS_OF[collective] + _TIMED_ALGORITHMS_OF[collective]
        if algorithm not in names:
            known = ", ".join(names)
            raise ValueError(
                f"{collective} is run by library, {known}, or a schedule that `add_candidate` was given: not by "
                f"{algorithm!r}"
            )
        if protocol not in PROTOCOLS:
            raise ValueError(f"there is no protocol {protocol!r}: there are {', '.join(PROTOCOLS)}")
        raise ValueError(f"there is no choice {name!r}: there are {', '.join(choices)}")
    if choices[name] not in find_choices(collective, has_nvlink=has_nvlink):
        raise ValueError("LL128 needs NVLink between all ranks' GPUs, which these have not")
    return choices[name]


def _require_runnable(choice: AlgorithmChoice, world_size: int) -> None:
    """Raise ValueError for an algorithm that does not compile for so many ranks, or fails verification."""
    if choice.algorithm is None:
        return
    found = verify(choice.compile(world_size, in_place=False))
    if not found.ok:
        raise ValueError(f"{choice.algorithm} is not safe to run on {world_size} ranks: {found.errors[0]}")
