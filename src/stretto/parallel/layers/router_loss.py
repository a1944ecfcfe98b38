# SPDX-License-Identifier: Apache-2.0
"""The load-balancing loss of transformers' mixtures of experts (`output_router_logits`), over the global batch.

Their code computes it from the logits of all routers: the sum over experts of the part of tokens that chose an expert
times its mean probability. Both are means over tokens, and a product of means of one rank's tokens is not that of the
global batch. So the base model's `router_logits` are gathered from the ranks that have other tokens before the code
reads them; a rank's gradient is that of its own tokens, which are then summed as those of the loss are.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.axes import LOSS
from stretto.parallel.comm.collectives import gather_rows
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.roles import huggingface


class _GatherTokensOfRanks(torch.autograd.Function):
    """[tokens, experts] -> [ranks x tokens, experts]; every rank computes the same loss of it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup, averages: bool) -> Tensor:
        ctx.scale = group.size() if averages else 1
        ctx.own = slice(group.rank() * logits.shape[0], (group.rank() + 1) * logits.shape[0])
        return gather_rows(logits.contiguous(), logits.shape[0] * group.size(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.own] * ctx.scale, None, None


def balance_over_batch(model: nn.Module, gradients: GradientReducer) -> None:
    """Have the load-balancing loss that the model's own code computes be that of the global batch.

    Every rank must have equally many tokens. Calls that ask for it with an attention mask, which would be of a rank's
    own rows, raise ValueError; so do those of a pipeline stage, which has the routers of its own blocks alone, and
    those of models that compute it in another way than transformers' `load_balancing_loss_func`. Where each rank
    has a loss of its own tokens, and gradients are averaged, stages alone are refused.
    """
    base = huggingface.base_of(model)
    if base is model or not hasattr(model.config, "output_router_logits"):
        return
    grid, is_own = gradients.grid, gradients.loss_covers_own_rows
    signature, group = inspect.signature(model.forward), grid.communicator(LOSS)
    gathers = huggingface.balances_load(model) and group.size() > 1 and not is_own
    places = {"stages": grid.size("pipe"), "ranks": 1 if is_own else group.size()}
    own: list[tuple[Tensor, ...]] = []

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own.clear()
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        asks: Any = given.get("output_router_logits")
        asks = model.config.output_router_logits if asks is None else asks  # type: ignore[union-attr]
        if not asks or given.get("labels") is None:
            return
        if refusal := huggingface.refusal_of_router_loss(model, **places):
            raise ValueError(refusal)
        if gathers and given.get("attention_mask") is not None:
            raise ValueError(
                "output_router_logits is set, and attention_mask is of this rank's rows, where the load-balancing loss "
                "is of the global batch's: leave the mask out, or set output_router_logits=False"
            )

    def gather(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        logits = getattr(output, "router_logits", None)
        if gathers and isinstance(logits, tuple):
            own.append(logits)
            output.router_logits = tuple(_GatherTokensOfRanks.apply(each, group, gradients.averages) for each in logits)
        return output

    def restore(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if own and getattr(output, "router_logits", None) is not None:
            output.router_logits = own.pop()
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    base.register_forward_hook(gather)
    model.register_forward_hook(restore)
