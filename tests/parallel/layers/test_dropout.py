# SPDX-License-Identifier: Apache-2.0
"""Dropout masks belong to global elements: a grid drops what one rank drops."""

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, checkpoint_activations, parallelize
from stretto.parallel.layers.dropout import ParallelDropout
from tests.conftest import Ranks
from tests.parallel.hugging_face import causal_lm

CONFIG = GPTConfig(layers=2, hidden=32, heads=4, vocab=61, max_seq_len=16, dropout=0.3)
GRIDS = [{"x": 4}, {"y": 4}, {"z": 4}, {"data": 2, "y": 2}, {"x": 2, "z": 2}, {"context": 2, "data": 2}]


def loss_of_one_step(sizes: dict[str, int], is_checkpointed: bool = False) -> tuple[float, float]:
    grid = Grid(**sizes)
    torch.manual_seed(0)
    model = parallelize(GPT(CONFIG).double(), grid)
    if is_checkpointed:
        checkpoint_activations(model)
    tokens = torch.arange(8 * 16).view(8, 16) % 61
    rows = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
    torch.manual_seed(1)
    loss = model(rows, rows)
    loss.backward()
    gradient = sum(p.grad.full_tensor().square().sum() for p in model.parameters())
    assert isinstance(gradient, Tensor)
    return loss.item(), gradient.item()


def all_losses() -> list[tuple[float, float]]:
    return [loss_of_one_step(sizes) for sizes in GRIDS] + [loss_of_one_step({"x": 2, "z": 2}, is_checkpointed=True)]


@pytest.mark.long
def test_every_grid_drops_the_same_elements_and_so_does_recomputation(ranks: Callable[[int], Ranks]) -> None:
    (expected,) = ranks(1).run(loss_of_one_step, {})
    for losses in ranks(4).run(all_losses):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor([expected] * len(losses)), rtol=1e-9, atol=0)


def losses_of_phi() -> list[float]:
    losses = []
    for sizes, device in (*product(({"x": 2}, {"y": 2}, {"z": 2}, {"context": 2}), ("none",)), ({"z": 2}, "cpu")):
        grid = Grid(**sizes)
        torch.manual_seed(0)
        with patch("stretto.parallel.resolve._LAUNCHED_BY_HOST", (device,)):  # the last one by blocks
            model = parallelize(causal_lm("phi", resid_pdrop=0.3, embd_pdrop=0.3).double().train(), grid)
        tokens = torch.arange(4 * 16).view(4, 16) % 61
        rows = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
        torch.manual_seed(1)
        losses.append(model(input_ids=rows, labels=rows).loss.item())
        grid.close()
    return losses


def test_dropout_between_blocks_that_no_tensor_parallel_plan_names_drops_the_same_on_every_grid(
    ranks: Callable[[int], Ranks],
) -> None:
    for losses in ranks(2).run(losses_of_phi):
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


def masks() -> tuple[Tensor, Tensor]:
    dropout = ParallelDropout(0.25, Grid(), "y")
    torch.manual_seed(3)
    ones = torch.ones(64, 32, 128)
    return dropout(ones), dropout(ones)


def shapes_of_small_inputs() -> list[torch.Size]:
    dropout = ParallelDropout(0.25, Grid(), "y")
    return [dropout(torch.ones(shape)).shape for shape in [(0, 8), (2, 0, 8), (8,), (2, 8)]]


def test_an_empty_shard_of_a_batch_and_a_bare_vector_can_be_dropped_from(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(1).run(shapes_of_small_inputs) == [[(0, 8), (2, 0, 8), (8,), (2, 8)]]


def test_the_given_share_is_dropped_and_each_call_draws_a_new_mask(ranks: Callable[[int], Ranks]) -> None:
    ((first, second),) = ranks(1).run(masks)
    for mask in (first, second):
        assert set(mask.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
        # 262,144 draws: six standard deviations of their mean are 0.005
        assert abs((mask == 0).double().mean().item() - 0.25) < 0.005
        for dim in range(3):  # no row, position or feature is dropped as a whole
            share = (mask == 0).double().mean(tuple({0, 1, 2} - {dim}))
            assert share.max() < 0.4
            assert share.min() > 0.1
    both = ((first == 0) & (second == 0)).double().mean().item()
    assert abs(both - 0.0625) < 0.005


DRIFTING = [({"x": 2}, None, False), ({"y": 2}, None, True), ({"x": 2}, ["blocks.*"], True)]


def weights_of_ranks_that_draw_more() -> list[list[Tensor]]:
    """This rank's replicated weights after three steps, before each of which the second rank drew numbers of its own.

    In the last setup the whole forward pass is recomputed, too.
    """
    found = []
    for sizes, blocks, recomputes in DRIFTING:
        grid = Grid(**sizes)
        torch.manual_seed(0)
        model = parallelize(GPT(CONFIG).double(), grid, blocks=blocks, recompute="full" if recomputes else "none")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.arange(2 * 16).view(2, 16) % 61
        for _ in range(3):
            torch.rand(grid.coordinate("x") + 700 * grid.coordinate("y"))
            optimizer.zero_grad()
            if recomputes:
                checkpoint(model, rows, rows, use_reentrant=False).backward()
            else:
                model(rows, rows).backward()
            optimizer.step()
        found.append([p.to_local().detach() for p in model.parameters() if all(s.is_replicate() for s in p.placements)])
    return found


def test_ranks_that_compute_the_same_drop_the_same_though_one_has_drawn_more_numbers(
    ranks: Callable[[int], Ranks],
) -> None:
    first, second = ranks(2).run(weights_of_ranks_that_draw_more)
    for own, other in zip(first, second, strict=True):
        assert len(own) >= 4
        assert all(map(torch.equal, own, other))
