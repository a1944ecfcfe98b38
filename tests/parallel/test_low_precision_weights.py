# SPDX-License-Identifier: Apache-2.0
"""Weights that an optimizer writes in the dtype that is computed in: found as they are, and never when they are old."""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from stretto.execution import ReshardPolicy
from stretto.parallel import Grid, low_precision_weights, parallelize
from stretto.parallel.layout import local
from stretto.parallel.low_precision_weights import capturing_weights, cast
from tests.parallel.training import Sizes


def write(parameter: Tensor) -> None:
    """As an optimizer does, in one pass: the parameter, and its copy, for which a forward pass has asked."""
    cast(parameter, torch.bfloat16)
    with torch.no_grad():
        parameter.mul_(0.9)
        parameter.low_precision_weight.open(parameter).copy_(local(parameter))
        parameter.low_precision_weight.close(parameter)


@contextmanager
def captured() -> Iterator[None]:
    """Streams are reported as captured, although calls are executed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_precision_weights, "_is_captured", lambda _: True)
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def build(sizes: Sizes) -> nn.Module:
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    return parallelize(Block(), grid, dtype=torch.bfloat16, roles={"up": "colwise", "down": "rowwise"})


def made(sizes: Sizes) -> nn.Parameter:
    """A weight [16, 8] of a model on a grid, whose copy is written."""
    weight = build(sizes).up.weight
    assert weight.low_precision_weight.open(weight) is None, "no pass has asked for a copy"
    write(weight)
    return weight


def take_and_change(sizes: Sizes) -> None:
    """A copy that was written is taken until the parameter changes."""
    weight = made(sizes)
    kept = cast(weight, torch.bfloat16)
    assert kept is cast(weight, torch.bfloat16)
    assert torch.equal(kept, local(weight).bfloat16())
    assert torch.equal(cast(weight, torch.float16), local(weight).half())  # another dtype is another cast
    for change in (
        lambda: weight.detach().add_(1),
        lambda: weight.to_local().detach().view(-1)[3:].zero_(),
        lambda: weight.detach().copy_(weight.detach() * 2),
    ):
        change()
        taken = cast(weight, torch.bfloat16)
        assert torch.equal(taken, local(weight).bfloat16())
        assert taken is not kept
        write(weight)
        kept = cast(weight, torch.bfloat16)
        assert torch.equal(kept, local(weight).bfloat16())
        assert kept is cast(weight, torch.bfloat16)


def refresh(sizes: Sizes) -> None:
    """Return what a graph has taken is brought up to date where it lies."""
    weight = made(sizes)
    with captured(), capturing_weights() as found:
        kept = cast(weight, torch.bfloat16)
    found.refresh()
    assert kept is cast(weight, torch.bfloat16)
    weight.detach().fill_(2)
    found.refresh()
    assert kept.eq(2).all()
    assert kept is cast(weight, torch.bfloat16)
    other = copy.deepcopy(weight.low_precision_weight)
    other.take(weight)
    assert other.open(weight) is not kept


def step_by_torch(sizes: Sizes) -> None:
    """Optimizers whose writes no version tells of."""
    for options in ({"foreach": True}, {"fused": True}):
        weight = made(sizes)
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], **options).step()
        assert torch.equal(cast(weight, torch.bfloat16), local(weight).bfloat16())


def load_in_place(sizes: Sizes) -> None:
    """A checkpoint that is read into what `state_dict` gave."""
    model = build(sizes)
    weight = model.up.weight
    write(weight)
    saved = {"model": model.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(saved, checkpoint_id=folder, no_dist=True)
        weight.detach().zero_()
        write(weight)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    assert weight.to_local().any()
    assert torch.equal(cast(weight, torch.bfloat16), weight.to_local().bfloat16())


def evaluate_with_others(sizes: Sizes) -> None:
    """Weights that are put in for an evaluation and taken out as no version tells of."""
    model = build(sizes)
    weights = [model.up.weight, model.down.weight]
    for weight in weights:
        write(weight)
    x = torch.ones(2, 8)
    before = model(x)
    saved = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.zero_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x), model.down.bias.to_local().bfloat16().expand(2, 8))
    for weight, value in zip(weights, saved, strict=True):
        weight.data.copy_(value)
    assert torch.equal(model(x), before)


def change_after_the_copy(sizes: Sizes) -> None:
    """In a graph whose replays no version tells of."""
    weight = made(sizes)
    with captured(), capturing_weights() as found:
        kept = cast(weight, torch.bfloat16)
        write(weight)
        weight.detach().clamp_(-0.1, 0.1)
    for _ in range(2):
        found.refresh()
        assert torch.equal(kept, local(weight).bfloat16())
        with torch.no_grad():
            local(weight).data.mul_(-0.5)
        found.note_replay()
        assert torch.equal(cast(weight, torch.bfloat16), local(weight).bfloat16())


def fail_to_capture(sizes: Sizes) -> None:
    """Return what was to be written never is."""
    weight = build(sizes).up.weight

    def step() -> None:
        cast(weight, torch.bfloat16)
        weight.low_precision_weight.open(weight).fill_(7)
        weight.low_precision_weight.close(weight)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), captured(), capturing_weights():
        step()
    assert torch.equal(cast(weight, torch.bfloat16), local(weight).bfloat16())


def follow_nothing(sizes: Sizes) -> None:
    """A graph that may be replayed at any time writes no copy, and one that was written before is not used again."""
    weight, other = made(sizes), made(sizes)
    with captured(), capturing_weights() as found:
        kept = cast(weight, torch.bfloat16)
    with captured():
        assert weight.low_precision_weight.open(weight) is None
    assert weight.low_precision_weight.open(weight) is None
    found.refresh()
    with torch.no_grad():
        local(weight).data.zero_()
    found.refresh()
    assert kept.eq(0).all()
    other.grad = torch.ones_like(other)
    with captured():
        torch.optim.SGD([other]).step()
    assert other.low_precision_weight.open(other) is None
    with torch.no_grad():
        local(other).data.zero_()  # a replay
    assert cast(other, torch.bfloat16).eq(0).all()


def replay_before_backward(sizes: Sizes) -> None:
    """A plain pass keeps a copy that a graph then writes: the backward pass must not multiply with it."""
    model = build(sizes)
    with captured(), capturing_weights() as found:
        for weight in (model.up.weight, model.down.weight):
            write(weight)
    loss = model(torch.ones(2, 8)).float().sum()
    found.note_replay()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def convert(sizes: Sizes) -> None:
    """A conversion puts other tensors in the parameters' place, and copies go on, in a graph's memory too."""
    model = build(sizes)
    write(model.up.weight)
    with captured(), capturing_weights() as found:
        kept = cast(model.up.weight, torch.bfloat16)
    model.to("cpu")
    model.double().float()
    weight = model.up.weight
    with torch.no_grad():
        weight.fill_(3)
    assert cast(weight, torch.bfloat16).eq(3).all()
    found.refresh()
    assert kept.eq(3).all()
    write(weight)
    assert cast(weight, torch.bfloat16) is kept


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 1)])
@pytest.mark.parametrize("check", [take_and_change, refresh, step_by_torch])
def test_a_copy_is_the_parameters_as_it_is(ranks, sizes, check):
    ranks(sizes[1]).run(check, sizes)


@pytest.mark.parametrize("check", [evaluate_with_others, load_in_place])
def test_weights_that_are_changed_behind_versions_are_found(ranks, check):
    ranks(1).run(check, (1, 1, 1, 1))


@pytest.mark.parametrize(
    "check", [change_after_the_copy, fail_to_capture, follow_nothing, replay_before_backward, convert]
)
def test_a_graph_and_its_copies_stay_together(ranks, check):
    ranks(1).run(check, (1, 1, 1, 1))


def train(sizes: Sizes, writes: bool, keeps: bool) -> tuple[list[float], int, str]:
    """(losses of some steps, how many weights have copies, the error of a backward pass across a step)."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    roles = {"up": "colwise", "down": "rowwise"}
    policy: ReshardPolicy = "after_backward" if keeps else "after_forward"
    model = parallelize(Block(), grid, dtype=torch.bfloat16, roles=roles, reshard=policy)
    weights = [weight for weight in model.parameters() if weight.low_precision_weight is not None]
    x, losses = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), []
    x = x.chunk(grid.size("y"), -1)[grid.coordinate("y")]
    for step in range(3):
        loss = model(x).float().square().mean()
        model.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(weight.grad)
                if writes and weight in set(weights):
                    write(weight)
                elif weight in set(weights):
                    weight.mul_(0.9)
        if step == 1:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    loss, message = model(x).float().square().mean(), ""
    if writes and weights:
        for weight in weights:
            write(weight)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        message = str(caught.value)
    return losses, len(weights), message


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)])
def test_training_has_the_same_bits_with_and_without(ranks, sizes):
    count = sizes[1] * sizes[2]
    plain = ranks(count).run(train, sizes, writes=False, keeps=True)
    written = ranks(count).run(train, sizes, writes=True, keeps=True)
    for (losses, number, message), (expected, *_) in zip(written, plain, strict=True):
        assert losses == expected
        assert number == 2
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize(("sizes", "keeps"), [((1, 1, 1, 2), True), ((1, 2, 1, 1), False)])
def test_weights_that_are_gathered_or_freed_have_none(ranks, sizes, keeps):
    assert all(number == 0 for _, number, _ in ranks(2).run(train, sizes, writes=True, keeps=keeps))
