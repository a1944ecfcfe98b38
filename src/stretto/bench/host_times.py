# SPDX-License-Identifier: Apache-2.0
"""Measures how long the host takes to launch a block's passes, a collective, an operator: for `stretto probe`."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from stretto.bench.harness import TORCH_DTYPES
from stretto.models import GPT, GPTConfig
from stretto.ops import all_gather_matmul_gathered
from stretto.parallel import Grid, no_sync, parallelize

FEW, MANY = 2, 6  # layers of the two models whose times are subtracted
WARM_UP, REPEATS = 3, 9
PRODUCT = 4096, 4096  # so large that copy engines gather its rows
TOKENS = 16  # so few that a GPU has run what is launched before the next is


def measure_host_times(grid: Grid, dtype: str) -> dict[str, float]:
    """Seconds as `HostTimes` has them, of the slowest rank. Collective.

    The passes of a block of Stretto's GPT are the difference of two models that have unequally many, so small that
    launching takes longer than computing. On a CPU, whose cores also compute, that little computation counts.
    """
    few, many = (_measure_passes(grid, dtype, layers) for layers in (FEW, MANY))
    forward, backward = ((after - before) / (MANY - FEW) for before, after in zip(few, many, strict=True))
    message = torch.zeros(TOKENS, device=grid.device)
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        work, each = _time_host(partial(dist.all_reduce, message, async_op=True), grid.device)
        seconds.append(each)
        work.wait()
    own = {"block_forward": forward, "block_backward": backward, "collective": min(seconds[WARM_UP:])}
    if grid.device.type == "cuda" and dist.get_world_size() > 1:
        x, weight = torch.zeros(2, *PRODUCT, dtype=TORCH_DTYPES[dtype], device=grid.device)
        calls = [_time_host(partial(all_gather_matmul_gathered, x, weight), grid.device) for _ in seconds]
        own["operator"] = min(each for _, each in calls[WARM_UP:])
    of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return {name: max(1e-9, *(each[name] for each in of_ranks)) for name in own}


def _measure_passes(grid: Grid, dtype: str, layers: int) -> tuple[float, float]:
    """The least seconds in which the host launches the forward and the backward pass of a model of so many layers."""
    config = GPTConfig(layers=layers, hidden=64, heads=1, vocab=128, max_seq_len=TOKENS)
    with torch.device("meta"):
        model = GPT(config)
    parallelize(model, grid, dtype=TORCH_DTYPES[dtype])
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=grid.device)
    forward, backward = [], []
    with no_sync(model):
        for _ in range(WARM_UP + REPEATS):
            logits, seconds = _time_host(partial(model, tokens), grid.device)  # the loss would wait for other ranks
            forward.append(seconds)
            backward.append(_time_host(partial(logits.backward, torch.ones_like(logits)), grid.device)[1])
    return min(forward[WARM_UP:]), min(backward[WARM_UP:])  # whatever else the machine does only adds


def _time_host(step: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Call `step` with an idle GPU; returns its result, and the seconds until it returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    made = step()
    return made, time.perf_counter() - start
