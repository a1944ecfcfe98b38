"""The CUDA executor: a verified schedule as one kernel. Imported only where there are GPUs."""

from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.kernel import LaneKernel
from stretto.collectives.executor.cuda.source import Variant
from stretto.collectives.executor.cuda.workspace import Workspace

__all__ = ["CudaCommunicator", "InterpretedSchedule", "LaneKernel", "Variant", "Workspace"]
