# SPDX-License-Identifier: Apache-2.0
"""Runs a private CUDA MPS daemon, so that kernels of several processes run at once on one GPU.

Without MPS the driver time-slices the processes of a GPU: kernels that wait for each other then take milliseconds
instead of microseconds.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_QUEUES_OF_A_GPU = 32  # of all its processes together: with 32 each, 8 do not start
_FEWEST_QUEUES, _MOST_QUEUES = 4, 16  # of a process
# Percentages by number of ranks. On an H100 they give 62, 32, 16 or 14 multiprocessors. Some numbers of ranks could
# have more (31% for 3, 21% for 4), but cuBLAS leaves parts of products unwritten with 20, 26, 36, 38, 40 or 42
# multiprocessors (docs/testing.md).
_SHARES = {1: 100, 2: 48, 3: 25, 4: 13, 5: 13, 6: 13, 7: 13, 8: 12}
_LIMIT = 30.0  # seconds for the daemon to start, and to end


def has_mps() -> bool:
    """Check whether the control program of MPS is on PATH."""
    return shutil.which(_CONTROL) is not None


def share_for(ranks: int) -> int:
    """The MPS percentage with which each of `ranks` ranks on a GPU has multiprocessors of its own.

    With percentages that add up to 100, some ranks share multiprocessors: on an H100, each of 4 ranks with 25% may use
    32, but when 3 of them fill theirs, 20 are left for the last. A kernel that holds its multiprocessors while it waits
    for another rank may then prevent that rank from running. Up to 8 ranks, the percentages were measured to keep ranks
    apart on an H100, with correct cuBLAS products. For more ranks they add up to 80 at most.
    """
    return _SHARES.get(ranks) or max(1, 80 // ranks)


@contextlib.contextmanager
def mps_daemon(percentage: int) -> Iterator[dict[str, str]]:
    """Start an MPS daemon, and end it when the block is left or this process ends, even if it is killed.

    percentage: of the GPU's multiprocessors that each process gets, 1 to 100. Yields the environment variables that
    make a process a client of this daemon, whose pipe and log folders are its own, with queues to the GPU: streams that
    share one wait for each other, as those of two groups must not, and MPS gives a process two. End all clients before
    the block is left. Raises ValueError if there is no MPS or the daemon does not start.
    """
    if not 1 <= percentage <= 100:
        raise ValueError(f"a process gets 1 to 100 percent of the multiprocessors, not {percentage}")
    control = shutil.which(_CONTROL)
    if control is None:
        raise ValueError("ranks that share a GPU need MPS: nvidia-cuda-mps-control, of NVIDIA's driver, is not on PATH")
    folder = tempfile.mkdtemp(prefix="stretto-mps-")  # short: the path of a socket has at most 107 characters
    variables = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    # A percentage in the daemon's own environment would limit all clients.
    environment = {name: value for name, value in os.environ.items() if name != PERCENTAGE} | variables
    gpus = os.environ.get(_VISIBLE, "").split(",")
    if all(gpu.strip().isdecimal() for gpu in gpus):
        # A daemon that sees some of the machine's GPUs numbers them from 0 on for its clients.
        variables[_VISIBLE] = ",".join(str(number) for number in range(len(gpus)))
    # This process ends the daemon when its standard input is closed, as happens when its parent is killed.
    keeper = subprocess.Popen(
        [sys.executable, "-IS", __file__, control, folder],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        try:
            # No pipe for the output: the daemon would inherit it and keep it open.
            _run([control, "-d"], environment).check_returncode()
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"the MPS daemon does not start: {error}; its log: {_tail(folder)}") from error
        queues = min(max(_QUEUES_OF_A_GPU * percentage // 100, _FEWEST_QUEUES), _MOST_QUEUES)
        yield variables | {PERCENTAGE: str(percentage), QUEUES: os.environ.get(QUEUES, str(queues))}
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()


def _run(command: list[str], environment: Mapping[str, str], text: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    devnull = subprocess.DEVNULL
    return subprocess.run(command, input=text, env=environment, timeout=_LIMIT, stdout=devnull, stderr=devnull)


def _keep(control: str, folder: Path) -> None:
    """Wait until standard input is closed, ask the daemon to quit, and kill it if it still runs."""
    sys.stdin.read()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        _run([control], os.environ, b"quit\n")
    with contextlib.suppress(OSError, ValueError):
        process = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        if b"nvidia-cuda-mps" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _tail(folder: str) -> str:
    try:
        return (Path(folder) / "control.log").read_text(errors="replace").strip()[-300:] or "(empty)"
    except OSError:
        return "(none)"


if __name__ == "__main__":
    _keep(sys.argv[1], Path(sys.argv[2]))
