# SPDX-License-Identifier: Apache-2.0
"""Python processes forked from a server: to whoever starts them, they are as Python's own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import LIMIT, PythonServer, _name_methods_without_sources, _Server


@pytest.fixture(scope="module", params=[pytest.param("started", marks=pytest.mark.long), "forked"])
def server(request: pytest.FixtureRequest) -> Iterator[PythonServer]:
    server = PythonServer(["json"])
    if request.param == "forked":
        server.fork()
    yield server
    folder = Path(server.python).parent
    server.close()
    assert not folder.exists()


CASES = {
    "output": "print('out'); import sys; print('err', file=sys.stderr)",
    "status": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('no luck')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "input": "print(input())",
    "surroundings": "import os, sys; print(sys.argv, os.getcwd(), os.environ['WORD'], sys.path[:1], os.getppid())",
    "threads": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "at exit": "import atexit; atexit.register(print, 'left')",
    "name": "print(__name__)",
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_does_what_it_does_by_python(server: PythonServer, tmp_path: Path, case: str) -> None:
    ran = [
        subprocess.run(
            [python, "-c", CASES[case], "an argument"],
            cwd=tmp_path, env=os.environ | {"WORD": "word"}, input="a line\n", capture_output=True, text=True,
        )
        for python in (sys.executable, server.python)
    ]  # fmt: skip
    assert ran[1].returncode == ran[0].returncode
    assert ran[1].stdout == ran[0].stdout
    if case != "interrupted":  # whose traceback has more lines
        assert ran[1].stderr == ran[0].stderr


@pytest.mark.long
def test_files_and_modules_run_too(server: PythonServer, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for arguments in ([str(tmp_path / "program.py")], ["-m", "program"], ["-B", "-m", "program"]):
        ran = subprocess.run([server.python, *arguments, "x"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ran.stdout == "__main__ ['x']\n"


@pytest.mark.long
def test_modules_imported_with_other_variables_are_left_to_python(server: PythonServer) -> None:
    for value, is_forked in (("", True), ("1", False)):
        variables = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
        variables |= {"TRITON_INTERPRET": value} if value else {}
        code = "import sys; print(sys.executable)"
        ran = subprocess.run([server.python, "-c", code], env=variables, capture_output=True, text=True, check=True)
        assert (ran.stdout.strip() == server.python) == is_forked


def test_inherited_descriptors_keep_their_numbers(server: PythonServer) -> None:
    reader, writer = os.pipe()
    subprocess.run([server.python, "-c", f"import os; os.write({writer}, b'here')"], pass_fds=[writer], check=True)
    assert os.read(reader, 10) == b"here"
    os.close(reader)
    os.close(writer)


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_process_and_a_kill_takes_it_along(server: PythonServer, number: signal.Signals) -> None:
    process = subprocess.Popen([server.python, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert server.process_of(process.pid) == pid != process.pid
    process.send_signal(number)
    assert process.wait() == -number
    deadline = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.stdout.close()


@pytest.mark.long
def test_a_signal_to_a_process_that_has_just_been_forked_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the server's handler, which ends all processes: a rank's SIGTERM killed the other ranks."""
    detach = _Server._detach

    def detach_late(self: _Server, connection: socket.socket) -> None:
        time.sleep(0.5)
        detach(self, connection)

    monkeypatch.setattr(_Server, "_detach", detach_late)
    server = PythonServer([])
    server.fork()
    other = subprocess.Popen([server.python, "-c", WAITS], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    process = subprocess.Popen([server.python, "-c", WAITS])
    server.process_of(process.pid)  # it is forked
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    time.sleep(0.1)
    assert other.poll() is None
    server.close()
    other.wait()
    other.stdout.close()


def test_torchruns_rendezvous_names_the_methods_that_torch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    torchs = dynamic_rendezvous.get_method_name
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", torchs)
    _name_methods_without_sources()

    def record() -> tuple[str, str]:
        return torchs(), dynamic_rendezvous.get_method_name()

    def join() -> tuple[str, str]:
        return record()

    assert dynamic_rendezvous.get_method_name is not torchs
    assert join() == ("join", "join")
