# SPDX-License-Identifier: Apache-2.0
"""Starts ranks, times steps, and writes results with the machine they were measured on: for all benches."""

import gc
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from stretto.atomic_files import write_atomically
from stretto.cluster.detection import count_gpus, machine_kind
from stretto.launch import allocator_environment, changed_environment, loopback_environment, rank_variables
from stretto.launch.failures import RanksFailed, describe_signal
from stretto.launch.supervisor import STOP_SIGNALS
from stretto.launch.watching.joining import end_with_parent
from stretto.memory import allocated_bytes, shared_gpus
from stretto.memory.mps import has_mps, mps_daemon, share_for

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

_SECONDS_TO_END = 5  # of ranks that are ended by SIGTERM, before they are killed

# Errors that fail one run but not the bench: invalid options, out of memory, and unsupported compilation.
FAILURES = (ValueError, RuntimeError, AssertionError, AttributeError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Column:
    """A column of a table: the row's key, the heading (with the unit), and the format of a value."""

    key: str
    heading: str
    form: str = "{}"


def write_result(
    out: Path, name: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], **about: Any
) -> Path:
    """Write `out`/`name`.json (command, date, machine kind, `about`, rows), and the table next to it as .md.

    Columns in which no row has a value are left out, here and in what is printed.

    A `machine` in `about` replaces this machine's kind. Returns the JSON's path.
    """
    kind: Mapping[str, str] = about.pop("machine", None) or machine_kind()
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "command": _command(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": kind,
        **about,
        "rows": list(rows),
    }
    path = out / f"{name}.json"
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    devices = ", ".join(f"{value}" if key == "devices" else f"{key} {value}" for key, value in kind.items())
    lines = [f"`{result['command']}`, {result['date']}, {devices}", "", *markdown_table(columns, rows)]
    write_atomically(path.with_suffix(".md"), "\n".join(lines) + "\n")
    return path


def used_columns(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """The columns in which a row has a value."""
    return tuple(column for column in columns if any(row.get(column.key) is not None for row in rows))


def markdown_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table; an absent value is a dash."""
    columns = used_columns(columns, rows)
    return [
        "| " + " | ".join(column.heading for column in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(_cells(columns, row)) + " |" for row in rows),
    ]


def _command() -> str:
    """The command line without --out, and with other absolute paths reduced to file names."""
    arguments = [argument.rpartition("/")[2] if argument.startswith("/") else argument for argument in sys.argv[1:]]
    for index, argument in enumerate(arguments):
        if argument == "--out":
            del arguments[index : index + 2]
            break
    command = ["python -m lab"] if Path(sys.argv[0]).parent.name == "lab" else ["stretto"]
    return " ".join([*command, *arguments])


def _cells(columns: Sequence[Column], row: Mapping[str, Any]) -> list[str]:
    values = [(column.form, row.get(column.key)) for column in columns]
    return ["-" if value is None else form.format(value) for form, value in values]


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for people; an absent value is a dash."""
    columns, table = used_columns(columns, rows), Table(title=title)
    for column in columns:
        table.add_column(column.heading, justify="right")
    for row in rows:
        table.add_row(*_cells(columns, row))
    Console(width=160).print(table)


def print_row(row: Mapping[str, Any]) -> None:
    """Print the values of a row that was just measured, on rank 0."""
    if dist.get_rank() == 0:
        print(" ".join(f"{key}={value}" for key, value in row.items() if value is not None), flush=True)


def in_one_line(error: BaseException) -> str:
    """The first line of an error's message, for a cell of a table."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


@contextmanager
def shared_where_few(ranks: int) -> Iterator[None]:
    """Processes started within the block share the machine's GPUs if it has fewer than `ranks`, by MPS where it is
    available. Does nothing on a machine without GPUs."""
    gpus = count_gpus()
    with ExitStack() as stack:
        if gpus and ranks > gpus:
            variables = {shared_gpus.SWITCH: "1", shared_gpus.OVERLAPPING: "1"}
            if has_mps() and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
                variables |= stack.enter_context(mps_daemon(share_for(-(-ranks // gpus))))
            stack.enter_context(changed_environment(variables))
        yield


def run_ranks(ranks: int, entry: Callable[..., Any], *args: Any, trains: bool = True) -> Any:
    """Call `entry(*args)` in `ranks` processes of this machine; returns rank 0's result.

    Raises RanksFailed if a rank has failed; ends this process, with status 128 + n, if signal n stops it.

    trains: use the allocator settings of `stretto train`. Benches of collectives keep torch's defaults, with which NCCL
    registers the memory of CUDA graphs.
    """
    # the ranks share the cores, unless the user sets another number of threads
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    if trains:
        os.environ.update(allocator_environment())
    job = uuid.uuid4().hex
    with (
        _StopSignals().handling() as signals,
        tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder,
        socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * ranks)) as listener,
    ):
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        variables = [loopback_environment() | rank_variables(rank, ranks, port, job) for rank in range(ranks)]
        with _hiding_interrupts():
            context = start_processes(
                "bench",
                _call_and_leave,
                args=dict.fromkeys(range(ranks), (os.getpid(), entry, *args)),
                envs=dict(enumerate(variables)),
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
        try:
            with signals.raising():
                while (result := context.wait(timeout=0.1, period=0.1)) is None:
                    signals.check()
        finally:
            context.close(timeout=_SECONDS_TO_END)
            del store
    if result.is_failed():
        first = min(result.failures.values(), key=lambda failure: (failure.exitcode >= 0, failure.timestamp))
        how = describe_signal(-first.exitcode) if first.exitcode < 0 else "its traceback is above"
        raise RanksFailed(f"rank {first.local_rank} of {ranks} failed: {how}")
    return result.return_values[0]


class _StopSignals:
    """SIGINT, SIGTERM and SIGHUP while ranks run: recorded, and raised as SystemExit where that leaves nothing behind.

    `check` raises what a destructor or a callback has dropped. A second signal does not interrupt the end of the ranks.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._raises = False

    @contextmanager
    def handling(self) -> Iterator["_StopSignals"]:
        """Handle them in the block, and raise at its end what came too late. Outside the main thread none come."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._note)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.check()

    @contextmanager
    def raising(self) -> Iterator[None]:
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        if self._received is not None:
            self._raises = False
            print(f"stretto: stopped by {self._received.name}", file=sys.stderr)
            raise SystemExit(128 + self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number)
        if self._raises:
            self.check()


@contextmanager
def _hiding_interrupts() -> Iterator[None]:
    """Processes started in the block do not get a terminal's Ctrl-C until `_call_and_leave`; torch handles no signals.

    They inherit the blocked signal, which waits for this process until the end of the block.
    """
    resource_tracker.ensure_running()  # or its start would unblock the signal
    with changed_environment({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call_and_leave(parent: int, entry: Callable[..., Any], *args: Any) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent ends its ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent(parent)
    try:
        return entry(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def time_steps(step: Callable[[], Any], *, warm_up: int, repeats: int) -> float:
    """Median seconds of a step on the slowest rank, from CUDA events on a GPU, else from the clock."""
    return statistics.median(time_each_step(step, warm_up=warm_up, repeats=repeats))


def time_each_step(step: Callable[[], Any], *, warm_up: int, repeats: int) -> list[float]:
    """Seconds of every step after the first `warm_up`, of the rank with the largest median, as `time_steps`."""
    for _ in range(warm_up):
        step()
    if not torch.cuda.is_available():
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    else:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        dist.barrier()
        for start_event, end_event in events:
            start_event.record()
            step()
            end_event.record()
        torch.cuda.synchronize()
        seconds = [start_event.elapsed_time(end_event) / 1e3 for start_event, end_event in events]
    of_ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, seconds)
    return max(of_ranks, key=statistics.median)


def empty_memory() -> None:
    """Empty the CUDA allocator's cache, and reset its peak."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gib(device: torch.device) -> float | None:
    """The largest peak of allocated memory of any rank, in GiB; None on a CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) + allocated_bytes(device)
    highest = torch.tensor(peak, dtype=torch.int64, device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest) / 2**30
