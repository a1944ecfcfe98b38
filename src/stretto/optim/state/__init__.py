# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of mixed-precision training: fp32 weights and moments apart from 16-bit weights and gradients."""
