# SPDX-License-Identifier: Apache-2.0
"""`full_parameters`: what is edited inside is kept, on all grids and for all layouts of parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize


def gpt() -> nn.Module:
    """Fused heads, a vocabulary that x pads, tied to the head, and experts."""
    torch.manual_seed(0)
    config = GPTConfig(layers=2, hidden=8, heads=2, vocab=13, max_seq_len=8, num_experts=4, experts_per_token=2)
    return GPT(config)


def tied_blocks() -> nn.Module:
    """Blocks of which two share a weight, a scalar, and an LSTM, which reads its weights from a list."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.LSTM(5, 3))
    model[1].weight = model[0].weight
    model.scale = nn.Parameter(torch.tensor(2.0))
    return model


def edit(module: nn.Module) -> None:
    """Edits that only whole, plain tensors allow."""
    torch.manual_seed(1)
    for name, parameter in sorted(module.named_parameters()):
        assert type(parameter) is nn.Parameter, name
        if parameter.dim() > 1:
            parameter[-1].zero_()
            parameter.flatten()[1::3] += torch.rand(parameter.numel())[1::3]
            parameter.data[0] = parameter.data[0].flip(0)
        else:
            parameter.data = torch.rand(parameter.shape)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: gather(p).detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def differing(model: nn.Module, right: nn.Module) -> list[str]:
    found, expected = weights(model), weights(right)
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def edit_on_a_grid(sizes: dict[str, int], make: Callable[[], nn.Module]) -> list[str]:
    grid, rank, wrong = Grid(**sizes), dist.get_rank(), []

    def by_parts(model: nn.Module) -> None:
        for part in (*model.children(), model):
            with stretto.full_parameters(part):
                if part is not model:
                    edit(part)

    def by_last_rank(model: nn.Module) -> None:
        with stretto.full_parameters(model):
            if rank == dist.get_world_size() - 1:
                edit(model)

    def replaced(model: nn.Module) -> None:
        with stretto.full_parameters(model):
            new: dict[int, nn.Parameter] = {}  # tied ones stay tied
            for module in model.modules():
                for key, parameter in list(module.named_parameters(recurse=False)):
                    ones = nn.Parameter(torch.ones(parameter.shape), requires_grad=False)
                    setattr(module, key, new.setdefault(id(parameter), ones))

    def whole(model: nn.Module) -> None:
        with stretto.full_parameters(model):
            edit(model)

    for change in (whole, by_last_rank, by_parts):
        model, right = parallelize(make(), grid), make()
        with torch.no_grad():
            edit(right) if change is not by_parts else [edit(part) for part in right.children()]
        change(model)
        wrong += [f"{change.__name__}: {name}" for name in differing(model, right)]
    if make is gpt:
        replaced(model)
        wrong += [name for name, value in weights(model).items() if not (value == 1).all()]
        wrong += [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return wrong


@pytest.mark.parametrize(
    ("count", "sizes", "make"),
    [
        (2, {"z": 2}, tied_blocks),
        pytest.param(4, {"data": 2, "z": 2}, tied_blocks, marks=pytest.mark.exhaustive),
        pytest.param(4, {"x": 2, "y": 2}, gpt, marks=pytest.mark.long),
        pytest.param(4, {"data": 2, "z": 2, "expert": 4}, gpt, marks=pytest.mark.exhaustive),
        (1, {}, gpt),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_what_is_edited_inside_is_kept_on_every_rank(ranks, count, sizes, make):
    assert ranks(count).run(edit_on_a_grid, sizes, make) == [[]] * count


def message_of(function: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, RuntimeError, KeyError)) as error:
        function()
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def refuse(sizes: dict[str, int]) -> dict[str, str]:
    model, rank = parallelize(tied_blocks(), Grid(**sizes)), dist.get_rank()
    before = weights(model)

    def inside(change: Callable[[], Any]) -> str:
        def run() -> None:
            with stretto.full_parameters(model):
                change()

        return message_of(run)

    messages = {
        "differs": inside(lambda: [p.fill_(rank) for p in (model[0].bias, model.scale)]),
        "removed": inside(lambda: setattr(model[0], "bias", None)),
        "another shape": inside(lambda: setattr(model[0], "bias", nn.Parameter(torch.ones(3)))),
        "untied": inside(lambda: setattr(model[1], "weight", nn.Parameter(torch.ones(5, 5)))),
        "run": inside(lambda: model[0](torch.ones(1, 5))),
        "error": inside(lambda: {}[model[0].weight.zero_()]),
        "plain": message_of(lambda: stretto.full_parameters(nn.Linear(2, 2)).__enter__()),
    }
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert type(model[0].weight).__name__ == "ShardedParameter"
    return messages


@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}], ids=str)
def test_edits_that_ranks_do_not_share_and_other_shapes_are_refused_and_nothing_is_kept(ranks, sizes):
    for messages in ranks(2).run(refuse, sizes):
        assert (
            "ranks have edited 0.bias, scale differently" in messages["differs"]
            or "scale, 0.bias" in messages["differs"]
        )
        assert "0.bias was removed" in messages["removed"]
        assert "0.bias was replaced by [3] inside of full_parameters" in messages["another shape"]
        assert "0.weight was untied inside of full_parameters: it must stay one tensor [5, 5]" in messages["untied"]
        assert "inside of full_parameters" in messages["run"]
        assert "this Linear is not on a grid" in messages["plain"]


def edit_on_the_last_stage() -> list[float]:
    """Return what both stages have of a tied embedding that the last one has edited, and of their own norms."""
    config = GPTConfig(layers=2, hidden=8, heads=2, vocab=13, max_seq_len=8)
    torch.manual_seed(0)
    model = parallelize(GPT(config), Grid(pipe=2))
    with stretto.full_parameters(model):
        for name, parameter in model.named_parameters():
            if "embedding" not in name or dist.get_rank() == 1:
                parameter[-1].fill_(7)
    assert "takes the whole model" in message_of(lambda: full(model.embedding))
    with stretto.full_parameters(model):
        tied = next(p for p in model.parameters() if p.shape == (13, 8))
        return [tied[-1].mean().item(), tied[0].mean().item(), *(p[-1].mean().item() for p in model.parameters())]


def full(module: nn.Module) -> None:
    with stretto.full_parameters(module):
        pass


def test_stages_that_share_an_embedding_share_its_edits(ranks):
    first, last = ranks(2).run(edit_on_the_last_stage)
    assert first[:2] == last[:2]
    assert {*first[2:], *last[2:]} == {7.0}
