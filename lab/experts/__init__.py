# SPDX-License-Identifier: Apache-2.0
"""Benches of mixtures of experts."""

ROUTINGS = ("uniform", "skewed")
"""Of tokens to experts, in the benches' settings."""
