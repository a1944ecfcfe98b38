# SPDX-License-Identifier: Apache-2.0
"""Adapts Hugging Face models: roles from their tensor-parallel plans, GPT-2 (which has none), losses, `generate`.

transformers is not imported here: a model is identified by its attributes.
"""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.axes import LOSS, group_sizes
from stretto.parallel.layers.loss import IGNORED_TARGET, ParallelLoss
from stretto.parallel.roles.families import FAMILIES, HEADS, family_plan, kv_heads, wildcard
from stretto.parallel.roles.formulas import UnknownRolesError
from stretto.pretrained import LANGUAGE_MODEL_HEAD, STYLES, refusal_of_attention_dropout, refusal_of_style


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether this is a transformers model, by its class's attributes."""
    return hasattr(model, "base_model_prefix") and hasattr(model, "config")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D: a linear that stores [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether a custom transformers class computes nn.Linear (Falcon's), or its transpose."""
    kind = type(module)
    is_falcon = kind.__name__ == "FalconLinear" and kind.__module__ == "transformers.models.falcon.modeling_falcon"
    return is_falcon or is_conv1d(module)


def base_of(model: nn.Module) -> nn.Module:
    """The model without its head; itself, if it has none."""
    return _base(model)[0]


def _base(model: nn.Module) -> tuple[nn.Module, str]:
    """The model without its head, and its name within the whole (with a dot)."""
    prefix = getattr(model, "base_model_prefix", "")
    inner = getattr(model, str(prefix), None) if prefix else None
    return (inner, f"{prefix}.") if isinstance(inner, nn.Module) else (model, "")


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
    base, prefix = _base(model)
    _refuse_attention_dropout(model)
    _refuse_config_dropout(model)
    ranks = group_sizes(sizes)[LOSS] if getattr(config, "output_router_logits", False) is True else 1
    if refusal := refusal_of_router_loss(model, stages=1, ranks=ranks):
        raise UnknownRolesError(refusal)
    attributes: Mapping[str, str] = {}
    beside: Mapping[str, Any] = {}
    if (family := family_plan(config, sizes)) is not None:
        family = family.without({name.removeprefix(prefix): role for name, role in known.items()})
        roles, attributes, beside = family.roles, family.local_attributes, HEADS.get(config.model_type, {})
    else:
        tp_plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
        modules = dict(base.named_modules(remove_duplicate=False))
        unknown = {name: module for name, module in modules.items() if prefix + name not in known}
        roles = _roles_of_tp_plan(base, prefix, tp_plan, unknown)
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
    """What a refusal adds for a model of a known family: the roles, by patterns of submodules, that were tried."""
    config: Any = getattr(model, "config", None)
    if not is_pretrained_model(model) or config.model_type not in FAMILIES:
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
        return {
            "role": role,
            "unit": 3 * head_dim,
            "unit_name": "attention heads",
        }  # q, k and v of one head together
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
    if not is_pretrained_model(model) or not found:
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


def generate_in_step(model: nn.Module) -> None:
    """Have `generate` run on every rank until the last is done: each step gathers weights from all ranks.

    Sets Hugging Face's option synced_gpus, which is off by default.
    """
    generate: Any = getattr(model, "generate", None)
    if not callable(generate) or "synced_gpus" not in inspect.signature(generate).parameters:
        return

    @functools.wraps(generate)
    def generate_on_every_rank(*args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
        return generate(*args, synced_gpus=True if synced_gpus is None else synced_gpus, **kwargs)

    model.generate = generate_on_every_rank  # type: ignore[assignment]


def refuse_saving(model: nn.Module) -> None:
    """Have `save_pretrained` raise ValueError for sharded parameters, before it writes half of a folder."""
    save: Any = getattr(model, "save_pretrained", None)
    if not callable(save):
        return

    @functools.wraps(save)
    def save_whole(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict")
        held = model.parameters() if given is None else given.values()
        if any(isinstance(tensor, DTensor) for tensor in held):
            raise ValueError(
                "save_pretrained does not know that parameters are cut over ranks: call stretto.parallel.gather on "
                "each, on every rank, and pass them as state_dict=, or `stretto export` a checkpoint"
            )
        return save(*args, **kwargs)

    model.save_pretrained = save_whole  # type: ignore[assignment]


def refuse_resizing(model: nn.Module) -> None:
    """Have `resize_token_embeddings` raise ValueError: it would replace sharded parameters by unsharded ones."""
    resize: Any = getattr(model, "resize_token_embeddings", None)
    if not callable(resize):
        return

    @functools.wraps(resize)
    def resize_before(new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if new_num_tokens is None:  # asks for the embedding
            return resize(new_num_tokens, *args, **kwargs)
        raise ValueError(
            f"resize_token_embeddings({new_num_tokens}): the embedding of a parallelized model is sharded. Resize it "
            "before parallelize; Stretto pads a vocabulary that x does not divide"
        )

    model.resize_token_embeddings = resize_before  # type: ignore[assignment]


def install_loss(model: nn.Module, loss: ParallelLoss | None) -> ParallelLoss | None:
    """Replace the model's loss by the sharded one, if both compute the same; returns the new one, or None.

    The model's loss is recognized by its function, not by the model's class: losses of token classification take labels
    as those of language models do, but unshifted, and a user may have set another one.
    """
    is_shifted = _shifts_labels(model)
    if loss is None or is_shifted is None:
        return None
    model.loss_function = _loss_function(loss, is_shifted=is_shifted)  # type: ignore[assignment]
    return loss


def _shifts_labels(model: nn.Module) -> bool | None:
    """Whether the model's loss compares logits with the next token's label, or with its own; None for other losses."""
    is_default = getattr(model, "loss_type", None) is None and "_loss_function" not in vars(model)
    if is_default and hasattr(type(model), "loss_function"):
        return True  # transformers takes the causal loss then, and warns
    own = getattr(model, "loss_function", None)
    is_known = str(getattr(own, "__module__", "")).startswith("transformers.")
    return {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}.get(getattr(own, "__name__", "")) if is_known else None


def calls_loss_function(model: nn.Module) -> bool:
    """Whether the model's forward computes its loss by `loss_function`, not by its own code."""
    forward = inspect.unwrap(type(model).forward)
    return inspect.isfunction(forward) and "loss_function" in forward.__code__.co_names


def compares_with_next(model: nn.Module) -> bool:
    """Whether the model's loss compares logits with the next token's label: of its own code, as variables' names say.

    Such a loss leaves the first label of each row out.
    """
    if calls_loss_function(model):
        ours = getattr(getattr(model, "loss_function", None), "is_shifted", None)
        return bool(_shifts_labels(model) if ours is None else ours)
    forward = inspect.unwrap(type(model).forward)
    return inspect.isfunction(forward) and any("shift" in name for name in forward.__code__.co_varnames)


def changes_logits(model: nn.Module) -> bool:
    """Whether the model's forward scales or caps logits between head and loss, by the names of what it reads."""
    forward = inspect.unwrap(type(model).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    owners = (model, getattr(model, "config", None))
    values = [
        getattr(owner, name, None)
        for name in names
        if "logit" in name and ("scal" in name or "cap" in name)
        for owner in owners
    ]
    return any(value is not None for value in values)


def computes_masked_loss(model: nn.Module) -> bool:
    """Whether this is a masked language model of transformers, or T5, whose own code computes the loss, as BERT's."""
    kind = type(model)
    forward = inspect.unwrap(kind.forward)
    is_theirs = kind.__module__.startswith("transformers.") and kind.__name__.endswith(
        ("ForMaskedLM", "T5ForConditionalGeneration")
    )
    return is_theirs and inspect.isfunction(forward) and "CrossEntropyLoss" in forward.__code__.co_names


def refuse_losses_of_one_rank(model: nn.Module, loss: ParallelLoss | None) -> None:
    """Have the model raise ValueError where its own code computes a loss: it would be of this rank's rows alone.

    loss: the one that stands in the place of the model's.
    """

    def before(*_: object) -> None:
        if loss is not None:
            loss.was_computed = False

    def after(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if isinstance(first, Tensor) and not first.dim() and not (loss is not None and loss.was_computed):
            raise ValueError(
                f"{type(model).__name__} has computed a loss of its own, from this rank's rows alone; Stretto replaces "
                "transformers' losses of causal and masked language models. Call it without labels, and compute the "
                "loss from its logits with stretto.parallel.mean_over_batch"
            )

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)


def balances_load(model: nn.Module) -> bool:
    """Whether the model adds a load-balancing loss by transformers' function of the logits of all routers."""
    return "load_balancing_loss_func" in _names_of_forward(model)


def has_router_loss(model: nn.Module) -> bool:
    """Whether the code of a model's forward computes a load-balancing loss, in any way."""
    return any("aux" in name for name in _names_of_forward(model))


def refusal_of_router_loss(model: nn.Module, *, stages: int, ranks: int) -> str | None:
    """Why the model's own load-balancing loss (output_router_logits) cannot be added; None if it can, or has none.

    stages: of the pipeline. ranks: how many have other tokens of the batch that the loss is to cover.
    """
    if not has_router_loss(model):
        return None
    if stages > 1:
        return (
            f"output_router_logits is set, and pipe={stages}: the load-balancing loss takes the logits of all routers, "
            "of which a pipeline stage has its own. Set config.output_router_logits=False, or choose pipe=1"
        )
    if ranks > 1 and not balances_load(model):
        return (
            f"output_router_logits is set: the code of {type(model).__name__} adds to its loss a load-balancing loss "
            "of this rank's rows alone, where the loss is of the global batch. Set "
            "config.output_router_logits=False, or call parallelize(..., blocks=[...]), where losses are of own rows"
        )
    return None


def _names_of_forward(model: nn.Module) -> tuple[str, ...]:
    """The names that the code of a model's forward reads, of globals and of attributes."""
    forward = inspect.unwrap(type(model).forward)
    return forward.__code__.co_names if inspect.isfunction(forward) else ()


def _loss_function(loss: ParallelLoss, *, is_shifted: bool) -> Callable[..., Tensor]:
    """A sharded stand-in for transformers' language-model losses: labels [batch, seq] are shifted where theirs are."""

    def language_model_loss(
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_TARGET,
        shift_labels: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        if unknown.get("label_smoothing") or unknown.get("weight") is not None:
            raise ValueError("the sharded loss takes neither label_smoothing nor class weights")
        if shift_labels is None:
            if labels is None:
                raise ValueError("the loss needs labels or shift_labels")
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if is_shifted else labels
        if ignore_index != IGNORED_TARGET:
            shift_labels = torch.where(shift_labels == ignore_index, IGNORED_TARGET, shift_labels)
        return loss(logits, shift_labels.contiguous(), num_items_in_batch)

    language_model_loss.is_shifted = is_shifted  # type: ignore[attr-defined]
    return language_model_loss
