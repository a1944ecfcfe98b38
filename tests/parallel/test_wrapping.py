# SPDX-License-Identifier: Apache-2.0
"""torch's data parallelism around a parallelized model, or within it, is refused by name."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stretto.parallel import Grid, parallelize
from tests.conftest import Ranks
from tests.parallel.hugging_face import llama

MakeRanks = Callable[[int], Ranks]


def wrap(sizes: dict[str, int], by_blocks: bool) -> list[str]:
    """Return what each wrapper says; empty where it says nothing."""
    model = parallelize(llama(tied=True), Grid(**sizes), blocks=["model.layers.*"] if by_blocks else None)
    part = model.get_submodule("model.layers.0")
    tokens, messages = torch.zeros(2, 4, dtype=torch.long), []
    for wrapper in (DistributedDataParallel, replicate, fully_shard):
        outer = [] if wrapper is fully_shard else [nn.Sequential(model)]  # as a LightningModule holds its model
        for module in (model, part, *outer):
            try:
                wrapper(module)(tokens)  # replicate may wait for the first forward pass
            except ValueError as error:
                messages.append(str(error))
            else:
                messages.append("")
    with pytest.raises(ValueError, match=r"LoraModel adapts a model .*: call peft.get_peft_model first, then parallel"):
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert type(DistributedDataParallel(nn.Linear(2, 2))(torch.ones(2))) is torch.Tensor  # other modules as ever
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert set(get_model_state_dict(model)) == set(model.state_dict())  # it looks for wrappers
    return messages


@pytest.mark.parametrize(("sizes", "by_blocks"), [({"z": 2}, False), ({"data": 2}, True)], ids=str)
def test_a_wrapper_around_a_parallelized_model_is_refused(
    sizes: dict[str, int], by_blocks: bool, ranks: MakeRanks
) -> None:
    for messages in ranks(2).run(wrap, sizes, by_blocks):
        for message in messages:
            name, _, rest = message.partition(" around a model that stretto.parallelize has returned")
            assert name in ("DistributedDataParallel", "fully_shard or replicate"), message
            assert "prepare(optimizer, loader)" in rest
