# SPDX-License-Identifier: Apache-2.0
"""Gathers weights over z by copy engines: all of a forward pass from its beginning on, without multiprocessors.

NCCL's kernels need multiprocessors, which a large product occupies to its end: a weight that is gathered "beside" a
product starts late, and slows it. Copy engines need none. At the beginning of a forward pass every rank casts its
shards into their places in the gathered weights, and copies go from there to the other ranks, one weight after the
other in the order of use, each followed by a signal. A product waits for the signals of its own weight only.

Gathered weights have their own symmetric memory, which is kept from step to step: no more than the forward pass
holds at its end in any case. Nothing is overwritten before all ranks have begun the next forward pass, and so have
ended all that read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory.copy_engine import find_handle
from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.comm.collectives import collective
from stretto.parallel.comm.weight_gathering import (
    GatheredWeight,
    GatherSource,
    TableParts,
    WeightGatherer,
    WeightToGather,
)
from stretto.parallel.layout import TensorOnGrid, Version, local, version_of
from stretto.parallel.low_precision_weights import PlacedWeight

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing
    from stretto.tiles import BlockChannel

# How many weights one launch casts. The first so many are copied while the others are cast, and the others once half of
# these are in use, so that the first product does not wait until the host has launched all copies.
CAST_AT_ONCE = 8


@dataclass
class _Place:
    """The memory into which a weight is gathered: all of it, this rank's part, and where that is at each other rank.

    version: of the shard that the last pass copied, None once an optimizer has written `own` since. scale: of it, in
    fp8. is_left: this pass has yet to copy it. awaited_on: the streams that have waited for this pass's rows. copy: of
    a weight that is cast, `own` for an optimizer that writes it (`parallel.low_precision_weights`). addresses: of a
    table, which is not gathered: all ranks' parts; `whole` is this rank's then.
    """

    number: int
    whole: Tensor
    own: Tensor
    there: dict[int, Tensor]
    version: Version | None = None
    scale: Tensor | None = None
    is_left: bool = False
    awaited_on: set[int] = field(default_factory=set)
    copy: PlacedWeight | None = None
    addresses: Tensor | None = None

    def note_write(self) -> None:
        """Own rows are about to be written."""
        self.version = None


class CopyEngineAllGather:
    """All-gathers the weights of one model by copy engines, over one group.

    A forward pass is between `begin` and `end`, which all ranks call in the same way. Weights are taken in it, and
    where it is recomputed in its backward pass.

    It is for weights that the backward pass needs in any case. A pass that autograd does not record does not allocate
    it, and where activation checkpointing turns out to recompute the forward pass, it stops: there, memory counts more.
    If the passes of a step are between `begin_step` and `end_step`, weights are kept in any case.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str = "cuda") -> None:
        self.group = group
        self.backend = backend
        self._weights: dict[object, WeightToGather] = {}
        self._order: list[object] = []  # in which the last pass took them
        self._places: dict[object, _Place] = {}
        self._layout: list[Any] = []
        self._channel: BlockChannel | None = None
        self._is_open = False
        self._left: list[object] = []  # which this pass has yet to copy
        self._is_stopped = self._is_wasted = False  # by activation checkpointing
        self._is_step = self._is_copied = False  # weights do not change; and a pass has copied them since

    def register(self, key: object, weight: WeightToGather) -> None:
        self._weights[key] = weight

    def drop_pruned(self) -> None:
        """Copy no pruned weights from the next forward pass on."""
        pruned = [key for key, weight in self._weights.items() if getattr(weight.parameter, "pruned", None) is not None]
        if pruned:
            was_stopped = self._is_stopped
            self.stop()
            self._is_stopped = was_stopped
        for key in pruned:
            del self._weights[key]
        self._order = [key for key in self._order if key in self._weights]

    def begin(self) -> None:
        """Begin a forward pass: start to copy weights. Collective; the host does not wait.

        Between `begin_step` and `end_step` the first pass alone copies. The first call allocates, in which all ranks
        wait for each other. PeerError if a wait of an earlier pass failed.
        """
        if self._is_wasted:
            self.stop()
        if not self._weights or (self._is_stopped and not self._is_step):
            return
        if self._channel is None and not torch.is_grad_enabled():
            return
        self.end()  # in case an earlier pass was not ended
        # A DTensor gives its shard four times as fast there, and 2.11 calls Python for each of its attributes.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._begin()

    def _begin(self) -> None:
        from stretto.tiles import shard_tiles  # here: Triton may be missing where there are no GPUs

        if self._is_copied and self._layout == self._describe():
            self._is_open = True
            return
        channel = self._prepare()
        count = len(self._places)
        mapping = shard_tiles(count, channel.world_size, 1, channels=count)
        channel.begin("the all-gather of weights over z", mapping, mapping, "broadcast")
        known = set(self._order)
        ordered = self._left = [*self._order, *(key for key in self._weights if key not in known)]
        self._order.clear()
        for number, keys in enumerate(_batches(ordered)):
            parameters = [self._weights[key].parameter for key in keys]
            places = [self._places[key] for key in keys]
            stale = [
                (place.own, local(parameter))
                for key, parameter, place in zip(keys, parameters, places, strict=True)
                if self._weights[key].scaling is None and not (place.copy is not None and place.copy.holds(parameter))
            ]
            if stale:
                torch._foreach_copy_([own for own, _ in stale], [shard for _, shard in stale])
            for key, place in zip(keys, places, strict=True):
                if (scaling := self._weights[key].scaling) is not None:
                    _, place.scale = scaling.cast(scaling.parameter, place.own)
            for place, parameter in zip(places, parameters, strict=True):
                place.version, place.is_left = version_of(parameter), True
                place.awaited_on.clear()
            if number == 0:
                self._copy(len(keys))
        self._is_open = True
        self._is_copied = self._is_step

    def _copy(self, count: int) -> None:
        """Copy the next `count` weights, which have been cast."""
        from stretto.tiles import copy_engine

        assert self._channel is not None
        chosen, self._left = self._left[:count], self._left[count:]
        with collective("all_gather"), copy_engine(self._channel):
            for place in map(self._places.__getitem__, chosen):
                self._copy_to_peers(self._channel, place)
                place.is_left = False

    def end(self) -> None:
        """End the forward pass: make the current stream wait for all copies, before any work that is enqueued later."""
        if self._left:
            self._copy(len(self._left))
        if self._is_open and self._channel is not None:
            from stretto.tiles import join_copies

            join_copies(self._channel)
        self._is_open = False

    def begin_step(self) -> None:
        """Weights do not change until `end_step`: copy them in one pass only. All ranks call it."""
        self._is_step, self._is_copied = True, False

    def end_step(self) -> None:
        """Copy them in each pass again."""
        self._is_step = self._is_copied = False

    def stop(self) -> None:
        """From now on copy only between `begin_step` and `end_step`, and free the memory."""
        self.end()
        self._clear()
        self._is_stopped, self._is_wasted, self._is_copied = True, False, False

    def take(self, key: object, version: Version | None, *, in_backward: bool) -> GatheredWeight | None:
        """The whole weight, [rows, ...]; None where this pass did not copy it, where it has changed since, and of a
        table.

        version: of the shard now (None: of what is no single weight, and is never copied).

        The next forward pass overwrites the rows: with the same numbers, unless the parameter has changed.
        """
        is_table = key in self._weights and self._weights[key].is_table
        place = None if is_table else self._wait_for(key, version, in_backward=in_backward)
        return None if place is None else GatheredWeight(place.whole, place.version, place.scale)

    def _wait_for(self, key: object, version: Version | None, *, in_backward: bool) -> _Place | None:
        place = self._places.get(key)
        self._is_wasted |= in_backward and not self._is_step
        if place is None or place.version != version or not (self._is_open or in_backward):
            return None
        stream = _find_stream(place.whole.device)
        if stream not in place.awaited_on:
            from stretto.tiles import rank_wait_all

            assert self._channel is not None
            if self._left and (len(self._order) >= CAST_AT_ONCE // 2 or place.is_left):
                self._copy(len(self._left))
            rank_wait_all(self._channel, place.number, len(self._places))
            if not place.awaited_on:
                self._order.append(key)
            place.awaited_on.add(stream)
        return place

    def find_parts(self, key: object, version: Version | None) -> TableParts | None:
        """The parts of a table; None where this pass did not copy it, or where it has changed since."""
        place = self._places.get(key)
        if place is None or place.addresses is None or in_backward():
            return None
        is_there = self._wait_for(key, version, in_backward=False) is not None
        return TableParts(place.addresses, place.own) if is_there else None

    def was_overwritten(self, key: object, version: Version | None) -> bool:
        """True if a later pass has overwritten a weight of this version, as `take` gave it, with other numbers."""
        place = self._places.get(key)
        return version is not None and place is not None and place.version != version

    def _copy_to_peers(self, channel: "BlockChannel", place: _Place) -> None:
        """Copy to the rank before this one first: at any time each rank receives from one other."""
        from stretto.tiles import CopyList, find_copies

        def list_copies() -> CopyList:
            copies = CopyList()
            for distance in range(1, channel.world_size):
                peer = (channel.rank - distance) % channel.world_size
                if place.addresses is None:
                    copies.copy(place.there[peer], place.own)
                copies.notify(channel, channel.rank * len(self._places) + place.number, peer)
            return copies

        find_copies(channel, place.number, list_copies).run(channel)

    def _prepare(self) -> "BlockChannel":
        """The channel whose buffer holds all weights; allocated at first, and when shapes or dtypes have changed."""
        from stretto.tiles import BlockChannel

        layout = self._describe()
        if self._channel is not None and layout == self._layout:
            self._channel.check()
            return self._channel
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the first forward pass allocates memory that all ranks share, which a CUDA graph cannot hold: run a "
                "step before the graph is captured"
            )
        self._clear()  # before more is allocated
        world, rank = self.group.size(), self.group.rank()
        offsets, size = [], 0
        for key, rows, shape, dtype in layout:
            offsets.append(size)
            parts = 1 if self._weights[key].is_table else world
            num_bytes = -(-rows // world) * parts * torch.Size(shape[1:]).numel() * dtype.itemsize
            size += -(-num_bytes // 128) * 128
        channel = BlockChannel.allocate(self.group, channels=world * len(layout), data_bytes=size, backend=self.backend)
        for number, ((key, rows, shape, dtype), offset) in enumerate(zip(layout, offsets, strict=True)):
            chunk = -(-rows // world)
            if self._weights[key].is_table:
                self._places[key] = _place_table(channel, number, (chunk, *shape[1:]), shape[0], dtype, offset)
                continue
            padded, mine = (chunk * world, *shape[1:]), slice(rank * chunk, rank * chunk + shape[0])
            # `.data`: a separate tensor for autograd, or a write to one weight would count as a write to all of them.
            whole = channel.tensor(padded, dtype, offset=offset).data
            there = {
                peer: channel.tensor(padded, dtype, offset=offset, rank=peer)[mine]
                for peer in range(world)
                if peer != rank
            }
            self._places[key] = place = _Place(number, whole[:rows], whole[mine].data, there)
            self._lend(self._weights[key], place)
        self._layout, self._channel = layout, channel
        return channel

    def _lend(self, weight: WeightToGather, place: _Place) -> None:
        """Let an optimizer write the weight's part where it is sent from, if it is cast there."""
        parameter = weight.parameter
        if weight.scaling is None and isinstance(parameter, TensorOnGrid) and parameter.dtype != place.own.dtype:
            parameter.low_precision_weight = place.copy = PlacedWeight(place.own, place.note_write)

    def _clear(self) -> None:
        """Free the memory, and take back what optimizers write."""
        for place in self._places.values():
            if place.copy is not None:
                place.copy.withdraw()
        self._places.clear()
        self._channel = None

    def _describe(self) -> list[Any]:
        """Describe each weight: its key, rows, and this rank's shape and dtype."""
        shards = {key: local(weight.parameter) for key, weight in self._weights.items()}
        return [
            (key, weight.rows, tuple(shards[key].shape), weight.sent_dtype or shards[key].dtype)
            for key, weight in self._weights.items()
        ]


class CopyEngineGatherer(WeightGatherer):
    """Gathers by copy engines the weights that may be kept; all other weights, and stale ones, by `others`."""

    keeps_rows = True

    def __init__(self, copies: CopyEngineAllGather, others: WeightGatherer) -> None:
        self.copies = copies
        self.others = others

    def register(self, key: object, weight: GatherSource, *, may_keep: bool) -> None:
        """Gather this weight from now on, by copy engines if it is one weight that may be kept, or a table."""
        self.others.register(key, weight, may_keep=may_keep)
        if isinstance(weight, WeightToGather) and (may_keep or weight.is_table):
            self.copies.register(key, weight)

    def begin_forward(self) -> None:
        self.others.begin_forward()
        if not in_backward():
            self.copies.begin()

    def end_forward(self) -> None:
        """Make the current stream wait for all copies of the forward pass."""
        self.others.end_forward()
        if not in_backward():
            self.copies.end()

    def gather(self, key: object, parameter: Any) -> GatheredWeight:
        """The rows that copy engines have gathered in this pass, or else those that `others` gathers now."""
        version = version_of(parameter) if isinstance(parameter, Tensor) else None
        taken = self.copies.take(key, version, in_backward=in_backward())
        return self.others.gather(key, parameter) if taken is None else taken

    def find_parts(self, key: object, parameter: Tensor) -> TableParts | None:
        """The parts of a table, which all ranks have cast in this pass."""
        return self.copies.find_parts(key, version_of(parameter))

    def begin_step(self) -> None:
        """Copy weights in one pass of the step only."""
        self.others.begin_step()
        self.copies.begin_step()

    def end_step(self) -> None:
        """Copy them in each pass again."""
        self.others.end_step()
        self.copies.end_step()

    def stop_keeping(self) -> None:
        """From now on copy only within steps, and free the memory."""
        self.copies.stop()

    def send_pruned(self) -> None:
        """Leave pruned weights to `others`."""
        self.copies.drop_pruned()

    def was_overwritten(self, key: object, version: Version | None) -> bool:
        return self.copies.was_overwritten(key, version)


def _place_table(
    channel: "BlockChannel", number: int, shape: tuple[int, ...], rows: int, dtype: torch.dtype, offset: int
) -> _Place:
    """The place of a table's part, [rows, ...] of `shape`, which is at the same offset on all ranks."""
    from stretto.ops.embedding.move_rows import find_addresses

    parts = [channel.tensor(shape, dtype, offset=offset, rank=rank) for rank in range(channel.world_size)]
    own = channel.tensor(shape, dtype, offset=offset).data[:rows]
    return _Place(number, own, own, {}, addresses=find_addresses(parts, own.device))


def make_scatter_ring(group: dist.ProcessGroup) -> "ScatterRing":
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing  # here: Triton may be missing without GPUs

    return ScatterRing(group)


def _find_stream(device: torch.device) -> int:
    return find_handle(device) if device.type == "cuda" else 0


def _batches(keys: Sequence[object]) -> Iterator[Sequence[object]]:
    for start in range(0, len(keys), CAST_AT_ONCE):
        yield keys[start : start + CAST_AT_ONCE]
