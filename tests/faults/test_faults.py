# SPDX-License-Identifier: Apache-2.0
"""`python -m lab faults`: what is drawn, what counts as right, and a small campaign (exhaustive)."""

import copy
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.judge import judge, judge_end
from tests.faults.plan import STARTING, STEPPING, WINDOW, Fault, Job, draw_jobs
from tests.faults.settings import KINDS, FaultsSetting
from tests.faults.sockets import descriptors_to_peer, processes_of


def test_equal_settings_draw_equal_faults_and_another_seed_others():
    assert draw_jobs(FaultsSetting(seed=5)) == draw_jobs(FaultsSetting(seed=5))
    assert draw_jobs(FaultsSetting(seed=5)) != draw_jobs(FaultsSetting(seed=6))


def test_all_kinds_get_an_equal_share_on_all_ranks_grids_and_places():
    jobs = draw_jobs(FaultsSetting())
    faults = [fault for job in jobs for fault in job.faults]
    assert len(faults) == 200
    counts = Counter(fault.kind for fault in faults)
    assert counts.keys() == KINDS.keys()
    assert set(counts.values()) == {33, 34}
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    assert {fault.place for fault in faults} == {*STARTING, *STEPPING, "exit"}
    assert len({str(job.grid) for job in jobs}) == 4


def test_each_fault_of_a_job_has_separate_steps():
    for job in draw_jobs(FaultsSetting(seed=1)):
        for number, fault in enumerate(job.faults):
            assert fault.number == number
            if fault.step is not None:
                assert WINDOW * number < fault.step <= WINDOW * number + WINDOW // 2 < job.steps


def test_no_fault_at_the_start_follows_one_that_may_end_no_attempt():
    for job in draw_jobs(FaultsSetting(faults=1000)):
        for before, after in zip(job.faults, job.faults[1:], strict=False):
            assert before.kind != "connection" or after.place not in STARTING


def test_a_job_is_read_from_its_own_json():
    job = draw_jobs(FaultsSetting())[3]
    assert Job.of_json(json.loads(json.dumps(job.as_json()))) == job


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 5}, "4 would do"),
        ({"kinds": ("kil",)}, "did you mean 'kill'"),
        ({"only": (21,)}, "there are 20 jobs"),
        ({"jobs": 0}, "jobs is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        FaultsSetting(**given)


STEPS = 12
UNDISTURBED = [{"step": step, "loss": 5.0 - step / 10} for step in range(1, STEPS + 1)]
# Rank 2 is killed in step 6; the checkpoint of step 4 is complete. Rank 1 raises in step 11, after that of step 8.
JOB = Job(
    number=1,
    grid={"data": 4},
    steps=STEPS,
    faults=(
        Fault(number=0, kind="kill", rank=2, place="forward", step=6),
        Fault(number=1, kind="exception", rank=1, place="update", step=11),
    ),
)


def step_events(start: float, first: int, last: int) -> list[dict[str, Any]]:
    begun = {"time": start, "event": "first step", "step": first, "left": []}
    return [begun] + [
        {"time": start + 0.1 * n, "event": "step", "step": first + n - 1} for n in range(1, last - first + 2)
    ]


def record() -> dict[str, Any]:
    """Return what is recorded of `JOB` when all goes as it should."""
    restarts = [
        (11.5, {"rank": 2, "kind": "killed", "reason": "it was killed by SIGKILL"}),
        (21.5, {"rank": 1, "kind": "raised", "reason": "InjectedFault: injected fault 1 on rank 1"}),
    ]
    return {
        "fired": [
            {"number": 0, "time": 10.55, "step": 6, "checkpoints": [4]},
            {"number": 1, "time": 20.65, "step": 11, "checkpoints": [4, 8]},
        ],
        "restarts": [(at, json.dumps(line)) for at, line in restarts],
        "ended": [{"time": 31.0, "status": 0, "message": ""}],
        "screen": [],
        "gave_up": [],
        "stalls": [],
        "stale": [],
        "events": step_events(10.0, 1, 5) + step_events(20.0, 5, 10) + step_events(30.0, 9, 12),
        "metrics": copy.deepcopy(UNDISTURBED),
        "left": {"processes": [], "shared memory": []},
    }


def problems_of(change: Callable[[dict[str, Any]], None]) -> tuple[list[list[str]], list[str]]:
    """The problems of the two faults, and of the job's end, in a record with this change."""
    changed = record()
    change(changed)
    rows = judge(JOB, changed, UNDISTURBED, timeout=10.0)
    return [row["problems"] for row in rows], judge_end(JOB, changed, UNDISTURBED)[1]


def test_a_job_in_which_all_goes_as_it_should_has_no_problem():
    assert problems_of(lambda changed: None) == ([[], []], [])
    first, second = judge(JOB, record(), UNDISTURBED, timeout=10.0)
    assert (first["seconds_named"], first["seconds_again"]) == pytest.approx((0.95, 9.55))
    assert (first["steps_lost"], second["steps_lost"]) == (1, 2)
    assert first["loss_difference"] == second["loss_difference"] == 0


def rename(number: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    def change(changed: dict[str, Any]) -> None:
        at, line = changed["restarts"][number]
        changed["restarts"][number] = (at, json.dumps(json.loads(line) | values))

    return change


def change_loss(changed: dict[str, Any]) -> None:
    changed["metrics"][6]["loss"] += 1e-5  # of step 7, which the second attempt has trained


def lose_a_checkpoint(changed: dict[str, Any]) -> None:
    changed["fired"][1]["checkpoints"].append(9)


@pytest.mark.parametrize(
    ("change", "fault", "words"),
    [
        (rename(0, rank=1), 0, "rank 2 failed, and rank 1 was named"),
        (rename(1, reason="RuntimeError: Connection closed by peer"), 1, "its kind was not named"),
        (lambda changed: changed["restarts"].pop(1), 1, "it was not named"),
        (lambda changed: changed["restarts"].append((25.0, changed["restarts"][0][1])), 1, "1 more failures"),
        (lambda changed: (changed["fired"].pop(), changed["restarts"].pop()), 1, "it did not happen"),
        (lose_a_checkpoint, 1, "the checkpoint of step 9 was complete"),
        (change_loss, 0, "losses after it differ"),
        (lambda changed: changed["gave_up"].append(12.0), 0, "the job hung"),
        (lambda changed: changed["stale"].append((20.05, "rank 3")), 0, "earlier attempt ran when training went on"),
        (lambda changed: changed["events"][6]["left"].append(".step-5.writing"), 0, "left behind when"),
        (
            lambda changed: changed["ended"].insert(0, {"time": 12.0, "status": 1, "message": "rank 2", "rank": 2}),
            0,
            "the command ended instead of restarting",
        ),
    ],
)
def test_a_deviation_is_reported_for_the_fault_that_it_concerns(change: Any, fault: int, words: str):
    of_faults, _ = problems_of(change)
    assert words in "; ".join(of_faults[fault])
    assert of_faults[1 - fault] == []


def test_a_failure_that_is_named_too_late_is_no_success():
    rows = judge(JOB, record(), UNDISTURBED, timeout=0.9)
    assert "named after 0.9 s" in rows[0]["problems"][0] or "named after 1.0 s" in rows[0]["problems"][0]


def test_a_failure_is_named_when_the_screen_shows_it_although_its_file_is_written_later():
    changed = record()
    changed["screen"] = [(11.0, "WARNING: slow"), (11.1, "restart 1: rank 2"), (21.1, "restart 2: rank 1")]
    assert judge(JOB, changed, UNDISTURBED, timeout=10.0)[0]["seconds_named"] == pytest.approx(0.55)


def test_a_loop_in_the_thread_that_writes_is_named_in_time_after_training_waits_for_it():
    job = Job(1, {"data": 4}, STEPS, (Fault(number=0, kind="loop", variant="python", rank=1, place="save", step=4),))
    changed = record()
    changed["fired"] = [{"number": 0, "time": 10.05, "step": 4, "checkpoints": []}]
    reason = "rank 1 (host a, pid 7) is stuck in step 5, phase save"
    changed["restarts"] = [(15.0, json.dumps({"rank": 1, "kind": "stalled", "reason": reason}))]
    changed["stalls"] = [{"time": 14.9, "files": [f"rank-{rank}-stack.txt" for rank in range(4)] + ["report.txt"]}]
    assert judge(job, changed, UNDISTURBED, timeout=4.6)[0]["problems"] == []  # the last step ended at 10.5
    assert "named after" in judge(job, changed, UNDISTURBED, timeout=4.4)[0]["problems"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda changed: changed["left"]["shared memory"].append("torch_12"), "left behind: shared memory torch_12"),
        (lambda changed: changed["metrics"].pop(3), "11 steps of 12; missing: [4]"),
        (change_loss, "losses differ"),
        (lambda changed: changed["ended"][0].update(status=1), "the last command failed"),
    ],
)
def test_leftovers_of_a_job_are_reported_at_its_end(change: Any, words: str):
    assert words in "; ".join(problems_of(change)[1])


def test_a_stuck_rank_is_named_as_such_with_the_stack_of_every_rank():
    job = Job(1, {"data": 2}, STEPS, (Fault(number=0, kind="stop", rank=1, place="data", step=6),))
    changed = record()
    changed["fired"].pop()
    reason = "rank 1 (host a, pid 7) is silent in step 6: stopped by a signal"
    changed["restarts"] = [(15.0, json.dumps({"rank": 1, "kind": "silent", "reason": reason}))]
    files = ["rank-0-stack.txt", "rank-1-stack.txt", "report.txt"]
    changed["stalls"] = [{"time": 14.9, "files": files}]
    assert judge(job, changed, UNDISTURBED, timeout=10.0)[0]["problems"] == []
    changed["stalls"][0]["files"] = files[1:]
    assert judge(job, changed, UNDISTURBED, timeout=10.0)[0]["problems"] == ["out/stalls/ lacks rank-0-stack.txt"]
    changed["stalls"][0]["files"] = files
    changed["restarts"] = [
        (15.0, json.dumps({"rank": 1, "kind": "silent", "reason": reason.replace("step 6", "step 3")}))
    ]
    assert "host and step 6 were not named" in judge(job, changed, UNDISTURBED, timeout=10.0)[0]["problems"][0]
    changed["restarts"] = [(15.0, json.dumps({"rank": 1, "kind": "silent", "reason": reason}))]
    changed["stalls"][0]["time"] = 9.0  # of another failure
    assert "lacks report.txt" in judge(job, changed, UNDISTURBED, timeout=10.0)[0]["problems"][0]


def test_a_dropped_connection_is_named_by_both_of_its_ends():
    job = Job(1, {"data": 4}, STEPS, (Fault(number=0, kind="connection", rank=1, peer=2, place="data", step=6),))
    for reason, is_right in (
        ("rank 1 and rank 2 lost their connection", True),
        ("rank 1 lost its connection", False),
        ("RuntimeError: connection closed by peer [127.0.0.1]:1212", False),
    ):
        changed = record()
        changed["fired"].pop()
        changed["restarts"] = [(11.0, json.dumps({"rank": 1, "kind": "lost connection", "reason": reason}))]
        assert (judge(job, changed, UNDISTURBED, timeout=10.0)[0]["problems"] == []) == is_right, reason


def test_only_connections_with_the_peer_are_found():
    child = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [sys.executable, "-c", child, str(server.getsockname()[1])]
        peers = [subprocess.Popen(arguments, stdin=subprocess.PIPE) for _ in range(2)]
        accepted = [server.accept()[0] for _ in peers]
        try:
            found = [descriptors_to_peer(os.getpid(), peer.pid) for peer in peers]
            assert sorted(map(sorted, found)) == sorted([connection.fileno()] for connection in accepted)
        finally:
            for connection, peer in zip(accepted, peers, strict=True):
                connection.close()
                peer.communicate()


def test_a_fault_at_the_start_waits_for_the_next_attempt(tmp_path):
    from tests.faults.inject import has_failed, name_attempt, write_fired

    first, second = (Fault(number=number, kind="kill", rank=0, place="import") for number in range(2))
    attempts = [name_attempt(17, {"STRETTO_ATTEMPT": str(number)}) for number in range(2)]
    assert not has_failed(tmp_path, first, attempts[0])
    write_fired(tmp_path, first, tmp_path, attempts[0], step=0)
    assert has_failed(tmp_path, second, attempts[0])
    assert not has_failed(tmp_path, second, attempts[1])


def test_processes_are_found_by_their_environment(tmp_path):
    environment = os.environ | {"STRETTO_FAULTS": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        assert list(processes_of("STRETTO_FAULTS", str(tmp_path))) == [process.pid]
    finally:
        process.communicate(b"\n")
    assert processes_of("STRETTO_FAULTS", str(tmp_path)) == {}


def test_a_campaign_in_parts_keeps_the_jobs_of_the_same_draw(tmp_path):
    from tests.faults.run import Campaign

    rows = judge(JOB, record(), UNDISTURBED, timeout=10.0)
    end = {"job": 1, "loss_difference": 0.0, "problems": []}
    Campaign(FaultsSetting(only=(1,)), tmp_path).add(rows, end)
    other = [row | {"job": 2, "problems": ["it was not named"]} for row in rows]
    Campaign(FaultsSetting(only=(2,)), tmp_path).add(other, end | {"job": 2})
    result = json.loads((tmp_path / "faults.json").read_text())
    assert [row["job"] for row in result["faults"]] == [1, 1, 2, 2]
    assert [(row["kind"], row["faults"], row["right"]) for row in result["rows"]] == [
        ("SIGKILL", 2, 1),
        ("exception", 2, 1),
        ("all", 4, 2),
    ]
    Campaign(FaultsSetting(only=(2,), seed=1), tmp_path).add(other, end | {"job": 2})
    assert len(json.loads((tmp_path / "faults.json").read_text())["faults"]) == 2


@pytest.mark.exhaustive
def test_a_small_campaign_ends_with_a_table_by_kind(tmp_path):
    from tests.faults.run import bench_faults

    result = bench_faults(FaultsSetting(ranks=2, faults=12, faults_a_job=6, jobs=1, timeout=20.0), tmp_path)
    assert result["failure"] is None, [row for row in result["faults"] if row["problems"]]
    assert {row["kind"]: row["right"] for row in result["rows"]} == dict.fromkeys(KINDS.values(), 2) | {"all": 12}
    assert (tmp_path / "faults.png").exists()
