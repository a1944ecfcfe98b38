# SPDX-License-Identifier: Apache-2.0
"""Checks that a grid can hold a model, before anything is allocated or sent."""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from torch import nn

from stretto.axes import LOSS, SHARDS, GridSizes, check_sizes, group_sizes
from stretto.huggingface.experts import ExpertsKind, experts_kind
from stretto.huggingface.formulas import UnknownRolesError, check_loss, embedding_scale, norm_kind
from stretto.huggingface.refusals import refusal_of_sharded_sequence
from stretto.huggingface.roles import refuse_alibi, roles_tried
from stretto.huggingface.sequence import blocks_of
from stretto.parallel.roles.plan import LINEARS, PLAIN, PlainPart, Role, ShardingPlan, experts_sharding, sharding_of
from stretto.parallel.roles.unit_counts import refuse_unnamed_counts


def check_divides(count: int, size: int, axis: str, where: str, what: str, *, is_shared: bool = False) -> None:
    """Raise ValueError, with the nearest count that would do, unless grid axis `axis` of `size` divides `count`.

    is_shared: ranks may hold copies, so that the size may be a multiple of the count, too.
    """
    if count % size and not (is_shared and size % count == 0):
        nearest = max(1, round(count / size)) * size
        fitting = [max(n for n in range(1, size + 1) if count % n == 0)]
        if is_shared:
            divisors = (n for n in range(1, size) if size % n == 0)
            nearest = min(nearest, *divisors, key=lambda n: (abs(n - count), -n))
            fitting.append(-(-size // count) * count)
        raise ValueError(
            f"{where}: {count} {what} cannot be split over {axis}={size}; the nearest number of {what} that would do "
            f"is {nearest}, or choose {' or '.join(f'{axis}={n}' for n in fitting)}"
        )


def validate_plan(model: nn.Module, plan: ShardingPlan, sizes: Mapping[str, int]) -> ShardingPlan:
    """Check that a grid of these sizes can hold the model; return the plan with the formulas of norms and embeddings.

    Raises ValueError if it cannot; for a known family, with the roles tried.
    """
    try:
        return _validate(model, plan, sizes)
    except ValueError as error:
        roles = {name: role.role for name, role in plan.roles.items()}
        roles |= {part.whose if part.is_module else part.parameters[0]: part.role.role for part in plan.plain}
        if tried := roles_tried(model, roles):
            raise type(error)(f"{error}{tried}") from None
        raise


def _validate(model: nn.Module, plan: ShardingPlan, sizes: Mapping[str, int]) -> ShardingPlan:
    sizes = check_sizes(sizes)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    hidden = _hidden(modules, plan)
    if hidden is not None:
        check_divides(hidden, sizes["y"], "y", type(model).__name__, "hidden size")
    for kind in ("embedding", "head", "loss"):
        if len(plan.named(kind)) > 1 and kind != "embedding":
            raise ValueError(f"a model has one {kind}, but these have that role: {', '.join(plan.named(kind))}")
    fitting: dict[str, Role] = {}
    experts: dict[str, ExpertsKind] = {}
    try:
        for name, role in plan.roles.items():
            if role.role == "experts":
                experts[name] = check_experts(model, name, sizes)
            else:
                _check_module(name, modules[name], plan, sizes, hidden)
            fitting[name] = role
    except ValueError:
        _find_formulas(modules, replace(plan, roles=fitting))  # an unknown one counts first: blocks take any size
        raise
    plan = replace(_find_formulas(modules, plan), experts=experts)
    if sizes.expert > 1 and not plan.named("experts"):
        raise ValueError(
            f"expert is {sizes.expert}, but no submodule of {type(model).__name__} has the role 'experts': give one "
            "that role, or choose expert=1"
        )
    _check_shared(modules, plan, sizes)
    _check_plain(modules, parameters, plan, sizes)
    _check_loss(modules, plan)
    _refuse_functional_dropout(modules)
    if plan.is_pretrained and sizes["x"] > 1:
        refuse_alibi(model, plan.named("colwise", "expand"))
    for name, axis in plan.local_attributes.items():
        owner, _, attribute = name.rpartition(".")
        value = getattr(modules[owner], attribute)
        if axis is None:
            continue
        if not isinstance(axis, str) or axis not in sizes:
            raise ValueError(f"{axis!r} is not an axis of a grid; the axes are {', '.join(sizes)}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}: only whole numbers can be divided over an axis")
        around = f"{owner}.".removeprefix(".")
        is_copied = any(
            value * role.copies == sizes["x"] for part, role in plan.copied.items() if part.startswith(around)
        )
        check_divides(value, sizes[axis], axis, owner, attribute, is_shared=axis == "x" and is_copied)
    _check_sharers(modules, plan, sizes["x"])
    refuse_unnamed_counts(modules, plan, sizes)
    return plan


def _find_formulas(modules: Mapping[str, nn.Module], plan: ShardingPlan) -> ShardingPlan:
    """The plan with what its norms and embeddings compute; what others compute is checked."""
    norms, scales = {}, {}
    for name, role in plan.roles.items():
        module = modules[name]
        match role.role:
            case "norm" | "head_norm" | "inner_norm":
                norms[name] = norm_kind(module, name)
            case "embedding":
                assert isinstance(module, nn.Embedding)
                scales[name] = embedding_scale(module, name)
    return replace(plan, norms=norms, scales=scales)


def _check_sharers(modules: Mapping[str, nn.Module], plan: ShardingPlan, x: int) -> None:
    """Raise ValueError where the ranks that hold a unit cannot divide what shares it."""
    for name, role in plan.copied.items():
        owner = name.rpartition(".")[0]
        counted = getattr(modules[owner], role.shared_by, None)
        count = counted if isinstance(counted, int) else role.unit - role.shared
        if count % role.copies:
            what = f"{owner}.{role.shared_by}" if isinstance(counted, int) else "features of each that are not shared"
            raise ValueError(
                f"{name}: {role.copies} ranks of x={x} hold each of its {role.units}, but cannot divide {count} "
                f"({what}) among them; choose x={x // role.copies * gcd(count, role.copies)}"
            )


def check_takes_sharded_sequence(model: nn.Module, plan: ShardingPlan) -> ShardingPlan:
    """Return the plan, with the blocks of a transformers model between whose ends tokens are sharded.

    Raises ValueError unless the model's family is known to work on sharded tokens there, or the model declares that its
    code does between all modules, and no part of it needs all tokens.
    """
    if plan.is_pretrained and not hasattr(model, "takes_sharded_sequence"):
        if refusal := refusal_of_sharded_sequence(type(model).__name__, model.config.to_dict()):  # type: ignore[union-attr, operator]
            raise ValueError(f"shard_sequence: {refusal}; shard_sequence=False would do")
        plan = replace(plan, sharded_blocks=blocks_of(model, plan.named("rowwise")))
    elif not getattr(model, "takes_sharded_sequence", False):
        raise ValueError(
            f"shard_sequence: {type(model).__name__} does not declare that it supports sequence sharding: attention "
            "must read batch size and sequence length from the outputs of linears, not from its input; if it does, "
            "set takes_sharded_sequence = True on it"
        )
    for part in plan.replicated:
        if plan.sees_part_of_tokens(part.label):
            raise ValueError(
                f"shard_sequence: {part.label} is whole on every rank of x, but would see other tokens on each"
            )
    for part in plan.plain:
        if getattr(model.get_submodule(part.whose), "needs_whole_sequences", False):
            raise ValueError(
                f"shard_sequence: {part.whose} has a loss over each sequence, but a rank of x would have only a part "
                "of each sequence: choose shard_sequence=False, or a balance over all tokens ('switch', or 'bias' "
                "without a loss)"
            )
    return plan


def _hidden(modules: Mapping[str, nn.Module], plan: ShardingPlan) -> int | None:
    for name in plan.named("embedding", "positions"):
        return getattr(modules[name], "embedding_dim", None)
    return None


def _check_module(name: str, module: nn.Module, plan: ShardingPlan, sizes: GridSizes, hidden: int | None) -> None:
    role = plan.roles[name]
    if role.role != "loss":
        parts = {part for part, _ in module.named_parameters(recurse=False)}
        if parts - {"weight", "bias"} or (isinstance(module, nn.Linear) and "weight" not in parts):
            raise ValueError(
                f"{name} ({type(module).__name__}) has the parameters {', '.join(sorted(parts)) or 'none'}, but a "
                f"module with the role {role.role!r} has a weight and perhaps a bias: undo what has replaced them"
            )
    match role.role:
        case kind if kind in LINEARS:
            _check_linear(name, module, plan, sizes, hidden)
        case "embedding" | "positions":
            if role.role == "positions" or not isinstance(module, nn.Embedding):  # a subclass's rows may be scaled
                _expect(name, module, role, nn.Embedding)
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise UnknownRolesError(f"{name}: an embedding with {option} is not supported")
            _check_vocabulary(name, module.num_embeddings, role, sizes)  # type: ignore[arg-type]
            if sizes["y"] > 1 and module.embedding_dim != hidden:
                raise ValueError(
                    f"{name} makes {module.embedding_dim} features, where the hidden size is {hidden}: what is not "
                    "added to hidden features (a bias by head, say) cannot be split over y; choose y=1"
                )
        case "norm" | "head_norm" | "inner_norm":
            features: Any = getattr(module, "weight", None)
            axis = "x" if role.role == "inner_norm" else "y"
            if role.role != "head_norm" and role.copies == 1 and features is not None and features.dim() == 1:
                check_divides(features.shape[0], sizes[axis], axis, name, "features")
        case "dropout" | "inner_dropout":
            _expect(name, module, role, nn.Dropout)


def check_experts(model: nn.Module, name: str, sizes: GridSizes) -> ExpertsKind:
    """Find what experts compute. Raises ValueError for a module without their interface, and for sizes that the grid
    does not divide."""
    around = model.get_submodule(name.rpartition(".")[0])
    if (adapted := getattr(around, "parameter_name", None)) in model.get_submodule(name)._parameters:
        raise ValueError(
            f"PEFT's target_parameters adapt {adapted} of {name}, which Stretto would divide and replace: leave the "
            "experts out of target_parameters, or choose expert=1 without roles: z shards them with their adapters"
        )
    kind = experts_kind(model, name)
    experts, hidden, inner = model.get_parameter(f"{name}.down_proj").shape
    if kind.is_transposed:
        hidden, inner = inner, hidden
    check_divides(experts, sizes.expert, "expert", name, "experts")
    check_divides(inner, sizes.expert_x, "x", name, "inner features of an expert")
    check_divides(hidden, sizes["y"], "y", name, "hidden size")
    return kind


def _refuse_functional_dropout(modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for dropout that is not a module, whose masks would differ between ranks.

    It is recognized by a probability that a module stores.
    """
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if "drop" in attribute.lower() and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{name or type(module).__name__}.{attribute} is {value}: ranks would draw that dropout "
                    "differently, for Stretto replaces nn.Dropout modules only. Set it to 0.0 (Hugging Face: in the "
                    "config), or make it an nn.Dropout with a role"
                )


def _check_plain(
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    plan: ShardingPlan,
    sizes: Mapping[str, int],
) -> None:
    """Raise ValueError for modules that are not sharded on a grid that splits their inputs, and for ties."""
    held: dict[int, tuple[str, str]] = {}
    for name, role in plan.roles.items():
        if role.role != "loss":
            for key, parameter in modules[name].named_parameters(recurse=False):
                held[id(parameter)] = (f"{name}.{key}", role.role)
    for part in plan.plain:
        kind = part.role.role
        for name in part.parameters:
            other, other_kind = held.setdefault(id(parameters[name]), (name, kind))
            if other_kind != kind:
                raise ValueError(
                    f"{name} and {other} are one parameter, and only the first is {kind}"
                    if other_kind not in PLAIN
                    else f"{name} and {other} are one parameter, but their roles are {kind!r} and {other_kind!r}"
                )
        match kind:
            case "inner_parameter":
                _check_inner_parameters(parameters, part, sizes)
            case "gathered":
                _check_gathered(modules, part, plan, sizes)
            case "router":
                if not part.is_module or type(modules[part.whose]).forward is nn.Module.forward:
                    raise ValueError(f"{part.label} has the role 'router', but is no module that is called")
            case _ if sizes["y"] > 1:
                raise UnknownRolesError(
                    f"{part.label} has the role 'replicated': every rank has all of its features, but y={sizes['y']} "
                    "splits hidden ones. Choose y=1"
                )
        batch_norms = [m for m in modules[part.whose].modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if batch_norms and part.is_module and group_sizes(sizes)[LOSS] > 1:
            raise ValueError(
                f"{part.whose} has a {type(batch_norms[0]).__name__}, which would take its statistics from one rank's "
                "rows: choose data=1 and z=1, or another norm"
            )


def _check_inner_parameters(parameters: Mapping[str, nn.Parameter], part: PlainPart, sizes: Mapping[str, int]) -> None:
    """Raise ValueError for parameters whose dim 0 is not units that x divides."""
    role = part.role
    for name in part.parameters:
        rows = parameters[name].shape[:1]
        if not rows or rows[0] % (role.segments * role.unit):
            raise ValueError(
                f"{name}: a parameter of shape {list(parameters[name].shape)} is not {role.segments} segments "
                f"of whole units of {role.unit} along its dim 0"
            )
        check_divides(rows[0] // role.segments // role.unit, sizes["x"], "x", name, role.units)


def _check_gathered(
    modules: Mapping[str, nn.Module], part: PlainPart, plan: ShardingPlan, sizes: Mapping[str, int]
) -> None:
    """Raise ValueError for a module that is not called, or within which y splits features."""
    if type(modules[part.whose]).forward is nn.Module.forward:
        raise ValueError(
            f"{part.label} ({type(modules[part.whose]).__name__}) has the role 'gathered', but no forward of its own, "
            "before which its parameters could be gathered: give the role to the module that holds it"
        )
    inner = next((name for name in plan.roles if name.startswith(f"{part.whose}.")), None)
    if inner is not None and sizes["y"] > 1:
        raise ValueError(
            f"{inner} has the role {plan.roles[inner].role!r}, but is within {part.label}, where hidden features are "
            f"whole, and y={sizes['y']} splits them: leave out one of the two roles, or choose y=1"
        )


def _check_loss(modules: Mapping[str, nn.Module], plan: ShardingPlan) -> None:
    """Raise ValueError for a loss without a head, or one that the sharded cross-entropy does not equal."""
    for name in plan.named("loss"):
        heads = plan.named("head")
        if not heads:
            raise ValueError(
                f"{name} has the role 'loss', but no submodule has the role 'head': the sharded loss takes the head's "
                "logits. Give that role too, or compute the loss with stretto.parallel.mean_over_batch"
            )
        head: Any = modules[heads[0]]
        check_loss(modules[name], name, head.weight.shape[1 if heads[0] in plan.transposed else 0])


def _check_shared(modules: Mapping[str, nn.Module], plan: ShardingPlan, sizes: GridSizes) -> None:
    """Raise ValueError for a module with two roles, or a parameter that its modules shard in different ways."""
    of_module: dict[int, tuple[str, Role]] = {}
    of_parameter: dict[int, tuple[str, Any]] = {}
    for name, role in plan.roles.items():
        module = modules[name]
        first, first_role = of_module.setdefault(id(module), (name, role))
        if role != first_role:
            raise ValueError(
                f"{first} and {name} are one module, but their roles are {first_role.role!r} and {role.role!r}: "
                "give both names the same role, or make them two modules"
            )
        if role.role == "loss":
            continue
        for part, parameter in module.named_parameters(recurse=False):
            if role.role == "experts":
                cut = experts_sharding(part, parameter.shape, sizes.sizes(), plan.experts[name]).on(sizes.sizes())
            else:
                cut = sharding_of(role, part, is_transposed=name in plan.transposed).on(sizes.sizes())
            first, first_cut = of_parameter.setdefault(id(parameter), (f"{name}.{part}", cut))
            if cut != first_cut:
                raise ValueError(
                    f"{first} and {name}.{part} are one parameter, but their modules' roles cut it in different ways: "
                    f"{first_cut.splits} and {cut.splits}. Give the modules the same role, or a parameter each"
                )


def _check_linear(name: str, module: nn.Module, plan: ShardingPlan, sizes: GridSizes, hidden: int | None) -> None:
    role, is_transposed = plan.roles[name], name in plan.transposed
    if name not in plan.linears:
        _expect(name, module, role, nn.Linear)
    shape: Any = module.weight.shape
    outputs, inputs = (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
    output_axis, input_axis = LINEARS[role.role]

    def named(count: int, what: str) -> str:
        return "hidden size" if count == hidden else what

    if input_axis is not None:
        check_divides(inputs, sizes[input_axis], input_axis, name, named(inputs, "input features"))
    if role.role == "head":
        _check_vocabulary(name, outputs, role, sizes)
        return
    if outputs % (role.segments * role.unit):
        raise ValueError(
            f"{name}: {outputs} output features are not {role.segments} segments of whole units of {role.unit}"
        )
    units = outputs // role.segments // role.unit
    what = role.units if role.unit > 1 or role.segments > 1 else named(outputs, role.unit_name)
    if output_axis is not None:
        check_divides(units, sizes[output_axis], output_axis, name, what, is_shared=role.shared > 0)
    # z cuts dim 0 of the weight further: the output features as nn.Linear stores them, Conv1D's input features.
    axis = input_axis if is_transposed else output_axis
    rows = (inputs if is_transposed else outputs) // (1 if axis is None else sizes[axis] // role.copies)
    of_rank = "" if axis is None else f" (its rows, of which each {axis} rank has {rows})"
    check_divides(rows, sizes.shards, " x ".join(sizes.axes_of(SHARDS)), f"{name}{of_rank}", "weight rows")


def _check_vocabulary(name: str, vocab: int, role: Role, sizes: Mapping[str, int]) -> None:
    if role.role == "positions":
        return
    chunk = -(-vocab // sizes["x"])
    if chunk * (sizes["x"] - 1) >= vocab:
        raise ValueError(f"{name}: a vocabulary of {vocab} leaves some of x={sizes['x']} ranks without any of it")


def _expect(name: str, module: nn.Module, role: Role, kind: type[nn.Module]) -> None:
    takes_subclass = kind is nn.Linear and isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    if type(module) is not kind and not takes_subclass:
        raise UnknownRolesError(
            f"{name} is a {type(module).__name__}, but the role {role.role!r} takes exactly {kind.__name__}: "
            "a subclass may compute something else"
        )
