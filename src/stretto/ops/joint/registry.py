# SPDX-License-Identifier: Apache-2.0
"""The schedules that operators were given, by the name that their configurations have.

An operator's schema takes text, and all ranks compare it: so a schedule's name says what it holds.
"""

import hashlib
from functools import lru_cache

import torch

from stretto.collectives.algorithm import Algorithm
from stretto.collectives.algorithms import ALGORITHMS, find
from stretto.collectives.joint.schedule import require_collective
from stretto.collectives.schedule import Schedule
from stretto.collectives.verifier import verify
from stretto.ops.config import KernelConfig, decode
from stretto.ops.operator import find_group

CANDIDATES = {
    "all_gather_matmul": ("direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"),
    "matmul_reduce_scatter": ("direct-reduce-scatter", "ring-reduce-scatter", "recursive-halving-reduce-scatter"),
    "matmul_all_reduce": ("two-shot-all-reduce", "ring-all-reduce", "recursive-halving-all-reduce"),
}
"""The algorithms that a tuner measures inside an operator, of those that take nothing but a number of ranks.

The first one is the operator's own, where copy engines move rows or sums; the second one a ring, for groups whose links
all pass through few, as over PCIe (Flux, section 4.3)."""

BETWEEN_NODES = {
    "all_gather_matmul": ("hierarchical-all-gather", "direct-all-gather"),
    "matmul_reduce_scatter": ("hierarchical-reduce-scatter", "direct-reduce-scatter"),
    "matmul_all_reduce": ("hierarchical-all-reduce", "two-shot-all-reduce"),
    "embedding_all_to_all": ("two-step-all-to-all", "direct-all-to-all"),
    "dispatch_grouped_matmul": ("two-step-all-to-all", "direct-all-to-all"),
}
"""The algorithm of groups of several nodes, and of nodes that are not alike or whose ranks do not follow each other."""

_schedules: dict[str, Schedule] = {}
_names: dict[tuple[str, int, int], tuple[Schedule, str]] = {}
"""By operator, ranks, and a schedule's id: a schedule that is right for them, which lives as long as it is here."""
_MAX_NAMES = 1024  # of schedules that may be compiled anew for each call


@torch.compiler.assume_constant_result
def encode_schedule(operator: str, schedule: str | Schedule, how: str, group: str) -> str:
    """The `implementation` of a group's call by this schedule: a configuration that names it. how: the caller's.

    ValueError for a schedule that is not proved right, or does another collective, and for implementation="library".
    """
    name = name_schedule(operator, schedule, how, find_group(group).size())
    if how in ("auto", "kernel"):
        return KernelConfig(schedule=name).encode()
    return decode(how, name).encode()


@torch.compiler.assume_constant_result
def name_schedule(operator: str, schedule: str | Schedule, how: str, ranks: int) -> str:
    """The name, for `find_schedule`, of the schedule of a call of so many ranks. Errors are those of `encode_schedule`.

    how: the call's implementation.
    """
    if how == "library":
        raise ValueError(f'{operator}: a schedule runs in a kernel: leave out implementation="library", or schedule')
    made = _compile(operator, schedule, ranks) if isinstance(schedule, str) else schedule
    if not isinstance(made, Schedule):
        compiled = f": its .compile(ranks={ranks}, ...)" if isinstance(made, Algorithm) else ""
        raise ValueError(f"{operator}: schedule must be an algorithm's name or a Schedule, not {made!r}{compiled}")
    return _register(operator, made, ranks)


@lru_cache(maxsize=256)
def _compile(operator: str, name: str, ranks: int) -> Schedule:
    """The algorithm of this name for so many ranks. ValueError if it takes more than their number."""
    algorithm = find(name)
    try:
        return algorithm.compile(ranks=ranks)
    except ValueError as error:
        raise ValueError(
            f"{operator}: {name} is not compiled by its name for {ranks} ranks ({error}): give the schedule, as "
            f"collectives.algorithms.find({name!r}).compile(...) makes it"
        ) from error


def _register(operator: str, schedule: Schedule, ranks: int) -> str:
    """Check a schedule, once, for the operator on so many ranks; keep it under a name that says what it holds."""
    known = _names.get((operator, ranks, id(schedule)))
    if known is not None:
        return known[1]
    require_collective(operator, schedule, ranks)
    verification = verify(schedule)
    if not verification.ok:
        raise ValueError(f"{schedule.name} is refused: {verification.errors[0]}")
    digest = hashlib.sha256(repr((schedule.ranks, schedule.in_place)).encode()).hexdigest()[:12]
    name = f"{schedule.name} {digest}"
    _schedules.setdefault(name, schedule)
    if len(_names) == _MAX_NAMES:
        _names.clear()
    _names[operator, ranks, id(schedule)] = schedule, name
    return name


def find_schedule(operator: str, name: str, ranks: int) -> Schedule:
    """The schedule that an operator was given under that name, or a known algorithm's. ValueError for any other."""
    if name not in _schedules:
        algorithm = name.rpartition(" ")[0]
        if algorithm not in ALGORITHMS or _register(operator, _compile(operator, algorithm, ranks), ranks) != name:
            raise ValueError(f"no schedule {name!r} was given to an operator in this process: give schedule= again")
    require_collective(operator, _schedules[name], ranks)  # it may have been given to another operator, or group
    return _schedules[name]


def is_runnable(operator: str, name: str, ranks: int) -> bool:
    """True if `find_schedule` finds it: a stored time's may be of another version, or of another program."""
    try:
        find_schedule(operator, name, ranks)
    except ValueError:
        return False
    return True


def list_candidates(operator: str, ranks: int) -> list[str]:
    """The names of schedules that a tuner measures inside an operator."""
    names = CANDIDATES[operator] if ranks > 1 else ()
    return [_register(operator, _compile(operator, name, ranks), ranks) for name in names]


def list_rings(operator: str, order: tuple[int, ...]) -> list[str]:
    """The names of schedules for GPUs that PCIe connects: a ring of the ranks in this order, then a direct exchange."""
    name = CANDIDATES[operator][1]
    if len(order) < 2:
        return [name_schedule(operator, name, "kernel", len(order))]
    ring = find(name).compile(ranks=len(order), order=order)
    return [name_schedule(operator, ring, "kernel", len(order)), *list_candidates(operator, len(order))[:1]]


def name_between_nodes(operator: str, nodes: tuple[int, ...]) -> str:
    """The name of the schedule for ranks of these nodes, by their numbers: in two levels, if the nodes are alike.

    A gather then goes between nodes first, to the ranks of one place on each, and what comes is passed on inside; a sum
    is formed inside first (Flux, sections 4.2 and 4.3).
    """
    in_two_levels, direct = BETWEEN_NODES[operator]
    count, gpus = max(nodes) + 1, len(nodes) // (max(nodes) + 1)
    if nodes != tuple(rank // gpus for rank in range(len(nodes))):
        return name_schedule(operator, direct, "kernel", len(nodes))
    return name_schedule(operator, find(in_two_levels).compile(nodes=count, gpus=gpus), "kernel", len(nodes))
