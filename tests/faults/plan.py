# SPDX-License-Identifier: Apache-2.0
"""Draws the faults of a campaign: which kind, on which rank, at which step and place of the training loop."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.settings import GRIDS, FaultsSetting

CHECKPOINT_EVERY = 4
EVALUATE_EVERY = 3
WINDOW = 8
"""Steps that belong to one fault: it happens in the first half, or at the next evaluation or checkpoint after that."""

START_LIMIT = 60.0
"""Seconds, where train.timeout is shorter, in which a rank that starts may make no progress: it imports, and builds."""

# Where a fault can happen, with how often it is drawn. Those at the start happen in the attempt that follows the fault
# before: an attempt fails before it has trained a step.
STARTING = {"import": 2, "start": 1, "build": 1, "load": 2}
WITH_START_LIMIT = ("import", "start", "build")
STEPPING = {"data": 3, "forward": 3, "update": 3, "evaluate": 2, "save": 3, "commit": 1}
LOOPS = {"python": 3, "holds the interpreter lock": 1, "blocked read": 1}


@dataclass(frozen=True)
class Fault:
    """One fault of a job.

    place: `import` (while the rank's process starts), `start` (before its process group exists), `build`, `load`,
    `data`, `forward`, `update`, `evaluate`, `save` (a rank writes its shards), `commit` (rank 0 completes the
    checkpoint) or `exit` (after training). step: the earliest step; None at the start and at the exit. delay: seconds
    from there to the fault, in which the rank goes on (SIGKILL, SIGSTOP and connections). variant: of loops, and of
    full disks: `before` a save, or `during` it. peer: the other end of the connection. room: bytes that are left on the
    disk.
    """

    number: int
    kind: str
    rank: int
    place: str
    step: int | None = None
    delay: float = 0.0
    variant: str = ""
    peer: int | None = None
    room: int = 0


@dataclass(frozen=True)
class Job:
    """A training run and the faults that happen in it, in this order. number: from 1 on."""

    number: int
    grid: dict[str, int]
    steps: int
    faults: tuple[Fault, ...]
    asynchronous: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(values: dict[str, Any]) -> "Job":
        return Job(**values | {"faults": tuple(Fault(**fault) for fault in values["faults"])})


def message_of(fault: Fault) -> str:
    """The message of the exception that a fault raises."""
    return f"injected fault {fault.number} on rank {fault.rank}"


def draw_jobs(setting: FaultsSetting) -> tuple[Job, ...]:
    """Draw all jobs of a campaign. Equal settings draw equal jobs; each kind gets an equal share of the faults."""
    generator = random.Random(setting.seed)
    kinds = [setting.kinds[number % len(setting.kinds)] for number in range(setting.faults)]
    generator.shuffle(kinds)
    jobs = []
    for number in range(1, setting.num_jobs + 1):
        own = kinds[(number - 1) * setting.faults_a_job : number * setting.faults_a_job]
        faults = tuple(_draw_faults(own, setting.ranks, random.Random(f"{setting.seed} {number}")))
        grids = GRIDS[setting.ranks]
        jobs.append(
            Job(
                number=number,
                grid=grids[(number - 1) % len(grids)],
                steps=count_steps(setting.faults_a_job),  # the same for all: one undisturbed run a grid suffices
                faults=faults,
                asynchronous=(number - 1) // len(grids) % 4 != 3,  # a quarter of the jobs waits for its saves
            )
        )
    return tuple(jobs)


def count_steps(faults_a_job: int) -> int:
    """The steps of a job: a window for each fault, and some that nothing disturbs."""
    return WINDOW * faults_a_job + CHECKPOINT_EVERY + 1


def estimate_seconds(job: Job, timeout: float) -> float:
    """About how long a job takes: a restart for each fault, and the time limit where a rank is stuck."""
    stuck = [fault for fault in job.faults if fault.kind in ("stop", "loop")]
    return 8.0 * len(job.faults) + sum(START_LIMIT if fault.place in WITH_START_LIMIT else timeout for fault in stuck)


def _draw_faults(kinds: list[str], ranks: int, generator: random.Random) -> Iterator[Fault]:
    before = None
    for number, kind in enumerate(kinds):
        place = _draw_place(kind, generator, is_last=number == len(kinds) - 1, before=before)
        rank = 0 if place == "commit" else generator.randrange(ranks)
        first = WINDOW * number + 1
        step = first + generator.randrange(WINDOW // 2) if place in STEPPING else None
        longest = {"import": 2.0, "start": 0.5, "build": 0.1, "load": 0.05}.get(place, 0.04)
        variant, peer, room = "", None, 0
        if kind == "loop":
            variant = generator.choices(list(LOOPS), list(LOOPS.values()))[0]
        elif kind == "disk":
            variant = "during" if place == "save" else "before"
            room = generator.randrange(500_000)
        elif kind == "connection":
            peer = (rank + 1) % ranks  # neighbours of the ring of all ranks: each step uses the connection
        yield Fault(
            number=number,
            kind=kind,
            rank=rank,
            place=place,
            step=step,
            delay=round(generator.uniform(0, longest), 4) if kind in ("kill", "stop", "connection") else 0.0,
            variant=variant,
            peer=peer,
            room=room,
        )
        before = kind


def _draw_place(kind: str, generator: random.Random, *, is_last: bool, before: str | None) -> str:
    match kind:
        case "disk":
            places = {"update": 1, "save": 1}
        case "connection":
            places = {"data": 1, "forward": 1, "update": 1, "evaluate": 1, "save": 1}
        case "kill" | "stop":
            places = STARTING | STEPPING
        case _:
            places = {place: weight for place, weight in (STARTING | STEPPING).items() if place != "import"}
    if before == "connection":  # if it goes unnoticed, no further attempt is made
        places = {place: weight for place, weight in places.items() if place not in STARTING}
    if is_last and kind not in ("disk", "connection"):
        places |= {"exit": 10}
    return generator.choices(list(places), list(places.values()))[0]
