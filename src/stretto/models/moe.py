# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: a router chooses a few experts for each token, and their weighted outputs are added up.

The modules know nothing about ranks: `stretto.parallelize` replaces `Experts` by experts on several ranks.

A custom training loop calls `scale_losses` before the forward pass of each micro-batch and `update_biases` after
each optimizer step.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.models.gpt_config import GPTConfig
from stretto.models.router import Router, RouterOptions, RoutingStatistics, routers, scale_losses, update_biases
from stretto.parallel.comm.collectives import mark_experts
from stretto.parallel.layers.fused import swiglu

__all__ = [
    "Experts",
    "MoE",
    "Router",
    "RouterOptions",
    "RoutingStatistics",
    "SharedExpert",
    "routers",
    "scale_losses",
    "update_biases",
]


class Experts(nn.Module):
    """MLPs of one shape without biases, by the interface of transformers' expert modules.

    `experts(hidden, top_k_index, top_k_weights)`: hidden [t, h], top_k_index int64 [t, k], top_k_weights [t, k];
    returns [t, h], the weighted sum of the chosen experts' outputs, added in fp32 at least. A choice of num_experts is
    left out. `is_gated`: down(act_fn(gate(x)) * up(x)), where `gate_up_proj` [E, 2F, h] has the gate's rows first;
    otherwise down(act_fn(up(x))), with `up_proj` [E, F, h]. `down_proj` is [E, h, F].
    """

    def __init__(self, hidden: int, width: int, num_experts: int, *, is_gated: bool) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.is_gated = is_gated
        if is_gated:
            self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        else:
            self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.act_fn: Callable[[Tensor], Tensor] = nn.SiLU() if is_gated else nn.GELU(approximate="tanh")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with mark_experts():
            return self._mix(hidden, top_k_index, top_k_weights)

    def _mix(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        choices = top_k_index.flatten()
        order = choices.argsort(stable=True)
        counts = choices.bincount(minlength=self.num_experts + 1).tolist()
        rows = hidden[order // top_k_index.shape[1]].split(counts)
        outputs = [self._compute(expert, rows[expert]) for expert in range(self.num_experts)]
        of_choice = torch.cat([*outputs, torch.zeros_like(rows[-1])])[order.argsort()].view(
            *top_k_index.shape, hidden.shape[1]
        )
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return torch.einsum("tkh,tk->th", of_choice.to(dtype), top_k_weights.to(dtype)).to(hidden.dtype)

    def _compute(self, expert: int, x: Tensor) -> Tensor:
        if self.is_gated:
            gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
            return F.linear(self.act_fn(gate) * up, self.down_proj[expert])
        return F.linear(self.act_fn(F.linear(x, self.up_proj[expert])), self.down_proj[expert])


class SharedExpert(nn.Module):
    """The MLP that every token passes, with its own width and without biases; with a gate, a sigmoid scales it."""

    def __init__(self, hidden: int, width: int, *, is_gated: bool, has_gate: bool) -> None:
        super().__init__()
        self.is_gated = is_gated
        self.up = nn.Linear(hidden, width, bias=False)
        if is_gated:
            self.gate = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)
        self.output_gate = nn.Linear(hidden, 1, bias=False) if has_gate else None

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        y = self.down(swiglu(self.gate(x), up) if self.is_gated else F.gelu(up, approximate="tanh"))
        return y if self.output_gate is None else y * self.output_gate(x).sigmoid()


class MoE(nn.Module):
    """The MLP of a transformer block as a mixture of experts. Takes and returns [batch, seq, hidden]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.num_experts is None:
            raise ValueError("model.num_experts is not set: a mixture of experts needs it")
        is_gated = config.activation == "swiglu"
        options = RouterOptions(
            scores=config.router_scores,
            normalize=config.normalizes_expert_weights,
            scale=config.expert_weight_scale,
            groups=config.expert_groups,
            groups_per_token=config.groups_per_token,
            balance=config.balance,
            balance_loss=config.balance_coefficient,
            bias_rate=config.bias_rate,
            z_loss=config.z_loss,
            capacity_factor=config.capacity_factor,
        )
        self.router = Router(config.hidden, config.num_experts, config.experts_per_token, options)
        self.experts = Experts(config.hidden, config.expert_width, config.num_experts, is_gated=is_gated)
        self.shared = None
        if config.shared_ffn is not None:
            self.shared = SharedExpert(
                config.hidden, config.shared_ffn, is_gated=is_gated, has_gate=config.shared_expert_gate
            )

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.router(x)
        y = self.experts(x.flatten(0, -2), ids, weights).view(x.shape)
        return y if self.shared is None else y + self.shared(x)
