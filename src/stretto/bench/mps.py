"""NVIDIA's Multi-Process Service (MPS) for ranks that share a GPU: their kernels then run at the same time.

Without it the driver gives the processes of a GPU time slices, and kernels that wait for each other take milliseconds
for what takes microseconds under MPS.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

CONTROL = "nvidia-cuda-mps-control"
_START_LIMIT = 30.0  # seconds
_END_LIMIT = 30.0


def share_of_gpu(ranks: int) -> str:
    """The percentage of a GPU's multiprocessors that each of so many ranks on it gets, as MPS takes it."""
    return str(max(100 // max(ranks, 1), 1))


@contextlib.contextmanager
def mps_daemon(ranks: int) -> Iterator[Mapping[str, str] | None]:
    """Runs an MPS daemon while the block runs, and ends it in any case.

    ranks: how many processes share one GPU. Yields the environment variables that those processes need, or None where
    there is no MPS (no program of that name, or it does not start); the processes then share the GPU by time slices.
    The daemon has folders of its own, so it neither finds nor disturbs another one of this machine.
    """
    if shutil.which(CONTROL) is None:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="stretto-mps-")
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    environment = os.environ | variables
    try:
        yield (
            variables | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": share_of_gpu(ranks)}
            if _control(["-d"], None, environment, _START_LIMIT)
            else None
        )
    finally:
        _control([], b"quit\n", environment, _END_LIMIT)
        shutil.rmtree(folder, ignore_errors=True)


def _control(arguments: list[str], words: bytes | None, environment: Mapping[str, str], limit: float) -> bool:
    """Whether the daemon's control program has done what it was asked."""
    try:
        done = subprocess.run(
            [CONTROL, *arguments],
            input=words,
            env=environment,
            timeout=limit,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
