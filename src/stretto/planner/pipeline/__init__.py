# SPDX-License-Identifier: Apache-2.0
"""Pipelines in plans: the times of stages, what messages and bubbles cost, memory, and the search of schedules."""
