# SPDX-License-Identifier: Apache-2.0
"""Autotuning: functions that time a choice's candidates and make ranks agree, and `Autotuner`, which keeps the times.

Every tuned choice (layouts of a GEMM, kernel configurations of operators and embeddings, algorithms of collectives)
is made of these parts:

- `machine_key` names the kind of machine and the versions that times hold for.
- `time_runs` times a candidate on this rank; `slowest_times` makes them the group's, since a call takes as long as it
  takes on its slowest rank. All ranks then hold the same times, and so choose the same candidate.
- `TimeKeys` turns a typed problem and choice into the key under which the seconds are stored, and back.
- `Autotuner` reads the times that are known from the store, and adds new ones. It measures nothing itself.
- `decide_on_rank_0` gives all ranks what rank 0 has read or decided, where they may see other files.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from stretto.memory import shared_gpus
from stretto.memory.plain_data import broadcast_data
from stretto.tuning.store import TuningStore

Problem = TypeVar("Problem")
Choice = TypeVar("Choice")
Decision = TypeVar("Decision")


def machine_key(device: torch.device, *, operator: str = "", versions: Sequence[str] = (), links: str = "") -> str:
    """The name under which a store keeps the times of this kind of machine: GPU, links and versions, no host's name.

    operator: a prefix for times that are stored separately. versions: of libraries besides torch whose speed is
    measured.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    parts = (operator, gpu, links, f"torch {torch.__version__}", *versions)
    return ", ".join(filter(None, parts)) + shared_gpus.suffix()


def time_runs(
    run: Callable[[], Any],
    device: torch.device,
    *,
    repeats: int,
    warmups: int = 0,
    calls: int = 1,
    group: dist.ProcessGroup | None = None,
    barrier_each_time: bool = False,
) -> list[float]:
    """Seconds of a call in each of `repeats` runs, on a GPU between events on the current stream.

    warmups: runs before these that are not timed. calls: how many calls one run makes. group: its ranks meet before the
    first run or, with barrier_each_time, before each run, warm-ups included, once the run before has ended; otherwise
    runs on a GPU are issued back to back.
    """

    def meet(is_first: bool) -> None:
        if barrier_each_time or is_first:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if group is not None:
                dist.barrier(group)

    for warmup in range(warmups):
        meet(is_first=warmup == 0)
        run()
    seconds = []
    if device.type != "cuda":
        for repeat in range(repeats):
            meet(is_first=repeat == 0)
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    else:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for repeat, (start, end) in enumerate(events):
            meet(is_first=repeat == 0)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(device)
        seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
    return [second / calls for second in seconds]


def median_seconds(seconds: Sequence[float]) -> float:
    """The median, above 0 also where a clock is too coarse: a store keeps no other times."""
    return max(statistics.median(seconds), 1e-9)


def slowest_times(seconds: Any, device: torch.device, group: dist.ProcessGroup | None) -> Any:
    """The times of the slowest rank at each place of a list, or list of lists, that has one shape on all ranks.

    Collective. All ranks get the same numbers.
    """
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return times.tolist()


def decide_on_rank_0(
    decide: Callable[[], Decision], kind: type[Decision], group: dist.ProcessGroup | None = None
) -> Decision:
    """Return what `decide` returns on the group's rank 0, on all ranks; its ValueError is raised on all. Collective.

    kind: of what it returns (`stretto.memory.plain_data`).
    """
    found: tuple[Any, str] = None, ""
    if dist.get_rank(group) == 0:
        try:
            found = decide(), ""
        except ValueError as error:
            found = None, str(error)
    decision, refusal = broadcast_data(found, group, tuple[kind | None, str])  # type: ignore[valid-type]
    if refusal:
        raise ValueError(refusal)
    return decision


@dataclass(frozen=True)
class TimeKeys(Generic[Problem, Choice]):
    """Names by which a store keeps the seconds of one choice for one problem.

    name: the key. parse: what a key names; ValueError for a key that is another's, or of another version.
    """

    name: Callable[[Problem, Choice], str]
    parse: Callable[[str], tuple[Problem, Choice]]


class Autotuner(Generic[Problem, Choice]):
    """Reads and keeps the measured times of one kind of choice on one kind of machine; `time_runs` measures them."""

    def __init__(self, machine: str, keys: TimeKeys[Problem, Choice], store: TuningStore | None = None) -> None:
        self.machine = machine
        self.keys = keys
        self.store = store or TuningStore()

    def read(self) -> dict[Problem, dict[Choice, float]]:
        """The seconds of each choice for each problem that is known. What this version cannot read is left out."""
        known: dict[Problem, dict[Choice, float]] = {}
        for key, seconds in self.store.read(self.machine).items():
            try:
                problem, choice = self.keys.parse(key)
            except ValueError:
                continue
            if len(seconds) == 1:
                known.setdefault(problem, {})[choice] = seconds[0]
        return known

    def keep(self, problem: Problem, times: Mapping[Choice, float]) -> None:
        """Add the times of one problem's choices to the store, on this rank alone."""
        self.keep_all({problem: times})

    def keep_all(self, times: Mapping[Problem, Mapping[Choice, float]]) -> None:
        """Add the times of several problems' choices to the store, on this rank alone."""
        self.store.add(
            self.machine,
            {
                self.keys.name(problem, choice): [second]
                for problem, seconds in times.items()
                for choice, second in seconds.items()
            },
        )
