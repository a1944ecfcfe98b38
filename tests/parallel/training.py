# SPDX-License-Identifier: Apache-2.0
"""The oracle of the parity tests: plain, unparallelized training, and the same steps on a grid, compared.

The reference is a model that no Stretto code has touched but its own definition, trained in this process by a plain
PyTorch loop on the whole batch. Ranks build the same model from the same seed, put it on their grid, train on their
rows and compare what they see with the reference's record.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.execution import ReshardPolicy, TwoLevel
from stretto.parallel import Grid, checkpoint_activations, clip_grad_norm_, gather, no_sync, parallelize

Sizes = tuple[int, int, int, int] | dict[str, int]  # data, x, y, z, or any axes by name

IGNORED = -100
STEPS = 5
SEED = 20240


@dataclass(frozen=True)
class Precision:
    """A dtype, the optimizer it is compared under, and how far norm(difference) / norm(reference) may be."""

    dtype: torch.dtype
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
    tolerance: float


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


PRECISIONS = {"fp64-adamw": Precision(torch.float64, adamw, 1e-10), "fp32-sgd": Precision(torch.float32, sgd, 1e-5)}


@dataclass(frozen=True)
class Case:
    """One model and one way to train it. `make_model(*model_args)` must be importable, for ranks make it too."""

    make_model: Callable[..., nn.Module]
    model_args: tuple[Any, ...] = ()
    is_hugging_face: bool = False
    has_ignored_targets: bool = False
    micro_batches: int = 1
    checkpoints_activations: bool = False
    reshard: ReshardPolicy = "after_backward"
    shards_sequence: bool = False
    two_level: TwoLevel = False
    batch: int = 8
    seq_len: int = 16
    vocab: int = 61
    max_norm: float = 0.5


@dataclass(frozen=True)
class Trace:
    """Results of training: each step's loss and gradient norm, and the weights after the last step."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    weights: dict[str, Tensor] = field(repr=False)


def build(case: Case, precision: Precision) -> nn.Module:
    """The case's model, the same on every rank, with weights far from zero and one, where mistakes would not show."""
    torch.manual_seed(SEED)
    model = case.make_model(*case.model_args).to(precision.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(precision.dtype), alpha=0.1)
    return model


def batches(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets [batch, seq_len] of each step; ignored targets, if any, stand unevenly in the rows."""
    generator = torch.Generator().manual_seed(SEED + 1)
    for _ in range(STEPS):
        text = torch.randint(case.vocab, (case.batch, case.seq_len + 1), generator=generator)
        tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
        if case.is_hugging_face:  # these models shift the labels themselves
            targets = tokens.clone()
        if case.has_ignored_targets:
            for row in range(case.batch):
                targets[row, : (5 * row) % (case.seq_len + 3)] = IGNORED
            targets[0] = IGNORED  # with 8 ranks along the batch, one rank has nothing to learn from
        yield tokens, targets


def logits_of(case: Case, model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens).logits if case.is_hugging_face else model(tokens)


def plain_loss(case: Case, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean over valid targets, from whole logits and in the model's own dtype."""
    logits = logits_of(case, model, tokens)
    if case.is_hugging_face:
        logits, targets = logits[:, :-1], targets[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@cache
def train_plainly(case: Case, precision: Precision) -> Trace:
    """Train the case's model on the whole batch with nothing but PyTorch."""
    model = build(case, precision)
    optimizer = precision.make_optimizer(list(model.parameters()))
    losses, grad_norms = [], []
    for tokens, targets in batches(case):
        loss = plain_loss(case, model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        losses.append(loss.item())
        grad_norms.append(norm.item())
    assert max(grad_norms) > case.max_norm, "the case never clips: lower its max_norm"
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Trace(tuple(losses), tuple(grad_norms), weights)


def train_on_grid(sizes: Sizes, case: Case, precision: Precision, *, optimizes_shards: bool) -> Trace:
    """Train the case's model on this rank of the grid; the weights come back gathered.

    The optimizer is given the DTensor parameters, as a user's would be, or this rank's shards of them, as the trainer's
    is: torch works out its rules for each DTensor operation anew in every job, which takes longer than the five steps.
    """
    grid = Grid(**sizes) if isinstance(sizes, dict) else Grid(*sizes)
    options = {"reshard": case.reshard, "shard_sequence": case.shards_sequence, "two_level": case.two_level}
    model = parallelize(build(case, precision), grid, **options)
    if case.checkpoints_activations:
        checkpoint_activations(model)
    parameters = list(model.parameters())
    shards = [nn.Parameter(parameter.to_local().detach()) for parameter in parameters]
    optimizer = precision.make_optimizer(shards if optimizes_shards else parameters)
    rows = my_rows(grid, case.batch)
    losses, grad_norms = [], []
    for tokens, targets in batches(case):
        model.zero_grad()
        losses.append(accumulate(case, model, tokens[rows], targets[rows], int((targets != IGNORED).sum())))
        norm = clip_grad_norm_(model.parameters(), case.max_norm, grid)
        for shard, parameter in zip(shards, parameters, strict=True):
            shard.grad = parameter.grad.to_local()
        optimizer.step()
        grad_norms.append(norm.item())
    weights = {name: gather(parameter).detach() for name, parameter in model.named_parameters()}
    return Trace(tuple(losses), tuple(grad_norms), weights)


def my_rows(grid: Grid, batch: int) -> slice:
    """The rows of the global batch that this rank is fed."""
    count = batch // (grid.size("data") * grid.size("z"))
    start = grid.coordinate("batch") * count
    return slice(start, start + count)


def accumulate(case: Case, model: nn.Module, tokens: Tensor, targets: Tensor, num_targets: int) -> float:
    """Gradients of one step, in the case's number of micro-batches; returns the step's loss."""
    if case.is_hugging_face:
        loss = model(input_ids=tokens, labels=targets).loss
        loss.backward()
        return loss.item()
    if case.micro_batches == 1:
        loss = model(tokens, targets)
        loss.backward()
        return loss.item()
    total = 0.0
    parts = list(zip(tokens.chunk(case.micro_batches), targets.chunk(case.micro_batches), strict=True))
    assert len(parts) == case.micro_batches
    for index, (some_tokens, some_targets) in enumerate(parts):
        is_last = index == len(parts) - 1
        with nullcontext() if is_last else no_sync(model):
            loss = model(some_tokens, some_targets, num_targets=num_targets)
            loss.backward()
        total += loss.item()
    return total


def disagreements(
    sizes: Sizes, case: Case, precision: Precision, expected: Trace, optimizes_shards: bool = True
) -> dict[str, float | str]:
    """Return what this rank sees otherwise than the reference: norm(difference) / norm(reference), by name."""
    seen = train_on_grid(sizes, case, precision, optimizes_shards=optimizes_shards)
    if list(seen.weights) != list(expected.weights):
        return {"parameter names": f"{list(seen.weights)}, not {list(expected.weights)}"}
    pairs = {
        **{f"loss of step {step}": pair for step, pair in enumerate(zip(seen.losses, expected.losses, strict=True))},
        **{
            f"gradient norm of step {step}": pair
            for step, pair in enumerate(zip(seen.grad_norms, expected.grad_norms, strict=True))
        },
        **{name: (seen.weights[name], expected.weights[name]) for name in expected.weights},
    }
    distances = {name: distance(ours, theirs) for name, (ours, theirs) in pairs.items()}
    return {name: value for name, value in distances.items() if not value <= precision.tolerance}


def distance(ours: Tensor | float, theirs: Tensor | float) -> float:
    """norm(ours - theirs) / (norm(theirs), or 1 if it is 0); infinite where the shapes or dtypes differ."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    return ((ours.double() - theirs.double()).norm() / (theirs.double().norm() or 1)).item()


def factorizations(world_size: int) -> list[Sizes]:
    """Every (data, x, y, z) whose product is `world_size`."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return [
        (data, x, y, z)
        for data in divisors
        for x in divisors
        for y in divisors
        for z in divisors
        if data * x * y * z == world_size
    ]
