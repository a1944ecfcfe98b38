# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of ranks on GPUs. One pool of processes serves many tests, which take less time than its start.

`world` is the number of a test's ranks. With several GPUs, each rank has one, and a test runs once, with as many ranks
as `ranks(..., own=...)` allows. With a single GPU, ranks share it (tests.gpu.sharing), and a test runs with each number
of `ranks(..., among=...)`; `make gpu-test` takes only those that are named first. A test of NCCL, NVLink or times is
marked `own_gpus(reason)`, and is skipped if ranks share a GPU.

--shard K/N runs the K-th of N parts of the selected tests. --passed FILE leaves out the tests that have passed
according to the file, and records those that pass now.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.memory.mps import has_mps
from tests.gpu import resuming, sharing
from tests.gpu.sharing import GpuRanks

SHARED_LIMIT = 600  # seconds for a test whose ranks share a GPU; a job of the pool ends before, with its stacks
_SHOWN = 4000  # characters of a failure


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", default="1/1", help="run the K-th of N parts of the GPU tests")
    parser.addoption("--passed", metavar="FILE", help="leave out the tests that this file names, and add what passes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sampled, own, among): numbers of ranks; see tests/gpu/conftest.py")
    config.addinivalue_line("markers", "own_gpus(reason): each rank needs a GPU to itself")
    resuming.configure(config)
    if threading.current_thread() is threading.main_thread():
        # A run that is ended by its time limit also ends its processes and MPS's daemon.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return
    marker = next(metafunc.definition.iter_markers("ranks"), None)
    sampled = (2, 5) if marker is None else marker.args
    options = {} if marker is None else marker.kwargs
    worlds = sharing.choose_worlds(sampled, options.get("own", (1, 2, 3, 4)), options.get("among", sharing.SHARED))
    needs_own = metafunc.definition.get_closest_marker("own_gpus") is not None
    if needs_own and sharing.count_gpus() < 2:
        worlds = [(count, False) for count, _ in worlds if count == 1] or [(2, False)]
    metafunc.parametrize(
        "world",
        [
            pytest.param(count, id=f"{count}-ranks", marks=[pytest.mark.exhaustive] if is_exhaustive else [])
            for count, is_exhaustive in worlds
        ],
        indirect=True,
        scope="session",  # pytest puts tests of one number next to each other
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    resuming.choose(config, items)
    if sharing.count_gpus() == 1:
        for item in items:
            item.add_marker(pytest.mark.timeout(SHARED_LIMIT), append=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure when it happens: a run that is cut off shows no summary."""
    if report.failed:
        print(f"\n{report.nodeid} failed in {report.when}:\n{report.longreprtext[-_SHOWN:]}", file=sys.__stderr__)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> int:
    """The number of the test's ranks."""
    count: int = request.param
    if sharing.count_gpus() == 0:
        pytest.skip("torch finds no GPU on this machine")
    if sharing.is_shared(count) and not has_mps() and count not in sharing.WITHOUT_MPS:
        pytest.skip(f"{count} ranks share a GPU by time slices, too slowly: nvidia-cuda-mps-control is not installed")
    return count


@pytest.fixture(scope="session")
def gpu_pool(world: int) -> Iterator[GpuRanks]:
    """A process a rank, started by the first test that uses them; one pool at a time."""
    pool = GpuRanks(world)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="session")
def run_ranks(gpu_pool: GpuRanks) -> Callable[..., list[Any]]:
    """`run_ranks(4, function, *arguments)` runs a module's function on 4 ranks, in a process group of their own."""
    return gpu_pool.run


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that cannot run on a shared GPU, before any of their fixtures."""
    if threading.current_thread() is threading.main_thread():
        # torch's launcher, which some tests call, has a handler of its own.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    marker = item.get_closest_marker("own_gpus")
    callspec = getattr(item, "callspec", None)
    count = None if callspec is None else callspec.params.get("world")
    if marker is not None and count is not None and sharing.is_shared(count):
        pytest.skip(f"{count} ranks need a GPU each, and there is {sharing.count_gpus()}: {marker.args[0]}")


@pytest.fixture(autouse=True)
def environment_of_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts by itself share the GPU as the pool's ranks do."""
    if "world" not in request.fixturenames:
        return
    count = request.getfixturevalue("world")
    if not sharing.is_shared(count):
        return
    for name, value in request.getfixturevalue("gpu_pool").environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"), prepend=":")
