"""Weights that an optimizer writes in the dtype that is computed in: found as they are, and never when they are old."""

import copy
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from stretto.parallel import Grid, parallelize
from stretto.parallel.compute_copies import cast, refresh_copies
from stretto.parallel.layout import local
from tests.parallel.training import Sizes


def write(parameter: Tensor) -> None:
    """As an optimizer does, in one pass: the parameter, and its copy."""
    with torch.no_grad():
        parameter.mul_(0.9)
        parameter.stretto_copy.open(parameter).copy_(local(parameter))
        parameter.stretto_copy.close(parameter)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def made(sizes: Sizes) -> nn.Parameter:
    """A weight [16, 8] of a model on a grid, whose copy is written."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    roles = {"up": "normal", "down": "swapped"}
    weight = parallelize(Block(), grid, dtype=torch.bfloat16, roles=roles).up.weight
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
    """What a graph has taken is brought up to date where it lies."""
    weight = made(sizes)
    kept = cast(weight, torch.bfloat16)
    refresh_copies([(ref(weight), weight.stretto_copy)])
    assert kept is cast(weight, torch.bfloat16)
    weight.detach().fill_(2)
    refresh_copies([(ref(weight), weight.stretto_copy)])
    assert kept.eq(2).all()
    assert kept is cast(weight, torch.bfloat16)
    other = copy.deepcopy(weight.stretto_copy)
    assert other.open(weight) is not kept


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 1)])
@pytest.mark.parametrize("check", [take_and_change, refresh])
def test_a_copy_is_the_parameters_as_it_is(ranks, sizes, check):
    ranks(sizes[1]).run(check, sizes)


def train(sizes: Sizes, writes: bool, keeps: bool) -> tuple[list[float], int, str]:
    """(losses of some steps, how many weights have copies, what a backward pass across a step is told)."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    roles = {"up": "normal", "down": "swapped"}
    model = parallelize(Block(), grid, dtype=torch.bfloat16, roles=roles, keep_gathered=keeps)
    weights = [weight for weight in model.parameters() if hasattr(weight, "stretto_copy")]
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
    loss, said = model(x).float().square().mean(), ""
    if writes and weights:
        for weight in weights:
            write(weight)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        said = str(caught.value)
    return losses, len(weights), said


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)])
def test_training_has_the_same_bits_with_and_without(ranks, sizes):
    count = sizes[1] * sizes[2]
    plain = ranks(count).run(train, sizes, writes=False, keeps=True)
    written = ranks(count).run(train, sizes, writes=True, keeps=True)
    for (losses, number, said), (expected, *_) in zip(written, plain, strict=True):
        assert losses == expected
        assert number == 2
        assert "modified by an inplace operation" in said


@pytest.mark.parametrize(("sizes", "keeps"), [((1, 1, 1, 2), True), ((1, 2, 1, 1), False)])
def test_weights_that_are_gathered_or_freed_have_none(ranks, sizes, keeps):
    assert all(number == 0 for _, number, _ in ranks(2).run(train, sizes, writes=True, keeps=keeps))
