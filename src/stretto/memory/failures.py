# SPDX-License-Identifier: Apache-2.0
"""Failed waits: what a kernel does when a peer does not signal in time, and how the host detects it.

A kernel whose wait exceeds its time limit cannot raise. It does this, in this order (of which this is the one
description; the code is `stretto.tiles.waits.report_timeout` and, for collectives, `executor/cuda/primitives.cu`):

    on the GPU                                             on the host
    1. marks its workspace as failed
    2. sets the failure flag ----------------------------> (kernels read it: they publish nothing, their waits end)
    3. writes its workspace's failure record
       (fence at system scope between the words)
    4. sets the summary word ----------------------------> `check`, called wherever a result may be used, reads it in
                                                           about 50 ns and raises `PeerError` with the record's message
                                                           the watchdog ends the process if `check` is not called

- *Mark*: a word in the GPU's memory, of each workspace (of a channel: RECORDED in `stretto.tiles.call_state`). The wait
  that sets it first writes the record; it does so before other waits can see the flag and follow.
- *Failure flag*: one int32 word on each GPU, which all of Stretto's kernels of this process on that GPU read. While it
  is set, kernels publish no signal, packet or message that a peer would trust, and optimizers that were guarded
  (`stretto.optim.guard`) leave weights and state as they are.
- *Failure record*: one row for each workspace of a table in pinned host memory. The kernel writes words 1 to 11, then,
  after a fence at system scope, word 0. Words 8 and 9 hold the limit of the wait that failed, in 64-bit nanoseconds,
  words 12 and 13 the 64-bit address of the summary word.
- *Summary word*: row 0 of the table; the kernel stores 1 into it.

A failure lasts as long as its workspace: when that is closed, or freed with its process group, the record is cleared,
and when no failed record is left, the flags are cleared.
"""

import ctypes
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto import counters
from stretto.memory.symmetric import PeerError

RECORD_WORDS = 16
MAX_RECORDS = 4096
SUMMARY_ADDRESS = 12
"""The word of a record where the address of the summary word begins: two words, the lower half first."""

LIMIT = 8
"""The word of a record where the failed wait's limit begins: two words, the lower half first, in nanoseconds."""

FOLLOWED = 0x7FFFFFFF
"""Word 0 of a record whose workspace stopped because of another's failure: `check` reports the original, if known."""

WATCHDOG_VARIABLE = "STRETTO_WATCHDOG"
"""Seconds from a failure until the watchdog ends a process that has not called `check`; 0 disables the watchdog."""
DEFAULT_WATCHDOG_SECONDS = 60.0
_WATCHDOG_PERIOD = 1.0
_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped

logger = logging.getLogger(__name__)
_lock = threading.RLock()  # of everything below

# The table, and its rows in use.
_records: "weakref.WeakValueDictionary[int, FailureRecord]" = weakref.WeakValueDictionary()
_free_rows: list[int] = []
_next_row = 1  # row 0 is the summary
_rows: Tensor | None = None  # int32 [MAX_RECORDS, RECORD_WORDS], made by the first `register`
_is_pinned = False
_summary = torch.zeros(1, dtype=torch.int32, device="cpu").numpy()  # the table's row 0, once there is a table
_unseen: list[str] = []  # messages of failures whose workspaces were closed before anything raised them
_listeners: list[Callable[[int], None]] = []
_flags: dict[torch.device, Tensor] = {}  # the failure flag of each device
_watchdog: threading.Thread | None = None


# The host's check before results are used.


def check() -> None:
    """Raise PeerError if a wait of this process has failed in a workspace that is still open.

    It reads memory that kernels write to, and waits for nothing. To learn of all kernels that have been launched,
    synchronize first (`synchronize`).
    """
    if _summary[0]:
        _raise_first()


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on the device, then `check`."""
    if device.type == "cuda":
        with counters.waiting_for((), "this rank's GPU"):
            torch.cuda.synchronize(device)
    check()


def has_failed() -> bool:
    """Check whether a wait of this process has failed in a workspace that is still open. It waits for nothing."""
    return bool(_summary[0]) and _first_failed() is not None


def keep_unseen() -> None:
    """Save a failure that has not been raised, whose workspace is about to be closed, for `raise_unseen`."""
    with _lock:
        for record in list(_records.values()):
            if record.is_failed and not record.was_raised:
                record.was_raised = True
                _unseen.append(record.message())


def raise_unseen() -> None:
    """At the end of a group: raise PeerError for a failure that has not been raised."""
    keep_unseen()
    if _unseen:
        message = _unseen[0]
        _unseen.clear()
        raise PeerError(message)


def when_table_exists(listener: Callable[[int], None]) -> None:
    """Call `listener` with the summary word's address: now, or at the first `register`, which makes the table."""
    with _lock:
        if _rows is None:
            _listeners.append(listener)
        else:
            listener(_rows.data_ptr())


# What a workspace registers, and its kernels write to.


class FailureRecord:
    """One workspace's row of the failure table.

    words: int32 [16], in pinned host memory where there are GPUs; kernels write to it. failed: int32 [1] on `device`,
    the failure flag, which all records of the device share: 0, or any other number. was_raised: whether the host has
    raised the failure; the watchdog ignores such failures.
    """

    def __init__(
        self, owner: object, describe: Callable[[Sequence[int]], str], device: torch.device, row: int, words: Tensor
    ) -> None:
        self.device = device
        self.words = words
        self.failed = failure_flag(device)
        self.was_raised = False
        self._shown = words.numpy()
        self._describe = describe
        # A workspace that is freed without `close` frees its row too.
        self._finalizer = weakref.finalize(owner, _release, row)
        self._finalizer.atexit = False

    @property
    def is_failed(self) -> bool:
        """True if a wait of this workspace has failed."""
        return bool(self._shown[0])

    def message(self) -> str:
        return self._describe([int(word) for word in self._shown])

    def mark(self, words: Sequence[int]) -> None:
        """Record a failure that the host has found, as a kernel would. words: word 0 (not 0) and those after it."""
        if not words or not words[0] or len(words) > SUMMARY_ADDRESS:
            raise ValueError(f"a failure has 1 to {SUMMARY_ADDRESS} words, the first of them not 0, not {list(words)}")
        if self.is_failed:
            return
        with _lock:
            for index, word in reversed(list(enumerate(words))):
                self._shown[index] = ctypes.c_int32(word).value
            _summary[0] = 1
            if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self.failed.fill_(1)

    def close(self) -> None:
        self._finalizer()


def register(owner: object, describe: Callable[[Sequence[int]], str], device: torch.device) -> FailureRecord:
    """Make the failure record for the waits of `owner`'s kernels on `device`. `owner` is held weakly and must keep it.

    describe: makes the message of `PeerError` from the record's 16 words; it must not hold `owner` strongly.
    RuntimeError where there are more workspaces than the table has rows.
    """
    global _next_row
    with _lock:
        if not _free_rows and _next_row == MAX_RECORDS:
            raise RuntimeError(f"this process has {MAX_RECORDS - 1} workspaces that wait for peers, and no more fit")
        row = _free_rows.pop() if _free_rows else _next_row
        _next_row = max(_next_row, row + 1)
        table = _table(device)
        words = table[row]
        words.zero_()
        words[SUMMARY_ADDRESS : SUMMARY_ADDRESS + 2].view(torch.int64).fill_(table.data_ptr())
        record = FailureRecord(owner, describe, device, row, words)
        _records[row] = record
    start_watchdog()
    return record


def failure_flag(device: torch.device) -> Tensor:
    """int32 [1] on the device: nonzero from the moment that a wait of this process on it has failed."""
    flag = _flags.get(device)
    if flag is None:
        with torch.inference_mode(False):
            flag = torch.zeros(1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        flag = _flags.setdefault(device, flag)
    return flag


def find_flag(device: torch.device) -> Tensor | None:
    """`failure_flag` if any workspace on the device has waited for peers; None otherwise."""
    return _flags.get(device) if device.type == "cuda" else None


def unless_failed(after: Tensor, before: Tensor | float) -> Tensor:
    """The new values, or those of before once a wait for another rank has failed (`stretto.optim.guard`)."""
    failed = find_flag(after.device)
    return after if failed is None else torch.where(failed[0] == 0, after, before)


# The table behind it.


def _raise_first() -> None:
    """Raise the first failure, and mark all as raised."""
    record = _first_failed()
    if record is not None:
        with _lock:
            for other in list(_records.values()):
                other.was_raised |= other.is_failed
        raise PeerError(record.message())


def _first_failed() -> FailureRecord | None:
    """The first failed record; clears summary word and flags if there is none."""
    with _lock:
        known = [record for _, record in sorted(_records.items()) if record.is_failed]
        if known:
            return next((record for record in known if int(record.words[0]) != FOLLOWED), known[0])
        _clear()
    return None


def _clear() -> None:
    """Let kernels publish again, as no failed workspace is left. During a graph capture, leave it to the next look."""
    if not _summary[0] or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return
    _summary[0] = 0
    for flag in _flags.values():
        flag.zero_()


def _release(row: int) -> None:
    """Free a row whose owner has been closed or collected."""
    with _lock:
        record = _records.pop(row, None)
        if _rows is None:
            return
        was_failed = bool(_rows[row, 0])
        _rows[row].zero_()
        _free_rows.append(row)
        del record
        if was_failed:
            _first_failed()


def _table(device: torch.device) -> Tensor:
    """int32 [MAX_RECORDS, RECORD_WORDS], made at the first use, and never moved.

    It is pinned from the first workspace on a GPU on: a process that uses only CPUs does not initialize CUDA.
    """
    global _rows, _summary, _is_pinned
    if _rows is None:
        _is_pinned = device.type == "cuda"
        with torch.inference_mode(False):
            _rows = torch.zeros(MAX_RECORDS, RECORD_WORDS, dtype=torch.int32, pin_memory=_is_pinned, device="cpu")
        _summary = _rows[0].numpy()
        for listener in _listeners:
            listener(_rows.data_ptr())
        _listeners.clear()
    elif device.type == "cuda" and not _is_pinned:
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(_rows.data_ptr(), _rows.nbytes, _MAPPED)))
        _is_pinned = True
    return _rows


def read_limit(words: Sequence[int]) -> float:
    """The limit of the wait that a record describes, in seconds."""
    low, high = (int(word) & 0xFFFFFFFF for word in words[LIMIT : LIMIT + 2])
    return (high << 32 | low) / 1e9


# The watchdog: ends a process that does not look.


def start_watchdog() -> None:
    """Start the thread that ends this process when a failure goes unnoticed, unless it runs already or is disabled.

    It works like the watchdog of torch's NCCL backend: a process that never checks (its host waits for something else,
    or it replays CUDA graphs) would continue with wrong results. A failure that was raised as PeerError has been
    noticed, and is the caller's to handle. A rank that is watched from outside checks in each step, and gets no thread.
    """
    global _watchdog
    if counters.shared_folder() is not None:
        return
    with _lock:
        if (_watchdog is None or not _watchdog.is_alive()) and watchdog_seconds() > 0:
            _watchdog = threading.Thread(target=_watch, name="stretto-watchdog", daemon=True)
            _watchdog.start()


def watchdog_seconds() -> float:
    """Longest time that a failure may go unnoticed, in seconds; 0: forever. ValueError for other settings."""
    text = os.environ.get(WATCHDOG_VARIABLE, "")
    if not text:
        return DEFAULT_WATCHDOG_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{WATCHDOG_VARIABLE} must be a number of seconds, 0 to switch the watchdog off, not {text!r}")
    return seconds


def _watch() -> None:
    """Read the summary word once a second, and end the process if a failure has been unnoticed for too long."""
    unseen_since: float | None = None
    while True:
        time.sleep(_WATCHDOG_PERIOD)
        with _lock:
            unseen = [record for record in list(_records.values()) if record.is_failed and not record.was_raised]
        if not _summary[0] or not unseen:
            unseen_since = None
            continue
        now = time.monotonic()
        unseen_since = now if unseen_since is None else unseen_since
        if now - unseen_since >= watchdog_seconds():
            _end_process(unseen[0].message(), now - unseen_since)


def _end_process(message: str, seconds: float) -> None:
    """End with SIGABRT, as NCCL's watchdog does: launchers report such a process, and core dumps are written."""
    text = (
        f"Stretto's watchdog ends this process: a wait for another rank failed {seconds:.0f} s ago, and nothing has "
        f"looked at it since. {message}. Set {WATCHDOG_VARIABLE}=0 to switch the watchdog off."
    )
    logger.critical(text)
    os.write(2, f"{text}\n".encode())
    os.kill(os.getpid(), signal.SIGABRT)
