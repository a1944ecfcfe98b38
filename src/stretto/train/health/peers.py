# SPDX-License-Identifier: Apache-2.0
"""Lets ranks monitor each other if torchrun (or another launcher) started them instead of `launch`.

Rank 0's heartbeat thread reads all heartbeats; rank 1's reads them, too, and acts if rank 0 is silent; any other rank
begins to read them if no lower rank has for some time. The rank that finds a stall collects the stacks and writes a
verdict to the store, which all ranks read with their next heartbeat. Under torchrun each of them then writes the error
file that torchrun reads, the culprit's with the earliest time, so that torchrun names it, and ends its process
immediately, since the main threads hang. Elsewhere the verdict is logged, and the process groups' time limits end the
ranks.
"""

import json
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from stretto.train.health import evidence
from stretto.train.health.beat import MISSED, Beat, interval_of
from stretto.train.health.monitor import MISSED_AT_LEAST, Monitor, Stall

logger = logging.getLogger(__name__)

VERDICT = "verdict"  # the store's key of the stall that was found first
WATCHER = "watcher"  # the store's key that the watching rank changes with each of its looks
ASKED = "asked"  # the store's key that a rank sets whose wait for another one has reached its time limit
FAILED = 1  # the exit status of ranks that end because one is stuck


class PeerWatch:
    """What a rank's heartbeat thread does for the other ranks. timeout: in seconds. out: the run's folder."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, timeout: float, out: Path) -> None:
        self._store, self._rank, self._timeout, self._out = store, rank, timeout, out
        self._monitor = Monitor(store, ranks, timeout)
        self._interval = interval_of(timeout)
        self._watcher, self._seen = "", time.monotonic()
        self._answered = time.monotonic()
        self._looks = 0
        self._has_ended = False

    def look(self) -> None:
        """Act on a verdict; read the other ranks' heartbeats if it is this rank's turn. After each heartbeat."""
        self._answered = time.monotonic()
        if self._has_ended:
            return
        if self._store.check([VERDICT]):
            self._end(json.loads(self._store.get(VERDICT)))
        elif self._is_reading():
            self._monitor.read()
            if any(not self._monitor.is_silent(rank) for rank in self._monitor.watched(range(self._rank))):
                return  # a lower rank watches
            self._looks += 1
            self._store.set(WATCHER, f"{self._rank} {self._looks}")
            has_asked = self._store.check([ASKED])
            if (stall := self._monitor.find_stall(limit=self._timeout / 2 if has_asked else None)) is not None:
                self._decide(stall)
            elif (stall := self._monitor.find_warning()) is not None:
                logger.warning("%s; the run ends when it reaches the limit", stall.text)
            if (slow := self._monitor.find_slow()) is not None:
                logger.warning("%s", slow.text)

    def lost_store(self) -> None:
        """The store has not answered: if it does not for the time limit, its host is lost, and this rank ends."""
        if time.monotonic() - self._answered < self._timeout or self._has_ended:
            return
        host = os.environ.get("MASTER_ADDR", "rank 0")
        self._end(
            {
                "text": f"the job's store on {host} has not answered for {self._timeout:g} s (train.timeout): its host "
                "or its process is stopped or lost",
                "culprits": [],
                "time": time.time(),
                "folder": None,
            }
        )

    def _is_reading(self) -> bool:
        if self._rank <= 1:
            return True
        seen = self._store.get(WATCHER).decode() if self._store.check([WATCHER]) else ""
        if seen != self._watcher:
            self._watcher, self._seen = seen, time.monotonic()
        patience = max(MISSED_AT_LEAST, MISSED * self._interval) + self._rank * self._interval
        return seen.startswith(f"{self._rank} ") or time.monotonic() - self._seen > patience

    def _decide(self, stall: Stall) -> None:
        folder = evidence.collect(self._out, self._monitor, stall.text, own_rank=self._rank)
        text = stall.text if folder is None else f"{stall.text}; stacks are in {folder}"
        verdict = {
            "text": text,
            "culprits": stall.culprits,
            "time": time.time(),
            "folder": None if folder is None else str(folder.absolute()),
        }
        # Another rank may have been first.
        agreed = json.loads(self._store.compare_set(VERDICT, "", json.dumps(verdict)))
        if agreed == json.loads(json.dumps(verdict)):
            logger.error("%s", text)
        self._end(agreed)

    def _end(self, verdict: dict[str, object]) -> None:
        """Write the error files of this rank and of culprits on this host, and end this process and those of these."""
        self._has_ended = True
        culprits = [rank for rank in verdict["culprits"] if isinstance(rank, int)]  # type: ignore[attr-defined]
        text, at = str(verdict["text"]), float(str(verdict["time"]))
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        for beat in self._beats_here(culprits):
            if verdict["folder"] is not None:
                with suppress(OSError):
                    evidence.write_missing_stacks(Path(str(verdict["folder"])), [beat])
            _write_error(beat.error_file, text, at)
            if beat.rank != self._rank:
                with suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)
        if self._rank not in culprits:
            own = text if not culprits else f"this rank ({self._rank}) has not failed, but ends, since {text}"
            _write_error(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), own, at + 1)
            time.sleep(2 * self._interval)  # the culprits' processes end first
        os._exit(FAILED)

    def _beats_here(self, ranks: list[int]) -> list[Beat]:
        """The last heartbeats of those of the ranks that are on this host."""
        beats = []
        with suppress(RuntimeError):
            for rank in ranks:
                if self._store.check([str(rank)]):
                    beats.append(Beat.of_json(self._store.get(str(rank))))
        return [beat for beat in beats if beat.is_here]


def _write_error(file: str, text: str, at: float) -> None:
    """Write a file as torch.distributed.elastic's `record` does, unless the rank has written it. at: Unix time."""
    if not file:
        return
    extra = {"py_callstack": text, "timestamp": str(int(at))}
    with suppress(OSError), open(file, "x") as writing:
        json.dump({"message": {"message": text, "extraInfo": extra}}, writing)
