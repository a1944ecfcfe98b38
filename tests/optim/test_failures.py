# SPDX-License-Identifier: Apache-2.0
"""Optimizers after a failed wait for another rank: a step changes nothing on the device, and raises on the host."""

import gc
from unittest import mock

import pytest
import torch

from stretto.memory import PeerError, failures
from stretto.optim import AdamW
from stretto.optim.guard import guard
from stretto.train.optimizer import ShardOptimizer

CPU = torch.device("cpu")


@pytest.fixture
def flag(monkeypatch):
    """The failure flag, which these optimizers read as if their parameters were on a GPU; set without the host's word.

    torch's fused optimizers on CPUs skip a step by the same tensor as on GPUs.
    """
    made = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(failures, "find_flag", lambda device: made)
    return made


def make(kind):
    """A parameter with a gradient, and its fused optimizer, which has made one step."""
    parameter = torch.nn.Parameter(torch.arange(4.0))
    if kind == "stretto":
        optimizer = AdamW([parameter], lr=0.1)
        optimizer.param_groups[0]["fused"] = True
    else:
        optimizer = guard(getattr(torch.optim, kind)([parameter], lr=0.1, fused=True))
    parameter.grad = torch.ones(4)
    optimizer.step()
    return parameter, optimizer


def contents(parameter, optimizer):
    state = {key: value.clone() for key, value in optimizer.state[parameter].items() if torch.is_tensor(value)}
    return {"parameter": parameter.detach().clone()} | state


def changed(before, after):
    return [key for key in after if not torch.equal(before[key], after[key])]


@pytest.mark.parametrize("kind", ["stretto", "SGD", "Adam", "AdamW", "Adagrad"])
def test_a_step_after_a_failed_wait_changes_neither_weights_nor_state(kind, flag):
    parameter, optimizer = make(kind)
    before = contents(parameter, optimizer)
    flag.fill_(1)
    optimizer.step()
    assert changed(before, contents(parameter, optimizer)) == []
    flag.fill_(0)
    optimizer.step()
    assert "parameter" in changed(before, contents(parameter, optimizer))


@pytest.mark.parametrize("kind", ["stretto", "SGD"])
def test_a_gradient_scalers_own_finding_is_kept(kind, flag):
    parameter, optimizer = make(kind)
    optimizer.found_inf = torch.ones(())
    before = contents(parameter, optimizer)
    optimizer.step()
    assert changed(before, contents(parameter, optimizer)) == []
    assert float(optimizer.found_inf) == 1
    optimizer.found_inf = torch.zeros(())
    flag.fill_(1)
    optimizer.step()
    assert changed(before, contents(parameter, optimizer)) == []
    assert float(optimizer.found_inf) == 0  # it is the scaler's again


@pytest.mark.long
def test_a_guarded_step_raises_where_the_host_knows_of_the_failure():
    class Workspace:
        pass

    owner = Workspace()
    record = failures.register(owner, lambda words: f"waited in vain for rank {words[1]}", CPU)
    parameter, optimizer = make("SGD")
    before = contents(parameter, optimizer)
    record.mark([1, 3])
    with pytest.raises(PeerError, match="waited in vain for rank 3"):
        optimizer.step()
    assert changed(before, contents(parameter, optimizer)) == []
    record.close()
    gc.collect()
    optimizer.step()
    assert changed(before, contents(parameter, optimizer)) == ["parameter"]


def test_an_optimizer_that_fails_in_a_step_is_guarded_in_the_next(flag):
    parameter, optimizer = make("SGD")

    def fail():
        raise ZeroDivisionError

    flag.fill_(1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    flag.fill_(0)
    before = contents(parameter, optimizer)
    optimizer.step()
    optimizer.step()
    assert changed(before, contents(parameter, optimizer)) == ["parameter"]
    assert getattr(optimizer, "found_inf", None) is None


@pytest.mark.parametrize("kind", ["stretto", "SGD", "momentum"])
def test_a_fused_optimizer_skips_steps_by_a_tensor_also_the_first_one(kind):
    """As on a GPU, where the host does not read the tensor: a run with skipped steps beside one without them."""
    if kind == "stretto":
        make_inner = lambda groups: AdamW(groups, lr=0.1)  # noqa: E731
    else:
        momentum = 0.9 if kind == "momentum" else 0.0
        make_inner = lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=momentum, fused=True)  # noqa: E731
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    one, other = (ShardOptimizer(model, make_inner, weight_decay=0.1) for model in models)
    for optimizer in (one, other):
        for group in optimizer.inner.param_groups:
            group["fused"] = True
    for skips in (True, False, False, True, False):
        gradients = [torch.randn_like(p) for p in models[0].parameters()]
        for model in models:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = torch.full_like(gradient, torch.nan) if skips else gradient.clone()
        with mock.patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("the host waited")):
            one.step(0.1, skip=torch.tensor(skips))
        if not skips:
            other.step(0.1)
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, its)
