# SPDX-License-Identifier: Apache-2.0
"""One rank of `python -m lab between-nodes`, in its own or its node's network namespace."""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lab.two_level.between_nodes import GPUS, MODEL, NODES, PARTS, PUT_SIZES, TILE_BYTES
from lab.two_level.rank import interleave, make_overhead_runs, read_overheads, serve
from stretto.bench.network import IN_FLIGHT, PutStream
from stretto.cluster.two_level import Links
from stretto.collectives import Schedule
from stretto.collectives.algorithm import algorithm
from stretto.collectives.algorithms import find
from stretto.collectives.collective import AllToNext
from stretto.collectives.executor.host import run_on_host
from stretto.collectives.language import chunk
from stretto.collectives.two_level import TwoLevelGroup
from stretto.memory import HostMemory, Reach, allocate
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from stretto.parallel.comm import two_level as of_training

_TIMEOUT = 120.0
_CALLS = 10  # without data, one after another, as those of a step are


@algorithm(lambda nodes, gpus: AllToNext(nodes * gpus, gpus), source="MSCCLang, section 7.4: its baseline")
def direct_to_next(nodes: int, gpus: int) -> None:
    """Each rank sends its whole buffer to the next one."""
    for rank in range(nodes * gpus - 1):
        chunk(rank, "in", 0, gpus).copy(rank + 1, "out", 0)


def _compile_to_next() -> list[Schedule]:
    return [one.compile(nodes=NODES, gpus=GPUS) for one in (direct_to_next, find("all-to-next"))]


def _compile_all_to_all() -> list[Schedule]:
    direct = find("direct-all-to-all").compile(ranks=NODES * GPUS)
    return [direct, find("two-step-all-to-all").compile(nodes=NODES, gpus=GPUS)]


SCHEDULES: dict[str, Callable[[], list[Schedule]]] = {
    "all-to-next": _compile_to_next,
    "all-to-all": _compile_all_to_all,
}
"""The schedules of a kind, of which the first one is the others' baseline."""


def measure(given: dict[str, Any]) -> object:
    (kind,) = given["only"]
    with mock.patch.dict(os.environ, {"STRETTO_NODES": given["nodes"]}):
        match kind:
            case "puts":
                return _measure_puts(given)
            case "all-reduce":
                return _measure_all_reduce(given)
            case "training":
                return {axis: _measure_training(axis, given["links"], given["repeats"]) for axis in ("z", "data")}
        return _measure_schedules(kind, given)


def _measure_puts(given: dict[str, Any]) -> list[tuple[int, float]]:
    """(puts each way, median seconds) of each size."""
    memory = allocate(2 * IN_FLIGHT * max(PUT_SIZES), signals=3, timeout=_TIMEOUT)
    assert isinstance(memory, HostMemory)
    slots, found = PutStream(memory, 1 - dist.get_rank()), []
    for size in PUT_SIZES:
        count = max(4 * given["megabytes"] * 1_000_000 // size, 2 * IN_FLIGHT)  # the first and the last one count less
        seconds = []
        for _ in range(given["repeats"]):
            dist.barrier()
            seconds.append(slots.put_all(size, count))
        found.append((count, statistics.median(seconds)))
    dist.barrier()
    memory.close()
    return found


def _measure_all_reduce(given: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of each number of `PARTS`, and of an all-reduce of nearly nothing."""
    tensor, runs = torch.ones(given["megabytes"] * 250_000), dict[str, Callable[[], object]]()
    for parts in PARTS:
        group = TwoLevelGroup(parts=parts)
        runs[str(parts)] = partial(group.all_reduce, tensor, algorithm="ring")
        if parts == 1:
            runs["overhead"] = partial(group.all_reduce, tensor[:4], algorithm="ring")
    found = {name: times["median"] for name, times in interleave(runs, given["repeats"]).items()}
    return {"seconds": [found[str(parts)] for parts in PARTS], "overhead": found["overhead"]}


def _measure_schedules(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Of each schedule median seconds, those of a call of nearly nothing, and all ranks' messages between nodes."""
    found, runs, rank = dict[str, dict[str, float]](), dict[str, Callable[[], object]](), dist.get_rank()
    for schedule in SCHEDULES[kind]():
        for name, size in ((schedule.name, given["megabytes"] * 250_000), (f"{schedule.name} overhead", 1)):
            chunks = schedule.collective.input_chunks
            elements = max(size // chunks, 1) * chunks
            input, output = torch.full((elements,), float(rank)), torch.zeros(elements)
            runs[name] = partial(run_on_host, schedule, input, output, tile_bytes=TILE_BYTES, timeout=_TIMEOUT)
        counted = torch.tensor(_count_messages(runs[f"{schedule.name} overhead"]))
        dist.all_reduce(counted)
        found[schedule.name] = {"messages": int(counted)}
    times = interleave(runs, given["repeats"])
    for name, each in found.items():
        each |= {"seconds": times[name]["median"], "overhead": times[f"{name} overhead"]["median"]}
    return found


def _count_messages(run: Callable[[], object]) -> int:
    """The puts of data that this rank makes to ranks of other nodes."""
    count, put = 0, HostMemory.put

    def note(memory: HostMemory, peer: int, source: int, offset: int, size: int, *rest: Any, **options: Any) -> None:
        nonlocal count
        count += size > 0 and memory.reach[peer] is Reach.PUTS
        put(memory, peer, source, offset, size, *rest, **options)

    with mock.patch.object(HostMemory, "put", note):
        run()
    return count


def _measure_training(axis: str, bandwidths: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Median seconds of a step by the library, by each algorithm, by the model's choice for these links, and alone; and
    the software time of a message in the same rounds.

    The choice is by the time of a message in rounds before these.
    """
    whole, undelayed = TwoLevelGroup, TwoLevelGroup()
    overheads = make_overhead_runs(undelayed, _CALLS)

    def measure_in_rounds(runs: dict[str, Callable[[], object]]) -> tuple[dict[str, float], dict[str, float]]:
        """Median seconds of runs, and of a message in the same rounds."""
        found = {name: times["median"] for name, times in interleave(runs | overheads, repeats).items()}
        return found, read_overheads(undelayed, {name: found.pop(name) for name in overheads}, _CALLS)

    _, before = measure_in_rounds({})
    links = Links(before["inside"], latency=before["between"], **bandwidths)
    models: dict[str, Any] = {"alone": GPT(GPTConfig(**MODEL))}
    tokens = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for how, algorithms in {"flat": (), "ring": ("ring",), "recursive": ("recursive",), "auto": None}.items():

        def make(*arguments: Any, algorithms: Any = algorithms, **options: Any) -> TwoLevelGroup:
            chosen = options.pop("algorithms") if algorithms is None else algorithms
            options.pop("algorithms", None)
            return whole(*arguments, links=links, algorithms=chosen, **options)

        torch.manual_seed(1)
        world = dist.get_world_size()
        grid = Grid(z=world) if axis == "z" else Grid(data=world)
        mode: Any = False if how == "flat" else "auto" if how == "auto" else True
        with mock.patch.object(of_training, "TwoLevelGroup", make):
            models[how] = parallelize(GPT(GPTConfig(**MODEL)), grid, two_level=mode)

    def step(model: Any) -> None:
        model.zero_grad()
        model(tokens).float().square().mean().backward()

    runs: dict[str, Callable[[], object]] = {how: partial(step, model) for how, model in models.items()}
    return dict(zip(("seconds", "overheads"), measure_in_rounds(runs), strict=True))


if __name__ == "__main__":
    serve(measure)
