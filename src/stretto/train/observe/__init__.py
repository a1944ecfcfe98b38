# SPDX-License-Identifier: Apache-2.0
"""What a run shows and records of itself: progress, metrics, summaries, traces and timelines."""
