# SPDX-License-Identifier: Apache-2.0
"""Tests of what all benches have in common: ranks of their own, and an end."""

import json
import os
import signal
import tempfile
import threading
from dataclasses import dataclass

import pytest
import typer

from lab.harness import Bench, Measured, Table, column
from stretto.bench.harness import run_ranks
from stretto.cli.console import refusing_bad_input


@pytest.mark.usefixtures("forks_processes")
def test_ranks_give_what_rank_0_returns_and_leave_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_ranks(2, signal.getsignal, signal.SIGINT) == signal.SIG_IGN  # a terminal's, which this process handles
    assert list(tmp_path.iterdir()) == []


def kill(victim):
    """Rank 1 is killed, or asks the command to stop, as Ctrl-C does, beside a rank that goes on."""
    if os.environ["RANK"] == "1":
        process, number = (os.getpid(), signal.SIGKILL) if victim == "rank" else (os.getppid(), signal.SIGTERM)
        os.kill(process, number)
    threading.Event().wait()


@pytest.mark.usefixtures("forks_processes")
def test_a_killed_rank_is_named_and_a_signal_ends_all_with_its_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(typer.Exit) as ended, refusing_bad_input():
        run_ranks(2, kill, "rank")
    assert ended.value.exit_code == 1
    assert "stretto: rank 1 of 2 failed: it was killed by SIGKILL" in capsys.readouterr().err
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped, refusing_bad_input():
        run_ranks(2, kill, "command")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert "stretto: stopped by SIGTERM" in capsys.readouterr().err
    assert not list(tmp_path.glob("stretto-*"))
    signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class MadeUpSetting:
    ranks: int = 2


@dataclass(frozen=True)
class Row:
    case: str = column("case")
    seconds: float | None = column("time (s)", "{:.1f}", default=None)
    memory: float | None = column("memory (GiB)", default=None)
    detail: tuple[int, ...] = ()


@dataclass(frozen=True)
class Summary:
    fastest: str = column("fastest")


def test_a_bench_writes_tables_without_empty_columns_and_the_errors_of_rows(tmp_path, capsys):
    rows = [Row("one", 1.25, detail=(3,)), {"case": "two", "error": "out of memory"}]
    summary = Table("Choice", [Summary("one")], key="summary")
    measured = Measured(rows, {"machine": {"devices": "any"}}, ("a line",), (summary,))
    bench = Bench("made-up", "Made up.", MadeUpSetting, lambda setting: measured, Row, "Title")
    said = bench(MadeUpSetting(), tmp_path)
    assert [row["case"] for row in said["rows"]] == ["one", "two"]
    written = json.loads((tmp_path / "made-up.json").read_text())
    assert (written["summary"], written["setting"]) == ([{"fastest": "one"}], {"ranks": 2})
    assert written["rows"] == [
        {"case": "one", "seconds": 1.25, "memory": None, "detail": [3]},
        {"case": "two", "error": "out of memory"},
    ]
    table = (tmp_path / "made-up.md").read_text()
    assert "| case | time (s) | error |\n|---|---|---|\n| one | 1.2 | - |\n| two | - | out of memory |" in table
    assert table.endswith("Choice:\n\n| fastest |\n|---|\n| one |\n\na line\n")
    assert (tmp_path / "made-up.csv").read_text() == "case,seconds,error\none,1.25,\ntwo,,out of memory\n"
    assert "a line" in capsys.readouterr().out


def test_a_bench_may_write_several_results_each_with_a_name(tmp_path):
    def run(setting, out):
        yield Measured([Row("one")], name="first")
        yield Measured([Summary("one")], name="second")

    said = Bench("made-up", "Made up.", MadeUpSetting, run, Row, "Title")(MadeUpSetting(), tmp_path)
    assert len(said["rows"]) == 2
    assert {path.name for path in tmp_path.glob("*.json")} == {"first.json", "second.json"}
