# SPDX-License-Identifier: Apache-2.0
"""The process that watches a machine's ranks from outside, `python -m stretto.launch.watching.watcher`; one a machine.

Settings come as a line of JSON on standard input, which its starter keeps open.

Beside a launcher of Stretto's, which watches the ranks itself, it only waits: if the launcher is killed, ranks that do
not save and end in time are killed, and the launcher's folder is removed.

Under torchrun it looks at the ranks' counters once a second, exchanges a line with the watchers of other machines
through the job's store, and decides. A stuck rank is named in the error files that torchrun reads, and this machine's
ranks are killed, since their main threads hang. If torchrun itself is killed, ranks get SIGTERM from the kernel, and
those that do not end in time are killed. Under other launchers, a stall is only reported.

What comes from the store is data: it names ranks in messages, and neither paths nor process numbers are taken from it.
Lines carry a keyed hash; others are ignored.
"""

import hashlib
import hmac
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from stretto.counters import Counters
from stretto.launch.watching import evidence
from stretto.launch.watching.monitor import MAX_GAP, Monitor, Stall
from stretto.launch.watching.ranks import LocalRanks, RankState, is_saving, write_json
from stretto.launch.watching.slow_ranks import SLOW_RANK_FILE

GRACE = 60.0  # seconds that ranks without a parent have to stop, while none of them writes a checkpoint
MAX_LINE = 1 << 20  # bytes of a machine's line in the store
MAX_NODES = 4096
WATCHERS = "stretto/watchers"  # the store's list of machines
CONNECT = timedelta(seconds=30)


def say(level: str, text: str) -> None:
    """Print a line as the ranks' logs do."""
    print(f"{level} stretto.launch.watching: {text}", file=sys.stderr, flush=True)


class NodeExchange:
    """Exchanges the states of ranks with the watchers of other machines, through the job's store.

    store: of the job, or one with its `set`, `check` and `get`. node: this machine's first rank. key: of the hash.
    """

    def __init__(self, store: Any, node: int, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._node, self._key, self._clock = store, node, key.encode(), clock
        self._seen: dict[int, tuple[int, float, dict[int, RankState]]] = {}  # number, when, states, by node
        self._first: dict[int, int] = {}  # the number of the first line that was read, by node
        self._number = 0

    def exchange(self, own: Iterable[RankState]) -> tuple[dict[int, RankState], dict[int, float]]:
        """Write this machine's states, and read the others'. Raises RuntimeError if the store does not answer.

        Returns the states of other machines' ranks, and the seconds for which nothing has come, by rank.
        """
        self._number += 1
        line = {"number": self._number, "node": self._node, "ranks": [asdict(state) for state in own]}
        self._store.set(f"stretto/watch/{self._node}", self.sign(line))
        listed = self._listed()
        if self._node not in listed:  # at first, and if somebody has changed the list
            self._store.append(WATCHERS, f"{self._node},")
        now = self._clock()
        for node in (listed | self._first.keys()) - {self._node}:
            found = self.read(node)
            if found is None:
                continue
            # A line that has not changed since this machine began may be of an earlier start of the job.
            if self._first.setdefault(node, found[0]) != found[0] and found[0] != self._seen.get(node, (-1,))[0]:
                self._seen[node] = (found[0], now, found[1])
                self._first[node] = -1
        states, silent = {}, {}
        for _, seen, ranks in self._seen.values():
            for rank, state in ranks.items():
                states[rank] = state
                if not state.is_done:
                    silent[rank] = now - seen
        return states, silent

    def _listed(self) -> set[int]:
        if not self._store.check([WATCHERS]):
            return set()
        text = self._store.get(WATCHERS)[: 8 * MAX_NODES].decode(errors="replace")
        nodes = {int(each) for each in text.split(",") if each.isdecimal() and len(each) < 9}
        return set(sorted(nodes)[:MAX_NODES])

    def read(self, node: int) -> tuple[int, dict[int, RankState]] | None:
        """A machine's last line; None if there is none, or if it is not one that a watcher of this job has written."""
        key = f"stretto/watch/{node}"
        line = self.verify(self._store.get(key)) if self._store.check([key]) else None
        with suppress(ValueError, TypeError, KeyError, OverflowError):
            if line is not None and line["node"] == node:
                return int(line["number"]), {(state := RankState.of_json(each)).rank: state for each in line["ranks"]}
        return None

    def sign(self, line: Mapping[str, Any]) -> str:
        text = json.dumps(line)
        return f"{hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()} {text}"

    def verify(self, text: bytes) -> Any:
        """The value of a signed line; None for any other bytes."""
        digest, _, content = text[:MAX_LINE].partition(b" ")
        right = hmac.new(self._key, content, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(digest, right):
            return None
        with suppress(ValueError, RecursionError):
            return json.loads(content)
        return None


class RankWatcher:
    """Watches the ranks that something other than `launch` has started.

    settings: as `joining.watched` gives them. stdin: where it writes others, for the next training of the same ranks.
    """

    def __init__(self, settings: Mapping[str, Any], stdin: BinaryIO) -> None:
        self._folder, self._ranks, self._stdin = Path(settings["folder"]), settings["ranks"], stdin
        self._parents: dict[int, int] = {}  # by process
        self._local = LocalRanks(self._folder)
        self._use(settings)
        self._nodes: NodeExchange | None = None
        self._answered = time.monotonic()
        self._has_ended_all = False

    def _use(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._out, self._timeout = settings, Path(settings["out"]), settings["timeout"]
        self._monitor = Monitor(self._local, self._ranks, self._timeout)

    def run(self) -> None:
        """Watch until this machine's ranks have ended."""
        try:
            while not self._have_ended():
                time.sleep(self._monitor.interval)
                if select.select([self._stdin], [], [], 0)[0] and (line := self._stdin.readline()):
                    self._use(json.loads(line))
                self._look()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _have_ended(self) -> bool:
        known = self._local.counters.values()
        return self._has_ended_all or (bool(known) and not any(each.is_running for each in known))

    def _look(self) -> None:
        others: dict[int, RankState] = {}
        self._monitor.look()
        if len(self._monitor.states) < self._ranks and len(self._local.counters) >= self._settings["local_ranks"] > 0:
            others = self._exchange()
            self._monitor.look(others)
        running = [rank for rank in self._monitor.watched(None) if rank in self._monitor.states]
        if self._have_lost_parent():
            end_ranks(self._local, GRACE)
            self._has_ended_all = True
            return
        has_asked = any(self._monitor.states[rank].has_failed for rank in running)
        if (stall := self._monitor.find_stall(running, self._timeout / 2 if has_asked else None)) is not None:
            self._end(stall)
        elif (stall := self._monitor.find_warning(running)) is not None:
            say("WARNING", f"{stall.text}; the run ends when it reaches the limit")
        if (slow := self._monitor.find_slow(running)) is not None:
            if min(running) in self._local.counters:  # one machine says it
                say("WARNING", slow.text)
            write_json(self._folder / SLOW_RANK_FILE, asdict(slow))

    def _have_lost_parent(self) -> bool:
        """Check whether a rank's process has another parent than it had: torchrun was killed."""
        for counters in self._local.counters.values():
            parent = _parent_of(counters) if counters.is_torchrun and counters.is_running else 0
            if parent and self._parents.setdefault(counters.pid, parent) != parent:
                return True
        return False

    def _exchange(self) -> dict[int, RankState]:
        """The states of the other machines' ranks; marks those from which nothing comes any more."""
        try:
            if self._nodes is None:
                self._nodes = NodeExchange(
                    _connect(self._settings["store"]), min(self._local.counters), self._settings["key"]
                )
            states, ages = self._nodes.exchange(self._monitor.states.values())
        except RuntimeError as error:
            if time.monotonic() - self._answered > self._timeout:
                host = self._settings["store"][0]
                self._end_all(
                    f"the job's store on {host} has not answered for {self._timeout:g} s (train.timeout): its host "
                    f"or its process is stopped or lost ({str(error).splitlines()[0]})",
                    (),
                )
            return {}
        self._answered = time.monotonic()
        quiet = max(MAX_GAP, 5 * self._monitor.interval)
        self._monitor.silent = {rank: age for rank, age in ages.items() if age > quiet}
        return states

    def _end(self, stall: Stall) -> None:
        """Report a stall, and under torchrun end this machine's ranks."""
        folder = evidence.collect(self._out, self._monitor, stall.text)
        text = stall.text if folder is None else f"{stall.text}; stacks are in {folder}"
        say("ERROR", text)
        self._end_all(text, stall.culprits)

    def _end_all(self, text: str, culprits: tuple[int, ...]) -> None:
        self._has_ended_all, at = True, time.time()
        mine = sorted(self._local.counters.values(), key=lambda each: each.rank not in culprits)
        if not any(each.is_torchrun for each in mine):
            return  # it is reported once; the groups' own limits end the ranks
        for counters in mine:
            is_culprit = not culprits or counters.rank in culprits
            own = text if is_culprit else f"this rank ({counters.rank}) has not failed, but ends, since {text}"
            _write_error(counters.error_file, own, at if is_culprit else at + 1)
        for counters in mine:
            _signal(counters, signal.SIGKILL)


def guard(settings: Mapping[str, Any], stdin: BinaryIO) -> None:
    """Wait until the launcher ends. If it was killed, end its ranks as `RankWatcher` does, and remove its folder.

    settings: `folder`, of counters; `remove`, a folder of the launcher's; `grace`, seconds for ranks to stop.
    """
    if stdin.readline().strip() == b"done":
        return
    end_ranks(LocalRanks(Path(settings["folder"])), settings["grace"])
    shutil.rmtree(settings["remove"], ignore_errors=True)


def end_ranks(local: LocalRanks, grace: float) -> None:
    """Wait until this machine's ranks have ended, which were asked to; kill those that do not in so many seconds.

    Ranks have longer while one writes a checkpoint. Gives up ranks that wait in the kernel, where nothing ends them.
    """
    since = time.monotonic()
    while True:
        states = local.look()
        left = [counters for counters in local.counters.values() if counters.is_running]
        late = 0.0 if is_saving(states.values(), GRACE) else time.monotonic() - since - grace
        if not left or late > GRACE:
            return
        for counters in left if late > 0 else ():
            _signal(counters, signal.SIGKILL)
        time.sleep(0.1)


def _parent_of(counters: Counters) -> int:
    """The parent of a rank's process; 0 if it is gone, or on a system without /proc."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{counters.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _signal(counters: Counters, number: signal.Signals) -> None:
    """Signal a rank's process, if it and no other one has that number."""
    if counters.is_running:
        with suppress(OSError):
            os.kill(counters.pid, number)


def _write_error(file: str, text: str, at: float) -> None:
    """Write a file as torch.distributed.elastic's `record` does, unless the rank has written it. at: Unix time."""
    if not file:
        return
    extra = {"py_callstack": text, "timestamp": str(int(at))}
    with suppress(OSError), open(file, "x") as writing:
        json.dump({"message": {"message": text, "extraInfo": extra}}, writing)


def _connect(address: list[Any]) -> Any:
    """Connect to the job's store. torch is imported here: only jobs of several machines need it."""
    from torch.distributed import TCPStore

    host, port = address
    return TCPStore(host, port, is_master=False, timeout=CONNECT, wait_for_workers=False)


def main() -> None:
    stdin = open(0, "rb", buffering=0)  # noqa: SIM115  (as long as this process; `select` sees no buffer)
    settings = json.loads(stdin.readline())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # schedulers signal all; it ends with its ranks
        signal.signal(number, signal.SIG_IGN)
    if settings.get("guards"):
        guard(settings, stdin)
    else:
        RankWatcher(settings, stdin).run()


if __name__ == "__main__":
    main()
