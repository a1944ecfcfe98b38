# SPDX-License-Identifier: Apache-2.0
"""Roles of a model's submodules, a plan of them (`parallel.resolve` finds it), and how each role shards its
parameters (`sharding_of`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

from torch import nn

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, LOSS, REPLICAS, axes_of, group_sizes, layout_sizes
from stretto.huggingface.experts import ExpertsKind
from stretto.huggingface.formulas import NormKind
from stretto.parallel.layout import Split
from stretto.quantities import require_whole
from stretto.suggestions import name_known, require_fields

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
    "gate_up_proj [E, 2F, h] (up_proj [E, F, h] without gates) and down_proj [E, h, F], or all of them [E, in, out], "
    "and perhaps their biases: expert divides the E experts, x splits F, y splits h",
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
    unit; `parallel.resolve` sets it.
    """

    role: str
    segments: int = 1
    unit: int = 1
    unit_name: str = "output features"
    shared: int = 0
    shared_by: str = ""
    copies: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        require_fields(self, "a role's ")
        if self.role not in KINDS:
            raise ValueError(f"{self.role!r} is not a role{name_known(self.role, KINDS, 'the roles are')}")
        for name in ("segments", "unit"):
            require_whole(f"a role's {name}", getattr(self, name))
        require_whole("a role's shared", self.shared, 0, self.unit)

    def on(self, features: int, x: int) -> "Role":
        """The same for so many output features on x ranks: with `copies`, where units that are shared are fewer."""
        units = features // self.unit
        if self.shared and self.segments == 1 and 0 < units < x and x % units == 0:
            object.__setattr__(made := replace(self), "copies", x // units)
            return made
        return self

    @property
    def units(self) -> str:
        """The name of units of several features in messages."""
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
            raise ValueError(f"a role must be a name or a mapping with the key 'role', not {value!r}")
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
        return (self.whose or "the model") if self.is_module else self.parameters[0]


@dataclass(frozen=True)
class ShardingPlan:
    """A model's submodules' roles, and the integer attributes that count a rank's share.

    `local_attributes`: the axis that divides each, by name; None for one that all ranks keep as it is. `plain`: what is
    not replaced. `of_own_plan`: the submodules whose roles come with the model, whose code works on a rank's part.
    `is_pretrained`: it is a transformers model. `linears`: its submodules that compute a linear without being
    nn.Linear; `transposed`: those whose weight is [in, out]. `norms`, `experts` and `scales`: the formulas of norms
    and experts, and what embeddings multiply their rows by, by name. `sharded_blocks`: of a transformers model with
    sequence sharding, the blocks between whose ends a rank of x has a part of the tokens; () if there are none, or all
    modules see a part.
    """

    roles: dict[str, Role]
    local_attributes: dict[str, str | None]
    plain: tuple[PlainPart, ...] = ()
    of_own_plan: frozenset[str] = frozenset()
    is_pretrained: bool = False
    linears: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    norms: Mapping[str, NormKind] = field(default_factory=dict)
    experts: Mapping[str, ExpertsKind] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    sharded_blocks: tuple[str, ...] = ()

    @property
    def copied(self) -> dict[str, Role]:
        """The roles whose units several ranks of x hold, by name."""
        return {name: role for name, role in self.roles.items() if role.copies > 1}

    @property
    def replicated(self) -> tuple[PlainPart, ...]:
        """The parts that every rank of x computes whole, except for routers, which are small."""
        return tuple(part for part in self.plain if part.role.role not in ("inner_parameter", "router"))

    def within(self, prefix: str) -> "ShardingPlan":
        """Return the plan for a model that holds this one: `prefix` goes before all names."""
        parts = [
            replace(part, whose=prefix + part.whose, parameters=tuple(prefix + name for name in part.parameters))
            for part in self.plain
        ]

        def rename(names: Any) -> Any:
            if isinstance(names, dict):
                return {prefix + name: value for name, value in names.items()}
            return type(names)(prefix + name for name in names)

        of_names = [each.name for each in fields(self) if each.name not in ("plain", "is_pretrained")]
        return replace(self, plain=tuple(parts), **{name: rename(getattr(self, name)) for name in of_names})

    def named(self, *kinds: str) -> list[str]:
        return [name for name, role in self.roles.items() if role.role in kinds]

    def sees_part_of_tokens(self, name: str) -> bool:
        """With sequence sharding: True for what a rank of x computes of its tokens alone, or gathers them for."""
        return not self.sharded_blocks or any(name.startswith(f"{block}.") for block in self.sharded_blocks)

    @property
    def attentions(self) -> dict[str, list[str]]:
        """The modules of `sharded_blocks` that make heads, with their linears that do."""
        found: dict[str, list[str]] = {}
        for name, role in self.roles.items():
            if role.role == "colwise" and role.unit > 1 and self.sees_part_of_tokens(name):
                found.setdefault(name.rpartition(".")[0], []).append(name)
        return found


@dataclass(frozen=True)
class ParameterSharding:
    """The splits of one parameter, and the axes over which its gradients are summed.

    is_weight: it is gathered over z before use, and z is one of its splits.
    """

    splits: tuple[Split, ...]
    sum_axes: tuple[str, ...]
    is_weight: bool = False

    def on(self, sizes: Mapping[str, int]) -> "ParameterSharding":
        """The same without axes of one rank, which split nothing."""
        parts = layout_sizes(sizes)
        ranks = parts | group_sizes(sizes)
        return ParameterSharding(
            tuple(split for split in self.splits if parts[split.axis] > 1),
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
    """Shards a parameter whose module gathers it over z: by its dim 0, where it has one and z several ranks."""
    if parameter.dim() > 0 and parameter.numel() > 0 and layout_sizes(sizes)["z"] > 1:
        return ParameterSharding((Split(0, "z"),), (REPLICAS,), is_weight=True)
    return ParameterSharding((), (LOSS,))


def experts_sharding(part: str, shape: Sequence[int], sizes: Mapping[str, Any], kind: ExpertsKind) -> ParameterSharding:
    """Shards the parameter `part`, whose whole shape this is, of a module with the role "experts".

    Weights are gathered over the last split's axis, along its dim: by experts if that divides those of a rank, else by
    their rows, if it divides these. Without expert, the axes are those of all weights.
    """
    ranks = layout_sizes(sizes)
    is_down, folds, is_divided = part.startswith("down_proj"), sizes.get("expert_tensor") == "fold", ranks[EXPERT] > 1
    segments = 2 if kind.is_gated and not (is_down or kind.is_interleaved) else 1
    if part.endswith("_bias"):
        of_output = (Split(1, "y"),) if is_down else () if folds else (Split(1, "x", segments),)
        if not is_divided:
            return ParameterSharding(of_output, (LOSS,))
        others = (axis for axis in axes_of(LOSS) if axis not in ("data", "z"))
        return ParameterSharding((Split(0, EXPERT), *of_output), (EXPERT_DATA, *others, EXPERT_Z))
    inner, outer = (2, 1) if is_down != kind.is_transposed else (1, 2)
    cut = () if folds else (Split(inner, "x", segments),)
    splits = (Split(0, EXPERT), *cut, Split(outer, "y"))
    here = [shape[dim] // prod(ranks[split.axis] for split in splits if split.dim == dim) for dim in (0, 1)]
    by_rows = here[0] % ranks[EXPERT_Z] != 0 and here[1] % ranks[EXPERT_Z] == 0
    if is_divided:
        sums = (EXPERT_DATA, *(axis for axis in axes_of(REPLICAS) if axis != "data"))
        return ParameterSharding((*splits, Split(int(by_rows), EXPERT_Z)), sums, is_weight=True)
    return ParameterSharding((*splits[1:], Split(int(by_rows), "z")), (REPLICAS,), is_weight=True)


def sharding_of(role: Role, part: str, *, is_transposed: bool = False) -> ParameterSharding:
    """Shards the `part`, "weight" or "bias", of a module of this role. `is_transposed`: it is stored [in, out]."""
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
