"""The optimizer over this rank's shards."""

import torch
from torch import nn

from stretto.parallel import Grid, parallelize
from stretto.train.optimizer import ShardOptimizer


def steps_after(convert: str) -> tuple[bool, str]:
    """Whether a step changes the weight of a model that was converted after its optimizer was made, or the error."""
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Linear(4, 4)), Grid(x=2), roles={"0": "normal"})
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
