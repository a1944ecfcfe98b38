# SPDX-License-Identifier: Apache-2.0
"""Routings of the experts' benches: uniform, skewed by biases on the routers' logits, and recorded."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SKEW = 0.3  # the bias's standard deviation, where that of a token's logits is 1
RECORDED = Path(__file__).with_name("recorded-routing.npz")
"""Choices of a trained router: `python -m lab routing`."""
RECORDED_EXPERTS = 128


def draw_routing(
    tokens: int, experts: int, top_k: int, routing: str, device: torch.device, seed: int = 0, layer: int = -1
) -> tuple[Tensor, Tensor]:
    """Draw topk_ids, int64 [tokens, top_k], and fp32 weights of the same shape. The bias is the same for all seeds.

    seed: the rank, as a rule. Recorded tokens of seeds follow each other. layer: of those recorded.
    """
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed + 1)).to(device)
    if routing == "recorded":
        ids = take_recorded(tokens, experts, top_k, first=seed * tokens, layer=layer).to(device)
        return ids, logits.topk(top_k).values.softmax(-1)
    if (bias := find_bias(routing, experts, top_k)) is not None:
        logits += bias.to(device)
    values, ids = logits.topk(top_k)
    return ids, values.softmax(-1)


@cache
def _read_recorded() -> Tensor:
    """Choices of each layer's tokens [layers, tokens, k], the best first, of RECORDED_EXPERTS experts."""
    with np.load(RECORDED) as file:
        return torch.from_numpy(file["ids"].astype(np.int64))


def take_recorded(tokens: int, experts: int, top_k: int, first: int = 0, layer: int = -1) -> Tensor:
    """Choices of recorded tokens, from number `first` on and again from the start, int64 [tokens, top_k], best first.

    Scaled to other numbers of experts by e -> e * experts // 128, which leaves neighbours together and so the loads of
    ranks; of more experts than 128, token t takes the (t mod n)-th of the n that stand for one. A token has the first
    top_k different experts of its own choices, then of the following tokens', then those with the lowest numbers.
    """
    ids = _read_recorded()[layer % len(_read_recorded())]
    numbers = (first + torch.arange(tokens)) % len(ids)
    needed = -(-2 * top_k // ids.shape[1])  # tokens whose choices are looked at, for some become equal
    choices = torch.cat([ids[(numbers + step) % len(ids)] for step in range(needed)], 1)
    begins = choices * experts // RECORDED_EXPERTS
    counts = ((choices + 1) * experts // RECORDED_EXPERTS - begins).clamp(min=1)
    choices = begins + numbers[:, None] % counts
    places = torch.full((tokens, experts), choices.shape[1]) + torch.arange(experts)
    columns = torch.arange(choices.shape[1]).expand_as(choices)
    places.scatter_reduce_(1, choices, columns, "amin")
    return places.topk(top_k, largest=False).indices


@cache
def find_bias(routing: str, experts: int, top_k: int, layer: int = -1) -> Tensor | None:
    """Return the bias of each expert's logits (of standard deviation 1) that gives its load; None for uniform routing.

    "1.5x": ranks are a quarter of the experts each, and the first has 1.5 times the mean, all of which the first of
    every 32 experts on it have more than the others. "recorded": loads are those of `take_recorded`.
    """
    match routing:
        case "skewed":
            return SKEW * torch.randn(experts, generator=torch.Generator().manual_seed(0))
        case "1.5x":
            hot, loads = -(-experts // 32), torch.full((experts,), 2.5 / 3)
            loads[: experts // 4] = 1.0
            loads[:hot] += experts / 8 / hot
        case "recorded":
            ids = take_recorded(len(_read_recorded()[0]), experts, top_k, layer=layer)
            loads = torch.bincount(ids.flatten(), minlength=experts).float()
        case _:
            return None
    return _fit_bias(loads, top_k)


def _fit_bias(loads: Tensor, top_k: int) -> Tensor:
    """Find the biases with which the top_k of logits of standard deviation 1 have these loads, but for 1% or so."""
    logits = torch.randn(4096, len(loads), generator=torch.Generator().manual_seed(0))
    wanted = (loads.double() / loads.sum() * top_k).clamp(1e-4, 1 - 1e-4)
    bias = torch.zeros(len(loads), dtype=torch.float64)
    for _ in range(20):
        ids = (logits + bias).topk(top_k).indices
        found = torch.bincount(ids.flatten(), minlength=len(loads)) / len(logits)
        # Loads are as the tail of a normal distribution.
        bias += torch.special.ndtri(wanted) - torch.special.ndtri(found.double().clamp(1e-4, 1 - 1e-4))
        bias -= bias.mean()
    return bias.float()


@torch.no_grad()
def route(model: Any, routing: str) -> None:
    """Set a transformers model's routing by weights alone, so that every run trains the same unmodified model.

    With the embeddings of its initialization, attention's mean over random tokens is most of a router's input, and
    layers route all tokens alike. With embeddings of a standard deviation of 1 routing is uniform. To skew it, they get
    a component in common, which norms leave in the routers' input, and each router's row a multiple of it: its bias.
    """
    embedding = model.get_input_embeddings().weight
    embedding.div_(embedding.std())
    if routing == "uniform":
        return
    embedding.add_(1)
    routers = (weight for name, weight in model.named_parameters() if name.endswith(".mlp.gate.weight"))
    for layer, weight in enumerate(routers):
        weight.sub_(weight.mean(1, keepdim=True))
        bias = find_bias(routing, len(weight), model.config.num_experts_per_tok, layer)
        assert bias is not None
        weight.add_(weight.std() * weight.shape[1] ** -0.5 * bias.to(weight.device)[:, None])


def load_of(ids: Tensor, experts: int) -> float:
    """Rows of the busiest expert over the mean of all."""
    return float(torch.bincount(ids.flatten(), minlength=experts).max()) * experts / ids.numel()


def count_rows_sent(ids: Tensor, experts: int, ranks: int, rank: int) -> tuple[int, int]:
    """Rows that a rank sends to other ranks: one a choice, and one a token and rank of its experts."""
    owners = ids // (experts // ranks)
    of_tokens = torch.zeros(len(ids), ranks, dtype=torch.bool, device=ids.device).scatter_(1, owners, True)
    of_tokens[:, rank] = False
    return int((owners != rank).sum()), int(of_tokens.sum())
