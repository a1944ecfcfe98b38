# SPDX-License-Identifier: Apache-2.0
"""Judges a job with faults by its records: was each failure reported correctly, what was lost, what was left behind.

`judge` returns a row for each fault. A row's `problems` are sentences; a fault without any has passed.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.plan import START_LIMIT, STEPPING, WITH_START_LIMIT, Fault, Job, message_of
from tests.faults.settings import KINDS

IN_STEP = ("data", "forward", "update", "evaluate")
"""Places at which a rank is in its step. A thread may still write the checkpoint of an earlier one."""
LOSS_TOLERANCE = 1e-6
"""The largest difference of a loss from the undisturbed run's."""


@dataclass(frozen=True)
class Naming:
    """The command's report of a failure, and its time: a line of restarts.jsonl, or the last output."""

    time: float
    rank: int | None
    kind: str | None
    text: str
    has_ended: bool


def judge(
    job: Job, recorded: Mapping[str, Any], undisturbed: Sequence[Mapping[str, Any]], timeout: float, grace: float = 0
) -> list[dict[str, Any]]:
    """Judge every fault of a job.

    timeout: of training, in seconds; start-up has its own. grace: seconds after either, to name a failure.
    """
    fired = {line["number"]: line for line in recorded["fired"]}
    namings = list(_read_namings(recorded))
    starts = [event for event in recorded["events"] if event["event"] == "first step"]
    rows = []
    for fault in job.faults:
        about = {
            "job": job.number,
            "fault": fault.number,
            "kind": KINDS[fault.kind],
            "variant": fault.variant,
            "rank": fault.rank,
            "place": fault.place,
            "grid": " ".join(f"{axis}={size}" for axis, size in job.grid.items()),
        }
        if fault.number not in fired:
            rows.append(about | {"problems": ["it did not happen: the job ended before"]})
            continue
        happened = fired[fault.number]
        until = min((line["time"] for line in fired.values() if line["number"] > fault.number), default=float("inf"))
        own = [naming for naming in namings if happened["time"] < naming.time <= until]
        gave_up = [at for at in recorded["gave_up"] if happened["time"] < at <= until]
        allowed = grace + (max(timeout, START_LIMIT) if fault.place in WITH_START_LIMIT else timeout)
        if fault.kind == "loop" and fault.place in ("save", "commit") and own:
            # Training continues while a thread writes, until the next save waits for it.
            steps = [event["time"] for event in recorded["events"] if event["event"] == "step"]
            between = [at for at in steps if happened["time"] < at < own[0].time]
            allowed += max(between, default=happened["time"]) - happened["time"]
        problems = [*_judge_naming(fault, happened, own, allowed)]
        if fault.kind in ("stop", "loop") and fault.place in STEPPING:
            folders = [stall["files"] for stall in recorded["stalls"] if happened["time"] < stall["time"] <= until]
            problems += _judge_evidence(folders[-1] if folders else [], math.prod(job.grid.values()))
        if gave_up:
            problems.append("the job hung and was killed by this bench")
        if any(naming.has_ended for naming in own):
            problems.append("the command ended instead of restarting")
        first = next((start for start in starts if start["time"] > happened["time"]), None)
        restart = {} if first is None else _describe_restart(job, recorded, undisturbed, happened, first)
        problems += restart.pop("problems", [])
        if first is None and fault.place != "exit":
            problems.append("training did not go on")
        rows.append(
            about
            | {
                "step": happened["step"],
                "seconds_named": own[0].time - happened["time"] if own else None,
                "named": {"rank": own[0].rank, "kind": own[0].kind, "text": own[0].text} if own else None,
                "seconds_again": restart["time"] - happened["time"] if first and restart["time"] < until else None,
                "steps_lost": restart.get("steps_lost"),
                "loss_difference": restart.get("loss_difference"),
                "problems": problems,
            }
        )
    return rows


def judge_end(
    job: Job, recorded: Mapping[str, Any], undisturbed: Sequence[Mapping[str, Any]]
) -> tuple[float | None, list[str]]:
    """Judge the state that a job leaves at its end. Returns the largest difference of a loss, and the problems."""
    problems = []
    if not recorded["gave_up"]:  # processes that this bench has killed cannot clean up
        problems = [f"left behind: {what} {', '.join(found)}" for what, found in recorded["left"].items() if found]
    steps = [line["step"] for line in recorded["metrics"]]
    expected = [line["step"] for line in undisturbed]
    if steps != expected:
        missing = sorted(set(expected) - set(steps))
        problems.append(f"metrics.jsonl has {len(steps)} steps of {len(expected)}; missing: {missing[:5]}")
    difference = _largest_difference(recorded["metrics"], undisturbed, 0, job.steps)
    if difference is not None and difference > LOSS_TOLERANCE:
        problems.append(f"losses differ from the undisturbed run's by {difference:.2g}")
    if not recorded["ended"] or recorded["ended"][-1]["status"] != 0:
        problems.append("the last command failed")
    return difference, problems


def _read_namings(recorded: Mapping[str, Any]) -> Iterator[Naming]:
    """Every failure that the command has named, in the order of time."""
    found = []
    printed = [at for at, line in recorded["screen"] if re.match(r"restart \d+: ", line)]
    for number, (at, line) in enumerate(recorded["restarts"]):
        values = json.loads(line)
        if len(printed) == len(recorded["restarts"]):  # a full disk may delay the file, but not the screen
            at = min(at, printed[number])
        text = str(values.get("reason"))
        found.append(Naming(at, values.get("rank"), values.get("kind"), text, has_ended=False))
    for values in recorded["ended"]:
        if values["status"] not in (0, 130, 143):
            found.append(
                Naming(values["time"], values.get("rank"), values.get("kind"), values["message"], has_ended=True)
            )
    return iter(sorted(found, key=lambda naming: naming.time))


def _judge_naming(fault: Fault, happened: Mapping[str, Any], namings: Sequence[Naming], limit: float) -> Iterator[str]:
    """Yield the errors in the report of a failure."""
    if not namings:
        yield "it was not named"
        return
    first = namings[0]
    seconds = first.time - happened["time"]
    if seconds > limit:
        yield f"it was named after {seconds:.1f} s, and the limit is {limit:g} s"
    if not is_kind_named(fault, first):
        yield f"its kind was not named: {first.kind}, {first.text.splitlines()[0]}"
    if not is_rank_named(fault, first):
        yield f"rank {fault.rank} failed, and rank {first.rank} was named: {first.text.splitlines()[0]}"
    if fault.kind in ("stop", "loop") and fault.place in IN_STEP and not is_place_named(happened["step"], first):
        yield f"host and step {happened['step']} were not named: {first.text.splitlines()[0]}"
    others = [naming for naming in namings[1:] if not naming.has_ended]
    if others:
        yield f"{len(others)} more failures were named, and nothing had happened: {others[0].text.splitlines()[0]}"


def _judge_evidence(files: Sequence[str], ranks: int) -> Iterator[str]:
    """Yield the missing files of a stall: the report, and each rank's stack."""
    wanted = ["report.txt", *(f"rank-{rank}-stack.txt" for rank in range(ranks))]
    if missing := [name for name in wanted if name not in files]:
        yield f"out/stalls/ lacks {', '.join(missing)}"


def is_kind_named(fault: Fault, naming: Naming) -> bool:
    """True if the message names the fault's kind."""
    text = naming.text.lower()
    match fault.kind:
        case "kill":
            return naming.kind in ("killed", None) and "sigkill" in text
        case "stop":
            return naming.kind in ("silent", "stalled") and "stopped" in text
        case "loop":
            return naming.kind in ("silent", "stalled")
        case "exception":
            return message_of(fault) in naming.text
        case "disk":
            return "no space left" in text
        case "connection":
            return "connection" in text
    raise ValueError(f"there is no fault of kind {fault.kind!r}")


def is_place_named(step: int, naming: Naming) -> bool:
    """True if the host was named, and the step, or the one before, which a rank may not have left yet."""
    found = re.search(r"\bstep (\d+)", naming.text)
    return "host " in naming.text and found is not None and int(found[1]) in (step - 1, step)


def is_rank_named(fault: Fault, naming: Naming) -> bool:
    """True if the right rank was named: both ends of a connection; of a full disk, which all ranks write to, any."""
    if fault.kind == "disk":
        return True
    if fault.kind == "connection":
        return _ranks_of(naming.text) == {fault.rank, fault.peer}
    return naming.rank == fault.rank


def _ranks_of(text: str) -> set[int]:
    """The ranks in the first clause of a message: "ranks 1 and 2 lost their connection: ..."."""
    lists = re.findall(r"\branks? (\d+(?:(?:, | and | and rank )\d+)*)", text.partition(": ")[0])
    return {int(number) for found in lists for number in re.findall(r"\d+", found)}


def _describe_restart(
    job: Job,
    recorded: Mapping[str, Any],
    undisturbed: Sequence[Mapping[str, Any]],
    happened: Mapping[str, Any],
    first: Mapping[str, Any],
) -> dict[str, Any]:
    """When training went on after a fault, from which step, and on which losses."""
    events, problems = recorded["events"], []
    resumed = first["step"] - 1
    done = [event["step"] for event in events if event["event"] == "step" and event["time"] < first["time"]]
    before = [event["step"] for event in events if event["event"] == "step" and event["time"] < happened["time"]]
    newest = max(happened["checkpoints"], default=0)
    if resumed < newest:
        problems.append(f"it went on after step {resumed}, and the checkpoint of step {newest} was complete")
    if first["left"]:
        problems.append(f"left behind when training went on: {', '.join(first['left'])}")
    again = next((event for event in events if event["event"] == "step" and event["time"] > first["time"]), first)
    for at, ranks in recorded["stale"]:
        if first["time"] <= at <= again["time"]:
            problems.append(f"processes of an earlier attempt ran when training went on: {ranks}")
    later = [start["step"] - 1 for start in recorded["events"] if start["event"] == "first step"]
    later = [step for step in later[later.index(resumed) + 1 :] if step > resumed] or [job.steps]
    difference = _largest_difference(recorded["metrics"], undisturbed, resumed, min(later))
    if difference is not None and difference > LOSS_TOLERANCE:
        problems.append(f"losses after it differ from the undisturbed run's by {difference:.2g}")
    return {
        "time": again["time"],
        "steps_lost": max(0, max(before or done or [0]) - resumed),
        "loss_difference": difference,
        "problems": problems,
    }


def _largest_difference(
    metrics: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]], after: int, until: int
) -> float | None:
    """The largest difference of a loss in the steps after one and until another; None if there is no such step."""
    expected = {line["step"]: line["loss"] for line in undisturbed}
    found = [
        abs(line["loss"] - expected[line["step"]])
        for line in metrics
        if after < line["step"] <= until and line["step"] in expected
    ]
    return max(found, default=None)
