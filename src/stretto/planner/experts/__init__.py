# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in plans: their layers, what they send, and the ways in which ranks may divide them."""
