# SPDX-License-Identifier: Apache-2.0
"""`full_parameters`: the whole parameters of a model on a grid, to be read and edited as those of a plain one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.parallel.layers.held_tensors import ParameterPlace, hold
from stretto.parallel.layout import gather, has_layout, layout_of
from stretto.parallel.sharded_parameter import ShardedParameter, write_whole
from stretto.parallel.state import state_of
from stretto.suggestions import require_type


@dataclass
class _Edited:
    """A parameter, its first name, where the module holds it, its whole, and the groups of ranks that must agree."""

    parameter: nn.Parameter
    name: str
    whole: nn.Parameter
    groups: Sequence[dist.ProcessGroup]
    places: list[ParameterPlace] = field(default_factory=list)


@contextmanager
def full_parameters(module: nn.Module) -> Iterator[None]:
    """Have the parameters of a module be whole inside, plain `nn.Parameter`s on every rank; edits of them are kept.

        with stretto.full_parameters(model):
            model.embedding.weight[-1].zero_()
            torch.nn.init.orthogonal_(model.layers[0].attention.weight)

    module: what `parallelize` has returned, or a submodule of it. Takes memory for all of its parameters on every rank:
    to edit a model that does not fit, enter it for one block after another. Names, shapes and ties are the original
    model's, whatever splits the parameters (roles, padded vocabularies, experts). No gradients are recorded inside,
    and the model cannot run. Collective: all ranks of the grid (of a pipeline's stage, and of both stages that share an
    embedding) enter and leave it.

    An edit may be made by one rank alone (`if rank == 0:`), or by several, if they make the same: a rank that has left
    a parameter as it was gets the edited one.

    Raises ValueError, and then keeps no edit, if ranks have edited a parameter differently, or if one was removed or
    got another shape; also for a module that is not on a grid.
    """
    edited = _gather(module)
    places = [place for each in edited for place in each.places]
    with torch.no_grad(), hold(places, [each.whole for each in edited]):
        yield
        wholes = [_find_edited(each) for each in edited]
    with torch.no_grad():
        differing = [each.name for each, whole in zip(edited, wholes, strict=True) if not _agree(each, whole)]
    if differing:
        raise ValueError(
            f"ranks have edited {', '.join(differing)} differently inside of full_parameters: make the same edit on "
            "all ranks (seed random numbers alike), or on one rank alone"
        )
    for each, whole in zip(edited, wholes, strict=True):
        write_whole(each.parameter, whole, from_first=False)
        each.parameter.requires_grad_(each.whole.requires_grad)


def _gather(module: nn.Module) -> list[_Edited]:
    require_type(module, nn.Module, "module")
    found: dict[int, _Edited] = {}
    for prefix, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and has_layout(parameter):
                name = f"{prefix}.{key}" if prefix else key
                if id(parameter) not in found:
                    whole = nn.Parameter(gather(parameter), parameter.requires_grad)
                    found[id(parameter)] = _Edited(parameter, name, whole, _groups(module, parameter))
                each = found[id(parameter)]
                each.places.append(ParameterPlace(owner, key, [*found].index(id(parameter))))
    if not found and next(module.parameters(), None) is not None:
        raise ValueError(
            f"full_parameters takes a model that stretto.parallelize has returned, or a part of it, and this "
            f"{type(module).__name__} is not on a grid"
        )
    return list(found.values())


def _groups(module: nn.Module, parameter: nn.Parameter) -> list[dist.ProcessGroup]:
    """The groups along each axis that ranks with a part of the parameter form, and of the stages that share it."""
    assert isinstance(parameter, ShardedParameter)
    mesh = parameter.device_mesh
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()]
    if layout_of(parameter).pipe_copies > 1:
        state = state_of(module)
        if state is None:
            raise ValueError(
                "full_parameters takes the whole model where two stages of a pipeline share a parameter (a tied "
                "embedding), and not a part of it"
            )
        groups += state.gradient_reducer.sum_groups(parameter)
    return groups


def _find_edited(each: _Edited) -> Tensor:
    """The tensor in a parameter's places at the end: the one that was put there, or one that has replaced it."""
    current = {id(tensor): tensor for tensor in (place.owner._parameters.get(place.key) for place in each.places)}
    found = next(iter(current.values()))
    if len(current) > 1 or found is None or found.shape != each.whole.shape:
        shown = "removed" if found is None else f"replaced by {list(found.shape)}"
        raise ValueError(
            f"{each.name} was {'untied' if len(current) > 1 else shown} inside of full_parameters: it must stay one "
            f"tensor {list(each.whole.shape)} (remove, resize, tie and untie parameters before parallelize)"
        )
    each.whole.requires_grad_(found.requires_grad)
    return found.to(each.whole)


def _agree(each: _Edited, whole: Tensor) -> bool:
    """Give ranks that have left a parameter as it was the edited one; whether those that edited it did so alike."""
    before = gather(each.parameter)
    is_edited, is_alike = not _have_same_bits(whole, before), True
    del before
    for group in each.groups:
        first = torch.tensor(group.rank() if is_edited else group.size(), device=whole.device)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
        if int(first) < group.size():
            other = whole.clone(memory_format=torch.contiguous_format)
            dist.broadcast(other, group=group, group_src=int(first))
            is_alike &= not is_edited or _have_same_bits(other, whole)
            whole.copy_(other)
            is_edited = True
    differs = torch.tensor(int(not is_alike), device=whole.device)
    for group in each.groups:
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
    return not int(differs)


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are the same, NaNs too."""
    return torch.equal(
        one.detach().contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )
