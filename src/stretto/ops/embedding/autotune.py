"""Ways that were measured on this machine, kept by `stretto.tuning` for later runs."""

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
    """The fastest config that was measured for look-ups of about this shape; None where none was."""
    return _load(device).get(_name_shape(shape))


def measure_launch_configs(
    configs: list[LaunchConfig],
    run: Callable[[LaunchConfig], Any],
    shape: LookupSize,
    group: dist.ProcessGroup,
    device: torch.device,
) -> LaunchConfig:
    """Time this rank's configs, of which all ranks have as many; keep the times, and return its fastest.

    run: a call with a config. A call's time is that of the slowest rank, so all ranks find the same one fastest.
    """
    repeats, warmups = (7, 2) if device.type == "cuda" else (1, 0)
    times = [
        time_runs(
            functools.partial(run, config),
            device,
            repeats=repeats,
            warmups=warmups,
            group=group,
            meets_each_time=True,
        )
        for config in configs
    ]
    seconds = slowest_times([median_seconds(row) for row in times], device, group)
    for rank in range(group.size()):  # ranks may have other shapes, and one file
        if rank == group.rank():
            _autotuner(device).keep(_name_shape(shape), dict(zip(configs, seconds, strict=True)))
        dist.barrier(group=group)
    _load.cache_clear()
    return configs[seconds.index(min(seconds))]


@functools.lru_cache
def _load(device: torch.device) -> dict[str, LaunchConfig]:
    """The fastest config of each shape that is known."""
    return {shape: min(times, key=times.__getitem__) for shape, times in _autotuner(device).read().items()}


def _autotuner(device: torch.device) -> Autotuner[str, LaunchConfig]:
    keys = TimeKeys(lambda shape, config: f"{shape}, {_name_config(config)}", _parse_key)
    return Autotuner(machine_key(device, operator="embedding", versions=(f"triton {triton.__version__}",)), keys)


def _name_shape(shape: LookupSize) -> str:
    """Equal for shapes that are looked up alike: average bags are told apart by factors of two."""
    pooling = round(math.log2(max(shape.pooling, 1.0)))
    return f"embedding {shape.world} ranks {shape.block_bytes} bytes {shape.tables}x{shape.batch} pooling 2^{pooling}"


def _name_config(config: LaunchConfig) -> str:
    return "/".join(str(value) for value in config)


def _parse_key(key: str) -> tuple[str, LaunchConfig]:
    """The shape's name and the config; ValueError for any other key, since files may be anyone's."""
    shape, _, name = key.rpartition(", ")
    parts = name.split("/")
    if not shape.startswith("embedding") or len(parts) != 6 or not all(part.isdecimal() for part in parts[:5]):
        raise ValueError(f"{key!r} names no times of an embedding")
    bags, rows, size, num_warps, programs = (int(part) for part in parts[:5])
    return shape, LaunchConfig(bags, rows, size, num_warps, programs, parts[5]).check()
