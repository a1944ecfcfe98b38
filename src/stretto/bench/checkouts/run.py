"""Two checkouts of Stretto measured in turn in one run, case by case: what a change costs.

Each checkout has ranks of its own, processes that import Stretto from there, and one set of ranks works at a time. A
round measures every case once by each checkout, one right after the other in random order, and what counts is the
median over the rounds of the ratio of such a pair: the machine's drift is in both, and cancels.

All ranks share one GPU, under MPS. So the times hold for comparing two checkouts, and for nothing else.
"""

import contextlib
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.bench.checkouts.cases import CheckoutCase
from stretto.bench.checkouts.ranks import CheckoutRanks, RanksFailed
from stretto.bench.checkouts.report import Comparison, MeasuredCase, log, write_comparison
from stretto.bench.checkouts.settings import AFTER, BEFORE, CheckoutsSetting
from stretto.bench.mps import mps_daemon

_MOST_STARTS = 4
_PREPARATION = 0.6  # of the time, after which no further case is prepared
_START_LIMIT, _PREPARE_LIMIT, _RUN_LIMIT = 120.0, 60.0, 45.0  # seconds; a wait on the device gives up after 30
_TARGET = 4e-3  # seconds of a measurement
_MOST_TIMES = 64


def bench_checkouts(setting: CheckoutsSetting, out: Path) -> dict[str, Any]:
    """Measure, print tables, and write checkouts.json, .md and .png to `out`.

    Returns "rows" (a case each), "refused" (case to the reason that it was not measured) and "failure" (None, or what
    broke the measuring off; rows are what was measured until then). Every process is ended, and the MPS daemon too.
    ValueError where there is no GPU or no MPS.
    """
    deadline = time.monotonic() + setting.seconds
    with _raising_on_sigterm(), tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        # Neither checkout chooses by times that the other, or an earlier run, has measured.
        environment = {
            "STRETTO_CACHE": str(Path(folder) / "cache"),
            "STRETTO_SHARE_GPUS": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
        if setting.on_cpu:
            environment["TRITON_INTERPRET"] = "1"
        else:
            _require_gpu()
        outcome = _run(setting, Path(folder), environment, deadline)
    return write_comparison(setting, outcome, out)


def _run(setting: CheckoutsSetting, folder: Path, environment: dict[str, str], deadline: float) -> Comparison:
    """Start both sets of ranks, prepare and measure; start them again without a case that has broken them."""
    outcome, began = Comparison(), time.monotonic()
    prepare_until = began + _PREPARATION * (deadline - began)
    for attempt in range(_MOST_STARTS):
        with contextlib.ExitStack() as stack:
            # A daemon for each start: ranks that were killed in the middle of a kernel may have broken the last one.
            variables = environment | ({} if setting.on_cpu else stack.enter_context(mps_daemon(setting.share)))
            try:
                sets = _start(setting, folder / f"store-{attempt}", variables, deadline, stack, outcome)
            except RanksFailed as error:
                outcome.failure = str(error)
                return outcome
            times = _prepare(setting, sets, outcome, prepare_until)
            if times is None:
                continue
            seconds = time.monotonic() - began
            log(f"{len(times)} cases prepared after {seconds:.0f} s, {len(outcome.refused)} not")
            try:
                _measure(setting, sets, times, outcome, deadline)
            except RanksFailed as error:
                outcome.failure = str(error)
            return outcome
    outcome.failure = f"ranks were lost {_MOST_STARTS} times while they prepared cases"
    return outcome


def _start(
    setting: CheckoutsSetting,
    store: Path,
    environment: Mapping[str, str],
    deadline: float,
    stack: contextlib.ExitStack,
    outcome: Comparison,
) -> list[CheckoutRanks]:
    """Both sets of ranks, before and after.

    On a GPU the second starts when the first has its share of the multiprocessors, so that MPS puts ranks of one set
    side by side.
    """
    device = "cpu" if setting.on_cpu else "cuda"
    sets: list[CheckoutRanks] = []
    for name, source in setting.sources.items():
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
    """Have both sets prepare all cases; how many rows a measurement of each takes. None where ranks were lost."""
    times: dict[str, int] = {}
    is_apart = 2 * setting.ranks * setting.share <= 100 or setting.on_cpu
    for case in setting.cases():
        if case.name in outcome.refused:
            continue
        if time.monotonic() > until:
            outcome.refused[case.name] = "there was no time left to prepare it"
            continue
        command = {"do": "prepare", "case": case.name, **case.describe()}
        try:
            if is_apart:
                for each in sets:
                    each.tell(command)
                answers = [each.hear(command, _PREPARE_LIMIT) for each in sets]
            else:
                answers = [each.ask(command, _PREPARE_LIMIT) for each in sets]
            errors = [f"{each.name}: {said[0]['error']}" for each, said in zip(sets, answers, strict=True) if said[0]]
            if errors:
                outcome.refused[case.name] = "; ".join(errors)
                continue
            seconds = max(_time(each, case, 1)[0] for each in sets)
        except RanksFailed as error:
            outcome.refused[case.name] = str(error)
            log(f"{case.name}: {error}")
            return None
        calls = case.options["calls"]
        times[case.name] = min(_MOST_TIMES, max(1, round(_TARGET / (seconds * calls))))
    return times


def _measure(
    setting: CheckoutsSetting,
    sets: Sequence[CheckoutRanks],
    times: Mapping[str, int],
    outcome: Comparison,
    deadline: float,
) -> None:
    """Rounds over all cases, then over those that are undecided. RanksFailed leaves what was measured."""
    chosen = random.Random(setting.seed)
    cases = [case for case in setting.cases() if case.name in times]
    began = time.monotonic()
    for number in range(setting.round_limit):
        if number >= setting.rounds:
            cases = [case for case in cases if not outcome.measured[case.name].is_decided()]
        if not cases:
            return
        if number in (1, setting.rounds):
            log(f"after {time.monotonic() - began:.0f} s of measuring: round {number + 1}, of {len(cases)} cases")
        for case in chosen.sample(cases, len(cases)):
            if time.monotonic() > deadline:
                log(f"the time is over in round {number + 1}, of {len(cases)} cases")
                return
            pair = {each.name: (0.0, 0.0) for each in sets}
            for each in chosen.sample(sets, len(sets)):
                pair[each.name] = _time(each, case, times[case.name])
            found = outcome.measured.setdefault(case.name, MeasuredCase())
            found.device.append((pair[BEFORE][0], pair[AFTER][0]))
            found.host.append((pair[BEFORE][1], pair[AFTER][1]))


def _time(ranks: CheckoutRanks, case: CheckoutCase, times: int) -> tuple[float, float]:
    """Seconds a call on the slowest rank: on the device, and to issue it."""
    answers = ranks.ask({"do": "run", "case": case.name, "times": times}, _RUN_LIMIT)
    if "error" in answers[0]:
        raise RanksFailed(f"{ranks.name} at {case.name}: {answers[0]['error']}")
    return max(said["seconds"] for said in answers), max(said["host"] for said in answers)


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("this bench takes a GPU, which all ranks share: torch sees none here; --cpu tries the command")


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that processes and daemon are ended; outside of the main thread, nothing."""

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
