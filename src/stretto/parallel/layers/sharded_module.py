# SPDX-License-Identifier: Apache-2.0
"""The base class of the modules that `parallelize` puts in: state dicts, conversions, refused copies and wrappers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.graph_functions import GraphFunction
from stretto.parallel.grid import Grid
from stretto.parallel.layers.local_tensors import LocalTensors, TakeGradient
from stretto.parallel.layers.token_shards import CutPart, GatherPart
from stretto.parallel.layout import has_layout, layout_of, shard_like
from stretto.parallel.low_precision_weights import copy_of
from stretto.parallel.segment_planner import has_segments, refuse_default_planners
from stretto.parallel.sharded_parameter import note_layout


def refuse_compiler() -> None:
    """Raise ValueError where torch.compile traces an invariant layer: its code would be of other bits."""
    if torch.compiler.is_compiling():
        _refuse_compiler()


@torch.compiler.disable
def _refuse_compiler() -> None:
    raise ValueError(
        "torch.compile of a model with invariant=True: what a compiler fuses has other bits in each batch; call the "
        "model without it, or parallelize with invariant=False"
    )


class ShardedModule(nn.Module):
    """A module whose parameters are shards on a grid.

    `load_state_dict` takes the model's own state dict, and a plain model's, of whose whole tensors each rank keeps its
    part. Conversions (`.to`, `.double`) keep what Stretto has noted on the parameters. Operations that would lose it
    raise ValueError: `load_state_dict(assign=True)`, `copy.deepcopy` and pickling.

    The attribute `is_local`: it computes with this rank's shards as they are, sends nothing and keeps nothing for
    recomputation. It then runs as a plain module does, with `local_tensors`, and torch.compile traces it so.
    `in_graphs`: what compiled graphs call in its place otherwise.
    """

    def __init__(self, gradients: GradientReducer | None = None) -> None:
        super().__init__()
        self.gradients = gradients
        self.is_local = False
        self.in_graphs: GraphFunction | None = None
        self.followed: LocalTensors | None = None

    def local_tensors(self) -> tuple[Tensor | None, ...] | None:
        """The shards of `gradients_of_shards` as plain tensors, through which gradients flow to the parameters; None
        before the model's first forward pass."""
        followed = self.followed
        if followed is None:
            return None
        gradients = self.gradients
        if torch.compiler.is_dynamo_compiling() or (gradients is not None and gradients.is_in_forward):
            return followed.tensors  # the model's forward pass has looked
        if not followed.is_outdated(self._parameters):
            return followed.tensors
        self.follow_weights(followed.stream)
        return self.followed.tensors if self.followed is not None else None

    def weights_in_graphs(self) -> Sequence[Tensor]:
        """The weights of which `in_graphs` makes the gradients itself."""
        return ()

    def can_be_local(self, grid: Grid) -> bool:
        """True if `is_local` may be set, on a grid without stages."""
        return False

    def gradients_of_shards(self) -> Mapping[str, TakeGradient | None]:
        """The parameters of which it computes with shards, and what takes their gradients; None: as if autograd had
        accumulated them."""
        return {}

    def forget_weights(self) -> None:
        """Free autograd's nodes of the parameters, which keep the stream on which they were made."""
        self.followed = None
        if self.in_graphs is not None:
            self.in_graphs.follow()

    def follow_weights(self, stream: int | None) -> None:
        """Take the parameters as they are now, converted, frozen or unfrozen, for compiled graphs and to compute with
        shards. stream: the current one, on which autograd will accumulate."""
        self.forget_weights()
        self.followed = LocalTensors(self._parameters, stream)
        # Of one that replaced a parameter nothing is known: what computes with it says so.
        if self.gradients is not None and all(map(has_layout, self.parameters(recurse=False))):
            self.followed.take(self.gradients_of_shards(), self.gradients)
        if self.in_graphs is not None:
            self.in_graphs.follow(*self.weights_in_graphs())

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        noted = {
            name: (layout_of(parameter), copy_of(parameter)) for name, parameter in self.named_parameters(recurse=False)
        }
        self.forget_weights()  # torch swaps no tensor to which a graph leads
        try:
            super()._apply(fn, recurse)
        finally:
            if self.in_graphs is not None:
                self.in_graphs.follow(*self.weights_in_graphs())
        for name, (layout, copy) in noted.items():
            parameter = self.get_parameter(name)
            note_layout(parameter, layout)
            if copy is not None:
                copy.move(parameter)
            if self.gradients is not None:
                self.gradients.restore_hooks(parameter)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any, **options: Any
    ) -> None:
        whole = whole_as_shards(state_dict, prefix, local_metadata, self._parameters)
        if whole:
            state_dict = {**state_dict, **whole}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest, **options)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._parameters:
            if f"{prefix}{name}" in destination:
                refuse_default_planners(destination[f"{prefix}{name}"])
        # torch.distributed.checkpoint loads into the tensors of a state dict, and no version shows it.
        for parameter in self.parameters(recurse=False):
            copy = copy_of(parameter)
            if copy is not None:
                copy.forget()

    def reset_parameters(self) -> NoReturn:
        """Raise ValueError: this rank has a part of the parameters, and would draw what others draw for their parts."""
        raise ValueError(
            "reset_parameters after stretto.parallelize would give the parts of a weight the same numbers: call it "
            "before, or copy whole tensors into the model by load_state_dict"
        )

    def __getstate__(self) -> Any:
        refuse_copy()


def whole_as_shards(
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter | None],
) -> dict[str, Tensor]:
    """This rank's shards of a state dict's whole tensors, for some of a module's own parameters.

    Raises ValueError for `load_state_dict(assign=True)`, and for shards of another grid, and RuntimeError for fused
    parameters that torch has mixed up.
    """
    if local_metadata.get("assign_to_params_buffers"):
        whose = prefix.rstrip(".") or "the model"
        raise ValueError(
            f"load_state_dict(assign=True) would replace the parameters of {whose}, which is sharded: leave assign "
            "out to copy their values"
        )
    own = {f"{prefix}{name}": parameter for name, parameter in parameters.items() if parameter is not None}
    for key, parameter in own.items():
        found = state_dict.get(key)
        if found is parameter and has_segments(parameter):
            raise RuntimeError(
                f"the state dict's {key} is the model's own parameter, as state_dict(keep_vars=True) gives it, where "
                "there is nothing to load, and as set_model_state_dict leaves it: with broadcast_from_rank0=True torch "
                "writes one box of a fused parameter on each rank, and x cuts this one into several, which may have "
                "other numbers now. Give every rank the whole tensors, and load them by load_state_dict, which takes "
                "some of them, too (strict=False)"
            )
        if isinstance(found, DTensor) and isinstance(parameter, DTensor) and found.device_mesh != parameter.device_mesh:
            raise ValueError(
                f"the state dict's {key} is sharded over {_describe_mesh(found)}, and the model's over "
                f"{_describe_mesh(parameter)}: load_state_dict does not move shards between grids. Pass whole tensors, "
                "stretto.parallel.gather(parameter) of each of the first model's, on every rank, or save and load by "
                "torch.distributed.checkpoint"
            )
    return {
        key: shard_like(state_dict[key], parameter)
        for key, parameter in own.items()
        if _is_whole(state_dict.get(key), parameter)
    }


def _describe_mesh(tensor: DTensor) -> str:
    names = tensor.device_mesh.mesh_dim_names or ()
    return ", ".join(f"{name}={size}" for name, size in zip(names, tensor.device_mesh.shape, strict=True)) or "no axis"


def _is_whole(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """True for a whole tensor, as a state dict of the unparallelized model has."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape


def refuse_copy(_protocol: object = None) -> NoReturn:
    """Raise ValueError: a parallelized model is neither copied nor pickled."""
    raise ValueError(
        "a parallelized model can be neither copied nor pickled (it holds process groups): "
        "parallelize a second model, and load_state_dict the first one's state_dict into it"
    )


def place_shared(owner: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Let a plain module hold, beside the `ShardedModule` whose it is, a sharded parameter under the name `key`.

    The other module converts it, and state dicts may be whole. Code that computes with it here fails in torch, which
    does not mix a DTensor with plain tensors.
    """
    owner._parameters[key] = parameter
    convert = owner._apply

    def convert_others(fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        owner._parameters[key] = None
        try:
            convert(fn, recurse)
        finally:
            owner._parameters[key] = parameter
        return owner

    def load(_: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        state_dict |= whole_as_shards(state_dict, prefix, local_metadata, {key: parameter})

    owner._apply = convert_others  # type: ignore[method-assign]
    owner.register_load_state_dict_pre_hook(load)


class _FeaturesNote(ref[Tensor]):
    """A weak reference to a module's output, of which the features are split over `axis`. key: the output's id."""

    __slots__ = ("axis", "key")
    axis: str
    key: int


# By the outputs' ids, for as long as these live. torch's WeakTensorKeyDictionary takes four times as long.
_notes: dict[int, _FeaturesNote] = {}


def note_features(y: Tensor, axis: str) -> Tensor:
    """Note over which axis an output's features are split, for `check_features` of the next module."""
    if not torch.compiler.is_dynamo_compiling():
        note = _FeaturesNote(y, _forget)
        note.axis, note.key = axis, id(y)
        _notes[note.key] = note
    return y


def _forget(note: _FeaturesNote) -> None:
    if _notes.get(note.key) is note:  # another output may have the id already
        del _notes[note.key]


def check_features(x: Tensor, axis: str, name: str) -> None:
    """Raise ValueError if an input is known to be split over another axis than a module takes.

    Where x and y are of one size, shapes would not show it. It is known of the tensor that a module has returned, and
    not of what is computed from it.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    note = _notes.get(id(x))
    if note is not None and note() is x and note.axis != axis:
        raise ValueError(
            f"{name} takes features that are split over {axis}, but its input's are split over {note.axis}: check its "
            "role and that of the module before it (a 'colwise' linear takes them over y and gives them over x, a "
            "'rowwise' one the reverse; norm, dropout and head take them over y)"
        )


def gather_features(part: Tensor, features: int, group: dist.ProcessGroup) -> Tensor:
    """All features [..., features] of which each rank has a part, as torch.chunk cuts them; all ranks then compute the
    same."""
    return GatherPart.apply(part, features, -1, group, "gathered features")


def cut_features(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of features that all ranks have computed alike, and whose number the group divides."""
    return CutPart.apply(whole, -1, group)
