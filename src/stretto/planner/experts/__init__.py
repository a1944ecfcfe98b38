# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in plans: their layers, their communication, and how ranks may divide them."""
