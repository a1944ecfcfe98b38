# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs: one a GPU if there are enough, else several share a GPU, under MPS if it is installed.

NVIDIA's MPS (multi-process service) runs the kernels of several processes on one GPU at the same time, and gives each
process a share of the multiprocessors (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, read when a process first uses CUDA: hence a
pool of processes for each number of ranks). Without MPS the processes take turns, in time slices of milliseconds.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch

from stretto.memory.mps import has_mps, mps_daemon, share_for
from stretto.memory.shared_gpus import OVERLAPPING, SWITCH
from tests.gpu import compile_once
from tests.pool import Pool

SHARED = (2, 3, 4, 5, 8)
"""How many ranks share one GPU."""
WITHOUT_MPS = (2,)
"""Numbers of ranks without MPS, where a barrier of 4 ranks takes 7 ms instead of 0.1 ms."""


def count_gpus() -> int:
    return torch.cuda.device_count()


def is_shared(world: int) -> bool:
    """True if so many ranks have to share this machine's GPUs."""
    return count_gpus() < world


def choose_worlds(sampled: Sequence[int], own: Sequence[int], among: Sequence[int]) -> list[tuple[int, bool]]:
    """The numbers of ranks that a test runs with here, and whether each is exhaustive.

    sampled: what `make gpu-test` runs where ranks share a GPU, of `among`, which `make gpu-test-exhaustive` completes.
    own: the numbers for ranks with a GPU each; the largest that the GPUs suffice for is run, else the least, shared. On
    8 GPUs, tests of several numbers run with 8 ranks if 8 may share a GPU.
    """
    gpus = count_gpus()
    if gpus >= 2:
        own = [*own, *({8} & {*among} if len(own) > 1 else ())]
        return [(max((count for count in own if count <= gpus), default=min(own)), False)]
    return [(count, count not in sampled) for count in among]


def sampled(chosen: Sequence[Any], cases: Sequence[Any]) -> list[Any]:
    """A test's cases, of which all but the chosen ones are exhaustive: a kernel's first call compiles for seconds."""
    assert all(case in cases for case in chosen)
    marks = {False: [pytest.mark.exhaustive], True: []}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in chosen]) for case in cases
    ]


class GpuRanks:
    """A pool of `world` processes on GPUs, which share them if there are fewer, under MPS if it is installed.

    `environment` has the variables of processes that share as these do. `close` it, whatever happens.
    """

    def __init__(
        self,
        world: int,
        make_pool: Callable[..., Pool] = Pool,
        make_daemon: Callable[[int], AbstractContextManager[Mapping[str, str]]] = mps_daemon,
    ) -> None:
        self.environment: dict[str, str] = {}
        self._world, self._make_pool, self._make_daemon = world, make_pool, make_daemon
        self._started = ExitStack()
        self._start()

    def run(
        self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0, **kwargs: Any
    ) -> list[Any]:
        """Run a function on ranks as `Pool.run` does; ranks that share a GPU may take twice as long."""
        try:
            return self._pool.run(ranks, function, *args, timeout=timeout * (2 if self.environment else 1), **kwargs)
        finally:
            if not self._pool.pids() and self.environment:
                # The pool has killed its processes, which may have broken MPS's server in a kernel.
                self._started.close()
                self._start()

    def close(self) -> None:
        """End the processes, then the daemon."""
        self._started.close()

    def _start(self) -> None:
        backend = "cpu:gloo,cuda:nccl"
        if is_shared(self._world):
            backend = "cpu:gloo,cuda:gloo"
            self.environment = {SWITCH: "1", OVERLAPPING: "1"}
            if has_mps():
                ranks_of_a_gpu = -(-self._world // count_gpus())
                self.environment |= self._started.enter_context(self._make_daemon(share_for(ranks_of_a_gpu)))
        cache = {compile_once.VARIABLE: compile_once.NAME}
        self._pool = self._make_pool(self._world, self.environment | cache, backend=backend)
        self._started.callback(self._pool.close)
