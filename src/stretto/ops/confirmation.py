# SPDX-License-Identifier: Apache-2.0
"""Confirms a predicted choice: times the kernel and the library on a call's own operands, in a group's first such call.

The timed calls come before the call itself, which runs as what was chosen. So no result is of a choice that was not
confirmed, and there is nothing that a stopped run could have computed in between.
"""

import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from stretto.memory import PeerError, shared_gpus
from stretto.ops.operator import exchange_text
from stretto.quantities import read_switch

logger = logging.getLogger("stretto.ops")

CONFIRM_VARIABLE = "STRETTO_CONFIRM"
"""The environment variable that switches timing of first calls off, where it is 0."""

MAX_KINDS = 128
"""Kinds of calls that a process times: of shapes that change at each step, later ones run as predicted."""

HEADROOM = 1 << 30
"""Bytes that timing leaves free on the GPU, for buffers of NCCL's communicator, which a first library call makes."""

_CALLS = 5
_LONG = 0.5  # seconds of one turn, of which there are no more
_PATIENCE = 30.0  # seconds for a call: a rank whose GPU does not get through it by then gives up, for all ranks
_MAX_SLEEP = 0.2


@dataclass
class _Budget:
    """Kinds of calls that this process may still time. None once a wait was in vain: it may cost `_PATIENCE` again."""

    kinds: int = MAX_KINDS


_budget = _Budget()


def can_time_calls(device: torch.device, size: int) -> bool:
    """True if this rank may time calls that allocate up to so many bytes, and if all others of the group may, too.

    So: on a GPU of its own, in no CUDA graph's capture, with memory for both candidates, and not switched off. Memory
    is looked at before: a call that fails on one rank leaves the others waiting. Deterministic algorithms are chosen by
    no clock.
    """
    if device.type != "cuda" or not read_switch(CONFIRM_VARIABLE, default=True) or shared_gpus.is_enabled():
        return False
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing() or not _budget.kinds:
        return False
    return torch.cuda.mem_get_info(device)[0] >= size + HEADROOM


def measure_choices(runs: Sequence[Callable[[], object]], group: str, device: torch.device) -> list[float] | None:
    """Seconds of each run on the slowest rank, the same on all ranks; None where some rank could not time them.

    Collective. Long calls are timed once. PeerError on all ranks where a run failed on some: the others wait for it.
    """
    _budget.kinds -= _budget.kinds > 0
    if not _budget.kinds:
        logger.info("%d kinds of calls were timed: later ones run as predicted", MAX_KINDS)
    seconds = None
    for turns in (1, _CALLS):
        seconds = _agree(runs, turns, group, device)
        if seconds is None or sum(seconds) > _LONG:
            break
    return seconds


def _agree(runs: Sequence[Callable[[], object]], turns: int, group: str, device: torch.device) -> list[float] | None:
    """The slowest rank's `time_calls`; None where some rank gave up, or all failed before they had sent anything."""
    begun, error, times = 0, "", None

    def begin(run: Callable[[], object]) -> None:
        nonlocal begun
        begun += 1
        run()

    try:
        times = time_calls([partial(begin, run) for run in runs], device, turns)
        if times is None:
            _budget.kinds = 0
    except PeerError:
        raise
    except Exception as failure:  # noqa: BLE001  (Triton's and the driver's are of many kinds)
        error = f"{type(failure).__name__}: {failure}"
        logger.debug("a call cannot be timed: %s", error)
    everyone = [json.loads(text) for text in exchange_text(json.dumps([begun, error, times]), group, device)]
    if len({(of_rank, bool(why)) for of_rank, why, _ in everyone}) > 1:
        rank, why = next((rank, why) for rank, (_, why, _) in enumerate(everyone) if why)
        raise PeerError(
            f"a first call's candidates were timed, which failed on rank {rank} of the group, and its peers wait for "
            f"it: {why}; {CONFIRM_VARIABLE}=0 has first calls run as predicted"
        )
    if any(times is None for *_, times in everyone):
        return None
    return [max(each) for each in zip(*(times for *_, times in everyone), strict=True)]


def time_calls(runs: Sequence[Callable[[], object]], device: torch.device, turns: int) -> list[float] | None:
    """Median seconds of each run on this rank's GPU, in turns, after one that warms up.

    None if the GPU is busy for too long. It sleeps until the host has issued several turns, so that the host's time
    does not count: it is hidden in a CUDA graph, and behind other layers.
    """
    began = time.perf_counter()
    for run in runs:  # compiles kernels and allocates workspaces the first time
        run()
    if turns > 1:
        rate = torch.cuda.get_device_properties(device).clock_rate * 1e3
        torch.cuda._sleep(int(min(2 * turns * (time.perf_counter() - began), _MAX_SLEEP) * rate))
    make_event = partial(torch.cuda.Event, enable_timing=True)
    events = [[(make_event(), make_event()) for _ in runs] for _ in range(turns)]
    for each in events:
        for run, (start, end) in zip(runs, each, strict=True):
            start.record()
            run()
            end.record()
    for _, end in itertools.chain(*events):
        deadline = time.monotonic() + _PATIENCE
        while not end.query():  # a rank that waited without a limit could wait for a rank that waits for it
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-4)
    found = [[start.elapsed_time(end) / 1e3 for start, end in each] for each in events]
    return [statistics.median(of_run) for of_run in zip(*found, strict=True)]
