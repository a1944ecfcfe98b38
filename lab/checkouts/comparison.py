# SPDX-License-Identifier: Apache-2.0
"""Measures two checkouts in turn: starts their ranks, prepares cases, and times each pair in rounds.

Each checkout has its own set of ranks: processes that import Stretto from that checkout. One set of ranks works at a
time. A round measures every case once with each checkout, in random order and without a pause between the two. The
result of a case is the median over the rounds of the ratio of the pair, in which the machine's drift cancels.

After half of the time both sets start again in the other order, and so get each other's multiprocessors: calls of
microseconds may take 5% longer in one place than in the other. The two medians' geometric mean counts.
"""

import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lab.checkouts.cases import AFTER, BEFORE, CheckoutCase
from lab.processes import Processes, RanksFailed
from stretto.memory.mps import mps_daemon

if TYPE_CHECKING:
    from lab.checkouts.run import CheckoutsSetting

WORKER = Path(__file__).with_name("worker.py")
BOUND = 0.02
"""Medians of ratios that differ from 1 by less count as equal."""
_NORMAL_QUANTILE = 1.96  # for 95% confidence
_MIN_RATIOS = 6  # the fewest whose smallest and largest enclose the median with that confidence
_MAX_STARTS = 4
_PREPARATION = 0.6  # share of the time limit after which no further case is prepared
_START_LIMIT, _PREPARE_LIMIT, _RUN_LIMIT = 120.0, 60.0, 45.0  # seconds; a wait on the device times out after 30
_TARGET_SECONDS = 4e-3  # of a measurement
_MAX_REPLAYS = 64
_CONNECTIONS = 32  # queues to the GPU, of all ranks; with the few that MPS gives, streams of a rank wait for each other


@dataclass
class MeasuredCase:
    """Seconds a call, (before, after) of each round: on the device, and for the host to issue it.

    placements: which of the placements of the ranks on the GPU each round was measured with.
    """

    device: list[tuple[float, float]] = field(default_factory=list)
    host: list[tuple[float, float]] = field(default_factory=list)
    placements: list[int] = field(default_factory=list)

    def estimate(self) -> tuple[float, float, float]:
        """The ratio after / before and its 95% confidence interval.

        It is the geometric mean of the placements' medians, which cancels the effect of a set's place on the GPU.
        """
        intervals = [find_interval(found) for found in self._ratios()]
        return (
            statistics.geometric_mean(statistics.median(found) for found in self._ratios()),
            statistics.geometric_mean(low for low, _ in intervals),
            statistics.geometric_mean(high for _, high in intervals),
        )

    def _ratios(self) -> list[list[float]]:
        """The ratios of each placement's rounds."""
        ratios: dict[int, list[float]] = {}
        for (before, after), placement in zip(self.device, self.placements, strict=True):
            ratios.setdefault(placement, []).append(after / before)
        return list(ratios.values())

    def judge(self) -> str:
        """The verdict on a case: "same", "slower" or "faster" by more than the bound, or "unclear".

        A case is slower or faster if its whole confidence interval lies beyond the bound, and the same if its ratio
        lies within. Fewer than six rounds of a placement have no such interval.
        """
        ratio, low, high = self.estimate()
        if abs(ratio - 1) <= BOUND:
            return "same"
        if min(map(len, self._ratios())) < _MIN_RATIOS or (low <= 1 + BOUND and high >= 1 - BOUND):
            return "unclear"
        return "slower" if low > 1 + BOUND else "faster"

    def is_decided(self) -> bool:
        """True if the confidence interval of the ratio lies inside the bounds, or outside of them."""
        _, low, high = self.estimate()
        return (low >= 1 - BOUND and high <= 1 + BOUND) or low > 1 + BOUND or high < 1 - BOUND


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the median, from order statistics, which assume no distribution."""
    ordered = sorted(values)
    below = max(0, math.floor((len(ordered) - _NORMAL_QUANTILE * math.sqrt(len(ordered))) / 2))
    return ordered[below], ordered[len(ordered) - 1 - below]


@dataclass
class Comparison:
    """All results so far: measurements by case, and why other cases have none.

    folder: for the ranks' stores and errors. deadline: of all, in seconds of `time.monotonic`. failure: why measuring
    stopped early, or None. processors: the multiprocessors that a rank has.
    """

    setting: "CheckoutsSetting"
    folder: Path
    deadline: float
    measured: dict[str, MeasuredCase] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    processors: int = 0

    def run(self) -> None:
        """Measure with each placement of the two sets of ranks, each in an equal part of the time."""
        orders = self.setting.orders
        for placement, order in enumerate(orders):
            now = time.monotonic()
            self._measure_placement(placement, order, now + (self.deadline - now) / (len(orders) - placement))
            if self.failure is not None:
                break

    def _measure_placement(self, placement: int, order: Sequence[str], deadline: float) -> None:
        """Start both sets of ranks, prepare and measure the cases; restart without any case that killed the ranks."""
        for attempt in range(_MAX_STARTS):
            began = time.monotonic()
            with ExitStack() as stack:
                # A new daemon for each start: ranks killed in the middle of a kernel may have broken the last one.
                mps = {} if self.setting.on_cpu else stack.enter_context(mps_daemon(self.setting.share))
                try:
                    sets = self._start(order, self.folder / f"store-{placement}-{attempt}", mps, deadline, stack)
                except RanksFailed as error:
                    self.failure = str(error)
                    return
                times = self._prepare(sets, began + _PREPARATION * (deadline - began))
                if times is None:
                    continue
                seconds = time.monotonic() - began
                log(f"{order[0]} first: {len(times)} cases prepared after {seconds:.0f} s, {len(self.refused)} not")
                if self._measure(sets, times, deadline, placement):
                    return
        self.failure = f"ranks were lost {_MAX_STARTS} times: {list(self.refused.values())[-1]}"

    def _start(
        self, order: Sequence[str], store: Path, mps: Mapping[str, str], deadline: float, stack: ExitStack
    ) -> list[Processes]:
        """Start both sets of ranks, "before" and "after", in that order or the other.

        On a GPU the second set starts once the first has its share of the multiprocessors, so that MPS places the ranks
        of one set side by side.
        """
        sets: list[Processes] = []
        for name in order:
            path = store.with_name(f"{store.name}-{name}")
            sets.append(stack.enter_context(start_ranks(self.setting, name, path, mps)))
            if not self.setting.on_cpu:
                self._await_start(sets[-1], deadline)
        for each in sets if self.setting.on_cpu else ():
            self._await_start(each, deadline)
        return sets

    def _await_start(self, ranks: Processes, deadline: float) -> None:
        limit = min(_START_LIMIT, max(1.0, deadline - time.monotonic()))
        self.processors = await_start(ranks, self.setting.sources[ranks.name], limit)

    def _prepare(self, sets: Sequence[Processes], until: float) -> dict[str, int] | None:
        """Have both sets prepare all cases. Returns a measurement's replays by case, or None if ranks were lost."""
        times: dict[str, int] = {}
        has_own_processors = 2 * self.setting.ranks * self.setting.share <= 100 or self.setting.on_cpu
        for case in self.setting.cases():
            if case.name in self.refused:
                continue
            if time.monotonic() > until:
                if case.name not in self.measured:
                    self.refused[case.name] = "there was no time left to prepare it"
                continue
            command = {"do": "prepare", "case": case.name, **case.describe()}
            try:
                if has_own_processors:
                    for each in sets:
                        each.send(command)
                    answers = [each.receive(f"prepare {case.name}", _PREPARE_LIMIT) for each in sets]
                else:
                    answers = [each.ask(command, _PREPARE_LIMIT) for each in sets]
                pairs = zip(sets, answers, strict=True)
                if errors := [f"{each.name}: {answer[0]['error']}" for each, answer in pairs if answer[0]]:
                    self.refused[case.name] = "; ".join(errors)
                    continue
                seconds = max(_time(each, case, 1)[0] for each in sets)
            except RanksFailed as error:
                self.refused[case.name] = str(error)
                log(f"{case.name}: {error}")
                return None
            times[case.name] = min(_MAX_REPLAYS, max(1, round(_TARGET_SECONDS / (seconds * case.options["calls"]))))
        return times

    def _measure(self, sets: Sequence[Processes], times: Mapping[str, int], deadline: float, placement: int) -> bool:
        """Measure in rounds over all cases, then over the undecided ones.

        Returns False if ranks were lost in a case, which is then excluded; other cases keep their measurements.
        """
        order, placements = random.Random(self.setting.seed), len(self.setting.orders)
        cases = [case for case in self.setting.cases() if case.name in times and case.name not in self.refused]
        began = time.monotonic()
        rounds = -(-self.setting.rounds // placements)
        for number in range(-(-self.setting.round_limit // placements)):
            if number >= rounds:
                cases = [case for case in cases if not self.measured[case.name].is_decided()]
            if not cases:
                return True
            if number in (1, rounds):
                log(f"after {time.monotonic() - began:.0f} s of measuring: round {number + 1}, of {len(cases)} cases")
            for case in order.sample(cases, len(cases)):
                if time.monotonic() > deadline:
                    log(f"the time is over in round {number + 1}, of {len(cases)} cases")
                    return True
                try:
                    pair = {each.name: _time(each, case, times[case.name]) for each in order.sample(sets, len(sets))}
                except RanksFailed as error:
                    log(f"{case.name}: {error}")
                    self.refused[case.name] = str(error)
                    self.measured.pop(case.name, None)
                    return False
                found = self.measured.setdefault(case.name, MeasuredCase())
                found.placements.append(placement)
                found.device.append((pair[BEFORE][0], pair[AFTER][0]))
                found.host.append((pair[BEFORE][1], pair[AFTER][1]))
        return True


def start_ranks(setting: "CheckoutsSetting", name: str, store: Path, mps: Mapping[str, str]) -> Processes:
    """Start the ranks of one checkout. store: a path that does not exist yet, for their rendezvous."""
    given = os.environ.get("PYTHONPATH")
    environment = {
        **mps,
        # An empty cache: neither checkout may select kernels by times that the other one or an earlier run measured.
        "STRETTO_CACHE": str(store.with_name("cache")),
        "STRETTO_SHARE_GPUS": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": str(max(2, _CONNECTIONS // (2 * setting.ranks))),
        "PYTHONPATH": os.pathsep.join([str(setting.sources[name]), *([given] if given else [])]),
        "OMP_NUM_THREADS": "1",
        **({"TRITON_INTERPRET": "1"} if setting.on_cpu else {}),
    }
    about = {"world": setting.ranks, "store": str(store), "device": "cpu" if setting.on_cpu else "cuda"}
    # -P keeps the script's folder off sys.path, before the checkout.
    commands = [
        [sys.executable, "-P", str(WORKER), json.dumps({"rank": rank} | about)] for rank in range(setting.ranks)
    ]
    return Processes(name, commands, environment, store)


def await_start(ranks: Processes, source: Path, limit: float) -> int:
    """Wait until the ranks have joined; returns a rank's multiprocessors. RanksFailed for the wrong checkout."""
    started = ranks.receive("start", limit)
    for answer in started:
        if "error" in answer:
            raise RanksFailed(f"{ranks.name} does not start: {answer['error']}")
        if not Path(answer["stretto"]).resolve().is_relative_to(source.resolve()):
            raise RanksFailed(f"{ranks.name} imported Stretto from {answer['stretto']}, not from {source}")
    return int(started[0]["processors"])


def _time(ranks: Processes, case: CheckoutCase, times: int) -> tuple[float, float]:
    """Run a case; returns seconds a call on the slowest rank, on the device and for the host to issue it."""
    answers = ranks.ask({"do": "run", "case": case.name, "times": times}, _RUN_LIMIT)
    if errors := dict.fromkeys(answer["error"] for answer in answers if "error" in answer):  # each rank's, once
        raise RanksFailed(f"{ranks.name} at {case.name}: {'; '.join(errors)}")
    return max(answer["seconds"] for answer in answers), max(answer["host"] for answer in answers)


def log(text: str) -> None:
    """Print a line of progress to stderr: stdout is for tables and JSON."""
    print(text, file=sys.stderr, flush=True)
