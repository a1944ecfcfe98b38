# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of backends, with the backend "stretto" in the place of the one that BACKEND names.

`python tests/backend_suite/run.py` runs this file once for each of its configurations, which it passes by the variables
that the suite reads when it is imported: BACKEND and WORLD_SIZE. Every rank of every test is a process.
"""

import argparse
import logging
import os
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.distributed_test as suite
from tests.backend_suite.expected import expected_failures
from torch.testing._internal import common_distributed

import stretto  # noqa: F401  (registers the backend)
from stretto.collectives import call_counts, monitored_barrier
from stretto.collectives.backend.native import find_extension

ON_GPUS = suite.BACKEND == "nccl"
PASSED = "STRETTO_SUITE_PASSED"  # names the file of what has passed
CALLS = "STRETTO_SUITE_CALLS"  # names the file in which ranks count what ran their calls
PATIENCE = 600  # seconds: limits of the suite's own are for machines that do nothing else


def take_the_place() -> None:
    """Have this process's groups of the backend BACKEND be of stretto, and the suite look for stretto's ranges."""
    make_default, make_group, destroy = dist.init_process_group, dist.new_group, dist.destroy_process_group
    find_events = suite.get_profiling_event

    def named(backend: str | None) -> str | None:
        return "stretto" if backend == suite.BACKEND else backend

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        make_default(named(backend), *args, **options)

    def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return make_group(*args, backend=named(backend), **options)

    def get_profiling_event(name: str, *args: Any, **options: Any) -> list[Any]:
        """Each call has one range: of stretto, or of the backend that it was left to. Here all have stretto's name.

        Before a group's first call stretto makes calls of gloo: it installs schedules, and ranks agree on memory.
        """
        for by in ("stretto", "nccl", "gloo") if ON_GPUS else ("stretto", "gloo"):
            inner = name.replace("stretto:", f"{by}:")
            if found := find_events(inner, *args, **options):
                for event in found:
                    event.name = event.name.replace(inner, name)
                return found
        return []

    def destroy_process_group(*args: Any) -> None:
        """Write down what has run the calls."""
        if not args:
            with open(os.environ[CALLS], "a") as file:
                for (_, by), number in call_counts().items():
                    file.write(f"{by.split()[0]} {number}\n")
        destroy(*args)

    dist.init_process_group = init_process_group
    dist.destroy_process_group = destroy_process_group
    dist.new_group = new_group
    dist.monitored_barrier = monitored_barrier
    suite.get_profiling_event = get_profiling_event
    for known in (suite.PROFILING_SUPPORTED_BACKENDS, suite.CUDA_PROFILING_SUPPORTED_BACKENDS):
        known.append("stretto")


def fork_from_server(target: Callable[..., None], args: tuple[Any, ...], **options: Any) -> BaseProcess:
    """Make a process from a server that has imported the suite: it has no GPU in use, and an older environment."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([suite.__name__, "stretto.collectives.backend.calls"])
    process: BaseProcess = context.Process(target=run_in, args=(dict(os.environ), target, *args), **options)
    return process


def run_in(environment: dict[str, str], target: Callable[..., None], *args: Any, **options: Any) -> None:
    """Run the target with these environment variables: tests tell their ranks a folder by one."""
    os.environ.update(environment)
    target(*args, **options)


class BackendTest(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """The suite. Each test's ranks are forked, which is fast; where they use GPUs, from a process that uses none."""

    def __init__(self, *names: str, **named: str) -> None:
        super().__init__(*names, **named)
        # unittest reads it: such a test must fail.
        self.__unittest_expecting_failure__ = self._testMethodName in EXPECTED

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(fork_from_server if ON_GPUS else torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *args: Any, **options: Any) -> None:
        take_the_place()
        super()._run(*args, **options)

    def _barrier(self, wait_for: int | None = None, timeout: float = PATIENCE) -> None:
        super()._barrier(wait_for, max(timeout, PATIENCE))


def name_of(test: unittest.TestCase) -> str:
    """The test in this configuration."""
    return f"{suite.BACKEND} {os.environ['WORLD_SIZE']} {'schedules ' * HAS_SCHEDULES}{test._testMethodName}"


HAS_SCHEDULES = "STRETTO_SCHEDULES" in os.environ
EXPECTED = expected_failures(suite.BACKEND, int(os.environ["WORLD_SIZE"]))
suite.default_pg_timeout = PATIENCE
common_distributed.TIMEOUT_DEFAULT = PATIENCE
common_distributed.TIMEOUT_OVERRIDE.clear()
common_distributed.logger.setLevel(logging.ERROR)


class Result(unittest.TextTestResult):
    """A result that counts what has passed, and names it in the file PASSED: a run that was cut off goes on."""

    passed = 0

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.passed += 1
        if PASSED in os.environ:
            with open(os.environ[PASSED], "a") as file:
                file.write(f"{name_of(test)}\n")


def main(patterns: list[str], part: int, parts: int) -> bool:
    """Run one of so many parts of the tests whose names contain one of the patterns.

    Prints a summary. Returns whether all is as expected.
    """
    find_extension()  # compiled once, rather than by the first test, whose limit would run
    before = Path(os.environ.get(PASSED, ""))
    passed = set(before.read_text().splitlines()) if before.is_file() else set()
    chosen = [
        test
        for test in unittest.TestLoader().loadTestsFromTestCase(BackendTest)
        if name_of(test) not in passed and (not patterns or any(pattern in test.id() for pattern in patterns))
    ]
    chosen.sort(
        key=lambda test: hasattr(getattr(test, test._testMethodName), "__unittest_skip__")
    )  # these take no time
    tests = unittest.TestSuite(chosen[part - 1 :: parts])
    ran_as = Counter[str]()
    with tempfile.NamedTemporaryFile("r") as file:
        os.environ[CALLS] = file.name
        result = unittest.TextTestRunner(verbosity=2, resultclass=Result).run(tests)
        for line in file:
            by, number = line.split()
            ran_as[by] += int(number)
    for name in sorted(test._testMethodName for test, _ in result.expectedFailures):
        print(f"expected failure: {name}: {EXPECTED[name]}")
    for reason, count in sorted(Counter(reason for _, reason in result.skipped).items()):
        print(f"{count} skipped by the suite: {reason}")
    wrong = [test._testMethodName for test, _ in (*result.failures, *result.errors)]
    for name in wrong:
        print(f"FAILED: {name}")
    for test in result.unexpectedSuccesses:
        print(f"PASSES, and is listed as a failure: {test._testMethodName}: {EXPECTED[test._testMethodName]}")
    print(
        f"{result.passed} passed, {len(result.expectedFailures)} failed as expected, {len(wrong)} failed, "
        f"{len(result.unexpectedSuccesses)} passed against expectation, {len(result.skipped)} skipped"
    )
    print("calls in default groups: " + ", ".join(f"{number} by {by}" for by, number in ran_as.most_common()))
    has_run = result.passed > 0 and (not HAS_SCHEDULES or ran_as["schedule"] > 0)
    return result.wasSuccessful() and (has_run or bool(passed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--part", default="1/1", metavar="K/N")
    options = parser.parse_args()
    sys.exit(not main(options.patterns, *map(int, options.part.split("/"))))
