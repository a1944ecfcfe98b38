# SPDX-License-Identifier: Apache-2.0
"""Output of a run while it trains: progress, metrics, summaries, traces and timelines."""
