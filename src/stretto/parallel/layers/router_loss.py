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
from stretto.parallel.comm.collectives import all_reduce, gather_rows
from stretto.parallel.grid import Grid
from stretto.parallel.roles import huggingface


class _GatherTokensOfRanks(torch.autograd.Function):
    """[tokens, experts] -> [ranks x tokens, experts]; every rank computes the same loss of it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.own = slice(group.rank() * logits.shape[0], (group.rank() + 1) * logits.shape[0])
        return gather_rows(logits.contiguous(), logits.shape[0] * group.size(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.own], None


def balance_over_batch(model: nn.Module, grid: Grid, *, averages: bool = False) -> None:
    """Have the load-balancing loss that the model's own code computes be that of the global batch.

    Every rank must have equally many tokens, or an attention mask [batch, seq]: it is gathered too, and ranks with
    shorter sequences are padded. Raises ValueError for a pipeline stage, which has the routers of its own blocks alone,
    and for models that compute it in another way than transformers' `load_balancing_loss_func`. averages: gradients
    are averaged over ranks, each of which has a loss of its own tokens; then stages alone are refused.
    """
    base = huggingface.base_of(model)
    if base is model or not hasattr(model.config, "output_router_logits"):
        return
    signature, group = inspect.signature(model.forward), grid.communicator(LOSS)
    gathers = huggingface.balances_load(model) and group.size() > 1 and not averages
    places = {"stages": grid.size("pipe"), "summed_ranks": 1 if averages else group.size()}
    own: list[tuple[Tensor, ...]] = []
    own_mask: list[Tensor] = []  # while the model has the mask of all ranks, for its loss; its layers need this one
    padded: list[int] = []  # the most rows, and the most tokens of a row, of any rank

    def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own.clear()
        own_mask.clear()
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        asks: Any = given.get("output_router_logits")
        asks = model.config.output_router_logits if asks is None else asks  # type: ignore[union-attr]
        if not asks or given.get("labels") is None:
            return None
        if refusal := huggingface.refusal_of_router_loss(model, **places):
            raise ValueError(refusal)
        mask = given.get("attention_mask")
        if not gathers or mask is None:
            return None
        if mask.dim() != 2 or "attention_mask" not in kwargs:
            raise ValueError(
                f"output_router_logits is set, and attention_mask has {mask.dim()} dims: the load-balancing loss takes "
                "a mask [batch, seq], passed by its name"
            )
        own_mask.append(mask)
        padded[:] = all_reduce(torch.tensor(mask.shape, device=mask.device), group, dist.ReduceOp.MAX).tolist()
        whole = pad(mask)
        return args, {**kwargs, "attention_mask": gather_rows(whole, whole.shape[0] * group.size(), group)}

    def pad(tensor: Tensor) -> Tensor:
        """[rows, tokens, ...] with as many rows and tokens as the rank with the most has."""
        rows, tokens = (most - here for most, here in zip(padded, tensor.shape, strict=False))
        return nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, tokens, 0, rows)).contiguous()

    def use_own_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, "attention_mask": own_mask[0]}) if own_mask else None

    def gather(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        logits = getattr(output, "router_logits", None)
        if gathers and isinstance(logits, tuple):
            own.append(logits)
            if own_mask:
                logits = tuple(pad(each.unflatten(0, own_mask[0].shape)).flatten(0, 1) for each in logits)
            output.router_logits = tuple(_GatherTokensOfRanks.apply(each, group) for each in logits)
        return output

    def restore(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if own and getattr(output, "router_logits", None) is not None:
            output.router_logits = own.pop()
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    base.register_forward_pre_hook(use_own_mask, with_kwargs=True)
    base.register_forward_hook(gather)
    model.register_forward_hook(restore)
