# SPDX-License-Identifier: Apache-2.0
"""Splits a model into pipeline stages: finds its blocks and other modules, and keeps only the rank's part."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stretto.execution import StageOptions
from stretto.huggingface.pretrained_model import order_of_pipeline_plan
from stretto.parallel.blocks import find_blocks
from stretto.parallel.builder import TiedParameter
from stretto.parallel.comm.agreement import JointRefusal, check_ranks_agree
from stretto.parallel.comm.autograd import compiled_within
from stretto.parallel.grid import Grid
from stretto.parallel.meta import copy_to_meta
from stretto.parallel.pipeline.stages import ModelPart, ModelStages, PassedOver, make_tie_group
from stretto.parallel.roles.plan import ShardingPlan
from stretto.parallel.state import BlockPlan
from stretto.schedules import partition
from stretto.suggestions import did_you_mean

# Some models register their heads before their blocks, and call them by code that is not in their forward.
_NAMES_AFTER = re.compile(r"head$|(^|_)(head|pooler|classifier|final|out)(_|$)")
# What modules call the number of experts that a token passes.
_CHOSEN_EXPERTS = ("experts_per_token", "top_k", "num_experts_per_tok")


@dataclass(frozen=True)
class Cut:
    """A model that was cut into stages, the parameters that both its ends hold, and what puts the rest back.

    refusal: for what is refused from then on.
    """

    stages: ModelStages
    tied: Mapping[int, TiedParameter]
    undo: Callable[[], None]
    refusal: JointRefusal


def cut_into_stages(model: nn.Module, grid: Grid, options: StageOptions) -> Cut:
    """Leave this rank's pipeline stages, of several, in the model."""
    stages = find_stages(model, grid, options)
    shared = tied_parameters(model, stages)
    parameters = dict(model.named_parameters())
    check_ranks_agree(parameters, grid, grid.group("world"), drops=stages.needs_random_state)
    ends = make_tie_group(stages, grid) if shared else None
    tied = {}
    for name, parameter in shared.items():
        owner_name, _, key = name.rpartition(".")
        tied[id(parameter)] = TiedParameter(ends, owner_name, model.get_submodule(owner_name), key)
    stages.is_tied = ends is not None
    stages.skeleton = copy_to_meta(model)
    return Cut(stages, tied, cut_model(model, stages, grid.device), JointRefusal(grid, "the model"))


class _Described:
    """Stands for a module within one that another stage has; code can read its attributes, dtypes and device."""

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        vars(self).update(_describe(original, device), _kind=type(original))

    def __getattr__(self, name: str) -> Any:
        raise _refusal(name, self._kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _refusal("forward", self._kind)


def _describe(original: nn.Module, device: torch.device) -> dict[str, Any]:
    """The plain attributes of a module, its submodules' descriptions, its buffers, and empty tensors for parameters."""
    of_torch = vars(nn.Module())
    found = {
        name: value
        for name, value in vars(original).items()
        if name not in of_torch and not name.startswith("_") and not isinstance(value, Tensor | nn.Module)
    }
    for name, child in original.named_children():
        found[name] = _Described(child, device)
    for name, parameter in original.named_parameters(recurse=False):
        found[name] = torch.empty(0, dtype=parameter.dtype, device=device)
    for name, buffer in original.named_buffers(recurse=False):
        if not buffer.is_meta:
            found[name] = buffer.to(device)
    return found


def _refusal(name: str, kind: type[nn.Module]) -> AttributeError:
    return AttributeError(
        f"the model's code uses {name!r} of a {kind.__name__} that another pipeline stage has: of such modules it can "
        "call those that are a block or beside the blocks, and read attributes; use pipe=1"
    )


class PassedBy(nn.Module):
    """Stands for a block, or for another module, that another rank has.

    It has the attributes of the replaced module that the model's code may read (`_describe`), and parameters that this
    rank has under another name too (a tied embedding).
    """

    def __init__(self, original: nn.Module, call: Callable[..., Any], device: torch.device) -> None:
        super().__init__()
        self._call = call
        self._original_type = type(original)
        self.described = _describe(original, device)

    def __getattr__(self, name: str) -> Any:
        """A submodule or parameter, a description, or a constant or property of the original's class."""
        if name in self._modules or name in self._parameters or "described" not in vars(self) or name.startswith("__"):
            return super().__getattr__(name)
        if name in self.described:
            return self.described[name]
        value = inspect.getattr_static(self._original_type, name, None)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(self)
        if value is not None and not callable(value) and not hasattr(value, "__get__"):
            return value
        raise _refusal(name, self._original_type)

    def __getitem__(self, key: Any) -> Any:
        """Raise ValueError: the elements of a list of modules are on another rank."""
        raise ValueError(
            f"the model's code takes a module out of a {self._original_type.__name__} that another pipeline stage has: "
            "pipeline stages take models whose repeated blocks are modules of their own; use pipe=1"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass by, or end the stage."""
        return self._call(args, kwargs)

    def extra_repr(self) -> str:
        """Shown where the model is printed."""
        return "of another pipeline stage"


def find_stages(model: nn.Module, grid: Grid, options: StageOptions) -> ModelStages:
    """Decide where a model is cut: nothing is changed.

    Raises ValueError where the model has fewer blocks than stages, and for names that it does not have.
    """
    pipe, rank = grid.size("pipe"), grid.coordinate("pipe")
    names = _block_names(model, options)
    count = pipe * options.virtual_stages
    options.check(pipe, len(names))
    parts = _find_parts(model, names, options)
    cuts = _find_cuts(model, names, parts, count, options)
    loops = [stage % pipe for stage in range(count)]
    v_shape = [*range(pipe), *reversed(range(pipe))]
    placed = v_shape if options.placement == "v" else loops
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
    return ModelStages(cuts, tuple(placed), rank, names, options.placement, parts, needs_random_state=drops)


def _block_names(model: nn.Module, options: StageOptions) -> tuple[str, ...]:
    if options.blocks is not None:
        return tuple(find_blocks(model, options.blocks))
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():  # from outside to inside: the parts of a block are no blocks
        if isinstance(module, nn.ModuleList) and len(module) and not any(part in lists for part in _from_outside(name)):
            lists[name] = module
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList, so its blocks are not known: name them with "
            "parallelize(..., stages=StageOptions(blocks=[...]))"
        )
    name, longest = max(lists.items(), key=lambda item: len(item[1]))
    return tuple(f"{name}.{index}" for index in range(len(longest)))


def _find_parts(model: nn.Module, blocks: Sequence[str], options: StageOptions) -> tuple[ModelPart, ...]:
    """The modules with parameters other than the blocks, and whether they come before these.

    They come in the order of transformers' plan for pipelines, else as the code calls them, or as they are registered.
    """
    parents = {parent for name in blocks for parent in _from_outside(name)}
    planned = order_of_pipeline_plan(model)
    beside: dict[str, bool] = {}
    for parent in sorted(parents, key=lambda name: name.count(".") if name else -1):
        owner = model.get_submodule(parent)
        if own := [key for key, _ in owner.named_parameters(recurse=False)]:
            where = parent or type(model).__name__
            raise ValueError(
                f"{where} has parameters of its own ({', '.join(own[:3])}) in addition to its blocks, which cannot be "
                "assigned to a pipeline stage: put them into a submodule, or use pipe=1"
            )
        within = {key: f"{parent}.{key}".removeprefix(".") for key in owner._modules}
        around = [key for key, name in within.items() if name in parents or name in blocks]
        is_before = True
        for key, child in owner.named_children():
            if key in around:
                is_before = False
            elif next(child.parameters(), None) is not None:
                called = _is_called_before(owner, key, around)
                found = _is_named_before(key, child, is_before) if called is None else called
                beside[within[key]] = planned.get(within[key], found)
    for pattern, is_before in [*((name, True) for name in options.first), *((name, False) for name in options.last)]:
        if pattern not in beside:
            raise ValueError(f"no module outside of the blocks is named {pattern!r}{did_you_mean(pattern, beside)}")
        beside[pattern] = is_before
    return tuple(ModelPart(name, is_before) for name, is_before in beside.items())


def _is_called_before(owner: nn.Module, key: str, around: Sequence[str]) -> bool | None:
    """True if a module's code calls its child `key` before those that have the blocks; None if it does not say so: it
    names them not, or reads the blocks before and after."""
    code = _CallOrder(type(owner))
    code.follow("forward")
    blocks = [place for place, name in enumerate(code.read) if name in around]
    # What is done with `self.head.weight` counts only where the head is not called.
    found = next((names for names in (code.called, code.read) if key in names), None)
    if not found or not blocks or blocks[0] < found.index(key) < blocks[-1]:
        return None
    return found.index(key) < blocks[0]


class _CallOrder(ast.NodeVisitor):
    """The attributes of itself that a module's forward and the methods that it calls read, in order of evaluation.

    called: the same, with "" in the place of those of which only an attribute is read. Both are empty where the source
    is not known.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self.read: list[str] = []
        self.called: list[str] = []
        self._kind = kind
        self._running: list[str] = []

    def follow(self, method: str) -> None:
        function = inspect.unwrap(getattr(self._kind, method))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return
        self._running.append(method)
        self.visit(tree)
        self._running.pop()

    def visit_Call(self, node: ast.Call) -> None:
        """Arguments come first: in head(norm(x)), the norm is called before the head."""
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        match node.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if inspect.isfunction(
                getattr(self._kind, name, None)
            ):
                if name not in self._running:
                    self.follow(name)
            case ast.Attribute() as chain:
                self._note(chain, is_called=True)
            case other:
                self.visit(other)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An attribute that is read, not called."""
        self._note(node, is_called=False)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> None:
        """A comprehension's iterables are evaluated before its element."""
        for part in (*node.generators, node.elt):
            self.visit(part)

    visit_GeneratorExp = visit_ListComp

    def _note(self, chain: ast.Attribute, *, is_called: bool) -> None:
        names, first = [chain.attr], chain.value
        while isinstance(first, ast.Attribute):
            names.append(first.attr)
            first = first.value
        if not isinstance(first, ast.Name):
            self.visit(first)
        elif first.id == "self":
            self.read += reversed(names)
            self.called += reversed(names if is_called else [names[0], *("" for _ in names[1:])])


def _is_named_before(name: str, module: nn.Module, otherwise: bool) -> bool:
    """True if a module comes before the blocks, by its name and kind; `otherwise` where these do not decide."""
    if _NAMES_AFTER.search(name):
        return False
    return otherwise or "embed" in name or isinstance(module, nn.Embedding)


def _from_outside(name: str) -> list[str]:
    """The names of the modules that a dotted name is in: the model's, which is empty, a, a.b of a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _find_cuts(
    model: nn.Module, names: Sequence[str], parts: Sequence[ModelPart], count: int, options: StageOptions
) -> tuple[int, ...]:
    if options.cuts is not None:
        return (0, *options.cuts, len(names))
    # A product with a weight takes operations in proportion to its numbers; looking up rows of an embedding takes none.
    costs = [_multiplied(model.get_submodule(name)) for name in names]
    last = sum(_multiplied(model.get_submodule(part.name)) for part in parts if not part.is_before)
    if not any(costs):
        costs = [1.0] * len(costs)
    return partition(costs, count, last=last)


def _multiplied(module: nn.Module) -> float:
    """The number of weights with which a token is multiplied: all of linears, and those of its experts."""
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    active = {id(p): share for owner in module.modules() for p, share in _active_shares(owner)}
    weights = (p for p in module.parameters() if p.dim() > 1 and id(p) not in embeddings)
    return sum(p.numel() * active.get(id(p), 1.0) for p in weights)


def _active_shares(owner: nn.Module) -> list[tuple[nn.Parameter, float]]:
    """The weights of the experts that a module holds, and the share of these experts that a token passes.

    It is read from an attribute of the module, or of its router.
    """
    found = []
    for experts in owner.children():
        count = getattr(experts, "num_experts", None)
        weights = [p for p in experts.parameters(recurse=False) if p.dim() == 3 and p.shape[0] == count]
        beside = [getattr(module, name, None) for module in (owner, *owner.children()) for name in _CHOSEN_EXPERTS]
        chosen = next((number for number in beside if isinstance(number, int)), count)
        found += [(p, chosen / count) for p in weights if isinstance(count, int) and chosen is not None]
    return found


def tied_parameters(model: nn.Module, stages: ModelStages) -> dict[str, nn.Parameter]:
    """The parameters that modules of several stages share, by the first name of each.

    They are tied embeddings: both ends hold them, and sum their gradients. ValueError for those that other stages than
    the first and the last share.
    """
    runs = pairwise(stages.cuts)
    where = {name: stage for stage, run in enumerate(runs) for name in stages.block_names[slice(*run)]}
    where |= {part.name: 0 if part.is_before else stages.count - 1 for part in stages.parts}
    first: dict[nn.Parameter, str] = {}
    users: dict[nn.Parameter, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
        users.setdefault(parameter, set()).update(where[owner] for owner in _from_outside(name) if owner in where)
    for parameter, used in users.items():
        if len(used) > 1 and used != {0, stages.count - 1}:
            raise ValueError(
                f"{first[parameter]} is shared by pipeline stages {', '.join(map(str, sorted(used)))}: the first and "
                "the last stage may share parameters, others may not. Use fewer stages, or cuts that keep them together"
            )
    return {first[parameter]: parameter for parameter, used in users.items() if len(used) > 1}


def cut_model(model: nn.Module, stages: ModelStages, device: torch.device) -> Callable[[], None]:
    """Replace what other ranks have by modules that pass it by. Returns what undoes it."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    kept = _kept_parameters(model, stages)
    for index, name in enumerate(stages.block_names):
        if not stages.has_block(index):
            block = model.get_submodule(name)
            signature = inspect.signature(type(block).forward)
            call = functools.partial(_pass_by, functools.partial(stages.enter_block, index, _without_self(signature)))
            replaced.append(_replace_module(model, name, PassedBy(block, call, device), kept))
    for part in stages.parts:
        if (0 if part.is_before else stages.count - 1) not in stages.mine:
            module = model.get_submodule(part.name)
            call = functools.partial(_pass_by, functools.partial(stages.enter_part, part))
            replaced.append(_replace_module(model, part.name, PassedBy(module, call, device), kept))

    def undo() -> None:
        for owner, key, original in replaced:
            owner._modules[key] = original

    return undo


def _kept_parameters(model: nn.Module, stages: ModelStages) -> dict[int, nn.Parameter]:
    """The parameters of this rank's stages, by id."""
    names = [name for index, name in enumerate(stages.block_names) if stages.has_block(index)]
    names += [part.name for part in stages.parts if (0 if part.is_before else stages.count - 1) in stages.mine]
    return {id(parameter): parameter for name in names for parameter in model.get_submodule(name).parameters()}


def _replace_module(
    model: nn.Module, name: str, new: PassedBy, kept: dict[int, nn.Parameter]
) -> tuple[nn.Module, str, nn.Module]:
    parent, _, key = name.rpartition(".")
    owner, original = model.get_submodule(parent), model.get_submodule(name)
    for path, parameter in original.named_parameters(remove_duplicate=False):
        if id(parameter) in kept:
            *inner, last = path.split(".")
            new.described.pop((*inner, last)[0], None)
            holder: nn.Module = new
            for child in inner:
                if child not in holder._modules:
                    holder.add_module(child, nn.Module())
                holder = holder.get_submodule(child)
            holder.register_parameter(last, parameter)
    owner._modules[key] = new
    return owner, key, original


def _pass_by(enter: Callable[[Any, Any], tuple[Any, Any] | PassedOver], args: Any, kwargs: Any) -> Any:
    entered = enter(args, kwargs)
    assert isinstance(entered, PassedOver)
    return entered.output


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def wrap_forwards(model: nn.Module, stages: ModelStages) -> None:
    """Register hooks by which this rank's blocks and other modules track the running pass."""
    for index, name in enumerate(stages.block_names):
        block = model.get_submodule(name)
        if isinstance(block, PassedBy):
            continue
        signature = _without_self(inspect.signature(type(block).forward))
        enter, leave = (
            functools.partial(stages.enter_block, index, signature),
            functools.partial(stages.note_output, index),
        )
        block.forward = _wrapped(enter, block.forward, leave)
        if index in stages.cuts[1:]:
            receive = torch.compiler.disable(functools.partial(stages.receive, index, signature))
            block.register_forward_pre_hook(receive, prepend=True, with_kwargs=True)
    for part in stages.parts:
        module = model.get_submodule(part.name)
        if not isinstance(module, PassedBy):
            enter, leave = functools.partial(stages.enter_part, part), functools.partial(stages.note_output, part.name)
            module.forward = _wrapped(enter, module.forward, leave)


def pass_over_other_stages(model: nn.Module, stages: ModelStages) -> None:
    """Have `load_state_dict` take the state dict of the whole model, of which other ranks' stages are not loaded."""
    assert stages.skeleton is not None
    others = stages.skeleton.state_dict().keys() - model.state_dict().keys()

    def drop(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in others:
            state_dict.pop(f"{prefix}{name}", None)

    model.register_load_state_dict_pre_hook(drop)


def _wrapped(
    enter: Callable[[Any, Any], tuple[Any, Any] | PassedOver], forward: Callable[..., Any], leave: Callable[[Any], Any]
) -> Any:
    """A forward that follows the pass that runs. Of it a compiler traces the module's own forward alone."""
    enter, leave = torch.compiler.disable(enter), torch.compiler.disable(leave)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        entered = enter(args, kwargs)
        if isinstance(entered, PassedOver):
            return entered.output
        args, kwargs = entered
        return leave(forward(*args, **kwargs))

    return compiled_within(run)


def restrict_plan(plan: ShardingPlan | BlockPlan, model: nn.Module) -> ShardingPlan | BlockPlan:
    """The plan without what other ranks have."""
    modules = {name for name, module in model.named_modules(remove_duplicate=False) if not isinstance(module, PassedBy)}
    away = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, PassedBy)]

    def is_here(name: str) -> bool:
        return name in modules and not any(f"{name}.".startswith(f"{other}.") for other in away)

    if isinstance(plan, BlockPlan):
        return replace(plan, experts={name: kind for name, kind in plan.experts.items() if is_here(name)})
    return replace(
        plan,
        roles={name: role for name, role in plan.roles.items() if is_here(name)},
        local_attributes={
            name: axis for name, axis in plan.local_attributes.items() if is_here(name.rpartition(".")[0])
        },
        plain=tuple(part for part in plan.plain if is_here(part.whose)),
    )
