# SPDX-License-Identifier: Apache-2.0
"""Two checkouts in turn: the whole command on CPU ranks, and with ranks that fail, what it says and what it ends."""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import LIMIT
from typer.testing import CliRunner

import stretto
from lab import processes
from lab.checkouts import comparison, worker
from lab.checkouts import run as checkouts
from lab.checkouts.cases import CPU_CASES, CheckoutCase, list_cases
from lab.checkouts.comparison import Comparison, MeasuredCase, await_start, find_interval, start_ranks
from lab.checkouts.run import BENCH, CheckoutsSetting
from lab.commands import app
from lab.processes import RanksFailed
from stretto import ops
from stretto.collectives.selection import CHOICES, AlgorithmChoice
from stretto.memory.mps import mps_daemon
from stretto.ops.config import decode

SOURCE = Path(stretto.__file__).parents[1]

# Obeys as the real worker does, without torch. A case's name says what happens to it, and in which checkout.
FAKE_WORKER = """
import json, os, sys, time
settings = json.loads(sys.argv[1])
source, rank = os.environ["PYTHONPATH"].split(os.pathsep)[0], settings["rank"]
name = settings["store"].rsplit("-", 1)[1]
def answer(**reply): print(json.dumps(reply), flush=True)
answer(stretto=source + "/stretto/__init__.py", torch="", processors=7)
for line in sys.stdin:
    command = json.loads(line)
    words = command["case"].split()
    if name in words and command["do"] in words:
        if "raises" in words or ("alone" in words and rank == 1):
            answer(error="ValueError: no such plan")
            continue
        if "dies" in words and rank == 1:
            print("out of luck", file=sys.stderr)
            sys.exit(3)
        if "hangs" in words and rank == 1:
            time.sleep(600)
    if command["do"] == "prepare":
        answer()
    else:
        slower = 1.5 if name == "after" and "slow" in words else 1.0
        first = "before" if settings["store"].split("-")[-3] == "0" else "after"
        slower *= 1.2 if name != first and "placed" in words else 1.0
        answer(seconds=slower * (1 + rank) * 1e-3, host=1e-6)
"""


def case(name: str, *, is_bounded: bool = False) -> CheckoutCase:
    return CheckoutCase(name, "tiles", "eager", {"calls": 1}, is_bounded)


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks that obey without importing anything."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER)
    monkeypatch.setattr(comparison, "WORKER", worker)
    monkeypatch.setattr(processes, "_TO_END", 0.5)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, cases: list[CheckoutCase], **options: object) -> dict[str, object]:
    monkeypatch.setattr(checkouts, "CPU_CASES", cases)
    settings = {"ranks": 2, "rounds": 8, "most_rounds": 8, "seconds": 60.0, "on_cpu": True} | options
    return BENCH(CheckoutsSetting(SOURCE, **settings), out)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.usefixtures("forks_torch_processes")
def test_the_same_checkout_twice_is_measured_from_end_to_end_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    before = children()
    arguments = ["--before", str(SOURCE), "--cpu", "--ranks", "2", "--rounds", "2", "--most-rounds", "2"]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["checkouts", *arguments, "--seconds", "200", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads((out / "checkouts.json").read_text())
    assert [(row["case"], row["rounds"], row["is_bounded"]) for row in found["rows"]] == [
        (one.name, 2, one.is_bounded) for one in CPU_CASES
    ]
    assert all(row["before"] > 0 and row["after"] > 0 and row["host_before"] > 0 for row in found["rows"])
    assert (found["failure"], found["refused"]) == (None, {})
    assert found["checkouts"]["before"] == found["checkouts"]["after"]
    assert str(SOURCE) not in (out / "checkouts.json").read_text()  # results are committed
    assert "1 medians within" in (out / "checkouts.md").read_text()
    assert (out / "checkouts.png").stat().st_size > 1000
    assert list((tmp_path / "temporary").iterdir()) == []
    assert children() == before


@pytest.mark.exhaustive
def test_one_rank_trains(tmp_path):
    setting = CheckoutsSetting(SOURCE, ranks=1, rounds=2, most_rounds=2, seconds=200.0, on_cpu=True)
    found = BENCH(setting, tmp_path)
    assert [(row["case"], row["rounds"]) for row in found["rows"]] == [("tiny training step eager", 2)]
    assert (found["failure"], found["refused"]) == (None, {})


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.usefixtures("fake_worker")
def test_the_slowest_rank_counts_and_a_slower_checkout_is_named(monkeypatch, tmp_path):
    cases = [case("same one"), case("slow one"), case("slow bounded", is_bounded=True)]
    rows = {row["case"]: row for row in run(monkeypatch, tmp_path / "out", cases)["rows"]}
    assert [row["before"] for row in rows.values()] == pytest.approx([2000.0] * 3)  # rank 1's, in microseconds
    assert [row["verdict"] for row in rows.values()] == ["same", "slower", "slower"]
    assert rows["slow one"]["ratio"] == pytest.approx(1.5)
    text = (tmp_path / "out" / "checkouts.md").read_text()
    assert "cases: 1 of 2 medians within 2%" in text
    assert "slower: slow bounded" in text


@pytest.mark.usefixtures("fake_worker")
def test_the_benefit_of_a_place_on_the_gpu_cancels(monkeypatch, tmp_path):
    cases = [case("placed"), case("placed slow")]
    found = run(monkeypatch, tmp_path / "two", cases, placements=2, rounds=16, most_rounds=16)
    assert [row["ratio"] for row in found["rows"]] == pytest.approx([1.0, 1.5])
    assert [(row["rounds"], row["placements"]) for row in found["rows"]] == [(16, 2)] * 2
    found = run(monkeypatch, tmp_path / "one", cases, placements=1)
    assert [row["ratio"] for row in found["rows"]] == pytest.approx([1.2, 1.8])


@pytest.mark.sampled(quick=2)
@pytest.mark.usefixtures("fake_worker")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises in before prepare", "before: ValueError: no such plan"),
        ("alone in after prepare", "rank 1 of after failed alone at: prepare alone in after prepare"),
        (
            "dies in after prepare",
            "rank 1 of after died at: prepare dies in after prepare; its last words: out of luck",
        ),
        ("hangs in before prepare", "rank 1 of before did not answer within 0 s: prepare hangs"),
    ],
)
def test_a_case_that_one_checkout_cannot_prepare_is_left_out_and_the_others_are_measured(
    name, words, monkeypatch, tmp_path
):
    monkeypatch.setattr(comparison, "_PREPARE_LIMIT", 0.4)
    before = children()
    found = run(monkeypatch, tmp_path / "out", [case("first"), case(name), case("last")])
    assert [row["case"] for row in found["rows"]] == ["first", "last"]
    assert list(found["refused"]) == [name]
    assert words in found["refused"][name]
    assert "failure" not in found or found["failure"] is None
    assert children() == before


@pytest.mark.usefixtures("fake_worker")
def test_a_case_that_loses_ranks_while_it_is_measured_is_left_out_and_the_others_are_measured(monkeypatch, tmp_path):
    before = children()
    # The first look at a case's time is part of preparing it, so a rank dies there only in a later command.
    monkeypatch.setattr(Comparison, "_prepare", lambda *_: {"first": 1, "dies in after run": 1, "last": 1})
    cases = [case("first"), case("dies in after run"), case("last")]
    found = run(monkeypatch, tmp_path / "out", cases, seed=3)
    assert [(row["case"], row["rounds"] >= 8) for row in found["rows"]] == [("first", True), ("last", True)]
    assert "rank 1 of after died at: run dies in after run" in found["refused"]["dies in after run"]
    assert "failure" not in found or found["failure"] is None
    assert children() == before


@pytest.mark.long
@pytest.mark.usefixtures("fake_worker")
def test_ranks_that_are_lost_again_and_again_leave_what_was_measured_and_status_1(monkeypatch, tmp_path):
    names = ["first", *(f"dies in after run {number}" for number in range(5))]
    monkeypatch.setattr(Comparison, "_prepare", lambda *_: dict.fromkeys(names, 1))
    found = run(monkeypatch, tmp_path / "out", [case(name) for name in names], seed=3)
    assert "ranks were lost 4 times: rank 1 of after died at: run dies in after run" in str(found["failure"])
    assert len(found["refused"]) == 4
    assert json.loads((tmp_path / "out" / "checkouts.json").read_text())["failure"] == found["failure"]
    arguments = ["--before", str(SOURCE), "--cpu", "--ranks", "2", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, ["checkouts", *arguments]).exit_code == 1


@pytest.mark.long
@pytest.mark.usefixtures("fake_worker")
def test_measuring_stops_at_the_time_limit(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path / "out", [case("first")], seconds=2.0, rounds=10**6, most_rounds=10**6)
    assert 1 < found["rows"][0]["rounds"] < 10**6


@pytest.mark.usefixtures("fake_worker")
def test_ranks_that_import_another_checkout_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    setting = CheckoutsSetting(SOURCE, ranks=1, on_cpu=True)
    with start_ranks(setting, "before", tmp_path / "store-before", {}) as ranks:
        with pytest.raises(RanksFailed, match=r"before imported Stretto from .*, not from .*other"):
            await_start(ranks, tmp_path / "other", 20.0)


def test_a_case_is_undecided_until_its_interval_leaves_the_bounds():
    assert find_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # The binomial distribution gives the 10th and 21st of 30 (95.7%).
    assert find_interval(random.Random(0).sample(range(1, 31), 30)) == (10, 21)

    def judge(ratios: list[float]) -> str:
        rounds = len(ratios)
        return MeasuredCase([(1.0, ratio) for ratio in ratios], [(0.0, 0.0)] * rounds, [0] * rounds).judge()

    assert judge([1.0] * 30) == "same"
    assert judge([1.0] * 16 + [1.5] * 14) == "same"  # the median is within, whatever the interval is
    assert judge([1.0] * 14 + [1.5] * 16) == "unclear"
    assert judge([1.03] * 30) == "slower"
    assert judge([0.97] * 30) == "faster"
    assert judge([1.03] * 5) == "unclear"


def test_every_case_exists_and_has_a_unique_name():
    cases = list_cases()
    assert len({one.name for one in cases}) == len(cases)
    assert {one.kind for one in cases} == {"collective", "operator", "embedding", "tiles"}
    assert {one.mode for one in cases} == {"graph", "eager"}
    for one in cases:
        options = one.options
        if one.kind == "collective":
            way = AlgorithmChoice(options["algorithm"], options["protocol"], options["unroll"])
            assert way in CHOICES[options["collective"]]
        elif one.kind == "operator":
            decode(ops.KernelConfig(**options["plan"]).encode())  # ValueError for a plan that cannot be
            assert callable(getattr(ops, options["operator"]))


def make_mps(folder: Path, text: str) -> None:
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(f"#!{sys.executable}\n{text}")
    control.chmod(0o755)


def test_the_mps_daemon_is_ended_and_its_folder_removed_after_an_error_too(tmp_path, monkeypatch):
    log = tmp_path / "log"
    make_mps(
        tmp_path,
        "import os, sys\n"
        f"with open({str(log)!r}, 'a') as log:\n"
        "    command = '' if sys.argv[1:] else sys.stdin.read().strip()\n"
        "    print(*sys.argv[1:], command, os.environ['CUDA_MPS_PIPE_DIRECTORY'], file=log)\n",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    given: dict[str, str] = {}

    def interrupt_a_client() -> None:
        with mps_daemon(25) as variables:
            given.update(variables)
            assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_a_client()
    folder = given["CUDA_MPS_PIPE_DIRECTORY"]
    assert given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert [line.split() for line in log.read_text().splitlines()] == [["-d", folder], ["quit", folder]]
    assert not Path(folder).exists()


def test_the_mps_daemon_is_ended_where_the_process_that_started_it_is_killed(tmp_path):
    log, folders = tmp_path / "log", tmp_path / "folders"
    folders.mkdir()
    text = f"import sys\nopen({str(log)!r}, 'a').write(''.join(sys.argv[1:]) or sys.stdin.read())\n"
    make_mps(tmp_path, text)
    program = (
        "import os, signal\nfrom stretto.memory.mps import mps_daemon\n"
        "with mps_daemon(25):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PATH": str(tmp_path), "TMPDIR": str(folders)}
    )
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + LIMIT
    while list(folders.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert log.read_text() == "-dquit\n"


def test_a_machine_without_mps_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control, of NVIDIA's driver, is not on PATH"):
        with mps_daemon(25):
            pass
    make_mps(tmp_path, "import sys; sys.exit(1)")
    with pytest.raises(ValueError, match="the MPS daemon does not start"):
        with mps_daemon(25):
            pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--before", "nowhere"], "--before is 'nowhere', which holds no package stretto"),
        (["--before", str(SOURCE), "--after", "nowhere"], "--after is 'nowhere'"),
        (["--before", str(SOURCE), "--ranks", "0"], "ranks is 0, but must be at least 1"),
        (["--before", str(SOURCE), "--rounds", "1"], "rounds is 1, but must be at least 2"),
        (["--before", str(SOURCE), "--percentage", "30"], "4 ranks with 30% of the multiprocessors each: up to 25%"),
        (["--before", str(SOURCE), "--only", "LL64"], "no case has 'LL64' in its name"),
        (["--before", str(SOURCE), "--skip", "allreduce-LL64"], "no case has 'allreduce-LL64' in its name"),
        (["--before", str(SOURCE), "--skip", "graph,eager"], "no case is left to measure"),
        (["--before", str(SOURCE), "--placements", "3"], "--placements is 3, but two sets of ranks have 1 or 2"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(arguments, words):
    result = CliRunner().invoke(app, ["checkouts", *arguments], env={"COLUMNS": "200"})
    assert (result.exit_code, words in result.output) == (2, True), result.output


def test_cases_are_selected_by_parts_of_their_names_with_hyphens_for_spaces():
    setting = CheckoutsSetting(SOURCE, only=("allreduce-Copy", "tiles by push"), skip=("1-KB", "1024 rows"))
    assert {case.name for case in setting.cases()} == {
        *("allreduce Copy 64 KB graph", "allreduce Copy 1 MB graph", "allreduce Copy 16 MB graph"),
        *("allreduce Copy 1 MB eager", "tiles by push, 16 rows graph", "tiles by push, 16 rows eager"),
    }


def test_the_tensors_of_a_captured_case_stay_as_long_as_its_graph(monkeypatch):
    rank = worker._WorkerRank.__new__(worker._WorkerRank)
    rank.rank, rank.world, rank.device, rank._cases = 0, 2, torch.device("cpu"), {}
    tensors = []

    def make(case: str) -> Any:
        tensor = torch.zeros(4)
        tensors.append(weakref.ref(tensor))
        return worker._CaseCall(lambda: tensor.add_(1), 1, lambda: None)

    class Graph:
        """A graph that was captured knows addresses alone, so replays call nothing."""

        def replay(self) -> None:
            pass

    monkeypatch.setattr(rank, "_tiles", make, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    rank.prepare("prepare", "case", "tiles", "graph", {})
    gc.collect()
    assert tensors[0]() is not None
    rank._cases.clear()
    gc.collect()
    assert tensors[0]() is None
