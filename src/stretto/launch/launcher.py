# SPDX-License-Identifier: Apache-2.0
"""Launches the ranks of a run on this machine, forwards signals to them, and reports the rank that failed.

In a process that torchrun (or anything else that sets RANK and WORLD_SIZE) has started, and for a run of one rank, the
entry function is called directly. Otherwise a process is started for each rank, with torchrun's environment variables.

The job's store listens on the loopback interface, in rank 0, so that ranks can save when this process is killed; so do
gloo and NCCL, unless the user has set their interfaces.

SIGINT, SIGTERM and SIGHUP are forwarded as SIGTERM to the ranks, which write a checkpoint and exit; a second signal, or
a time limit, kills them. When a rank fails, the others are asked to exit and then killed, since they may wait for it in
a collective. Each rank leads its own session, so a terminal's Ctrl-C reaches only this process.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from stretto import counters
from stretto.cluster.detection import usable_cores
from stretto.cluster.local_ranks import is_rank
from stretto.launch.elastic import ATTEMPT, CHECKED, remove_mark
from stretto.launch.failures import ERROR_FILE, Failure, RankFailure
from stretto.launch.job import LaunchJob
from stretto.launch.leftovers import list_segments, remove_orphans, remove_partial_files
from stretto.launch.rank import STORE_SOCKET
from stretto.launch.restarts import run_with_restarts
from stretto.launch.supervisor import STOP_SIGNALS, StopTimeouts, Supervisor, UnkillableError
from stretto.launch.watch import RankWatch
from stretto.launch.watching import device_waits
from stretto.launch.watching.joining import FOLDER, memory_folder, start_watcher

logger = logging.getLogger(__name__)

Entry = Callable[[Any], None]
NCCL_REGISTERS = "NCCL_GRAPH_REGISTER"
POLL = 0.1  # seconds between two looks at the ranks' processes


def launch_job(entry: Entry, job: LaunchJob, timeouts: StopTimeouts | None = None) -> signal.Signals | None:
    """Call `entry(job.argument)` on every rank. Returns when all have ended: None, or the signal that stopped them.

    entry: a function at the top of a module, which ranks import by name; it must return soon after SIGTERM. Raises
    RankFailure within seconds after a rank (this process, too) has failed. Leaves no file behind except those of
    `entry` and a failed rank's traceback in `job.out`, and no process except those that the kernel does not end, which
    are logged.

    With `job.max_restarts`, ranks that have failed are started again (`launch.restarts`); RankFailure is then raised
    for the last failure only. Ranks of torchrun continue where those of the same job stopped (`launch.elastic`).
    """
    if is_rank():
        return _run_here(entry, job.on_started_ranks())
    if job.ranks == 1 and not job.max_restarts:
        return _run_here(entry, job)
    timeouts = timeouts or StopTimeouts()
    try:
        if job.max_restarts:
            return run_with_restarts(partial(_run_ranks, entry, timeouts=timeouts), job, timeouts)
        return _run_ranks(entry, job, timeouts=timeouts)
    finally:
        remove_mark(job.out)


def remove_traces(out: Path) -> None:
    """Delete the traceback files of an earlier run's ranks."""
    for file in out.glob("rank-*-error.txt"):
        file.unlink(missing_ok=True)


def _run_here(entry: Entry, job: LaunchJob) -> signal.Signals | None:
    """Call `entry` in this process. Its exception is raised as the RankFailure of a separate process would be."""
    call = record(entry) if is_rank() else entry  # `record` writes a file that torchrun reads
    try:
        with _signals_received() as received, changed_environment({CHECKED: "1"}):
            call(job.argument)
    except Exception as error:
        raise _explain(Failure.of_error(int(os.environ.get("RANK", "0")), error), job) from error
    if received:
        return received[0]
    return signal.Signals(number) if (number := counters.stopped_by()) else None  # another rank received it


@contextmanager
def _signals_received() -> Iterator[list[signal.Signals]]:
    """Yield a list of the STOP_SIGNALS received in the block, whichever handler has handled them."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # Python notifies only the main thread of signals
        yield received
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield received
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        with open(reader, "rb") as pipe:
            received += [number for number in map(signal.Signals, pipe.read()) if number in STOP_SIGNALS]


def _run_ranks(
    entry: Entry,
    job: LaunchJob,
    run_id: str | None = None,
    environment: Mapping[str, str] | None = None,
    wants_stop: Callable[[], bool] = lambda: False,
    *,
    timeouts: StopTimeouts,
) -> signal.Signals | None:
    """Start a process for each rank, and wait for them under a supervisor.

    run_id: the same for each attempt of a run. environment: more of it. wants_stop: asked several times a second
    whether the ranks are to stop as if a signal had come.
    """
    segments = list_segments()
    with tempfile.TemporaryDirectory(prefix="stretto-launch-", dir=memory_folder()) as name:
        folder = Path(name)
        (folder / "counters").mkdir()
        watch = RankWatch(folder / "counters", job)
        supervisor = Supervisor(timeouts, watch)
        (folder / "job").write_text(job.text, encoding="utf-8")
        variables = _rank_environment(job.ranks) | {ATTEMPT: "0"} | dict(environment or {})
        with supervisor.handling_signals(), _guarded(folder, timeouts.stop), changed_environment(variables):
            try:
                _start_ranks(supervisor, _rank_arguments(entry, job, folder / "job"), job.ranks, run_id, folder)
                while supervisor.has_running_ranks():
                    supervisor.check()
                    if wants_stop():
                        supervisor.request_stop()
                    time.sleep(POLL)
                supervisor.check()  # the last rank may have failed since
            except UnkillableError as error:
                logger.error("%s; they are left behind", error)
            finally:
                supervisor.kill()
                remove_orphans(segments)
                remove_partial_files(job)
        stopped = watch.stopped_by()
    if supervisor.failures:
        failure = _explain(supervisor.failures[0], job)
        failure.stopped_by = supervisor.stop_signal
        raise failure
    if supervisor.stop_signal is None and not supervisor.was_asked and stopped is not None:
        logger.warning("a rank got %s, and all ranks have saved and stopped", stopped.name)
        return stopped
    return supervisor.stop_signal


def _start_ranks(
    supervisor: Supervisor, arguments: tuple[str, ...], ranks: int, run_id: str | None, folder: Path
) -> None:
    """Start a process for each rank, with torchrun's variables and the store's socket in rank 0."""
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * ranks)) as listener:
        for rank in range(ranks):
            error_file = folder / f"error-{rank}.json"
            variables = rank_variables(rank, ranks, listener.getsockname()[1], run_id or uuid.uuid4().hex) | {
                ERROR_FILE: str(error_file),
                FOLDER: str(folder / "counters"),
            }
            if rank == 0:
                variables[STORE_SOCKET] = str(listener.fileno())
            process = subprocess.Popen(
                [sys.executable, "-P", "-u", *arguments],  # -P: import nothing from the working directory
                env=os.environ | variables,
                start_new_session=True,
                pass_fds=(listener.fileno(),) if rank == 0 else (),
            )
            supervisor.add(rank, process, error_file)


def rank_variables(rank: int, ranks: int, port: int, job: str) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank of a job on one machine, whose store is on a port."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "rank",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank is a client of a store that is there before it
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


@contextmanager
def _guarded(folder: Path, grace: float) -> Iterator[None]:
    """Have a process beside this one end the ranks and remove the folder, should this one be killed in the block."""
    settings = {"guards": True, "folder": str(folder / "counters"), "remove": str(folder), "grace": grace}
    guard = start_watcher(settings)
    try:
        yield
    finally:
        with suppress(OSError):  # it was killed
            guard.communicate(b"done\n")


def _rank_arguments(entry: Entry, job: LaunchJob, file: Path) -> tuple[str, ...]:
    """The arguments of a rank's Python: `rank` and those of its command line."""
    function = f"{entry.__module__}:{entry.__qualname__}"
    return "-m", "stretto.launch.rank", function, job.loader, str(file), str(os.getpid())


def _rank_environment(ranks: int) -> dict[str, str]:
    return (
        {
            # Otherwise each rank would start a thread for every core.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // ranks)),
            CHECKED: "1",
            # Ranks must find modules where this process found them.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        | allocator_environment()
        | loopback_environment()
        # Whether NCCL's kernels are timed, each rank decides before it makes its process group.
        | device_waits.environment(times_nccl=False)
    )


def loopback_environment() -> dict[str, str]:
    """The environment variables that keep gloo's and NCCL's listeners on the loopback interface."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {} if loopback is None else {name: loopback for name in names if name not in os.environ}


def allocator_environment() -> dict[str, str]:
    """The environment variables that configure the ranks' CUDA allocators, unless the user has set any.

    Optimizer state is allocated after the first backward pass, in memory that the pass has freed. In segments of fixed
    size it leaves holes that are too small for the next step's activations: measured, a sixth of a GPU was lost. So
    segments are expandable. NCCL's graph registration assumes fixed segments, and the replay of a CUDA graph then hangs
    (`parallel.capture`), so it is turned off.
    """
    if any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return {}
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {NCCL_REGISTERS: "0"} | variables if NCCL_REGISTERS not in os.environ else variables


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _explain(failure: Failure, job: LaunchJob) -> RankFailure:
    """Make the exception for a failed rank, and write its traceback, if it has one, to the run's folder."""
    trace_file = None
    if failure.trace is not None:
        trace_file = job.out / f"rank-{failure.rank}-error.txt"
        try:
            job.out.mkdir(parents=True, exist_ok=True)
            trace_file.write_text(failure.trace, encoding="utf-8", errors="backslashreplace")
        except OSError as error:  # a full disk may be the reason why the rank failed
            logger.warning("%s cannot be written: %s", trace_file, error.strerror or error)
            with suppress(OSError):
                trace_file.unlink(missing_ok=True)
            trace_file = None
    return RankFailure(failure, job, trace_file)
