# SPDX-License-Identifier: Apache-2.0
"""Parameters on a grid: DTensors to which an edit, under `torch.no_grad` or through `.data`, is made as in PyTorch.

DTensor runs most operators on shards alone: those of optimizers, `mul_`, a view of dim 1. It would lose other edits:

    w[-1].zero_()     DTensor gathers what it views: the view is a copy (`_Copy`), which remembers how it was made.
    w.data = other    has no effect on a shard: `data` is a property here.
    eye_, normal_     have no rule in DTensor, or one that draws the same numbers for each shard.

These are run on the gathered parameter instead, of which each rank then keeps its shard. That is a collective, in which
all ranks of the grid must take part. They keep what the grid's first rank has computed, so that ranks never differ.

Gradients are of the same class, and so is what is computed from either: DTensor would have `p.grad.norm().item()` be
the number of a rank's own shard. A sum, a norm or another number of one tensor is reduced where it is computed.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types as _foreach_types_of_optimizers
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_types
from torch.utils._pytree import tree_map

from stretto.parallel.comm.autograd import SelectiveMode, scale_gradient, sum_gradient
from stretto.parallel.grid import Grid
from stretto.parallel.layout import GRAD, ParameterLayout, TensorOnGrid, gather, make_shard, shard_like
from stretto.parallel.segment_planner import has_segments, refuse_default_planners, watch_optimizers

# Of torch's optimizers, element by element. DTensor knows Adam's alone, and looks at the placements of each tensor.
_FUSED_UPDATES = (
    *(torch.ops.aten._fused_adam_, torch.ops.aten._fused_adamw_),
    *(torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_),
)
# Of these a plain tensor is a new value, which need not be sharded.
_ASSIGNMENTS = (torch.ops.aten.copy_, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)
# Of these optimizers make their state, which stays DTensors.
_STATES = (torch.ops.aten.clone, torch.ops.aten.empty_like, torch.ops.aten.full_like, torch.ops.aten.zeros_like)


# torch 2.11 and 2.12 dispatch a subclass of DTensor as a DTensor, and ask it about functions alone.
_DISPATCHES_SUBCLASSES = torch.__version__.split(".")[:2] >= ["2", "13"]


class _View(NamedTuple):
    """The parameter of which a tensor is a view, and how it is made of the whole parameter."""

    parameter: Tensor
    make: Callable[[Tensor], Tensor]

    def __deepcopy__(self, memo: object) -> "_View":
        """Itself: a stager copies attributes of what it stages, and this is of the parameter, not of the copy."""
        return self


class _Operator(NamedTuple):
    """An operator's effects: numbers and names of the arguments that it writes, and whether it views.

    needs_whole: it draws random numbers, or computes new ones from no tensor (`torch.eye(4, out=w)`).
    """

    written: tuple[int, ...]
    written_by_name: tuple[str, ...]
    is_view: bool
    needs_whole: bool


@cache
def _describe(func: Any) -> _Operator:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [n for n, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    names = tuple(arguments[n].name for n in written)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_factory = written != [] and all("Tensor" not in str(each.type) or each.is_out for each in arguments)
    return _Operator(tuple(written), names, is_view, is_random or is_factory)


class ShardedParameter(TensorOnGrid):
    """A parameter on a grid, or a view of one that shares its memory. view_of: of a view, how it is made."""

    view_of: _View | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, operator = kwargs or {}, _describe(func)
        own = list(_find((*args, *kwargs.values())))
        written: list[ShardedParameter] = []
        if operator.written:
            places = [args[n] for n in operator.written if n < len(args)]
            written = list(_find((*places, *(kwargs[name] for name in operator.written_by_name if name in kwargs))))
        if written and (operator.needs_whole or any(isinstance(tensor, _Copy) for tensor in written)):
            return _edit_whole(func, written, args, kwargs)
        is_new = func.overloadpacket is torch.ops.aten.new_empty and own != [] and not isinstance(own[0], _Result)
        if is_new or (own and operator.needs_whole):
            return _run_whole(func, own[0], args, kwargs)
        if own and func is torch.ops.aten._local_scalar_dense.default and not _is_replicated(own[0]):
            return _make_whole(own[0]).item()
        if own and type(own[0]) is _Result and not own[0].dim():
            _refuse_losses(args)
        is_view = operator.is_view and own != []
        for tensor in own:
            if tensor.late_write is not None:
                tensor.late_write()
        if func.overloadpacket in _FUSED_UPDATES and (shards := _shards_alike((*args, *kwargs.values()))) is not None:
            func(*shards[: len(args)], **dict(zip(kwargs, shards[len(args) :], strict=True)))
            return _count_writes(written)
        kinds = [type(tensor) for tensor in own]
        for tensor in own:
            tensor.__class__ = DTensor  # type: ignore[assignment]
        try:
            found = func(*args, **kwargs)
        except (IndexError, NotImplementedError, RuntimeError) as error:  # a whole mask is no index of a shard
            is_refused = True
            is_read = is_view or (isinstance(error, NotImplementedError) and own != [] and not written)
            is_read = is_read and not (torch.is_grad_enabled() and own[0].requires_grad)
            if not (is_read or (written and _takes_no_plain_operand(func, args, kwargs))):
                _explain(error)
                raise
        else:
            is_refused = False
        finally:
            for tensor, kind in zip(own, kinds, strict=True):
                tensor.__class__ = kind
        if is_refused and written:
            return _edit_whole(func, written, args, kwargs)
        if is_refused:  # such as to flatten shards of uneven sizes
            found = _run_whole(func, own[0], args, kwargs)
        if func.overloadpacket is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_:
            _agree_on_infinities(own, args[1])
        if written:
            _count_writes(written)
        elif is_view:
            _note_view(func, own[0], found, args, kwargs)
        elif own and func.overloadpacket not in _STATES:
            return _note_results(found)
        elif own:
            refuse_default_planners(found)
        return found

    if not _DISPATCHES_SUBCLASSES:

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "data")
            with torch._C.DisableTorchFunctionSubclass():
                if attribute not in ("data", "T", "mT", "H", "mH"):  # ten of them are read for a linear's gradient
                    return func(*args, **(kwargs or {}))
                with _SubclassDispatch():  # these are views, and others functions
                    return func(*args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The parameter without its graph, as of any tensor. To assign another tensor copies its values."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype or _is_view(self):
            raise ValueError(
                f"a parameter {list(self.shape)} of {self.dtype} on a grid cannot become a tensor {list(value.shape)} "
                f"of {value.dtype} by .data: build the model with that shape and dtype, and parallelize it then"
                + ("" if value.shape != self.shape else " (model.to(dtype) converts one that is on a grid)")
            )
        with torch.no_grad():
            self.copy_(value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, whose edits and sums are as a parameter's."""
        with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
            found = GRAD.__get__(self)
        if type(found) in (DTensor, _Result):
            vars(found).pop("view_of", None)
            found.__class__ = ShardedParameter
            found.parameter_layout = self.parameter_layout
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @staticmethod
    def __tensor_unflatten__(*args: Any, **kwargs: Any) -> "ShardedParameter":
        """Make a graph's input for torch.compile, which compares its type with the parameter's."""
        found = DTensor.__tensor_unflatten__(*args, **kwargs)
        found.__class__ = ShardedParameter
        return found

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole parameter. Its gradient is averaged over the ranks that hold shards, as all gradients are.

        DTensor would have each shard take a part of its own rank's gradient: another one where a term outside of the
        forward pass depends on a rank's own rows. grad_placements: what each rank's gradient is, and no average then.
        """
        if self.late_write is not None:
            self.late_write()
        whole = super().full_tensor(grad_placements=grad_placements)
        if grad_placements is None and whole.requires_grad:
            for dim, placement in enumerate(self.placements):
                group = self.device_mesh.get_group(dim)
                if not placement.is_replicate() and group.size() > 1:
                    whole = scale_gradient(sum_gradient(whole, group), 1 / group.size())
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if _is_view(self):
            copied = memo[id(self)] = self.clone()
            return copied
        copied = _as_dtensor(self, partial(DTensor.__deepcopy__, self, memo))
        copied.__class__ = ShardedParameter
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not _is_replicated(self):
            warnings.warn(
                "torch.save and pickle write this rank's shards alone, which can be read on the same grid: for a file "
                "of whole tensors pass stretto.parallel.gather(tensor) of each, on every rank; for any grid, "
                "torch.distributed.checkpoint",
                stacklevel=2,
            )
        if _is_view(self):  # such as a state dict's, in a file that is read where there is no Stretto
            return DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad).__reduce_ex__(protocol)
        return _as_dtensor(self, partial(DTensor.__reduce_ex__, self, protocol))


class _Copy(ShardedParameter):
    """A view of a parameter that DTensor has gathered. A write to it is made to the parameter, too."""


class _Result(ShardedParameter):
    """A tensor that is computed from parameters or gradients."""


class _SubclassDispatch(SelectiveMode):
    """Has `ShardedParameter` see the operators of a function that is called with one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ShardedParameter.__torch_dispatch__(func, types, args, kwargs)


class ParameterShard(nn.Parameter):
    """This rank's shard of a parameter, in the parameter's memory, for optimizers of plain tensors.

    low_precision_weight: as of `TensorOnGrid`.
    """

    low_precision_weight: Any = None


# torch.optim and torch's clip_grad_norm_ use one kernel for many tensors if they know their type.
_OWN_TYPES: tuple[Any, ...] = (ShardedParameter, _Copy, _Result, ParameterShard)
for _known in (_foreach_types_of_optimizers, _foreach_types):
    _known += [kind for kind in _OWN_TYPES if kind not in _known]


def shard_parameter(whole: Tensor, layout: ParameterLayout, grid: Grid, *, requires_grad: bool) -> nn.Parameter:
    parameter = nn.Parameter(make_shard(whole, layout, grid), requires_grad=requires_grad)
    note_layout(parameter, layout)
    if not layout.shape:
        _watch_optimizers()
    if has_segments(parameter):
        watch_optimizers()
    return parameter


@cache
def _watch_optimizers() -> None:
    """Have optimizers of torch take whole state of 0-dim parameters.

    `set_optimizer_state_dict(full_state_dict=True)` distributes the state of all others, and leaves theirs as it is.
    """
    register_optimizer_step_pre_hook(_distribute_scalar_states)


def _distribute_scalar_states(optimizer: Optimizer, *_: Any) -> None:
    scalars = [p for p in optimizer.state if isinstance(p, DTensor) and not p.dim()]
    # Counts of steps are plain tensors in any case.
    keys = {key for state in optimizer.state.values() for key, value in state.items() if isinstance(value, DTensor)}
    for parameter, key in product(scalars, keys):
        value = optimizer.state[parameter].get(key)
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            optimizer.state[parameter][key] = DTensor.from_local(value, mesh, placements, run_check=False)


def note_layout(parameter: nn.Parameter, layout: ParameterLayout) -> None:
    """Let `layout_of` find a parameter's layout, and have edits of it reach its shards."""
    vars(parameter).pop("view_of", None)  # a conversion that converts nothing makes a view the parameter
    parameter.__class__ = ShardedParameter  # type: ignore[assignment]
    assert isinstance(parameter, ShardedParameter)
    parameter.parameter_layout = layout


def _is_view(tensor: ShardedParameter) -> bool:
    return tensor.parameter_layout is None


def _view_of(tensor: Tensor) -> _View | None:
    return tensor.view_of if isinstance(tensor, ShardedParameter) else None


def _as_dtensor(tensor: Tensor, function: Callable[[], Any]) -> Any:
    kind = tensor.__class__
    tensor.__class__ = DTensor
    try:
        return function()
    finally:
        tensor.__class__ = kind


def _parameter_of(tensor: Tensor) -> Tensor:
    view = _view_of(tensor)
    return tensor if view is None else view.parameter


def _find(values: Sequence[Any]) -> Iterator[ShardedParameter]:
    for value in chain.from_iterable(each if isinstance(each, list | tuple) else (each,) for each in values):
        if isinstance(value, ShardedParameter):
            yield value


def _shards_alike(args: Sequence[Any]) -> list[Any] | None:
    """An operator's arguments with lists of shards for lists of DTensors; None unless these are cut alike, place by
    place, and the others are no DTensors."""
    found: list[Any] = []
    specs: list[Any] | None = None
    for each in args:
        if isinstance(each, list | tuple) and any(isinstance(one, DTensor) for one in each):
            if not all(isinstance(one, DTensor) for one in each):
                return None
            own = [one._spec for one in each]
            for one, other in zip(own, specs or own, strict=True):
                if one is not other and (one.mesh is not other.mesh or one.placements != other.placements):
                    return None
            each, specs = [one._local_tensor for one in each], own
        elif isinstance(each, DTensor):
            return None
        found.append(each)
    return found


def _put(whole: Tensor, source: Tensor, args: Sequence[Any]) -> Iterator[Any]:
    return (whole if each is source else each for each in args)


def _replicate(found: Any, like: DTensor) -> Any:
    """A tensor that every rank has whole, or several, as a DTensor of its own memory."""
    places = [Replicate()] * like.device_mesh.ndim
    return tree_map(lambda part: DTensor.from_local(part, like.device_mesh, places, run_check=False), found)


def _make_whole(tensor: DTensor) -> Tensor:
    """Gather the whole of a parameter, a view of one, or another DTensor."""
    view = _view_of(tensor)
    return gather(tensor) if view is None else view.make(gather(view.parameter))


@torch.no_grad()
def _run_whole(func: Any, source: ShardedParameter, args: Any, kwargs: Any) -> Any:
    """Run an operator on the whole parameter: one that DTensor refuses, or that draws as many numbers (all ranks draw
    all of them, as in plain PyTorch: DTensor has each draw the same ones for its own shard)."""
    return _replicate(func(*_put(_make_whole(source), source, args), **kwargs), source)


def _note_view(func: Any, source: ShardedParameter, found: Any, args: Any, kwargs: Any) -> None:
    """Note on a view how it is made of the whole parameter."""
    view = _view_of(source)

    def make(whole: Tensor) -> Any:
        whole = whole if view is None else view.make(whole)
        return func(*_put(whole, source, args), **kwargs)

    storage = source._local_tensor.untyped_storage()._cdata
    for number, part in enumerate(found if isinstance(found, list | tuple) else (found,)):
        if type(part) is DTensor:
            is_shared = part._local_tensor.untyped_storage()._cdata == storage
            part.__class__ = type(source) if is_shared else _Copy
            assert isinstance(part, ShardedParameter)
            of_number = make if part is found else lambda whole, number=number: make(whole)[number]
            part.view_of = _View(_parameter_of(source), of_number)


def _is_replicated(tensor: DTensor) -> bool:
    """True if this rank's tensor is the whole one."""
    return all(place.is_replicate() or tensor.device_mesh.size(dim) == 1 for dim, place in enumerate(tensor.placements))


def _note_results(found: Any) -> Any:
    """Have what is computed from results be as they are. A number is reduced now, and not on the rank that reads it."""
    if type(found) is DTensor and not found.dim() and not _is_replicated(found):
        found = _replicate(found.full_tensor(), found)
    for part in found if isinstance(found, list | tuple) else (found,):
        if type(part) is DTensor:
            part.__class__ = _Result
    return found


@torch.no_grad()
def _edit_whole(func: Any, written: Sequence[ShardedParameter], args: Any, kwargs: Any) -> Any:
    """Run an operator that writes a parameter, or a view of it, on the whole parameter."""
    target = written[0]
    if any(each is not target for each in written):
        raise ValueError(
            f"{func} writes several tensors of which ranks hold shards, or copies of parts: write one at a time, or "
            "inside of `with stretto.full_parameters(model): ...`"
        )
    view, parameter = _view_of(target), _parameter_of(target)
    whole = gather(parameter).contiguous()
    plain = whole if view is None else view.make(whole)

    def find(value: Any) -> Any:
        if value is target:
            return plain
        return _make_whole(value) if isinstance(value, DTensor) else value

    func(*tree_map(find, args), **tree_map(find, kwargs))
    if whole.shape != parameter.shape or plain.shape != target.shape:
        raise ValueError(
            f"{func} would change the shape of a parameter that is on a grid: parallelize it in that shape"
        )
    write_whole(parameter, whole, from_first=True)
    if isinstance(target, _Copy):
        target._local_tensor.copy_(_replicate(plain, target).redistribute(placements=target.placements).to_local())
    return target


@torch.no_grad()
def write_whole(parameter: Tensor, whole: Tensor, *, from_first: bool) -> None:
    """Have each rank keep its shard of a whole tensor. from_first: of the one that the grid's first rank has."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    if from_first:
        whole = whole.to(parameter.device).contiguous()
        for axis in mesh.mesh_dim_names or ():
            dist.broadcast(whole, group=mesh.get_group(axis), group_src=0)
    parameter._local_tensor.copy_(shard_like(whole, parameter)._local_tensor)
    _count_writes([parameter])


def _count_writes(written: Sequence[Tensor]) -> None:
    """Count writes in versions. A parameter's counts all, also those through `.data` and by functions of many tensors;
    its shard's, by which autograd knows what it has saved, those that plain PyTorch would count."""
    with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
        pairs = [(each, of) for each in written if not (of := _parameter_of(each)).is_inference()]
        before = [each._version for each, _ in pairs]
        torch.autograd.graph.increment_version([of for _, of in pairs])
        shared = [of for (each, of), version in zip(pairs, before, strict=True) if each._version != version]
        torch.autograd.graph.increment_version([of._local_tensor for of in shared])  # type: ignore[attr-defined]


def _takes_no_plain_operand(func: Any, args: Any, kwargs: Any) -> bool:
    """True if an operator has no operand that may be a rank's own: plain numbers that were computed of its rows."""
    if func.overloadpacket in _ASSIGNMENTS:
        return True
    values = chain.from_iterable(
        each if isinstance(each, list | tuple) else (each,) for each in (*args, *kwargs.values())
    )
    return not any(
        isinstance(each, Tensor) and not isinstance(each, DTensor) and each.is_floating_point() and each.dim()
        for each in values
    )


def _refuse_losses(args: Sequence[Any]) -> None:
    """Raise ValueError where a plain loss is added to a number of parameters: its backward pass would mix both."""
    if torch.is_grad_enabled() and any(type(each) is Tensor and each.requires_grad for each in args):
        raise ValueError(
            "a penalty over parameters of a model on a grid is a DTensor, and the loss a plain tensor: take the "
            "penalty's .full_tensor(), on every rank, before it is added"
        )


def _agree_on_infinities(gradients: Sequence[ShardedParameter], found: Tensor) -> None:
    """Have a GradScaler see infinities of all ranks, where DTensor looks at the first gradient's mesh alone (experts
    have another one)."""
    meshes = list(dict.fromkeys(gradient.device_mesh for gradient in gradients))
    for mesh in meshes if len(meshes) > 1 else ():
        for dim in range(mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group(dim))


def _explain(error: Exception) -> None:
    """Add the cause to an error about DTensors: code that reads a parameter where it is a shard."""
    if "mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            "outside of the forward pass of the submodule that holds it, a parameter of a model on a grid is this "
            "rank's shard. Where a method other than forward reads it, "
            "stretto.parallel.register_forward_method(module, name) has the method gather it. Code that reads a "
            "parameter of another submodule (a sum over model.parameters(), a weight of another block) needs both in "
            "one block: name a larger one in parallelize(..., blocks=[...]), or pass blocks=[], which gathers all "
            "parameters for the whole forward pass. To read or edit one elsewhere: "
            "`with stretto.full_parameters(model): ...`. Rows of tables that ranks share out are clipped by "
            "fuse_update(max_norm=), not with other gradients"
        )
    elif "must have the same mesh" in str(error):
        error.add_note("experts' parameters have a mesh of their own: stretto.parallel.clip_grad_norm_ clips by all")
