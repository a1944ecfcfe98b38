# SPDX-License-Identifier: Apache-2.0
"""A rank of `python -m tests.stress`: runs batches of calls and compares their results on the device.

The host reads the counts of wrong results once, at the end of a batch. The parent starts each rank as a process, since
some settings are read from the environment at import: whether Triton interprets, and the MPS percentage. Requests and
replies are sent through a pipe.
"""

import contextlib
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tests.stress.harness.catalogue import Check, Configuration, StressCase
    from tests.stress.harness.team import Team

GRAPH_CALLS = 8  # that one CUDA graph holds
MODES = ("eager", "graph", "groups")
# Of waits, on the device too: shorter than the parent's limit for a batch, so that the missing rank is reported.
GROUP_LIMIT = timedelta(seconds=100)

_RECENT = 3  # calls before an input is used again: a workspace's stale data of the same input would pass the check
_LATE_ON_DEVICE, _LATE_ON_HOST = 0.04, 0.004  # fractions of calls
_MAX_CYCLES = 600_000  # that the GPU of a late rank sleeps
_MAX_SECONDS = 0.003  # that the host of a late rank sleeps
_CPU_LATE, _CPU_MOST_SECONDS = 0.2, 0.01
_TRACE_CHARACTERS = 2000


@dataclass(frozen=True)
class WorkerSetting:
    """The settings of a worker, passed by its parent."""

    rank: int
    ranks: int
    store: str
    device: str
    seed: int
    catalogues: tuple[str, ...]
    prepare: str = ""


@dataclass(frozen=True)
class CallBatch:
    """A batch of calls of one configuration. number: of the batch, by which it seeds its random choices."""

    name: str
    number: int
    calls: int
    mode: str = "eager"


@dataclass(frozen=True)
class Poison:
    """A request to fill a configuration's workspaces with poison, while no rank is in a call."""

    name: str


@dataclass(frozen=True)
class BatchOutcome:
    """The outcome of a request on one rank: calls, how many were wrong, and the number of the first wrong one.

    raised: why the request failed. launched: kernels launched for the first time since the last outcome. about: the
    device, in the first outcome.
    """

    calls: int = 0
    wrong: int = 0
    first_wrong: int = -1
    raised: str = ""
    seconds: float = 0.0
    launched: tuple[str, ...] = ()
    about: str = ""


@dataclass
class _State:
    """A rank's state: its groups (teams), and its cases by configuration and team."""

    setting: WorkerSetting
    catalogue: "dict[str, Configuration]"
    device: "torch.device"
    teams: "dict[str, Team]"
    streams: "dict[str, torch.cuda.Stream]" = field(default_factory=dict)
    cases: "dict[tuple[str, str], StressCase]" = field(default_factory=dict)
    own: random.Random = field(default_factory=random.Random)
    launched: set[str] = field(default_factory=set)


def main() -> None:
    """Serve requests until the parent exits."""
    pipe = Connection(int(sys.argv[1]))
    setting: WorkerSetting = pipe.recv()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        state = _start(setting)
    except Exception:  # noqa: BLE001  (the parent reports any)
        pipe.send(BatchOutcome(raised=_trace()))
        return
    pipe.send(BatchOutcome(about=_describe_device(state)))
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            request = pipe.recv()
            began = time.perf_counter()
            try:
                outcome = _poison(state, request) if isinstance(request, Poison) else _run(state, request, began)
            except Exception:  # noqa: BLE001
                outcome = BatchOutcome(raised=_trace())
            pipe.send(outcome)
    os._exit(0)  # no teardown, whose barrier would wait for ranks that may have exited


def _end_with_parent(parent: int) -> None:
    """Exit this process, even during a request, when its parent has exited."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _trace() -> str:
    return traceback.format_exc()[-_TRACE_CHARACTERS:]


def _start(setting: WorkerSetting) -> _State:
    import torch
    import torch.distributed as dist

    if setting.prepare:
        import_module(setting.prepare).install()
    from tests.stress.harness.catalogue import load_catalogue
    from tests.stress.harness.team import Team, mix

    from stretto.memory import shared_gpus

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if setting.device == "cuda":
        device = torch.device("cuda", shared_gpus.choose_gpu(setting.rank))
        torch.cuda.set_device(device)
    store = dist.FileStore(setting.store, setting.ranks)
    backend = shared_gpus.default_backend(device.type)
    dist.init_process_group(backend, store=store, rank=setting.rank, world_size=setting.ranks, timeout=GROUP_LIMIT)
    world = dist.group.WORLD
    assert world is not None
    launched: set[str] = set()
    _watch_launches(launched)
    return _State(
        setting,
        load_catalogue(setting.catalogues),
        device,
        {"world": Team(world, device, setting.seed)},
        own=random.Random(mix(setting.seed, "own", setting.rank)),
        launched=launched,
    )


def _describe_device(state: _State) -> str:
    import torch

    if state.device.type == "cpu":
        return "CPU ranks, interpreted"
    properties = torch.cuda.get_device_properties(state.device)
    return f"{properties.name}, {properties.multi_processor_count} multiprocessors a rank"


def _watch_launches(launched: set[str]) -> None:
    """Record the name of each Triton kernel that Triton's own launcher launches.

    The first launch of a specialization goes through it, also where `stretto.tiles.Launches` repeats later ones.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def watch(kind: Any, method: str) -> None:
        stock = getattr(kind, method)

        def run(self: Any, *arguments: Any, **named: Any) -> Any:
            launched.add(f"{self.fn.__module__}.{self.fn.__qualname__}".removeprefix("stretto."))
            return stock(self, *arguments, **named)

        setattr(kind, method, run)

    watch(JITFunction, "run")
    watch(InterpretedFunction, "__getitem__")


def _find_team(state: _State, name: str) -> "Team":
    """A group of ranks, made at its first use: "world", "again" (all ranks once more) or "halves" (one of two)."""
    import torch.distributed as dist
    from tests.stress.harness.team import Team

    if name not in state.teams:
        ranks = range(state.setting.ranks)
        parts = [list(ranks)] if name == "again" else [list(ranks[: len(ranks) // 2]), list(ranks[len(ranks) // 2 :])]
        for part in parts:
            group = dist.new_group(part, timeout=GROUP_LIMIT)
            if state.setting.rank in part:
                state.teams[name] = Team(group, state.device, state.setting.seed)
    return state.teams[name]


def _find_case(state: _State, name: str, team: str) -> "StressCase":
    key = name, team
    if key not in state.cases:
        state.cases[key] = state.catalogue[name].make(_find_team(state, team))
    return state.cases[key]


def _poison(state: _State, request: Poison) -> BatchOutcome:
    _synchronize(state)
    for (name, _), case in state.cases.items():
        if name == request.name:
            case.poison()
    _synchronize(state)
    return BatchOutcome()


def _synchronize(state: _State) -> None:
    import torch

    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


def _run(state: _State, batch: CallBatch, began: float) -> BatchOutcome:
    """Run a batch of calls, and read the counts of wrong results at its end."""
    import torch
    from tests.stress.harness.team import mix

    shared = random.Random(mix(state.setting.seed, batch.name, batch.number))
    configuration = state.catalogue[batch.name]
    counts = torch.zeros(batch.calls, dtype=torch.int32, device=state.device)
    match batch.mode:
        case "graph":
            calls = _run_graph(state, _find_case(state, batch.name, "world"), batch.calls, shared, counts)
        case "groups":
            names = ["world", "again"]
            if configuration.takes_halves and state.setting.ranks >= 4:
                # Two groups at a time: three, whose kernels start in another order on each rank, may deadlock.
                names = shared.choice([names, ["world", "halves"], ["again", "halves"]])
            calls = _run_groups(state, batch.name, names, batch.calls, shared, counts)
        case _:
            case = _find_case(state, batch.name, "world")
            entries = draw_entries(case.entries, batch.calls, shared)
            for number, entry in enumerate(entries):
                _be_late(state)
                _judge(case, case.call(entry), counts[number])
            calls = batch.calls
    _synchronize(state)
    for (name, _), case in state.cases.items():
        if name == batch.name:
            case.check()
    found = counts.tolist()
    wrong = sum(found)
    first = next((number for number, count in enumerate(found) if count), -1)
    launched = tuple(sorted(state.launched))
    state.launched.clear()
    return BatchOutcome(calls, wrong, first, "", time.perf_counter() - began, launched)


def _run_graph(state: _State, case: "StressCase", calls: int, shared: random.Random, counts: "torch.Tensor") -> int:
    """Capture a few calls and replay the graph many times. Returns the number of calls."""
    import torch

    entries = draw_entries(case.entries, min(calls, GRAPH_CALLS), shared)
    for number, entry in enumerate(entries):  # a first call compiles and allocates, which cannot be captured
        _judge(case, case.call(entry), counts[number])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(state.device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number, entry in enumerate(entries):
            _judge(case, case.call(entry), counts[number])
    replays = max(calls // len(entries), 1)
    for _ in range(replays):
        _be_late(state)
        graph.replay()
    torch.cuda.synchronize(state.device)
    del graph
    case.release_graph()
    return (replays + 1) * len(entries)


def _run_groups(
    state: _State, name: str, teams: Sequence[str], calls: int, shared: random.Random, counts: "torch.Tensor"
) -> int:
    """Run calls of several groups, in the same random order on all ranks.

    Each group has its own stream, so that kernels of different groups start in another order on each rank. If the
    kernels fill the GPU, all groups share one stream, as the library then requires.
    """
    import torch

    cases = {team: _find_case(state, name, team) for team in teams}
    have_room = all(case.leaves_room for case in cases.values())
    for team in teams:
        if team not in state.streams and state.device.type == "cuda":
            state.streams[team] = torch.cuda.Stream(state.device)
    _synchronize(state)
    entries = {team: draw_entries(case.entries, calls, shared) for team, case in cases.items()}
    for number in range(calls):
        team = shared.choice(teams)
        stream = state.streams.get(team if have_room else teams[0])
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            _be_late(state)
            _judge(cases[team], cases[team].call(entries[team][number]), counts[number])
    return calls


def draw_entries(entries: int, calls: int, shared: random.Random) -> list[int]:
    """Choose the input of each call at random: all inputs in the first calls, and never one of the last few."""
    drawn = shared.sample(range(entries), entries)
    recent = min(_RECENT, entries - 1)
    while len(drawn) < calls:
        kept_apart = drawn[len(drawn) - recent :]
        drawn.append(shared.choice([entry for entry in range(entries) if entry not in kept_apart]))
    return drawn[:calls]


def _be_late(state: _State) -> None:
    """Sometimes put this rank's GPU or host to sleep before its next call."""
    import torch

    own = state.own
    if state.device.type == "cpu":
        if own.random() < _CPU_LATE:
            time.sleep(own.random() * _CPU_MOST_SECONDS)
        return
    if own.random() < _LATE_ON_DEVICE:
        torch.cuda._sleep(own.randrange(_MAX_CYCLES))
    if own.random() < _LATE_ON_HOST:
        time.sleep(own.random() * _MAX_SECONDS)


def _judge(case: "StressCase", checks: "Sequence[Check]", count: "torch.Tensor") -> None:
    """Count the call as wrong, on the device, if a result differs; then poison the memory that it allocated."""
    wrong = None
    for found, expected, mask in checks:
        differs = found != expected
        if mask is not None:
            differs &= mask
        any_differs = differs.any()
        wrong = any_differs if wrong is None else wrong | any_differs
    if wrong is not None:
        count.add_(wrong)
    if case.are_outputs_new:
        for found, _, _ in checks:
            found.fill_(float("nan") if found.is_floating_point() else 77)
