"""A CUDA MPS daemon of this process's own, so that kernels of several processes run at once on one GPU.

Without MPS the driver gives the processes of a GPU time slices, and kernels that wait for each other take milliseconds
for what takes microseconds under MPS.
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
_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# Percentages by ranks, on an H100: 62, 32, 16 or 14 multiprocessors. More would do for some numbers of ranks (31% for
# 3, 21% for 4), but cuBLAS leaves parts of products unwritten with 20, 26, 36, 38, 40 or 42 multiprocessors
# (docs/testing.md).
_SHARES = {1: 100, 2: 48, 3: 25, 4: 13, 5: 13, 6: 13, 7: 13, 8: 12}
_LIMIT = 30.0  # seconds that the daemon has to start, and to end


def has_mps() -> bool:
    """Whether the control program of MPS is on PATH."""
    return shutil.which(_CONTROL) is not None


def share_for(ranks: int) -> int:
    """The percentage that gives each of so many ranks on a GPU multiprocessors of its own.

    With percentages that add up to 100 some ranks share multiprocessors: on an H100 each of 4 ranks with 25% may use
    32, but where 3 fill theirs the last one finds 20. A kernel that holds its places while it waits for another rank
    may then keep that rank out. Up to 8 ranks the percentages were measured to keep ranks apart, on an H100, and are
    such that cuBLAS's products are right; beyond, they add up to 80 at most.
    """
    return _SHARES.get(ranks) or max(1, 80 // ranks)


@contextlib.contextmanager
def mps_daemon(percentage: int) -> Iterator[dict[str, str]]:
    """Start an MPS daemon, and end it when the block is left, or when this process is gone, however that comes.

    percentage: of the GPU's multiprocessors that each process gets, 1 to 100. Yields the environment variables that
    make a process a client of this daemon; its own pipe and log folders keep it apart from any other daemon. End all
    clients before the block is left. ValueError where there is no MPS or the daemon does not start.
    """
    if not 1 <= percentage <= 100:
        raise ValueError(f"a process gets 1 to 100 percent of the multiprocessors, not {percentage}")
    control = shutil.which(_CONTROL)
    if control is None:
        raise ValueError("ranks that share a GPU need MPS: nvidia-cuda-mps-control, of NVIDIA's driver, is not on PATH")
    folder = tempfile.mkdtemp(prefix="stretto-mps-")  # short: the path of a socket has at most 107 characters
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    # A percentage in the daemon's own environment would be the most that any client gets.
    environment = {name: value for name, value in os.environ.items() if name != _PERCENTAGE} | variables
    # It ends the daemon once its standard input is closed, as it is when this process is killed, too.
    keeper = subprocess.Popen(
        [sys.executable, "-IS", __file__, control, folder],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        try:
            # Its output goes nowhere: the daemon would inherit a pipe and keep it open.
            _run([control, "-d"], environment).check_returncode()
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"the MPS daemon does not start: {error}; its log: {_tail(folder)}") from error
        yield variables | {_PERCENTAGE: str(percentage)}
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()


def _run(command: list[str], environment: Mapping[str, str], said: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    nowhere = subprocess.DEVNULL
    return subprocess.run(command, input=said, env=environment, timeout=_LIMIT, stdout=nowhere, stderr=nowhere)


def _keep(control: str, folder: Path) -> None:
    """Wait until standard input is closed; then ask the daemon to quit, and kill it if it is there after all."""
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
