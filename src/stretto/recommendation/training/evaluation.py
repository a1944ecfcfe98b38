# SPDX-License-Identifier: Apache-2.0
"""Evaluates a DLRM on held-out samples: the area under the ROC curve (AUC) and the mean loss."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stretto.parallel import Grid

Score = Callable[[NDArray[np.int64]], tuple[Tensor, Tensor]]


@torch.no_grad()
def evaluate(score: Score, samples: range, batch: int, grid: Grid) -> Mapping[str, float | None]:
    """Compute AUC and mean loss over `samples`. Collective. Returns {} on ranks other than 0.

    score: takes sample numbers [batch / ranks] and returns their logits and labels. Ranks call it equally often: the
    last batch is padded by repeating the last sample, and the padding's outputs are dropped.
    """
    scores, labels = [], []
    size = batch // grid.size("data")
    for first in range(0, len(samples), batch):
        places = first + grid.coordinate("data") * size + np.arange(size)
        logits, wanted = score(samples.start + np.minimum(places, len(samples) - 1))
        is_real = slice(0, int((places < len(samples)).sum()))
        scores.append(logits[is_real])
        labels.append(wanted[is_real])
    every_score, every_label = _gather(torch.cat(scores), grid), _gather(torch.cat(labels), grid)
    if every_score is None or every_label is None:
        return {}
    loss = F.binary_cross_entropy_with_logits(every_score.double(), every_label.double())
    return {"auc": roc_auc(every_score, every_label), "evaluation_loss": float(loss)}


def roc_auc(scores: Tensor, labels: Tensor) -> float | None:
    """Compute the exact area under the ROC curve: how often a positive's score is above a negative's.

    scores and labels (0 or 1) [samples]. Equal scores count half. Returns None if all labels are equal, or a
    score is NaN. This is the Mann-Whitney statistic: the sum of the positives' ranks, where equal scores share their
    mean rank. Raises ValueError unless there is one label for each score.
    """
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(f"scores and labels must be [samples] both, not {list(scores.shape)} and {list(labels.shape)}")
    labels = labels.bool()
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives or bool(scores.isnan().any()):
        return None
    _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0)
    twice_rank = 2 * ends - sizes + 1  # the first plus the last rank of each group of equal scores
    # Integers throughout: the sum of billions of ranks has more digits than a float.
    total = int(twice_rank[group[labels]].sum())
    return (total - positives * (positives + 1)) / (2 * positives * negatives)


def _gather(mine: Tensor, grid: Grid) -> Tensor | None:
    """Concatenate the ranks' tensors, of any lengths, on rank 0. Returns None on other ranks."""
    world, group = grid.size("data"), grid.group("data")
    if world == 1:
        return mine
    sizes = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=mine.device), group=group)
    longest = max(int(size) for size in sizes)
    is_first = grid.coordinate("data") == 0
    parts = [mine.new_empty(longest) for _ in range(world)] if is_first else None
    dist.gather(F.pad(mine, (0, longest - len(mine))), parts, group_dst=0, group=group)
    if parts is None:
        return None
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
