# SPDX-License-Identifier: Apache-2.0
"""The roles of a model's submodules: read from the model's plan or the user's patterns, never guessed.

`sharding_of` says how each role shards its parameters.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, LOSS, REPLICAS, axes_of, group_sizes, layout_sizes
from stretto.huggingface.family_roles import wildcard
from stretto.huggingface.formulas import UnknownRolesError
from stretto.huggingface.pretrained_model import is_conv1d
from stretto.huggingface.roles import norms_next_to_linears, plan_of
from stretto.parallel.layout import Split
from stretto.suggestions import did_you_mean, name_known

KINDS = {
    "colwise": "linear, input over y and output over x (column-parallel)",
    "rowwise": "linear, input over x and output over y (row-parallel)",
    "compress": "linear, input over y, whose output every rank has whole and each x rank uses for its own heads (the "
    "compressed queries, keys and values of latent attention)",
    "expand": "linear, from features that every rank has whole to an output over x (heads, of a latent)",
    "embedding": "token embedding, vocabulary over x and hidden over y",
    "positions": "small embedding, hidden over y",
    "norm": "LayerNorm or RMSNorm over the hidden features, which y splits",
    "head_norm": "norm over the features of one attention head, which nothing splits",
    "inner_norm": "norm over all the features that a colwise linear makes, which x splits",
    "head": "the language-model head, vocabulary over x",
    "loss": "called with the head's logits, the targets and their number: becomes the sharded cross-entropy",
    "dropout": "dropout of hidden activations (features over y)",
    "inner_dropout": "dropout between a colwise and a rowwise linear (features over x)",
    "replicated": "any module, or parameter of a module's own, between blocks, that every rank has whole (y=1)",
    "gathered": "any module that takes and makes hidden features: z shards its parameters, which are gathered for its "
    "forward pass, and all ranks of x and y compute it whole (experts, say)",
    "experts": "experts(hidden [t, h], top_k_index [t, k], top_k_weights [t, k]) -> [t, h], with the parameters "
    "gate_up_proj [E, 2F, h] (gate first; up_proj [E, F, h] without gates) and down_proj [E, h, F]: expert divides the "
    "E experts, x splits F, y splits h",
    "router": "any module that reads whole hidden features, and that all ranks of x and y compute alike: what chooses "
    "a token's experts, or a linear that makes the one number by which a shared expert is scaled",
    "inner_parameter": "parameter of a module's own, between a colwise and a rowwise linear: x splits its dim 0 (one "
    "number for each attention head, say)",
}
# Roles of modules that are not sharded, and of parameters that their code reads as plain tensors.
PLAIN = ("replicated", "gathered", "inner_parameter", "router")


@dataclass(frozen=True)
class Role:
    """The role of a submodule, which determines how `parallelize` splits its parameters and activations.

    `role` is one of KINDS. `segments`: the number of equal parts that are fused in the output features; each part is
    split separately. `unit`: the number of consecutive output features that must stay on one rank (for example a
    head's); error messages call it `unit_name`.

    `shared`: how many features of a unit, its last ones, several ranks may use (of a KV head: all; of a head's queries,
    key and value in one: the last two). Then x may be a multiple of the number of units: each is copied to several
    ranks, which divide its other features. `shared_by`: the integer attribute, of the module around a linear, that
    counts what shares a unit (its queries), of which each rank has its part. `copies`: how many ranks of x hold each
    unit; `read_plan` sets it.
    """

    role: str
    segments: int = 1
    unit: int = 1
    unit_name: str = "output features"
    shared: int = 0
    shared_by: str = ""
    copies: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        for name in ("role", "unit_name", "shared_by"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"a role's {name} is {value!r}, but must be text")
        if self.role not in KINDS:
            raise ValueError(f"{self.role!r} is not a role{name_known(self.role, KINDS, 'the roles are')}")
        for name in ("segments", "unit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"a role's {name} is {value!r}, but must be a whole number, at least 1")
        if isinstance(self.shared, bool) or not isinstance(self.shared, int) or not 0 <= self.shared <= self.unit:
            raise ValueError(f"a role's shared is {self.shared!r}, but must be a whole number from 0 to {self.unit}")

    def on(self, features: int, x: int) -> "Role":
        """The same for so many output features on x ranks: with `copies`, where units that are shared are fewer."""
        units = features // self.unit
        if self.shared and self.segments == 1 and 0 < units < x and x % units == 0:
            object.__setattr__(made := replace(self), "copies", x // units)
            return made
        return self

    @property
    def units(self) -> str:
        """What messages call units of several features."""
        is_named = self.unit == 1 or self.unit_name != Role.unit_name
        return self.unit_name if is_named else f"units of {self.unit} output features"

    @classmethod
    def parse(cls, value: "Role | str | Mapping[str, Any]") -> "Role":
        """From a Role, its kind's name, or a mapping of its fields."""
        if isinstance(value, Role):
            return value
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping) or "role" not in value:
            raise ValueError(f"a role is a name or a mapping with the key 'role', not {value!r}")
        known = [field.name for field in fields(cls) if field.init]
        for key in value:
            if key not in known:
                raise ValueError(f"a role has no option {key!r}{name_known(key, known, 'it has')}")
        return cls(**value)


@dataclass(frozen=True)
class PlainPart:
    """Parameters, by name, that a model's own code reads as plain tensors: all of the submodule `whose`, or some of its
    own ones. `role`: one of PLAIN."""

    whose: str
    parameters: tuple[str, ...]
    is_module: bool
    role: Role

    @property
    def label(self) -> str:
        """What messages call it."""
        return (self.whose or "the model") if self.is_module else self.parameters[0]


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is sharded: its submodules' roles, and the integer attributes that count a rank's share.

    `local_attributes`: the axis that divides each, by name; None for one that all ranks keep as it is. `plain`: what is
    not replaced. `of_own_plan`: the submodules whose roles come with the model, whose code works on a rank's part.
    """

    roles: dict[str, Role]
    local_attributes: dict[str, str | None]
    plain: tuple[PlainPart, ...] = ()
    of_own_plan: frozenset[str] = frozenset()

    @property
    def copied(self) -> dict[str, Role]:
        """The roles whose units several ranks of x hold, by name."""
        return {name: role for name, role in self.roles.items() if role.copies > 1}

    @property
    def replicated(self) -> tuple[PlainPart, ...]:
        """The parts that every rank of x computes whole, except for routers, which are small."""
        return tuple(part for part in self.plain if part.role.role not in ("inner_parameter", "router"))

    def named(self, *kinds: str) -> list[str]:
        return [name for name, role in self.roles.items() if role.role in kinds]


def read_plan(
    model: nn.Module,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None,
    local_attributes: Mapping[str, str | None] | None,
    sizes: Mapping[str, int],
) -> ShardingPlan:
    """Find each submodule's role by matching patterns with its name: the user's patterns first, then the model's.

    In a pattern `*` stands for one part of a dotted name. Raises ValueError for patterns that match nothing, and for
    submodules with parameters (or dropout) that have no role.
    """
    for argument, patterns in (("roles", roles), ("local_attributes", local_attributes)):
        if not isinstance(patterns or {}, Mapping) or not all(isinstance(pattern, str) for pattern in patterns or {}):
            raise ValueError(f"{argument} is {patterns!r}, but must be a mapping from patterns of names")
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, Role] = {}
    own_parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern, value in (roles or {}).items():
        role = Role.parse(value)
        names = _with_role(role, pattern, modules, own_parameters)
        if not names:
            kind, known = ("parameter", own_parameters) if role.role == "inner_parameter" else ("submodule", modules)
            raise ValueError(f"no {kind} is named {pattern!r}{did_you_mean(pattern, known)}")
        found.update(dict.fromkeys(names, role))
    own, own_attributes = _own_plan(model, found, sizes)
    of_own_plan: set[str] = set()
    for pattern, value in own.items():
        role = Role.parse(value)
        for name in _with_role(role, pattern, modules, own_parameters):
            if name not in found:
                found[name] = role
                of_own_plan.add(name)
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
    _refuse_unknown(model, found, plain)
    placed = {name: _copied(found[name], module, sizes["x"]) for name, module in modules.items() if name in found}
    return ShardingPlan(placed, attributes, parts, frozenset(of_own_plan))


def _copied(role: Role, module: nn.Module, x: int) -> Role:
    """The role, with copies of the units of a module whose weight says how many there are."""
    weight = getattr(module, "weight", None)
    if not role.shared or not isinstance(weight, Tensor):
        return role
    return role.on(weight.shape[1 if is_conv1d(module) else 0], x)


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


def _own_plan(
    model: nn.Module, known: Mapping[str, Role], sizes: Mapping[str, int]
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    own = getattr(model, "parallel_plan", None)
    if callable(own):
        return own(), {}
    return plan_of(model, {name: role.role for name, role in known.items()}, sizes)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _refuse_unknown(model: nn.Module, found: Mapping[str, Role], plain: Collection[str]) -> None:
    unknown, names_unknown = [], []
    of_roles = {id(parameter) for name in found for parameter in model.get_submodule(name).parameters(recurse=False)}
    for name, module in model.named_modules(remove_duplicate=False):
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
    """Whether a submodule is in the module that holds some experts, as routers are."""
    around = f"{name.rpartition('.')[0]}."
    return any(role.role == "experts" and other.startswith(around) for other, role in found.items())


@dataclass(frozen=True)
class ParameterSharding:
    """How one parameter is split, and over which axes its gradients are summed.

    is_weight: it is gathered over z before use, and z is one of its splits.
    """

    splits: tuple[Split, ...]
    sum_axes: tuple[str, ...]
    is_weight: bool = False

    def on(self, sizes: Mapping[str, int]) -> "ParameterSharding":
        """The same without axes of one rank, which split nothing."""
        ranks = group_sizes(sizes) | layout_sizes(sizes)
        return ParameterSharding(
            tuple(split for split in self.splits if ranks[split.axis] > 1),
            tuple(axis for axis in self.sum_axes if ranks[axis] > 1),
            self.is_weight,
        )


LINEARS = {
    "colwise": ("x", "y"),
    "rowwise": ("y", "x"),
    "head": ("x", "y"),
    "compress": (None, "y"),
    "expand": ("x", None),
}
"""The axes over which linears' output and input features are split, by role; None: every rank has all of them."""


def gathered_sharding(parameter: nn.Parameter, sizes: Mapping[str, int]) -> ParameterSharding:
    """How a parameter is sharded whose module gathers it over z: by its dim 0, where it has one and z several ranks."""
    if parameter.dim() > 0 and parameter.numel() > 0 and sizes["z"] > 1:
        return ParameterSharding((Split(0, "z"),), (REPLICAS,), is_weight=True)
    return ParameterSharding((), (LOSS,))


EXPERTS_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""The parameters of a module with the role "experts": one of the first two, and the last."""


def experts_sharding(part: str, shape: Sequence[int], sizes: Mapping[str, Any]) -> ParameterSharding:
    """How a module with the role "experts" shards one of EXPERTS_PARAMETERS, whose whole shape this is.

    Weights are gathered over the last split's axis, along its dim: by experts if that divides those of a rank, else by
    their rows, if it divides these. Without expert, the axes are those of all weights.
    """
    ranks = layout_sizes(sizes)
    inner, outer = (2, 1) if part == "down_proj" else (1, 2)
    folds = sizes.get("expert_tensor") == "fold"
    cut = () if folds else (Split(inner, "x", 2 if part == "gate_up_proj" else 1),)
    splits = (Split(0, EXPERT), *cut, Split(outer, "y"))
    here = [shape[dim] // prod(ranks[split.axis] for split in splits if split.dim == dim) for dim in (0, 1)]
    by_rows = here[0] % ranks[EXPERT_Z] != 0 and here[1] % ranks[EXPERT_Z] == 0
    if ranks[EXPERT] > 1:
        sums = (EXPERT_DATA, *(axis for axis in axes_of(REPLICAS) if axis != "data"))
        return ParameterSharding((*splits, Split(int(by_rows), EXPERT_Z)), sums, is_weight=True)
    return ParameterSharding((*splits[1:], Split(int(by_rows), "z")), (REPLICAS,), is_weight=True)


def sharding_of(role: Role, part: str, *, is_transposed: bool = False) -> ParameterSharding:
    """How a module of this role shards its `part`, "weight" or "bias". `is_transposed`: it is stored [in, out]."""
    match role.role:
        case kind if kind in LINEARS:
            output_axis, input_axis = LINEARS[kind]
            dim = 1 if is_transposed else 0
            of_output = () if output_axis is None else (Split(dim, output_axis, role.segments, role.copies),)
            if part == "bias":
                return ParameterSharding(tuple(replace(split, dim=0) for split in of_output), (LOSS,))
            of_input = () if input_axis is None else (Split(1 - dim, input_axis),)
            return ParameterSharding((*of_output, *of_input, Split(0, "z")), (REPLICAS,), is_weight=True)
        case "embedding":
            return ParameterSharding((Split(0, "x"), Split(1, "y"), Split(0, "z")), (REPLICAS,), is_weight=True)
        case "positions":
            return ParameterSharding((Split(1, "y"),), (LOSS,))
        case "norm":
            return ParameterSharding((Split(0, "y"),), (LOSS,))
        case "inner_norm":
            return ParameterSharding((Split(0, "x", copies=role.copies),), (LOSS,))
        case "head_norm":  # it sees only the heads of its x rank
            return ParameterSharding((), (LOSS, "x"))
        case "inner_parameter":  # as a colwise linear's bias
            return ParameterSharding((Split(0, "x", role.segments),), (LOSS,))
        case "replicated" | "router":  # ranks of x have the same activations, and so the same gradients
            return ParameterSharding((), (LOSS,))
        case _:
            raise AssertionError(f"a {role.role} has no parameters")
