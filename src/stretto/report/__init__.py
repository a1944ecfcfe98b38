# SPDX-License-Identifier: Apache-2.0
"""Plots and tables of finished runs, timelines and schedules."""

import importlib
from typing import TYPE_CHECKING, Any

from stretto.deprecated import alias
from stretto.report.run import RunRecord, largest_difference, read_metrics, read_run, remove_report, write_report
from stretto.train.observe.timeline import Timeline, read_timeline

if TYPE_CHECKING:
    from stretto.report.loss_plot import plot_loss
    from stretto.report.timeline import plot_timeline

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

# Imported on use: they import matplotlib.
_PLOTS = {"plot_loss": "stretto.report.loss_plot", "plot_timeline": "stretto.report.timeline"}
_find_old_name = alias(__name__, {"Run": "RunRecord"})


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module(_PLOTS[name]), name) if name in _PLOTS else _find_old_name(name)
