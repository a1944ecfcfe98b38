# SPDX-License-Identifier: Apache-2.0
"""One rank of `python -m lab two-level`: joins the group in its node's network namespace, and times collectives."""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.two_level.delayed import DelayedTransport
from lab.two_level.settings import TwoLevelJob
from stretto.collectives.two_level import GroupTransport, TwoLevelGroup

_LEAD = 0.03  # seconds from agreeing on a start to the start
_SMALL = 16  # bytes: only latency counts
_PROBES = 15


def main() -> None:
    """Run one rank. argv: the job as JSON, and the rank. The process ends when its parent closes stdin."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    fields: dict[str, Any] = json.loads(sys.argv[1])
    job = TwoLevelJob(**fields | {name: tuple(fields[name]) for name in ("shard_bytes", "collectives")})
    rank = int(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(job.folder) / "store"), job.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
    result = measure(job)
    if rank == 0:
        (Path(job.folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(job: TwoLevelJob) -> dict[str, Any]:
    """Measure the software overheads, and seconds of each collective, size and algorithm: medians of `repeats` runs.

    Seconds count from a start time agreed by all ranks until the last rank is done; the ranks share a clock.
    """

    def transport(group: dist.ProcessGroup, delay: float, ranks_per_node: int) -> DelayedTransport:
        """A transport that delays messages to other nodes; `group` has `ranks_per_node` ranks on each."""
        own = dist.get_rank(group) // ranks_per_node
        return DelayedTransport(GroupTransport(group), lambda peer: 0.0 if peer // ranks_per_node == own else delay)

    size = job.ranks_per_node
    two_level = TwoLevelGroup(ranks_per_node=size, make_transport=partial(transport, delay=job.delay, ranks_per_node=1))
    undelayed = TwoLevelGroup(ranks_per_node=size, make_transport=partial(transport, delay=0.0, ranks_per_node=1))
    # the flat ring over the same transport: every rank counts as a node, and all are in one sub-group
    flat = TwoLevelGroup(ranks_per_node=1, make_transport=partial(transport, delay=job.delay, ranks_per_node=size))
    overheads = _measure_overheads(job, undelayed)
    rows = []
    for collective in job.collectives:
        for shard_bytes in job.shard_bytes:
            runs = {
                "recursive": _collective(two_level, collective, "recursive", shard_bytes),
                "ring": _collective(two_level, collective, "ring", shard_bytes),
                "flat": _collective(flat, collective, "ring", shard_bytes),
                "library": _collective(two_level, collective, "flat", shard_bytes),
            }
            seconds = _interleave(runs, job.repeats)
            rows.append({"collective": collective, "shard_bytes": shard_bytes, "seconds": seconds})
            if dist.get_rank() == 0:
                shown = ", ".join(f"{name} {value['median'] * 1e3:.1f} ms" for name, value in seconds.items())
                print(f"{collective}, {shard_bytes} bytes a rank: {shown}", file=sys.stderr, flush=True)
    return {"overheads": overheads, "rows": rows}


def _measure_overheads(job: TwoLevelJob, undelayed: TwoLevelGroup) -> dict[str, float]:
    """Software time of a message (seconds, without delay and bandwidth): inside a node, and between nodes."""
    nodes = [dist.new_group(list(ranks)) for ranks in undelayed.nodes.ranks]
    own = nodes[dist.get_rank() // job.ranks_per_node]
    part = torch.zeros(_SMALL, dtype=torch.uint8)
    whole = part.new_empty(_SMALL * job.ranks_per_node)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    runs = {
        "inside": lambda: gather(whole, part, group=own),
        "ring": _collective(undelayed, "all_gather", "ring", _SMALL),
    }
    seconds = {name: value["median"] for name, value in _interleave(runs, _PROBES).items()}
    between = (seconds["ring"] - seconds["inside"]) / (job.nodes - 1)
    return {"inside": seconds["inside"] / max(1, job.ranks_per_node - 1), "between": max(0.0, between)}


def _collective(group: TwoLevelGroup, name: str, algorithm: Any, shard_bytes: int) -> Callable[[], object]:
    elements = max(1, shard_bytes // 4)
    part, whole = torch.ones(elements), torch.ones(elements * group.world)
    if name == "all_gather":
        return lambda: group.all_gather(whole, part, algorithm=algorithm)
    return lambda: group.reduce_scatter(part, whole, algorithm=algorithm)


def _interleave(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Time the runs in turn, after a warm-up of each: median, least and most seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            seconds = _time(run)
            if repeat:
                times[name].append(seconds)
    return {name: _summarize(values) for name, values in times.items()}


def _time(run: Callable[[], object]) -> float:
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


if __name__ == "__main__":
    main()
