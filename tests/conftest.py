# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test: ranks, from one pool of processes, and others whose kernels are interpreted.

`make test` leaves out tests that are `long`, which `make test-long`, CI and pytest without options run, and those that
are `exhaustive`, which only `make test-exhaustive` runs. A test says so itself, or is `sampled(n)`: all but n of its
cases are exhaustive. These are drawn by the test's name, so that everyone runs the same ones.

Only a session that is given a path in tests/gpu sees GPUs. All other tests are of CPUs, and what is forked from a
process that has looked for a GPU can use none.
"""

import contextlib
import functools
import gc
import multiprocessing.spawn
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.processes import PythonServer, close_servers, shared_server

if TYPE_CHECKING:  # it imports torch, which pytest_configure does, and not where xdist only waits
    from tests.pool import Pool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, whose processes would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, import torch, and fork the server of processes that import Stretto before this one does."""
    if not names_gpu_tests(config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch asks; processes, xdist's workers too, inherit it
    if config.option.collectonly or _only_waits(config):
        return
    with mock.patch.dict(os.environ, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}):  # else torch imports Stretto
        import torch
    if sys.platform == "linux" and "stretto" not in sys.modules:
        shared_server("torch").fork()
    torch._import_device_backends()
    from hypothesis import HealthCheck, settings

    # How long an example takes, or is drawn, says something of the machine's other load alone.
    settings.register_profile("stretto", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("stretto")


def names_gpu_tests(arguments: Sequence[str]) -> bool:
    """True if one of pytest's arguments is a path in tests/gpu."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    return any(path.is_relative_to(Path(__file__).with_name("gpu")) for path in paths)


def _only_waits(config: pytest.Config) -> bool:
    """True if xdist's workers run the tests, and this process is none of them."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected: to look through all modules' objects takes a quarter of that time.

    Not from this file's import on, since workers import it, too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left out of the samples, before pytest picks by marks."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, found in cases.items():
        size = min(*found[0].get_closest_marker("sampled").args, len(found))
        kept = random.Random(name).sample(range(len(found)), size)
        for index in set(range(len(found))) - set(kept):
            found[index].add_marker(pytest.mark.exhaustive)


class Ranks:
    """So many ranks of the session's pool."""

    def __init__(self, pool: "Pool", count: int) -> None:
        self._pool = pool
        self._count = count

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank, in a process group of their own; results in rank order.

        `timeout` is in seconds. Raises what the first failing rank raised; RankError for a dead or hanging rank.
        """
        return self._pool.run(self._count, function, *args, timeout=timeout, **kwargs)


_POOL = pytest.StashKey["Pool"]()


def pytest_collection_finish(session: pytest.Session) -> None:
    import torch

    from tests.pool import Pool, forget_stacks

    gc.freeze()  # modules and collected tests, so that collecting garbage during tests stays cheap
    gc.enable()
    session.config.stash[_POOL] = Pool()
    if testing := sys.modules.get("typer.testing"):  # it makes the whole command anew for each call
        testing._get_command = functools.cache(testing._get_command)
    if not torch.cuda.is_available():
        forget_stacks()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the servers of this session's processes, which now has what they need.

    Not before: while tests are collected, pytest has changed how warnings are shown. Nor where there are GPUs: what is
    forked from a process that has looked for them cannot use them, so that servers are Pythons of their own there.
    """
    import torch

    is_run = _POOL in session.config.stash and not session.config.getoption("collectonly")  # not where xdist only waits
    if is_run:
        _compile_backend()
    if is_run and sys.platform == "linux" and not torch.cuda.is_available():
        from tests.pool import fork_default_server

        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what processes print belongs to the test that runs meanwhile
        shared_server("commands").fork()
        fork_default_server()
        if any("pool" in getattr(item, "fixturenames", ()) for item in session.items):
            session.config.stash[_POOL].fork_server()
        capture.suspend_global_capture()
    # Of this process alone: by default, a test that parses our source spends most of its time on collecting garbage.
    gc.set_threshold(10_000, 20, 20)


def _compile_backend() -> None:
    """Have the backend's C++ part compiled before any test's limit begins."""
    from stretto.collectives.backend.native import CompilerError, find_library

    with contextlib.suppress(CompilerError):  # tests that need it say so
        find_library()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> "Iterator[Pool]":
    """The session's worker processes, started by the first test that uses them."""
    pool = request.config.stash[_POOL]
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreted_pool() -> "Iterator[Pool]":
    """Processes that interpret Triton's kernels, apart from the others: Triton decides that when a kernel is made."""
    from tests.pool import Pool

    needed = ["stretto.ops", "stretto.parallel.install", "stretto.train.trainer"]
    modules = [*needed, "triton.experimental.gluon"]  # which Triton's interpreter imports for its first kernel
    pool = Pool(4, {"TRITON_INTERPRET": "1"}, modules=modules, python=shared_server("torch").python)
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def _servers() -> Iterator[None]:
    """Servers of processes end with the session, and so does all that runs in what they have forked."""
    yield
    close_servers()


@pytest.fixture
def forks_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that `sys.executable` starts, or that are spawned, are forked from one that has imported commands."""
    _start_processes_by(shared_server("commands"), monkeypatch)


@pytest.fixture
def forks_interpreted_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `forks_processes`, for those whose kernels are interpreted."""
    _start_processes_by(shared_server("interpreted commands"), monkeypatch)


@pytest.fixture
def forks_torch_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `forks_processes`, from one that has imported torch and nothing of Stretto, which they import themselves."""
    _start_processes_by(shared_server("torch"), monkeypatch)


@pytest.fixture
def interpret(interpreted_pool: "Pool") -> Callable[..., list[Any]]:
    """`interpret(4, function, *args)` runs a module-level function on 4 ranks whose kernels are interpreted.

    It returns their results in rank order. `timeout` is in seconds.
    """

    def run(count: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        return interpreted_pool.run(count, function, *args, timeout=timeout)

    return run


def _start_processes_by(server: PythonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", server.python)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(server.python))


@pytest.fixture
def ranks(pool: "Pool") -> Callable[[int], Ranks]:
    """`ranks(4).run(function, *args)` runs a module-level function on 4 ranks."""
    return lambda count: Ranks(pool, count)
