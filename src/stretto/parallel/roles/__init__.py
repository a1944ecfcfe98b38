# SPDX-License-Identifier: Apache-2.0
"""Roles of submodules: how each shards parameters (`plan`), and whether a grid can (`validation`, `unit_counts`)."""
