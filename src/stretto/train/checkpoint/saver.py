# SPDX-License-Identifier: Apache-2.0
"""Saves a run's checkpoints: asynchronously if the host's memory holds a copy of the state, else between two steps.

Each rank has one `Saver`. A save agrees on the host whether it may happen, copies the state (`staging`), and returns;
a thread then writes the copy, by collectives of a separate group. The main thread uses that group only while no
thread runs, so that the collectives of both are in the same order on all ranks.

An error of one rank's write reaches the threads of all ranks through those collectives. The main threads may be in
different steps by then: they end together, at the next step on which the ranks agree (`StopRequest`) or the next save.
"""

import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from stretto.cluster.host_memory import host_memory_available
from stretto.cluster.local_ranks import count_ranks_here
from stretto.counters import saving
from stretto.memory import exchange, group_timeout
from stretto.memory.shared_groups import SharedGroups
from stretto.train.checkpoint.folders import checkpoint_path
from stretto.train.checkpoint.retention import Retention, remove_surplus
from stretto.train.checkpoint.staging import Key, Ownership, Staging, digest_of, sizes_of
from stretto.train.checkpoint.state import find_failure, find_not_finite, raise_first
from stretto.train.checkpoint.storage import ShardedState
from stretto.train.checkpoint.writing import (
    CheckpointWriter,
    NoSpaceError,
    bytes_on_disk,
    describe_lack,
    free_bytes,
    write_checkpoint,
)
from stretto.train.observe.metrics import CorruptionError, DivergenceError

logger = logging.getLogger(__name__)

AsyncSave = Literal["auto"] | bool
USABLE_MEMORY = 0.8
"""The part of the free host memory that copies take at most. The rest is for files that are read and written."""
MAX_WRITERS = 4
"""Writer threads of a rank, at most; lab/results/saves has what more of them gain."""
MAX_END = 30.0
"""Seconds for which a rank that has failed alone waits for the write that runs."""


class Saver:
    """Saves the checkpoints of the run in `out`; a context manager, which waits for the last write. Collective.

    is_async: whether training continues while a checkpoint is written; "auto": if the memory suffices. That is decided
    by the first `prepare`; without it every save is written before it returns. log: takes lines for the log of rank 0.
    writers: threads of this rank that write files; None for a number by the machine's cores.
    """

    def __init__(
        self,
        out: Path,
        device: torch.device,
        retention: Retention,
        *,
        is_async: AsyncSave = "auto",
        writers: int | None = None,
        log: Callable[[str], None] = logger.info,
    ) -> None:
        self._out, self._device, self._retention, self._log = out, device, retention, log
        self._wanted, self._is_async = is_async, False
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._writers = writers or max(1, min(MAX_WRITERS, (os.cpu_count() or 1) // count_ranks_here(ranks)))
        self._gpu = torch.cuda.current_device() if device.type == "cuda" else None  # a new thread has the first one
        self._timeout = group_timeout(None)
        limit = timedelta(seconds=self._timeout)
        self._group = SharedGroups().get_for_all("saves", timeout=limit)
        self.staging = Staging(device)
        self._ownership: Ownership | None = None
        self._digest = ""
        self._thread: threading.Thread | None = None
        self._writer: CheckpointWriter | None = None
        self._error: BaseException | None = None
        self._has_saved = False

    @property
    def is_async(self) -> bool:
        return self._is_async

    def prepare(self, state: Mapping[str, ShardedState]) -> None:
        """Decide whether saves are asynchronous, and allocate the memory that they take. Collective.

        state: after the first step, when the optimizer has its own. Raises ValueError, on all ranks, if asynchronous
        saves were asked for and the memory does not suffice.
        """
        if self._wanted is False:
            return
        self._agree_on_ownership(state)
        assert self._ownership is not None
        lack = self._lack_of_memory()
        if not lack:
            lack = self._reserve(state)
        total = sum(self._ownership.bytes_of_ranks) / 1e9
        if lack and self._wanted is True:
            raise ValueError(f"train.async_save is true, but {lack}; train.async_save='auto' or false would do")
        self._is_async = not lack
        if lack:
            self.staging = Staging(self._device)
            self._log(f"checkpoints are written between two steps: {lack}")
        else:
            self._log(f"checkpoints are written asynchronously, from a copy of {total:,.3g} GB in host memory")

    def save(
        self,
        step: int,
        state: Mapping[str, ShardedState],
        description: Mapping[str, Any],
        evaluation: Mapping[str, float | None] | None = None,
        *,
        waits: bool = False,
    ) -> None:
        """Save the state after `step`. Waits for the save before it, copies, and returns. Collective.

        state: may omit tensors of which this rank holds nothing. Before kernels change it, the stream that runs them
        must have called `wait_on_device`; the host may change it at once. description: CheckpointMetadata's optimizer,
        model, run and data, and operators, if there are any. evaluation: of this step's weights, if there was one; rank
        0's counts. waits: return when the checkpoint is on the disk.

        Raises, on all ranks: the error of the save before; PeerError after a failed wait for another rank;
        DivergenceError if a weight is not finite; NoSpaceError if the disk has too little room. Nothing is written or
        deleted then.
        """
        self.wait()
        needed = self._agree(step, state)
        assert self._ownership is not None
        own = self._ownership.part_of(self._rank, state)
        path = checkpoint_path(self._out, step)
        if self._rank == 0 and self._has_saved and not path.parent.is_dir():
            self._log(
                f"{path.parent} was removed while the run trains: earlier checkpoints are lost, new ones go there"
            )
        self._has_saved = True
        index = {"step": step, "evaluation": dict(evaluation or {}), **description}
        self._writer = CheckpointWriter(path, index, threads=self._writers)
        written = self.staging.copy(own) if self._is_async else own
        self._thread = threading.Thread(
            target=self._write, args=(self._writer, written, needed), name="stretto-save", daemon=True
        )
        self._thread.start()
        if waits or not self._is_async:
            self.wait()

    def wait_on_device(self) -> None:
        """Let the current stream wait for the copy of the last save. See `Staging.wait_on_device`."""
        self.staging.wait_on_device()

    def has_failed(self) -> bool:
        """True if the write that runs has failed, as far as this rank knows: all ranks are then to call `wait`."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises its error, which all ranks have. Collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the write that runs: after an error that only this rank may have, at most MAX_END seconds."""
        if error is None:
            self.wait()
            return
        if self._thread is None:
            return
        is_of_all = isinstance(error, DivergenceError | CorruptionError)
        self._thread.join(None if is_of_all else min(MAX_END, self._timeout))
        if self._thread.is_alive():
            logger.warning("the checkpoint that is being written is given up")
            if self._rank == 0 and self._writer is not None:
                self._writer.discard()
        elif self._error is not None:
            logger.warning("%s", self._error)

    # What the ranks agree on, by collectives of the main thread.

    def _agree(self, step: int, state: Mapping[str, ShardedState]) -> int:
        """Raise, on all ranks, if the state may not or cannot be saved. Returns the bytes that it takes on the disk."""
        failure = find_failure()
        not_finite = "" if failure else find_not_finite(state)
        has_changed = digest_of(sizes_of(state)) != self._digest
        free = free_bytes(self._out) if self._rank == 0 else 0
        mine = failure, not_finite, has_changed, free
        found = exchange(mine, self._group, self._timeout, tuple[str, str, bool, int])
        raise_first([one[0] for one in found], [one[1] for one in found], step)
        if any(one[2] for one in found):
            self._agree_on_ownership(state)
            if self._is_async and (lack := self._reserve(state)):
                raise ValueError(f"the training state has grown, and {lack}; train.async_save=false would do")
        assert self._ownership is not None
        needed = bytes_on_disk(sum(self._ownership.bytes_of_ranks), len(self._ownership.owners))
        if needed > found[0][3]:
            raise NoSpaceError(describe_lack(self._out, needed, found[0][3]))
        return needed

    def _agree_on_ownership(self, state: Mapping[str, ShardedState]) -> None:
        sizes = sizes_of(state)
        self._ownership = Ownership(exchange(sizes, self._group, self._timeout, dict[Key, int]))
        self._digest = digest_of(sizes)

    def _lack_of_memory(self) -> str:
        """Say which machine has too little memory for its ranks' copies; empty if none. The same on all ranks."""
        assert self._ownership is not None
        try:
            left = host_memory_available().bytes
        except OSError:  # this system does not say: the allocation will
            left = 1 << 62
        hosts = exchange((socket.gethostname(), left), self._group, self._timeout, tuple[str, int])
        needed: dict[str, int] = defaultdict(int)
        for (host, _), size in zip(hosts, self._ownership.bytes_of_ranks, strict=True):
            needed[host] += size
        for host, left in hosts:
            if needed[host] > USABLE_MEMORY * left:
                return (
                    f"copies of the state take {needed[host] / 1e9:,.3g} GB of host memory on {host}, of which "
                    f"{left / 1e9:,.3g} GB are left, and {USABLE_MEMORY:.0%} of that may be used"
                )
        return ""

    def _reserve(self, state: Mapping[str, ShardedState]) -> str:
        """Allocate the copy's memory. Returns why a rank could not, empty if all could."""
        assert self._ownership is not None
        error = ""
        try:
            self.staging.reserve(self._ownership.part_of(self._rank, state))
        except (ValueError, RuntimeError, MemoryError) as failure:
            error = f"rank {self._rank} cannot allocate memory for a copy: {failure}"
        return next(filter(None, exchange(error, self._group, self._timeout, str)), "")

    def _write(self, writer: CheckpointWriter, state: dict[str, ShardedState], needed: int) -> None:
        """The thread: write a checkpoint, and then delete those that are no longer kept."""
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            if self._is_async:
                self.staging.wait_on_host()
            with saving(writer.description["step"]):
                write_checkpoint(state, writer, needed=needed, group=self._group, is_async_save=self._is_async)
            if self._rank == 0:
                self._remove_surplus()
        except BaseException as error:  # noqa: BLE001  (whatever it is, `wait` raises it in the main thread)
            self._error = error

    def _remove_surplus(self) -> None:
        """Delete what is no longer kept. A run does not end because that fails: the new checkpoint is whole."""
        try:
            remove_surplus(self._out, self._retention)
        except FileNotFoundError:
            return  # the user deletes checkpoints, too
        except OSError as error:
            logger.warning("a checkpoint that is no longer kept cannot be deleted: %s", error)
