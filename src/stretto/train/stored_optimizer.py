# SPDX-License-Identifier: Apache-2.0
"""Trains a parallelized model with optimizer state apart from it: 16-bit weights on the device, fp32 state in a store.

The store (`stretto.optim.state`) knows flat tensors alone; here are the model, the grid and torch.distributed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from stretto.optim.state.layout import ALIGNMENT, StateLayout
from stretto.optim.state.loss_scale import LossScale, LossScaleOptions
from stretto.optim.state.residence import DeviceResidence, HostResidence, StateResidence
from stretto.optim.state.store import (
    DEFAULT_BUCKET_SIZE,
    DEFAULT_BUFFER_SETS,
    DEFAULT_COARSENING,
    OptimizerStateStore,
    StoredParameter,
    state_slots,
)
from stretto.optim.state.updates import TILE, AdamWUpdate, MakeOptimizer, TiledUpdate, Update, find_slots
from stretto.parallel import Grid, clip_scale
from stretto.parallel.comm.collectives import Pending, all_reduce, start_all_reduce
from stretto.parallel.layout import layout_of, local
from stretto.train.config import RunConfig
from stretto.train.optimizer import local_shard

StateLocation = Literal["device", "host"]


@dataclass(frozen=True)
class StoreOptions:
    """Where optimizer state lies, and in what pieces it is stepped.

    location: "device" or "host". dtype: of the weights that are computed with, and of gradients. bucket_size: numbers
    of a bucket. buffer_sets: buckets that are on the device at once, of state on the host. coarsening: buckets that one
    all-reduce of gradients sums. tile: numbers that an optimizer without a kernel of its own steps at once. is_split:
    keep the lower halves of fp32 weights beside bf16 ones. accumulate_fp32: add up micro-batches' gradients in fp32.
    """

    location: StateLocation = "host"
    dtype: torch.dtype = torch.bfloat16
    bucket_size: int = DEFAULT_BUCKET_SIZE
    buffer_sets: int = DEFAULT_BUFFER_SETS
    coarsening: int = DEFAULT_COARSENING
    tile: int = TILE
    is_split: bool = False
    accumulate_fp32: bool = False
    loss_scale: LossScaleOptions | None = None


class StoredOptimizer:
    """An optimizer whose state is in an `OptimizerStateStore`; it takes over the parameters of a parallelized model.

    The model's fp32 parameters become views of one flat tensor of weights in `options.dtype`; their values, as they are
    now, become the fp32 weights of the store. Gradients go to the store, and `.grad` of parameters stays None. Frozen
    parameters are converted, too. update: AdamW's, or that of any elementwise optimizer (`build_update`).

    Raises ValueError for parameters that are not fp32, or that are not of a model that `parallelize` has returned.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        update: Update,
        *,
        name: str,
        weight_decay: float = 0.0,
        clip: float | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        self.name = name
        self.options = options = options or StoreOptions()
        reducer = getattr(model, "gradient_reducer", None)
        if reducer is None:
            raise ValueError("optimizer state apart takes a model that stretto.parallelize has returned")
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter_name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"{parameter_name} is {parameter.dtype}, but parameters must be fp32 when an optimizer takes them "
                    "over: it keeps them, and makes the weights that are computed with"
                )
        self._names = list(self.parameters)
        stored = [
            StoredParameter(
                name,
                local_shard(parameter).shape,
                reducer.sum_groups(parameter),
                layout_of(parameter).replicas(grid.sizes),
                weight_decay if parameter.dim() >= 2 else 0.0,
            )
            for name, parameter in self.parameters.items()
        ]
        sizes = [parameter.shape.numel() for parameter in stored]
        keys = [(parameter.key, parameter.replicas, parameter.weight_decay) for parameter in stored]
        bucket_size = min(options.bucket_size, -(-max(sum(sizes), 1) // ALIGNMENT) * ALIGNMENT)
        layout = StateLayout.of(sizes, keys, bucket_size=bucket_size, coarsening=options.coarsening)
        is_split = options.is_split and options.dtype == torch.bfloat16
        slots = state_slots(update, options.dtype, is_split=is_split)
        residence = make_residence(slots, layout, grid.device, options, bucket_size)
        gradient_dtype = torch.float32 if options.accumulate_fp32 else options.dtype
        self.loss_scale = None
        if options.loss_scale is not None:
            self.loss_scale = LossScale(options.loss_scale, grid.device)
        self.store = OptimizerStateStore(
            stored,
            layout,
            torch.zeros(layout.size, dtype=options.dtype, device=grid.device),
            torch.zeros(layout.size, dtype=gradient_dtype, device=grid.device),
            update,
            residence,
            _GridCommunicator(grid),
            clip=None if clip is None else lambda norm: clip_scale(norm, clip),
            loss_scale=self.loss_scale,
        )
        self._take_over(model)
        index = {parameter: number for number, parameter in enumerate(self.parameters.values())}
        reducer.send_to(_StoreSink(self.store, index))

    def _take_over(self, model: nn.Module) -> None:
        """Make the model's parameters views of the store's weights; one after another, so that fp32 ones are freed."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters.values())}
        known = {id(parameter) for parameter in model.parameters()}
        dtype = self.options.dtype

        def convert(tensor: Tensor) -> Tensor:
            if id(tensor) not in known or (tensor.dtype == dtype and id(tensor) not in numbers):
                return tensor  # a buffer, or a parameter that another module has converted
            assert isinstance(tensor, DTensor)
            shard = local_shard(tensor)
            number = numbers.pop(id(tensor), None)
            if number is None:
                shard = shard.to(dtype)
            else:
                self.store.set_weight(number, shard)
                place = self.store.layout.places[number]
                shard = self.store.weights[place.start : place.stop].view(shard.shape)
            return DTensor.from_local(
                shard,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )

        for module in model.modules():
            module._apply(convert, recurse=False)
        self._pointers = [local(parameter).data_ptr() for parameter in self.parameters.values()]

    def step(self, lr: float | Tensor) -> Tensor:
        """Update the parameters at learning rate `lr`, and drop the gradients. Returns the gradient's norm. Collective.

        The norm is fp64, 0-dim, before clipping. Raises ValueError if the model was converted after this optimizer was
        made.
        """
        for (name, parameter), pointer in zip(self.parameters.items(), self._pointers, strict=True):
            if local_shard(parameter).data_ptr() != pointer:
                raise ValueError(
                    f"{name} was converted or moved (model.to, .double) after its optimizer was made, which would "
                    "update the old numbers: make the optimizer afterwards"
                )
        norm = self.store.step(lr)
        # Kernels of the store do not count versions, which tell that gathered weights are stale.
        torch.autograd.graph.increment_version(list(self.parameters.values()))
        return norm

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on: multiplied by the loss scale, if there is one."""
        return loss if self.loss_scale is None else self.loss_scale.apply(loss)

    # For checkpoints, which hold fp32 weights and the optimizer's state, wherever they lie.

    def weight(self, name: str) -> Tensor:
        """This rank's shard of a parameter's fp32 weight."""
        return self.store.weight(self._names.index(name))

    def state(self, name: str) -> dict[str, Any]:
        """The state of one parameter, by key: tensors like its shard, and 0-dim ones. Empty before its first step."""
        return self.store.state(self._names.index(name))

    def slots(self, name: str) -> dict[str, Tensor]:
        """The tensors that a checkpoint's state of one parameter is read into, by key."""
        return self.store.slots(self._names.index(name))

    def set_scalars(self, scalars: Mapping[str, Mapping[str, Any]]) -> None:
        """Set what parameters' states have beside `slots`: 0-dim tensors by name and key."""
        self.store.set_scalars({self._names.index(name): own for name, own in scalars.items()})


def make_residence(
    slots: Mapping[str, torch.dtype],
    layout: StateLayout,
    device: torch.device,
    options: StoreOptions,
    bucket_size: int,
) -> StateResidence:
    """The state where `options` has it."""
    if options.location == "device":
        return DeviceResidence(slots, layout.size, device)
    return HostResidence(
        slots,
        layout.size,
        device,
        bucket_size=bucket_size,
        buffer_sets=options.buffer_sets,
        allocate=lambda count: torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda"),
    )


def adamw_update(*, betas: tuple[float, float], eps: float, tile: int = TILE) -> Update:
    """AdamW by a kernel that reads 16-bit gradients."""
    return AdamWUpdate(betas=betas, eps=eps, tile=tile)


def tiled_update(make: MakeOptimizer, *, tile: int = TILE) -> Update:
    """Steps of any elementwise optimizer of torch. ValueError for one that is not."""
    return TiledUpdate(make, find_slots(make), tile=tile)


def build_stored_optimizer(model: nn.Module, grid: Grid, run: RunConfig) -> StoredOptimizer:
    """Build the optimizer of a run whose `optimizer_state` is "device" or "host", of the model's present weights."""
    if run.optimizer == "sgd":
        update = tiled_update(
            lambda groups: SGD(groups, lr=run.lr, momentum=run.momentum, fused=grid.device.type == "cuda"),
            tile=run.state_tile,
        )
    else:
        update = adamw_update(betas=(run.beta1, run.beta2), eps=run.eps, tile=run.state_tile)
    options = StoreOptions(
        location="host" if run.optimizer_state == "host" else "device",
        dtype={"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[run.dtype],
        bucket_size=run.state_bucket,
        buffer_sets=run.state_buffers,
        coarsening=run.reduce_buckets,
        is_split=run.optimizer_state == "host" and run.split_weights,
        accumulate_fp32=run.accumulate_fp32,
        loss_scale=LossScaleOptions(run.loss_scale, run.loss_scale_steps) if run.dtype == "fp16" else None,
    )
    return StoredOptimizer(
        model, grid, update, name=run.optimizer, weight_decay=run.weight_decay, clip=run.clip, options=options
    )


class _StoreSink:
    """Takes the gradients that a model's reducer gives away."""

    def __init__(self, store: OptimizerStateStore, index: Mapping[nn.Parameter, int]) -> None:
        self._store, self._index = store, index

    def add(self, parameter: nn.Parameter, shard: Tensor) -> None:
        self._store.add(self._index[parameter], shard)

    def complete(self, parameter: nn.Parameter) -> None:
        self._store.complete(self._index[parameter])

    def finish(self) -> None:
        self._store.finish()


class _Sum:
    """A sum over several groups, in place, of which the first was started. wide: what travels, if not `gradients`."""

    def __init__(self, gradients: Tensor, wide: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        self._gradients = gradients
        self._pending: Pending | None = start_all_reduce(wide, groups[0]) if groups else Pending(wide)
        self._others = groups[1:]

    def wait(self) -> Tensor:
        if self._pending is not None:
            total, self._pending = self._pending.wait(), None
            for group in self._others:
                all_reduce(total, group)
            if total is not self._gradients:
                self._gradients.copy_(total)
        return self._gradients


class _GridCommunicator:
    """Sums over a grid's groups. The key of a parameter is the tuple of the groups that sum its gradient.

    On CPUs, 16-bit gradients of more than two ranks are summed in fp32 and rounded once. Gloo would round after each
    addition, in an order that depends on where in a message a number lies, and so on the size of buckets.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def start_sum(self, key: tuple[dist.ProcessGroup, ...], gradients: Tensor) -> _Sum:
        rounds_often = gradients.device.type == "cpu" and math.prod(group.size() for group in key) > 2
        return _Sum(gradients, gradients.float() if rounds_often else gradients, key)

    def sum_squares(self, squares: Tensor) -> Tensor:
        return all_reduce(squares, self._grid.group("world"))
