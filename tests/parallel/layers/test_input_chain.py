# SPDX-License-Identifier: Apache-2.0
"""Linears that take one tensor add its gradients within their products, whatever else a model does with it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.parallel import Grid, gather, parallelize
from stretto.parallel.comm.autograd import input_chain
from tests.differences import largest
from tests.parallel.training import my_rows

ROLES = dict.fromkeys(("q", "k", "v", "unused"), "colwise") | {"out": "rowwise"}


class Attention(nn.Module):
    """Linears of one input, in the ways of a user's code (`kind`)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.unused, self.out = (nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        if self.kind == "hooked":
            x.register_hook(lambda gradient: gradient * 2)
        q = self.q(x)
        self.unused(x)  # its node leads to k's all the same
        if self.kind == "replaced":
            x = x + 0
        k, v = self.k(x), self.v(x)
        y = self.out(q * k * v.tanh())
        return y + x if self.kind == "residual" else y


class Additions(TorchDispatchMode):
    """Counts additions within products and by kernels of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"within": 0, "apart": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.counts["within"] += "addmm_" in name
        self.counts["apart"] += name.startswith("aten.add") and "addmm" not in name
        return func(*args, **(kwargs or {}))


def gradients_of(kind: str) -> dict[str, Any]:
    """Largest difference of all gradients to one rank's, the additions, and the gradient of `unused`."""
    torch.manual_seed(5)
    plain, x = Attention(kind).double(), torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    grid = Grid(z=2)
    model = parallelize(copy.deepcopy(plain), grid, roles=ROLES)
    plain(x).square().mean().backward()
    own = x.detach()[my_rows(grid, 4)].requires_grad_()
    loss = model(own).square().mean()
    with Additions() as additions:
        loss.backward()
    expected = dict(plain.named_parameters())
    found = {name: gather(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    errors = [(found[name] - expected[name].grad).abs().max() for name in found]
    assert own.grad is not None
    assert x.grad is not None
    most = float(largest(*errors, (own.grad / 2 - x.grad[my_rows(grid, 4)]).abs().max()))
    missing = {name for name, each in expected.items() if each.grad is not None} - found.keys()
    return {"largest": most, "missing": missing, "found": set(found), **additions.counts}


@pytest.mark.parametrize("kind", ["plain", "hooked", "residual", "replaced"])
def test_gradients_of_a_shared_input_are_added_within_products(ranks, kind):
    for found in ranks(2).run(gradients_of, kind):
        assert found["missing"] == set()
        assert found["largest"] < 1e-12, found
        assert "unused.weight" not in found["found"]
        # "replaced": autograd adds those of x and x + 0; "residual": those of the linears and of the sum.
        assert (found["within"], found["apart"]) == {"replaced": (1, 1), "residual": (2, 1)}.get(kind, (2, 0)), found


def forgotten() -> tuple[bool, str]:
    """Whether a model holds its input after a forward pass, and what a write between forward and backward says."""
    model = parallelize(Attention("plain").double(), Grid(z=2), roles=ROLES)
    kept: list[Tensor] = []
    model.q.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    y = model(torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True))
    try:
        with torch.no_grad():
            kept[0].mul_(2)
        y.sum().backward()
    except RuntimeError as error:
        return input_chain.follow(kept[0]) is kept[0], str(error)
    return input_chain.follow(kept[0]) is kept[0], "nothing"


def test_a_shared_input_is_let_go_after_the_forward_pass_and_a_write_to_it_is_refused(ranks):
    for is_let_go, error in ranks(2).run(forgotten):
        assert is_let_go
        assert "inplace" in error
