# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule on new processes, a rank each, for commands and tests that have no process group."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.collective import Expected
from stretto.collectives.executor.host import run_on_host
from stretto.collectives.executor.layout import poisoned
from stretto.collectives.executor.plan import DEFAULT_TILE_BYTES, ExecutionPlan, make_plan
from stretto.collectives.executor.turns import ExecutionError
from stretto.collectives.schedule import Schedule

DEFAULT_TIMEOUT = 60.0  # seconds, of groups that are made here for one run
_START_LIMIT = timedelta(minutes=2)
_GRACE = 5.0  # seconds for a process to exit on its own


def run_on_processes(
    schedule: Schedule,
    inputs: Sequence[Tensor],
    *,
    reduction: str | None = None,
    in_place: bool | None = None,
    tile_bytes: int = DEFAULT_TILE_BYTES,
    slots: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Tensor]:
    """Every rank's output for every rank's input, flat, from one new process a rank.

    The processes, of one thread each, have ended when it returns or raises. Options and errors are those of
    `run_on_host`, with the rank as a note; ExecutionError also for a process that died.
    """
    plan = plan_for_inputs(schedule, inputs, reduction, in_place, tile_bytes, slots)
    options = {"reduction": plan.reduction, "tile_bytes": tile_bytes, "slots": plan.slots, "timeout": timeout}
    portable = _make_portable(schedule)
    workers: list[_Worker] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", __name__])
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        try:
            for rank in range(len(inputs)):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, rank, len(inputs), folder), daemon=True)
                process.start()
                theirs.close()
                workers.append(_Worker(process, ours))
            for rank, worker in enumerate(workers):
                with contextlib.suppress(BrokenPipeError):  # it died: collecting its outcome reports this
                    worker.pipe.send_bytes(pickle.dumps((portable, place_input(plan, rank, inputs[rank]), options)))
            return _collect(workers)
        finally:
            _end(workers)


def plan_for_inputs(
    schedule: Schedule,
    inputs: Sequence[Tensor],
    reduction: str | None,
    in_place: bool | None,
    tile_bytes: int,
    slots: int | None,
) -> ExecutionPlan:
    """Plan a run on these inputs, one a rank, of one size and dtype. Raises ValueError if it cannot run."""
    collective = schedule.collective
    if len(inputs) != collective.ranks:
        raise ValueError(f"{schedule.name} has {collective.ranks} ranks: {len(inputs)} inputs are not one for each")
    if len({(tensor.dtype, tensor.numel()) for tensor in inputs}) > 1:
        raise ValueError(
            "all ranks' inputs have one dtype and size, not "
            + ", ".join(f"{tensor.numel()} of {str(tensor.dtype)[6:]}" for tensor in inputs)
        )
    in_place = schedule.in_place if in_place is None else in_place
    # Both buffers consist of blocks of one size: the input's elements give the output's, or the whole one's in place.
    return make_plan(
        schedule,
        inputs[0].numel(),
        None,
        in_place=in_place,
        dtype=inputs[0].dtype,
        reduction=reduction,
        tile_bytes=tile_bytes,
        slots=slots,
    )


def place_input(plan: ExecutionPlan, rank: int, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """A rank's tensors for `run_on_host`: its input and a new output, or in place one new tensor for both."""
    layout, collective = plan.layout, plan.collective
    given = input.detach().reshape(-1)
    if not collective.in_place:
        return given, poisoned(layout.elements(collective.output_chunks), plan.dtype)
    whole = poisoned(layout.elements(collective.chunks_per_loop), plan.dtype)
    start = layout.elements(collective.starts(rank)[0])
    whole[start : start + len(given)] = given
    return whole, None


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


def _collect(workers: list[_Worker]) -> list[Tensor]:
    """All ranks' results, or the first error."""
    results: dict[int, Tensor] = {}
    while len(results) < len(workers):
        pipes = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in results}
        for pipe in wait(list(pipes)):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                outcome = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                workers[rank].process.join(_GRACE)
                code = workers[rank].process.exitcode
                raise ExecutionError(f"the process of rank {rank} died with exit code {code}") from None
            if isinstance(outcome, BaseException):
                outcome.add_note(f"raised on rank {rank} of {len(workers)}")
                raise outcome
            results[rank] = outcome
    return [results[rank] for rank in range(len(workers))]


def _end(workers: list[_Worker]) -> None:
    """End the processes: those that are done leave when their pipe closes; others are killed."""
    is_done = sys.exc_info()[0] is None
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        if is_done:
            worker.process.join(_GRACE)
        worker.process.kill()
        worker.process.join()


@dataclass(frozen=True)
class _Starts:
    """`Collective.starts` as a table, which can be pickled."""

    of_rank: tuple[tuple[int, int], ...]

    def __call__(self, rank: int) -> tuple[int, int]:
        return self.of_rank[rank]


def _expect_anything(rank: int, index: int) -> Expected | None:
    return None


def _start_with_anything(rank: int, index: int) -> bool:
    return True


def _make_portable(schedule: Schedule) -> Schedule:
    """The schedule without the collective's conditions, which only checks need and which cannot be pickled."""
    collective = replace(
        schedule.collective,
        expected=_expect_anything,
        initialized=_start_with_anything,
        starts=_Starts(tuple(map(schedule.collective.starts, range(schedule.collective.ranks)))),
    )
    return replace(schedule, collective=collective)


# The functions below run in the new processes.


def _work(pipe: Connection, rank: int, size: int, folder: str) -> None:
    """A worker process: runs once, then waits until no other rank needs it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    outcome: Tensor | Exception
    try:
        schedule, (input, output), options = pickle.loads(pipe.recv_bytes())
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_START_LIMIT)
        outcome = run_on_host(
            schedule, input, output, **options
        ).clone()  # a view would be pickled with its whole storage
    except Exception as error:  # noqa: BLE001  (the caller gets it, whatever it is)
        outcome = error
        error.add_note(traceback.format_exc())
    with contextlib.suppress(EOFError, OSError):  # the caller has closed the pipe if another rank failed before
        pipe.send_bytes(pickle.dumps(outcome))
        pipe.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when its parent has exited, whatever it is executing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
