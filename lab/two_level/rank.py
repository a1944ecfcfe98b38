# SPDX-License-Identifier: Apache-2.0
"""One rank of `python -m lab two-level`: joins the group in its node's network namespace, and times collectives.

`DelayedTransport` emulates a link with a long latency.
"""

import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lab.two_level.run import COLLECTIVES, TwoLevelSetting
from stretto.collectives.two_level import GroupTransport, Message, MessageWork, NodeTransport, TwoLevelGroup

_LEAD = 0.03  # seconds from agreeing on a start to the start
_SMALL = 16  # bytes: only latency counts
_PROBES = 15


def main() -> None:
    serve(lambda given: measure(TwoLevelSetting(**given)))


def serve(measure_all: Callable[[dict[str, Any]], object]) -> None:
    """Join the ranks' group, and print what `measure_all` finds. argv: settings, path of the store, ranks, this rank.

    Settings and result are JSON; the process ends when its parent closes stdin.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not write between the answers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    given, path, world, rank = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, int(world)), rank=int(rank), world_size=int(world))
    print(json.dumps(measure_all(json.loads(given))), file=answers, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(setting: TwoLevelSetting) -> dict[str, Any]:
    """Measure the software overheads, and seconds of each collective, size and algorithm: medians of `repeats` runs.

    Seconds count from a start time agreed by all ranks until the last rank is done; the ranks share a clock.
    """

    def transport(group: dist.ProcessGroup, delay: float, ranks_per_node: int) -> DelayedTransport:
        """A transport that delays messages to other nodes; `group` has `ranks_per_node` ranks on each."""
        own = dist.get_rank(group) // ranks_per_node
        return DelayedTransport(GroupTransport(group), lambda peer: 0.0 if peer // ranks_per_node == own else delay)

    size = setting.ranks_per_node
    two_level = TwoLevelGroup(
        ranks_per_node=size, parts=1, make_transport=partial(transport, delay=setting.delay / 1e3, ranks_per_node=1)
    )
    undelayed = TwoLevelGroup(ranks_per_node=size, make_transport=partial(transport, delay=0.0, ranks_per_node=1))
    # the flat ring over the same transport: every rank counts as a node, and all are in one sub-group
    flat = TwoLevelGroup(
        ranks_per_node=1, make_transport=partial(transport, delay=setting.delay / 1e3, ranks_per_node=size)
    )
    overheads = measure_overheads(undelayed)
    rows = []
    for collective in COLLECTIVES:
        for shard_bytes in setting.shard_bytes:
            runs = {
                "recursive": _collective(two_level, collective, "recursive", shard_bytes),
                "ring": _collective(two_level, collective, "ring", shard_bytes),
                "flat": _collective(flat, collective, "ring", shard_bytes),
                "library": _collective(two_level, collective, "flat", shard_bytes),
            }
            seconds = interleave(runs, setting.repeats)
            rows.append({"collective": collective, "shard_bytes": shard_bytes, "seconds": seconds})
            if dist.get_rank() == 0:
                shown = ", ".join(f"{name} {value['median'] * 1e3:.1f} ms" for name, value in seconds.items())
                print(f"{collective}, {shard_bytes} bytes a rank: {shown}", file=sys.stderr, flush=True)
    return {"overheads": overheads, "rows": rows}


def measure_overheads(undelayed: TwoLevelGroup) -> dict[str, float]:
    """`read_overheads` of collectives that find all ranks asleep, as those that are measured here do."""
    runs = make_overhead_runs(undelayed)
    return read_overheads(undelayed, {name: each["median"] for name, each in interleave(runs, _PROBES).items()})


def make_overhead_runs(undelayed: TwoLevelGroup, calls: int = 1) -> dict[str, Callable[[], object]]:
    """Runs of `calls` collectives without data one after another: inside a node, by a ring between nodes and inside
    them, and by the library over all ranks."""
    nodes = [dist.new_group(list(ranks)) for ranks in undelayed.nodes.ranks]
    own = nodes[undelayed.nodes.place_of(dist.get_rank())[0]]
    part = torch.zeros(_SMALL, dtype=torch.uint8)
    in_node, whole = (part.new_empty(_SMALL * ranks) for ranks in (undelayed.nodes.size, undelayed.world))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    runs: dict[str, Callable[[], object]] = {
        "inside": partial(gather, in_node, part, group=own),
        "between": _collective(undelayed, "all_gather", "ring", _SMALL),
        "library": partial(gather, whole, part),
    }
    return {name: partial(_repeat, run, calls) for name, run in runs.items()}


def read_overheads(group: TwoLevelGroup, seconds: dict[str, float], calls: int = 1) -> dict[str, float]:
    """Software time of a message (seconds, without delay and bandwidth) by the seconds of `make_overhead_runs`: inside
    a node, between nodes, and in the library's own ring."""
    inside, ring, library = (seconds[name] / calls for name in ("inside", "between", "library"))
    return {
        "inside": inside / max(1, group.nodes.size - 1),
        "between": max(0.0, (ring - inside) / (group.nodes.count - 1)),
        "library": library / (group.world - 1),
    }


def _repeat(run: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        run()


def _collective(group: TwoLevelGroup, name: str, algorithm: Any, shard_bytes: int) -> Callable[[], object]:
    elements = max(1, shard_bytes // 4)
    part, whole = torch.ones(elements), torch.ones(elements * group.world)
    if name == "all_gather":
        return lambda: group.all_gather(whole, part, algorithm=algorithm)
    return lambda: group.reduce_scatter(part, whole, algorithm=algorithm)


def interleave(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Time the runs in turn, after a warm-up of each: median, least and most seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            seconds = time_run(run)
            if repeat:
                times[name].append(seconds)
    return {name: _summarize(values) for name, values in times.items()}


def time_run(run: Callable[[], object]) -> float:
    """Time a run: seconds from a common start until the last rank is done."""
    moment = torch.tensor([time.monotonic() + _LEAD], dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    begin = moment.item()
    time.sleep(max(0.0, begin - time.monotonic()))
    run()
    end = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return end.item() - begin


def _summarize(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _end_with_parent() -> None:
    """Exit this process at any time when the process that holds its stdin has exited."""
    while os.read(0, 4096):  # not sys.stdin, whose lock this thread would hold at exit
        pass
    os._exit(1)


class DelayedTransport:
    """Wraps a transport and passes each message on to it `seconds(peer)` after it was sent.

    A receive takes at least this latency plus the wrapped transport's time for the bytes. Delays of several messages
    overlap, as on a long wire, and messages keep their order; the sender does not block. Receives, and messages without
    delay, are passed to the wrapped transport at once.
    """

    def __init__(self, below: NodeTransport, seconds: Callable[[int], float]) -> None:
        self._below = below
        self._seconds = seconds
        self._waiting: queue.SimpleQueue[_Delayed] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def start(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[MessageWork], Sequence[MessageWork]]:
        """Start sends (after their delay) and receives, each message by itself."""
        now = time.monotonic()
        sent: list[MessageWork] = []
        for message in outgoing:
            if seconds := self._seconds(message.peer):
                delayed = _Delayed(message, now + seconds)
                self._waiting.put(delayed)
                sent.append(delayed)
            else:
                sent += self._below.start([message], [])[0]
        return sent, self._below.start([], incoming)[1]

    def _deliver(self) -> None:
        """Pass messages on when they are due. All delays are equal (or zero), so the queue is in order of due time."""
        while True:
            delayed = self._waiting.get()
            time.sleep(max(0.0, delayed.due - time.monotonic()))
            try:
                delayed.transfer = self._below.start([delayed.message], [])[0][0]
            except RuntimeError as error:  # raised where the sender waits
                delayed.error = error
            delayed.left.set()


class _Delayed:
    def __init__(self, message: Message, due: float) -> None:
        self.message = message
        self.due = due
        self.left = threading.Event()
        self.transfer: MessageWork | None = None
        self.error: RuntimeError | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        end = time.monotonic() + timeout.total_seconds()
        if not self.left.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"a delayed message timed out after {timeout.total_seconds():g} s")
        if self.transfer is None:
            raise self.error or RuntimeError("a delayed message was not sent")
        return self.transfer.wait(timedelta(seconds=max(1e-3, end - time.monotonic())) if timeout else timeout)


if __name__ == "__main__":
    main()
