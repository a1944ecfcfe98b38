# SPDX-License-Identifier: Apache-2.0
"""The heartbeat of a rank: a thread that writes the rank's current phase and step to the job's store, once a second.

The thread has its own connection to the store, since a blocked call of another thread would hold the connection's
lock. It needs Python's interpreter lock: a rank whose main thread holds that lock, and one that is stopped, is silent.
"""

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import ClassVar

import torch.distributed as dist

from stretto.memory.symmetric import current_wait
from stretto.train.health import connections, evidence, flight_recorder, progress, stacks
from stretto.train.health.beat import Beat, Save, interval_of, line_of, prefix, process_space
from stretto.train.health.failures import is_consequence
from stretto.train.health.peers import ASKED, PeerWatch
from stretto.train.health.slow_ranks import SLOW_RANK, BusySampler

logger = logging.getLogger(__name__)

BY_LAUNCHER = "STRETTO_WATCHED_BY_LAUNCHER"
"""Set in the environment of ranks whose heartbeats `launch` reads; other ranks watch each other."""
CONNECT = 30.0  # seconds to connect to the store
FRAMES = 6
VERDICT_LIMIT = 5.0  # seconds, and four heartbeats: a stall is found, and its stacks are collected


class Heartbeat:
    """This process's heartbeat; `start` and `stop` it. timeout: `train.timeout`, in seconds."""

    running: ClassVar["Heartbeat | None"] = None

    def __init__(self, timeout: float, out: Path | None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.interval = interval_of(timeout)
        self._timeout, self._out = timeout, out
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._number = 0
        self._last: tuple[tuple[int, ...], dict[str, int]] = ((), {})
        self._groups = 0
        self._addresses: set[str] = set()
        self._sampler: BusySampler | None = None
        self._last_save: tuple[object, ...] = ()
        self._save_progressed = time.monotonic()
        self._cpu_then = 0.0  # seconds of CPU time at the last progress
        self._progressed = time.monotonic()
        self._answered = ""
        self._store: dist.Store | None = None
        self._peers: PeerWatch | None = None
        self._has_asked = False  # whom this rank has waited for, in vain
        self._thread = threading.Thread(target=self._run, name="stretto-heartbeat", daemon=True)

    @classmethod
    def start(cls, *, timeout: float, out: Path | None = None) -> "Heartbeat":
        """Start this process's heartbeat, if none runs. Returns the one that runs.

        out: the run's folder, for reports of ranks that watch each other, without a launcher.
        """
        if cls.running is None:
            stacks.register()
            progress.share()
            cls.running = cls(timeout, out)
            cls.running._thread.start()
            # A thread that comes back from C++ while the interpreter is finalized would abort the process.
            atexit.register(cls.running.stop)
        return cls.running

    def stop(self) -> None:
        """Write a last heartbeat, which says that this rank is done, and end the thread."""
        atexit.unregister(self.stop)
        self._stopped.set()
        if self._sampler is not None:
            self._sampler.stop()
        self._thread.join(5.0)
        if Heartbeat.running is self:
            Heartbeat.running = None

    def begin_steps(self, device: str, *, is_captured: bool = False) -> None:
        """Call when all groups are made, before the first step: measure how slow this rank is.

        device: "cpu" or "cuda". is_captured: whether steps are CUDA graphs, whose collectives nothing times.
        """
        if self._store is not None:
            with suppress(RuntimeError):
                connections.write_addresses(self._store, self.rank, self._addresses)
        if self._sampler is None:
            has_gpu = device == "cuda"
            self._sampler = BusySampler(has_gpu=has_gpu, reads_nccl=has_gpu and not is_captured)
            self._sampler.start()

    def slow_rank(self) -> dict[str, float] | None:
        """The slow rank that was reported last (`SlowRank`), from the job's store: its rank, ratio and last step."""
        with suppress(RuntimeError):
            if self._store is not None and self._store.check([SLOW_RANK]):
                found: dict[str, float] = json.loads(self._store.get(SLOW_RANK))
                return found
        return None

    def wait_for_verdict(self) -> None:
        """Ask the ranks that watch each other whom this one waited for; they end this process if they find out."""
        if self._peers is None or self._store is None or "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        self._has_asked = True  # so that this rank, which waits in no collective any more, is not taken for the culprit
        with suppress(RuntimeError):
            self._store.set(ASKED, str(self.rank))
        time.sleep(VERDICT_LIMIT + 4 * self.interval)

    def _run(self) -> None:
        store = self._store = self._connect()
        if store is None:
            return
        if BY_LAUNCHER not in os.environ and self._out is not None:
            ranks = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else dist.get_world_size()
            self._peers = PeerWatch(store, self.rank, ranks, self._timeout, self._out)
        while True:
            is_done = self._stopped.is_set()
            try:
                store.set(str(self.rank), self._beat(is_done).as_json())
                self._answer(store)
                if len(self._last[1]) != self._groups:  # there are new groups, and thus new connections
                    self._groups = len(self._last[1])
                    connections.write_addresses(store, self.rank, self._addresses)
                if self._peers is not None:
                    self._peers.look()
            except Exception as error:  # noqa: BLE001  (torch's errors of the store, of any class: beats must go on)
                logger.debug("heartbeat of rank %d: %s: %s", self.rank, type(error).__name__, error)
                if self._peers is not None:
                    self._peers.lost_store()
            if is_done:
                return
            self._stopped.wait(self.interval)

    def _connect(self) -> dist.Store | None:
        """Connect to the job's store; where there is none before the process group, wait for the group's."""
        limit = timedelta(seconds=max(5.0, self._timeout))
        variables = os.environ
        while not self._stopped.is_set():
            try:
                if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    store: dist.Store = dist.TCPStore(
                        variables["MASTER_ADDR"],
                        int(variables["MASTER_PORT"]),
                        is_master=False,
                        timeout=timedelta(seconds=CONNECT),
                        wait_for_workers=False,
                    )
                    store.set_timeout(limit)
                    return dist.PrefixStore(prefix(), store)
                if dist.is_initialized():
                    own = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
                    return dist.PrefixStore(prefix(), own)
            except (RuntimeError, OSError, AttributeError) as error:
                logger.debug("heartbeat of rank %d: no store: %s", self.rank, error)
            self._stopped.wait(self.interval)
        return None

    def _beat(self, is_done: bool) -> Beat:
        now, noted = time.monotonic(), progress.current()
        counters = flight_recorder.counters()
        state = (progress.count(), counters)
        if state != self._last:
            self._last, self._progressed, self._cpu_then = state, now, time.process_time()
        since = now - self._progressed
        waits: tuple[flight_recorder.OpenCollective, ...] = ()
        entered: dict[str, int] = {}
        saves = self._state_of_save(counters, now)
        idle = max(since, saves.since if saves else 0.0)
        if idle > self.interval / 2:  # the whole buffer is read only while nothing progresses
            found, entered = flight_recorder.find_collectives()
            waits = tuple(found)
        peer_wait = current_wait(self._main) if since > self.interval / 2 else None
        self._number += 1
        frames = self._frames(self._main)
        return Beat(
            rank=self.rank,
            host=self._host,
            processes=process_space(),
            pid=self._pid,
            number=self._number,
            phase=noted.phase,
            step=noted.step,
            since=since,
            saves=saves,
            waits=waits,
            entered=tuple(entered.items()),
            peers=None if peer_wait is None else peer_wait.ranks,
            message="" if peer_wait is None else peer_wait.what,
            has_failed=self._has_asked or (peer_wait is not None and peer_wait.has_failed),
            where=tuple(_describe_frame(frame) for frame in frames),
            line=line_of(frames[0]) if frames else "",
            cpu=time.process_time() - self._cpu_then,
            stack_file=stacks.stack_file(),
            place_file=progress.place_file(),
            busy=() if self._sampler is None else self._sampler.windows(),
            error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
            is_done=is_done,
        )

    def _state_of_save(self, counters: dict[str, int], now: float) -> Save | None:
        """The state of the checkpoint thread, if there is one."""
        writing = progress.current_writing()
        if writing is None:
            return None
        collectives = [counters.get(f"gloo {writing.group}{what}") for what in ("", " finished")]
        state = (writing, writing.progress(), progress.count_of_threads(), *collectives)
        if state != self._last_save:
            self._last_save, self._save_progressed = state, now
        files = [thread.ident for thread in threading.enumerate() if thread.name.startswith(progress.WRITES_FILE)]
        innermost = [frames[0] for thread in (*files, writing.thread) if (frames := self._frames(thread))]
        at = next((frame for frame in innermost if frame.f_code.co_name != "_worker"), None)  # that one has no work
        return Save(writing.step, now - self._save_progressed, "" if at is None else _describe_frame(at))

    def _frames(self, thread: int | None) -> list[FrameType]:
        """A thread's frames, innermost first."""
        frames: list[FrameType] = []
        frame = sys._current_frames().get(thread) if thread is not None else None
        while frame is not None and len(frames) < FRAMES:
            frames.append(frame)
            frame = frame.f_back
        return frames

    def _answer(self, store: dist.Store) -> None:
        """Write stacks and the flight recorder into the folder that the store asks for, once for each request."""
        if not store.check([evidence.REQUEST]):
            return
        request = store.get(evidence.REQUEST).decode()
        if request == self._answered:
            return
        self._answered = request
        with suppress(OSError):  # another host may not have the folder
            evidence.write_own(Path(json.loads(request)["folder"]), self.rank)
        store.set(evidence.answer_key(request, self.rank), "1")


@contextmanager
def heartbeats(timeout: float, out: Path, *, ranks: int) -> Iterator[None]:
    """Run a heartbeat in the block, if there are other ranks: the one that already runs, or a new one.

    An exception that only reports that another rank is late or lost is delayed until the ranks that monitor each other
    had time to find out which: then they end this process with a better message.
    """
    if Heartbeat.running is not None or ranks == 1:
        yield
        return
    heartbeat = Heartbeat.start(timeout=timeout, out=out)
    try:
        yield
    except Exception as error:
        if is_consequence(f"{type(error).__name__}: {error}"):
            heartbeat.wait_for_verdict()
        raise
    finally:
        heartbeat.stop()


def _describe_frame(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
