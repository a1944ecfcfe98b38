"""Bad input to Grid and parallelize: a ValueError that gives the value, the rule and what would do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Role, clip_grad_norm_, deferred_reduction, parallelize, validate
from tests.conftest import Ranks


def gpt(**options: object) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**{"layers": 1, "hidden": 24, "heads": 6, "vocab": 61, "max_seq_len": 16, **options}))


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({}, {"x": 4}, r"6 attention heads cannot be split over x=4.*nearest.* is 8"),
        ({"kv_heads": 2}, {"x": 3}, r"2 KV heads cannot be split over x=3.*nearest.* is 3"),
        ({"hidden": 18, "ffn": 16}, {"y": 4}, r"18 hidden size cannot be split over y=4.*nearest.* is 16"),
        ({"ffn": 50}, {"x": 3}, r"mlp\.up: 50 output features cannot be split over x=3.*nearest.* is 51"),
        ({}, {"z": 5}, r"cannot be split over z=5.*nearest"),
        ({"vocab": 5}, {"x": 6}, r"a vocabulary of 5 leaves some of x=6"),
        ({}, {"w": 2}, r"'w' is not an axis of a grid; the axes are data, x, y, z"),
        ({}, {"x": 0}, r"grid\.x is 0, but must be a whole number, at least 1"),
        ({}, {"x": True}, r"grid\.x is True"),
    ],
)
def test_a_model_that_an_axis_does_not_divide_is_refused_without_any_process_group(
    options: dict[str, object], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validate(gpt(**options), sizes)
    assert not torch.distributed.is_initialized()


def test_a_vocabulary_need_not_divide() -> None:
    validate(gpt(vocab=61), {"x": 2, "z": 3})


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.n_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class OwnLinear(nn.Linear):
    pass


BOTH = {"first": "normal", "second": "swapped"}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({}, r"nothing says what these submodules are: first \(Linear\), second \(Linear\)"),
        ({"first": "normal"}, r"submodules are: second \(Linear\)"),
        ({**BOTH, "third": "normal"}, r"no submodule is named 'third'"),
        ({"first": "column", "second": "swapped"}, r"'column' is not a role; did you mean"),
        ({"first": {"role": "normal", "segment": 3}, "second": "swapped"}, r"no option 'segment'.*'segments'"),
        ({"first": {"role": "normal", "segments": 0}, "second": "swapped"}, r"segments is 0"),
        ({"first": "embedding", "second": "swapped"}, r"first is a Linear.*takes exactly Embedding"),
        ({"first": "norm", "second": "swapped"}, r"first \(Linear\) is not a LayerNorm or RMSNorm"),
    ],
)
def test_roles_are_never_guessed(roles: dict[str, Role], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(OwnModel(), {"x": 2}, roles=roles)


def test_a_subclass_of_linear_is_refused_because_it_may_compute_something_else() -> None:
    model = OwnModel()
    model.first = OwnLinear(8, 8)
    with pytest.raises(ValueError, match="first is a OwnLinear"):
        validate(model, {"x": 2}, roles=BOTH)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"n_head": "x"}, "no submodule has the attribute 'n_head'"),
        ({"n_heads": "w"}, "'w' is not an axis"),
        ({"training": "x"}, "only whole numbers"),
    ],
)
def test_local_attributes_must_be_there_and_count_something(attributes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(OwnModel(), {"x": 2}, roles=BOTH, local_attributes=attributes)


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


def on_two_ranks() -> dict[str, str]:
    rank = torch.distributed.get_rank()
    messages = {"grid": message_of(lambda: Grid(x=3))}
    grid = Grid(x=2)
    torch.manual_seed(rank)
    messages["weights"] = message_of(lambda: parallelize(GPT(gpt().config), grid))
    model = OwnModel()
    before = [type(module) for module in model.modules()]
    messages["refused"] = message_of(lambda: parallelize(model, grid, roles={"first": "normal"}))
    messages["untouched"] = str(before == [type(module) for module in model.modules()])
    torch.manual_seed(0)
    sharded = parallelize(gpt(), grid)
    messages["token"] = message_of(lambda: sharded(torch.full((1, 4), 61)))
    messages["target"] = message_of(lambda: sharded(torch.zeros(1, 4).long(), torch.full((1, 4), -1)))
    messages["plain"] = message_of(lambda: clip_grad_norm_([nn.Parameter(torch.ones(1))], 0.0, grid))
    messages["deferred"] = message_of(lambda: deferred_reduction(nn.Linear(1, 1)).__enter__())
    return messages


def test_collective_entry_points_refuse_bad_input_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    for messages in ranks(2).run(on_two_ranks):
        assert "has 3 ranks, but the job has 2" in messages["grid"]
        assert "ranks hold different values of embedding.weight" in messages["weights"]
        assert "second (Linear)" in messages["refused"]
        assert messages["untouched"] == "True"
        assert messages["token"] == "token id 61 is outside [0, 61)"
        assert messages["target"] == "target -1 is outside [0, 61)"
        assert "max_norm is 0.0, but must be positive" in messages["plain"]
        assert "stretto.parallelize" in messages["deferred"]
