# SPDX-License-Identifier: Apache-2.0
"""Confirms a predicted choice: times the kernel and the library on a call's own operands, in a group's first such call.

The timed calls come before the call itself, which runs as what was chosen. So no result is of a choice that was not
confirmed, and there is nothing that a stopped run could have computed in between.
"""

import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from stretto.memory import PeerError
from stretto.ops.operator import exchange_text

logger = logging.getLogger("stretto.ops")

_CALLS = 5
_PATIENCE = 10.0  # seconds: a rank whose GPU does not get to the calls by then gives up, for all ranks
_MAX_SLEEP = 0.2


def measure_choices(runs: Sequence[Callable[[], object]], group: str, device: torch.device) -> list[float] | None:
    """Seconds of each run on the slowest rank, the same on all ranks; None where some rank could not time them.

    Collective.
    """
    texts = exchange_text(json.dumps(time_calls(runs, device)), group, device)
    everyone = [json.loads(text) for text in texts]
    if any(times is None for times in everyone):
        return None
    return [max(times) for times in zip(*everyone, strict=True)]


def time_calls(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float] | None:
    """Median seconds of each run on this rank's GPU, in turns; None where one fails, or the GPU is busy for too long.

    The GPU sleeps until the host has issued them, so that the host's time does not count: it is hidden in a CUDA graph,
    and behind other layers.
    """
    issuing = 0.0
    try:
        for _ in range(2):  # the first compiles kernels and allocates workspaces
            began = time.perf_counter()
            for run in runs:
                run()
            issuing = time.perf_counter() - began
    except PeerError:
        raise
    except Exception as error:  # noqa: BLE001  (Triton's and the driver's are of many kinds)
        logger.debug("a call cannot be timed: %s: %s", type(error).__name__, error)
        return None
    rate = torch.cuda.get_device_properties(device).clock_rate * 1e3
    torch.cuda._sleep(int(min(2 * _CALLS * issuing, _MAX_SLEEP) * rate))
    events = [[_make_events() for _ in runs] for _ in range(_CALLS)]
    for each in events:
        for run, (start, end) in zip(runs, each, strict=True):
            start.record()
            run()
            end.record()
    last, deadline = events[-1][-1][1], time.monotonic() + _PATIENCE
    while not last.query():  # a rank that waited without a limit could wait for a rank that waits for it
        if time.monotonic() > deadline:
            return None
        time.sleep(1e-4)
    found = [[start.elapsed_time(end) / 1e3 for start, end in each] for each in events]
    return [statistics.median(of_run) for of_run in zip(*found, strict=True)]


def _make_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
