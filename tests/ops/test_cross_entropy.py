# SPDX-License-Identifier: Apache-2.0
"""Kernels of cross-entropy in Triton's interpreter, beside torch's softmax in fp64, and compiled for GPUs."""

from unittest import mock

import pytest
import torch
from tests.differences import largest
from tests.ops.moe.oracle import draw
from tests.parallel.training import distance, my_rows
from torch.nn import functional

from stretto.models import GPT, GPTConfig
from stretto.ops import cross_entropy
from stretto.parallel import Grid, gather, parallelize
from stretto.parallel.layers.loss import LossOfRows

SEED = 83
SHAPES = [(5, 4200, 4197), (3, 64, 0), (2, 128, 128), (0, 64, 61)]  # tokens, columns, and how many of these count


def far_from_softmax(dtype, tokens, stride, columns):
    """Return how far the kernels' statistics and gradients are from softmax in fp64, to their own size."""
    logits = (4 * draw(SEED, tokens, stride)).to(dtype)
    targets = torch.arange(tokens) * 1400 - 1  # the first is no column, and the fourth one that does not count
    wide, is_here = logits[:, :columns].double(), (targets >= 0) & (targets < columns)
    greatest, sums, of_targets = cross_entropy.read_statistics(logits, targets, columns)
    if not columns:
        return [float(greatest.max() > -torch.inf), sums.abs().max().item(), of_targets.abs().max().item()]
    one = torch.zeros_like(wide)
    one[is_here, targets[is_here]] = 1
    scale = draw(SEED + 1, tokens).float()
    expected = (wide.softmax(1) - one) * scale[:, None].double()
    found = logits.clone()
    cross_entropy.write_gradients(found, targets, greatest, sums, scale, columns)
    assert (found[:, columns:] == 0).all()
    pairs = (
        (greatest.double() + sums.double().log(), wide.logsumexp(1)),
        (of_targets.double(), (wide * one).sum(1)),
        (found[:, :columns].double(), expected),
    )
    return [distance(ours, theirs) for ours, theirs in pairs]


def all_far_from_softmax():
    return [far_from_softmax(dtype, *shape) for dtype in (torch.bfloat16, torch.float32) for shape in SHAPES]


def test_statistics_and_gradients_are_those_of_softmax(interpret):
    (found,) = interpret(1, all_far_from_softmax)
    for far in found[: len(SHAPES)]:
        assert largest(far[:2]) < 1e-6
        assert far[2] < 2**-8  # rounded once, to bf16
    assert largest(largest(far) for far in found[len(SHAPES) :]) < 1e-6


def losses_on(vocab, sizes):
    """The loss and gradients of a model on a grid, by kernels and by torch's operators: how far they are apart."""
    found = []
    tokens = torch.arange(24).view(4, 6) * 5 % vocab
    targets = tokens.roll(1, 1).masked_fill(tokens % 7 == 0, -100)
    for suits in (True, False):
        torch.manual_seed(0)
        model = GPT(GPTConfig(1, hidden=8, heads=2, vocab=vocab, max_seq_len=6, bias=False, tie_embeddings=False))
        grid = Grid(**sizes)
        model = parallelize(model, grid)
        rows = my_rows(grid, len(tokens))
        with (
            mock.patch.object(cross_entropy, "suits_kernels", lambda logits, suits=suits: suits),
            mock.patch("stretto.parallel.layers.loss.LOGITS_SLICE", 60),  # several slices
        ):
            loss = model(tokens[rows], targets[rows])
            with torch.no_grad():
                evaluated = model(tokens[rows], targets[rows])
            loss.backward()
        assert evaluated.item() == loss.item()
        found.append((loss.detach(), [gather(parameter.grad) for parameter in model.parameters()]))
    (loss, gradients), (other, others) = found
    return [distance(loss, other), *map(distance, gradients, others)]


# Of a vocabulary of 3 one rank has one column, beside padding.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("vocab", "sizes"), [(61, {"x": 2}), (61, {"y": 2}), (3, {"x": 2})], ids=str)
def test_a_loss_by_kernels_is_that_by_operators(interpret, vocab, sizes):
    for far in interpret(2, losses_on, vocab, sizes):
        assert largest(far) < 1e-5


def mean_of_rows(num_targets):
    """The loss of a rank's own rows by kernels: how far loss and gradient are from those of the global batch."""
    grid = Grid(data=2)
    logits, targets = 4 * draw(SEED, 6, 61).float(), torch.tensor([3, -100, 60, 0, -100, 7])
    wide = logits.double().requires_grad_()
    expected = functional.cross_entropy(wide, targets, ignore_index=-100, reduction="sum") / (num_targets or 4)
    expected.backward()
    rows = my_rows(grid, len(targets))
    own = logits[rows].clone().requires_grad_()
    with mock.patch.object(cross_entropy, "suits_kernels", return_value=True):
        loss = LossOfRows(grid, is_averaged=False)(own[None], targets[None, rows], num_targets)
        of_none = LossOfRows(grid, is_averaged=False)(own[None], torch.full_like(targets[None, rows], -100))
    loss.backward()
    assert torch.equal(own.detach(), logits[rows])
    found = [distance(loss.double(), expected), distance(own.grad.double(), wide.grad[rows])]
    own.grad = None
    of_none.backward()  # of a NaN, whose gradients are zeros, as torch's
    assert not own.grad.any()
    return found


@pytest.mark.parametrize("num_targets", [None, 9])
def test_a_loss_of_whole_logits_by_kernels_is_that_of_the_global_batch(interpret, num_targets):
    for far in interpret(2, mean_of_rows, num_targets):
        assert largest(far) < 1e-6
