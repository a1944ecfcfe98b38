"""Weights gathered over z by copy engines: all of a forward pass at once, beside it, on no multiprocessor.

NCCL's kernels want multiprocessors, which a large product holds to its end: a weight that is gathered "beside" one
starts late, and slows it. Copy engines need none. At the beginning of a forward pass every rank casts its shards to
where they lie in the gathered weights, and copies go from there to the other ranks, weight after weight in the order of
use, each followed by a signal. A product waits for its weight's signals alone.

Gathered weights lie in symmetric memory of their own, kept from step to step: as much as the forward pass holds at its
end in any case. Nothing is written over before all ranks have begun the next forward pass, and so ended what read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.comm.weight_gathering import GatheredWeight, WeightGatherer, WeightToGather
from stretto.parallel.layout import Version, local, version_of

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing
    from stretto.tiles import BlockChannel

# Weights that are cast in one launch before they are pushed: the first are on their way while the rest is cast.
CAST_AT_ONCE = 8


@dataclass
class _Place:
    """Where a weight is gathered: the whole of it, this rank's part, and where that part goes at each other rank.

    version: of the shard that was pushed last. awaited_on: the streams that have waited for this pass's whole.
    """

    number: int
    whole: Tensor
    own: Tensor
    there: dict[int, Tensor]
    version: Version | None = None
    awaited_on: set[int] = field(default_factory=set)


class CopyEngineAllGather:
    """The weights of one model that copy engines gather, over one group.

    A forward pass is what lies between `begin` and `end`, which all ranks call alike. Weights are taken in it, and
    where it is run again in its backward pass.

    It is for weights that the backward pass needs in any case. A pass that autograd does not record begins it for none,
    and where activation checkpointing turns out to run the forward pass again, it stops: there, memory counts more.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str = "cuda") -> None:
        self.group = group
        self.backend = backend
        self._weights: dict[object, WeightToGather] = {}
        self._order: list[object] = []  # in which they were taken, as far as that is known
        self._places: dict[object, _Place] = {}
        self._layout: list[Any] = []
        self._channel: BlockChannel | None = None
        self._is_open = False
        self._is_wasted = False  # by activation checkpointing

    def register(self, key: object, weight: WeightToGather) -> None:
        """Push this weight from the next forward pass on."""
        self._weights[key] = weight

    def begin(self) -> None:
        """A forward pass begins: all weights are on their way. Collective, without waiting on the host.

        The first one allocates, where all ranks meet. PeerError if a rank did not come to an earlier one.
        """
        if self._is_wasted:
            self.stop()
        if not self._weights or (self._channel is None and not torch.is_grad_enabled()):
            return
        from stretto.tiles import copy_engine, shard_tiles  # here: Triton may be missing where nothing is pushed

        self.end()  # of a pass that nobody has ended
        channel = self._prepare()
        count = len(self._places)
        mapping = shard_tiles(count, channel.world_size, 1, channels=count)
        channel.begin("the all-gather of weights over z", mapping, mapping, "broadcast")
        known = set(self._order)
        for keys in _batches([*self._order, *(key for key in self._weights if key not in known)]):
            parameters = [self._weights[key].parameter for key in keys]
            places = [self._places[key] for key in keys]
            with torch.no_grad():
                torch._foreach_copy_([place.own for place in places], [local(parameter) for parameter in parameters])
            with copy_engine(channel):
                for place in places:
                    self._push(channel, place)
            for place, parameter in zip(places, parameters, strict=True):
                place.version = version_of(parameter)
                place.awaited_on.clear()
        self._order.clear()
        self._is_open = True

    def end(self) -> None:
        """The forward pass has ended, so that what comes after it on this stream comes after all pushes."""
        if self._is_open and self._channel is not None:
            from stretto.tiles import join_copies

            join_copies(self._channel)
        self._is_open = False

    def stop(self) -> None:
        """Push nothing any more, and give the memory back."""
        self.end()
        self._weights.clear()
        self._places.clear()
        self._channel = None

    def take(self, key: object, version: Version, *, in_backward: bool) -> Tensor | None:
        """The whole weight, [rows, ...]; None where it was not pushed in this pass, or has changed since.

        The tensor is written over in the next forward pass: with the same numbers, unless the parameter has changed.
        """
        place = self._places.get(key)
        self._is_wasted |= in_backward
        if place is None or place.version != version or not (self._is_open or in_backward):
            return None
        stream = _find_stream(place.whole.device)
        if stream not in place.awaited_on:
            from stretto.tiles import rank_wait_all

            assert self._channel is not None
            rank_wait_all(self._channel, place.number, len(self._places))
            if not place.awaited_on:
                self._order.append(key)
            place.awaited_on.add(stream)
        return place.whole

    def version(self, key: object, whole: Tensor) -> Version | None:
        """Of the shard that `whole` was gathered from, if it lies where the next pass gathers too; else None."""
        place = self._places.get(key)
        return place.version if place is not None and place.whole is whole else None

    def was_overwritten(self, key: object, version: Version | None) -> bool:
        """Whether a later pass has put other numbers where a weight of this version, as `version` gave it, lay."""
        place = self._places.get(key)
        return version is not None and place is not None and place.version != version

    def _push(self, channel: "BlockChannel", place: _Place) -> None:
        """To the rank before this one first: at any time every rank pushes to another one."""
        from stretto.tiles import rank_copy_data, rank_notify

        for distance in range(1, channel.world_size):
            peer = (channel.rank - distance) % channel.world_size
            rank_copy_data(place.there[peer], place.own)
            rank_notify(channel, channel.rank * len(self._places) + place.number, peer)

    def _prepare(self) -> "BlockChannel":
        """The channel whose buffer holds all weights as they are now: allocated at first, and when dtypes change."""
        from stretto.tiles import BlockChannel

        shards = {key: local(weight.parameter) for key, weight in self._weights.items()}
        layout = [
            (key, weight.rows, tuple(shards[key].shape), weight.dtype or shards[key].dtype)
            for key, weight in self._weights.items()
        ]
        if self._channel is not None and layout == self._layout:
            self._channel.check()
            return self._channel
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the first forward pass allocates memory that all ranks share, which a CUDA graph cannot hold: run a "
                "step before the graph is captured"
            )
        self._places.clear()
        self._channel = None  # its memory goes back before more is taken
        world, rank = self.group.size(), self.group.rank()
        offsets, size = [], 0
        for _, rows, shape, dtype in layout:
            offsets.append(size)
            num_bytes = -(-rows // world) * world * _numel(shape[1:]) * dtype.itemsize
            size += -(-num_bytes // 128) * 128
        channel = BlockChannel.allocate(self.group, channels=world * len(layout), data_bytes=size, backend=self.backend)
        for number, ((key, rows, shape, dtype), offset) in enumerate(zip(layout, offsets, strict=True)):
            chunk = -(-rows // world)
            padded, mine = (chunk * world, *shape[1:]), slice(rank * chunk, rank * chunk + shape[0])
            # `.data`: a tensor of its own to autograd, or to write one weight would be to change all of them.
            whole = channel.tensor(padded, dtype, offset=offset).data
            there = {
                peer: channel.tensor(padded, dtype, offset=offset, rank=peer)[mine]
                for peer in range(world)
                if peer != rank
            }
            self._places[key] = _Place(number, whole[:rows], whole[mine].data, there)
        self._layout, self._channel = layout, channel
        return channel


class CopyEngineGatherer(WeightGatherer):
    """Gathers by copy engines the weights that may be kept; all other weights, and stale ones, by `others`."""

    def __init__(self, copies: CopyEngineAllGather, others: WeightGatherer) -> None:
        self.copies = copies
        self.others = others

    def register(self, key: object, weight: WeightToGather, *, may_keep: bool) -> None:
        """Gather this weight from now on, by copy engines if it may be kept."""
        self.others.register(key, weight, may_keep=may_keep)
        if may_keep:
            self.copies.register(key, weight)

    def begin_forward(self) -> None:
        """Start to copy all weights."""
        self.others.begin_forward()
        if not in_backward():
            self.copies.begin()

    def end_forward(self) -> None:
        """Order what comes after the forward pass after all copies."""
        self.others.end_forward()
        if not in_backward():
            self.copies.end()

    def gather(self, key: object, parameter: Tensor) -> GatheredWeight:
        """The rows that copy engines have gathered in this pass, else those that `others` gathers now."""
        whole = self.copies.take(key, version_of(parameter), in_backward=in_backward())
        if whole is None:
            return self.others.gather(key, parameter)
        return GatheredWeight(whole, self.copies.version(key, whole))

    def stop_keeping(self) -> None:
        """Copy nothing any more, and free the memory."""
        self.copies.stop()

    def was_overwritten(self, key: object, version: Version | None) -> bool:
        """Whether rows of `GatheredWeight.version` have been overwritten with other numbers since."""
        return self.copies.was_overwritten(key, version)


def have_copy_engines(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether copy engines reach all of the group: GPUs of one machine, NVLink between all. Collective."""
    if group.size() == 1 or device.type != "cuda":
        return False
    from stretto.collectives.executor.cuda.workspace import has_nvlink

    return has_nvlink(group, device)


def make_scatter_ring(group: dist.ProcessGroup) -> "ScatterRing":
    """What gradients go back through."""
    from stretto.parallel.comm.copy_engine_scatter import (
        ScatterRing,  # here: Triton may be missing where nothing is pushed
    )

    return ScatterRing(group)


def _find_stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    from stretto.tiles.streams import find_handle

    return find_handle(device)


def _batches(keys: Sequence[object]) -> Iterator[Sequence[object]]:
    for start in range(0, len(keys), CAST_AT_ONCE):
        yield keys[start : start + CAST_AT_ONCE]


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
