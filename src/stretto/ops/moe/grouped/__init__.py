# SPDX-License-Identifier: Apache-2.0
"""Products of rows that are sorted by expert: operators, the choice of a kernel, kernels, and the order of tiles."""
