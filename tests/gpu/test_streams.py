# SPDX-License-Identifier: Apache-2.0
"""On a GPU: models whose forward pass uses two streams train as on one, where gradients are kept, sent or stored."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.execution import StateOptions
from stretto.parallel import Grid, no_sync, parallelize
from stretto.train.pruning import prune
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update
from tests.gpu.sharing import SHARED

WIDTH = 512
ROLES = {f"{branch}.{place}": role for branch in "ab" for place, role in enumerate(("colwise", "rowwise"))}


class _LateBackward(torch.autograd.Function):
    """Its backward pass begins with a kernel of some 20 ms on the stream of its forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.is_cuda:
            torch.cuda._sleep(40_000_000)
        return gradient.clone()


class Branches(nn.Module):
    """Two branches of two linears; the second, of which the backward pass comes first, on the given stream."""

    def __init__(self, side: "torch.cuda.Stream | None") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.side = side
        self.a, self.b = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
            x.record_stream(self.side)
        with nullcontext() if self.side is None else torch.cuda.stream(self.side):
            second = _LateBackward.apply(self.b(x))
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
            second.record_stream(torch.cuda.current_stream())
        return first + second


def train(sizes: dict[str, int], how: str, *, on_two: bool) -> list[Tensor]:
    """The weights of three steps, each of two micro-batches. how: of the gradients."""
    grid = Grid(**sizes)
    side = torch.cuda.Stream() if on_two and grid.device.type == "cuda" else None
    shape = {"blocks": ["a", "b"]} if how == "blocks" else {"roles": ROLES}
    model = parallelize(Branches(side), grid, dtype=torch.bfloat16, **shape)  # type: ignore[arg-type]
    step: Callable[[], Any]
    if how in ("stored", "pruned"):
        masks = prune(model, 0.5) if how == "pruned" else None
        make, options = adamw_update(betas=(0.9, 0.95), eps=1e-8), StateOptions("device")
        optimizer = StoredOptimizer(model, grid, make, name="adamw", options=options, masks=masks)
        step = lambda: optimizer.step(1e-2)  # noqa: E731
    else:
        plain = torch.optim.SGD(model.parameters(), lr=1e-1)
        step = lambda: (plain.step(), plain.zero_grad())  # noqa: E731
    rows = 8 * grid.size("batch")
    generator, part = torch.Generator().manual_seed(1), grid.coordinate("batch")
    for _ in range(3):
        for number in range(2):
            x = torch.randn(rows, WIDTH, generator=generator)[8 * part : 8 * part + 8].to(grid.device)
            with nullcontext() if number else no_sync(model):
                (model(x).float().square().sum() / rows).backward()
        step()
    return [parameter.to_local().detach().float().cpu() for parameter in model.parameters()]  # type: ignore[attr-defined]


def compare(sizes: dict[str, int], kinds: list[str]) -> list[str]:
    """The kinds of which two streams give other weights."""
    wrong = []
    for how in kinds:
        one, two = (train(sizes, how, on_two=on_two) for on_two in (False, True))
        if not all(map(torch.equal, one, two)):
            wrong.append(how)
    return wrong


@pytest.mark.ranks(1, 2, own=(1, 2), among=(1, *SHARED))
def test_two_streams_of_a_forward_pass_train_as_one(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    for sizes in ({"data": world}, {"z": world})[:world]:
        for wrong in run_ranks(world, compare, sizes, ["pruned", "stored", "roles", "blocks"]):
            assert not wrong, sizes
