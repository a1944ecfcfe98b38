# SPDX-License-Identifier: Apache-2.0
"""The load-balancing loss of transformers' mixtures of experts (`output_router_logits`), over the global batch.

Their code computes it from the logits of all routers: the sum over experts of the part of tokens that chose an expert
times its mean probability. Both are means over tokens, and a product of means of one rank's tokens is not that of the
global batch. So the base model's `router_logits` are gathered from the ranks that have other tokens before the code
reads them; a rank's gradient is that of its own tokens, which are then summed (or averaged) as those of the loss are.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.huggingface.pretrained_model import base_of, unwrap

# Gathers a rank's rows into as many of all ranks, as `stretto.parallel` counts its collectives.
GatherRows = Callable[[Tensor, int, dist.ProcessGroup], Tensor]


class _GatherTokensOfRanks(torch.autograd.Function):
    """[tokens, experts] -> [all ranks' tokens, experts]; every rank computes the same loss of it.

    counts: the tokens of each rank.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, counts: list[int], ranks: "RanksOfBatch") -> Tensor:
        first, ctx.scale = sum(counts[: ranks.group.rank()]), ranks.gradient_scale
        ctx.own = slice(first, first + logits.shape[0])
        most = max(counts)
        padded = nn.functional.pad(logits, (0, 0, 0, most - logits.shape[0])).contiguous()
        parts = ranks.gather_rows(padded, most * len(counts), ranks.group).split(most)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[ctx.own] * ctx.scale, None, None


@dataclass(frozen=True)
class RanksOfBatch:
    """The ranks that have the tokens of the global batch.

    stages: of the pipeline. is_own: whether each rank's loss is that of its own tokens. gradient_scale: by which a
    rank's gradient of the loss over all tokens is multiplied.
    """

    group: dist.ProcessGroup
    gather_rows: GatherRows
    stages: int
    is_own: bool
    gradient_scale: float


def balance_over_batch(model: nn.Module, ranks: RanksOfBatch) -> None:
    """Have the load-balancing loss that the model's own code computes be that of the global batch.

    An attention mask leaves out the tokens of padding: the code gets the logits of the others alone, and no mask.
    ValueError for a call that asks for the loss in a pipeline stage, which has the routers of its own blocks alone, and
    in a model that does not compute it by transformers' `load_balancing_loss_func`.

    Where each rank has a loss of its own tokens, and gradients are averaged, one that is computed in another way stays
    of these tokens, and a warning says so.
    """
    model = unwrap(model)
    base = base_of(model)
    if base is model or not hasattr(model.config, "output_router_logits"):
        return
    group, is_own, signature = ranks.group, ranks.is_own, inspect.signature(model.forward)
    gathers = balances_load(model) and group.size() > 1
    places = {"stages": ranks.stages, "ranks": 1 if is_own else group.size()}
    own: list[tuple[Tensor, ...]] = []
    masks: list[Tensor] = []
    if is_own and group.size() > 1 and not gathers and has_router_loss(model):
        model.register_forward_pre_hook(_warn_of_own_tokens, with_kwargs=True)

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        own.clear()
        masks.clear()
        bound = signature.bind_partial(*args, **kwargs)
        if not _is_asked_for(model, given := bound.arguments | bound.arguments.get("kwargs", {})):
            return None
        if given.get("labels") is not None and (refusal := refusal_of_router_loss(model, **places)):
            raise ValueError(refusal)
        mask = bound.arguments.get("attention_mask")
        if not gathers or mask is None:
            return None
        masks.append(mask)
        bound.arguments["attention_mask"] = None  # for the loss; `give_mask` gives it to the base model
        return bound.args, bound.kwargs

    def give_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        return (args, kwargs | {"attention_mask": masks[0]}) if masks else None

    def gather(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        logits = getattr(output, "router_logits", None)
        if not gathers or not isinstance(logits, tuple) or not logits:
            return output
        own.append(logits)
        kept = [each[masks[0].reshape(-1).to(each.device) > 0] for each in logits] if masks else logits
        counts = [kept[0].shape[0]] * group.size()
        if not (kept[0].is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph has no other shapes
            counts = ranks.gather_rows(torch.tensor(counts[:1], device=kept[0].device), group.size(), group).tolist()
        output.router_logits = tuple(_GatherTokensOfRanks.apply(each, counts, ranks) for each in kept)
        return output

    def restore(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if own and getattr(output, "router_logits", None) is not None:
            output.router_logits = own.pop()
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    base.register_forward_pre_hook(give_mask, with_kwargs=True)
    base.register_forward_hook(gather)
    model.register_forward_hook(restore)


def _is_asked_for(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """True if a call, of these arguments, asks for the load-balancing loss."""
    asks: Any = given.get("output_router_logits")
    return bool(model.config.output_router_logits if asks is None else asks)  # type: ignore[union-attr]


def _warn_of_own_tokens(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _is_asked_for(model, kwargs) and dist.get_rank() == 0:
        warnings.warn(
            f"output_router_logits is set: the load-balancing loss that the code of {type(model).__name__} adds is the "
            "mean over the ranks of each one's loss of its own rows, which is not that of the global batch",
            stacklevel=2,
        )


def balances_load(model: nn.Module) -> bool:
    """True if the model adds a load-balancing loss by transformers' function of the logits of all routers."""
    return "load_balancing_loss_func" in _names_of_forward(model)


def has_router_loss(model: nn.Module) -> bool:
    """True if the code of a model's forward computes a load-balancing loss, in any way."""
    return any("aux" in name for name in _names_of_forward(model))


def refusal_of_router_loss(model: nn.Module, *, stages: int, ranks: int) -> str | None:
    """Say why the model's own load-balancing loss (output_router_logits) is not added; None if it is, or has none.

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
    forward = inspect.unwrap(type(unwrap(model)).forward)
    return forward.__code__.co_names if inspect.isfunction(forward) else ()
