# SPDX-License-Identifier: Apache-2.0
"""Products of rows whose bits depend neither on the batch nor on the number of ranks.

k is cut into `LEAVES` equal parts. Each has a sum of its own, in fp32, and the sums are added by one binary tree: first
in a rank, which holds LEAVES / ranks neighbouring leaves, then over the ranks, whose sums travel in fp32.
docs/decisions/038-invariant-sums.md has what this costs and what else was tried.

matmul          the operator: a rank's product, all-reduced or reduce-scattered, and the tree over ranks
kernels         the product of a tile: a sum for each leaf, and their tree
grouped         the same of each expert's rows with its own weight
"""

from stretto.ops.invariant.matmul import LEAVES, invariant_matmul

__all__ = ["LEAVES", "invariant_matmul"]
