"""Symmetric memory that operators work in: kept between calls, one for each group and size class."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch.distributed.distributed_c10d import _resolve_process_group

from stretto.tiles import BlockChannel

CHANNELS = 32
"""Channels of each rank: the most pieces of its part that are signalled one by one."""

_SMALLEST = 1 << 20


class _Cache:
    """The workspaces of one group; they are freed with the group, or when their name has come to mean another one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.channels: dict[tuple[int, torch.device], BlockChannel] = {}
        self.kept: dict[Any, Any] = {}
        self.stream: torch.cuda.Stream | None = None


_caches: dict[str, _Cache] = {}


def find_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. ValueError where there is none, or where this process is not in it."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]  # a GroupName, which is a str
    except RuntimeError as error:
        raise ValueError(f"there is no process group {name!r} that this process is in: {error}") from error


def find_workspace(name: str, device: torch.device, size: int) -> BlockChannel:
    """A channel of the group with a buffer of `size` bytes or more on each rank, for one call; allocated if need be.

    All ranks call it with the same size. Sizes are rounded up to powers of two, so that allocation, which all ranks
    meet in, is rare; nothing is freed while the group lives, since CUDA graphs may hold its address. Calls of one
    group run one after another: a call on another stream comes after those before it. ValueError while a CUDA graph
    is captured, if it would allocate.
    """
    cache = _find_cache(name)
    key = max(triton.next_power_of_2(size), _SMALLEST), device
    if key not in cache.channels:
        _refuse_in_graph(device)
        group = find_group(name)
        cache.channels[key] = BlockChannel.allocate(
            group,
            channels=CHANNELS * group.size(),
            data_bytes=key[0],
            backend="cuda" if device.type == "cuda" else "host",
        )
    _follow_calls(cache, device)
    return cache.channels[key]


def find_kept(name: str, device: torch.device, key: Any, make: Callable[[], Any]) -> Any:
    """What an operator keeps for its calls in the group under a key, made at first; else as `find_workspace`.

    All ranks call it with the same keys, and `make` may meet them.
    """
    cache = _find_cache(name)
    if (device, key) not in cache.kept:
        _refuse_in_graph(device)
        cache.kept[device, key] = make()
    _follow_calls(cache, device)
    return cache.kept[device, key]


def list_kept(name: str) -> list[Any]:
    """All that `find_kept` keeps for the group."""
    return list(_find_cache(name).kept.values())


def _find_cache(name: str) -> _Cache:
    group = find_group(name)
    for known, cache in list(_caches.items()):
        if cache.group() is None or (known == name and cache.group() is not group):
            del _caches[known]
    return _caches.setdefault(name, _Cache(group))


def _refuse_in_graph(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "the first call of a size allocates memory that all ranks share, which a CUDA graph cannot hold: call "
            "the operator once with these shapes before the graph is captured"
        )


def _follow_calls(cache: _Cache, device: torch.device) -> None:
    """Have the current stream come after the group's last call, whichever stream that was on."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        if cache.stream is not None and cache.stream != stream:
            stream.wait_stream(cache.stream)
        cache.stream = stream


def count_bytes(*shape: int, dtype: torch.dtype) -> int:
    """The bytes of a tensor of this shape and dtype."""
    return torch.Size(shape).numel() * dtype.itemsize
