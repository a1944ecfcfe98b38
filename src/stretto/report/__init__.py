# SPDX-License-Identifier: Apache-2.0
"""Plots and tables of finished runs, timelines and schedules."""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.report.loss_plot import plot_loss
    from stretto.report.run import RunRecord, largest_difference, read_metrics, read_run, remove_report, write_report
    from stretto.report.timeline import plot_timeline
    from stretto.train.observe.timeline import Timeline, read_timeline
    from stretto.train.observe.tracing import trace_steps

__all__ = [
    "RunRecord",
    "Timeline",
    "largest_difference",
    "plot_loss",
    "plot_timeline",
    "read_metrics",
    "read_run",
    "read_timeline",
    "remove_report",
    "trace_steps",
    "write_report",
]

__getattr__, __dir__ = attach(__name__)
