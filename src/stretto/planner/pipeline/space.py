# SPDX-License-Identifier: Apache-2.0
"""The pipelines among which `plan` searches, and the rules that say which of them a model can run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from stretto.planner.architecture import Architecture
from stretto.planner.grids import divisors
from stretto.planner.workload import MESSAGE_DRIVEN, ScheduleChoice
from stretto.quantities import require_whole, to_whole
from stretto.schedules import SCHEDULES, ServeFirst
from stretto.schedules.generators import V_SHAPED, check_numbers
from stretto.suggestions import name_known, require_one_of

# In which order schedules are tried: of equally fast ones, the first is taken.
_ORDER = ("1f1b", MESSAGE_DRIVEN, "interleaved", "zb-h1", "zb-v", "dualpipe-v", "gpipe")
# Schedules that compute weight gradients separately, which models without roles cannot.
_SPLITTING = ("zb-h1", "zb-v", "dualpipe-v")
MAX_VIRTUAL_STAGES = 8


@dataclass(frozen=True)
class PipelineSpace:
    """The pipelines among which a search chooses. None: searched.

    pipes: ranks of pipe. schedule, virtual_stages, extra_warm_up, limit, serve_first: as of `Pipeline`.
    """

    pipes: tuple[int, ...] = (1,)
    schedule: str | None = None
    virtual_stages: int | None = None
    extra_warm_up: int | None = None
    limit: int | None = None
    serve_first: ServeFirst | None = None

    def check(self) -> None:
        """Raise ValueError for a schedule that is not known, and for options of another one than is named."""
        known = (*SCHEDULES, MESSAGE_DRIVEN)
        if self.schedule is not None and self.schedule not in known:
            raise ValueError(f"schedule {self.schedule!r} is not known{name_known(self.schedule, known)}")
        for name, least in (("virtual_stages", 1), ("extra_warm_up", 0), ("limit", 1)):
            value = getattr(self, name)
            if value is not None:
                require_whole(name, value, least)
        if self.serve_first is not None:
            require_one_of(get_args(ServeFirst), serve_first=self.serve_first)
        for name in ("limit", "serve_first"):
            if getattr(self, name) is not None and self.schedule != MESSAGE_DRIVEN:
                raise ValueError(f"{name} is an option only of schedule='message-driven'")
        if self.extra_warm_up and self.schedule != "1f1b":
            raise ValueError("extra_warm_up is an option only of schedule='1f1b'")

    def list_schedules(self, model: Architecture, pipe: int, micro_batches: int) -> Iterator[ScheduleChoice]:
        """The schedules that can run, the simplest first."""
        for choice in self.list_named(model, pipe):
            if why_no_schedule(model, choice, pipe, micro_batches) is None:
                yield choice

    def list_named(self, model: Architecture, pipe: int) -> Iterator[ScheduleChoice]:
        """All schedules of the space, whether or not they can run."""
        for name in (self.schedule,) if self.schedule is not None else _ORDER:
            for virtual in self._list_virtual(name, model, pipe):
                if name == "1f1b":
                    extras = (0, pipe - 1) if self.extra_warm_up is None else (self.extra_warm_up,)
                    yield from (ScheduleChoice(name, virtual, extra) for extra in extras)
                elif name == MESSAGE_DRIVEN:
                    limits = (pipe, 2 * pipe) if self.limit is None else (self.limit,)
                    orders: tuple[ServeFirst, ...] = ("backward", "arrival")
                    for order in orders if self.serve_first is None else (self.serve_first,):
                        yield from (ScheduleChoice(name, virtual, 0, limit, order) for limit in limits)
                else:
                    yield ScheduleChoice(name, virtual, self.extra_warm_up or 0)

    def _list_virtual(self, name: str, model: Architecture, pipe: int) -> Sequence[int]:
        """Interleaved stages are searched among two a rank, and numbers that cut the blocks into equal stages."""
        if self.virtual_stages is not None:
            return (self.virtual_stages,)
        if name == "interleaved":
            return [n for n in range(2, MAX_VIRTUAL_STAGES + 1) if n == 2 or model.layers % (n * pipe) == 0]
        return (2,) if name in V_SHAPED else (1,)


def make_pipeline_space(
    model: Architecture, ranks: int, *, pipe: int | Literal["auto"] | None = None, **asked: Any
) -> PipelineSpace:
    """The space that the keywords of `plan` mean. Raises ValueError for those that nothing can run, with what can.

    asked: fields of `PipelineSpace`.
    """
    given = [name for name, value in asked.items() if value is not None]
    if pipe is None or pipe == 1:
        if given:
            raise ValueError(
                f"{given[0]} is {asked[given[0]]!r}, but without pipeline stages nothing is scheduled; pipe='auto' "
                "(--pipe auto) searches them, and pipe=2 takes two"
            )
        return PipelineSpace()
    space = PipelineSpace(**{name: to_whole(value) for name, value in asked.items()})
    space.check()
    stages = space.virtual_stages or (2 if space.schedule in (*V_SHAPED, "interleaved") else 1)
    if pipe == "auto":
        pipes = tuple(n for n in divisors(ranks) if n * stages <= model.layers)
        if given and pipes in ((), (1,)):
            raise ValueError(
                f"{given[0]} is {asked[given[0]]!r}, but no number of stages above 1 divides {ranks} GPUs and leaves "
                f"each of its stages one of the {model.layers} blocks of {model.name}; fewer virtual stages, or "
                "an even number of GPUs, would do"
            )
        return replace(space, pipes=pipes if not given else tuple(n for n in pipes if n > 1))
    pipe = require_whole("pipe", pipe, rest=", or 'auto'")
    if ranks % pipe:
        near = min(divisors(ranks), key=lambda n: (abs(n - pipe), -n))
        raise ValueError(f"pipe={pipe} does not divide {ranks} GPUs; {near} would do")
    if why := why_too_many_stages(model, pipe, stages):
        near = max(n for n in divisors(ranks) if n * stages <= max(model.layers, stages))
        raise ValueError(why.replace(f"pipe={max(1, model.layers // stages)} would do", f"pipe={near} would do"))
    return replace(space, pipes=(pipe,))


def why_too_many_stages(model: Architecture, pipe: int, virtual_stages: int) -> str | None:
    """Say why a model cannot be cut into so many stages, with what would do; None if it can."""
    if pipe * virtual_stages <= model.layers:
        return None
    each = f" with {virtual_stages} stages a rank" if virtual_stages > 1 else ""
    return (
        f"pipe={pipe}{each} makes {pipe * virtual_stages} stages, but {model.name} has {model.layers} blocks, and each "
        f"stage needs one; pipe={max(1, model.layers // virtual_stages)} would do"
    )


def why_no_schedule(model: Architecture, choice: ScheduleChoice, pipe: int, micro_batches: int) -> str | None:
    """The first rule that a schedule breaks, with what would do; None if it can run."""
    if why := why_too_many_stages(model, pipe, choice.virtual_stages):
        return why
    if choice.is_message_driven:
        if choice.virtual_stages > 1:
            return "message-driven order takes one stage a rank; virtual_stages=1 would do"
        return None
    if choice.name in _SPLITTING and model.is_sharded_by_blocks:
        return (
            f"{choice.name} computes weights' gradients by themselves, which a model that is sharded block by block "
            "does not; 1f1b or interleaved would do"
        )
    try:
        check_numbers(choice.name, pipe, micro_batches, choice.virtual_stages, choice.extra_warm_up)
    except ValueError as error:
        return str(error)
    return None
