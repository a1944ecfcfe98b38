# SPDX-License-Identifier: Apache-2.0
"""Sums of rows over ranks, with residual and norm, that `decoding` and `invariant` share.

norm            residual and norm of a tile of rows, for kernels and for torch
kernel          the kernel that adds up rows of packets, and goes on with the norm
"""
