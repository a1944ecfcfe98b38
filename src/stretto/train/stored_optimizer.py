# SPDX-License-Identifier: Apache-2.0
"""Trains a parallelized model with separate optimizer state: 16-bit weights on the device, fp32 state in a store.

The store (`stretto.optim.state`) knows flat tensors alone; here are the model, the grid and torch.distributed.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.execution import BUCKET_ALIGNMENT, StateOptions, StepPlace
from stretto.memory import failures
from stretto.memory.pinned import allocate_pinned
from stretto.optim.averages import AveragedUpdate
from stretto.optim.sparse import FullIndex, Masks, SparseIndex
from stretto.optim.sparse.weights import SparseWeights
from stretto.optim.state.layout import StateLayout
from stretto.optim.state.loss_scale import LossScale, LossScaleOptions
from stretto.optim.state.residence import DeviceResidence, HostResidence, HostStepResidence, StateResidence
from stretto.optim.state.store import Communicator, OptimizerStateStore, StoredParameter, state_slots
from stretto.optim.state.updates import (
    AVERAGE,
    MASTER,
    TILE,
    AdamWUpdate,
    MakeOptimizer,
    SGDUpdate,
    TiledUpdate,
    Update,
    find_slots,
)
from stretto.parallel import Grid, clip_scale
from stretto.parallel.comm.collectives import Pending, all_reduce, start_all_reduce
from stretto.parallel.comm.two_level import TwoLevels
from stretto.parallel.layout import check_is_sharded, layout_of, local, place_like
from stretto.parallel.state import require_state
from stretto.train.config import RunConfig
from stretto.train.optimizer import local_shard
from stretto.train.pruning import PrunedParameters

logger = logging.getLogger(__name__)
MAX = dist.ReduceOp.MAX

MakeUpdate = Callable[[bool], Update]
"""Makes the update; True: for steps on the host."""


class StoredOptimizer:
    """An optimizer whose state is in an `OptimizerStateStore`; it takes over the parameters of a parallelized model.

    The model's fp32 parameters become views of one flat tensor of weights in `dtype`; their values, as they are
    now, become the fp32 weights of the store. Gradients are written to the store, and `.grad` of parameters remains
    None. Frozen parameters are converted, too. make: `adamw_update`, `sgd_update`, or `tiled_update` of any elementwise
    optimizer; or `averaged_update` of one of these. masks: what is left of pruned parameters
    (`stretto.train.pruning`); the store holds nothing else of them, and all weights are dense tensors of their own,
    with zeros.

    Raises ValueError for parameters that are not fp32, or that are not of a model that `parallelize` has returned.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        make: MakeUpdate,
        *,
        name: str,
        weight_decay: float = 0.0,
        clip: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        options: StateOptions | None = None,
        loss_scale: LossScaleOptions | None = None,
        skips_nonfinite: bool = False,
        masks: Masks | None = None,
    ) -> None:
        self.name, self.dtype = name, dtype
        options = options or StateOptions("host")
        state = require_state(model, "StoredOptimizer")
        self._reducer = reducer = state.gradient_reducer
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter_name, parameter in model.named_parameters():
            check_is_sharded(parameter_name, parameter)
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"{parameter_name} is {parameter.dtype}, but parameters must be fp32 when an optimizer takes them "
                    "over: it keeps them, and makes the weights that are computed with"
                )
        self._numbers = {name: number for number, name in enumerate(self.parameters)}
        self._model, self._grid, self._weight_decay = model, grid, weight_decay
        self.options = choose_step_place(options, make, dtype, grid)
        self.loss_scale = None if loss_scale is None else LossScale(loss_scale, grid.device)
        self._build = partial(
            build_store,
            make=make,
            dtype=dtype,
            options=self.options,
            device=grid.device,
            communicator=GridCommunicator(grid, reducer.levels, averages=reducer.averages),
            clip=None if clip is None else lambda norm: clip_scale(norm, clip),
            loss_scale=self.loss_scale,
            skips_nonfinite=skips_nonfinite,
        )
        self.store = self._make_store(masks)
        self._take_over(model)
        self._start(model)
        self._note_written()

    def _make_store(self, masks: Masks | None) -> OptimizerStateStore:
        """Make the store of all parameters; of those that masks prune, it has what is left."""
        self._pruned = (
            None
            if masks is None
            else PrunedParameters(
                self.parameters, masks, self._reducer.sharded, self.options.index, self.dtype, self._grid
            )
        )
        # Now that they are known to fit. Only checkpoints need them besides the indices.
        self.masks = None if masks is None else masks.cpu()
        indices = None if self._pruned is None else self._pruned.indices
        stored = [
            StoredParameter(
                name,
                local_shard(parameter).shape if indices is None else torch.Size((indices[name].count,)),
                self._reducer.sum_groups(parameter),
                layout_of(parameter).replicas(self._grid.layout_sizes),
                self._weight_decay if parameter.dim() >= 2 else 0.0,
            )
            for name, parameter in self.parameters.items()
        ]
        return self._build(stored, indices=None if indices is None else list(indices.values()))

    def _start(self, model: nn.Module) -> None:
        """Take gradients from now on."""
        if self._pruned is not None:
            self._pruned.send(require_state(model, "StoredOptimizer"))
        self.store.prepare()
        index = {parameter: number for number, parameter in enumerate(self.parameters.values())}
        self._reducer.send_to(_StoreSink(self.store, index, model))

    @torch.no_grad()
    def prune(self, masks: Masks) -> None:
        """Keep from now on what `masks` leave of the parameters, of their fp32 weights and of their state.

        Between steps. Takes the memory of both states until it returns. Collective. Raises ValueError between a
        backward pass and its step.
        """
        if self.store.has_gradients:
            raise ValueError(
                f"prune of {self.name} between a backward pass and its step would drop the gradients: call step(), or "
                "zero_grad() to do without them, before prune"
            )
        before, pruned, scalars = self.store, self._pruned, {}
        history = {name: self.state(name) for name in self.parameters}

        def expand(name: str, left: Tensor) -> Tensor:
            return left if pruned is None else pruned.expand_later(name, lambda: left)()

        self.store = self._make_store(masks)
        for name, number in self._numbers.items():
            self._set_pruned(name, local_shard(self.parameters[name]), expand(name, before.weight(number)))
            scalars[name] = {key: value for key, value in history[name].items() if not value.dim()}
        self._start(self._model)
        for name in self.parameters:
            for key, slot in history.pop(name).items():
                if slot.dim():
                    self.set_slot(name, key, expand(name, slot))
        self.set_scalars({name: own for name, own in scalars.items() if own})
        self._note_written()

    def _set_pruned(self, name: str, shard: Tensor, weight: Tensor) -> None:
        """Have the store update what is left of a shard, which it sets to `weight`; of one that z shards, its share."""
        assert self._pruned is not None
        assert isinstance(self.store.weights, SparseWeights)
        self.store.weights.attach(self._numbers[name], self._pruned.home(name, shard))
        self.store.set_weight(self._numbers[name], self._pruned.compress(name, weight))

    def _take_over(self, model: nn.Module) -> None:
        """Make the model's parameters views of the store's weights, or the dense weights of what it stores; one after
        another, so that fp32 ones are freed."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters.values())}
        known = {id(parameter) for parameter in model.parameters()}
        dtype, names = self.dtype, list(self.parameters)

        def convert(tensor: Tensor) -> Tensor:
            if id(tensor) not in known or (tensor.dtype == dtype and id(tensor) not in numbers):
                return tensor  # a buffer, or a parameter that another module has converted
            assert isinstance(tensor, DTensor)
            shard = local_shard(tensor)
            number = numbers.pop(id(tensor), None)
            if number is None:
                shard = shard.to(dtype)
            elif self._pruned is not None:
                wide, shard = shard, shard.new_zeros(shard.shape, dtype=dtype)
                self._set_pruned(names[number], shard, wide)
            else:
                self.store.set_weight(number, shard)
                shard = self.store.weights.read(number).view(shard.shape)
            return place_like(shard, tensor)

        for module in model.modules():
            module._apply(convert, recurse=False)
        self._pointers = [local(parameter).data_ptr() for parameter in self.parameters.values()]

    def step(self, lr: float | Tensor, loss: Tensor | None = None) -> Tensor:
        """Update the parameters at learning rate `lr`, and drop the gradients. Returns the gradient's norm. Collective.

        The norm is fp64, 0-dim, before clipping. loss: 0-dim, the same on all ranks; with `skips_nonfinite`, nothing is
        updated where it or the norm is not finite, as the device decides. Raises ValueError if the model was converted
        or loaded after this optimizer was made.
        """
        self._check_unwritten()
        norm = self.store.step(lr, loss)
        self._note_written()
        return norm

    def _check_unwritten(self) -> None:
        states = zip(self.parameters.items(), self._pointers, self._versions, strict=True)
        with torch._C.DisableTorchFunctionSubclass():
            for (name, parameter), pointer, version in states:
                if parameter._local_tensor.data_ptr() != pointer:  # type: ignore[attr-defined]
                    raise ValueError(
                        f"{name} was converted or moved (model.to, .double) after its optimizer was made, which would "
                        "update the old numbers: make the optimizer afterwards"
                    )
                if parameter._version != version:
                    raise ValueError(
                        f"{name} was written (load_state_dict, copy_, prune) after its optimizer was made, whose fp32 "
                        "weights are others: make the optimizer afterwards"
                    )

    @property
    def has_averages(self) -> bool:
        """True if moving averages of the fp32 weights are state, too (`averaged_update`)."""
        return AVERAGE in self.store.update.slots

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the model compute with the averages, where there are any. It takes the memory of one more copy of the
        weights that it computes with. Collective for pruned weights that z shards."""
        weights, before = self.store.weights, list[Tensor]()
        if self.has_averages:
            before = [weights.read(number).clone() for number in range(len(self.parameters))]
            self._compute_with([self.store.slots(number)[AVERAGE] for number in range(len(self.parameters))])
        try:
            yield
        finally:
            self._compute_with(before)

    @torch.no_grad()
    def _compute_with(self, values: Sequence[Tensor]) -> None:
        for number, value in enumerate(values):
            self.store.weights.write(number, value.flatten().to(self._grid.device, self.dtype))
        self._note_written()

    def _note_written(self) -> None:
        """After the store has written the weights."""
        if self._pruned is not None:
            self._pruned.write_rows()
        # Kernels of the store do not count versions, which show that gathered weights, or an earlier pass's, are stale.
        parameters = list(self.parameters.values())
        shards = [parameter._local_tensor for parameter in parameters]  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():  # torch 2.11 calls Python at each read
            torch.autograd.graph.increment_version([*parameters, *shards])
            self._versions = [parameter._version for parameter in parameters]

    def zero_grad(self) -> None:
        """Drop all gradients since the last step, which drops its own: for a backward pass that is not to count."""
        self.store.drop()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on: multiplied by the loss scale, if there is one."""
        return loss if self.loss_scale is None else self.loss_scale.apply(loss)

    def describe(self) -> str:
        """Say where state is stored and how it is updated, for the log."""
        store, options = self.store, self.options
        numbers, buckets = store.layout.size, len(store.layout.buckets)
        state = sum(array.numel() * array.element_size() for array in store.residence.arrays.values())
        pinned = "pinned " if store.device.type == "cuda" else ""
        where = "on the device" if options.location == "device" else f"in {pinned}host memory"
        if options.location == "host":
            where += f", stepped on the {options.step_on}"
        left = ""
        if self._pruned is not None:
            dense = sum(local_shard(parameter).numel() for parameter in self.parameters.values())
            left = f" of {dense:,}, which are left, with {self._pruned.num_bytes / 1e9:,.3g} GB of indices"
        return (
            f"optimizer state of rank 0: {numbers:,} numbers{left}, {state / 1e9:,.3g} GB {where}, in {buckets} "
            "buckets; "
            f"gradients are summed in {len(store.layout.chunks)} messages, and a bucket is updated "
            f"{store.step_order.value}"
        )

    # For checkpoints, which hold fp32 weights and the optimizer's state, wherever they are stored.

    def weight(self, name: str) -> Tensor:
        """This rank's shard of a parameter's fp32 weight. Collective for a pruned one that z shards."""
        return self.read_later(name)()

    @torch.no_grad()
    def read_later(self, name: str, key: str | None = None) -> Callable[[], Tensor]:
        """A function that returns this rank's shard of a parameter's fp32 weight, or of its state `key`, as they are.

        What ranks exchange for a pruned weight that z shards is exchanged here. Collective.
        """
        number = self._numbers[name]

        def read() -> Tensor:
            return self.store.weight(number) if key is None else self.store.slots(number)[key]

        return read if self._pruned is None else self._pruned.expand_later(name, read)

    @torch.no_grad()
    def set_slot(self, name: str, key: str, value: Tensor) -> None:
        """Set a parameter's state `key` from a tensor like its shard. Collective for a pruned weight that z shards."""
        slot = self.store.slots(self._numbers[name])[key]
        slot.copy_(value if self._pruned is None else self._pruned.compress(name, value))

    def masters_on_device(self) -> dict[str, Tensor]:
        """The fp32 weights on the device, in addition to the weights of the computation, by name."""
        store = self.store
        has_any = self.options.location == "device" and MASTER in store.residence.arrays
        return {name: store.weight(self._numbers[name]) for name in self.parameters} if has_any else {}

    def state(self, name: str) -> dict[str, Any]:
        """The state of one parameter, by key: tensors like its shard, or flat, of what is left of it; and 0-dim ones.
        Empty before its first step."""
        return self.store.state(self._numbers[name])

    def slots(self, name: str) -> dict[str, Tensor]:
        """The tensors that a checkpoint's state of one parameter is read into, by key."""
        return self.store.slots(self._numbers[name])

    def set_scalars(self, scalars: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the entries of parameters' states other than `slots`: 0-dim tensors by name and key."""
        self.store.set_scalars({self._numbers[name]: own for name, own in scalars.items()})


def build_store(
    parameters: Sequence[StoredParameter],
    make: MakeUpdate,
    dtype: torch.dtype,
    options: StateOptions,
    device: torch.device,
    communicator: Communicator,
    *,
    clip: Callable[[Tensor], Tensor] | None = None,
    loss_scale: LossScale | None = None,
    skips_nonfinite: bool = False,
    indices: Sequence[SparseIndex] | None = None,
) -> OptimizerStateStore:
    """The store of these parameters, with its state where `options` has it. indices: of what is left of each."""
    sizes = [parameter.shape.numel() for parameter in parameters]
    keys = [
        (parameter.key, parameter.replicas, parameter.weight_decay, isinstance(index, FullIndex))
        for parameter, index in zip(parameters, indices or parameters, strict=True)
    ]
    bucket_size = min(options.bucket_size, -(-max(sum(sizes), 1) // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT)
    layout = StateLayout.of(sizes, keys, bucket_size=bucket_size, coarsening=options.coarsening)
    steps_on_host = options.location == "host" and options.step_on == "host"
    update = make(steps_on_host)
    is_split = options.splits(dtype.itemsize, is_bf16=dtype == torch.bfloat16)
    slots = state_slots(update, dtype, is_split=is_split)
    residence: StateResidence
    if options.location == "host":
        residence = (HostStepResidence if steps_on_host else HostResidence)(
            slots,
            layout.size,
            device,
            bucket_size=bucket_size,
            buffer_sets=options.buffer_sets,
            allocate=lambda count: allocate_pinned(count, device),
        )
    else:
        residence = DeviceResidence(slots, layout.size, device, early=(MASTER,))
    return OptimizerStateStore(
        parameters,
        layout,
        (dtype, torch.float32 if options.accumulates_fp32 else dtype),
        device,
        update,
        residence,
        communicator,
        clip=clip,
        loss_scale=loss_scale,
        skips_nonfinite=skips_nonfinite,
        weights=None if indices is None else SparseWeights(layout, dtype, device, indices),
    )


def adamw_update(*, betas: tuple[float, float], eps: float, tile: int = TILE) -> MakeUpdate:
    """AdamW: by a kernel that reads 16-bit gradients; on the host by torch's fused AdamW, in tiles."""

    def make(on_host: bool) -> Update:
        if not on_host:
            return AdamWUpdate(betas=betas, eps=eps, tile=tile)
        return TiledUpdate(
            lambda groups: torch.optim.AdamW(groups, lr=1e-3, betas=betas, eps=eps, fused=True),
            AdamWUpdate.slots,
            tile=min(tile, HOST_TILE),
        )

    return make


# Elements that the host updates at a time: with their gradients and state they fit into the cores' caches.
HOST_TILE = 1 << 20


def sgd_update(*, momentum: float = 0.0, tile: int = TILE) -> MakeUpdate:
    """SGD with momentum, as torch's: by a kernel that reads 16-bit gradients."""
    return lambda on_host: SGDUpdate(momentum=momentum, tile=min(tile, HOST_TILE) if on_host else tile)


def tiled_update(make: MakeOptimizer, *, tile: int | None = None) -> MakeUpdate:
    """Steps of any elementwise optimizer of torch, in tiles of so many numbers (None: by the device).

    ValueError for one that is not elementwise.
    """
    slots = find_slots(make)
    return lambda on_host: TiledUpdate(make, slots, tile=min(tile or HOST_TILE, HOST_TILE) if on_host else tile)


def averaged_update(make: MakeUpdate, decay: float) -> MakeUpdate:
    """The same steps, after which each fp32 weight moves its average: `average += (1 - decay) * (weight - average)`."""
    return lambda on_host: AveragedUpdate(make(on_host), decay)


_TRIED_BUCKETS = 6  # on which the two places of a step are compared


def choose_step_place(options: StateOptions, make: MakeUpdate, dtype: torch.dtype, grid: Grid) -> StateOptions:
    """The options with `step_on` decided. "auto" steps some buckets on the device, and on the host, and compares.

    The slowest rank counts, and all ranks choose the same. Collective if it is "auto".
    """
    if options.location != "host" or options.step_on != "auto":
        return replace(options, step_on="device") if options.step_on == "auto" else options
    size = options.bucket_size * _TRIED_BUCKETS
    parameter = StoredParameter("tried", torch.Size((size,)), (), 1, 0.0)
    places: list[StepPlace] = ["device", "host"]
    seconds = []
    for place in places:
        tried = replace(options, step_on=place)
        store = build_store([parameter], make, dtype, tried, grid.device, NoRanks())
        store.prepare()
        for _ in range(2):  # the first one compiles kernels
            store.add(0, torch.zeros(size, dtype=dtype, device=grid.device))
            store.finish()
            failures.synchronize(grid.device)
            began = time.perf_counter()
            store.step(1e-3)
            store.residence.synchronize()
            failures.synchronize(grid.device)
            last = time.perf_counter() - began
        seconds.append(last)
        del store
    slowest = all_reduce(torch.tensor(seconds, dtype=torch.float64, device=grid.device), grid.group("world"), MAX)
    chosen = places[int(slowest.argmin())]
    logger.info(
        "optimizer steps are computed on the %s: a step of %d numbers takes %.3g s on the device, %.3g s on the host",
        chosen,
        size,
        *slowest.tolist(),
    )
    return replace(options, step_on=chosen)


def build_stored_optimizer(model: nn.Module, grid: Grid, run: RunConfig, masks: Masks | None = None) -> StoredOptimizer:
    """Build the optimizer of a run whose `optimizer_state` is "device" or "host", of the model's present weights."""
    if run.optimizer == "sgd":
        make = sgd_update(momentum=run.momentum)
    else:
        make = adamw_update(betas=(run.beta1, run.beta2), eps=run.eps)
    return StoredOptimizer(
        model,
        grid,
        make if run.ema is None else averaged_update(make, run.ema),
        name=run.optimizer,
        weight_decay=run.weight_decay,
        clip=run.clip,
        dtype={"fp16": torch.float16, "fp32": torch.float32}.get(run.dtype, torch.bfloat16),
        options=run.state,
        loss_scale=LossScaleOptions(run.loss_scale, run.loss_scale_steps) if run.dtype == "fp16" else None,
        skips_nonfinite=run.skips_nonfinite,
        masks=masks,
    )


class _StoreSink:
    """Takes the gradients that a model's reducer gives away."""

    def __init__(self, store: OptimizerStateStore, index: Mapping[nn.Parameter, int], model: nn.Module) -> None:
        self._store, self._index = store, index
        self._frozen = {p: name for name, p in model.named_parameters() if p not in index}

    def add(self, parameter: nn.Parameter, shard: Tensor) -> None:
        number = self._index.get(parameter)
        if number is None:
            name = self._frozen.get(parameter, f"a deleted parameter of shape {list(parameter.shape)}")
            raise ValueError(
                f"{name} has a gradient, but was frozen when its optimizer was made, which has no state for it: make "
                "the optimizer while all are unfrozen that will be trained, and freeze them then"
            )
        pruned = parameter.pruned  # type: ignore[attr-defined]
        # A gradient that comes by autograd, of a term outside of the forward pass, is of this rank's rows, while z's
        # reduce-scatter leaves this rank's share of what is left.
        self._store.add(number, shard if pruned is None or shard.dim() == 1 else pruned.compress(shard))

    def complete(self, parameter: nn.Parameter) -> None:
        self._store.complete(self._index[parameter])

    def end_pass(self) -> None:
        self._store.weights.flush()

    def finish(self) -> None:
        self._store.finish()


class _GradientSum:
    """A sum over several groups, in place, of which the first was started. wide: the sent tensor, if different."""

    def __init__(
        self, gradients: Tensor, wide: Tensor, groups: Sequence[dist.ProcessGroup], levels: TwoLevels | None
    ) -> None:
        self._gradients = gradients
        self._levels = levels
        self._pending: Pending | None = start_all_reduce(wide, groups[0], levels=levels) if groups else Pending(wide)
        self._others = groups[1:]

    def wait(self) -> Tensor:
        if self._pending is not None:
            total, self._pending = self._pending.wait(), None
            for group in self._others:
                start_all_reduce(total, group, levels=self._levels).wait()
            if total is not self._gradients:
                self._gradients.copy_(total)
        return self._gradients


class GridCommunicator:
    """Sums over a grid's groups. The key of a parameter is the tuple of the groups that sum its gradient.

    On CPUs, 16-bit gradients of more than two ranks are summed in fp32 and rounded once. Gloo would round after each
    addition, in an order that depends on an element's position in the message, and so on the size of buckets.
    averages: divides by the number of ranks, before gradients are sent.
    """

    def __init__(self, grid: Grid, levels: TwoLevels | None = None, *, averages: bool) -> None:
        self._grid = grid
        self._levels = levels
        self._averages = averages

    def start_sum(self, key: tuple[dist.ProcessGroup, ...], gradients: Tensor) -> _GradientSum:
        ranks = math.prod(group.size() for group in key)
        rounds_often = gradients.device.type == "cpu" and ranks > 2
        if self._averages and ranks > 1:
            gradients /= ranks
        return _GradientSum(gradients, gradients.float() if rounds_often else gradients, key, self._levels)

    def sum_squares(self, squares: Tensor) -> Tensor:
        return all_reduce(squares, self._grid.group("world"))


class NoRanks:
    """A communicator of one rank."""

    def start_sum(self, key: Any, gradients: Tensor) -> Pending:
        return Pending(gradients)

    def sum_squares(self, squares: Tensor) -> Tensor:
        return squares
