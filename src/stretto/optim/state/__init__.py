# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of mixed-precision training: fp32 weights and moments of 16-bit weights, stored separately."""
