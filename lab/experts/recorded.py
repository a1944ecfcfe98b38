# SPDX-License-Identifier: Apache-2.0
"""`python -m lab routing`: train a small mixture of experts, and record the choices of its routers on held-out text.

The text is the documentation in Python's standard library, in bytes; the model is a GPT of Stretto in one process of
the CPU, with 128 experts of which a token passes 8, as in Qwen3-30B-A3B, and the balance loss of Fedus et al. The
choices go to `lab/experts/recorded-routing.npz`, which benches and stress tests read
(`lab.experts.routing.take_recorded`).
"""

from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from lab.experts.peers import torch_experts
from lab.experts.routing import RECORDED, load_of
from lab.harness import Bench, Measured, column
from stretto.bench.settings import Needs, Option
from stretto.models import GPT, GPTConfig
from stretto.models.moe import Experts
from stretto.models.router import routers
from stretto.train.data.demo import demo_corpus

MODEL = GPTConfig(
    layers=2,
    hidden=96,
    heads=4,
    vocab=256,
    max_seq_len=128,
    positions="rotary",
    activation="swiglu",
    norm="rmsnorm",
    num_experts=128,
    experts_per_token=8,
    expert_ffn=24,
    balance="switch",
    balance_loss=0.001,
)
TOKENS = 4096  # recorded of each layer


class GroupedExperts(Experts):
    """Experts by torch's grouped GEMM, four times as fast as their loop on a CPU."""

    def _mix(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch_experts(hidden, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


@dataclass(frozen=True)
class RoutingSetting:
    """Settings of `python -m lab routing`."""

    steps: Annotated[int, Option("Steps of training.", least=1)] = 300
    batch: Annotated[int, Option("Sequences of a step.", least=1)] = 8


@dataclass(frozen=True)
class Row:
    """A layer's choices on held-out text: loads over their means, before training and after."""

    layer: int = column("layer")
    untrained: float = column("busiest expert / mean, untrained", "{:.2f}")
    load: float = column("busiest expert / mean", "{:.2f}")
    of_ranks: float = column("busiest of 4 ranks / mean", "{:.2f}")
    idlest: float = column("idlest expert / mean", "{:.2f}")


def record_routing(setting: RoutingSetting) -> Measured:
    """Train, record, and write the file."""
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(demo_corpus().encode()), dtype=torch.uint8).long()
    held_out, text = text[: TOKENS + 1], text[TOKENS + 1 :]
    model, length = GPT(MODEL), MODEL.max_seq_len
    for module in model.modules():
        if type(module) is Experts:
            module.__class__ = GroupedExperts
    before = find_choices(model, held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=setting.steps + 1)
    losses = []
    for step in range(setting.steps):
        starts = torch.randint(len(text) - length, (setting.batch, 1))
        rows = text[starts + torch.arange(length + 1)]
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}/{setting.steps}  loss {losses[-1]:.3f}", flush=True)
    found = find_choices(model, held_out)
    np.savez_compressed(RECORDED, ids=found.to(torch.uint8).numpy())
    experts = MODEL.num_experts
    assert experts is not None
    rows_of_layers = []
    for layer, (first, ids) in enumerate(zip(before, found, strict=True)):
        idlest = float(torch.bincount(ids.flatten(), minlength=experts).min()) * experts / ids.numel()
        of_ranks = load_of(ids // (experts // 4), 4)
        rows_of_layers.append(Row(layer, load_of(first, experts), load_of(ids, experts), of_ranks, idlest))
    mean = sum(losses[-20:]) / len(losses[-20:])
    return Measured(rows_of_layers, {"setting": asdict(setting), "last_loss": mean, "bytes": RECORDED.stat().st_size})


@torch.no_grad()
def find_choices(model: GPT, text: Tensor) -> Tensor:
    """The experts of each token [layers, tokens, k], the best first."""
    found: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, inputs, output: found.append(output[2])) for _, router in routers(model)
    ]
    model.eval()
    model(text[:-1].view(-1, MODEL.max_seq_len))
    model.train()
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


BENCH = Bench(
    "routing",
    "Train a small mixture of experts, and record its routers' choices for benches and stress tests.",
    RoutingSetting,
    record_routing,
    Row,
    title="Choices of a trained router, 128 experts, top-8",
    needs=Needs.NO_GPU,
    about=lambda setting: {},
)
