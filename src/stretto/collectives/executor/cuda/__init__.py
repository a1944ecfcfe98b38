# SPDX-License-Identifier: Apache-2.0
"""Runs verified schedules on GPUs: fused into one kernel, by an interpreter kernel, or by copy engines."""

from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace

__all__ = ["CollectiveWorkspace", "CudaCommunicator", "FusedScheduleKernel", "InterpretedSchedule", "Variant"]
