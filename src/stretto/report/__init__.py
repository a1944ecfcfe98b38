# SPDX-License-Identifier: Apache-2.0
"""Plots and tables of finished runs, timelines and schedules."""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.report.loss_plot import plot_loss
    from stretto.report.run import RunRecord, largest_difference, read_metrics, read_run, remove_report, write_report
    from stretto.report.timeline import plot_timeline
    from stretto.train.observe.timeline import Timeline, read_timeline

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
    "write_report",
]

_HOMES = {
    "plot_loss": "stretto.report.loss_plot",
    "RunRecord": "stretto.report.run",
    "largest_difference": "stretto.report.run",
    "read_metrics": "stretto.report.run",
    "read_run": "stretto.report.run",
    "remove_report": "stretto.report.run",
    "write_report": "stretto.report.run",
    "plot_timeline": "stretto.report.timeline",
    "Timeline": "stretto.train.observe.timeline",
    "read_timeline": "stretto.train.observe.timeline",
}
__getattr__, __dir__ = attach(__name__, _HOMES)
