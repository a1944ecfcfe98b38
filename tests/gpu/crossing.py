# SPDX-License-Identifier: Apache-2.0
"""Stresses two crossing groups on four ranks, beside a stand-in for NCCL, with launches in every order.

    python -m tests.gpu.crossing --rounds 10000 --seconds 120 --seed 7 --out crossing.json

Ranks 0 to 3 form a grid of 2 x 2, and each is in two groups, its row ({0, 1} or {2, 3}) and its column ({0, 2} or
{1, 3}). In a round each rank launches three kernels that wait for other ranks, on a stream each: one of its row, one of
its column, and a stand-in for an NCCL collective of all four ranks. The stand-in has 32 programs, which stay resident
until all programs of every other rank have begun. Ranks that share a GPU have fewer multiprocessors; the stand-in then
has as many programs as fit beside a kernel of ours: 7 on 16 multiprocessors. If two kernels filled a rank's
multiprocessors so that the third could not start, and other ranks had launched in other orders, each kernel might wait
for one that cannot start: a deadlock.

Sixteen successive rounds take all 2^4 combinations of which kernel, the row's or the column's, each rank launches
first; the place of the stand-in is random on each rank. In three rounds of four, a rank's streams first wait for each
other and then sleep for random times on the device, so that kernels start in the order of their launches. The host
reads the results after a batch of rounds. Numbers are whole, so results are exact.

A deadlock ends at the groups' time limit, and raises PeerError with the round, the kinds of kernels and all orders.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from stretto import ops
from stretto.memory import PeerError, SymmetricMemory, allocate, failures
from stretto.memory.gpus import NCCL_BLOCKS, bound_blocks
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.tiles.intrinsics import now
from tests.stress.embedding import EmbeddingCase, LookUp
from tests.stress.harness.catalogue import Check, StressCase
from tests.stress.harness.team import Team, mix
from tests.stress.operators import OperatorCase, OperatorVariant

RANKS = 4
GROUPS = {"row": ((0, 1), (2, 3)), "column": ((0, 2), (1, 3))}
STAND_IN = "stand-in"
ORDERS_OF_GROUPS = 1 << RANKS
STAND_IN_PROGRAMS = NCCL_BLOCKS
"""The most programs of the stand-in: as many as NCCL's kernels have blocks by default over NVLink."""
STAND_IN_WARPS = 16
"""A multiprocessor then has no room for a program that takes all registers, as beside a block of NCCL's."""

_BATCH = 2 * ORDERS_OF_GROUPS  # rounds between two looks by the host
_MAX_GAP = 60_000  # cycles that a rank's GPU sleeps between two launches of a round: up to 30 microseconds
_LATE = 0.25  # share of rounds in which one of a rank's streams sleeps longer
_MAX_LATE = 400_000
_LONG = 100_000_000  # cycles: tens of milliseconds
_NEVER = 2**31 - 1
_MANY_PROGRAMS = 1024  # more than a GPU has places for: the library clamps what may wait

# A program of this takes all registers of a multiprocessor of sm_90, and nearly all of its shared memory.
_WIDE = ops.Blocks(128, 256, 64, 2, 8, 4, _MANY_PROGRAMS)
_PACKETS = ops.KernelConfig(exchange="packets")
_TILES = ops.KernelConfig(blocks=_WIDE, transfer="programs", movers=_MANY_PROGRAMS, piece_bytes=4096)
_REGIONS = {"LL": 4 << 20, "LL128": 1 << 20, "Simple": 4 << 20}
_ELEMENTS = 1 << 18  # of a collective: several rounds of all blocks by each protocol


class AllReduceCase(StressCase):
    """Calls of a fused kernel with blocks of 1024 threads, which take all registers of a multiprocessor."""

    entries = 4
    are_outputs_new = False

    def __init__(self, algorithm: str, protocol: str, timeout: float, team: Team) -> None:
        from stretto.collectives.algorithms import find
        from stretto.collectives.executor.cuda.fused.codegen import WIDE_THREADS
        from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
        from stretto.collectives.executor.cuda.variant import Variant
        from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace

        workspace = team.keep("collectives", lambda: CollectiveWorkspace(team.group, regions=_REGIONS, timeout=timeout))
        schedule = find(algorithm).compile(ranks=team.world, in_place=False)
        self._kernel = FusedScheduleKernel(schedule, workspace, Variant("int32", "sum", protocol), in_place=False)
        self._kernel._choose_threads = lambda num_vectors, max_blocks: WIDE_THREADS
        self._inputs, self._expected = [], []
        for entry in range(self.entries):
            every = [
                team.integers((_ELEMENTS,), "all-reduce", entry, peer, low=-9, high=9) for peer in range(team.world)
            ]
            self._inputs.append(every[team.rank].int())
            self._expected.append(torch.stack(every).sum(0).int())
        self._out = torch.empty_like(self._inputs[0])

    def call(self, entry: int) -> Sequence[Check]:
        self._out.fill_(77)
        self._kernel(self._inputs[entry], self._out)
        return [Check(self._out, self._expected[entry])]


def _operator(call: OperatorVariant) -> Callable[[float, Team], StressCase]:
    return lambda timeout, team: OperatorCase(call, team)


def _look_up(name: str, look_up: LookUp) -> Callable[[float, Team], StressCase]:
    return lambda timeout, team: EmbeddingCase(look_up, team, f"crossing {name}")


_KINDS: dict[str, Callable[[float, Team], StressCase]] = {
    "one-shot": _operator(OperatorVariant("matmul_all_reduce", 4, 4096, 256, _PACKETS)),
    "two-shots": _operator(OperatorVariant("matmul_all_reduce", 4, 4096, 256, _PACKETS._replace(shots=2))),
    "scattered packets": _operator(OperatorVariant("matmul_reduce_scatter", 2, 4096, 256, _PACKETS)),
    "pushed rows": _operator(OperatorVariant("all_gather_matmul", 128, 4096, 128, _TILES)),
    "rows by copies": _operator(
        OperatorVariant("all_gather_matmul", 128, 4096, 128, _TILES._replace(transfer="copies"))
    ),
    # More tasks than programs, and more programs than the GPU has places for: two of eight warps with 128 registers a
    # thread fill a multiprocessor.
    "look-up": _look_up("wide", LookUp(dims=(2048, 1024), config=LaunchConfig(1, 8, 1, 8, 4, "mixed"))),
    "look-up, short rows": _look_up("short", LookUp(dims=(16, 32, 16))),
    "look-up's gradients": _look_up("gradients", LookUp("dense", dims=(256, 128))),
    "one-shot all-reduce by LL": partial(AllReduceCase, "one-shot-all-reduce", "LL"),
    "two-shot all-reduce by LL": partial(AllReduceCase, "two-shot-all-reduce", "LL"),
    "two-shot all-reduce by Simple": partial(AllReduceCase, "two-shot-all-reduce", "Simple"),
}
NOT_COVERED = ("rows by copies",)
"""Two groups of these may deadlock: docs/decisions/014-multiprocessors-left-free.md."""
KINDS = tuple(kind for kind in _KINDS if kind not in NOT_COVERED)
SAMPLED_KINDS = ("pushed rows", "look-up", "two-shot all-reduce by LL")
"""One of each family, since compiling all takes longer than running them."""


@dataclass(frozen=True)
class Setting:
    """Rounds that are run, or as many as there are in so many seconds; kinds: every pair of them, for row and column.

    timeout: seconds that a wait may take. ValueError for a kind that there is not.
    """

    seed: int
    rounds: int
    seconds: float
    kinds: tuple[str, ...] = KINDS
    timeout: float = 20.0

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in _KINDS]
        if unknown or not self.kinds:
            raise ValueError(f"there are no kinds {unknown}: there are {', '.join(KINDS)}")
        if self.rounds < 1 or self.seconds <= 0 or self.timeout <= 0:
            raise ValueError(
                f"rounds, seconds and timeout are more than 0, not {self.rounds}, {self.seconds}, {self.timeout}"
            )


def find_order(seed: int, number: int, rank: int) -> tuple[str, ...]:
    """The order in which a rank launches "row", "column" and "stand-in" in a round."""
    order = ["row", "column"] if (number >> rank) & 1 == 0 else ["column", "row"]
    order.insert(random.Random(mix(seed, "order", number, rank)).randrange(3), STAND_IN)
    return tuple(order)


def find_pair(setting: Setting, batch: int) -> tuple[str, str]:
    """The kinds of the row's and of the column's kernels in a batch: all pairs in turn, in a random order."""
    pairs = list(itertools.product(setting.kinds, repeat=2))
    shuffled = random.Random(mix(setting.seed, "pairs", batch // len(pairs))).sample(pairs, len(pairs))
    return shuffled[batch % len(pairs)]


@triton.jit
def _read_clock(clock):  # type: ignore[no-untyped-def]
    """Nanoseconds, the same to all threads of a program: what an atomic has made of a word of memory."""
    tl.atomic_max(clock, now(), sem="relaxed", scope="gpu")
    return tl.atomic_max(clock, 0, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["number", "limit", "rank"])
def stand_in(addresses, counters, clock, late, begun, failed, number, limit, rank, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stay resident on the GPU until all programs of this launch have begun on every rank.

    addresses: int64 [WORLD], where each rank's counters lie. counters: int32 [WORLD], this rank's: how many programs of
    each peer have begun. number: of the launch, from 1 on. limit: nanoseconds, after which the program gives up, as it
    does where a wait of this process has failed (failed: int32 [1]). late: int32 [1], the first launch that gave up.
    begun: int32 [WORLD], how many programs of each peer had begun when it did.
    Signals: once at its start each program adds 1 to its rank's counter at every peer.
    Waits: until each peer's counter shows all of its programs.
    """
    for distance in tl.static_range(1, WORLD):
        there = tl.load(addresses + (rank + distance) % WORLD).to(tl.pointer_type(tl.int32))
        tl.atomic_add(there + rank, 1, sem="release", scope="sys")
    target = number * tl.num_programs(0)
    for distance in tl.static_range(1, WORLD):
        counter = counters + (rank + distance) % WORLD
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
        began = tl.cast(0, tl.int64)
        looks = 0
        waits = seen < target
        while waits:
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
            waits = seen < target
            looks += 1
            if waits & (looks % 64 == 0):
                time = _read_clock(clock)
                began = tl.where(began == 0, time, began)
                first_late = tl.atomic_add(late, 0, sem="relaxed", scope="gpu")
                has_failed = tl.atomic_add(failed, 0, sem="relaxed", scope="gpu")
                is_over = (time - began > limit) | (has_failed != 0) | (first_late <= number)
                tl.atomic_min(late, number, mask=is_over, sem="relaxed", scope="gpu")
                have_begun = seen - target + tl.num_programs(0)
                tl.store(begun + (rank + distance) % WORLD, have_begun, mask=is_over & (first_late >= number))
                waits = (time - began <= limit) & (has_failed == 0) & (first_late > number)


@triton.jit(do_not_specialize=["number"])
def note_end(ended, first, failed, late, number, NEVER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Note that a stream's kernel of a round has ended: in `ended` as long as no wait has failed, and else in `first`.

    ended: int32 [1], the last such round. first: int32 [1], the least round after which a wait of this process had
    failed. failed: int32 [1], this process's failure flag. late: see `stand_in`.
    """
    has_failed = tl.atomic_add(failed, 0, sem="relaxed", scope="gpu") != 0
    is_late = tl.atomic_add(late, 0, sem="relaxed", scope="gpu") != NEVER
    tl.atomic_min(first, number, mask=has_failed, sem="relaxed", scope="gpu")
    tl.store(ended, number, mask=(has_failed | is_late) == 0)


@dataclass
class _State:
    """A rank's groups, kernels and streams. stand_ins: how many stand-ins it has launched."""

    setting: Setting
    device: torch.device
    rank: int
    own: random.Random
    teams: dict[str, Team]
    streams: dict[str, torch.cuda.Stream]
    memory: SymmetricMemory
    addresses: Tensor
    clock: Tensor
    late: Tensor
    begun: Tensor
    ended: dict[str, Tensor]
    first_failed: dict[str, Tensor]
    cases: dict[tuple[str, str], StressCase] = field(default_factory=dict)
    stand_ins: int = 0
    stand_in_programs: int = STAND_IN_PROGRAMS


def cross(setting: Setting) -> dict[str, Any]:
    """Run the rounds on one of the four ranks of a job; returns the number of rounds of each pair of kinds.

    PeerError, on all ranks, where a wait has failed; AssertionError where a result is wrong. Both name seed, round,
    kinds and orders.
    """
    assert dist.get_world_size() == RANKS
    state = _make_state(setting)
    try:
        _launch_all_once(state)
        return _run_batches(state)
    finally:
        _leave(state)


def _make_state(setting: Setting) -> _State:
    """Make groups, streams and the stand-in's memory. All ranks call it."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    teams: dict[str, Team] = {}
    for name, parts in GROUPS.items():
        for part in parts:
            group = dist.new_group(list(part), timeout=timedelta(seconds=setting.timeout))
            if rank in part:
                teams[name] = Team(group, device, setting.seed)
    memory = allocate(4 * RANKS, None, backend="cuda")
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    room: list[int] = [0] * RANKS
    dist.all_gather_object(room, multiprocessors - bound_blocks(multiprocessors) - 1)
    names = (*teams, STAND_IN)
    return _State(
        setting,
        device,
        rank,
        random.Random(mix(setting.seed, "own", rank)),
        teams,
        {name: torch.cuda.Stream(device) for name in names},
        memory,
        torch.tensor(memory.addresses, dtype=torch.int64, device=device),  # type: ignore[attr-defined]
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.full((1,), _NEVER, dtype=torch.int32, device=device),
        torch.full((RANKS,), -1, dtype=torch.int32, device=device),
        {name: torch.full((1,), -1, dtype=torch.int32, device=device) for name in names},
        {name: torch.full((1,), _NEVER, dtype=torch.int32, device=device) for name in names},
        stand_in_programs=max(1, min(STAND_IN_PROGRAMS, *room)),
    )


def _launch_all_once(state: _State) -> None:
    """Make all kernels and inputs, and launch everything once, so that all is loaded. All ranks call it."""
    setting, device = state.setting, state.device
    for kind in setting.kinds:
        for name, team in state.teams.items():
            state.cases[name, kind] = _KINDS[kind](setting.timeout, team)
    unused = _make_words(1, device)
    torch.cuda.synchronize(device)
    for kind in setting.kinds:
        for name in state.teams:
            dist.barrier()  # which nobody leaves while another rank still compiles the last kind
            with torch.cuda.stream(state.streams[name]):
                for entry in range(state.cases[name, kind].entries):
                    _launch_group(state, name, kind, entry, 0, unused[0])
            failures.synchronize(device)
    dist.barrier()
    with torch.cuda.stream(state.streams[STAND_IN]):
        torch.cuda._sleep(1)
        _launch_stand_in(state, 0)
    failures.synchronize(device)
    _require_concurrency(state)
    dist.barrier()


def _make_words(count: int, device: torch.device) -> Tensor:
    """bool [count], each at an address that has 16 as a factor.

    torch has other kernels for other alignments, and a kernel that is launched for the first time is loaded then, which
    waits until the GPU is idle: two ranks' hosts would wait for each other's kernels.
    """
    return torch.zeros(count, 16, dtype=torch.bool, device=device)[:, 0]


def _require_concurrency(state: _State) -> None:
    """Raise AssertionError if a stream's kernels wait for another's: all launch orders would then be one."""
    for first, second in itertools.permutations(state.streams, 2):
        with torch.cuda.stream(state.streams[first]):
            torch.cuda._sleep(_LONG)
            last = torch.cuda.Event()
            last.record()
        with torch.cuda.stream(state.streams[second]):
            torch.cuda._sleep(1)
            torch.cuda.current_stream().synchronize()
        assert not last.query(), f"the {second}'s stream waits for the {first}'s"
        torch.cuda.synchronize(state.device)


def _launch_group(state: _State, name: str, kind: str, entry: int, number: int, is_wrong: Tensor) -> None:
    """Launch a group's kernel on the current stream, and what looks at its result and at the failure flag after it."""
    case = state.cases[name, kind]
    checks = case.call(entry)
    for found, expected, mask in checks:
        differs = found != expected
        is_wrong.logical_or_((differs if mask is None else differs & mask).any())
    if case.are_outputs_new:
        for found, _, _ in checks:  # the allocator gives this memory to a later call
            found.fill_(float("nan") if found.is_floating_point() else 77)
    _note_end(state, name, number)


def _launch_stand_in(state: _State, number: int) -> None:
    state.stand_ins += 1
    failed = failures.failure_flag(state.device)
    counters = state.memory.buffer().view(torch.int32)
    limit = int(state.setting.timeout * 1e9)
    arguments = (
        state.addresses,
        counters,
        state.clock,
        state.late,
        state.begun,
        failed,
        state.stand_ins,
        limit,
        state.rank,
    )
    stand_in[(state.stand_in_programs,)](*arguments, WORLD=RANKS, num_warps=STAND_IN_WARPS)
    _note_end(state, STAND_IN, number)


def _note_end(state: _State, name: str, number: int) -> None:
    words = state.ended[name], state.first_failed[name], failures.failure_flag(state.device), state.late
    note_end[(1,)](*words, number, NEVER=_NEVER, num_warps=1)


def _run_batches(state: _State) -> dict[str, Any]:
    setting, began = state.setting, time.monotonic()
    rounds, seconds = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    orders: set[tuple[tuple[str, ...], ...]] = set()
    done = 0
    for batch in itertools.count():
        pair, size = find_pair(setting, batch), min(_BATCH, setting.rounds - done)
        started = time.monotonic()
        problem = _run_batch(state, pair, done, size)
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, (problem, time.monotonic() - began > setting.seconds))
        if any(text for text, _ in every):
            _raise(setting, pair, [text for text, _ in every])
        rounds[pair] += size
        seconds[pair] += time.monotonic() - started  # type: ignore[assignment]
        orders |= {_find_orders(setting.seed, number) for number in range(done, done + size)}
        done += size
        if done == setting.rounds or every[0][1]:
            break
    return {
        "seed": setting.seed,
        "rounds": done,
        "seconds": round(time.monotonic() - began, 2),
        "device": torch.cuda.get_device_name(state.device),
        "multiprocessors of a rank": torch.cuda.get_device_properties(state.device).multi_processor_count,
        "programs of the stand-in": state.stand_in_programs,
        "orders": len(orders),
        "rows": [
            {"row": row, "column": column, "rounds": rounds[row, column], "seconds": round(seconds[row, column], 3)}
            for row, column in itertools.product(setting.kinds, repeat=2)
        ],
    }


def _find_orders(seed: int, number: int) -> tuple[tuple[str, ...], ...]:
    return tuple(find_order(seed, number, rank) for rank in range(RANKS))


def _run_batch(state: _State, pair: tuple[str, str], first: int, size: int) -> "tuple[int, bool, str] | None":
    """Rounds without a look by the host; returns what went wrong on this rank: see `_find_problem`."""
    kinds = dict(zip(GROUPS, pair, strict=True))
    are_wrong = {name: _make_words(size, state.device) for name in kinds}
    torch.cuda.synchronize(state.device)
    problem: tuple[int, bool, str] | None = None
    number = first
    try:
        for number in range(first, first + size):
            _run_round(state, kinds, number, {name: wrong[number - first] for name, wrong in are_wrong.items()})
    except PeerError as error:  # the host has seen a failed wait of an earlier round
        problem = number, True, str(error)
    torch.cuda.synchronize(state.device)
    return _find_problem(state, first, are_wrong) or problem


def _run_round(state: _State, kinds: dict[str, str], number: int, are_wrong: dict[str, Tensor]) -> None:
    """Launch one rank's three kernels of a round in their order."""
    seed, own = state.setting.seed, state.own
    order = find_order(seed, number, state.rank)
    entries = random.Random(mix(seed, "entries", number))
    before = {}
    if mix(seed, "joined", number) % 4:  # in the others, streams run on from round to round by themselves
        before = {name: state.streams[name].record_event() for name in order}
    late = own.choice(order) if own.random() < _LATE else None
    drawn = {name: entries.randrange(1 << 16) for name in kinds}
    slept = 0
    for name in order:
        stream = state.streams[name]
        with torch.cuda.stream(stream):
            for other, event in before.items():
                if other != name:
                    stream.wait_event(event)
            cycles = slept + (own.randrange(_MAX_LATE) if name == late else 0)
            slept += own.randrange(_MAX_GAP)
            if cycles:
                torch.cuda._sleep(cycles)
            if name == STAND_IN:
                _launch_stand_in(state, number)
            else:
                kind = kinds[name]
                _launch_group(state, name, kind, drawn[name] % state.cases[name, kind].entries, number, are_wrong[name])


def _find_problem(state: _State, first: int, are_wrong: dict[str, Tensor]) -> "tuple[int, bool, str] | None":
    """(round, whether a wait has failed, what happened) of the first thing that went wrong on this rank; None: nothing.

    The device is idle.
    """
    ended = ", ".join(f"{name} {int(number)}" for name, number in state.ended.items())
    ended = f" (rounds ended: {ended})"
    failed_rounds = {name: int(number) for name, number in state.first_failed.items()}
    try:
        failures.check()
    except PeerError as error:
        return min(failed_rounds.values()), True, str(error) + ended
    if int(state.late) != _NEVER:
        begun = ", ".join(f"{count} of rank {peer}" for peer, count in enumerate(state.begun.tolist()) if count >= 0)
        text = f"the stand-in's launch {int(state.late)} waited in vain: of {state.stand_in_programs} programs {begun}"
        return -1, True, f"{text} had begun{ended}"
    for name, wrong in are_wrong.items():
        places = wrong.nonzero().flatten().tolist()
        if places:
            return first + places[0], False, f"{len(places)} results of the {name} are wrong"
    return None


def _raise(setting: Setting, pair: tuple[str, str], problems: Sequence["tuple[int, bool, str] | None"]) -> None:
    found = [(rank, problem) for rank, problem in enumerate(problems) if problem]
    number = min((problem[0] for _, problem in found if 0 <= problem[0] < _NEVER), default=-1)
    failed = "; ".join(f"rank {rank}, round {at}: {text}" for rank, (at, _, text) in found)
    orders = " | ".join(
        f"rank {rank}: {', '.join(order)}" for rank, order in enumerate(_find_orders(setting.seed, max(number, 0)))
    )
    text = (
        f"seed {setting.seed}, {pair[0]!r} in rows beside {pair[1]!r} in columns, round {number}, launched in the "
        f"orders {orders}. {failed}"
    )
    raise PeerError(text) if any(problem[1] for _, problem in found) else AssertionError(text)


def _leave(state: _State) -> None:
    """Free all memory and groups, including failed ones: later tests run in these processes."""
    torch.cuda.synchronize(state.device)
    with contextlib.suppress(PeerError):
        failures.check()  # so that the end of the groups does not raise it again
    state.cases.clear()
    for team in state.teams.values():
        if "collectives" in team.kept:
            team.kept["collectives"].close()
        team.kept.clear()
        dist.destroy_process_group(team.group)
    state.teams.clear()
    state.memory.close()
    gc.collect()


def main() -> int:
    """Start ranks and run the rounds, under MPS if they share a GPU. Returns 1 for a wrong result or a deadlock."""
    from tests.gpu import crossing  # by this name the ranks know the module
    from tests.gpu.sharing import GpuRanks

    parser = argparse.ArgumentParser(prog="python -m tests.gpu.crossing", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no batch of rounds begins")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default=";".join(KINDS), help='with ";" between: ' + "; ".join(KINDS))
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a wait may take")
    parser.add_argument("--out", type=Path, default=None, help="a file for the results as JSON")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    kinds = tuple(kind.strip() for kind in given.kinds.split(";") if kind.strip())
    setting = crossing.Setting(seed, given.rounds, given.seconds, kinds, given.timeout)
    print(f"seed {seed}, {len(kinds) ** 2} pairs of kinds, up to {setting.rounds} rounds", flush=True)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, Any]
    try:
        with closing(GpuRanks(RANKS)) as ranks:
            result = ranks.run(RANKS, crossing.cross, setting, timeout=300 + setting.seconds + 4 * setting.timeout)[0]
    except Exception as error:  # noqa: BLE001  (whatever it is, the file says it)
        result = {"seed": seed, "error": f"{type(error).__name__}: {error}", "rows": []}
        print("\n".join([result["error"], *getattr(error, "__notes__", [])]), file=sys.stderr)
    for row in result["rows"]:
        print(f"{row['row']:>30} | {row['column']:<30} {row['rounds']:>6} rounds {row['seconds']:>8.2f} s")
    if "error" not in result:
        print(f"{result['rounds']} rounds in {result['seconds']} s, {result['orders']} orders, 0 locked, 0 wrong")
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return int("error" in result)


if __name__ == "__main__":
    sys.exit(main())
