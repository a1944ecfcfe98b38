# SPDX-License-Identifier: Apache-2.0
"""Evaluates a language model on held-out sequences: mean loss over all of their targets, and perplexity."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.axes import BATCH
from stretto.parallel import Grid
from stretto.train.data.dataset import IGNORED_TARGET, SequenceDataset

Read = Callable[[SequenceDataset, NDArray[np.int64]], tuple[Tensor, Tensor]]
MeanLoss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    compute_loss: MeanLoss,
    read: Read,
    dataset: SequenceDataset,
    sequences: Sequence[int],
    *,
    rows: int,
    grid: Grid,
) -> Mapping[str, float | None]:
    """Compute the loss in nats per token, without dropout, and e to its power. Collective.

    Every target counts once, whatever the grid: batches are summed by their numbers of targets, in float64. rows:
    sequences that a rank takes at a time. The last batch is filled up with rows that have no target. Values that are
    not finite are None.
    """
    parts, coordinate = grid.size(BATCH), grid.coordinate(BATCH)
    total = torch.zeros((), dtype=torch.float64, device=grid.device)
    num_targets = 0
    was_training = model.training
    model.eval()
    try:
        for first in range(0, len(sequences), parts * rows):
            batch = np.array(sequences[first : first + parts * rows], dtype=np.int64)
            places = coordinate * rows + np.arange(rows)
            tokens, targets = read(dataset, batch[np.minimum(places, len(batch) - 1)])
            targets[max(0, len(batch) - coordinate * rows) :] = IGNORED_TARGET
            count = dataset.num_targets(batch)
            total += compute_loss(model, tokens, targets, count).double() * count
            num_targets += count
    finally:
        model.train(was_training)
    loss = float(total) / num_targets
    return {"evaluation_loss": _finite(loss), "perplexity": _finite(math.exp(loss) if loss < 700 else math.inf)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
