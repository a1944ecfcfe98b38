# SPDX-License-Identifier: Apache-2.0
"""Training in steps that differ from the first, on ranks of a pool and in one process of plain PyTorch."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stretto.execution import StateOptions
from stretto.optim import AdamW
from stretto.parallel import Grid, clip_grad_norm_, clip_scale, gather, gradient_norm, no_sync, parallelize
from stretto.parallel.state import state_of
from stretto.train.optimizer import ShardOptimizer
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update, tiled_update

CLIP, LR, DECAY = 0.5, 0.02, 0.1
ROLES = {"parts.*.up": "colwise", "parts.*.norm": "norm", "parts.*.down": "rowwise"}

STEPS: tuple[tuple[str, ...], ...] = (
    ("", ""),
    ("-", "- twice", "eval", ""),
    ("", "other", "short"),
    ("- other", "-", "short again twice"),
    ("freeze -", "- other", "short"),
    ("eval twice other", "", "again"),
    ("thaw", "short", ""),
)
"""Steps of passes. Of a pass: "-": under no_sync; "twice", "other": which modules run; "short": fewer; "again": two
backward passes; "eval": none; "freeze", "thaw": before it `parts.0.up` is frozen or thawed."""

THAWED_STEPS = (("freeze",), ("-", ""), ("thaw", ""), *STEPS[1:])
MIXED_STEPS = (("", "- other", "short"), ("-", "", "", "-", "again"), *STEPS)
"""With passes under no_sync after one that sums, which stored state alone takes."""


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x: Tensor, words: Sequence[str]) -> Tensor:
        x = self.parts[1](self.parts[0](x))
        if "twice" in words:
            x = self.parts[0](x)
        return self.parts[2](x) if "other" in words else x


def build() -> Parts:
    torch.manual_seed(0)
    return Parts()


def train(
    model: nn.Module,
    loss_of: Callable[[Tensor, Sequence[str]], Tensor],
    update: Callable[[], Tensor],
    steps: Sequence[Sequence[str]],
) -> list[float]:
    """The norm of each step's gradient."""
    generator = torch.Generator().manual_seed(1)
    norms = []
    for step in steps:
        for words in map(str.split, step):
            x = torch.randn(8, 4 if "short" in words else 6, 8, generator=generator)
            if "freeze" in words or "thaw" in words:
                for parameter in model.get_submodule("parts.0.up").parameters():
                    parameter.requires_grad_("thaw" in words)
            with no_sync(model) if "-" in words and state_of(model) is not None else nullcontext():
                if "eval" in words:
                    with torch.no_grad():
                        loss_of(x, words)
                    continue
                loss = loss_of(x, words)
                if "again" in words:
                    loss.backward(retain_graph=True)
                loss.backward()
        norms.append(float(update()))
    return norms


def train_plain(steps: Sequence[Sequence[str]] = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of one process in plain PyTorch, with all parameters in the optimizer."""
    model = build()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)

    def update() -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    norms = train(model, lambda x, words: model(x, words).square().mean(), update, steps)
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_on_grid(
    sizes: dict[str, int], kind: str, *, has_roles: bool, steps: Sequence[Sequence[str]] = STEPS, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The same on a grid. kind: of the optimizer, "torch", "shards", or where the stored state is and is stepped."""
    grid = Grid(**sizes, device="cpu")
    model = parallelize(build(), grid, **({"roles": ROLES} if has_roles else {"blocks": ["parts.*"]}), **options)
    update = make_update(model, grid, kind)

    def loss_of(x: Tensor, words: Sequence[str]) -> Tensor:
        mine = x.chunk(grid.size("batch"))[grid.coordinate("batch")]
        return model(mine, words).square().mean()

    norms = train(model, loss_of, update, steps)
    return norms, {name: gather(parameter).detach().clone() for name, parameter in model.named_parameters()}


def make_update(model: nn.Module, grid: Grid, kind: str) -> Callable[[], Tensor]:
    """Return a function that clips, updates and drops gradients."""
    if kind == "torch":
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=LR)

        def update() -> Tensor:
            norm = clip_grad_norm_(model.parameters(), CLIP, grid)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return update
    if kind == "shards":
        shards = ShardOptimizer(model, lambda groups: AdamW(groups), weight_decay=DECAY)

        def update_shards() -> Tensor:
            norm = gradient_norm(model.parameters(), grid)
            shards.step(LR, scale=clip_scale(norm, CLIP))
            return norm

        return update_shards
    options = {
        "device": StateOptions("device", bucket_size=128),
        "host": StateOptions("host", bucket_size=64, coarsening=2, step_on="device"),
        "host, tiled": StateOptions("host", bucket_size=128, step_on="host"),
    }[kind]
    make = adamw_update(betas=(0.9, 0.999), eps=1e-8)
    if kind == "host, tiled":
        make = tiled_update(lambda groups: torch.optim.AdamW(groups, lr=LR), tile=100)
    stored = StoredOptimizer(
        model, grid, make, name="adamw", weight_decay=DECAY, clip=CLIP, dtype=torch.float32, options=options
    )
    return lambda: stored.step(LR)
