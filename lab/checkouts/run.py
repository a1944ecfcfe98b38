# SPDX-License-Identifier: Apache-2.0
"""Measures two checkouts of Stretto in turn in one run, case by case, to show what a change costs.

Each checkout has its own set of ranks: processes that import Stretto from that checkout. One set of ranks works at a
time. A round measures every case once with each checkout, in random order and without a pause between the two. The
result of a case is the median over the rounds of the ratio of the pair, in which the machine's drift cancels.

After half of the time both sets start again in the other order, and so get each other's multiprocessors: calls of
microseconds may take 5% longer in one place than in the other. The two medians' geometric mean counts.

All ranks share one GPU under MPS, so the times only serve to compare two checkouts.
"""

import contextlib
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.checkouts.cases import CheckoutCase
from lab.checkouts.ranks import CheckoutRanks, RanksFailed
from lab.checkouts.report import Comparison, MeasuredCase, log, write_comparison
from lab.checkouts.settings import AFTER, BEFORE, CheckoutsSetting
from stretto.cluster.detection import count_gpus
from stretto.memory.mps import mps_daemon

_MAX_STARTS = 4
_PREPARATION = 0.6  # share of the time limit after which no further case is prepared
_START_LIMIT, _PREPARE_LIMIT, _RUN_LIMIT = 120.0, 60.0, 45.0  # seconds; a wait on the device times out after 30
_TARGET_SECONDS = 4e-3  # of a measurement
_MAX_REPLAYS = 64
_CONNECTIONS = 32  # queues to the GPU, of all ranks; with the few that MPS gives, streams of a rank wait for each other


def bench_checkouts(setting: CheckoutsSetting, out: Path) -> dict[str, Any]:
    """Compare the two checkouts, print tables, and write checkouts.json, .md and .png to `out`.

    Returns "rows" (one a case), "refused" (why a case was not measured, by its name) and "failure" (None, or why
    measuring stopped early; the rows then hold what was measured before). All processes and the MPS daemon have ended
    on return. Raises ValueError where there is no GPU or no MPS.
    """
    deadline = time.monotonic() + setting.seconds
    with _raising_on_sigterm(), tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        # An empty cache: neither checkout may select kernels by times that the other one or an earlier run measured.
        environment = {
            "STRETTO_CACHE": str(Path(folder) / "cache"),
            "STRETTO_SHARE_GPUS": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": str(max(2, _CONNECTIONS // (2 * setting.ranks))),
        }
        if setting.on_cpu:
            environment["TRITON_INTERPRET"] = "1"
        else:
            _require_gpu()
        outcome = _run(setting, Path(folder), environment, deadline)
    return write_comparison(setting, outcome, out)


def _run(setting: CheckoutsSetting, folder: Path, environment: dict[str, str], deadline: float) -> Comparison:
    """Measure with each placement of the two sets of ranks, each in an equal part of the time."""
    outcome = Comparison()
    for placement, order in enumerate(setting.orders):
        now = time.monotonic()
        until = now + (deadline - now) / (len(setting.orders) - placement)
        _measure_placement(setting, folder, environment, until, outcome, placement, order)
        if outcome.failure is not None:
            break
    return outcome


def _measure_placement(
    setting: CheckoutsSetting,
    folder: Path,
    environment: dict[str, str],
    deadline: float,
    outcome: Comparison,
    placement: int,
    order: Sequence[str],
) -> None:
    """Start both sets of ranks, prepare and measure the cases; restart without any case that killed the ranks."""
    for attempt in range(_MAX_STARTS):
        began = time.monotonic()
        prepare_until = began + _PREPARATION * (deadline - began)
        with contextlib.ExitStack() as stack:
            # A new daemon for each start: ranks killed in the middle of a kernel may have broken the last one.
            variables = environment | ({} if setting.on_cpu else stack.enter_context(mps_daemon(setting.share)))
            try:
                store = folder / f"store-{placement}-{attempt}"
                sets = _start(setting, order, store, variables, deadline, stack, outcome)
            except RanksFailed as error:
                outcome.failure = str(error)
                return
            times = _prepare(setting, sets, outcome, prepare_until)
            if times is None:
                continue
            seconds = time.monotonic() - began
            log(f"{order[0]} first: {len(times)} cases prepared after {seconds:.0f} s, {len(outcome.refused)} not")
            if _measure(setting, sets, times, outcome, deadline, placement):
                return
    outcome.failure = f"ranks were lost {_MAX_STARTS} times: {list(outcome.refused.values())[-1]}"


def _start(
    setting: CheckoutsSetting,
    order: Sequence[str],
    store: Path,
    environment: Mapping[str, str],
    deadline: float,
    stack: contextlib.ExitStack,
    outcome: Comparison,
) -> list[CheckoutRanks]:
    """Start both sets of ranks, "before" and "after", in that order or the other.

    On a GPU the second set starts once the first has its share of the multiprocessors, so that MPS places the ranks of
    one set side by side.
    """
    device = "cpu" if setting.on_cpu else "cuda"
    sets: list[CheckoutRanks] = []
    for name in order:
        source = setting.sources[name]
        path = store.with_name(f"{store.name}-{name}")
        sets.append(stack.enter_context(CheckoutRanks(name, source, setting.ranks, path, device, environment)))
        if not setting.on_cpu:
            outcome.processors = _await_start(sets[-1], deadline)
    if setting.on_cpu:
        for each in sets:
            _await_start(each, deadline)
    return sets


def _await_start(ranks: CheckoutRanks, deadline: float) -> int:
    limit = min(_START_LIMIT, max(1.0, deadline - time.monotonic()))
    started = ranks.wait_for_start(limit)
    if "error" in started[0]:
        raise RanksFailed(f"{ranks.name} does not start: {started[0]['error']}")
    return int(started[0]["processors"])


def _prepare(
    setting: CheckoutsSetting, sets: Sequence[CheckoutRanks], outcome: Comparison, until: float
) -> dict[str, int] | None:
    """Have both sets prepare all cases. Returns the replays of a measurement by case, or None if ranks were lost."""
    times: dict[str, int] = {}
    has_own_processors = 2 * setting.ranks * setting.share <= 100 or setting.on_cpu
    for case in setting.cases():
        if case.name in outcome.refused:
            continue
        if time.monotonic() > until:
            if case.name not in outcome.measured:
                outcome.refused[case.name] = "there was no time left to prepare it"
            continue
        command = {"do": "prepare", "case": case.name, **case.describe()}
        try:
            if has_own_processors:
                for each in sets:
                    each.send(command)
                answers = [each.receive(command, _PREPARE_LIMIT) for each in sets]
            else:
                answers = [each.ask(command, _PREPARE_LIMIT) for each in sets]
            pairs = zip(sets, answers, strict=True)
            errors = [f"{each.name}: {answer[0]['error']}" for each, answer in pairs if answer[0]]
            if errors:
                outcome.refused[case.name] = "; ".join(errors)
                continue
            seconds = max(_time(each, case, 1)[0] for each in sets)
        except RanksFailed as error:
            outcome.refused[case.name] = str(error)
            log(f"{case.name}: {error}")
            return None
        calls = case.options["calls"]
        times[case.name] = min(_MAX_REPLAYS, max(1, round(_TARGET_SECONDS / (seconds * calls))))
    return times


def _measure(
    setting: CheckoutsSetting,
    sets: Sequence[CheckoutRanks],
    times: Mapping[str, int],
    outcome: Comparison,
    deadline: float,
    placement: int,
) -> bool:
    """Measure in rounds over all cases, then over the undecided ones.

    Returns False if ranks were lost in a case, which is then excluded; `outcome` keeps the other cases.
    """
    order = random.Random(setting.seed)
    cases = [case for case in setting.cases() if case.name in times and case.name not in outcome.refused]
    began = time.monotonic()
    rounds = -(-setting.rounds // len(setting.orders))
    for number in range(-(-setting.round_limit // len(setting.orders))):
        if number >= rounds:
            cases = [case for case in cases if not outcome.measured[case.name].is_decided()]
        if not cases:
            return True
        if number in (1, rounds):
            log(f"after {time.monotonic() - began:.0f} s of measuring: round {number + 1}, of {len(cases)} cases")
        for case in order.sample(cases, len(cases)):
            if time.monotonic() > deadline:
                log(f"the time is over in round {number + 1}, of {len(cases)} cases")
                return True
            pair = {each.name: (0.0, 0.0) for each in sets}
            try:
                for each in order.sample(sets, len(sets)):
                    pair[each.name] = _time(each, case, times[case.name])
            except RanksFailed as error:
                log(f"{case.name}: {error}")
                outcome.refused[case.name] = str(error)
                outcome.measured.pop(case.name, None)
                return False
            found = outcome.measured.setdefault(case.name, MeasuredCase())
            found.placements.append(placement)
            found.device.append((pair[BEFORE][0], pair[AFTER][0]))
            found.host.append((pair[BEFORE][1], pair[AFTER][1]))
    return True


def _time(ranks: CheckoutRanks, case: CheckoutCase, times: int) -> tuple[float, float]:
    """Run a case; returns seconds a call on the slowest rank, on the device and for the host to issue it."""
    answers = ranks.ask({"do": "run", "case": case.name, "times": times}, _RUN_LIMIT)
    if errors := dict.fromkeys(answer["error"] for answer in answers if "error" in answer):  # each rank's, once
        raise RanksFailed(f"{ranks.name} at {case.name}: {'; '.join(errors)}")
    return max(answer["seconds"] for answer in answers), max(answer["host"] for answer in answers)


def _require_gpu() -> None:
    if not count_gpus():
        raise ValueError("this bench takes a GPU, which all ranks share: torch sees none here; --cpu tries the command")


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind like Ctrl-C, so that processes and the daemon end. Does nothing outside the main thread."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous: Callable[..., Any] | int | None = None
    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
