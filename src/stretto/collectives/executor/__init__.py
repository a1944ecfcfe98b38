# SPDX-License-Identifier: Apache-2.0
"""Runs schedules: here on CPU tensors, by the processes of a group; in `cuda` on GPUs."""

from stretto.collectives.executor.host import run_on_host
from stretto.collectives.executor.plan import REDUCTIONS
from stretto.collectives.executor.processes import run_on_processes
from stretto.collectives.executor.turns import ExecutionError

__all__ = ["REDUCTIONS", "ExecutionError", "run_on_host", "run_on_processes"]
