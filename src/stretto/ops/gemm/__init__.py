# SPDX-License-Identifier: Apache-2.0
"""The GEMM that all fused operators share: a tile's product, stream-K, and the configurations of kernels."""
