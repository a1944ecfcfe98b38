# SPDX-License-Identifier: Apache-2.0
"""Autotuning of the look-up's launch configs; `stretto.tuning` keeps the times on this machine for later runs."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

from stretto.ops.embedding.launch_config import LaunchConfig, LookupSize
from stretto.tuning import Autotuner, TimeKeys, machine_key, median_seconds, slowest_times, time_runs


def find_tuned_config(shape: LookupSize, device: torch.device) -> LaunchConfig | None:
    """Return the fastest config that was measured for look-ups of about this size; None if none was."""
    return _load(device).get(_name_shape(shape))


def measure_launch_configs(
    configs: list[LaunchConfig],
    run: Callable[[LaunchConfig], Any],
    shape: LookupSize,
    group: dist.ProcessGroup,
    device: torch.device,
) -> LaunchConfig:
    """Time this rank's configs, keep the times, and return the fastest; all ranks have equally many configs.

    run: makes a call with a config. A call's time is the slowest rank's, so the same number is fastest on all ranks.
    """
    repeats, warmups = (7, 2) if device.type == "cuda" else (1, 0)
    times = [
        time_runs(
            functools.partial(run, config),
            device,
            repeats=repeats,
            warmups=warmups,
            group=group,
            barrier_each_time=True,
        )
        for config in configs
    ]
    seconds = slowest_times([median_seconds(row) for row in times], device, group)
    for rank in range(group.size()):  # ranks may have different sizes, but write one file
        if rank == group.rank():
            _autotuner(device).keep(_name_shape(shape), dict(zip(configs, seconds, strict=True)))
        dist.barrier(group=group)
    _load.cache_clear()
    return configs[seconds.index(min(seconds))]


@functools.lru_cache
def _load(device: torch.device) -> dict[str, LaunchConfig]:
    """Return the fastest config of each size that was measured."""
    return {shape: min(times, key=times.__getitem__) for shape, times in _autotuner(device).read().items()}


def _autotuner(device: torch.device) -> Autotuner[str, LaunchConfig]:
    keys = TimeKeys(lambda shape, config: f"{shape}, {'/'.join(map(str, config))}", _parse_key)
    return Autotuner(machine_key(device, operator="embedding", versions=(f"triton {triton.__version__}",)), keys)


@functools.lru_cache(maxsize=4096)  # once for a size, not at each call
def _name_shape(shape: LookupSize) -> str:
    """Name a size for the store; sizes whose average bags differ by less than a factor of two share a name."""
    pooling = round(math.log2(max(shape.pooling, 1.0)))
    return f"embedding {shape.world} ranks {shape.block_bytes} bytes {shape.tables}x{shape.batch} pooling 2^{pooling}"


def _parse_key(key: str) -> tuple[str, LaunchConfig]:
    """Return the size's name and the config. ValueError for any other key, since anyone may have written the file."""
    shape, _, name = key.rpartition(", ")
    parts = name.split("/")
    if not shape.startswith("embedding") or len(parts) != 6 or not all(part.isdecimal() for part in parts[:5]):
        raise ValueError(f"{key!r} names no times of an embedding")
    bags, rows, size, num_warps, programs = (int(part) for part in parts[:5])
    return shape, LaunchConfig(bags, rows, size, num_warps, programs, parts[5]).check()
