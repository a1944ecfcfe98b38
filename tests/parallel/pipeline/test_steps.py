# SPDX-License-Identifier: Apache-2.0
"""One step by a Pipeline has the loss and the gradients of the whole batch on one rank, whatever the model does."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.execution import StageOptions
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, clip_grad_norm_, gather, mean_over_batch, parallelize
from stretto.train.checkpoint.state import training_state
from stretto.train.optimizer import ShardOptimizer
from tests.parallel.pipeline.training import STAGES
from tests.parallel.training import IGNORED, SEED, distance

WORDS = 61


def gpt(**options: Any) -> nn.Module:
    """Four blocks, far from their initial zeros and ones."""
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "vocab": WORDS, "max_seq_len": 16}
    return shaken(lambda: GPT(GPTConfig(**{**sizes, **options})))


def shaken(make: Callable[[], nn.Module]) -> nn.Module:
    """The same model in each call, with weights far from zero and one."""
    torch.manual_seed(SEED)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def text(rows: int, seq_len: int = 12) -> dict[str, Tensor]:
    """Tokens and targets, some of which are to be ignored, unevenly in the rows."""
    tokens = torch.randint(WORDS, (rows, seq_len + 1), generator=torch.Generator().manual_seed(rows + seq_len))
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, : 5 * row % (seq_len + 3)] = IGNORED
    return {"tokens": tokens[:, :-1].clone(), "targets": targets}


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """A model whose loss is that of its rows, in its own code; grid: or that of all ranks' rows."""

    def __init__(self, layers: int = 5, dropout: float = 0.0, grid: Grid | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.classify = nn.Linear(8, 5)
        self.loss_grid = grid

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(features)
        for layer in self.layers:
            x = layer(x)
        total = F.cross_entropy(self.classify(x), labels, reduction="sum", ignore_index=IGNORED)
        count = (labels != IGNORED).sum()
        return total / count if self.loss_grid is None else mean_over_batch(total, count, self.loss_grid)


def classifier(**options: Any) -> nn.Module:
    return shaken(lambda: Classifier(**options))


def examples(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    features = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return {"features": features, "labels": torch.arange(rows) % 5}


@dataclass(frozen=True)
class Setup:
    """Description of how a model is put on a grid and stepped."""

    grid: dict[str, int]
    schedule: str = "1f1b"
    rows: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)

    def build(self, model: nn.Module, grid: Grid) -> tuple[nn.Module, Pipeline]:
        if self.schedule in STAGES:
            model = parallelize(model, grid, stages=STAGES[self.schedule], **self.options)
        else:
            model = parallelize(model, grid, **self.options)
        return model, Pipeline(model, grid, schedule=self.schedule, micro_batch_size=self.rows, **self.pipeline)


def of_rank(batch: dict[str, Tensor], grid: Grid) -> dict[str, Tensor]:
    return {name: value.chunk(grid.size("batch"))[grid.coordinate("batch")] for name, value in batch.items()}


def far_from_plain(
    model: nn.Module, loss: Tensor, plain: nn.Module, expected: Tensor, *, tolerance: float = 1e-12
) -> dict[str, float]:
    """Return what of the loss and of this rank's gradients differs from that of plain training, and by how much."""
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = {"loss": distance(loss, expected.detach().double())}
    for name, parameter in model.named_parameters():
        mine, theirs = parameter.grad, gradients[name]
        if mine is None or theirs is None:
            found[name] = 0.0 if mine is theirs else float("inf")
        else:
            found[name] = distance(gather(mine), theirs)
    return {name: value for name, value in found.items() if not value <= tolerance}


def step_once(setup: Setup, make: Callable[..., nn.Module], batch: dict[str, Tensor]) -> dict[str, float]:
    """Step a model on this rank, and the plain one."""
    grid, plain = Grid(**setup.grid), make()
    expected = plain(**batch)
    expected.backward()
    model, pipeline = setup.build(make(), grid)
    with pipeline:
        loss = pipeline.step(**of_rank(batch, grid))
    return far_from_plain(model, loss, plain, expected)


def check(ranks: Any, setup: Setup, function: Callable[..., Any], *args: Any) -> None:
    print(f"seed {SEED}")
    count = prod(setup.grid.values())
    assert ranks(count).run(function, setup, *args) == [{}] * count


# Models without roles.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "message-driven"])
@pytest.mark.parametrize(
    "grid", [{"pipe": 2, "data": 2}, {"pipe": 2, "z": 2}, {"pipe": 4}, {"pipe": 2, "x": 2}], ids=str
)
@pytest.mark.parametrize("recompute", ["none", "full", "every:2"])
def test_a_model_without_roles_averages_gradients_over_ranks(ranks, schedule, grid, recompute):
    layers = 8 if recompute == "every:2" or schedule in STAGES else 5
    setup = Setup(grid, schedule, 2, {"recompute": recompute, "blocks": ["layers.*"]})
    rows = 2 * max(4, grid["pipe"]) * grid.get("data", 1) * grid.get("z", 1)
    check(ranks, setup, step_once, partial(classifier, layers=layers), examples(rows))


def step_with_a_loss_of_all_ranks(setup: Setup, batch: dict[str, Tensor]) -> dict[str, float]:
    grid, plain = Grid(**setup.grid), classifier()
    expected = plain(**batch)
    expected.backward()
    model, pipeline = setup.build(classifier(grid=grid), grid)
    with pipeline:
        loss = pipeline.step(**of_rank(batch, grid))
    return far_from_plain(model, loss, plain, expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", [{"pipe": 2, "data": 2}, {"pipe": 2, "z": 2}], ids=str)
def test_a_model_without_roles_may_sum_the_gradients_of_a_loss_of_all_ranks(ranks, grid):
    batch = examples(16)
    batch["labels"][[0, 1, 2, 9]] = IGNORED
    setup = Setup(grid, options={"blocks": ["layers.*"], "gradients": "sum"}, rows=4)
    check(ranks, setup, step_with_a_loss_of_all_ranks, batch)


# Stages that have no roles, and modules that the model's code calls in its own order.


class Wave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Nested(nn.Module):
    """A model whose calls are nested, and in methods; registered from the last module to the first."""

    def __init__(self, blocks: str) -> None:
        super().__init__()
        self.to_logits, self.scale = nn.Linear(8, 5), nn.LayerNorm(8)
        self.layers = nn.ModuleList(Block() if kind == "b" else Wave() for kind in blocks)
        self.lift = nn.Linear(6, 8)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            self.to_logits(self.scale(self.run(self.lift(features.to(self.scale.weight.dtype))))), labels
        )

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def nested(blocks: str) -> nn.Module:
    return shaken(lambda: Nested(blocks))


NESTED = {"lift": "replicated", "scale": "norm", "to_logits": "replicated", "layers.*.norm": "norm"}
NESTED |= {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@pytest.mark.parametrize("blocks", ["bbww", "wwbb"])
def test_a_stage_without_linears_runs_schedules_that_split_the_backward_pass(ranks, blocks):
    setup = Setup({"pipe": 2}, "zb-h1", 2, {"roles": NESTED, "stages": StageOptions(cuts=(2,))})
    check(ranks, setup, step_once, partial(nested, blocks), examples(8))


def train_without_parameters(what: str) -> tuple[bool, float, list[str]]:
    """Two steps of a model whose second stage has no parameters, or none that are trained.

    Returns whether this rank is in a group that decides in message-driven order, the last loss, and what it trains.
    """
    grid = Grid(pipe=2, data=1 if what == "no parameters" else 2, timeout=120)
    start = nested("bbww") if what == "no parameters" else gpt(num_experts=4, moe_layers="from:2", tie_embeddings=False)
    frozen = ("to_logits", "scale") if what == "no parameters" else ("blocks.2", "blocks.3", "norm", "head")
    for name, parameter in start.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    roles = NESTED if what == "no parameters" else None
    model = parallelize(start, grid, roles=roles, stages=StageOptions(cuts=(2,)))
    batch = of_rank(examples(8) if what == "no parameters" else text(8), grid)
    optimizer = ShardOptimizer(model, lambda groups: torch.optim.SGD(groups, momentum=0.9), weight_decay=0.1)
    with Pipeline(model, grid, schedule="message-driven", micro_batch_size=1) as pipeline:
        decides = pipeline._leaders is not None
        for _ in range(2):
            loss = pipeline.step(**batch).item()
            clip_grad_norm_(model.parameters(), 1.0, grid)
            optimizer.step(0.1)
    assert training_state(model, optimizer).keys() >= {f"model.{name}" for name in dict(model.named_parameters())}
    return decides, loss, [name for name, parameter in optimizer.parameters.items() if parameter.requires_grad]


@pytest.mark.long
@pytest.mark.parametrize("what", ["no parameters", "frozen experts"])
def test_ranks_without_trained_parameters_take_part_in_a_step_and_its_update(ranks, what):
    count = 2 if what == "no parameters" else 4
    found = ranks(count).run(train_without_parameters, what)
    assert len({decides for decides, _, _ in found}) == 1
    assert len({loss for _, loss, _ in found}) == 1
    assert [bool(names) for _, _, names in found] == [rank < count // 2 for rank in range(count)]


# Dropout.


def dropped_step(setup: Setup, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step with dropout, and the gradients that this rank has."""
    grid = Grid(**setup.grid)
    model, pipeline = setup.build(gpt(dropout=0.3), grid)
    torch.manual_seed(3 + grid.coordinate("batch"))  # the step's own seed counts
    with pipeline:
        loss = pipeline.step(**of_rank(batch, grid), seed=17).item()
    return loss, {name: gather(parameter.grad) for name, parameter in model.named_parameters()}


def dropped_whole(batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model = parallelize(gpt(dropout=0.3), Grid())
    torch.manual_seed(17)
    loss = model(**batch)
    loss.backward()
    return loss.item(), {name: gather(parameter.grad) for name, parameter in model.named_parameters()}


def dropout_cases() -> list[tuple[str, dict[str, int], str]]:
    """(schedule, grid, mode of recomputation); stages of one block have none to compute again together."""
    grids = [{"pipe": 2}, {"pipe": 4}, *({"pipe": 2, axis: 2} for axis in ("data", "x", "y", "z"))]
    found = []
    for schedule in ("gpipe", "interleaved", "zb-h1", "zb-v", "message-driven"):
        for grid in grids:
            stages = grid["pipe"] * (2 if schedule in STAGES else 1)
            modes = ["none", "full", "host", *(["every:2"] if stages == 2 else [])]
            found += [(schedule, grid, mode) for mode in modes if stages <= 4]
    return found


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "grid", "recompute"), dropout_cases(), ids=str)
def test_dropout_drops_the_elements_of_the_batch_that_one_rank_drops(ranks, schedule, grid, recompute):
    batch, setup = text(16), Setup(grid, schedule, 2, {"recompute": recompute})
    ((expected, gradients),) = ranks(1).run(dropped_whole, batch)
    names = set()
    for loss, mine in ranks(prod(grid.values())).run(dropped_step, setup, batch):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert {name: value for name in mine if not (value := distance(mine[name], gradients[name])) < 1e-12} == {}
        names |= set(mine)
    assert names == set(gradients)


def step_with_plain_dropout(setup: Setup, batch: dict[str, Tensor]) -> dict[str, float]:
    """A model without roles draws its masks itself: each micro-batch what it would draw on one rank."""
    grid, plain = Grid(**setup.grid), classifier(dropout=0.4)
    rows, total = len(batch["labels"]), torch.zeros((), dtype=torch.float64)
    for first in range(0, rows, setup.rows):
        torch.manual_seed(17)
        part = {name: value[first : first + setup.rows] for name, value in batch.items()}
        loss = plain(**part) * setup.rows / rows
        loss.backward()
        total += loss.detach()
    model, pipeline = setup.build(classifier(dropout=0.4), grid)
    with pipeline:
        loss = pipeline.step(**batch, seed=17)
    return far_from_plain(model, loss, plain, total)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "message-driven"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_modules_that_draw_from_torchs_generator_draw_as_on_one_rank(ranks, schedule, recompute):
    setup = Setup({"pipe": 2}, schedule, 2, {"blocks": ["layers.*"], "recompute": recompute})
    check(ranks, setup, step_with_plain_dropout, examples(8))


# Steps one after another, and models that are changed.


def situation(name: str, setup: Setup, grid: Grid) -> dict[str, float]:
    """Two steps of a pipeline and two plain ones, with what the situation says done to both."""
    batches = [text(4 * grid.size("batch")), text(8 * grid.size("batch"), seq_len=16 if "longer" in name else 12)]
    if "evaluated" in name:
        batches.insert(1, text(4 * grid.size("batch"), seq_len=7))
    plain = gpt(tie_embeddings="untied" not in name)
    start = gpt(tie_embeddings="untied" not in name)
    _change(name, start, before=True)
    model, pipeline = setup.build(start, grid)
    _change(name, plain, before=True)
    for each in (plain, model):
        _change(name, each, before=False)
    found = {}
    with pipeline:
        for number, batch in enumerate(batches):
            is_evaluated = "evaluated" in name and number == 1
            with torch.no_grad() if is_evaluated else nullcontext():
                expected = plain(**batch)
            if is_evaluated:
                loss = pipeline.evaluate(**of_rank(batch, grid))
            else:
                expected.backward()
                loss = pipeline.step(**of_rank(batch, grid))
            if not distance(loss, expected.detach()) < 1e-12:
                found[f"loss of step {number}"] = distance(loss, expected.detach())
            if "dropped" in name and number == 0:
                for each in (plain, model):
                    each.zero_grad(set_to_none=True)
    return found | far_from_plain(model, loss, plain, expected)


def _change(name: str, model: nn.Module, *, before: bool) -> None:
    """Do to a model what the situation says. before: it is not parallelized yet."""
    if before == ("before" in name):
        for part, parameter in model.named_parameters():
            if "a whole block is frozen" in name and part.startswith("blocks.1."):
                parameter.requires_grad_(False)
            if "weights are frozen" in name and part.endswith(("up.weight", "norm.bias")):
                parameter.requires_grad_(False)
            if "all before the last block" in name and not part.startswith(("blocks.3.", "norm", "head")):
                parameter.requires_grad_(False)
            if "the embedding" in name and part.startswith("embedding"):
                parameter.requires_grad_(False)


SITUATIONS = [
    "gradients add up over both steps",
    "gradients add up over both steps of an untied model",
    "gradients are dropped between the steps",
    "a batch is evaluated between the steps",
    "the second step's sequences are longer",
    "a whole block is frozen before",
    "a whole block is frozen after",
    "weights are frozen before",
    "weights are frozen after",
    "all before the last block of an untied model is frozen before",
    "the embedding of an untied model is frozen after",
    "the embedding is frozen before",
]


def situation_of_rank(setup: Setup, name: str) -> dict[str, float]:
    return situation(name, setup, Grid(**setup.grid))


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "message-driven"])
@pytest.mark.parametrize("grid", [{"pipe": 2, "data": 2}, {"pipe": 2, "z": 2}, {"pipe": 2, "x": 2}], ids=str)
@pytest.mark.parametrize("options", [{}, {"reshard": "gradients_after_step"}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("name", SITUATIONS)
def test_steps_follow_each_other_as_plain_ones_do_whatever_is_done_between(ranks, schedule, grid, options, name):
    check(ranks, Setup(grid, schedule, 1, options), situation_of_rank, name)


# Compiled blocks.


def step_with_compiled_blocks(setup: Setup, is_before: bool, batch: dict[str, Tensor]) -> dict[str, float]:
    """Blocks are compiled before the model is cut, or after."""
    grid, plain, model = Grid(**setup.grid), gpt(), gpt()
    expected = plain(**batch)
    expected.backward()
    if is_before:
        _compile_blocks(model)
    model, pipeline = setup.build(model, grid)
    if not is_before:
        _compile_blocks(model)
    with pipeline:
        loss = pipeline.step(**of_rank(batch, grid))
    return far_from_plain(model, loss, plain, expected)


def _compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "message-driven"])
@pytest.mark.parametrize("grid", [{"pipe": 2}, {"pipe": 2, "x": 2}, {"pipe": 2, "z": 2}], ids=str)
@pytest.mark.parametrize("is_before", [False, True], ids=["after", "before"])
def test_blocks_that_are_compiled_train_the_same(ranks, schedule, grid, is_before):
    check(ranks, Setup(grid, schedule, 2), step_with_compiled_blocks, is_before, text(8))
