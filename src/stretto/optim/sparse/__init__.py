# SPDX-License-Identifier: Apache-2.0
"""Pruned models that cost what is left of them (SAMO: Singh, chapter 4).

masks     which numbers of a parameter are left, and how they are chosen
index     where they are: a bitmap with prefix sums, or int32 positions; compresses and expands
kernels   the same on GPUs
weights   dense 16-bit weights beside optimizer state of what is left
"""

from stretto.optim.sparse.index import BitmapIndex, FullIndex, PositionIndex, SparseIndex, make_index
from stretto.optim.sparse.masks import EarlyBird, Masks, WeightMask

__all__ = ["BitmapIndex", "EarlyBird", "FullIndex", "Masks", "PositionIndex", "SparseIndex", "WeightMask", "make_index"]
