# SPDX-License-Identifier: Apache-2.0
"""Verifies a schedule: runs all checks on the steps that will run, not on the program from which they were compiled."""

from collections.abc import Collection
from dataclasses import dataclass

from stretto.collectives.collective import Collective
from stretto.collectives.schedule import Schedule
from stretto.collectives.verifier.deadlock import describe_deadlock, find_min_slots
from stretto.collectives.verifier.graph import build_graph, find_overlaps, linear_order
from stretto.collectives.verifier.races import Race, find_races
from stretto.collectives.verifier.symbolic import SymbolicOutcome, execute

WAIVABLE = ("replica_consistency",)
MAX_ERRORS = 100


@dataclass(frozen=True)
class Verification:
    """The result of a verification. None: a property that other errors kept from being determined.

    ok: all checks pass, except for waived errors; postcondition: the outputs are what the collective specifies;
    deadlock_free: at `slots` FIFO slots a connection; min_slots: the smallest number at which it is; races: pairs of
    steps that touch one chunk in an undefined order; replica_consistent: all ranks add in the same order, so that their
    bits are the same; roundings: the most additions, one upon another, in an output; writes_input: whether a call out
    of place changes its input; errors: messages about everything that is wrong.
    """

    ok: bool
    postcondition: bool | None
    deadlock_free: bool | None
    slots: int
    min_slots: int | None
    races: tuple[Race, ...] | None
    replica_consistent: bool | None
    roundings: int | None
    writes_input: bool
    steps: int
    errors: tuple[str, ...]


def verify(schedule: Schedule, *, slots: int | None = None, waive: Collection[str] = ()) -> Verification:
    """Verify a schedule, for the calls that it is meant for: in place, out of place or both.

    slots: FIFO slots a connection, by default those of its protocol; waive: names of WAIVABLE whose errors are not
    counted. Raises ValueError for another name or for no slots.
    """
    slots = schedule.slots if slots is None else slots
    if slots < 1:
        raise ValueError(f"a connection has at least 1 FIFO slot, not {slots}")
    for name in waive:
        if name not in WAIVABLE:
            raise ValueError(f"{name!r} cannot be waived; these checks can: {', '.join(WAIVABLE)}")
    errors: list[str] = []
    graph = build_graph(schedule, errors)
    malformed = bool(errors)
    min_slots, deadlock_free = None, None
    if not malformed:
        min_slots = find_min_slots(graph)
        deadlock_free = min_slots is not None and min_slots <= slots
        if not deadlock_free:
            errors.append(describe_deadlock(graph, slots, min_slots))
    outcomes: list[SymbolicOutcome] = []
    races: dict[Race, None] = {}  # a set that keeps its order: in place and out of place may have the same ones
    order, left = linear_order(graph)
    runs = not malformed and not left
    if runs:
        for collective in _calls(schedule):
            found = list(find_overlaps(graph, collective))
            outcomes.append(execute(graph, order, collective, found))
            races_here, undecided = find_races(graph, order, collective)
            races |= dict.fromkeys(races_here)
            found += [undecided] if undecided is not None else []
            found += map(str, races_here)
            known = set(errors)
            errors += [error for error in found if error not in known]
    if schedule.collective.is_unknown:
        errors.append(
            f"postcondition: the conditions of {schedule.collective.name!r} are unknown: pass them as `collective` to "
            "`read_schedule`"
        )
    waived = "replica_consistency" in waive
    counted = [error for error in errors if not (waived and error.startswith("replica consistency"))]
    is_right = all(outcome.right for outcome in outcomes) and not schedule.collective.is_unknown
    writes_input = any(step.type.writes_destination and step.destination_buffer == "in" for step in graph.steps)
    return Verification(
        ok=not counted,
        postcondition=is_right if runs else None,
        deadlock_free=deadlock_free,
        slots=slots,
        min_slots=min_slots,
        races=tuple(races) if runs else None,
        replica_consistent=all(one.consistent for one in outcomes) if runs else None,
        roundings=max((outcome.roundings for outcome in outcomes), default=0) if runs else None,
        writes_input=schedule.out_of_place and writes_input,
        steps=len(graph.steps),
        errors=(*errors[:MAX_ERRORS], *([f"{len(errors) - MAX_ERRORS} more"] if len(errors) > MAX_ERRORS else [])),
    )


def _calls(schedule: Schedule) -> list[Collective]:
    """The collective in each form in which it will be called."""
    calls = []
    if schedule.in_place:
        calls.append(schedule.collective.aliased())
    if schedule.out_of_place:
        calls.append(schedule.collective.out_of_place())
    return calls
