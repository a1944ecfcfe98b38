# SPDX-License-Identifier: Apache-2.0
"""Reads the roles of a transformers model: its family's, or those of its tensor-parallel plan."""

import contextlib
import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from stretto.axes import LOSS, group_sizes
from stretto.huggingface.families import FAMILIES, Family
from stretto.huggingface.family_roles import kv_heads, wildcard
from stretto.huggingface.formulas import UnknownRolesError
from stretto.huggingface.pretrained_model import base_and_prefix, is_pretrained_model
from stretto.huggingface.refusals import LANGUAGE_MODEL_HEAD, STYLES, refusal_of_attention_dropout, refusal_of_style
from stretto.huggingface.router_loss import refusal_of_router_loss


def plan_of(
    model: nn.Module, known: Mapping[str, str], sizes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The roles by pattern, and the attributes to divide, that a transformers model implies; empty for other models.

    known: the roles that the user has given, by names of submodules, whatever the model's plan says.
    sizes: of the grid's axes. The attention of some families is split on x=1 only.
    """
    if not is_pretrained_model(model):
        return {}, {}
    config: Any = model.config
    base, prefix = base_and_prefix(model)
    _refuse_attention_dropout(model)
    _refuse_config_dropout(model)
    ranks = group_sizes(sizes)[LOSS] if getattr(config, "output_router_logits", False) is True else 1
    if refusal := refusal_of_router_loss(model, stages=1, ranks=ranks):
        raise UnknownRolesError(refusal)
    attributes: Mapping[str, str] = {}
    beside: Mapping[str, Any] = {}
    family = FAMILIES.get(config.model_type, Family())
    if family.roles is not None:
        own = family.roles(config, sizes).without({name.removeprefix(prefix): role for name, role in known.items()})
        roles, attributes, beside = own.roles, own.local_attributes, family.head_roles
    else:
        tp_plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
        modules = dict(base.named_modules(remove_duplicate=False))
        unknown = {name: module for name, module in modules.items() if prefix + name not in known}
        roles = _roles_of_tp_plan(base, prefix, tp_plan, unknown)
        if roles:
            beside = {
                name: "dropout" for name, module in model.named_modules() if _is_between_blocks(name, module, prefix)
            }
    named: dict[str, Any] = {prefix + pattern: role for pattern, role in roles.items()} | dict(beside)
    if isinstance(getattr(model, LANGUAGE_MODEL_HEAD, None), nn.Linear):
        named[LANGUAGE_MODEL_HEAD] = "head"
    if roles and not known and sizes["y"] > 1 and "head" not in named.values():
        raise UnknownRolesError(
            f"{type(model).__name__} has no head: it returns hidden features, of which each rank of y={sizes['y']} "
            "would have a part only. Choose y=1, or give roles to the model of yours that contains it"
        )
    inputs = None
    with contextlib.suppress(NotImplementedError):  # a model of images or sounds has none
        inputs = model.get_input_embeddings()  # type: ignore[operator]
    # A vision model returns its patch embedding, whose role the user must pass.
    if isinstance(inputs, nn.Embedding) and (roles or known):
        modules = dict(model.named_modules(remove_duplicate=False))
        named |= {name: "embedding" for name, module in modules.items() if module is inputs}
    return named, {prefix + pattern: axis for pattern, axis in attributes.items()}


def roles_tried(model: nn.Module, roles: Mapping[str, str]) -> str:
    """Describe for a refusal, if the model's family is known, the roles, by patterns of submodules, that were tried."""
    config: Any = getattr(model, "config", None)
    if not is_pretrained_model(model) or FAMILIES.get(config.model_type, Family()).roles is None:
        return ""
    tried: dict[str, str] = {}
    for name, role in roles.items():
        tried.setdefault(wildcard(name), role)
    return f" (the roles that Stretto has for the family {config.model_type!r} were tried: {tried})"


def _roles_of_tp_plan(
    base: nn.Module, prefix: str, tp_plan: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> dict[str, Any]:
    roles: dict[str, Any] = {}
    places = {pattern: [name for name in modules if wildcard(name) == pattern] for pattern in tp_plan}
    if refusal := refusal_of_style(type(base).__name__, prefix, {at: tp_plan[at] for at in tp_plan if places[at]}):
        raise UnknownRolesError(refusal)
    for pattern, names in places.items():
        for name in names:
            roles[name] = _with_heads(base, prefix, name, STYLES[tp_plan[pattern]])
    return roles


def _is_between_blocks(name: str, module: nn.Module, prefix: str) -> bool:
    """True for dropout of hidden features: a child of the model, of its base model, or of one of the blocks."""
    parent = name.rpartition(".")[0]
    is_outside = parent in ("", prefix.removesuffix(".")) or parent.rpartition(".")[2].isdigit()
    return is_outside and isinstance(module, nn.Dropout) and module.p > 0


def _with_heads(base: nn.Module, prefix: str, name: str, role: str) -> Any:
    """The role of a linear; one that makes attention heads keeps each head whole."""
    parent = base.get_submodule(name.rpartition(".")[0])
    head_dim = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
    linear = base.get_submodule(name)
    if role != "colwise" or not isinstance(head_dim, int) or not isinstance(linear, nn.Linear):
        return role
    config: Any = base.config
    try:
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
    except RuntimeError as error:  # a configuration whose layers differ raises it
        raise UnknownRolesError(
            f"{prefix}{name} of {type(base).__name__}: its configuration gives no number of heads for all layers "
            f"({error}): say what it is with roles={{{prefix + name!r}: ...}}"
        ) from None
    if linear.out_features == heads * head_dim:
        return {"role": role, "unit": head_dim, "unit_name": "attention heads"}
    if linear.out_features == groups * head_dim:
        return kv_heads(head_dim)
    if config.model_type == "gpt_neox" and linear.out_features == 3 * heads * head_dim:
        return {"role": role, "unit": 3 * head_dim, "unit_name": "attention heads"}  # q, k and v of one head together
    raise UnknownRolesError(
        f"{prefix}{name} of {type(base).__name__} makes {linear.out_features} features, which are neither {heads} "
        f"heads nor {groups} KV heads of {head_dim}: say what it is with roles={{{prefix + name!r}: ...}}"
    )


def _refuse_attention_dropout(model: nn.Module) -> None:
    options: Mapping[str, Any] = model.config.to_dict()  # type: ignore[union-attr, operator]
    if refusal := refusal_of_attention_dropout(options):
        raise ValueError(refusal)
    for name, module in model.named_modules():
        if name.endswith("attn_dropout") and isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(f"{name}.p is {module.p}, but attention dropout must be 0.0: set it")


def refuse_alibi(model: nn.Module, colwise: Collection[str]) -> None:
    """Raise ValueError for ALiBi: every rank of x would take the biases of the first heads.

    colwise: names of the linears that x splits. Those of MLPs alone leave all heads on each rank, with their biases.
    """
    if all("mlp" in name.split(".") for name in colwise):
        return
    for module in model.modules():
        is_theirs = type(module).__module__.startswith("transformers")  # transformers_modules: code from the hub
        names = [name for name in dir(module) if "alibi" in name.lower()] if is_theirs else []
        if found := [name for name in names if getattr(module, name, None) is not False]:
            raise UnknownRolesError(
                f"{type(module).__name__} adds a term to attention that depends on a head's index (ALiBi: "
                f"{found[0]}), but its code does not know which heads a rank of x has: choose x=1"
            )


def _refuse_config_dropout(model: nn.Module) -> None:
    """Raise ValueError for dropout whose probability a module's code reads from its config: it is no nn.Dropout."""
    for kind, module in {type(module): module for module in model.modules() if hasattr(module, "config")}.items():
        source = _source_without_init(kind)
        for option in sorted(set(re.findall(r"self\.config\.(\w*drop\w*)", source))):
            value = getattr(module.config, option, None)
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"config.{option} is {value}, and {kind.__name__} draws that dropout itself, otherwise on "
                    f"each rank; Stretto replaces nn.Dropout modules only. Set {option}=0.0"
                )


def _source_without_init(kind: type) -> str:
    """The source of a class's own methods except __init__; empty where it cannot be found."""
    sources = []
    for name, method in {"forward": getattr(kind, "forward", None), **vars(kind)}.items():
        if name != "__init__" and inspect.isroutine(method):
            with contextlib.suppress(OSError, TypeError):
                sources.append(inspect.getsource(inspect.unwrap(method)))
    return "\n".join(sources)


def norms_next_to_linears(model: nn.Module, found: Mapping[str, Any]) -> dict[str, str]:
    """The norms of hidden features in a transformers model: weights [hidden] without a colwise or rowwise sibling.

    A sibling norm of such a linear may see heads, which are split differently: the model's plan must name it.
    """
    if not found:
        return {}
    hidden = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    norms = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if "Norm" not in type(module).__name__ or weight is None or tuple(weight.shape) != (hidden,):
            continue
        parent = name.rpartition(".")[0]
        siblings = [found.get(f"{parent}.{child}") for child, _ in model.get_submodule(parent).named_children()]
        if not any(role is not None and role.role in ("colwise", "rowwise") for role in siblings):
            norms[name] = "norm"
    return norms
