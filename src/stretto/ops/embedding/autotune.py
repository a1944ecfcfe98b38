"""Ways that were measured on this machine, kept by `stretto.tuning` for later runs."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton

from stretto.ops.embedding.launch_config import LaunchConfig, LookupSize
from stretto.tuning import TuningStore


def find_tuned_config(shape: LookupSize, device: torch.device) -> LaunchConfig | None:
    """The fastest config that was measured for look-ups of about this shape; None where none was."""
    known = _load(_name_machine(device))
    return known.get(_name_shape(shape)) if known else None


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
    seconds = [_time(run, config, group, device) for config in configs]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    seconds = slowest.tolist()
    measured = {
        f"{_name_shape(shape)}, {_name_config(config)}": [time] for config, time in zip(configs, seconds, strict=True)
    }
    for rank in range(group.size()):  # ranks may have other shapes, and one file
        if rank == group.rank():
            TuningStore().add(_name_machine(device), measured)
        dist.barrier(group=group)
    _load.cache_clear()
    return configs[seconds.index(min(seconds))]


def _time(
    run: Callable[[LaunchConfig], Any],
    config: LaunchConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int = 7,
) -> float:
    """Median seconds of a call on this rank, after two that are not counted."""
    found = []
    for repeat in range(repeats + 2 if device.type == "cuda" else 1):
        dist.barrier(group=group)
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(config)
            end.record()
            torch.cuda.synchronize(device)
            passed = start.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            run(config)
            passed = time.perf_counter() - began
        if repeat >= 2 or device.type != "cuda":
            found.append(passed)
    return sorted(found)[len(found) // 2]


@functools.lru_cache
def _load(machine: str) -> dict[str, LaunchConfig]:
    """The fastest config of each shape that is known."""
    best: dict[str, tuple[float, LaunchConfig]] = {}
    for key, times in TuningStore().read(machine).items():
        shape, _, name = key.rpartition(", ")
        config = _read_config(name)
        if shape.startswith("embedding") and config is not None and times:
            best[shape] = min(best.get(shape, (math.inf, config)), (min(times), config))
    return {shape: config for shape, (_, config) in best.items()}


@functools.lru_cache
def _name_machine(device: torch.device) -> str:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"embedding, {kind}, torch {torch.__version__}, triton {triton.__version__}"


def _name_shape(shape: LookupSize) -> str:
    """Equal for shapes that are looked up alike: average bags are told apart by factors of two."""
    pooling = round(math.log2(max(shape.pooling, 1.0)))
    return f"embedding {shape.world} ranks {shape.block_bytes} bytes {shape.tables}x{shape.batch} pooling 2^{pooling}"


def _name_config(config: LaunchConfig) -> str:
    return "/".join(str(value) for value in config)


def _read_config(name: str) -> LaunchConfig | None:
    """The config of that name; None where it is none, since files may be anyone's."""
    parts = name.split("/")
    if len(parts) != 6 or not all(part.isdecimal() for part in parts[:5]):
        return None
    bags, rows, size, num_warps, programs = (int(part) for part in parts[:5])
    try:
        return LaunchConfig(bags, rows, size, num_warps, programs, parts[5]).check()
    except ValueError:
        return None
