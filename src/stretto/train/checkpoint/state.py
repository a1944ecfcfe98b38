# SPDX-License-Identifier: Apache-2.0
"""Saves and loads the training state, on any grid and number of ranks.

A tensor is stored as the boxes that the ranks held; a rank of another grid reads only what overlaps its own shards.
Writing is atomic, and loading runs no code from the files (see `checkpoint.storage`).
"""

import errno
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.memory import PeerError, failures
from stretto.models import GPT
from stretto.optim.sparse import Masks, WeightMask
from stretto.optim.state.updates import AVERAGE
from stretto.parallel.layout import layout_of, place_on, view_box
from stretto.parallel.pipeline.stages import names_on_other_stages, whole_model
from stretto.train.checkpoint.folders import unreadable
from stretto.train.checkpoint.integrity import DamagedCheckpointError, DamagedError
from stretto.train.checkpoint.metadata import (
    CheckpointMetadata,
    check_description,
    differences,
    persistent_buffers,
    saved_tensors,
)
from stretto.train.checkpoint.storage import LazyBox, LocalBox, SafeReader, ShardedState, StateLoadPlanner
from stretto.train.checkpoint.torch_format import fit_to_model, read_index
from stretto.train.observe.metrics import DivergenceError
from stretto.train.optimizer import ShardOptimizer, local_shard
from stretto.train.stored_optimizer import StoredOptimizer


def check_shapes(path: Path, metadata: CheckpointMetadata, model: nn.Module) -> None:
    """Raise ValueError unless a checkpoint has the parameters of this model, which may be on the meta device.

    Persistent buffers are compared where the checkpoint has them: those of older versions do not.
    """
    found = metadata.parameter_shapes()
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wanted |= {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items() if name in found}
    if difference := next(differences(found, wanted), None):
        raise ValueError(f"the checkpoint {path} is of another model: {difference}")


def find_not_finite(state: Mapping[str, ShardedState]) -> str:
    """Find a weight (`model.<name>`) of this rank that is not finite. Returns its name; empty if there is none."""
    boxes = [(name, box) for name, whole in state.items() for box in whole.boxes]
    weights = [(name, box) for name, box in boxes if name.startswith("model.") and box.values.numel()]
    # Minimum and maximum propagate NaN, and need no copy of the weight. Weights on one device are read together.
    bounds = [torch.stack(torch.aminmax(box.read())).isfinite().all() for _, box in weights]
    devices = {bound.device for bound in bounds}
    are_finite = torch.stack(bounds).tolist() if len(devices) == 1 else [bool(bound) for bound in bounds]
    return next((name for (name, _), is_finite in zip(weights, are_finite, strict=True) if not is_finite), "")


def find_failure() -> str:
    """Describe the failed wait for another rank in any work that this rank has launched; empty if there is none."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        failures.check()
    except PeerError as failure:
        return str(failure)
    return ""


def raise_first(of_failures: Sequence[str], not_finite: Sequence[str], step: int) -> None:
    """Raise for what `find_failure` and `find_not_finite` have returned on all ranks, so that all raise the same.

    PeerError for a failed wait, DivergenceError for a weight that is not finite: the loss and norm of `step` do not
    show it, since they belong to the weights before the step.
    """
    for text in filter(None, of_failures):
        raise PeerError(text)
    for name in filter(None, not_finite):
        raise DivergenceError(f"{name.removeprefix('model.')} is not finite after step {step}, which is not saved")


def load_checkpoint(path: Path, model: nn.Module, optimizer: ShardOptimizer | None = None) -> CheckpointMetadata:
    """Read a checkpoint, whatever grid wrote it, into a model and its optimizer. Returns the index.

    Collective if there is a process group. `model` may be plain or returned by `parallelize`. Raises ValueError as
    `read_index`, `check_description` and `check_shapes` do.
    """
    whole = whole_model(model)
    metadata = fit_to_model(path, read_index(path), whole)
    check_description(path, metadata, asdict(model.config) if isinstance(model, GPT) else None, None)
    check_shapes(path, metadata, whole)
    check_description(path, metadata, None, None if optimizer is None else optimizer.name)
    if optimizer is not None:
        allocate_slots(path, metadata, optimizer, other_stages=names_on_other_stages(model))
    load_state(path, metadata, _without_missing_buffers(path, metadata, model, training_state(model, optimizer)))
    return metadata


def _without_missing_buffers(
    path: Path, metadata: CheckpointMetadata, model: nn.Module, state: dict[str, ShardedState]
) -> dict[str, ShardedState]:
    """Leave buffers out that a checkpoint does not have, and warn of it: older versions did not save any."""
    missing = [name for name in persistent_buffers(model) if f"model.{name}" not in metadata.tensors]
    if missing:
        warnings.warn(f"the checkpoint {path} has no {', '.join(missing)}: they stay as they are", stacklevel=2)
    return {name: whole for name, whole in state.items() if name.removeprefix("model.") not in missing}


def load_state(path: Path, metadata: CheckpointMetadata, state: dict[str, ShardedState]) -> None:
    """Read this rank's part of a training state from a checkpoint, in place. Collective if there is a process group.

    Each piece is checked before it is used. Raises DamagedCheckpointError, on all ranks, when bytes of the checkpoint
    are not those that were written; the state is then read in part.
    """

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may load without a group
            dcp.load(state, storage_reader=SafeReader(path, metadata), planner=StateLoadPlanner())
    except dcp.CheckpointException as error:  # a BaseException, with a traceback for each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        is_damaged = isinstance(cause, DamagedError)
        message = f"{unreadable(path)}: on rank {rank}, {cause if is_damaged else f'{type(cause).__name__}: {cause}'}"
        if is_damaged or (isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.ENOENT)):
            raise DamagedCheckpointError(message, path) from cause
        raise ValueError(message) from cause


def training_state(model: nn.Module, optimizer: ShardOptimizer | StoredOptimizer | None) -> dict[str, ShardedState]:
    """Collect parameters and persistent buffers as `model.<name>`, the optimizer's tensors as `optimizer.<name>.<key>`.

    For an optimizer with separate fp32 weights, these are the parameters; the loss scale is `training.<key>`.
    """
    state = {f"model.{name}": sharded_state_of(parameter) for name, parameter in saved_tensors(model).items()}
    if optimizer is None:
        return state
    stored = optimizer if isinstance(optimizer, StoredOptimizer) else None
    masks = stored.masks if stored is not None else None
    for name, parameter in optimizer.parameters.items():
        if stored is not None:
            state[f"model.{name}"] = _lazy_state_of(parameter, stored.read_later(name))
        for key, slot in optimizer.state(name).items():
            if not slot.dim():
                whole = ShardedState((), (LocalBox((), slot),))
            elif stored is not None and masks is not None:  # dense, so that training may be resumed without masks
                whole = _lazy_state_of(parameter, stored.read_later(name, key), slot.dtype)
            else:
                whole = sharded_state_of(parameter, slot)
            state[f"optimizer.{name}.{key}"] = whole
        if masks is not None and (mask := masks.masks.get(name)) is not None:
            state[f"mask.{name}"] = _lazy_state_of(parameter, mask.unpacked_bytes, torch.uint8)
    if masks is not None:
        sparsity = torch.tensor([masks.sparsity], device="cpu")
        state["training.sparsity"] = ShardedState((1,), (LocalBox((0,), sparsity),))
    return state if stored is None else state | _scale_state(stored)


def sharded_state_of(parameter: Tensor, shard: Tensor | None = None) -> ShardedState:
    """Describe this rank's boxes of a parameter, or of a tensor sharded like it, whose local part is `shard`."""
    shape, shard = tuple(parameter.shape), local_shard(parameter) if shard is None else shard
    if not isinstance(parameter, DTensor):
        return ShardedState(shape, (LocalBox((0,) * len(shape), shard),))
    boxes = layout_of(parameter).boxes(*place_on(parameter.device_mesh))
    return ShardedState(
        shape, tuple(LocalBox(box.offsets, view_box(shard, box.local_offsets, box.sizes)) for box in boxes)
    )


def load_masks(path: Path, metadata: CheckpointMetadata, model: nn.Module, sparsity: float) -> Masks | None:
    """Read the masks of a checkpoint of a pruned model, of this rank's shards; None for another, or to train all.

    sparsity: that of the run, 0 to train all. Collective. Raises ValueError for a checkpoint of another sparsity.
    """
    if "training.sparsity" not in metadata.tensors or not sparsity:
        return None
    found = torch.zeros(1, device="cpu")
    load_state(path, metadata, {"training.sparsity": ShardedState((1,), (LocalBox((0,), found),))})
    if not abs(float(found) - sparsity) <= 1e-6:
        raise ValueError(
            f"the checkpoint {path} was pruned with a sparsity of {float(found):g}, and train.sparsity is {sparsity}; "
            f"{float(found):g} would do, or 0, which trains all weights"
        )
    masks, parameters = dict[str, WeightMask](), dict(model.named_parameters())
    for full_name in metadata.tensors:
        name = full_name.removeprefix("mask.")
        if name == full_name:
            continue
        own = parameters.get(name)  # None on other stages of a pipeline, which take part in each read
        mask = None if own is None else torch.zeros_like(local_shard(own), dtype=torch.uint8, requires_grad=False)
        load_state(path, metadata, {} if own is None else {full_name: sharded_state_of(own, mask)})
        if mask is not None:
            masks[name] = WeightMask.of(mask)
    return Masks(masks, sparsity)


def _lazy_state_of(parameter: Tensor, read: Callable[[], Tensor], dtype: torch.dtype = torch.float32) -> ShardedState:
    """`sharded_state_of` a tensor of this dtype, whose local part `read` makes or returns."""
    like = torch.empty_like(local_shard(parameter), dtype=dtype, device="meta")
    whole = sharded_state_of(parameter, like)

    def values_of(number: int) -> Tensor:
        return sharded_state_of(parameter, read()).boxes[number].values

    lazy = [LazyBox(box.offsets, box.values, partial(values_of, number)) for number, box in enumerate(whole.boxes)]
    return ShardedState(whole.shape, tuple(lazy))


def _scale_state(optimizer: StoredOptimizer) -> dict[str, ShardedState]:
    """The loss scale's tensors, by the names that they have in a checkpoint."""
    scale = optimizer.loss_scale
    found = {} if scale is None else {"loss_scale": scale.value, "steps_of_loss_scale": scale.steps}
    return {f"training.{key}": ShardedState((1,), (LocalBox((0,), value),)) for key, value in found.items()}


def load_optimizer_state(
    path: Path, metadata: CheckpointMetadata, optimizer: StoredOptimizer, *, other_stages: Collection[str] = ()
) -> None:
    """Read a checkpoint's optimizer state into the store, whatever wrote it. The weights are in the store already.

    other_stages: the names of parameters on other pipeline stages.

    Collective. Raises ValueError for state that is not this optimizer's.
    """
    check_description(path, metadata, None, optimizer.name)
    state, scalars = dict[str, ShardedState](), dict[str, dict[str, Tensor]]()
    for full_name, entry in metadata.tensors.items():
        name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
        is_dropped = key == AVERAGE and not optimizer.has_averages
        if not full_name.startswith("optimizer.") or name in other_stages or is_dropped:
            if optimizer.masks is not None and full_name.startswith("optimizer.") and entry.shape:
                load_state(path, metadata, {})  # which other stages read
            continue
        parameter = optimizer.parameters.get(name)
        slots = {} if parameter is None else optimizer.slots(name)
        if parameter is None or entry.shape not in ((), tuple(parameter.shape)) or (entry.shape and key not in slots):
            raise ValueError(f"the checkpoint {path} has {full_name}, which is no state of this optimizer")
        own = scalars.setdefault(name, {})
        if entry.shape:
            if optimizer.masks is None:
                state[full_name] = sharded_state_of(parameter, slots[key])
                continue
            dense = torch.zeros_like(local_shard(parameter), dtype=slots[key].dtype, requires_grad=False)
            load_state(path, metadata, {full_name: sharded_state_of(parameter, dense)})  # one dense tensor at a time
            optimizer.set_slot(name, key, dense)
        else:
            own[key] = torch.zeros((), dtype=entry.torch_dtype, device="cpu")
            state[full_name] = ShardedState((), (LocalBox((), own[key]),))
    state |= {name: whole for name, whole in _scale_state(optimizer).items() if name in metadata.tensors}
    load_state(path, metadata, state)
    optimizer.set_scalars(scalars)


def allocate_slots(
    path: Path,
    metadata: CheckpointMetadata,
    optimizer: ShardOptimizer,
    *,
    exclude: tuple[str, ...] = (),
    other_stages: Collection[str] = (),
) -> None:
    """Allocate the optimizer's state, which its first step would allocate, to read a checkpoint into.

    exclude: prefixes of the names of parameters that belong to another optimizer. other_stages: the names of parameters
    on other pipeline stages.
    """
    for full_name, entry in metadata.tensors.items():
        is_other = full_name.removeprefix("optimizer.").startswith(exclude)
        if full_name.startswith("optimizer.") and not is_other:
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            if name in other_stages or (key == AVERAGE and optimizer.average is None):
                continue
            parameter = optimizer.parameters.get(name)
            if parameter is None or entry.shape not in ((), tuple(parameter.shape)):
                raise ValueError(f"the checkpoint {path} has {full_name}, which is no state of this optimizer")
            optimizer.state(name)[key] = optimizer.make_slot(name, entry.shape, entry.torch_dtype)
