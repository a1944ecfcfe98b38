# SPDX-License-Identifier: Apache-2.0
"""`stretto bench sparse`: compress and expand beside a copy, and layers of pruned weights, dense and by cuSPARSE."""
