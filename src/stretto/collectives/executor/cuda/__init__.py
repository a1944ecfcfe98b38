# SPDX-License-Identifier: Apache-2.0
"""Runs verified schedules on GPUs: fused into one kernel, by an interpreter kernel, or by copy engines.

Modules: `communicator` (a group's calls: finds the choice for each, and loads its kernel), `fused` (writes a kernel for
a schedule), `interpreter` (one kernel for all schedules), `copy_engine`, `variant` and `primitives.cu` (what fused and
interpreter kernels share), `nvrtc` (compiles and launches), `workspace` (the memory that ranks share).
"""

from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace

__all__ = ["CollectiveWorkspace", "CudaCommunicator", "FusedScheduleKernel", "InterpretedSchedule", "Variant"]
