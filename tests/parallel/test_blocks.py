# SPDX-License-Identifier: Apache-2.0
"""Models without roles, sharded block by block, train as in one process, whatever their modules are."""

import copy
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.execution import ReshardPolicy
from stretto.parallel import (
    Grid,
    checkpoint_activations,
    clip_grad_norm_,
    count_collectives,
    gather,
    layout_of,
    mean_over_batch,
    no_sync,
    parallelize,
    validate,
)
from stretto.parallel.blocks import find_blocks
from tests.parallel.training import Sizes, distance, my_rows
from tests.peak_memory import PeakMemory

DOUBLE = torch.float64
ROWS = 8


class Residual(nn.Module):
    """A convolution block with a statistic that each forward pass updates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolve, self.normalize = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.scale * F.relu(self.normalize(self.convolve(x)))


class Convolutional(nn.Module):
    """Images to classes: stages of blocks, as a ResNet; the last block is called twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.stages = nn.ModuleList(nn.Sequential(Residual(6), Residual(6)) for _ in range(2))
        self.unused = nn.Linear(3, 3)
        self.classify = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return self.classify(self.stages[-1][1](x).mean((2, 3)))


class Translator(nn.Module):
    """An encoder and a decoder of torch's own layers, with one embedding for both and the head; it returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True), 2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.encoder(self.embed(source))
        return self.head(self.decoder(self.embed(target), memory)), memory


class Recurrent(nn.Module):
    """An LSTM, whose parameters torch reads from a list, and a frozen projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 5, batch_first=True)
        self.project = nn.Linear(5, 5).requires_grad_(False)
        self.classify = nn.Linear(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classify(self.project(self.lstm(self.embed(tokens))[0][:, -1]))


class UNet(nn.Module):
    """A denoiser: a way down, a way up with skips, and a time that shifts each block's features."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 6), nn.SiLU(), nn.Linear(6, 6))
        self.enter, self.leave = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.down = nn.ModuleList(
            nn.ModuleDict({"block": Residual(6), "pool": nn.Conv2d(6, 6, 2, 2)}) for _ in range(2)
        )
        self.up = nn.ModuleList(
            nn.ModuleDict({"block": Residual(6), "grow": nn.ConvTranspose2d(12, 6, 2, 2)}) for _ in range(2)
        )

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        x, shift, skips = self.enter(images), self.time(time[:, None])[..., None, None], []
        for level in self.down:
            x = level["pool"](level["block"](x + shift))
            skips.append(x)
        for level in self.up:
            x = level["block"](level["grow"](torch.cat((x, skips.pop()), 1)) + shift)
        return self.leave(x)


class Selective(nn.Module):
    """A block of a selective state-space model (Mamba): convolution, input-dependent steps, a scan, a gate."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.convolve = nn.Conv1d(2 * width, 2 * width, 3, padding=2, groups=2 * width)
        self.choose, self.step = nn.Linear(2 * width, 2 * states + 1), nn.Parameter(torch.rand(2 * width))
        self.log_decay = nn.Parameter(torch.rand(2 * width, states))

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.enter(self.norm(x)).chunk(2, -1)
        inner = F.silu(self.convolve(inner.mT)[..., : x.shape[1]].mT)
        chosen = self.choose(inner)
        states = self.log_decay.shape[1]
        step = F.softplus(chosen[..., :1] + self.step)
        state, out = x.new_zeros(len(x), inner.shape[-1], states), []
        for time in range(x.shape[1]):
            decay = torch.exp(-step[:, time, :, None] * self.log_decay.exp())
            write = step[:, time, :, None] * chosen[:, time, None, 1 : 1 + states] * inner[:, time, :, None]
            state = decay * state + write
            out.append((state * chosen[:, time, None, 1 + states :]).sum(-1))
        return x + self.leave(torch.stack(out, 1) * F.silu(gate))


class StateSpace(nn.Module):
    """Tokens to a class by two selective blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 4), nn.ModuleList(Selective(4, 3) for _ in range(2))
        self.classify = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.classify(x[:, -1])


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)


def choose(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(5))


def translator_loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    logits, memory = model(source, target)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten()) + memory.square().mean()


def classifier_loss(model: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(model(x), classes)


def denoiser_loss(model: nn.Module, images: Tensor, time: Tensor) -> Tensor:
    return F.mse_loss(model(images * time[:, None, None, None], time), images)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "convolutional": (Convolutional, classifier_loss, (draw(ROWS, 3, 4, 4), choose(5, ROWS))),
    "translator": (Translator, translator_loss, (choose(11, ROWS, 4), choose(11, ROWS, 5))),
    "u-net": (UNet, denoiser_loss, (draw(ROWS, 2, 8, 8), draw(ROWS))),
    "state space": (StateSpace, classifier_loss, (choose(11, ROWS, 4), choose(5, ROWS))),
    "recurrent": (Recurrent, classifier_loss, (choose(11, ROWS, 4), choose(5, ROWS))),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(4)
    return CASES[name][0]().to(DOUBLE)


def train(model: nn.Module, name: str, grid: Grid | None, micro_batches: int = 1) -> dict[str, Any]:
    """Losses, norms and weights after four steps; losses are of the whole batch."""
    _, loss_of, data = CASES[name]
    rows = [part if grid is None else part[my_rows(grid, ROWS)] for part in data]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, norms = [], []
    for _ in range(4):
        total = 0.0
        for number in range(micro_batches):
            batch = [part.chunk(micro_batches)[number] for part in rows]
            if number + 1 < micro_batches and grid is not None:
                with no_sync(model):
                    loss = loss_of(model, *batch) / micro_batches
                    loss.backward()
            else:
                loss = loss_of(model, *batch) / micro_batches
                loss.backward()
            total += float(loss.detach())
        if grid is None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        else:
            losses_of_all = torch.tensor(total, dtype=DOUBLE)
            torch.distributed.all_reduce(losses_of_all)
            total = float(losses_of_all) / torch.distributed.get_world_size()
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5, grid)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    weights = {key: gather(value).clone() for key, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def train_on(sizes: Sizes, name: str, options: dict[str, Any], micro_batches: int) -> None:
    """Raise AssertionError unless training on a grid is that of one process."""
    right = train(make(name), name, None)
    grid = Grid(*sizes)
    model = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallelize(model, grid, **options)
    found = train(model, name, grid, micro_batches)
    assert found["losses"] == pytest.approx(right["losses"], rel=1e-9)
    assert found["norms"] == pytest.approx(right["norms"], rel=1e-9)
    for key, value in right["weights"].items():
        if value.is_floating_point():
            assert distance(found["weights"][key], value) < 1e-9, key


KEEPS, FREES = {"reshard": "after_backward"}, {"reshard": "after_forward"}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("options", [KEEPS, FREES, {"overlap": False}, {"reshard": "gradients_after_step"}], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (2, 1, 1, 2), (4, 1, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 2, 1)])
@pytest.mark.parametrize("name", CASES)
def test_models_without_roles_train_as_in_one_process(ranks, name, sizes, options, micro_batches):
    ranks(4).run(train_on, sizes, name, options, micro_batches)


@pytest.mark.parametrize("name", [pytest.param("translator", marks=pytest.mark.long), "recurrent"])
def test_three_ranks_that_divide_nothing_train_as_one(ranks, name):
    ranks(3).run(train_all_rows_on_three, name)


def train_all_rows_on_three(name: str) -> None:
    """On z=3 every rank is given the same rows: the mean of three equal losses is that loss."""
    right = train(make(name), name, None)
    grid = Grid(z=3)
    model = parallelize(make(name), grid)
    _, loss_of, data = CASES[name]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for expected in right["losses"]:
        loss = loss_of(model, *data)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-9)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5, grid)
        optimizer.step()
        optimizer.zero_grad()


def count_rows() -> tuple[int, int]:
    """Return how many numbers of its parameters a rank holds, and how many there are."""
    model = parallelize(make("translator"), Grid(z=4))
    whole = sum(torch.Size(layout_of(p).shape).numel() for p in model.parameters())
    return sum(p.to_local().numel() for p in model.parameters()), whole


def test_a_rank_holds_its_part_of_every_parameter(ranks):
    found = ranks(4).run(count_rows)
    assert sum(mine for mine, _ in found) == found[0][1]
    assert max(mine for mine, _ in found) < 0.3 * found[0][1]


def count_gathers(reshard: ReshardPolicy) -> tuple[int, int]:
    """All-gathers and reduce-scatters over z of one step."""
    grid = Grid(z=2)
    model = parallelize(make("translator"), grid, reshard=reshard)
    with count_collectives(grid) as counts:
        translator_loss(model, *CASES["translator"][2]).backward()
    kinds = Counter(call.kind for call in counts.calls if call.axis == "z")
    return kinds["all_gather"], kinds["reduce_scatter"]


@pytest.mark.long
def test_a_block_is_sent_in_one_message_and_again_for_the_backward_pass_if_it_is_freed(ranks):
    """4 blocks, and the embedding, which is in none and is kept."""
    assert ranks(2).run(count_gathers, "after_backward") == [(5, 5)] * 2
    assert ranks(2).run(count_gathers, "after_forward") == [(9, 5)] * 2


def load_and_convert(sizes: dict[str, int]) -> None:
    grid = Grid(**sizes)
    source = make("convolutional")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.5)
    model = parallelize(make("convolutional"), grid)
    model.load_state_dict(source.state_dict())
    for name, parameter in model.named_parameters():
        assert torch.equal(gather(parameter), source.get_parameter(name)), name
    images, classes = CASES["convolutional"][2]
    classifier_loss(model, images, classes).backward()  # which keeps plain tensors of what z does not shard
    model.zero_grad()
    model.float()
    classifier_loss(model, images.float(), classes).backward()
    model.float()  # which converts nothing, and makes new tensors of the parameters all the same
    model.zero_grad()
    asked = next(model.parameters())
    classifier_loss(model, images.float(), classes).backward(inputs=[asked])
    assert asked.grad is not None
    with pytest.raises(ValueError, match="neither copied nor pickled"):
        copy.deepcopy(model)


@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}], ids=str)
def test_state_dicts_of_the_plain_model_are_loaded_and_conversions_keep_the_shards(ranks, sizes):
    ranks(2).run(load_and_convert, sizes)


def checkpoint_blocks(reshard: ReshardPolicy) -> None:
    right = train(make("convolutional"), "convolutional", None)
    grid = Grid(z=4)
    model = parallelize(make("convolutional"), grid, reshard=reshard)
    checkpoint_activations(model)
    found = train(model, "convolutional", grid)
    assert found["norms"] == pytest.approx(right["norms"], rel=1e-9)
    calls = "stages.0.0.calls"  # twice a step: its block is computed again
    assert found["weights"][calls] == 2 * right["weights"][calls]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("reshard", ["after_backward", "after_forward"])
def test_checkpointed_blocks_are_gathered_and_computed_again(ranks, reshard):
    ranks(4).run(checkpoint_blocks, reshard)


def free_frozen_blocks() -> list[int]:
    """Return how many bytes plain tensors of a frozen block's whole weight take after a backward pass."""
    model = make("state space")
    shape = model.blocks[1].enter.weight.shape
    model.blocks[1].requires_grad_(False)
    parallelize(model, Grid(z=2), reshard="after_forward")
    classifier_loss(model, *CASES["state space"][2]).backward()
    gc.collect()
    return [
        each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) is Tensor and each.shape == shape and each.dtype == DOUBLE
    ]


def test_frozen_blocks_are_freed_after_the_backward_pass(ranks):
    assert ranks(2).run(free_frozen_blocks) == [[], []]


def cast_on_one_rank(reshard: ReshardPolicy) -> tuple[int, list[Tensor]]:
    """Return how many bytes are alive between the passes of three linears, and their gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    parallelize(model, Grid(), blocks=["*"], dtype=torch.bfloat16, reshard=reshard)
    with PeakMemory() as memory:
        loss = model(torch.ones(1, 40)).float().square().mean()
        gc.collect()
        alive = memory.now
        loss.backward()
    return alive, [gather(parameter.grad) for parameter in model.parameters()]


def test_casts_are_freed_on_one_rank_and_made_again(ranks):
    """As FSDP2 does on one rank."""
    freed, found = ranks(1).run(cast_on_one_rank, "after_forward")[0]
    kept, right = ranks(1).run(cast_on_one_rank, "after_backward")[0]
    assert kept - freed >= 2 * 40 * 40 * 2  # the first linear's weight is not needed for a gradient of its input
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def sum_gradients() -> None:
    """A global mean by `mean_over_batch` has the gradients of one process, whatever the model does with them."""
    images, classes = CASES["convolutional"][2]
    plain = make("convolutional")
    F.cross_entropy(plain(images), classes).backward()
    for reduction in ("sum", "mean"):
        grid = Grid(data=2, z=2)
        model = parallelize(make("convolutional"), grid, gradients=reduction)
        rows = my_rows(grid, ROWS)
        loss = F.cross_entropy(model(images[rows]), classes[rows], reduction="sum")
        mean_over_batch(loss, len(classes[rows]), grid).backward()
        for name, parameter in model.named_parameters():
            if (expected := plain.get_parameter(name).grad) is not None:
                assert distance(gather(parameter.grad, layout_of(parameter)), expected) < 1e-9, (reduction, name)
        parallelize(make("recurrent"), grid, gradients="mean" if reduction == "sum" else "sum")
        with pytest.raises(ValueError, match="make a Grid for each kind"):
            mean_over_batch(loss, 1, grid)


@pytest.mark.long
def test_the_mean_over_the_batch_is_right_with_summed_and_with_averaged_gradients(ranks):
    ranks(4).run(sum_gradients)


def test_blocks_are_the_children_of_lists_or_what_is_named():
    model = make("convolutional")
    assert find_blocks(model) == [f"stages.{stage}.{block}" for stage in range(2) for block in range(2)]
    assert find_blocks(model, ["stages.*"]) == ["stages.0", "stages.1"]
    layers = [f"{part}.layers.{number}" for part in ("encoder", "decoder") for number in range(2)]
    assert find_blocks(make("translator")) == layers
    assert find_blocks(make("recurrent")) == []
    with pytest.raises(ValueError, match="no submodule is named 'stage'"):
        find_blocks(model, ["stage"])
    with pytest.raises(ValueError, match=r"stages.0.0 is within stages.0"):
        find_blocks(model, ["stages.*", "stages.*.*"])
    with pytest.raises(ValueError, match="must be a list"):
        find_blocks(model, "stages.*")


def refuse() -> list[str]:
    grid, messages = Grid(x=2), []
    for options in ({"blocks": ["stages.*"], "roles": {"stem": "replicated"}}, {"shard_sequence": True}):
        with pytest.raises(ValueError) as error:
            parallelize(make("convolutional"), grid, **options)
        messages.append(str(error.value))
    with (
        pytest.warns(UserWarning, match=r"2 times the work") if grid.coordinate("x") == 0 else warnings.catch_warnings()
    ):
        parallelize(make("convolutional"), grid)
    validate(make("convolutional"), {"x": 2})
    validate(make("convolutional"), {"x": 2}, blocks=["stages.*"])
    with pytest.raises(ValueError, match="gradients is 'average', but must be 'sum' or 'mean'"):
        parallelize(make("convolutional"), grid, gradients="average")
    return messages


def test_impossible_options_raise_and_costly_ones_warn(ranks):
    for first, second in ranks(2).run(refuse):
        assert "blocks and roles exclude each other" in first
        assert "shard_sequence takes roles" in second
