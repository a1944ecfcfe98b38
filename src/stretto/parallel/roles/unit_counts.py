# SPDX-License-Identifier: Apache-2.0
"""Finds integers that count what an axis splits (attention heads, say) and that the user has not named.

A module's own code that reads such an integer after `parallelize` must find this rank's number. Shapes do not always
show a wrong one: `q.view(batch, -1, self.num_heads, self.head_dim)` fits, and mixes tokens.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from stretto.huggingface.family_roles import wildcard
from stretto.parallel.roles.plan import Role, ShardingPlan

_COUNTS_HEADS = re.compile(r"heads?$", re.IGNORECASE)  # num_heads, n_head, num_key_value_heads
_SIZE_OF_A_HEAD = re.compile(r"(head_?|_)(dim|size|features)$|(^|_)(d|dim|size)_?(head|k|kv)$", re.IGNORECASE)


@dataclass(frozen=True)
class _Linear:
    """A colwise linear and its number of whole output features."""

    name: str
    role: Role
    outputs: int

    @property
    def segment(self) -> int:
        """The output features of one fused part."""
        return self.outputs // self.role.segments

    @property
    def units(self) -> int:
        return self.segment // self.role.unit


def refuse_unnamed_counts(modules: Mapping[str, nn.Module], plan: ShardingPlan, sizes: Mapping[str, int]) -> None:
    """Raise ValueError for an integer that seems to count what x splits, unless `local_attributes` names it.

    It belongs to a module around a colwise linear and is read by that module's own code outside of the constructor. It
    equals the linear's number of units (heads); or, in a module that has such a number, the linear's features, by which
    code divides. All modules of one class must agree: a layer's index is not a number of heads, although some layer's
    equals it. Linears whose roles come with the model (`parallel_plan`, transformers' tensor-parallel plan) are left
    out: its code works on a rank's part.
    """
    if sizes["x"] == 1:
        return
    around = _linears_around(modules, plan)
    sharers = {  # divided where units are copied
        f"{name.rpartition('.')[0]}.{role.shared_by}".removeprefix(".")
        for name, role in plan.roles.items()
        if role.shared_by
    }
    classes: dict[type[Any], list[str]] = {}
    for owner in around:
        classes.setdefault(type(modules[owner]), []).append(owner)
    unnamed: dict[str, tuple[str, str]] = {}
    for kind, owners in classes.items():
        read = sorted(_names_read(kind))
        counts = {each: [_count(each, modules[owner], around[owner]) for owner in owners] for each in read}
        if any(map(all, counts.values())):
            for each in read:
                if not all(counts[each]):
                    counts[each] = [_features(each, modules[owner], around[owner]) for owner in owners]
        for attribute, whats in counts.items():
            for owner, what in zip(owners, whats, strict=True):
                name = f"{owner}.{attribute}".removeprefix(".")
                if all(whats) and what is not None and name not in plan.local_attributes and name not in sharers:
                    unnamed.setdefault(wildcard(name), (name, what))
    if unnamed:
        named = dict.fromkeys(unnamed, "x")
        listed = "; ".join(
            f"{name} is {_integer(modules[name.rpartition('.')[0]], name.rpartition('.')[2])}, {what}"
            for name, what in unnamed.values()
        )
        raise ValueError(
            f"{listed}. The model's code reads these numbers, but x={sizes['x']} splits what they count, so a rank "
            "has fewer. Pass "
            f"local_attributes={named}, with None in place of 'x' for a number that stays the whole model's"
        )


def _linears_around(modules: Mapping[str, nn.Module], plan: ShardingPlan) -> dict[str, list[tuple[_Linear, bool]]]:
    """The colwise linears within each module that has code of its own, and whether it is the nearest around them."""
    found: dict[str, list[tuple[_Linear, bool]]] = {}
    for name in plan.named("colwise", "expand"):
        if name in plan.of_own_plan:
            continue
        module, is_nearest = modules[name], True
        shape: Any = module.weight.shape
        linear = _Linear(name, plan.roles[name], shape[1 if name in plan.transposed else 0])
        for owner in _parents(name):
            if not type(modules[owner]).__module__.startswith("torch."):  # nn.Sequential reads no numbers
                found.setdefault(owner, []).append((linear, is_nearest))
                is_nearest = False
    return found


def _parents(name: str) -> Iterator[str]:
    """The names of the modules around a submodule, from the inside to the whole model, which is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _integer(module: nn.Module, attribute: str) -> int | None:
    """The integer attribute of a module or its class; None for other types, and below 2."""
    value = inspect.getattr_static(module, attribute, None)
    return value if isinstance(value, int) and value > 1 else None


def _count(attribute: str, module: nn.Module, linears: list[tuple[_Linear, bool]]) -> str | None:
    """The linear, in words, whose units an integer seems to count; None if it counts none."""
    value = _integer(module, attribute)
    counts_heads = _COUNTS_HEADS.search(attribute) is not None
    for linear, is_nearest in linears:
        role = linear.role
        if value is None or not (is_nearest or counts_heads):
            continue
        # A head may have as many features as there are heads: then its name says which of the two it is.
        is_size = role.unit % value == 0 and _SIZE_OF_A_HEAD.search(attribute) is not None
        if role.unit > 1 and value == linear.units and not is_size:
            return f"the number of {role.units} of {linear.name}"
        if role.unit == 1 and counts_heads and linear.segment % value == 0:
            return f"by its name the number of heads that {linear.name} makes"
    return None


def _features(attribute: str, module: nn.Module, linears: list[tuple[_Linear, bool]]) -> str | None:
    """The linear, in words, whose output features an integer seems to count; None if it counts none."""
    value = _integer(module, attribute)
    for linear, is_nearest in linears:
        if is_nearest and value is not None and value in (linear.outputs, linear.segment):
            return f"the number of output features of {linear.name}"
    return None


def _names_read(kind: type[Any]) -> frozenset[str]:
    """The names that a class's methods and properties use, as attributes among others; without its constructor."""
    names: set[str] = set()
    is_overridden = {"__init__"}
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.", "transformers.modeling_utils", "transformers.generation")):
            continue
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if name in is_overridden or not isinstance(code, CodeType):
                continue
            found = _names_in(code)
            names |= found
            if "super" not in found:
                is_overridden.add(name)
    return frozenset(names)


def _names_in(code: CodeType) -> set[str]:
    """The names in a function's code and in that of functions within it."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
