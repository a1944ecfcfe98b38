# SPDX-License-Identifier: Apache-2.0
"""Optimizers for large models. Those that know the grid are imported at first use."""

from typing import TYPE_CHECKING

from stretto.lazy import attach
from stretto.optim.adamw import AdamW
from stretto.optim.guard import guard
from stretto.optim.rowwise_adagrad import RowWiseAdagrad

if TYPE_CHECKING:
    from stretto.optim.muon import Muon, RowParts, hidden_matrices

__all__ = ["AdamW", "Muon", "RowParts", "RowWiseAdagrad", "guard", "hidden_matrices"]

__getattr__, __dir__ = attach(__name__)
