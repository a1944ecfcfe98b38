# SPDX-License-Identifier: Apache-2.0
"""The schedules that operators were given, by the name that their configurations have.

An operator's schema takes text, and all ranks compare it: so a schedule's name says what it holds.
"""

import hashlib
from functools import lru_cache

import torch

from stretto.collectives.algorithms import find
from stretto.collectives.schedule import Schedule
from stretto.collectives.verifier import verify
from stretto.ops.config import KernelConfig, decode
from stretto.ops.joint.schedule import require_collective

_schedules: dict[str, Schedule] = {}
_names: dict[int, tuple[Schedule, str]] = {}  # by the schedule's id, which lives as long as it is here


@torch.compiler.assume_constant_result
def encode_schedule(operator: str, schedule: str | Schedule, how: str, ranks: int) -> str:
    """The `implementation` of a call by this schedule: a configuration that names it. how: the caller's, encoded.

    ValueError for a schedule that is not proved right, or does another collective, and for implementation="library".
    """
    if how == "library":
        raise ValueError(f'{operator}: a schedule runs in a kernel: leave out implementation="library", or schedule')
    config = KernelConfig() if how in ("auto", "kernel") else decode(how)
    made = _compile(operator, schedule, ranks) if isinstance(schedule, str) else schedule
    if not isinstance(made, Schedule):
        raise ValueError(f"{operator}: schedule is an algorithm's name or a compiled Schedule, not {made!r}")
    require_collective(operator, made, ranks)
    return config._replace(schedule=_register(made)).encode()


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


def _register(schedule: Schedule) -> str:
    """Verify a schedule, once, and keep it under a name that says what it holds."""
    known = _names.get(id(schedule))
    if known is not None:
        return known[1]
    verification = verify(schedule)
    if not verification.ok:
        raise ValueError(f"{schedule.name} is refused: {verification.errors[0]}")
    digest = hashlib.sha256(repr((schedule.ranks, schedule.in_place)).encode()).hexdigest()[:12]
    name = f"{schedule.name} {digest}"
    _schedules.setdefault(name, schedule)
    _names[id(schedule)] = schedule, name
    return name


def find_schedule(name: str) -> Schedule:
    """The schedule that this process has given an operator under that name. ValueError for any other."""
    if name not in _schedules:
        raise ValueError(f"no schedule {name!r} was given to an operator in this process: give schedule= again")
    return _schedules[name]
