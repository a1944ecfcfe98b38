# SPDX-License-Identifier: Apache-2.0
"""Copies and signals that the host enqueues: TileLink's rank_copy_data, rank_notify and rank_wait (section 3.2).

On CUDA all three run in stream order: a copy on a copy engine, a signal as a copy of 4 bytes from device memory (so
that CUDA graphs replay), a wait as a kernel of one block. On the host backend they are executed immediately.
"""

import contextlib
import ctypes
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from stretto.memory.copy_engine import find_driver, find_handle, set_flag
from stretto.tiles.channel import BlockChannel
from stretto.tiles.signals import wait_for_all, wait_for_channel

_MAX_LISTS = 1024  # of copies, that a channel knows


def copy_engine(
    channel: BlockChannel, *, stream_index: int = 0, forks: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Context in which `rank_copy_data`, `rank_notify` and `rank_wait` run on a side stream, concurrently with kernels.

    They run after all earlier work of the current stream; with forks=False, after the work that it had when the side
    stream was opened, earlier in the call. stream_index: the index of the side stream.
    Leaving the context does not wait: launch the kernels that overlap with the copies, then call `join_copies`.
    """
    if forks:
        open_side_stream(channel, stream_index)
    return channel.side_stream(stream_index) or contextlib.nullcontext()


def open_side_stream(channel: BlockChannel, index: int) -> None:
    """Fork a side stream of the channel: make it wait for all work that the current stream has so far."""
    side = channel.side_stream(index)
    if side is not None:
        side.open()
        channel.open_side_streams.add(index)


def join_copies(channel: BlockChannel) -> None:
    """Make the current stream wait for all of the call's copies; each call does this once."""
    channel.join_side_streams()


def rank_copy_data(destination: Tensor, source: Tensor, *, rows: slice | None = None, to: int = 0) -> None:
    """Copy a tensor to another rank (push) or from it (pull): `BlockChannel.tensor` makes either end.

    rows: copy only these rows of the source, to as many rows of the destination from row `to` on. Both tensors have one
    dtype, device and shape; with `rows`, their numbers of rows may differ. They are contiguous or, without `rows`,
    matrices with contiguous rows, as copy engines take them. ValueError for others, and for rows out of range.
    """
    if _are_whole(destination, source, rows):
        there, here, size = _find_ends(destination, source, rows, to)
        if size:
            copy, stream = _find_copy(source.device)
            copy(there, here, size, stream)
    else:
        _copy_matrix(destination, source)


class CopyList:
    """Copies, signals and other steps that a call enqueues on one stream: checked, and their addresses found, once.

    `copy` and `notify` add what the functions of that name do at once, `then` another step; `run`
    enqueues all of it, in that order. given: tensors that each call gives anew, contiguous and of the same shapes and
    dtypes. Ends of copies in other tensors, as in a channel's buffer, keep their addresses. `find_copies` keeps lists.
    """

    def __init__(self, *given: Tensor) -> None:
        self._given = [(one.data_ptr(), one.nbytes) for one in given]
        self._copies: list[tuple[int, int, int, int, int]] = []
        self._others: list[Callable[[BlockChannel], None]] = []
        self._is_of_call = False  # of one that `begin` has begun

    def copy(self, destination: Tensor, source: Tensor, *, rows: slice | None = None, to: int = 0) -> None:
        """Add a copy, as by `rank_copy_data`, of contiguous tensors."""
        if not _are_whole(destination, source, rows):
            raise ValueError("the copies of a list have contiguous ends: call rank_copy_data for other matrices")
        there, here, size = _find_ends(destination, source, rows, to)
        if size:
            self._copies.append((*self._relate(there), *self._relate(here), size))

    def notify(self, channel: BlockChannel, index: int, rank: int) -> None:
        """Add a signal, as by `rank_notify`."""
        _require_inside(channel, index, rank)
        self._is_of_call = True
        self._set(channel, *channel.notified_words(index, rank))

    def set_slot(self, channel: BlockChannel, tile: int, rank: int, value: Tensor) -> None:
        """Add what `rank_set_slot` does."""
        self._set(channel, _find_slot(channel, tile, rank), value)

    def _set(self, channel: BlockChannel, word: Tensor, value: Tensor) -> None:
        if channel.device.type == "cpu":
            self.then(lambda _: set_flag(word, value))
        else:
            self._copies.append((0, word.data_ptr(), 0, value.data_ptr(), value.element_size()))

    def then(self, step: Callable[[BlockChannel], None]) -> None:
        """Add a call of `step` with the channel."""
        self._copies.append((0, len(self._others), 0, 0, 0))
        self._others.append(step)

    def run(self, channel: BlockChannel, *given: Tensor) -> None:
        """Enqueue all steps on the current stream. given: the call's tensors, in the order of the list's."""
        if self._is_of_call:
            channel.current  # noqa: B018  (it raises)
        starts = (0, *[one.data_ptr() for one in given])
        copy, stream = _find_copy(channel.device)
        for there, target, here, source, size in self._copies:
            if size:
                copy(starts[there] + target, starts[here] + source, size, stream)
            else:
                self._others[target](channel)

    def _relate(self, address: int) -> tuple[int, int]:
        """(number of the given tensor that the address is in, distance from its beginning); (0, address) if in none."""
        for number, (start, size) in enumerate(self._given, start=1):
            if start <= address < start + size:
                return number, address - start
        return 0, address


def find_copies(channel: BlockChannel, key: Hashable, make: Callable[[], CopyList]) -> CopyList:
    """Find or make the channel's list of this key: everything that its steps depend on, but the given tensors."""
    found: CopyList | None = channel.copy_lists.get(key)
    if found is None:
        if len(channel.copy_lists) == _MAX_LISTS:
            channel.copy_lists.clear()
        found = channel.copy_lists[key] = make()
    return found


def _are_whole(destination: Tensor, source: Tensor, rows: slice | None) -> bool:
    """True for a copy of contiguous tensors, False for one of matrices with contiguous rows. ValueError for others."""
    first_dim = 0 if rows is None else 1
    if (
        min(destination.dim(), source.dim()) < first_dim
        or destination.shape[first_dim:] != source.shape[first_dim:]
        or destination.dtype != source.dtype
        or destination.device != source.device
    ):
        raise ValueError(
            f"a copy has two ends of one shape, dtype and device: {list(destination.shape)} {destination.dtype} on "
            f"{destination.device} and {list(source.shape)} {source.dtype} on {source.device}"
        )
    if destination.is_contiguous() and source.is_contiguous():
        return True
    if rows is None and all(end.dim() == 2 and end.stride(1) == 1 for end in (destination, source)):
        return False
    raise ValueError(
        "a copy engine copies contiguous tensors, or matrices of contiguous rows: copy row by row, or call "
        "contiguous() on the source"
    )


def _find_ends(destination: Tensor, source: Tensor, rows: slice | None, to: int) -> tuple[int, int, int]:
    """(address to copy to, address to copy from, bytes) of contiguous tensors, or of some rows of theirs."""
    there, here, size = destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
    if rows is None:
        return there, here, size
    start, stop, count = rows.start or 0, source.shape[0] if rows.stop is None else rows.stop, source.shape[0]
    if rows.step not in (None, 1) or not (0 <= start <= stop <= count and 0 <= to <= len(destination) - stop + start):
        raise ValueError(f"{rows} of {count} rows cannot go to row {to} on of {len(destination)}")
    row = size // max(count, 1)
    return there + to * row, here + start * row, (stop - start) * row


def _find_copy(device: torch.device) -> tuple[Callable[[int, int, int, int], Any], int]:
    """A function (to, from, bytes, stream) that copies between addresses, and the current stream's handle."""
    if device.type == "cpu":
        return _copy_at_once, 0
    return find_driver().copy, find_handle(device)


def _copy_at_once(there: int, here: int, size: int, _: int) -> None:
    ctypes.memmove(there, here, size)


def _copy_matrix(destination: Tensor, source: Tensor) -> None:
    if source.device.type == "cpu":
        destination.copy_(source)
    elif source.numel():
        size = source.element_size()
        target, origin = ((end.data_ptr(), end.stride(0) * size) for end in (destination, source))
        find_driver().copy_rows(target, origin, source.shape[1] * size, source.shape[0], find_handle(source.device))


def rank_notify(channel: BlockChannel, index: int, rank: int) -> None:
    """Signal to `rank` that all of this rank's tiles of channel `index` in the current call have been written.

    It replaces all of this rank's `producer_tile_notify` for that channel, so no kernel may notify for it too.

    Order: all copies before it on its stream, and on the host all stores of this thread, before the signal.
    """
    _require_inside(channel, index, rank)
    channel.current  # noqa: B018  (it raises)
    # Copy the value that the counter has when the call ends (`sends`), which lies on the device, not on the host.
    set_flag(*channel.notified_words(index, rank))


def rank_wait(channel: BlockChannel, index: int, rank: int) -> None:
    """Wait until `rank` has sent all signals of the current call for channel `index` to this rank.

    Order: all later copies and kernels on its stream run after the stores before those signals. The wait has the
    channel's timeout; `BlockChannel.check` raises an error after a timeout.
    """
    _require_inside(channel, index, rank)
    _launch_wait(channel, wait_for_channel, rank, index)


def rank_wait_all(channel: BlockChannel, index: int, stride: int) -> None:
    """Wait as `rank_wait` does, for all other ranks: for rank r's signals of channel r * stride + index."""
    _require_inside(channel, (channel.world_size - 1) * stride + index, 0)
    _require_inside(channel, index, 0)
    _launch_wait(channel, wait_for_all, index, stride)


def _launch_wait(channel: BlockChannel, kernel: Any, *numbers: int) -> None:
    call = channel.current
    channel.launch(kernel, (id(call), *numbers), 1, (call, *numbers), kept=call, num_warps=1)


def rank_await_count(counters: Tensor, index: int, count: int) -> None:
    """Make the stream wait until counters[index] (int32) has reached `count`; `rank_reset_counts` ends such waits.

    It waits for `producer_tile_count` on this GPU, in a kernel that must not wait for other ranks, so there is no
    timeout. The GPU's front end waits, because a waiting kernel might not fit on the GPU next to the one that counts.
    On the host backend kernels have ended by then, and a missing count is a RuntimeError.
    """
    if counters.device.type != "cpu":
        address = counters.data_ptr() + index * counters.element_size()
        find_driver().await_count(address, count, find_handle(counters.device))
    elif counters[index].item() != count:
        raise RuntimeError(f"{counters[index].item()} was counted, and not {count}")


def rank_reset_counts(counters: Tensor, count: int) -> None:
    """Set the first `count` counters to 0, in stream order: after the last wait for each that a kernel counted."""
    if counters.device.type != "cpu":
        find_driver().clear(counters.data_ptr(), count, find_handle(counters.device))
    else:
        counters[:count] = 0


def rank_set_slot(channel: BlockChannel, tile: int, rank: int, value: Tensor) -> None:
    """Write `value` (int32 [1], on the device) into `rank`'s slot of a peer tile; ordered as `rank_notify`."""
    set_flag(_find_slot(channel, tile, rank), value)


def _find_slot(channel: BlockChannel, tile: int, rank: int) -> Tensor:
    if not 0 <= tile < channel.peer_tiles:
        raise ValueError(f"the channel has peer_tiles 0 to {channel.peer_tiles - 1}, not {tile}")
    return channel.slot_word(rank, tile)


def _require_inside(channel: BlockChannel, index: int, rank: int) -> None:
    if not 0 <= index < channel.channels:
        raise ValueError(f"the channel has channels 0 to {channel.channels - 1}, not {index}")
    if not 0 <= rank < channel.world_size:
        raise ValueError(f"the group has ranks 0 to {channel.world_size - 1}, not {rank}")
