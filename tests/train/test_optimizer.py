# SPDX-License-Identifier: Apache-2.0
"""The optimizer over this rank's shards."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.train import runs
from torch import nn

from stretto.execution import StateOptions
from stretto.optim import adamw, adamw_kernel
from stretto.parallel import Grid, parallelize
from stretto.parallel.low_precision_weights import cast
from stretto.train.checkpoint import checkpoint_path, load_checkpoint
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.storage import read_tensor
from stretto.train.optimizer import ShardOptimizer, local_shard
from stretto.train.stored_optimizer import StoredOptimizer, sgd_update


def steps_after(convert: str) -> tuple[bool, str]:
    """True if a step changes the weight of a model that was converted after its optimizer was made, or the error."""
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(4, 4)), Grid(x=2), roles={"0": "colwise"})
    optimizer = ShardOptimizer(model, lambda groups: torch.optim.SGD(groups, lr=0.1), weight_decay=0.0)
    match convert:
        case "to the same":
            model.to("cpu", torch.float32)
        case "there and back":
            model.double().float()
    model(torch.ones(1, 4)).sum().backward()
    before = model[0].weight.to_local().clone()
    try:
        optimizer.step(0.1)
    except ValueError as error:
        return False, str(error)
    return not torch.equal(model[0].weight.to_local(), before), ""


def test_a_model_that_was_converted_after_its_optimizer_was_made_is_not_left_as_it_was(ranks):
    assert ranks(2).run(steps_after, "to the same") == [(True, "")] * 2
    for changed, message in ranks(2).run(steps_after, "there and back"):
        assert not changed
        assert "0.weight was converted or moved" in message


def update(updates, corrections, scale, failed, options):
    """In place of AdamW's kernels: a step down the gradient, and the copy."""
    for each in updates:
        each.parameter.sub_(each.gradient)
        if each.copy is not None:
            each.copy.copy_(each.parameter)


def forward_after_steps() -> None:
    """The next forward pass takes the weights that the optimizer has written beside its shards."""
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(4, 4)), Grid(x=2), dtype=torch.bfloat16, roles={"0": "colwise"})
    weight = model[0].weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "_suits_kernel", lambda tensor: True)
        patch.setattr(adamw_kernel, "launch", update)
        optimizer = ShardOptimizer(model, lambda groups: adamw.AdamW(groups, writes_copies=True), weight_decay=0.0)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            before = weight.to_local().clone()
            optimizer.step(0.1)
            copy = cast(weight, torch.bfloat16)
            assert copy is cast(weight, torch.bfloat16)  # kept, and not cast anew
            assert torch.equal(copy, weight.to_local().bfloat16())
            assert not torch.equal(copy, before.bfloat16())
    with torch.no_grad():
        weight.to_local().add_(1)
    assert torch.equal(cast(weight, torch.bfloat16), weight.to_local().bfloat16())


def test_an_optimizer_of_shards_writes_the_copies_of_their_weights(ranks):
    ranks(2).run(forward_after_steps)


def errors_of_changed_models(sizes: dict[str, int], has_roles: bool) -> None:
    """Parameters that are put in after `parallelize`, before or after an optimizer is made, and one that is thawed."""

    def build() -> tuple[nn.Module, Grid]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        grid = Grid(**sizes)
        return parallelize(model, grid, **({"roles": {"0": "colwise", "2": "rowwise"}} if has_roles else {})), grid

    def make(kind: str, model: nn.Module, grid: Grid) -> Callable[[], object]:
        if kind == "shards":
            shards = ShardOptimizer(model, lambda groups: torch.optim.SGD(groups, lr=0.1), weight_decay=0.0)
            return lambda: shards.step(0.1)
        options = StateOptions("host", step_on="device")
        stored = StoredOptimizer(model, grid, sgd_update(), name="sgd", dtype=torch.float32, options=options)
        return lambda: stored.step(0.1)

    def step(model: nn.Module, update: Callable[[], object]) -> None:
        model(torch.ones(2, 8)).sum().backward()
        update()

    changes: dict[str, Callable[[nn.Module], object]] = {
        "1.scale": lambda model: model[1].register_parameter("scale", nn.Parameter(torch.ones(8))),
        "0.weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 8))),
        "2.weight": lambda model: model.__setitem__(2, nn.Linear(8, 8)),
        "3.weight": lambda model: model.append(nn.Linear(8, 8)),
    }
    with pytest.raises(ValueError, match=r"call peft\.get_peft_model first, then parallelize"):
        get_peft_model(build()[0], LoraConfig(target_modules=["0"], r=2))
    for kind, (name, change) in product(("shards", "stored"), changes.items()):
        model, grid = build()
        change(model)
        with pytest.raises(ValueError, match=f"{name} was added or replaced after stretto.parallelize"):
            make(kind, model, grid)
        model, grid = build()
        update = make(kind, model, grid)
        step(model, update)
        change(model)
        with pytest.raises(ValueError, match=f"{name} was added or replaced after stretto.parallelize"):
            step(model, update)
    model, grid = build()
    model[0].weight.requires_grad_(False)
    update = make("stored", model, grid)
    step(model, update)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight has a gradient, but was frozen when its optimizer was made"):
        step(model, update)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"z": 2}, pytest.param({"data": 2}, marks=pytest.mark.exhaustive)], ids=str)
def test_optimizers_name_parameters_that_they_cannot_update(ranks, sizes):
    ranks(2).run(errors_of_changed_models, sizes, True)
    ranks(2).run(errors_of_changed_models, sizes, False)


def test_parameters_that_were_deleted_leave_a_model_that_can_be_converted(ranks):
    ranks(2).run(convert_without_bias)


def convert_without_bias() -> None:
    model = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Grid(z=2))
    model[0].bias = None
    del model[1].bias
    model.double()
    assert [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64] == [
        "0.weight",
        "1.weight",
    ]


def average_by_hand() -> None:
    """Averages begin with the weights before the first step; a step that is skipped moves none."""
    torch.manual_seed(0)
    model, decay = parallelize(nn.Sequential(nn.Linear(4, 4)), Grid(z=2), roles={"0": "colwise"}), 0.75
    optimizer = ShardOptimizer(model, torch.optim.SGD, weight_decay=0.0, average=decay)
    shard = local_shard(model[0].weight)
    expected = shard.clone()
    for skips in (False, True, False):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step(0.1, skip=torch.tensor(skips))
        if not skips:
            expected += (1 - decay) * (shard - expected)
        torch.testing.assert_close(optimizer.state("0.weight")["average"], expected, rtol=1e-6, atol=0)
    weight, output = shard.clone(), model(torch.ones(2, 4))
    with optimizer.averaged():
        assert not torch.equal(shard, optimizer.state("0.weight")["average"])  # they have changed places
        torch.testing.assert_close(shard, expected, rtol=1e-6, atol=0)
        assert not torch.allclose(model(torch.ones(2, 4)), output)
    assert torch.equal(shard, weight)
    assert torch.equal(model(torch.ones(2, 4)), output)


def test_averages_follow_the_weights_and_take_their_place(ranks):
    ranks(2).run(average_by_hand)


def average_integers(grid: dict[str, int], folder: Path, begin: int, end: int, resumed: str | None = None) -> None:
    """Train a model of integers from step `begin` to `end`, and save it: sums over ranks are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).double()
    for parameter in model.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape, generator=generator).double()
    on_grid = Grid(**grid, device="cpu")
    model = parallelize(model, on_grid, roles={"0": "colwise", "1": "rowwise"})
    make = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    optimizer = ShardOptimizer(model, make, weight_decay=0.0, average=0.9)
    if resumed is not None:
        load_checkpoint(checkpoint_path(folder / resumed, begin), model, optimizer)
    parts = on_grid.size("batch")
    for step in range(begin, end):
        rows = torch.randint(-2, 3, (8, 8), generator=generator.manual_seed(step)).double()
        own = rows.chunk(parts)[on_grid.coordinate("batch")].chunk(on_grid.size("y"), 1)[on_grid.coordinate("y")]
        (model(own).sum() * parts).backward()  # ranks' gradients are averaged
        optimizer.step(2.0**-4)
    runs.save(model, optimizer, folder / f"{grid}-{resumed}", end)


def test_averages_go_on_in_bits_on_another_grid(ranks, tmp_path):
    """Weights, momenta and averages of elementwise steps have the same bits on all grids, if gradients have."""
    grids = [{"z": 4}, {"x": 2, "z": 2}, {"data": 2, "y": 2}]
    ranks(1).run(average_integers, {}, tmp_path, 0, 5)
    expected = bits_of(checkpoint_path(tmp_path / "{}-None", 5))
    assert sum(name.endswith(".average") for name in expected) == 4
    for first, then in zip(grids, grids[1:] + grids[:1], strict=True):
        ranks(4).run(average_integers, first, tmp_path, 0, 3)
        ranks(4).run(average_integers, then, tmp_path, 3, 5, f"{first}-None")
        found = bits_of(checkpoint_path(tmp_path / f"{then}-{first}-None", 5))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), (first, then)


def bits_of(path):
    return {name: read_tensor(path, entry) for name, entry in read_metadata(path).tensors.items()}
