# SPDX-License-Identifier: Apache-2.0
"""Resolves how a model is sharded: by the roles of its submodules, or by blocks. Nothing is changed, and no rank asks
another; `parallel.place` then builds what `parallel.install` puts into the model.

Roles are read from the model's plan or the user's patterns, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.axes import GridSizes, check_sizes
from stretto.execution import MIN_COPIED_BYTES, ExecutionOptions
from stretto.huggingface.experts import ExpertsKind, find_experts
from stretto.huggingface.family_roles import wildcard
from stretto.huggingface.formulas import UnknownRolesError
from stretto.huggingface.pretrained_model import adapters_of, is_conv1d, is_linear, is_pretrained_model, unwrap
from stretto.huggingface.roles import norms_next_to_linears, plan_of
from stretto.parallel.blocks import find_blocks
from stretto.parallel.context.sequence_parts import require_context
from stretto.parallel.layout import has_layout
from stretto.parallel.recomputation import check_blocks
from stretto.parallel.roles.plan import KINDS, PLAIN, PlainPart, Role, ShardingPlan
from stretto.parallel.roles.validation import check_experts, check_takes_sharded_sequence, validate_plan
from stretto.parallel.state import BlockPlan, ShardingRequest, state_of
from stretto.suggestions import did_you_mean


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError for a model on a grid, with a part that is on one or that others have sharded, or scripted."""
    kind = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, whose code reads tensors of its own: pass the "
                "module from which torch.jit made it"
            )
    first = next(model.parameters(), None)
    if (first is None or has_layout(first)) and state_of(model) is not None:
        raise ValueError(f"this {kind} is on a grid already: build another one to parallelize it anew")
    for name, parameter in model.named_parameters():
        if has_layout(parameter):
            raise ValueError(
                f"{name} of this {kind} is on a grid already: parallelize the whole model once, and not its parts "
                "(blocks= names those that are gathered one at a time)"
            )
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} of this {kind} is a DTensor (of fully_shard, perhaps): pass a plain model")


def resolve(
    model: nn.Module,
    sizes: Mapping[str, int],
    *,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None = None,
    local_attributes: Mapping[str, str | None] | None = None,
    blocks: Sequence[str] | None = None,
    options: ExecutionOptions | None = None,
) -> ShardingPlan | BlockPlan:
    """Find the roles of a model's submodules, or the blocks of one that has none, and check the options against them.

    sizes: of a grid's axes. Arguments and errors are those of `parallelize`.
    """
    options = options or ExecutionOptions()
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{name} has a hook, which its shard would never call: register it after parallelize")
    if any(kind == "ADALORA" for kind, _ in adapters_of(model)):
        raise ValueError(
            "AdaLoRA adds a penalty of all its parameters to the loss, and chooses ranks by all their values, of which "
            "a rank of a grid has a shard: adapt the model by LoRA (peft.LoraConfig), or another kind of PEFT's"
        )
    require_context(model, sizes)
    plan = _find_plan(model, sizes, roles, local_attributes, blocks, options)
    if isinstance(plan, ShardingPlan):
        if options.shard_sequence:
            plan = check_takes_sharded_sequence(model, plan)
            stages = sizes.get("pipe", 1) * options.stages.virtual_stages
            if plan.sharded_blocks and stages > 1:
                raise ValueError(
                    f"shard_sequence of {type(model).__name__}: its first block shards tokens and its last one gathers "
                    f"them, but {stages} pipeline stages would divide the blocks: choose pipe=1 and one stage a rank"
                )
    elif options.shard_sequence:
        raise ValueError(
            f"shard_sequence takes roles of all submodules, and {type(model).__name__} is sharded block by block: "
            "leave it out, or give roles={'name or pattern': role}"
        )
    if options.invariant:
        from stretto.parallel.layers.invariant import require_invariant  # which imports Triton

        require_invariant(model, sizes, plan, options)
    if options.recomputation.is_on:
        check_blocks(model, options.recompute, () if isinstance(plan, ShardingPlan) else plan.names)
    return plan


def _find_plan(
    model: nn.Module,
    sizes: Mapping[str, int],
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None,
    local_attributes: Mapping[str, str | None] | None,
    blocks: Sequence[str] | None,
    options: ExecutionOptions,
) -> ShardingPlan | BlockPlan:
    if blocks is not None:
        if roles or local_attributes:
            raise ValueError(
                "blocks and roles exclude each other: a block is sharded only over z, whatever it contains"
            )
        if sizes.get("expert", 1) > 1:
            raise ValueError(
                f"expert is {sizes['expert']}, but a model that is sharded block by block has all experts on every "
                "rank: leave blocks= out, and give submodules roles ('experts' and 'router' among them), or choose "
                "expert=1"
            )
        return BlockPlan(tuple(find_blocks(model, blocks)), "blocks= was given", is_pretrained_model(model))
    sizes = check_sizes(sizes).sizes()
    has_roles = roles is not None or local_attributes is not None or hasattr(model, "parallel_plan")
    try:
        plan = _read_plan(model, roles, local_attributes, sizes)
        plan = validate_plan(model, plan, sizes)
    except ValueError as error:
        is_unsplit = sizes["x"] == sizes["y"] == 1
        if has_roles or not (is_unsplit or isinstance(error, UnknownRolesError)):
            raise
        if (found := _gather_adapted_blocks(model, sizes, options)) is not None:
            return found
        experts = _experts_beside_blocks(model, check_sizes(sizes), error) if sizes.get("expert", 1) > 1 else {}
        return BlockPlan(tuple(find_blocks(model)), str(error), is_pretrained_model(model), experts)
    return plan


_LAUNCHED_BY_HOST = ("cuda",)  # devices that wait for the host where kernels are small
_OUTSIDE = ("embedding", "positions", "head", "loss")  # roles of what is in no block
_DROPOUTS = ("dropout", "inner_dropout")


def prefer_blocks(
    model: nn.Module, plan: ShardingPlan | BlockPlan, request: ShardingRequest
) -> ShardingPlan | BlockPlan:
    """Gather whole blocks of a transformers model where the host would launch their roles for longer than the GPU
    computes; what is outside of them, embedding, head and loss, keeps its role.

    With roles each weight is gathered, multiplied and reduced by itself, which copy engines repay from MIN_COPIED_BYTES
    on. So it is where z alone divides the model, and all weights of its blocks are smaller (docs/decisions/041).
    Options that take roles of linears keep them.
    """
    grid, options = request.grid, request.options
    if not isinstance(plan, ShardingPlan) or grid.size("z") == 1 or grid.device.type not in _LAUNCHED_BY_HOST:
        return plan
    # Transformers' own checkpointing frees no block's weights.
    takes_roles = _takes_roles(options) or any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    has_own_roles = not plan.is_pretrained or callable(getattr(model, "parallel_plan", None))
    if takes_roles or _divides_blocks(grid.sizes, options) or has_own_roles or plan.experts or not plan.named("head"):
        return plan
    gathered = _gather_blocks(model, plan)
    sent = [(each, request.precision.sent(each.dtype) or each.dtype) for each in _parameters_of(model, gathered)]
    is_small = all(each.numel() * dtype.itemsize < MIN_COPIED_BYTES for each, dtype in sent)
    return gathered if gathered is not None and is_small else plan


def _takes_roles(options: ExecutionOptions) -> bool:
    """True if an option is of linears that have roles."""
    return options.fp8 is not None or options.invariant or options.tune_matmuls or options.recomputation.is_on


def _divides_blocks(sizes: Mapping[str, Any], options: ExecutionOptions) -> bool:
    """True if ranks divide blocks, or the work in them, by more than z and rows."""
    axes = ("pipe", "context", "x", "y", "expert")
    return options.stages.virtual_stages > 1 or any(sizes.get(axis, 1) > 1 for axis in axes)


def _parameters_of(model: nn.Module, plan: ShardingPlan | None) -> list[nn.Parameter]:
    """The parameters of modules that are gathered whole."""
    parts = () if plan is None else plan.plain
    return [model.get_parameter(name) for part in parts if part.role.role == "gathered" for name in part.parameters]


def _gather_blocks(model: nn.Module, plan: ShardingPlan) -> ShardingPlan | None:
    """The plan with whole blocks gathered in place of the roles within them; None where these have parameters or roles
    of what is outside of them."""
    inside: dict[str, list[str]] = {name: [] for name in find_blocks(model)}

    def block_of(name: str) -> str | None:
        return next((prefix for prefix in _from_inside(name) if prefix in inside), None)

    holders: dict[int, set[str | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(block := block_of(name))
        if block is not None:
            inside[block].append(name)
    is_shared = any(len(blocks) > 1 for blocks in holders.values())  # by blocks, or by one and by what is outside
    if not inside or is_shared or any(block_of(name) is not None for name in plan.named(*_OUTSIDE)):
        return None
    gathered = [PlainPart(name, tuple(names), True, Role("gathered")) for name, names in inside.items()]
    return replace(
        plan,
        roles={name: role for name, role in plan.roles.items() if block_of(name) is None or role.role in _DROPOUTS},
        local_attributes={},  # nothing is divided over x or y
        plain=(*[part for part in plan.plain if block_of(part.label) is None], *gathered),
    )


def _gather_adapted_blocks(
    model: nn.Module, sizes: Mapping[str, Any], options: ExecutionOptions
) -> ShardingPlan | None:
    """Gather whole the blocks that PEFT has adapted, within which adapters have no roles; embedding, head and loss keep
    theirs, so that whole logits are never made.

    None where it has adapted more than blocks, where more than z and rows divide the model, and for options that free
    blocks in another way.
    """
    inner = unwrap(model)
    is_whole = len([*inner.parameters()]) == len([*model.parameters()])  # prompts are beside the transformers model
    if not adapters_of(model) or not is_whole or find_experts(inner):
        return None
    if _takes_roles(options) or _divides_blocks(sizes, options):
        return None
    modules = dict(inner.named_modules(remove_duplicate=False))
    try:
        plan = _gather_blocks(inner, _read_plan(inner, None, None, sizes, refuses=False))
        if plan is None or not plan.named("head"):
            return None
        blocks = [part.whose for part in plan.plain if part.role.role == "gathered"]
        inside = {name for name in modules if any(block in blocks for block in _from_inside(name))}
        _refuse_unknown({name: modules[name] for name in modules.keys() - inside}, plan.roles, [])
        plan = validate_plan(inner, plan, sizes)
    except ValueError:
        return None
    name = next(name for name, module in model.named_modules() if module is inner)
    return plan.within(f"{name}." if name else "")


def _experts_beside_blocks(model: nn.Module, sizes: GridSizes, error: ValueError) -> dict[str, ExpertsKind]:
    """The experts that ranks divide of a model that is sharded by blocks, since its roles are not known (`error`)."""
    found = find_experts(model)
    kind, expert = type(model).__name__, sizes.expert
    if not found:
        raise UnknownRolesError(
            f"expert is {expert}, but no module of {kind} holds all of its experts, as parameters down_proj and "
            f"gate_up_proj (or up_proj) [experts, ., .] that ranks could divide: choose expert=1 ({error})"
        ) from error
    if sizes["x"] * sizes["y"] > 1:
        raise UnknownRolesError(
            f"{error}. With x=1 and y=1, ranks of expert={expert} would divide {found[0]} and its like, and blocks "
            "shard all else"
        ) from error
    return {name: check_experts(model, name, sizes) for name in found}


def _read_plan(
    model: nn.Module,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None,
    local_attributes: Mapping[str, str | None] | None,
    sizes: Mapping[str, int],
    *,
    refuses: bool = True,
) -> ShardingPlan:
    """Find each submodule's role by matching patterns with its name: the user's patterns first, then the model's.

    In a pattern `*` stands for one part of a dotted name. Raises ValueError for patterns that match nothing, and, if it
    refuses these, for submodules with parameters (or dropout) that have no role.
    """
    for argument, patterns in (("roles", roles), ("local_attributes", local_attributes)):
        if not isinstance(patterns or {}, Mapping) or not all(isinstance(pattern, str) for pattern in patterns or {}):
            raise ValueError(f"{argument} is {patterns!r}, but must be a mapping from patterns of names")
    modules = dict(model.named_modules(remove_duplicate=False))
    own_parameters = dict(model.named_parameters(remove_duplicate=False))
    is_pretrained = is_pretrained_model(model)
    linears = frozenset(name for name, module in modules.items() if is_linear(module))
    transposed = frozenset(name for name in linears if is_conv1d(modules[name]))
    found: dict[str, Role] = {}
    for pattern, value in (roles or {}).items():
        role = Role.parse(value)
        names = _with_role(role, pattern, modules, own_parameters)
        if not names:
            kind, known = ("parameter", own_parameters) if role.role == "inner_parameter" else ("submodule", modules)
            raise ValueError(f"no {kind} is named {pattern!r}{did_you_mean(pattern, known)}")
        found.update(dict.fromkeys(names, role))
    own: Mapping[str, Any]
    own_attributes: Mapping[str, str] = {}
    if callable(declared := getattr(model, "parallel_plan", None)):
        own = declared()
    else:
        own, own_attributes = plan_of(model, {name: role.role for name, role in found.items()}, sizes)
    of_own_plan: set[str] = set()
    for pattern, value in own.items():
        role = Role.parse(value)
        for name in _with_role(role, pattern, modules, own_parameters):
            if name not in found:
                found[name] = role
                of_own_plan.add(name)
    if is_pretrained:
        for name, kind in norms_next_to_linears(model, found).items():
            found.setdefault(name, Role(kind))
    attributes: dict[str, str | None] = {}
    for pattern, axis in {**own_attributes, **(local_attributes or {})}.items():
        owner, _, attribute = pattern.rpartition(".")
        names = [
            f"{name}.{attribute}".removeprefix(".")
            for name in _matching(owner, modules)
            if hasattr(modules[name], attribute)
        ]
        if not names and pattern in (local_attributes or {}):
            raise ValueError(f"no submodule has the attribute {pattern!r}")
        attributes.update(dict.fromkeys(names, axis))
    plain = {name: role for name, role in found.items() if role.role in PLAIN}
    found = {name: role for name, role in found.items() if name not in plain}
    parts = _plain_parts(plain, modules, own_parameters, found)
    if refuses:
        _refuse_unknown(modules, found, plain)
    placed = {name: found[name] for name in modules if name in found}
    for name, role in placed.items():
        weight = getattr(modules[name], "weight", None)
        if role.shared and isinstance(weight, Tensor):  # it says how many units there are
            placed[name] = role.on(weight.shape[1 if name in transposed else 0], sizes["x"])
    return ShardingPlan(placed, attributes, parts, frozenset(of_own_plan), is_pretrained, linears, transposed)


def _with_role(
    role: Role, pattern: str, modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """The submodules whose names match the pattern; parameters, where the role is for these."""
    if role.role == "inner_parameter":
        return _matching(pattern, parameters)
    return _matching(pattern, modules) or (_matching(pattern, parameters) if role.role == "replicated" else [])


def _plain_parts(
    plain: Mapping[str, Role],
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    found: Mapping[str, Role],
) -> tuple[PlainPart, ...]:
    """The parameters of modules that are not sharded, except submodules with their own roles, and those that have
    such a role themselves."""
    parts: dict[tuple[str, bool, Role], list[str]] = {}
    for name in parameters:
        owner = name.rpartition(".")[0]
        whose = next((part for part in _from_inside(owner) if part in plain and part in modules), None)
        if name in plain and plain[name].role == "inner_parameter" and whose is not None:
            raise ValueError(
                f"{name} has the role 'inner_parameter', but it is within {whose}, of which every rank of x has all: "
                "leave out one of the two roles"
            )
        if owner not in found and whose is not None:
            parts.setdefault((whose, True, plain[whose]), []).append(name)
        elif name in plain:
            parts.setdefault((owner, False, plain[name]), []).append(name)
    return tuple(PlainPart(whose, tuple(names), is_module, role) for (whose, is_module, role), names in parts.items())


def _from_inside(name: str) -> list[str]:
    """A dotted name and those of its parents: a.b.c, a.b, a, and the model's, which is empty."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _refuse_unknown(modules: Mapping[str, nn.Module], found: Mapping[str, Role], plain: Collection[str]) -> None:
    unknown, names_unknown = [], []
    of_roles = {id(parameter) for name in found for parameter in modules[name].parameters(recurse=False)}
    for name, module in modules.items():
        is_whole = any(part in plain for part in _from_inside(name))
        names = [  # a parameter that is another module's too, which has a role, is sharded as it is there
            f"{name}.{key}".removeprefix(".")
            for key, parameter in module.named_parameters(recurse=False)
            if name in found or id(parameter) not in of_roles
        ]
        owns = not is_whole and any(own not in plain for own in names)
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        looks_like_norm = "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
        normalizes = looks_like_norm and not is_whole and not names
        if (owns or drops or normalizes) and name not in found:
            names_unknown.append(name)
            unknown.append(f"{name or 'the model itself'} ({type(module).__name__})")
    if unknown:
        routers = {wildcard(name): "router" for name in names_unknown if _is_next_to_experts(name, found)}
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise UnknownRolesError(
            f"these submodules have no role: {shown}. Stretto does not guess roles: pass "
            f"roles={{'name or pattern': role}}, each role one of {', '.join(KINDS)}"
            + (f"; if it chooses experts, roles={routers}" if routers else "")
        )


def _is_next_to_experts(name: str, found: Mapping[str, Role]) -> bool:
    """True if a submodule is in the module that holds some experts, as routers are."""
    around = f"{name.rpartition('.')[0]}."
    return any(role.role == "experts" and other.startswith(around) for other, role in found.items())
