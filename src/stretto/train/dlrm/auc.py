"""The area under the ROC curve: how often a model puts a sample with a click above one without."""

import torch
from torch import Tensor


def roc_auc(scores: Tensor, labels: Tensor) -> float | None:
    """The exact area: the part of all pairs of a positive and a negative that are in order; equal scores count half.

    scores and labels (0 or 1) [samples]. None where the labels are all the same, or a score is no number. This is Mann
    and Whitney's statistic: the positives' ranks, where equal scores share their mean rank, added up. ValueError where
    there is not one label for each score.
    """
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(f"scores and labels are [samples] both, not {list(scores.shape)} and {list(labels.shape)}")
    labels = labels.bool()
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives or bool(scores.isnan().any()):
        return None
    _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0)
    twice_rank = 2 * ends - sizes + 1  # the first and the last rank of each group of equal scores, added
    # Whole numbers all the way: the sum of some billions of ranks has more digits than a float.
    total = int(twice_rank[group[labels]].sum())
    return (total - positives * (positives + 1)) / (2 * positives * negatives)
