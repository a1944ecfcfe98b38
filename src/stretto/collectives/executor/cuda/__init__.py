"""The CUDA executor: a verified schedule as one kernel. Imported only where there are GPUs."""

from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.fused.codegen import Variant
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace

__all__ = ["CollectiveWorkspace", "CudaCommunicator", "FusedScheduleKernel", "InterpretedSchedule", "Variant"]
