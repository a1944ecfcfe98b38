# SPDX-License-Identifier: Apache-2.0
"""Workspaces of operators: symmetric memory, kept between calls, one for each group, purpose and size class."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from stretto.execution import MIN_WORKSPACE_BYTES, TWO_SLOTS_BYTES
from stretto.memory import failures
from stretto.memory.copy_engine import find_current
from stretto.tiles import BlockChannel

CHANNELS = 32
"""Channels of each rank: the most pieces of its shard that are signalled separately."""

PEER_TILES = 256
"""Pieces that a rank may offer for other ranks to pull."""

_ARRIVALS = 1024


@dataclass(frozen=True)
class OperatorWorkspace:
    """A channel whose buffer on each rank has `slots` slots of `slot_bytes`.

    arrivals: int32 counters, 0 between calls. slot_cycle: the slot of each call whose slot the host chooses.
    """

    channel: BlockChannel
    slot_bytes: int
    slots: int
    arrivals: Tensor
    slot_cycle: Iterator[int]

    def words(self, slots: int, dtype: torch.dtype) -> int:
        """The number of elements of a dtype in so many slots."""
        return slots * self.slot_bytes // dtype.itemsize


class _Cache:
    """The workspaces of one group; they are freed with the group, or when another group has its name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group, _drop_caches)
        self.workspaces: dict[tuple[str, int, torch.device], OperatorWorkspace] = {}
        self.kept: dict[Any, Any] = {}
        self.abandoned: list[Any] = []
        self.stream: torch.cuda.Stream | None = None


_caches: dict[str, _Cache] = {}


def _drop_caches(_: object) -> None:
    """Free the workspaces of groups that no longer exist, abandoned ones too."""
    for name, cache in list(_caches.items()):
        if cache.group() is None:
            _caches.pop(name, None)


def find_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. ValueError if there is none, or if this process is not in it."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]  # a GroupName, which is a str
    except RuntimeError as error:
        raise ValueError(f"there is no process group {name!r} that this process is in: {error}") from error


def find_workspace(name: str, device: torch.device, size: int, purpose: str) -> OperatorWorkspace:
    """Find or allocate a workspace of the group with slots of `size` bytes or more, for one call.

    purpose: "barrier", for calls that `BlockChannel.begin`: two slots in turn or, above `TWO_SLOTS_BYTES`, one;
    "copy_engine", the same for calls whose signals go to some ranks only, as those that follow copies do;
    "double_buffered", two slots for calls that `enter`; "packets", two slots that hold only packets.
    Purposes do not disturb each other.

    All ranks call it with the same arguments. Sizes are rounded up to powers of two, so that allocation, a collective,
    is rare. Nothing but `close_workspaces` frees it while the group lives, since CUDA graphs may hold its address.
    Calls of one group run one after another: a call on another stream waits for earlier calls. ValueError if it would
    allocate while a CUDA graph is captured.
    """
    cache = _find_cache(name)
    slots = 1 if purpose in ("barrier", "copy_engine") and size > TWO_SLOTS_BYTES else 2
    key = purpose, max(1 << (size - 1).bit_length(), MIN_WORKSPACE_BYTES), device
    if key not in cache.workspaces:
        require_no_capture(device)
        group = find_group(name)
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to in training
            channel = BlockChannel.allocate(
                group,
                channels=1 if purpose == "packets" else CHANNELS * group.size(),
                peer_tiles=PEER_TILES if purpose == "double_buffered" else 0,
                data_bytes=slots * key[1],
                backend="cuda" if device.type == "cuda" else "host",
            )
            arrivals = torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)
        cache.workspaces[key] = OperatorWorkspace(channel, key[1], slots, arrivals, itertools.cycle(range(slots)))
    _follow_calls(cache, device)
    return cache.workspaces[key]


def find_kept(name: str, device: torch.device, key: Any, make: Callable[[], Any]) -> Any:
    """Find or make what an operator keeps for its calls in the group; streams follow as in `find_workspace`.

    All ranks call it with the same keys, so `make` may be a collective.
    """
    cache = _find_cache(name)
    kept = _find_in(cache, device, key, make)
    _follow_calls(cache, device)
    return kept


def find_known(name: str, device: torch.device, key: Any, make: Callable[[], Any]) -> Any:
    """`find_kept` for values of the host, which no kernel uses: no stream waits for another."""
    return _find_in(_find_cache(name), device, key, make)


def is_kept(name: str, device: torch.device, key: Any) -> bool:
    """Whether `find_kept` or `find_known` has made this, so that it would not be a collective."""
    return (device, key) in _find_cache(name).kept


def abandon(name: str, channel: BlockChannel) -> None:
    """Retire a channel after an error of the host in the middle of a call: no later call uses it.

    Counters of the channel may be behind its peers'. The next call of each rank that abandoned it allocates a new one,
    which is a collective: after an error on all ranks, such as a kernel that cannot be compiled, calls go on. After an
    error on one rank the others wait for it, and raise PeerError. The memory is kept while the group lives, since
    copies and kernels of peers may still store to it.
    """
    cache = _find_cache(name)
    if failures.has_failed():  # the group can no longer be used, and its failure is kept
        return
    for table in (cache.workspaces, cache.kept):
        for key, value in list(table.items()):
            if channel is _find_channel(value):
                cache.abandoned.append(table.pop(key))


def list_channels(name: str) -> list[tuple[str, BlockChannel]]:
    """(purpose, channel) of all workspaces of the group, those that `find_kept` keeps and abandoned ones among them."""
    cache = _find_cache(name)
    found = [(purpose, workspace.channel) for (purpose, _, _), workspace in cache.workspaces.items()]
    kept = [(key, _find_channel(value)) for key, value in cache.kept.items()]
    kept += [((None, ("abandoned",)), _find_channel(value)) for value in cache.abandoned]
    for (_, key), channel in kept:
        if channel is not None and all(channel is not other for _, other in found):  # some keep one together
            found.append((str(key[0]), channel))
    return found


def list_groups() -> list[str]:
    """The names of the groups that have workspaces."""
    return [name for name, cache in list(_caches.items()) if cache.group() is not None]


def close_workspaces(name: str) -> None:
    """Free the group's workspaces, abandoned ones too. No rank's kernels or copies may use them any more."""
    channels = [channel for _, channel in list_channels(name)]
    cache = _find_cache(name)
    cache.workspaces.clear()
    cache.abandoned.clear()
    for key in [key for key, value in cache.kept.items() if _find_channel(value) is not None]:
        del cache.kept[key]
    for channel in channels:
        channel.close()


def _find_channel(value: Any) -> BlockChannel | None:
    """The channel that a kept value is, or uses."""
    ring = getattr(value, "ring", value)
    channel = ring if isinstance(ring, BlockChannel) else getattr(ring, "channel", None)
    return channel if isinstance(channel, BlockChannel) else None


def list_kept(name: str) -> list[Any]:
    """All values that `find_kept` keeps for the group."""
    return list(_find_cache(name).kept.values())


def _find_in(cache: _Cache, device: torch.device, key: Any, make: Callable[[], Any]) -> Any:
    found = cache.kept.get((device, key))
    if found is None:
        require_no_capture(device)
        with torch.inference_mode(False):
            found = cache.kept[device, key] = make()
    return found


def _find_cache(name: str) -> _Cache:
    cache = _caches.get(name)
    if cache is not None and cache.group() is find_group(name):
        return cache
    for known, old in list(_caches.items()):
        if known == name or old.group() is None:
            del _caches[known]
    return _caches.setdefault(name, _Cache(find_group(name)))


def _follow_calls(cache: _Cache, device: torch.device) -> None:
    """Make the current stream wait for the group's last call, if that was on another stream."""
    if device.type != "cuda":
        return
    stream = find_current(device)
    if stream is not cache.stream and not torch.cuda.is_current_stream_capturing():
        if cache.stream is not None and cache.stream != stream:
            stream.wait_stream(cache.stream)
        cache.stream = stream


def require_no_capture(device: torch.device) -> None:
    """ValueError while a CUDA graph is captured, where a first call would allocate or exchange something."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "the first call of a size allocates memory that all ranks share, which a CUDA graph cannot hold: call "
            "the operator once with these shapes before the graph is captured"
        )


def count_bytes(*shape: int, dtype: torch.dtype) -> int:
    """The bytes of a tensor of this shape and dtype."""
    return torch.Size(shape).numel() * dtype.itemsize
