"""Reports: plots and tables from what runs leave in their folders."""

from stretto.report.loss_plot import plot_loss
from stretto.report.run import Run, largest_difference, read_metrics, read_run, write_report

__all__ = ["Run", "largest_difference", "plot_loss", "read_metrics", "read_run", "write_report"]
