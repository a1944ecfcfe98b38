# SPDX-License-Identifier: Apache-2.0
"""Optimizers for large models."""

from stretto.optim.adamw import AdamW
from stretto.optim.guard import guard
from stretto.optim.rowwise_adagrad import RowWiseAdagrad

__all__ = ["AdamW", "RowWiseAdagrad", "guard"]
