# SPDX-License-Identifier: Apache-2.0
"""The store of optimizer state for mixed-precision training: 16-bit weights and gradients in the model, fp32 here.

A step, of which only the first two lines happen in the backward pass:

    `add`        a parameter's gradient, of this rank's tokens, is added to the flat gradients
    `complete`   the last part of a chunk's gradients has come: its all-reduce starts
    `finish`     the backward pass has ended: the all-reduces of all other chunks start
    `step`       for each chunk: wait for its all-reduce; for each of its buckets: fetch, update, return the state

Without clipping, loss scaling and skips, a chunk's buckets are updated as soon as its own all-reduce is done, while
those of later chunks are sent (Singh, section 3.3.3). Clipping and the check for overflows or NaN need the norm of all
gradients: then states are fetched while gradients are summed, and the updates wait (`StepOrder`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.optim.state.layout import Bucket, Chunk, StateLayout
from stretto.optim.state.loss_scale import LossScale
from stretto.optim.state.master_weights import join, round_to, round_to_bf16
from stretto.optim.state.residence import FlatWeights, StateResidence
from stretto.optim.state.updates import AVERAGE, LOW, MASTER, TILE, History, StepSettings, Update


class Reduction(Protocol):
    """A sum over ranks that has been started."""

    def wait(self) -> Tensor:
        """The sum, in place, ready on the current stream."""


class Communicator(Protocol):
    """Exchanges between ranks that the store needs. `key` is that of a parameter (`StoredParameter`)."""

    def start_sum(self, key: Any, gradients: Tensor) -> Reduction:
        """Begin to sum a chunk's gradients, in place, over the ranks that have seen other tokens."""

    def sum_squares(self, squares: Tensor) -> Tensor:
        """Sum a 0-dim tensor over all ranks."""


class StepOrder(Enum):
    """The time at which a bucket is updated."""

    CHUNK_BY_CHUNK = "as soon as its chunk's gradients are summed"
    AFTER_NORM = "after the norm of all gradients is known"


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of the store: this rank's shard. Of a pruned one, shape is that of what is left, flat.

    key: over which ranks its gradient is summed; those with equal keys and weight decays share messages. replicas: how
    many ranks hold each number.
    """

    name: str
    shape: torch.Size
    key: Any
    replicas: int
    weight_decay: float


@dataclass
class _StepGradients:
    """The gradients of a running step: which parameters have one, and the all-reduces of chunks that are complete."""

    present: set[int] = field(default_factory=set)
    complete: set[int] = field(default_factory=set)  # all that is added to these is late
    left: dict[int, int] = field(default_factory=dict)  # parameters of each chunk that are not complete
    started: dict[int, Reduction] = field(default_factory=dict)  # by chunk, in the order of their starts
    late: dict[int, Tensor] = field(default_factory=dict)  # arrived after their chunk had started


class OptimizerStateStore:
    """Owns the flat weights and gradients of a model's shards, and their fp32 weights and optimizer state.

    parameters: in one order on all ranks that share a group. layout: of their numbers. dtypes: of weights (bf16, fp16
    or fp32) and of gradients (the same, or fp32 for sums of many micro-batches). residence: of the state that
    `state_slots` lists. weights: `FlatWeights` if None. First comes `set_weight` of each parameter, then `prepare`.
    """

    def __init__(
        self,
        parameters: Sequence[StoredParameter],
        layout: StateLayout,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        update: Update,
        residence: StateResidence,
        communicator: Communicator,
        *,
        clip: Callable[[Tensor], Tensor] | None = None,
        loss_scale: LossScale | None = None,
        skips_nonfinite: bool = False,
        weights: FlatWeights | None = None,
    ) -> None:
        self.parameters, self.layout = tuple(parameters), layout
        self.device = device
        self.weights = weights or FlatWeights(layout, dtypes[0], device)
        self.gradients = torch.empty(0, dtype=dtypes[1], device=device)
        self._gradients_of: list[Tensor] = []  # views of these, by parameter
        self.update, self.residence, self.communicator = update, residence, communicator
        self.clip, self.loss_scale, self.skips_nonfinite = clip, loss_scale, skips_nonfinite
        self.histories = [0] * len(self.parameters)
        self._history: dict[int, History] = {0: History()}
        decays = {layout.places[index].segment: own.weight_decay for index, own in enumerate(self.parameters)}
        self._weight_decays = tuple(decays[segment] for segment in sorted(decays))
        self._begin_gradients()
        self._chunks_of: dict[int, list[Chunk]] = {index: [] for index in range(len(self.parameters))}
        for chunk in layout.chunks:
            for index in chunk.parameters:
                self._chunks_of[index].append(chunk)

    @property
    def step_order(self) -> StepOrder:
        needs_norm = self.clip is not None or self.loss_scale is not None or self.skips_nonfinite
        return StepOrder.AFTER_NORM if needs_norm else StepOrder.CHUNK_BY_CHUNK

    def prepare(self) -> None:
        """Allocate gradients, and the state that the weights have not needed so far; averages begin with them."""
        self.gradients = torch.zeros(self.layout.size, dtype=self.gradients.dtype, device=self.device)
        self._gradients_of = [
            self.gradients[place.start : place.stop].view(own.shape)
            for own, place in zip(self.parameters, self.layout.places, strict=True)
        ]
        self.residence.prepare(self.weights, self.gradients)
        sets, kept = self.residence.weight_buffers, self.residence.arrays
        if AVERAGE in kept:
            for index, place in enumerate(self.layout.places):
                kept[AVERAGE][place.start : place.stop].copy_(self.weight(index).flatten())
        reads = MASTER not in kept or self.residence.step_device != self.device
        rows = max((bucket.size for bucket in self.layout.buckets), default=0)
        self.weights.prepare(rows, sets, self.gradients, reads=reads)

    # Gradients.

    def _begin_gradients(self) -> None:
        self._step = _StepGradients(left={chunk.index: len(chunk.parameters) for chunk in self.layout.chunks})

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a part of parameter `index`'s gradient, that of this rank's tokens."""
        step, gradient = self._step, gradient.detach()
        if index not in step.complete:
            self.weights.keep_gradient(index, gradient, self._gradients_of[index], adds=index in step.present)
        elif index in step.late:
            self.weights.take_gradient(index, gradient, step.late[index], adds=True)
        else:
            step.late[index] = torch.empty_like(self._gradients_of[index])
            self.weights.take_gradient(index, gradient, step.late[index], adds=False)
        step.present.add(index)

    def complete(self, index: int) -> None:
        """All parts of a parameter's gradient have come: start to sum the chunks of which it was the last."""
        step = self._step
        if index in step.complete:
            return
        step.complete.add(index)
        for chunk in self._chunks_of[index]:
            step.left[chunk.index] -= 1
            if not step.left[chunk.index]:
                self._start(chunk)

    @torch.no_grad()
    def finish(self) -> None:
        """A backward pass that sums has ended: reduce the remaining chunks, and late gradients.

        A step may have several: what is added after the first of them is late.
        """
        step = self._step
        for index, gradient in enumerate(self._gradients_of):
            if index not in step.present:
                gradient.zero_()
        for chunk in self.layout.chunks:
            if chunk.index not in step.started:
                self._start(chunk)
        step.complete.update(range(len(self.parameters)))
        for index in sorted(step.late):
            own, late = self._gradients_of[index], step.late[index].flatten()
            total = self.communicator.start_sum(self.parameters[index].key, late).wait()
            for chunk in self._chunks_of[index]:
                step.started[chunk.index].wait()
            own.add_(total.view(own.shape))
        step.late.clear()

    def _start(self, chunk: Chunk) -> None:
        self.weights.flush()
        key = self.parameters[chunk.parameters[0]].key
        part = self.gradients[chunk.start : chunk.stop]
        self._step.started[chunk.index] = self.communicator.start_sum(key, part)

    @property
    def has_gradients(self) -> bool:
        """True from a backward pass to its step."""
        return bool(self._step.present)

    def drop(self) -> None:
        """Forget the gradients of the running step. Sums that have been started are waited for."""
        for reduction in self._step.started.values():
            reduction.wait()
        self.weights.drop()
        self._begin_gradients()

    # The step.

    @torch.no_grad()
    def step(self, lr: float | Tensor, loss: Tensor | None = None) -> Tensor:
        """Update all parameters that have a gradient, at learning rate `lr`. Returns the gradient's global 2-norm.

        The norm is fp64, 0-dim, on the device, before clipping; that of an overflow is not finite. loss: 0-dim, the
        same on all ranks; with `skips_nonfinite`, nothing is updated where it or the norm is not finite. Collective,
        also for ranks of which no parameter has a gradient, which update nothing. RuntimeError before `finish`, after
        gradients have been added.
        """
        if self._step.late or (self._step.present and not self._step.started):
            raise RuntimeError(
                "gradients have not been summed over ranks: the last backward pass of a step must not be in no_sync"
            )
        if not self._step.present:  # other ranks may have gradients: a frozen pipeline stage has none
            self.drop()
            norm = self._norm({})
            if self.loss_scale is not None:
                norm = norm / self.loss_scale.value[0]
                self.loss_scale.update(~norm.isfinite())
            return norm
        order = list(self._step.started)
        self._advance_histories()
        device = self.device
        buckets = [bucket for chunk in order for bucket in self.layout.chunks[chunk].buckets]
        comes_first = self.step_order is StepOrder.AFTER_NORM  # the wait for all sums
        self.residence.begin(buckets, are_summed=comes_first)
        scale = torch.ones((), dtype=torch.float32, device=device)
        skip = torch.zeros(1, dtype=torch.int32, device=device)
        squares: dict[int, Tensor] = {}
        if self.step_order is StepOrder.CHUNK_BY_CHUNK:
            self._begin_update(lr, scale, skip)
            for number in order:
                squares[number] = self._wait(number)
                for bucket in self.layout.chunks[number].buckets:
                    self._update(bucket)
            norm = self._norm(squares)
        else:
            for number in order:
                squares[number] = self._wait(number)
            norm = self._norm(squares)
            if self.loss_scale is not None:
                norm = norm / self.loss_scale.value[0]
                scale = scale / self.loss_scale.value[0]
            if self.clip is not None:
                scale = scale * self.clip(norm).float()
            if self.loss_scale is not None:
                is_overflow = ~norm.isfinite()
                skip += is_overflow
                self.loss_scale.update(is_overflow)
            if self.skips_nonfinite:
                skip += ~norm.isfinite() if loss is None else ~(norm.isfinite() & loss.isfinite())
            self._begin_update(lr, scale, skip)
            for bucket in buckets:
                self._update(bucket)
        self.residence.finish()
        self.update.end()
        self._begin_gradients()
        return norm

    def _norm(self, squares: dict[int, Tensor]) -> Tensor:
        """The gradient's global 2-norm, from the sum of squares of each chunk.

        Added in the chunks' order: the order of their sums is another in a process's first step, so that a resumed run
        would have other last bits.
        """
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([squares[chunk] for chunk in sorted(squares)] or [none]).sum()
        return self.communicator.sum_squares(total).sqrt()

    def _wait(self, chunk: int) -> Tensor:
        """Wait for a chunk's sum. Returns the sum of its squares, fp64, each number counted once over all ranks."""
        self._step.started[chunk].wait()
        own = self.layout.chunks[chunk]
        replicas = self.parameters[own.parameters[0]].replicas
        return _sum_of_squares(self.gradients[own.start : own.stop]) / replicas

    def _advance_histories(self) -> None:
        """Give the parameters that take this step separate histories, if others of their history do not."""
        present = self._step.present
        renamed: dict[int, int] = {}
        for old in set(self.histories):
            members = [index for index, history in enumerate(self.histories) if history == old]
            if 0 < sum(index in present for index in members) < len(members):
                renamed[old] = max(self._history) + 1
                self._history[renamed[old]] = self._history[old].copy()
        for index in present:
            self.histories[index] = renamed.get(self.histories[index], self.histories[index])

    def _begin_update(self, lr: float | Tensor, scale: Tensor, skip: Tensor) -> None:
        active = {history: self._history[history] for history in {self.histories[i] for i in self._step.present}}
        device = self.residence.step_device
        self.weights.begin(self._step.present, skip)
        settings = StepSettings(lr, scale.to(device), skip.to(device))
        self.update.begin(settings, dict(sorted(active.items())), self._weight_decays)

    def _update(self, bucket: Bucket) -> None:
        opened = self.residence.open(bucket)
        chunk = self.layout.chunks[bucket.chunk]
        present = [index for index in chunk.parameters if index in self._step.present]
        for history, part in self.layout.runs(bucket, present, self.histories):
            own = slice(part.start - bucket.start, part.stop - bucket.start)
            self.update.apply(
                opened.weight[own],
                opened.gradient[own],
                {name: tensor[own] for name, tensor in opened.state.items()},
                history=history,
                segment=bucket.segment,
            )
        self.residence.close(bucket)

    # Weights and state, for checkpoints.

    @torch.no_grad()
    def set_weight(self, index: int, value: Tensor) -> None:
        """Set a parameter's fp32 weight, and round it to the weight that is computed with. value: of any device."""
        place, arrays = self.layout.places[index], self.residence.arrays
        part = slice(place.start, place.stop)
        wide = value.detach().flatten().to(self.device, torch.float32)
        weight = torch.empty_like(wide, dtype=self.weights.dtype)
        if LOW in arrays:
            low = torch.empty_like(weight, dtype=torch.int16)
            round_to_bf16(wide, weight, low)
            arrays[LOW][part].copy_(low)
        else:
            round_to(wide, weight)
            if MASTER in arrays:
                arrays[MASTER][part].copy_(wide)
        self.weights.write(index, weight)

    def weight(self, index: int) -> Tensor:
        """A parameter's fp32 weight, as stored; for split weights a new tensor on the host."""
        self.residence.synchronize()
        place, arrays = self.layout.places[index], self.residence.arrays
        part, shape = slice(place.start, place.stop), self.parameters[index].shape
        if LOW in arrays:
            low = arrays[LOW][part]
            return join(self.weights.read(index).to(low.device), low).view(shape)
        return (arrays[MASTER][part] if MASTER in arrays else self.weights.read(index)).view(shape)

    def state(self, index: int) -> dict[str, Any]:
        """A parameter's optimizer state: views of what is of every number, and 0-dim tensors. Empty before a step."""
        history = self._history[self.histories[index]]
        if not history.has_state:
            return {}
        return self.slots(index) | history.scalars

    def slots(self, index: int) -> dict[str, Tensor]:
        """A parameter's state of every element, in the parameter's shape, as stored."""
        self.residence.synchronize()
        place, shape = self.layout.places[index], self.parameters[index].shape
        part = slice(place.start, place.stop)
        return {name: self.residence.arrays[name][part].view(shape) for name in self.update.slots}

    def set_scalars(self, scalars: Mapping[int, Mapping[str, Any]]) -> None:
        """Set the parameters' state other than `slots`, by their indices, after the slots were loaded."""
        known: dict[tuple[Any, ...], int] = {}
        self._history = {0: History()}
        for index in range(len(self.parameters)):
            own = scalars.get(index)
            key = () if own is None else tuple(sorted((name, float(value)) for name, value in own.items()))
            if own is None:
                self.histories[index] = 0
                continue
            if key not in known:
                known[key] = len(self._history)
                self._history[known[key]] = History(
                    {name: value.to(self.residence.step_device) for name, value in own.items()}, has_state=True
                )
            self.histories[index] = known[key]


def _sum_of_squares(gradients: Tensor) -> Tensor:
    """fp64, 0-dim. A GPU's kernels add fp32 numbers in a tree; a CPU's one after another, so they add fp64 there."""
    if gradients.is_cuda:
        return torch.linalg.vector_norm(gradients, dtype=torch.float32).double().square()
    parts = [part.double().square().sum() for part in gradients.split(TILE)]
    return torch.stack(parts).sum()


def state_slots(update: Update, dtype: torch.dtype, *, is_split: bool = False) -> dict[str, torch.dtype]:
    """All state of every number: the optimizer's, and the master weight of weights of `dtype`.

    is_split: keep the lower half of the fp32 weight alone (`master_weights`), for bf16.
    """
    if is_split and dtype != torch.bfloat16:
        raise ValueError(f"split master weights need bf16 weights, and these are {dtype}")
    slots = dict(update.slots)
    if dtype != torch.float32:
        slots |= {LOW: torch.int16} if is_split else {MASTER: torch.float32}
    return slots
