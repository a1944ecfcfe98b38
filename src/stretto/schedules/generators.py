# SPDX-License-Identifier: Apache-2.0
"""The schedules by name: how they are built, which numbers of stages and micro-batches they take, and their bubbles."""

from collections.abc import Callable
from dataclasses import dataclass

from stretto.schedules.schedule import (
    Action,
    PipelineOperation,
    PipelineSchedule,
    ScheduleError,
    place_in_loops,
    place_in_v,
)
from stretto.schedules.zero_bubble import dualpipe_v, zb_h1, zb_v
from stretto.suggestions import name_known

MAX_ACTIONS = 1 << 24
"""A schedule with more actions is refused, since it would not fit into memory."""

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD


@dataclass(frozen=True)
class _Generator:
    """Builder of a named schedule.

    virtual_stages: the only number of stages on a rank that it takes, or None where any above 1 would do.
    """

    build: Callable[[int, int, int, int], list[list[Action]]]
    virtual_stages: int | None = 1


def build_schedule(
    name: str, pipe: int, micro_batches: int, virtual_stages: int | None = None, extra_warm_up: int = 0
) -> PipelineSchedule:
    """Build the schedule of a step.

    name: one of SCHEDULES. "gpipe" (Huang et al., 2019) computes all forward passes first. "1f1b" (Narayanan et al.,
        2019) alternates forward and backward passes after a warm-up. "interleaved" (Narayanan et al., 2021, section
        2.2) is 1f1b with several stages on each rank. "zb-h1" and "zb-v" (Qi et al., 2024) fill bubbles with weight
        gradients. "dualpipe-v" (DeepSeek-AI, 2024, folded to one copy of the model) pairs forward and backward passes.
    pipe: ranks of the pipeline.
    micro_batches: of a step.
    virtual_stages: stages on each rank. Default: the fewest that the schedule takes.
    extra_warm_up: of "1f1b", forward passes that the first rank computes before its first backward pass, beyond the
        pipe - 1 that 1F1B needs; other ranks add as many in proportion to their distance from the last, rounded up.
        pipe - 1 doubles the warm-up. It hides the latency of messages, for as many more live micro-batches.

    Raises ValueError for a name that is not known, and ScheduleError for numbers that the schedule does not take, with
    the nearest that it does.
    """
    stages = check_numbers(name, pipe, micro_batches, virtual_stages, extra_warm_up)
    placed = place_in_v(pipe) if name in V_SHAPED else place_in_loops(pipe, stages)
    ranks = _GENERATORS[name].build(pipe, micro_batches, stages, extra_warm_up)
    return PipelineSchedule(name, placed, micro_batches, tuple(map(tuple, ranks)))


def check_numbers(
    name: str, pipe: int, micro_batches: int, virtual_stages: int | None = None, extra_warm_up: int = 0
) -> int:
    """Return the stages on each rank of a schedule that `build_schedule` would build. Raises as it does."""
    if name not in _GENERATORS:
        raise ValueError(f"schedule {name!r} is not known{name_known(name, SCHEDULES)}")
    generator = _GENERATORS[name]
    stages = _fewest_virtual_stages(generator) if virtual_stages is None else virtual_stages
    for what, value, least in (
        ("pipe", pipe, 1),
        ("micro_batches", micro_batches, 1),
        ("virtual_stages", stages, 1),
        ("extra_warm_up", extra_warm_up, 0),
    ):
        if value < least:
            raise ScheduleError(f"{what} is {value}, but must be at least {least}")
    _check_rules(name, pipe, micro_batches, stages, extra_warm_up)
    if 3 * pipe * stages * micro_batches > MAX_ACTIONS:
        most = MAX_ACTIONS // (3 * pipe * stages)
        near = f"{most} micro-batches" if most else f"{MAX_ACTIONS // 3} stages and one micro-batch"
        raise ScheduleError(
            f"{micro_batches} micro-batches on {pipe * stages} stages are more than {MAX_ACTIONS} actions; {near} "
            "would do"
        )
    return stages


def _check_rules(name: str, pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> None:
    """Raise ScheduleError for numbers that the schedule does not take."""
    generator = _GENERATORS[name]
    if extra_warm_up and name != "1f1b":
        raise ScheduleError(f"extra_warm_up is {extra_warm_up}, but {name} takes none; schedule 1f1b would do, or 0")
    fewest = _fewest_virtual_stages(generator)
    if virtual_stages < fewest or (generator.virtual_stages is not None and virtual_stages > fewest):
        more = " or more" if generator.virtual_stages is None else ""
        other = "1f1b" if fewest > 1 else "interleaved"
        raise ScheduleError(
            f"{name} has {fewest}{more} stages on each rank, not {virtual_stages}; {fewest} would do, or schedule "
            f"{other}"
        )
    if name == "interleaved" and micro_batches % _rounds(pipe, micro_batches):
        fewer = max(n for n in range(1, micro_batches) if n % _rounds(pipe, n) == 0)
        more_of_them = next(n for n in range(micro_batches, 2 * micro_batches) if n % _rounds(pipe, n) == 0)
        raise ScheduleError(
            f"interleaved takes micro-batches in {_rounds(pipe, micro_batches)} rounds of equally many, at least "
            f"{pipe} (pipe) each, which {micro_batches} micro-batches are not; {fewer} or {more_of_them} would do"
        )
    if name == "dualpipe-v" and micro_batches < 2 * pipe:
        smaller = f", or pipe {micro_batches // 2}" if micro_batches > 1 else ""
        raise ScheduleError(
            f"dualpipe-v takes at least as many micro-batches as stages, {2 * pipe}, not {micro_batches}; "
            f"{2 * pipe} would do{smaller}"
        )


def _fewest_virtual_stages(generator: _Generator) -> int:
    return 2 if generator.virtual_stages is None else generator.virtual_stages


def _rounds(pipe: int, micro_batches: int) -> int:
    """Count the rounds in which interleaved 1F1B takes its micro-batches: as many as have at least pipe each."""
    return max(1, micro_batches // pipe)


def gpipe(pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> list[list[Action]]:
    """All forward passes, then all backward passes."""
    numbers = range(micro_batches)
    return [[Action(rank, operation, n) for operation in (_F, _B) for n in numbers] for rank in range(pipe)]


def one_f_one_b(pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> list[list[Action]]:
    """Forward passes until the first gradient can be there, then one forward and one backward pass in turn."""
    ranks = []
    for rank in range(pipe):
        distance = pipe - 1 - rank
        extra = -(-extra_warm_up * distance // (pipe - 1)) if pipe > 1 else extra_warm_up
        warm_up = min(micro_batches, distance + extra)
        forwards = [Action(rank, _F, n) for n in range(micro_batches)]
        backwards = [Action(rank, _B, n) for n in range(micro_batches)]
        ranks.append(_alternate(forwards, backwards, warm_up))
    return ranks


def interleaved(pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> list[list[Action]]:
    """1F1B in which a rank's stages take turns, each for a round of micro-batches, the first stage first.

    Backward passes go through the rank's stages in the other direction. Each hop further from the last rank adds two
    forward passes to the warm-up.
    """
    size = micro_batches // _rounds(pipe, micro_batches)
    firsts = range(0, micro_batches, size)
    ranks = []
    for rank in range(pipe):
        stages = range(rank, pipe * virtual_stages, pipe)
        forwards = [Action(s, _F, n) for first in firsts for s in stages for n in range(first, first + size)]
        backwards = [Action(s, _B, n) for first in firsts for s in stages[::-1] for n in range(first, first + size)]
        warm_up = min(len(forwards), (virtual_stages - 1) * size + 2 * (pipe - 1 - rank))
        ranks.append(_alternate(forwards, backwards, warm_up))
    return ranks


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forward passes, then a forward and a backward pass in turn, then the other backward passes."""
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *(action for pair in pairs for action in pair), *backwards[steady:]]


_GENERATORS = {
    "gpipe": _Generator(gpipe),
    "1f1b": _Generator(one_f_one_b),
    "interleaved": _Generator(interleaved, virtual_stages=None),
    "zb-h1": _Generator(zb_h1),
    "zb-v": _Generator(zb_v, virtual_stages=2),
    "dualpipe-v": _Generator(dualpipe_v, virtual_stages=2),
}
SCHEDULES = tuple(_GENERATORS)
"""The names of the schedules that `build_schedule` builds."""
V_SHAPED = ("zb-v", "dualpipe-v")
"""The schedules whose stages go down the ranks and back up."""
