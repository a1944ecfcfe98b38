"""Ranks on GPUs: each has one to itself where there are enough, else they share, under MPS where that is installed.

NVIDIA's MPS (multi-process service) runs the kernels of several processes on one GPU at the same time, and gives each
process a share of the multiprocessors (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, read when a process first uses CUDA: hence a
pool of processes for each number of ranks). Without MPS the processes take turns, in time slices of milliseconds.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stretto.memory.shared_gpus import OVERLAPPING, SWITCH
from tests.pool import Pool

MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_LIMIT = 30.0  # seconds for the daemon to start, or to end
SHARED = (2, 3, 4, 5, 8)
"""How many ranks share one GPU."""
WITHOUT_MPS = (2,)
"""And by time slices: a meeting of 4 ranks takes 7 ms then, in place of 0.1 ms."""


def count_gpus() -> int:
    return torch.cuda.device_count()


def is_shared(world: int) -> bool:
    """Whether so many ranks have to share this machine's GPUs."""
    return count_gpus() < world


def has_mps() -> bool:
    return shutil.which(MPS_CONTROL) is not None


def choose_worlds(sampled: Sequence[int], own: Sequence[int], among: Sequence[int]) -> list[tuple[int, bool]]:
    """The numbers of ranks that a test runs with here, and whether each is exhaustive.

    sampled: what `make gpu-test` runs where ranks share a GPU, of `among`, which `make gpu-test-exhaustive` completes.
    own: the numbers for ranks with a GPU each; the largest that the GPUs suffice for is run, else the least, shared.
    """
    gpus = count_gpus()
    if gpus >= 2:
        return [(max((count for count in own if count <= gpus), default=min(own)), False)]
    return [(count, count not in sampled) for count in among]


class MpsDaemon:
    """MPS's control daemon, with folders of its own, so that another's is left alone. `stop` it, whatever happens.

    `environment` has what makes a process its client.
    """

    def __init__(self) -> None:
        self._folder: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        assert self._folder is not None, "the daemon was not started"
        return {"CUDA_MPS_PIPE_DIRECTORY": self._folder, "CUDA_MPS_LOG_DIRECTORY": self._folder}

    def start(self) -> None:
        """RuntimeError with what it said where it does not start."""
        self._folder = tempfile.mkdtemp(prefix="mps-")
        try:
            self._call([MPS_CONTROL, "-d"])
        except BaseException:
            self._remove()
            raise

    def stop(self) -> None:
        """End it and its server; nothing where it does not run. RuntimeError where it does not answer."""
        if self._folder is None:
            return
        try:
            self._call([MPS_CONTROL], input="quit\n")
        finally:
            self._remove()

    def restart(self) -> None:
        """A client that was killed in a kernel may have broken the server."""
        try:
            self.stop()
        except RuntimeError as error:
            print(f"MPS is started anew, though the old daemon did not end: {error}")
        self.start()

    def _call(self, command: list[str], input: str | None = None) -> None:
        environment = {**os.environ, **self.environment}
        # A file, not a pipe: the daemon keeps what it was given as its output open.
        with (Path(self.environment["CUDA_MPS_LOG_DIRECTORY"]) / "said.txt").open("w+") as said:
            try:
                ended = subprocess.run(
                    command, env=environment, input=input, text=True, stdout=said, stderr=said, timeout=MPS_LIMIT
                )
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{' '.join(command)} did not end within {MPS_LIMIT:g} s") from None
            if ended.returncode != 0:
                said.seek(0)
                raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}: {said.read().strip()}")

    def _remove(self) -> None:
        assert self._folder is not None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


def make_environment(world: int, daemon: MpsDaemon | None) -> dict[str, str]:
    """The variables of ranks that share a GPU, each with its part of the multiprocessors if MPS runs."""
    shared = {SWITCH: "1", OVERLAPPING: "1"}
    if daemon is None:
        return shared
    return {**shared, **daemon.environment, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // world)}


class GpuRanks:
    """A pool of `world` processes on GPUs, which they share where there are fewer."""

    def __init__(self, world: int, daemon: MpsDaemon | None = None, make_pool: Callable[..., Pool] = Pool) -> None:
        self.environment: dict[str, str] = {}
        backend = "cpu:gloo,cuda:nccl"
        if is_shared(world):
            self.environment = make_environment(world, daemon)
            backend = "cpu:gloo,cuda:gloo"
        self._daemon = daemon
        self._world = world
        self._make_pool, self._backend = make_pool, backend
        self._pool = make_pool(world, self.environment, backend=backend)

    def run(
        self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 100.0, **kwargs: Any
    ) -> list[Any]:
        """See `Pool.run`; ranks that share a GPU may take three times as long."""
        try:
            return self._pool.run(ranks, function, *args, timeout=timeout * (3 if self.environment else 1), **kwargs)
        finally:
            if not self._pool.pids() and self._daemon is not None and self.environment:
                # The pool has killed its processes. New ones are to find a daemon that no dead client has broken.
                self._pool.close()
                self._daemon.restart()
                self.environment = make_environment(self._world, self._daemon)
                self._pool = self._make_pool(self._world, self.environment, backend=self._backend)

    def close(self) -> None:
        self._pool.close()
