# SPDX-License-Identifier: Apache-2.0
"""The backend's C++ part is compiled once, whoever asks for it, whatever is cut off, and outside of every limit."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.collectives.backend import factory, native
from stretto.memory import PeerError
from stretto.memory.groups import prepare_together

LOAD = "from stretto.collectives.backend.native import load_extension; print(load_extension().__name__)"
pytestmark = pytest.mark.usefixtures("forks_torch_processes")


class Compiler:
    """A compiler that starts a program of its own, as g++ does, and copies the compiled library once it may."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.gate, self._log = folder / "cache", folder / "gate", folder / "log"
        self._script = folder / "compiler"
        done = shlex.quote(str(native.find_library()))
        self._script.write_text(
            "#!/bin/sh\n"
            'while [ "$1" != -o ]; do shift; done\n'
            'echo cut off > "$2-part"; echo cut off > "$TMPDIR/part"\n'
            f"sh -c 'while [ ! -e {self.gate} ]; do sleep 0.05; done' & echo $$ $! >> {self._log}\n"
            f'wait; cp {done} "$2"\n'
        )
        self._script.chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        """Start a process that loads the C++ part."""
        variables = {
            "CXX": str(self._script),
            "STRETTO_CACHE": str(self.cache),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", LOAD], env=os.environ | variables, text=True, **pipes)

    def runs(self) -> list[list[int]]:
        """The processes of each run, the compiler's and that of what it started."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [[int(pid) for pid in line.split()] for line in lines]


def is_running(pid: int) -> bool:
    """Check whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition) -> None:
    """No limit but the test's own."""
    while not condition():
        time.sleep(0.02)


def test_environments_share_what_is_compiled_of_the_same_torch(tmp_path, monkeypatch):
    compiler, runs = tmp_path / "compiler", tmp_path / "runs"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {runs}\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    first = native.find_library()
    monkeypatch.setattr(native, "_paths", lambda: ["-isystem/another/environment"])
    assert native.find_library() == first
    assert len(runs.read_text().splitlines()) == 1
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert native.find_library() != first
    assert runs.read_text().splitlines()[1].endswith("-isystem/another/environment")


@pytest.mark.long
def test_one_process_compiles_while_the_others_say_that_they_wait(tmp_path):
    compiler = Compiler(tmp_path)
    first = compiler.start()
    wait_until(compiler.runs)
    others = [compiler.start() for _ in range(2)]
    lines = [other.stderr.readline() for other in others]
    compiler.gate.touch()
    outputs = [process.communicate() for process in (first, *others)]
    assert [output for output, _ in outputs] == [f"{native.MODULE}\n"] * 3, outputs
    what = "the C++ part of the torch.distributed backend"
    said = outputs[0][1]
    assert said.startswith(f"stretto: compiling {what} with {tmp_path}/compiler into {compiler.cache}, once: ")
    assert "about a minute" in said
    assert said.count("\n") == 1
    for line in lines:
        assert line.endswith(f" waits for another one that compiles {what} into {compiler.cache}\n")
    assert [errors for _, errors in outputs[1:]] == ["", ""]
    assert len(compiler.runs()) == 1


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_what_is_killed_leaves_nothing_that_the_next_process_minds(tmp_path):
    compiler = Compiler(tmp_path)
    killed, waiting = compiler.start(), None
    try:
        wait_until(compiler.runs)
        waiting = compiler.start()
        waiting.stderr.readline()  # it waits
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        wait_until(lambda: len(compiler.runs()) == 2)  # who waited compiles now
        wait_until(lambda: not any(map(is_running, compiler.runs()[0])))
        compiler.gate.touch()
        output, errors = waiting.communicate()
    finally:
        compiler.gate.touch()
    assert output == f"{native.MODULE}\n", errors
    assert sorted(path.suffix for path in compiler.cache.iterdir()) == [".lock", ".so"]


class CountedWaits(dist.HashStore):
    """Counts the waits that have come to their limit."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0

    def wait(self, *arguments) -> None:
        try:
            super().wait(*arguments)
        except RuntimeError:
            self.ended += 1
            raise


def test_ranks_wait_for_one_that_compiles_longer_than_their_limit():
    store, limit = CountedWaits(), timedelta(seconds=0.1)
    begun, may_end, errors = threading.Event(), threading.Event(), []

    def compile_long() -> None:
        begun.set()
        may_end.wait()

    def join(prepare) -> None:
        try:
            prepare_together(prepare, store, 2, limit)
        except PeerError as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(prepare,)) for prepare in (compile_long, lambda: None)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    wait_until(lambda: store.ended > 2 or not threads[1].is_alive())
    may_end.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.ended > 2


def test_the_limit_holds_for_ranks_that_do_not_come():
    with pytest.raises(PeerError, match="1 of a new group's 2 ranks came within "):
        prepare_together(lambda: None, dist.HashStore(), 2, timedelta(seconds=0.1))


def join_groups():
    """The order in which a new group compiles and connects."""
    order, gloo, find = [], dist.ProcessGroupGloo, factory.find_extension

    def compile_first():
        order.append("compiles")
        return find()

    def connect(*arguments, **options):
        order.append("connects")
        return gloo(*arguments, **options)

    with (
        mock.patch.object(factory, "find_extension", compile_first),
        mock.patch.object(dist, "ProcessGroupGloo", connect),
    ):
        dist.new_group(backend="stretto")
    return order[:2]  # later calls find what is there


def test_a_group_compiles_before_its_limits_begin(ranks):
    assert ranks(2).run(join_groups) == [["compiles", "connects"]] * 2
