# SPDX-License-Identifier: Apache-2.0
"""Tests of what programs do with a model after `parallelize`, beside calling it: it runs as in plain PyTorch,
or is refused.
"""

import copy
import dataclasses
import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers.optimization
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize, weight_norm
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize, register_forward_method
from stretto.parallel.blocks import find_blocks
from tests.conftest import Ranks
from tests.differences import largest
from tests.parallel.training import distance, my_rows

WIDTH, ROWS = 4, 4


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Waits(nn.Module):
    """A module whose forward pass waits, in the first thread that calls it, until another one was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.has_begun.set()
        assert self.may_end.wait(60)
        out: Tensor = self.linear(x)
        return out


def call_in_two_threads() -> bool:
    torch.manual_seed(0)
    waits, x = Waits(), torch.ones(ROWS, WIDTH)
    expected = waits.linear(x)
    model: Any = parallelize(waits, Grid(z=2))
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(x)))
    thread.start()
    assert model.has_begun.wait(60)
    with pytest.raises(ValueError, match=r"a forward pass of this model runs in another thread, .* by one thread"):
        model(x)
    model.may_end.set()
    thread.join(60)
    torch.testing.assert_close(found[0], expected)
    return torch.equal(model(x), found[0])  # the other thread has ended its pass


def test_a_second_thread_is_refused_while_one_is_in_a_forward_pass(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(call_in_two_threads) == [True, True]


class Encodes(nn.Module):
    """A model, or a block, with methods beside forward, one of which reads a parameter by itself."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Encodes(0) for _ in range(2 * depth))

    def encode(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale
        for layer in self.layers:
            x = layer.encode(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + 1


class Holders(nn.Module):
    """Lists of modules without a forward, of lists in these, and of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        for _ in range(2):
            holder = nn.Module()
            holder.conv, holder.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
            holder.parts = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)})
            self.down.append(holder)
        self.gains = nn.ModuleList(nn.ParameterList([torch.ones(WIDTH)]) for _ in range(2))
        self.last = nn.ParameterList([torch.ones(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for holder, gain in zip(self.down, self.gains, strict=True):
            x = holder.parts["a"](holder.conv(x) * holder.scale) * gain[0]
        return x * self.last[0] + self.last[1]


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    rest: Any = None
    count: int = dataclasses.field(default=0, init=False)


class Pair(NamedTuple):
    x: Tensor
    ids: Tensor


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Takes(nn.Module):
    """A model that is given its input in one of many ways, and gives it on in another."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.read, self.linear, self.lstm = read, nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, PackedSequence):
            return self.lstm(batch)[0].data
        x = self.linear(self.read(batch))
        assert x.dtype == torch.bfloat16
        return x


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "no error"


def refusals(sizes: dict[str, int]) -> dict[str, str]:
    """The error for each program."""
    grid, x, found = Grid(**sizes), torch.ones(ROWS, WIDTH), {}

    def try_on(name: str, change: Callable[[nn.Module], Any]) -> None:
        model = parallelize(chain(), grid)

        def run() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                result = change(model)
            model(x) if result is None else None

        found[name] = message_of(run)

    try_on("functional_call", lambda m: torch.func.functional_call(m, {"0.weight": torch.zeros(WIDTH, WIDTH)}, (x,)))
    try_on("replaced", lambda m: setattr(m[1], "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)))
    try_on("replaced by its view", lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.data)))
    try_on("removed", lambda m: setattr(m[1], "bias", None))
    try_on("tied", lambda m: setattr(m[1], "weight", m[0].weight))
    try_on("block alone", lambda m: setattr(m[1], "bias", None) or m[1](x))
    try_on("parametrized", lambda m: parametrize.register_parametrization(m[0], "weight", nn.Tanh()) and None)
    try_on("weight norm", lambda m: weight_norm(m[0]) and None)
    try_on("copy of a block", lambda m: copy.deepcopy(m[0]))
    try_on("pickle of a block", lambda m: pickle.dumps(m[0]))
    try_on("shared memory", lambda m: m.share_memory())
    try_on("data of another dtype", lambda m: setattr(m[0].weight, "data", m[0].weight.data.bfloat16()))
    try_on("data of another shape", lambda m: setattr(m[0].weight, "data", torch.ones(2)))
    try_on("of no block", lambda m: register_forward_method(nn.Linear(2, 2), "forward"))
    try_on("no method", lambda m: register_forward_method(m, "fovard"))
    with compiled_autograd._enable(lambda graph: graph):
        try_on("compiled autograd", lambda _: None)
    early = chain()
    optimizer = torch.optim.SGD(early.parameters(), 0.1)
    parallelize(early, grid)(x).sum().backward()
    found["optimizer made before"] = message_of(optimizer.step)
    of_torch = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop)
    for kind in (transformers.optimization.Adafactor, *(of_torch if "z" in sizes else ())):
        message = message_of(partial(kind(early.parameters()).step, lambda: 0.0))
        assert message.startswith(f"{kind.__module__.split('.')[0]}'s {kind.__name__} cannot update shards")
    nested = chain()
    for block in nested:
        parallelize(block, grid)
    found["nested"] = message_of(lambda: parallelize(nested, grid))
    scripted = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.Tanh())
    found["scripted"] = message_of(lambda: parallelize(scripted, grid))
    found["scripted whole"] = message_of(lambda: parallelize(torch.jit.script(chain()), grid))
    found["penalty"] = message_of(lambda: early(x).sum() + sum(p.abs().sum() for p in early.parameters()))
    found["fully_shard"] = message_of(lambda: parallelize(fully_shard(chain()), grid))
    found["a list as a block"] = message_of(lambda: parallelize(Encodes(), grid, blocks=["layers"]))
    torch.manual_seed(0)
    encodes = parallelize(Encodes(), grid)
    found["method"] = message_of(lambda: encodes.encode(x))
    in_bf16 = parallelize(Takes(lambda batch: batch.x), grid, dtype=torch.bfloat16)
    found["opaque"] = message_of(lambda: in_bf16(Opaque(x)))
    return found


@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}], ids=str)
def test_programs_that_would_be_silently_wrong_are_refused_with_what_to_do(ranks, sizes):
    for messages in ranks(2).run(refusals, sizes):
        for name in ("functional_call", "replaced", "replaced by its view", "removed", "tied", "block alone"):
            assert "after stretto.parallelize" in messages[name], (name, messages[name])
            assert "full_parameters" in messages[name] or "copy the new values" in messages[name]
        for name in ("parametrized", "weight norm"):
            assert "after stretto.parallelize" in messages[name]
            assert "parametrize" in messages[name]
        assert "neither copied nor pickled" in messages["copy of a block"]
        assert "neither copied nor pickled" in messages["pickle of a block"]
        assert "not put into shared memory" in messages["shared memory"]
        assert "model.to(dtype) converts one" in messages["data of another dtype"]
        assert "cannot become a tensor [2] of torch.float32 by .data" in messages["data of another shape"]
        assert "neither a model that stretto.parallelize has returned nor a block of one" in messages["of no block"]
        assert "has no method 'fovard'; did you mean 'forward'?" in messages["no method"]
        assert "this SGD was made before stretto.parallelize" in messages["optimizer made before"]
        assert "0.weight of this Sequential is on a grid already" in messages["nested"]
        assert "0 is a RecursiveScriptModule" in messages["scripted"]
        assert "the model is a RecursiveScriptModule" in messages["scripted whole"]
        assert "take the penalty's .full_tensor()" in messages["penalty"]
        assert "0.weight of this FSDPSequential is a DTensor" in messages["fully_shard"]
        assert "compiled autograd (torch._dynamo.config.compiled_autograd) cannot" in messages["compiled autograd"]
        assert "layers (ModuleList) has no forward" in messages["a list as a block"]
        assert "register_forward_method(module, name)" in messages["method"]
        assert "cast those in its Opaque yourself" in messages["opaque"]


def wrong_results(sizes: dict[str, int]) -> list[str]:
    """Return which programs train otherwise than in one process."""
    grid, wrong = Grid(**sizes), []
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def compare(name: str, make: Callable[[], nn.Module], run: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
        results = []
        for is_parallel in (False, True):
            torch.manual_seed(0)
            model = make().double()
            if is_parallel:
                model = parallelize(model, grid, **options)
                if name == "method":
                    for each in (model, *model.layers):
                        register_forward_method(each, "encode")
            for _ in range(2):
                model.zero_grad()
                run(model, x[my_rows(grid, ROWS)] if is_parallel else x).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad, alpha=0.1)
            results.append({key: gather(value) for key, value in model.named_parameters()})
        wrong.extend(f"{name}: {key}" for key in results[0] if not distance(results[1][key], results[0][key]) <= 1e-12)

    compare("method", Encodes, lambda model, x: model.encode(x) + model(x))
    compare("method", Encodes, lambda model, x: model.encode(x), reshard="after_forward")
    compare("holders", Holders, lambda model, x: model(x))
    for mode in ("full", "every:2", "host", "products"):
        compare(f"recompute={mode}", chain, lambda model, x: model(x), recompute=mode)
        compare(f"recompute={mode}, blocks", chain, lambda model, x: model(x), recompute=mode, blocks=["0", "1"])
    compare("double", chain, lambda model, x: model.float().double()(x))
    inputs: list[tuple[Any, Callable[[Any], Tensor]]] = [
        (Batch(x.float()), lambda batch: batch.x),
        (Batch(x.float(), {"a": [Batch(x.float())]}), lambda batch: batch.rest["a"][0].x),
        (Pair(x.float(), torch.arange(3)), lambda batch: batch.x),
        ({"x": (x.float(),)}, lambda batch: batch["x"][0]),
        (pack_sequence([x.float()]), lambda batch: batch.data),
    ]
    for batch, read in inputs:
        model = parallelize(Takes(read), grid, dtype=torch.bfloat16)
        model(batch).float().square().mean().backward()
        assert read(batch).dtype == torch.float32
    return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "sizes"),
    [(2, {"z": 2}), (2, {"data": 2}), pytest.param(4, {"data": 2, "z": 2}, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_programs_that_go_other_ways_train_as_in_one_process(ranks, count, sizes):
    assert ranks(count).run(wrong_results, sizes) == [[]] * count


def test_the_blocks_of_lists_without_a_forward_are_the_modules_that_have_one():
    found = find_blocks(Holders())
    assert found == ["down.0.conv", "down.0.parts.a", "down.1.conv", "down.1.parts.a"]


def refusals_of_other_rows(sizes: dict[str, int]) -> list[str]:
    """What is said where ranks of x or y are given other tokens, another number of them, or, by blocks, other numbers;
    and where they compute what they are given, by GPUs whose last bits differ."""
    grid = Grid(**sizes)
    place = grid.coordinate("x")
    tokens = torch.arange(8).view(2, 4)
    found = []
    for mine in (tokens + place, tokens[:, : 4 - place]):
        model = parallelize(GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=16, max_seq_len=8)), grid)
        found.append(message_of(lambda model=model, mine=mine: model(tokens, mine)))
    for x in (torch.ones(ROWS, WIDTH) + scale * place for scale in (1.0, 1e-6)):
        model = parallelize(chain(), grid)
        found.append(message_of(lambda model=model, x=x: model(x)))
    return found


@pytest.mark.long
def test_ranks_of_x_and_y_that_are_given_different_rows_raise_an_error(ranks):
    for sizes in ({"x": 2}, {"x": 2, "y": 2}):
        for other, shorter, numbers, bits in ranks(2 * sizes.get("y", 1)).run(refusals_of_other_rows, sizes):
            assert "this rank: argument 2 [2, 4])" in other
            assert "this rank: argument 1 [2, 4], argument 2 [2, " in shorter
            assert f"this rank: argument 1 [{ROWS}, {WIDTH}])" in numbers
            assert "grid.coordinate('batch') of grid.size('batch')" in numbers
            assert bits == "no error"


def train_tied(sizes: dict[str, int] | None) -> dict[str, Tensor]:
    """The parameters after two steps of a GPT whose blocks' weights, and embedding and head, were tied after
    `parallelize`."""
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig(layers=2, hidden=8, heads=2, vocab=16, max_seq_len=8, tie_embeddings=False)).double()
    grid = None if sizes is None else Grid(**sizes)
    model = model if grid is None else parallelize(model, grid)
    for name in ("mlp.up", "mlp.down", "mlp_norm"):
        model.blocks[1].get_submodule(name).weight = model.blocks[0].get_submodule(name).weight
    model.head.weight = model.embedding.weight
    tokens = torch.arange(36).view(4, 9) % 16
    tokens = tokens if grid is None else tokens[my_rows(grid, 4)]
    for _ in range(2):
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    return {name: gather(value).detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("sizes", [{"z": 2}, {"x": 2}], ids=str)
def test_weights_of_a_model_with_roles_may_be_tied_after_parallelize(ranks, sizes):
    expected = train_tied(None)
    for found in ranks(2).run(train_tied, sizes):
        assert found.keys() == expected.keys()
        assert largest(distance(found[name], value) for name, value in expected.items()) < 1e-12


def train_with_default_device(sizes: dict[str, int]) -> tuple[float, float]:
    """The loss and the norm of the second step of a GPT, of a program whose default device is not the grid's."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        model: Any = GPT(GPTConfig(layers=2, hidden=8, heads=2, vocab=16, max_seq_len=8)).double()
        tokens = torch.arange(36).view(4, 9) % 16
    torch.set_default_device("meta")
    try:
        grid = Grid(**sizes, device="cpu")
        model = parallelize(model, grid)
        tokens = tokens[my_rows(grid, 4)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return loss.item(), whole.item()
    finally:
        torch.set_default_device(None)


def test_a_default_device_of_the_users_does_not_matter(ranks):
    (expected,) = ranks(1).run(train_with_default_device, {})
    for sizes in ({"z": 2}, {"x": 2}):
        found = ranks(2).run(train_with_default_device, sizes)
        assert found == [pytest.approx(expected, rel=1e-9)] * 2


class Codebook(nn.Module):
    """Vectors that follow the means of what is nearest to them: of this rank's rows, or of a group's."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group, self.inner, self.norm = group, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("code", torch.arange(3.0 * WIDTH).view(3, WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        sums = x.detach().sum(0)
        self.last = sums
        if self.group is not None:
            sums = sums.clone()
            torch.distributed.all_reduce(sums, group=self.group)
        self.calls += 1
        self.code = self.code.lerp(sums.expand_as(self.code), 0.1)
        return self.norm(self.inner(x)) - self.code[0]


def warnings_of_buffers(sizes: dict[str, int]) -> list[list[str]]:
    """What is said of the buffers of models in two calls in evaluation and in two in training."""
    grid = Grid(**sizes)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))[my_rows(grid, ROWS)]
    found = []
    for group in (None, grid.group("loss")):
        torch.manual_seed(0)
        model = parallelize(Codebook(group), grid)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for is_training in (False, False, True, True):
                model.train(is_training)(x).square().mean().backward()
        found.append([str(each.message) for each in caught if "buffers" in str(each.message)])
    return found


def test_buffers_that_ranks_fill_from_their_own_rows_are_named_once(ranks):
    (own, summed), *others = ranks(2).run(warnings_of_buffers, {"z": 2})
    assert [each.partition(" of ")[0] for each in own] == ["code"]
    assert not summed
    assert others == [[[], []]]


def call_on_the_first_rank_alone() -> float:
    model, x = parallelize(Codebook(), Grid(data=2)), torch.ones(ROWS, WIDTH)
    if torch.distributed.get_rank() == 0:
        model(x)
    torch.distributed.all_reduce(sums := torch.ones(()))
    return float(sums)


def test_a_rank_that_calls_a_model_alone_waits_for_no_other(ranks):
    assert ranks(2).run(call_on_the_first_rank_alone) == [2, 2]
