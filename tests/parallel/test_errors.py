# SPDX-License-Identifier: Apache-2.0
"""Bad input to Grid and parallelize: a ValueError that gives the value, the rule and what would do."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stretto.huggingface.formulas import UnknownRolesError
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Role, clip_grad_norm_, gather, no_sync, parallelize, validate
from tests.conftest import Ranks


def gpt(**options: object) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**{"layers": 1, "hidden": 24, "heads": 6, "vocab": 61, "max_seq_len": 16, **options}))


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({}, {"x": 4}, r"6 attention heads cannot be split over x=4.*nearest.* is 8"),
        ({"kv_heads": 2}, {"x": 3}, r"2 KV heads cannot be split over x=3.*nearest.* is 3, or choose x=2 or x=4"),
        ({"hidden": 18, "ffn": 16}, {"y": 4}, r"18 hidden size cannot be split over y=4.*nearest.* is 16"),
        ({"ffn": 50}, {"x": 3}, r"mlp\.up: 50 output features cannot be split over x=3.*nearest.* is 51"),
        ({}, {"z": 5}, r"cannot be split over z=5.*nearest"),
        ({"vocab": 5}, {"x": 6}, r"a vocabulary of 5 leaves some of x=6"),
        ({}, {"w": 2}, r"'w' is not an axis of a grid; the axes are pipe, data, context, x, y, z"),
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


def test_a_norm_of_an_unknown_formula_is_said_before_sizes_that_do_not_divide() -> None:
    """Only then is a model that declares no roles sharded by blocks, which take any size."""
    model = gpt()
    model.blocks[0].attention_norm = SquaringNorm(24)
    with pytest.raises(UnknownRolesError, match=r"attention_norm \(SquaringNorm\).*its formula, tried.*is another"):
        validate(model, {"x": 4})


class SquaringNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def test_a_model_without_parameters_is_parallelized_once(ranks: Ranks) -> None:
    assert all("this Sequential is on a grid already" in text for text in ranks(2).run(parallelize_twice))


def parallelize_twice() -> str:
    model = parallelize(nn.Sequential(nn.ReLU()), Grid(z=2))
    with pytest.raises(ValueError) as caught:
        parallelize(model, Grid(z=2))
    return str(caught.value)


def test_units_without_a_name_are_counted_as_units() -> None:
    model = OwnModel()
    model.n_heads = 0
    with pytest.raises(ValueError, match=r"first: 2 units of 4 output features cannot be split over x=4"):
        validate(model, {"x": 4}, roles={"first": Role("colwise", unit=4), "second": "rowwise"})


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


BOTH = {"first": "colwise", "second": "rowwise"}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({}, r"these submodules have no role: first \(Linear\), second \(Linear\)"),
        ({"first": "colwise"}, r"submodules have no role: second \(Linear\)"),
        ({**BOTH, "third": "colwise"}, r"no submodule is named 'third'"),
        ({"first": "column", "second": "rowwise"}, r"'column' is not a role: the roles are colwise, rowwise"),
        ({"first": "colwise", "second": "rowise"}, r"'rowise' is not a role; did you mean 'rowwise'\?"),
        ({"first": {"role": "colwise", "segment": 3}, "second": "rowwise"}, r"no option 'segment'.*'segments'"),
        ({"first": {"role": "colwise", "segments": 0}, "second": "rowwise"}, r"segments is 0"),
        ({"first": {"role": ["colwise"]}, "second": "rowwise"}, r"role is \['colwise'\], but must be text"),
        ({"first": {"role": "colwise", "unit_name": 3}, "second": "rowwise"}, r"unit_name is 3"),
        ({0: "colwise", "second": "rowwise"}, r"roles is \{0: 'colwise'.*mapping from patterns of names"),
        (["first", "second"], r"roles is \['first', 'second'\], but must be a mapping"),
        ({"first": "embedding", "second": "rowwise"}, r"first is a Linear.*takes exactly Embedding"),
        ({"first": "norm", "second": "rowwise"}, r"first \(Linear\) is not a LayerNorm or RMSNorm"),
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
        ({"n_heads": ["x"]}, r"\['x'\] is not an axis"),
        ({1: "x"}, r"local_attributes is \{1: 'x'\}"),
        ({"training": "x"}, "only whole numbers"),
    ],
)
def test_local_attributes_must_be_there_and_count_something(attributes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(OwnModel(), {"x": 2}, roles=BOTH, local_attributes=attributes)


def tied(model: OwnModel) -> None:
    model.second.weight = model.first.weight


def shared(model: OwnModel) -> None:
    model.second = model.first


def hooked(model: OwnModel) -> None:
    model.first.weight.register_hook(lambda gradient: None)


def dropping(model: OwnModel) -> None:
    model.residual_dropout = 0.1


def dropping_channels(model: OwnModel) -> None:
    model.drop = nn.Dropout1d(0.1)


def reparametrized(model: OwnModel) -> None:
    model.first.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tied, r"first\.weight and second\.weight are one parameter, but.* in different ways"),
        (shared, r"first and second are one module, but their roles are 'colwise' and 'rowwise'"),
        (hooked, r"first\.weight has a hook"),
        (dropping, r"OwnModel\.residual_dropout is 0\.1: .*Set it to 0\.0"),
        (dropping_channels, r"these submodules have no role: drop \(Dropout1d\)"),
        (reparametrized, r"first \(Linear\) has the parameters bias, scale, weight"),
    ],
)
def test_silently_wrong_cases_raise(change: Callable[[OwnModel], None], message: str) -> None:
    model = OwnModel()
    change(model)
    with pytest.raises(ValueError, match=message):
        validate(model, {"x": 2, "y": 2}, roles=BOTH)


def test_a_weight_tied_between_a_normal_and_a_swapped_linear_is_fine_where_neither_is_cut() -> None:
    model = OwnModel()
    tied(model)
    validate(model, {"data": 2, "z": 2}, roles=BOTH)


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
    for odd in ("nan", "inf"):
        torch.manual_seed(0)
        model = GPT(gpt().config)
        if rank == 1:
            model.embedding.weight.data[3, 1] = float(odd)
        messages[odd] = message_of(lambda model=model: parallelize(model, grid))
    messages["dtype"] = message_of(lambda: parallelize(gpt(), grid, dtype=torch.float8_e4m3fn))
    messages["reduce_dtype"] = message_of(lambda: parallelize(gpt(), grid, reduce_dtype="fp32"))
    model = OwnModel()
    before = [type(module) for module in model.modules()]
    messages["refused"] = message_of(lambda: parallelize(model, grid, roles={"first": "colwise"}))
    messages["untouched"] = str(before == [type(module) for module in model.modules()])
    torch.manual_seed(0)
    sharded = parallelize(gpt(), grid)
    messages["token"] = message_of(lambda: sharded(torch.full((1, 4), 61)))
    messages["target"] = message_of(lambda: sharded(torch.zeros(1, 4).long(), torch.full((1, 4), -1)))
    messages["plain"] = message_of(lambda: clip_grad_norm_([nn.Parameter(torch.ones(1))], 0.0, grid))
    messages["deferred"] = message_of(lambda: no_sync(nn.Linear(1, 1)).__enter__())
    return messages


def chain(first: nn.Module, second: nn.Module, grid: Grid, *roles: str) -> nn.Module:
    torch.manual_seed(0)
    return parallelize(nn.Sequential(first, second), grid, roles=dict(zip("01", roles, strict=True)))


def on_four_ranks() -> dict[str, str]:
    grid = Grid(x=2, y=2)
    x = torch.ones(3, 4)  # this rank's half of 8 features
    linears = chain(nn.Linear(8, 8), nn.Linear(8, 8), grid, "colwise", "colwise")
    norm = chain(nn.Linear(8, 8), nn.LayerNorm(8), grid, "colwise", "norm")
    dropout = chain(nn.Linear(8, 8), nn.Dropout(0.1), grid, "rowwise", "inner_dropout")
    right = chain(nn.Linear(8, 8), nn.Linear(8, 8), grid, "colwise", "rowwise")
    without_bias = chain(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), grid, "colwise", "rowwise")
    with pytest.raises(RuntimeError, match="same dtype"):  # torch's own error
        without_bias(x.bfloat16())
    messages = {
        "linears": message_of(lambda: linears(x)),
        "norm": message_of(lambda: norm(x)),
        "dropout": message_of(lambda: dropout(x)),
        "right": message_of(lambda: right(x)),
        "copy": message_of(lambda: copy.deepcopy(right)),
        "pickle": message_of(lambda: pickle.dumps(right)),
        "assign": message_of(lambda: right.load_state_dict(right.state_dict(), assign=True)),
        "load": message_of(lambda: right.load_state_dict(right.state_dict())),
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        messages["autocast around fp32"] = message_of(lambda: right(x).sum().backward())
        told = parallelize(OwnModel(), grid, roles=BOTH, dtype=torch.float32)
        messages["autocast"] = message_of(lambda: told(x))
        in_bf16 = parallelize(OwnModel(), grid, roles=BOTH, dtype=torch.bfloat16)
        messages["autocast to its own dtype"] = message_of(lambda: in_bf16(x).sum().backward())
    right[0].bias = nn.Parameter(right[0].bias.detach() + 1)
    messages["replaced"] = message_of(lambda: right(x))
    messages["replaced, in part of the model"] = message_of(lambda: right[0](x))
    return messages


def test_invalid_operations_after_parallelize_raise_where_they_happen(ranks: Callable[[int], Ranks]) -> None:
    for messages in ranks(4).run(on_four_ranks):
        assert "1 takes features that are split over y, but its input's are split over x" in messages["linears"]
        assert "1 takes features that are split over y" in messages["norm"]
        assert "1 takes features that are split over x" in messages["dropout"]
        assert "neither copied nor pickled" in messages["copy"]
        assert "neither copied nor pickled" in messages["pickle"]
        assert "leave assign out" in messages["assign"]
        assert "parallelize(..., dtype=torch.bfloat16)" in messages["autocast"]
        assert "0.bias was added or replaced after stretto.parallelize" in messages["replaced"]
        assert "a parameter was replaced after stretto.parallelize" in messages["replaced, in part of the model"]
        for name in ("right", "load", "autocast to its own dtype", "autocast around fp32"):
            assert messages[name] == "no error"


def refused_grid() -> str:
    return message_of(lambda: Grid(x=2, z=2))


def failed_halfway() -> tuple[bool, int]:
    """True if a model that fails while it is built, on its last module, is as it was."""
    with torch.device("meta"):
        model = OwnModel()
    model.second.reset_parameters = lambda: None
    before = list(model.modules())
    message = message_of(lambda: parallelize(model, Grid(), roles=BOTH, local_attributes={"n_heads": "x"}))
    assert "its initialization leaves weight unset" in message
    return list(model.modules()) == before, model.n_heads


def test_a_job_of_one_rank_is_told_how_to_start_as_many_as_its_grid_has(ranks: Callable[[int], Ranks]) -> None:
    (message,) = ranks(1).run(refused_grid)
    assert message.endswith(
        "data=1 x x=2 x y=1 x z=2 has 4 ranks, but the job has 1: they must be equal; torchrun "
        "--nproc-per-node 4 starts that many"
    )


def test_a_failure_leaves_the_model_as_it_was(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(1).run(failed_halfway) == [(True, 4)]


def test_collective_entry_points_refuse_bad_input_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    for messages in ranks(2).run(on_two_ranks):
        assert "has 3 ranks, but the job has 2" in messages["grid"]
        assert "ranks hold different values of embedding.weight" in messages["weights"]
        for odd in ("nan", "inf"):
            assert "ranks hold different values of embedding.weight" in messages[odd]
        assert "dtype is torch.float8_e4m3fn, but must be one of torch.float64" in messages["dtype"]
        assert "reduce_dtype is 'fp32', but must be one of" in messages["reduce_dtype"]
        assert "second (Linear)" in messages["refused"]
        assert messages["untouched"] == "True"
        assert messages["token"] == "token id 61 is outside [0, 61)"
        assert messages["target"] == "target -1 is outside [0, 61)"
        assert "max_norm is 0.0, but must be positive" in messages["plain"]
        assert "stretto.parallelize" in messages["deferred"]


def originals_alive() -> list[bool]:
    model = OwnModel()
    originals = [weakref.ref(parameter) for parameter in model.parameters()]
    model = parallelize(model, Grid(x=2), roles=BOTH)
    gc.collect()
    return [original() is not None for original in originals]


def test_whole_weights_are_freed_once_they_are_sharded(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(originals_alive) == [[False] * 4] * 2


def unzeroed_steps() -> tuple[bool, str]:
    """True if micro-batches add to gradients that are averages, and the error where gradients are sums."""
    model = parallelize(OwnModel(), Grid(data=2), roles=BOTH)
    model(torch.ones(2, 8)).sum().backward()
    once = [gather(parameter.grad).clone() for parameter in model.parameters()]
    with no_sync(model):
        model(torch.ones(2, 8)).sum().backward()
    model(torch.ones(2, 8)).sum().backward()
    adds = [torch.allclose(gather(p.grad), 3 * first) for p, first in zip(model.parameters(), once, strict=True)]
    model = parallelize(OwnModel(), Grid(data=2), roles=BOTH, gradients="sum")
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError) as caught, no_sync(model):
        model(torch.ones(2, 8)).sum().backward()
    return all(adds), str(caught.value)


def test_a_step_of_micro_batches_that_begins_with_gradients_adds_to_averages_and_is_refused_for_sums(
    ranks: Callable[[int], Ranks],
) -> None:
    assert all(adds and "zero the gradients" in error for adds, error in ranks(2).run(unzeroed_steps))


class CountsHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.n_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:-1], self.n_heads, 2)
        return self.out(heads.flatten(-2))


HEADS_OF_2 = {"qkv": {"role": "colwise", "unit": 2, "unit_name": "heads"}, "out": "rowwise"}


def notes_of_a_forward() -> list[str]:
    torch.manual_seed(0)
    model = parallelize(CountsHeads(), Grid(x=2), roles=HEADS_OF_2, local_attributes={"n_heads": None})
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 8))
    return caught.value.__notes__


def test_code_that_counts_the_whole_models_heads_raises_with_local_attributes(ranks: Ranks) -> None:
    for notes in ranks(2).run(notes_of_a_forward):
        assert any("local_attributes" in note for note in notes)


def test_an_embedding_of_something_else_than_hidden_features_is_not_split_over_y() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(16, 8), "bias_by_head": nn.Embedding(16, 4)})
    roles = {"tokens": "embedding", "bias_by_head": "positions"}
    validate(model, {"x": 2}, roles=roles)
    with pytest.raises(ValueError, match=r"bias_by_head makes 4 features, where the hidden size is 8.*choose y=1"):
        validate(model, {"x": 2, "y": 2}, roles=roles)
