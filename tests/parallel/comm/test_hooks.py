# SPDX-License-Identifier: Apache-2.0
"""Hooks on parameters, and what autograd may be asked for: as plain PyTorch, or refused on all ranks alike."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, layout_of, no_sync, parallelize
from stretto.parallel.layout import has_layout
from tests.parallel.training import distance, my_rows

ROLES = {"0": "colwise", "1": "inner_norm", "2": "rowwise"}
ROWS = 8
LAYOUTS = [({"data": 2}, None), ({"z": 2}, None), ({"data": 2, "z": 2}, None), ({"data": 2, "z": 2}, ROLES)]


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)).double()


def on_grid(sizes: dict[str, int], roles: dict[str, str] | None) -> tuple[nn.Module, Tensor, Tensor]:
    """The model on its grid, the whole batch, and this rank's rows of it."""
    grid = Grid(**sizes)
    batch = torch.randn(ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    blocks = {"blocks": ["0", "2"]} if roles is None else {"roles": roles}
    return parallelize(build(), grid, **blocks), batch, batch[my_rows(grid, ROWS)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: gather(parameter.grad, layout_of(parameter)) if has_layout(parameter) else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def distances(model: nn.Module, plain: nn.Module) -> list[str]:
    """The parameters whose gradients differ from plain training's, or are there on one side alone."""
    ours, theirs = gradients(model), gradients(plain)
    return [
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not distance(ours[name], theirs[name]) <= 1e-10
    ]


def step_in_backward(layout: Any) -> dict[str, object]:
    """Train by an optimizer in hooks, two steps of which the second has two micro-batches, beside plain PyTorch."""
    model, batch, mine = on_grid(*layout)
    plain, calls = build(), []

    def step(parameter: Tensor) -> None:
        torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None
        calls.append(parameter)

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    loss_of(model, mine).backward()
    loss = loss_of(model, mine)
    last = next(model.parameters()).register_post_accumulate_grad_hook(calls.append)  # after the forward pass
    with no_sync(model):
        (loss / 2).backward()
    seen: dict[str, object] = {"calls before the last micro-batch": len(calls)}
    (loss_of(model, mine) / 2).backward()
    seen["calls"] = len(calls)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    seen["differ"] = [
        ours.shape for ours, theirs in pairs if not distance(gather(ours).detach(), theirs.detach()) <= 1e-10
    ]
    for handle in [*handles, last]:
        handle.remove()
    loss_of(model, mine).backward()
    seen["calls once removed"] = len(calls) - int(str(seen["calls"]))
    return seen


@pytest.mark.long
def test_hooks_of_accumulated_gradients_see_final_gradients_once_a_step(ranks):
    for layout in LAYOUTS:
        count = len(build().state_dict())
        expected = {
            "calls before the last micro-batch": count,
            "calls": 2 * count + 1,
            "differ": [],
            "calls once removed": 0,
        }
        for seen in ranks(2 if len(layout[0]) == 1 else 4).run(step_in_backward, layout):
            assert seen == expected, layout


def refusals(layout: Any) -> dict[str, object]:
    """The errors for what cannot be as in plain PyTorch; and then a plain step."""
    model, batch, mine = on_grid(*layout)
    errors: dict[str, object] = {}

    def refused(name: str, kind: type[Exception], function: Any) -> None:
        with pytest.raises(kind) as caught:
            function()
        errors[name] = str(caught.value)

    names = ["0.weight", "0.bias", "1.weight"]
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters[name]
        handle = parameter.register_hook(lambda gradient: gradient * 0)
        refused(f"hook of {name}", ValueError, lambda: model(mine))
        handle.remove()
        loss = loss_of(model, mine)
        handle = parameter.register_hook(lambda gradient: gradient * 0)
        refused(f"late hook of {name}", ValueError, loss.backward)
        assert model.state_dict().keys() == parameters.keys() == dict(model.named_parameters()).keys()
        handle.remove()
        model.zero_grad()
        loss_of(model, mine).backward()
        before = {key: gradient.clone() for key, gradient in gradients(model).items()}
        refused(f"grad of {name}", RuntimeError, lambda of=parameter: torch.autograd.grad(loss_of(model, mine), [of]))
        with no_sync(model):
            refused(
                f"unsynced {name}", RuntimeError, lambda of=parameter: torch.autograd.grad(loss_of(model, mine), [of])
            )
        after = gradients(model)
        errors[f"kept {name}"] = before.keys() == after.keys() and all(
            map(torch.equal, before.values(), after.values())
        )
    model.zero_grad()
    refused("create_graph", RuntimeError, lambda: loss_of(model, mine).backward(create_graph=True))
    model.zero_grad()
    refused("func.grad", ValueError, lambda: torch.func.grad(lambda x: loss_of(model, x))(mine))
    refused("vmap", ValueError, lambda: torch.func.vmap(model)(mine))
    plain = build()
    for one, x in ((model, mine), (plain, batch)):
        loss_of(one, x).backward(inputs=[one.get_parameter("0.weight"), one.get_parameter("1.bias")])
    errors["inputs="] = sorted(gradients(model)), distances(model, plain)
    for one, x in ((model, mine), (plain, batch)):
        one.zero_grad()
        loss = loss_of(one, x)
        one[0].requires_grad_(False)
        one[1].bias.requires_grad_(False)
        loss.backward()
        one.requires_grad_(True)
    errors["frozen after forward"] = sorted(gradients(model)), distances(model, plain)
    with torch.autograd.detect_anomaly():
        for one, x in ((model, mine), (plain, batch)):
            one.zero_grad()
            loss_of(one, x).backward()
        errors["anomaly"] = distances(model, plain)
        refused("nan", RuntimeError, lambda: (loss_of(model, mine) * float("nan")).backward())
    return errors


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph", "ignore:Anomaly Detection")
def test_what_cannot_be_as_in_plain_pytorch_is_refused_and_leaves_gradients_alone(ranks):
    for layout in LAYOUTS:
        for seen in ranks(2 if len(layout[0]) == 1 else 4).run(refusals, layout):
            for name in ("0.weight", "0.bias", "1.weight"):
                assert "register_post_accumulate_grad_hook" in seen.pop(f"hook of {name}"), (layout, name)
                assert "register_post_accumulate_grad_hook" in seen.pop(f"late hook of {name}"), (layout, name)
                assert "autograd.grad was called for a parameter" in seen.pop(f"grad of {name}"), (layout, name)
                assert "autograd.grad was called for a parameter" in seen.pop(f"unsynced {name}"), (layout, name)
                assert seen.pop(f"kept {name}"), (layout, name)
            assert "create_graph=True is not supported" in seen.pop("create_graph")
            assert "torch.func" in seen.pop("func.grad")
            assert "torch.func" in seen.pop("vmap")
            assert "nan" in seen.pop("nan")
            assert seen == {
                "inputs=": (["0.weight", "1.bias"], []),
                "frozen after forward": (["1.weight", "2.bias", "2.weight"], []),
                "anomaly": [],
            }, layout


def calls_in_micro_batches() -> list[int]:
    """Return how often hooks of each parameter are called in a step of three micro-batches,
    of ranks that reduce no bias.
    """
    model = parallelize(GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=13, max_seq_len=8)), Grid(x=2))
    calls = dict.fromkeys(dict(model.named_parameters()), 0)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: calls[name] + 1}))
    tokens = torch.arange(9).view(1, 9)
    for is_last in (False, False, True):
        with nullcontext() if is_last else no_sync(model):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
    return sorted(set(calls.values()))


def test_hooks_wait_for_the_last_micro_batch_where_nothing_is_reduced(ranks):
    assert ranks(2).run(calls_in_micro_batches) == [[1]] * 2
