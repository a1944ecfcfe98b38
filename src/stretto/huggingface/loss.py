# SPDX-License-Identifier: Apache-2.0
"""Recognizes the loss that a transformers model computes, and puts the sharded one in its place."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stretto.execution import IGNORED_TARGET
from stretto.huggingface.pretrained_model import unwrap


class ShardedLoss(Protocol):
    """`stretto.parallel`'s loss of logits, targets and their number; `was_computed` is set at each call."""

    was_computed: bool

    def __call__(self, logits: Tensor, targets: Tensor, num_targets: Tensor | int | None = None) -> Tensor: ...


def replace_loss_function(model: nn.Module, loss: ShardedLoss) -> bool:
    """Replace the model's loss by the sharded one, if both compute the same; returns whether they do.

    The model's loss is recognized by its function, not by the model's class: losses of token classification take labels
    as those of language models do, but unshifted, and a user may have set another one.
    """
    model = unwrap(model)
    is_shifted = _shifts_labels(model)
    if is_shifted is not None:
        model.loss_function = _loss_function(loss, is_shifted=is_shifted)  # type: ignore[assignment]
    return is_shifted is not None


def _shifts_labels(model: nn.Module) -> bool | None:
    """True if the loss compares logits with the next token's label, False if with its own; None for other losses."""
    is_default = getattr(model, "loss_type", None) is None and "_loss_function" not in vars(model)
    if is_default and hasattr(type(model), "loss_function"):
        return True  # transformers takes the causal loss then, and warns
    own = getattr(model, "loss_function", None)
    is_known = str(getattr(own, "__module__", "")).startswith("transformers.")
    return {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}.get(getattr(own, "__name__", "")) if is_known else None


def calls_loss_function(model: nn.Module) -> bool:
    """True if the model's forward computes its loss by `loss_function`, not by its own code."""
    forward = inspect.unwrap(type(unwrap(model)).forward)
    return inspect.isfunction(forward) and "loss_function" in forward.__code__.co_names


def require_given_targets(model: nn.Module) -> None:
    """Raise ValueError for a model whose forward would not hand shifted targets and their number to its loss."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_others = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_others or not calls_loss_function(model):
        raise ValueError(
            f"{type(model).__name__} does not compute its loss by transformers' loss_function with the caller's "
            "options, so that the mean over the global batch cannot be taken: train it in a loop of your own"
        )


def arguments_with_targets(
    tokens: Tensor, targets: Tensor, num_targets: Tensor | int, places: Tensor | None = None
) -> dict[str, Any]:
    """The arguments of a causal language model's forward with which it returns the mean loss over the global batch.

    Labels would be shifted, and each sequence lose its last target; `shift_labels` are taken as they are. places: of
    each token in its document, int64 [rows, seq_len], by which transformers tells packed documents apart.
    """
    return ({} if places is None else {"position_ids": places.to(tokens.device, non_blocking=True)}) | {
        "input_ids": tokens,
        "labels": targets,
        "shift_labels": targets,
        "num_items_in_batch": num_targets,
        "use_cache": False,
    }


def compares_with_next(model: nn.Module) -> bool:
    """True if the model's loss compares logits with the next token's label: of its own code, as variables' names say.

    Such a loss leaves the first label of each row out.
    """
    model = unwrap(model)
    if calls_loss_function(model):
        ours = getattr(getattr(model, "loss_function", None), "is_shifted", None)
        return bool(_shifts_labels(model) if ours is None else ours)
    forward = inspect.unwrap(type(model).forward)
    return inspect.isfunction(forward) and any("shift" in name for name in forward.__code__.co_varnames)


def changes_logits(model: nn.Module) -> bool:
    """True if the model's forward scales or caps logits between head and loss, by the names of what it reads."""
    model = unwrap(model)
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
    """True if this is a masked language model of transformers, or T5, whose own code computes the loss, as BERT's."""
    kind = type(unwrap(model))
    forward = inspect.unwrap(kind.forward)
    is_theirs = kind.__module__.startswith("transformers.") and kind.__name__.endswith(
        ("ForMaskedLM", "T5ForConditionalGeneration")
    )
    return is_theirs and inspect.isfunction(forward) and "CrossEntropyLoss" in forward.__code__.co_names


def refuse_losses_of_one_rank(model: nn.Module, loss: ShardedLoss | None) -> None:
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


def _loss_function(loss: ShardedLoss, *, is_shifted: bool) -> Callable[..., Tensor]:
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
