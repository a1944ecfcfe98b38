# SPDX-License-Identifier: Apache-2.0
"""Tests of what commands say when the machine fails them: an output that is full or closed, too little memory."""

import importlib
import os
import runpy
import signal
import subprocess
import sys
from types import ModuleType

import pytest
from tests.cli.test_commands import stretto_command
from tests.processes import shared_server

from stretto.cli.console import reporting_faults

doctor_module = importlib.import_module("stretto.cli.doctor")  # the package has the function of this name

COMMANDS = (
    "--help",
    "--version",
    "plan --help",
    "plan --model gpt-5b --cluster perlmutter --gpus 8 --batch 8 --seq-len 2048",
    "plan --model gpt-5b --cluster perlmutter --gpus 8 --batch 8 --seq-len 2048 --json",
    "cluster list",
    "collective compile ring-all-reduce --ranks 4",
    "pipeline show 1f1b --pipe 4 --micro-batches 8 --json",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_is_full_ends_a_command_with_a_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [shared_server().python, "-m", "stretto", *command.split()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "stretto: output: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "status"), [('"$@" >&-', 0), ('{ sleep 0.1; "$@"; echo $? >&2; } | :', 128 + signal.SIGPIPE)]
)
def test_an_output_that_is_closed_is_none_and_a_reader_that_has_ended_ends_the_command(script, status):
    command = [shared_server().python, "-m", "stretto", "cluster", "list"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, f"{int(status)}\n" if status else "")


def test_a_reader_that_has_ended_is_told_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [shared_server().python, "-m", "stretto", "cluster", "show", "perlmutter"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    assert done.returncode != 0
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "stretto: memory does not suffice"),
        (ImportError("libtorch_cpu.so: failed to map segment"), "memory does not suffice: libtorch_cpu.so: failed"),
        (OSError(5, "Input/output error", "a/file"), "stretto: a/file: Input/output error"),
    ],
)
def test_faults_of_the_machine_are_a_line(capfd: pytest.CaptureFixture[str], error: Exception, line: str) -> None:
    kept = os.dup(1)
    with pytest.raises(SystemExit) as ended, reporting_faults():
        raise error
    os.dup2(kept, 1)
    os.close(kept)
    assert ended.value.code == 2
    assert line in capfd.readouterr().err


def test_faults_of_the_program_keep_their_traceback() -> None:
    with pytest.raises(ImportError, match="no_such"), reporting_faults():
        import no_such  # noqa: F401


def test_doctor_reports_what_else_works_where_one_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr(doctor_module, "LOOKS", (fail, doctor_module._places))
    status, text = stretto_command("doctor")
    assert status == 0
    assert "fail - cannot be looked at: libtorch_cpu.so: failed to map segment" in text
    assert "cache" in text


def test_ctrl_c_ends_a_command_whose_modules_are_still_imported_without_a_traceback(monkeypatch):
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt if name == "main" else AttributeError

    module = ModuleType("stretto.cli")
    module.__getattr__ = interrupt
    monkeypatch.setitem(sys.modules, "stretto.cli", module)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("stretto", run_name="__main__")
    assert ended.value.code == 128 + signal.SIGINT


def test_ctrl_c_is_not_lost_in_an_import_that_drops_exceptions(tmp_path):
    (tmp_path / "dropping.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    program = (
        "import sys, types, stretto.__main__ as command; sys.modules['stretto.cli'] = cli = types.ModuleType('');"
        "cli.main = lambda: print('went on', __import__('dropping')); command.main()"
    )
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
