"""Start a run's ranks with torchrun's machinery, and see them to their end.

Who started this process decides. torchrun (or whatever else sets RANK and WORLD_SIZE) has made it one of the ranks,
and the function is called here; so it is for one rank. Otherwise torchrun's agent starts a process a rank.

SIGINT, SIGTERM and SIGHUP are passed on, as SIGTERM, to the ranks, which write a checkpoint and end; a second signal,
or too much time, kills them. When a rank fails, the others are told to end and then killed, since they may wait for
it in a collective. Each rank leads a session of its own: a terminal's Ctrl-C reaches only this process.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from stretto.memory import shared_gpus
from stretto.parallel.capture import REGISTERS
from stretto.train.checkpoint import newest_checkpoint, unreadable
from stretto.train.config.gpt import TrainConfig, nearest_grid
from stretto.train.config.options import AnyConfig, JobConfig
from stretto.train.launch.supervisor import STOP_SIGNALS, Failure, StopTimeouts, Supervisor
from stretto.train.observe.metrics import DivergenceError

logger = logging.getLogger(__name__)

Entry = Callable[[JobConfig], None]


class RankFailure(RuntimeError):
    """A rank failed. `rank` is its number, `reason` its signal or exception, `checkpoint` the last complete one."""

    def __init__(self, failure: Failure, config: JobConfig, trace_file: Path | None) -> None:
        self.rank, self.reason = failure.rank, failure.reason
        self.checkpoint = newest = newest_checkpoint(config.out)
        if newest is not None and failure.reason.partition(": ")[2].startswith(unreadable(newest)):
            self.checkpoint = newest_checkpoint(config.out, before=newest)  # "latest" would fail again
        lines = [f"rank {failure.rank} of {config.ranks} failed: {failure.reason}"]
        if not failure.reason.startswith(f"{DivergenceError.__name__}: "):  # which says itself how to go on
            lines.append(where_to_continue(self.checkpoint, is_latest=self.checkpoint == newest))
        if trace_file is not None:
            lines.append(f"the rank's traceback is in {trace_file}")
        super().__init__("\n".join(lines))


def launch(entry: Entry, config: JobConfig, timeouts: StopTimeouts | None = None) -> signal.Signals | None:
    """Call `entry(config)` on every rank. Returns when all have ended: None, or the signal that stopped them.

    `entry` is a function of a module, which ranks import by name, and returns soon after SIGTERM. Raises RankFailure
    within seconds after a rank has failed, be it this process, and ValueError when torchrun started another number of
    ranks than `config.ranks`. Leaves no process and no file but those of `entry`, and in `config.out` a failed rank's
    traceback.
    """
    check_started_ranks(config)
    if is_rank() or config.ranks == 1:
        return _run_here(entry, config)
    return _run_ranks(entry, config, timeouts or StopTimeouts())


def is_rank() -> bool:
    """Whether this process is a rank that torchrun, or something like it, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_started_ranks(config: JobConfig) -> None:
    """Raise ValueError when torchrun started another number of ranks than `config.ranks`."""
    if is_rank() and (started := int(os.environ["WORLD_SIZE"])) != config.ranks:
        grid = f", and a grid such as {nearest_grid(config.grid, started)}" if isinstance(config, TrainConfig) else ""
        raise ValueError(f"ranks is {config.ranks}, but torchrun started {started}; ranks={started} would do{grid}")


def resolve_device(config: AnyConfig) -> AnyConfig:
    """The configuration with device "cuda" or "cpu" in place of "auto": cuda where there is a GPU for each rank.

    Raises ValueError when cuda is asked for and there are too few GPUs, or what only cuda has where there is none.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks))
    gpus = torch.cuda.device_count()
    if gpus and shared_gpus.is_enabled():
        gpus = max(gpus, ranks_here)  # as many as ranks want
    if config.device == "cuda" and gpus < ranks_here:
        remedy = f"ranks={gpus} or device='cpu'" if gpus else "device='cpu'"
        raise ValueError(
            f"device is 'cuda', which needs a GPU for each of {ranks_here} ranks, but there are {gpus}; "
            f"{remedy} would do"
        )
    device = config.device if config.device != "auto" else "cuda" if gpus >= ranks_here else "cpu"
    if isinstance(config, TrainConfig) and device != "cuda":
        for name in ("cuda_graph", "writes_copies"):
            if getattr(config.train, name):
                raise ValueError(f"train.{name} is on, but this run's device is the CPU; train.{name}=false would do")
    return config.model_copy(update={"device": device})


def remove_traces(out: Path) -> None:
    """Delete the tracebacks that ranks of an earlier run have left."""
    for file in out.glob("rank-*-error.txt"):
        file.unlink(missing_ok=True)


def where_to_continue(checkpoint: Path | None, *, is_latest: bool = True) -> str:
    """The last checkpoint that can be used and how to use it, in a line."""
    if checkpoint is None:
        return "there is no checkpoint to continue from"
    if not is_latest:
        return f"the checkpoint before it is {checkpoint}: continue with --set train.resume={checkpoint}"
    return f"the last checkpoint is {checkpoint}: continue with --set train.resume=latest"


def _run_here(entry: Entry, config: JobConfig) -> signal.Signals | None:
    """Call `entry` in this process. Its exception becomes what a rank's of its own process would be."""
    call = record(entry) if is_rank() else entry  # torchrun reads the file that `record` writes
    try:
        with _signals_received() as received:
            call(config)
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        failure = Failure(
            int(os.environ.get("RANK", "0")), lines[0], "".join(traceback.format_exception(error)), (1, 0.0)
        )
        raise _explain(failure, config) from error
    return received[0] if received else None


@contextmanager
def _signals_received() -> Iterator[list[signal.Signals]]:
    """A list of the STOP_SIGNALS that came, filled at the end. Who handles them may change meanwhile."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # only it can be told of signals
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


def _run_ranks(entry: Entry, config: JobConfig, timeouts: StopTimeouts) -> signal.Signals | None:
    supervisor = Supervisor(timeouts)
    with tempfile.TemporaryDirectory(prefix="stretto-launch-") as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_text(config.model_dump_json(), encoding="utf-8")
        handler = _rendezvous()
        spec = WorkerSpec(
            role="rank",
            local_world_size=config.ranks,
            entrypoint=sys.executable,
            args=("-m", "stretto.train.launch.rank", *_rank_arguments(entry, config_file)),
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=0.1,
        )
        with _quiet_agent(), _environment(_rank_environment(config.ranks)), supervisor.handling_signals():
            try:
                _Agent(spec, DefaultLogsSpecs(log_dir=folder), supervisor).run()
            finally:
                supervisor.kill()
                handler.shutdown()
    if supervisor.failures:
        raise _explain(supervisor.failures[0], config)
    return supervisor.stop_signal


class _Agent(LocalElasticAgent):
    """torchrun's agent, with a supervisor that looks at the ranks before it does.

    Alone, it gives a survivor that hangs in a collective 30 seconds, and loses track of ranks when a signal comes while
    they start or a second one while they stop.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs, supervisor: Supervisor) -> None:
        super().__init__(spec, logs_specs)
        self._supervisor = supervisor

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        workers = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)  # as always for a program to run
        for rank, handler in self._pcontext.subprocess_handlers.items():
            self._supervisor.add(rank, handler.proc, Path(self._pcontext.error_files[rank]))
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._supervisor.look()
        if self._supervisor.has_running_ranks():
            # torch's own look, a moment later, would end all ranks for one that has failed meanwhile.
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.SUCCEEDED and not self._supervisor.failures:
            self._supervisor.look()  # the last rank failed between the two looks
        return result


def _rendezvous() -> RendezvousHandler:
    """Where the ranks meet: a store in this process, on a free port."""
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
    )


def _rank_arguments(entry: Entry, config_file: Path) -> tuple[str, str, str]:
    """What `stretto.train.launch.rank` takes: the function's name, the configuration, and who to stop with."""
    return f"{entry.__module__}:{entry.__qualname__}", str(config_file), str(os.getpid())


def _rank_environment(ranks: int) -> dict[str, str]:
    return {
        # Each rank would otherwise take every core.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // ranks)),
        # Ranks find modules where this process found them.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        # The agent's own handlers would replace the supervisor's.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    } | allocator_environment()


def allocator_environment() -> dict[str, str]:
    """What ranks' allocators are told, unless the user has told them something.

    An optimizer's state is made after the first backward pass, in what that has freed. In segments that cannot grow it
    leaves holes that the next step's activations do not fit into: a sixth of a GPU was lost so. NCCL registers what it
    finds in a CUDA graph as if segments could not grow, and a replay then hangs (`parallel.capture`).
    """
    if any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return {}
    told = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return told if REGISTERS in os.environ else told | {REGISTERS: "0"}


def _cores() -> int:
    """Cores that this process may use, which a container may bound."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside."""
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


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's log of processes and signals off the screen."""
    agent_logger = logging.getLogger("torch.distributed.elastic")
    nowhere, before = logging.NullHandler(), agent_logger.propagate
    agent_logger.addHandler(nowhere)
    agent_logger.propagate = False
    try:
        yield
    finally:
        agent_logger.propagate = before
        agent_logger.removeHandler(nowhere)


def _explain(failure: Failure, config: JobConfig) -> RankFailure:
    trace_file = None
    if failure.trace is not None:
        trace_file = config.out / f"rank-{failure.rank}-error.txt"
        try:
            config.out.mkdir(parents=True, exist_ok=True)
            trace_file.write_text(failure.trace, encoding="utf-8", errors="backslashreplace")
        except OSError as error:  # the disk may be full, and the rank have failed for that
            logger.warning("%s cannot be written: %s", trace_file, error.strerror or error)
            with suppress(OSError):
                trace_file.unlink(missing_ok=True)
            trace_file = None
    return RankFailure(failure, config, trace_file)
