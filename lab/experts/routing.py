# SPDX-License-Identifier: Apache-2.0
"""Routings of the experts' benches: uniform, or skewed by a fixed bias on the routers' logits that a seed draws."""

import torch
from torch import Tensor, nn

SKEW = 0.3  # the bias's standard deviation, where that of a token's logits is 1


def draw_routing(
    tokens: int, experts: int, top_k: int, routing: str, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw topk_ids, int64 [tokens, top_k], and fp32 weights of the same shape. The bias is the same for all seeds."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed + 1)).to(device)
    if routing == "skewed":
        logits += SKEW * _draw_bias(experts).to(device)
    values, ids = logits.topk(top_k)
    return ids, values.softmax(-1)


@torch.no_grad()
def route(model: nn.Module, routing: str) -> None:
    """Set a transformers model's routing by weights alone, so that every run trains the same unmodified model.

    With the embeddings of its initialization, attention's mean over random tokens is most of a router's input, and
    layers route all tokens alike. With embeddings of a standard deviation of 1 routing is uniform. To skew it, they get
    a component in common, which norms leave in the routers' input, and each router's row a multiple of it: its bias.
    """
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    embedding.div_(embedding.std())
    if routing == "uniform":
        return
    embedding.add_(1)
    for name, weight in model.named_parameters():
        if name.endswith(".mlp.gate.weight"):
            weight.sub_(weight.mean(1, keepdim=True))
            bias = _draw_bias(len(weight)).to(weight.device)
            weight.add_(SKEW * weight.std() * weight.shape[1] ** -0.5 * bias[:, None])


def _draw_bias(experts: int) -> Tensor:
    return torch.randn(experts, generator=torch.Generator().manual_seed(0))


def load_of(ids: Tensor, experts: int) -> float:
    """Rows of the busiest expert over the mean of all."""
    return float(torch.bincount(ids.flatten(), minlength=experts).max()) * experts / ids.numel()


def count_rows_sent(ids: Tensor, experts: int, ranks: int, rank: int) -> tuple[int, int]:
    """Rows that a rank sends to other ranks: one a choice, and one a token and rank of its experts."""
    owners = ids // (experts // ranks)
    of_tokens = torch.zeros(len(ids), ranks, dtype=torch.bool, device=ids.device).scatter_(1, owners, True)
    of_tokens[:, rank] = False
    return int((owners != rank).sum()), int(of_tokens.sum())
