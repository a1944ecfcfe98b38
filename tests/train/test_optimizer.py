# SPDX-License-Identifier: Apache-2.0
"""The optimizer over this rank's shards."""

import pytest
import torch
from torch import nn

from stretto.optim import adamw, adamw_kernel
from stretto.parallel import Grid, parallelize
from stretto.parallel.low_precision_weights import cast
from stretto.train.optimizer import ShardOptimizer


def steps_after(convert: str) -> tuple[bool, str]:
    """Whether a step changes the weight of a model that was converted after its optimizer was made, or the error."""
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


def update(parameter, gradient, first, second, corrections, scale, failed, copy, options):
    """In place of AdamW's kernel: a step down the gradient, and the copy."""
    parameter.sub_(gradient)
    if copy is not None:
        copy.copy_(parameter)


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
