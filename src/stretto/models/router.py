# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts: which experts a token passes, and how tokens are distributed evenly.

A router knows nothing about ranks: `stretto.parallelize` sets its hooks `sum_over_ranks`, `start_sum_over_ranks` and
`sum_over_earlier_ranks`, through which balance and capacity see the tokens of all.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# How many forward passes may wait for their backward pass to add their statistics. Those whose outputs were dropped
# never have one.
MAX_WAITING = 64


@dataclass(frozen=True)
class RouterOptions:
    """Options by which a router chooses experts, and distributes tokens evenly.

    scores: "softmax" over all experts, or "sigmoid" of each.
    normalize: divides a token's weights by their sum. scale: multiplies them after that.
    groups, groups_per_token: experts of so many groups are chosen only; a group's score is the sum of its two best
        (DeepSeek-V3, section 2.1.2).
    balance: how tokens are distributed evenly, in training.
        "switch": the loss of Fedus et al. (2022, equations 4 to 6) over the tokens of a micro-batch on all ranks. f_e
            is the share of all choices.
        "sequence": the loss of DeepSeek-V3 (equations 17 to 20) over the tokens of each sequence, in the mean over
            sequences; x must be [batch, seq, hidden].
        "bias": no loss (Wang et al., 2024): a number is added to each expert's score for the choice only;
            `update_biases` moves it by `bias_rate` towards the mean load. With `balance_loss` the sequence-wise loss is
            added, as in DeepSeek-V3.
    balance_loss: the loss's coefficient. z_loss: coefficient of the mean squared logsumexp of the logits (Zoph et al.,
        2022, equation 5).
    capacity_factor: in training an expert takes at most ceil(capacity_factor x t x experts_per_token / num_experts)
        choices of a micro-batch's t tokens on all ranks, in the order of ranks and then of tokens. None: all.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    balance: Literal["switch", "sequence", "bias", "none"] = "none"
    balance_loss: float = 0.0
    bias_rate: float = 0.001
    z_loss: float = 0.0
    capacity_factor: float | None = None

    @property
    def has_sequence_loss(self) -> bool:
        return self.balance == "sequence" or (self.balance == "bias" and self.balance_loss > 0)

    @property
    def has_loss(self) -> bool:
        return self.balance == "switch" or self.has_sequence_loss or self.z_loss > 0


class _ForwardPass(NamedTuple):
    """A router's choices for this rank's tokens.

    counts, dropped: int64 [num_experts], choices, and those of them that were dropped. sums: of the losses, see
    `Router._balance_sums`; get_total: waits for the sum of counts over ranks, and returns it. None without losses.
    """

    counts: Tensor
    dropped: Tensor
    sums: Tensor | None
    get_total: Callable[[], Tensor] | None


class _LossFactors(NamedTuple):
    """Factors of a forward pass's sums, fp64. of_mean: sums x factors are this rank's part of the losses.

    of_all_tokens: they are that times the tokens of all ranks.
    """

    of_mean: Tensor
    of_all_tokens: Tensor


class Router(nn.Module):
    """Chooses `experts_per_token` of `num_experts` experts for each token.

    `router(x)`, x [..., hidden], returns logits [t, num_experts], and the chosen experts' weights and numbers (int64),
    each [t, experts_per_token], best first, where t is the number of tokens. Logits and weights are computed in fp32 at
    least. Of equal scores the lower expert's wins, on every device. The number of a dropped choice is num_experts, as
    in transformers, and its weight 0.

    A loss is no output: the backward pass adds its gradient, times `loss_scale`. It depends on the choices of all
    ranks, which are all-reduced asynchronously: without a capacity only the backward pass waits for the result.
    """

    def __init__(
        self, hidden: int, num_experts: int, experts_per_token: int, options: RouterOptions | None = None
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.options = options or RouterOptions()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden))
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", torch.zeros(num_experts) if self.options.balance == "bias" else None)
        # The share of a micro-batch in the step's loss, times the loss scale.
        self.loss_scale: float | Tensor = 1.0
        # Over how many ranks, of which each adds its tokens' part of a loss, gradients are averaged.
        self.averaged_ranks = 1
        # Sums a tensor over the ranks that have other tokens of the micro-batch; over those of lower rank.
        self.sum_over_ranks: Callable[[Tensor], Tensor] = _identity
        self.sum_over_earlier_ranks: Callable[[Tensor], Tensor] = torch.zeros_like
        # Starts `sum_over_ranks`, and returns a function that waits for the sum and returns it; it may be called again.
        self.start_sum_over_ranks: Callable[[Tensor], Callable[[], Tensor]] | None = None
        # What compiled graphs call in place of `add_losses`; None: they look into it.
        self.in_graphs: Callable[..., Tensor] | None = None
        self._statistics: Tensor | None = None
        # Forward passes whose statistics are not added yet, by their get_total.
        self._waiting: dict[Callable[[], Tensor], _ForwardPass] = {}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    @property
    def needs_whole_sequences(self) -> bool:
        """True if a rank must have all tokens of its sequences, for the sequence-wise loss."""
        return self.options.has_sequence_loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.flatten(0, -2).to(dtype), self.weight.to(dtype))
            scores = logits.softmax(-1) if self.options.scores == "softmax" else logits.sigmoid()
            ids = self._choose(scores.detach())
            weights = scores.gather(1, ids)
            if self.options.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * self.options.scale
            if self.training:
                weights, ids = self._balance(x, logits, scores, weights, ids)
        return logits, weights, ids

    def record(self, forward_pass: "_ForwardPass", *, is_awaited: bool) -> None:
        """Add what this rank did in a forward pass to the statistics of the step.

        is_awaited: whether a backward pass will wait for its sum over ranks. It adds the statistics then, unless they
        are read before.
        """
        if not is_awaited or self.start_sum_over_ranks is None:
            self._add(forward_pass)
            return
        assert forward_pass.get_total is not None
        self._waiting[forward_pass.get_total] = forward_pass
        if len(self._waiting) > MAX_WAITING:
            self._add_oldest()

    @property
    def statistics(self) -> Tensor | None:
        """This rank's statistics since `update_biases`, fp64 [2 x num_experts + 2]; None before the first forward pass.

        They are: the choices of each expert, those of them that were dropped, and the balance loss and the z-loss, each
        times the micro-batch's tokens on all ranks. Their sum over ranks is the whole step's. A rank may read them
        alone: that waits for sums over ranks that have begun, and begins none.
        """
        while self._waiting:
            self._add_oldest()
        return self._statistics

    def _add_oldest(self) -> None:
        self._add(self._waiting.pop(next(iter(self._waiting))))

    def _add(self, forward_pass: "_ForwardPass", factors: "_LossFactors | None" = None) -> None:
        counts, dropped, sums, get_total = forward_pass
        losses = counts.new_zeros(2, dtype=torch.float64)
        if get_total is not None:
            assert sums is not None
            terms = sums * (factors or self._loss_factors(get_total())).of_all_tokens
            losses = torch.stack((terms[:-1].sum(), terms[-1]))
        statistics = torch.cat((counts, dropped, losses))
        if self._statistics is None:
            with torch.inference_mode(False):  # outside of it nothing could be added to an inference tensor
                self._statistics = torch.zeros_like(statistics)
        self._statistics += statistics  # in place: a captured graph adds to the same tensor whenever it is replayed

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keep the biases in fp32 at least: steps of `bias_rate` would be lost in 16 bits."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype.itemsize < 4:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts that have the best scores [t, E], of the best groups if there are several."""
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if self.options.groups_per_token < self.options.groups:
            of_group = scores.unflatten(1, (self.options.groups, -1))
            best = of_group.topk(min(2, of_group.shape[2]), dim=-1).values.sum(-1)
            chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(
                1, _best(best, self.options.groups_per_token), True
            )
            scores = of_group.masked_fill(~chosen.unsqueeze(2), -math.inf).flatten(1)
        return _best(scores, self.experts_per_token)

    def _balance(
        self, x: Tensor, logits: Tensor, scores: Tensor, weights: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drop what exceeds the capacity, add the losses, and record the statistics."""
        chosen = torch.zeros_like(scores, dtype=torch.int64).scatter_(1, ids, 1)
        counts = chosen.sum(0)
        dropped = torch.zeros_like(counts)
        has_loss, has_capacity = self.options.has_loss, self.options.capacity_factor is not None
        # In a graph `add_losses` begins the sum, out of a compiler's sight.
        calls_graph = self.in_graphs if torch.compiler.is_compiling() else None
        get_total = self._start_sum(counts) if (has_loss or has_capacity) and calls_graph is None else None
        if has_capacity:
            assert get_total is not None
            is_dropped = self._exceeds_capacity(chosen, counts, get_total()).gather(1, ids)
            dropped.scatter_add_(0, ids.flatten(), is_dropped.flatten().long())
            weights, ids = weights.masked_fill(is_dropped, 0.0), ids.masked_fill(is_dropped, self.num_experts)
        sums = None
        if has_loss:
            of_z = logits.logsumexp(-1).square().sum().view(1) if self.options.z_loss else logits.new_zeros(1)
            sums = torch.cat((self._balance_sums(x, scores, chosen), of_z))
        if calls_graph is None:
            return self.add_losses(weights, counts, dropped, sums, get_total), ids
        return calls_graph(weights.shape, weights, counts, dropped, *([] if sums is None else [sums])), ids

    def add_losses(
        self,
        weights: Tensor,
        counts: Tensor,
        dropped: Tensor,
        sums: Tensor | None,
        get_total: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Return the weights, whose gradient brings that of the losses; and record the statistics.

        sums: of the losses, None for no loss. get_total: waits for the sum of counts over ranks; None to begin it here.
        """
        is_awaited = False
        if sums is not None:
            get_total = get_total or self._start_sum(counts)
            scale = self.loss_scale if self.averaged_ranks == 1 else self.loss_scale * self.averaged_ranks
            weights = _AddLoss.apply(weights, sums, partial(self._factors_in_backward, get_total), scale)
            sums, is_awaited = sums.detach(), sums.requires_grad
        self.record(_ForwardPass(counts, dropped, sums, None if sums is None else get_total), is_awaited=is_awaited)
        return weights

    def _start_sum(self, counts: Tensor) -> Callable[[], Tensor]:
        if self.start_sum_over_ranks is not None:
            return self.start_sum_over_ranks(counts)
        total = self.sum_over_ranks(counts)
        return lambda: total

    # The losses are sums over this rank's tokens, times factors that depend on the choices of all ranks. The sums are
    # those of the balance loss, [num_experts] or [1], and then of the z-loss, [1].

    def _balance_sums(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        shares = scores if self.options.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        if self.options.balance == "switch":
            return shares.sum(0)
        if not self.needs_whole_sequences:
            return shares.new_zeros(1)
        if x.dim() != 3:
            raise ValueError(f"the sequence-wise loss needs [batch, seq, hidden], and x is {list(x.shape)}")
        length = x.shape[1]
        load = chosen.unflatten(0, x.shape[:2]).sum(1) * (self.num_experts / (self.experts_per_token * length))
        mean = shares.unflatten(0, x.shape[:2]).mean(1)
        return (load.to(mean.dtype) * mean).sum().view(1) * length

    def _loss_factors(self, total: Tensor) -> "_LossFactors":
        """Factors of the sums, from the choices of all ranks [num_experts]."""
        total = total.double()
        tokens = (total.sum() / self.experts_per_token).clamp(min=1)
        if self.options.balance == "switch":
            of_balance = total * (self.options.balance_loss * self.num_experts / self.experts_per_token) / tokens
        else:
            of_balance = tokens.new_full((1,), self.options.balance_loss)
        factors = torch.cat((of_balance, tokens.new_full((1,), self.options.z_loss)))
        return _LossFactors(factors / tokens, factors)

    def _factors_in_backward(self, get_total: Callable[[], Tensor]) -> Tensor:
        factors = self._loss_factors(get_total())
        forward_pass = self._waiting.pop(get_total, None)
        if forward_pass is not None:  # neither read before, nor added by an earlier backward pass of the same graph
            self._add(forward_pass, factors)
        return factors.of_mean

    def _exceeds_capacity(self, chosen: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        """Mark choices [t, E] that an expert has no slot for: chosen [t, E]; counts, total [E], this rank's and all."""
        assert self.options.capacity_factor is not None
        factor = Fraction(self.options.capacity_factor).limit_denominator(1 << 20)
        capacity = -(-(total.sum() * factor.numerator) // (self.num_experts * factor.denominator))
        return chosen.cumsum(0) + self.sum_over_earlier_ranks(counts) > capacity


@dataclass(frozen=True)
class RoutingStatistics:
    """Sums over the routers of a model in a step, over all its micro-batches and ranks.

    names: of the routers. counts, dropped: fp64 [routers, experts], the choices of each expert, and those of them that
    found no slot. losses: fp64 [routers, 2], balance loss and z-loss with their coefficients, in the mean over the
    step's tokens. biases: fp32 [routers, experts] after the update, zeros where there are none.
    """

    names: tuple[str, ...]
    counts: Tensor
    dropped: Tensor
    losses: Tensor
    biases: Tensor


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Router))


def scale_losses(model: nn.Module, scale: float | Tensor) -> None:
    """Set the factor of the gradients of the routers' losses for the following forward passes.

    That is the micro-batch's share in the step's loss, times the loss scale if there is one.
    """
    for _, router in routers(model):
        router.loss_scale = scale


@torch.no_grad()
def update_biases(model: nn.Module) -> RoutingStatistics | None:
    """Update the routers' biases from the tokens since the last call, and return the routers' statistics. Collective.

    Call it once an optimizer step: b_e += bias_rate x sign(mean load - load of e). None for a model that has no router
    or has not run.
    """
    found = [(name, router) for name, router in routers(model) if router.statistics is not None]
    if not found:
        return None
    first = found[0][1]
    summed = first.sum_over_ranks(torch.stack([_statistics(router) for _, router in found]))
    experts = first.num_experts
    biases = torch.zeros(len(found), experts, device=summed.device)
    for row, (_, router) in enumerate(found):
        _statistics(router).zero_()
        if router.expert_bias is not None:
            counts = summed[row, :experts]
            router.expert_bias += router.options.bias_rate * (counts.sum() - experts * counts).sign().to(biases.dtype)
            biases[row] = router.expert_bias
    counts, dropped, losses = summed.split((experts, experts, 2), dim=1)
    tokens = [own.sum() / router.experts_per_token for own, (_, router) in zip(counts, found, strict=True)]
    losses = losses / torch.stack(tokens).clamp(min=1).unsqueeze(1)
    return RoutingStatistics(tuple(name for name, _ in found), counts, dropped, losses, biases)


def _statistics(router: Router) -> Tensor:
    assert router.statistics is not None
    return router.statistics


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _best(scores: Tensor, count: int) -> Tensor:
    """The columns of the best scores of each row, best first; of equal ones the lower first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class _AddLoss(torch.autograd.Function):
    """Returns its first argument. The backward pass gives `sums` the gradient `get_factors()` x `scale`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, sums: Tensor, get_factors: Callable[[], Tensor], scale: float | Tensor
    ) -> Tensor:
        ctx.get_factors, ctx.scale, ctx.dtype = get_factors, scale, sums.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradient, (ctx.get_factors() * ctx.scale).to(ctx.dtype), None, None
