# SPDX-License-Identifier: Apache-2.0
"""Losses of a user's own model: replaced by the sharded one if they are its equal, and refused where they mislead."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode

from stretto.models import GPT, GPTConfig
from stretto.models.gpt import NextTokenLoss
from stretto.parallel import Grid, count_collectives, gather, layout_of, mean_over_batch, parallelize, validate
from stretto.parallel.layers.loss import MeansOverBatch
from stretto.parallel.layers.weight_shard import WeightShard
from stretto.parallel.model_loss import take_means_over_batch
from tests.differences import largest
from tests.parallel.training import Sizes, distance, my_rows

VOCAB = 11
ROLES = {"lookup": "embedding", "head": "head"}
INPUTS, INPUT_LABELS = torch.linspace(-1, 1, 64).view(8, 8).sin(), torch.arange(8) * 3 % 8
TOKENS = torch.arange(24).view(4, 6) * 5 % VOCAB


class Tagger(nn.Module):
    """Looks each token up and tells its tag: its forward returns tags' logits or, of targets, a loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.lookup, self.head, self.loss = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), loss

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.lookup(tokens.flatten()))
        return logits if targets is None else self.loss(logits, targets.flatten())


class WithoutCount(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()


class NextToken(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), NextTokenLoss(), WithoutCount()], ids=str)
def test_a_mean_cross_entropy_may_have_the_role_of_the_loss(loss: nn.Module) -> None:
    validate(Tagger(loss), {"x": 2}, roles={**ROLES, "loss": "loss"})


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.arange(1.0, VOCAB + 1)),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.NLLLoss(),
        NextToken(),
        nn.BCEWithLogitsLoss(),
    ],
    ids=str,
)
def test_a_loss_that_the_sharded_one_does_not_equal_is_refused(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"loss \({type(loss).__name__}\).* is not the mean cross-entropy"):
        validate(Tagger(loss), {"x": 2}, roles={**ROLES, "loss": "loss"})


def test_a_loss_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no submodule has the role 'head'"):
        validate(
            Tagger(nn.CrossEntropyLoss()), {"data": 2}, roles={"lookup": "embedding", "head": "colwise", "loss": "loss"}
        )


class OverBatch(nn.Module):
    """A smoothed loss over the global batch: what a user would write."""

    def __init__(self, grid: Grid | None) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
        return total / len(targets) if self.grid is None else mean_over_batch(total, len(targets), self.grid) * 1.0


def tagger(loss: nn.Module) -> Tagger:
    torch.manual_seed(1)
    return Tagger(loss).double()


def own_losses(sizes: Sizes) -> tuple[list[str], float]:
    """The errors for means over a rank's own rows, and how far gradients of one over the batch are from the plain."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    mine = TOKENS[my_rows(grid, len(TOKENS))]
    model = parallelize(tagger(nn.CrossEntropyLoss()), grid, roles=ROLES)
    messages = []
    plain_forward = model.forward
    for make_output in (lambda loss: loss, lambda loss: (None, loss), lambda loss: {"loss": loss}):
        model.forward = lambda *args, make_output=make_output: make_output(plain_forward(*args))
        try:
            model(mine, mine)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    plain, model = tagger(OverBatch(None)), parallelize(tagger(OverBatch(grid)), grid, roles=ROLES)
    plain(TOKENS, TOKENS).backward()
    model(mine, mine).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return messages, largest(distance(gather(ours.grad, layout_of(ours)), theirs.grad) for ours, theirs in pairs)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1)], ids=str)
def test_a_mean_over_one_ranks_rows_is_refused_where_ranks_have_parts_of_the_batch(ranks, sizes):
    for messages, far in ranks(2).run(own_losses, sizes):
        assert ["mean_over_batch" in words for words in messages] == [sizes[1] == 1] * 3
        assert far < 1e-12


def sums_over_x(sizes: Sizes) -> list[int]:
    """Return how many sums over x a loss takes while gradients are recorded, and while they are not."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(tagger(nn.CrossEntropyLoss()), grid, roles={**ROLES, "loss": "loss"})
    found = []
    for records in (True, False):
        with count_collectives(grid) as counts, torch.set_grad_enabled(records):
            model(TOKENS, TOKENS)
        found.append(sum(call.axis == "x" for call in counts.calls))
    return found


def test_an_evaluation_computes_no_gradients(ranks):
    for recorded, evaluated in ranks(2).run(sums_over_x, (1, 2, 1, 1)):
        assert evaluated == recorded - 1  # that of the head's input's gradient


def loss_of_other_targets(shards_sequence: bool) -> tuple[list[str], float]:
    """The errors for more targets than there are tokens, and fewer; then, how far a right loss is from one rank's.

    A slice of the loss takes all of the tokens, so that targets that are too many lie beyond the last one.
    """
    model = GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=VOCAB, max_seq_len=6)).double()
    expected = model(TOKENS, TOKENS).detach()
    model = parallelize(model, Grid(x=2), shard_sequence=shards_sequence)
    messages = []
    with mock.patch("stretto.parallel.layers.loss.LOGITS_SLICE", TOKENS.numel() * (VOCAB + 1) // 2):
        for targets in (torch.cat((TOKENS, TOKENS)), TOKENS[:1]):
            with pytest.raises(ValueError, match="targets") as error:
                model(TOKENS, targets)
            messages.append(str(error.value))
        return messages, distance(model(TOKENS, TOKENS).detach(), expected)


@pytest.mark.parametrize("shards_sequence", [False, True])
def test_each_token_has_one_target(ranks, shards_sequence):
    for messages, far in ranks(2).run(loss_of_other_targets, shards_sequence):
        rest = "there are logits for 24 tokens: give each token a target, -100 where it has none"
        assert messages == [f"targets [8, 6] are 48, but {rest}", f"targets [1, 6] are 6, but {rest}"]
        assert far < 1e-12


def train_head(sizes: dict[str, int], vocab: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients and loss of two micro-batches. The head's weight, as its loss gathers it, must never be written to."""
    grid = Grid(**sizes)
    torch.manual_seed(3)
    config = GPTConfig(layers=1, hidden=8, heads=2, vocab=vocab, max_seq_len=6, tie_embeddings=False)
    model = parallelize(GPT(config), grid, **options)
    gathered: list[tuple[Tensor, Tensor]] = []
    gather_weight = WeightShard.gather

    def gather_and_note(shard: WeightShard, *args: Any, **kwargs: Any) -> Any:
        found = gather_weight(shard, *args, **kwargs)
        gathered.append((found.rows, found.rows.clone()))
        return found

    text = torch.randint(vocab, (2, 4, 7))
    losses = []
    with mock.patch.object(WeightShard, "gather", gather_and_note):
        for part in text:
            mine = part[my_rows(grid, 4)]
            losses.append(model(mine[:, :-1], mine[:, 1:]))
            losses[-1].backward()
    assert len(gathered) >= 10
    assert all(torch.equal(rows, copy) for rows, copy in gathered)
    found = {name: gather(p.grad, layout_of(p)) for name, p in model.named_parameters()}
    return found | {"loss": torch.stack(losses).detach()}


def train_head_plainly(vocab: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=vocab, max_seq_len=6, tie_embeddings=False))
    losses = []
    for part in torch.randint(vocab, (2, 4, 7)):
        losses.append(F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()))
        losses[-1].backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"loss": torch.stack(losses).detach()}


@pytest.mark.parametrize("vocab", [64, 63, 65, 128])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"x": 2}, {}), ({"z": 2}, {}), ({"z": 2}, {"reshard": "after_forward"}), ({"x": 2}, {"shard_sequence": True})],
    ids=str,
)
@pytest.mark.sampled(2)
def test_a_loss_leaves_the_heads_weight_as_it_is_whether_it_is_padded_or_not(ranks, sizes, options, vocab):
    """A rank's part of the vocabulary is padded to 64 rows; without padding the weight is multiplied as it lies."""
    right = train_head_plainly(vocab)
    for found in ranks(2).run(train_head, sizes, vocab, options):
        for name, value in right.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def train_without_targets() -> tuple[bool, float]:
    """Whether the loss of a batch without targets is NaN, as torch's is, and its largest gradient."""
    model = parallelize(GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=VOCAB, max_seq_len=6)), Grid(x=2))
    loss = model(TOKENS, torch.full_like(TOKENS, -100))
    loss.backward()
    return bool(loss.isnan()), largest(gather(p.grad, layout_of(p)).abs().max().item() for p in model.parameters())


def test_a_batch_without_targets_changes_no_gradients(ranks):
    assert ranks(2).run(train_without_targets) == [(True, 0.0)] * 2


def scaled_gradients(factor: float) -> Tensor:
    """The head's gradient of a loss times a factor, and that of the loss times the factor."""
    torch.manual_seed(3)
    config = GPTConfig(layers=1, hidden=8, heads=2, vocab=64, max_seq_len=6, tie_embeddings=False)
    model = parallelize(GPT(config), Grid(), dtype=torch.bfloat16)
    found = []
    for part in (1.0, factor):
        model.zero_grad()
        (model(TOKENS, TOKENS) * part).backward()
        found.append(gather(model.head.weight.grad, layout_of(model.head.weight)))
    return torch.stack([(found[0] * factor).bfloat16().float(), found[1]])


def test_a_losss_factor_is_not_rounded_to_16_bits(ranks):
    """Such as a micro-batch's share of the targets: in bf16, 0.33437 is 0.12% less."""
    ((wanted, found),) = ranks(1).run(scaled_gradients, 0.33437)
    assert torch.equal(found, wanted)


def differences_in_fp16(options: dict[str, Any]) -> dict[str, float]:
    """How far gradients in fp16 of a loss over 2^24 targets, scaled by as much, are from those of the loss over one."""
    model = parallelize(GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=VOCAB, max_seq_len=6)), Grid(x=2), **options)
    found = []
    for targets in (1, 1 << 24):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=not options):
            loss = model(TOKENS, TOKENS, num_targets=targets)
        (loss * targets).backward()
        found.append([gather(p.grad, layout_of(p)) for p in model.parameters()])
    return {name: distance(a, b) for (name, _), a, b in zip(model.named_parameters(), *found, strict=True)}


def test_small_gradients_of_fp16_are_scaled_before_they_are_rounded(ranks):
    """A GradScaler multiplies the loss, which has been divided by the number of targets."""
    for options in ({}, {"dtype": torch.float16}):
        for found in ranks(2).run(differences_in_fp16, options):
            assert set(found.values()) == {0}, found


class Auxiliary(nn.Linear):
    """A layer that computes a loss of its own."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = super().forward(x)
        return y if labels is None else (y, F.cross_entropy(y, labels))


class WithAuxiliaryLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), Auxiliary(8, 8)])
        self.fails = False

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.layers[1](self.layers[0](x if not self.fails else x[..., :3]))
        y, loss = self.layers[2](x, labels)
        return loss + F.cross_entropy(2 * y, labels)


def means_of_a_model(expected: float) -> tuple[list[str], list[str]]:
    """The functions of torch that a mode over the batch sees, and what is wrong."""
    seen: list[str] = []

    class Watched(MeansOverBatch):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    grid, model = Grid(data=2), WithAuxiliaryLoss()
    take_means_over_batch(model, Watched(grid))
    x, labels = (each[my_rows(grid, len(each))] for each in (INPUTS, INPUT_LABELS))
    wrong = [] if abs(model(x, labels=labels).item() - expected) < 1e-6 else ["the mean"]
    model.fails = True
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(x, labels=labels)
    wrong += [] if _get_current_function_mode() is None else ["a mode is left"]
    model.fails = False
    wrong += [] if abs(model(x, labels=labels).item() - expected) < 1e-6 else ["the mean after an error"]
    return seen, wrong


def test_layers_that_compute_no_loss_run_without_the_mode_that_takes_means_over_the_batch(ranks):
    expected = WithAuxiliaryLoss()(INPUTS, INPUT_LABELS).item()
    for seen, wrong in ranks(2).run(means_of_a_model, expected):
        assert wrong == []
        assert seen.count("linear") == 2  # the auxiliary layer's, of two passes
        assert "relu" not in seen
