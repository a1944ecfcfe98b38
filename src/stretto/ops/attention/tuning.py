# SPDX-License-Identifier: Apache-2.0
"""Autotuning of context attention: `tune_attention` measures its ways and stores the times, for "auto" to choose by."""

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.attention.choice import find_times, keep_times
from stretto.ops.attention.context import AttentionOptions, describe_call, prepare_run
from stretto.ops.choices import clear_choices
from stretto.ops.operands import takes_tensors
from stretto.ops.operator import find_name
from stretto.tuning import TuningStore, median_seconds, slowest_times, time_runs


@takes_tensors
def tune_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    store: TuningStore | None = None,
    **options: Unpack[AttentionOptions],
) -> dict[str, float]:
    """Measure the ways of a call of `context_attention`, on the slowest rank, and store their seconds for later runs.

    Collective, with the arguments of the call, but without documents, which calls choose no way by. With gradients if a
    tensor requires them. Later calls with implementation="auto" and sequences of about that length take the fastest
    that fits in memory. Returns seconds by "all_gather", "ring" and "ulysses", those that can run.
    """
    if options.get("documents") is not None:
        raise ValueError("tune_attention takes no documents: calls with documents gather the few keys that they need")
    call, name = describe_call(q, k, v, group, options.get("causal", False), options.get("window")), find_name(group)
    run = prepare_run(q, k, v, group, trains=call.trains, **options)
    repeats, warmups = (8, 2) if q.is_cuda else (1, 0)
    ways = call.list_ways()
    measure: Callable[..., Any] = partial(
        time_runs, device=q.device, repeats=repeats, warmups=warmups, group=group or dist.group.WORLD
    )
    medians = [median_seconds(measure(partial(run, way))) for way in ways]
    seconds = dict(zip(ways, slowest_times(medians, q.device, group), strict=True))
    keep_times(call, seconds, find_times(name, q.device), name, q.device, store)
    dist.barrier(group)
    clear_choices()
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    return seconds
