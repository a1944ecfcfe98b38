# SPDX-License-Identifier: Apache-2.0
"""Simulations of figures published for large clusters: each study is a command of `python -m lab`."""

STUDIED = ("frontier", "perlmutter")
"""The machines of Singh's chapter 6 (`lab.studies.machines` has their costs)."""
