# SPDX-License-Identifier: Apache-2.0
"""Collectives as programs over chunks: traced, compiled, proved safe, stored and run.

from stretto.collectives import AllGather, algorithm, chunk, verify

@algorithm(lambda ranks: AllGather(ranks))
def ring(ranks: int) -> None:
    for rank in range(ranks):
        c = chunk(rank, "in", 0).copy(rank, "out", rank)
        for step in range(1, ranks):
            c = c.copy((rank + step) % ranks, "out", rank)

schedule = ring.compile(ranks=4, instances=2)
assert verify(schedule).ok

Modules, from a program to its run:

    language, algorithm, collective     programs of chunks, and the conditions that they fulfil
    algorithms, msccl                   those that come with Stretto; msccl-tools' scripts
    compiler, schedule, verifier        a program is compiled to a schedule, and proved; `xml` stores schedules
    executor                            runs a schedule: on CPUs, and in `executor.cuda` as a GPU kernel
    selection                           the fastest measured way to run a call
    backend                             torch.distributed's calls; its docstring follows one to its kernel
    limits, host_trial, host_benchmark  checks for other runtimes, and timed runs on processes of this machine
    joint                               a schedule and a GEMM's tiles over the same chunks, derived and proved
    two_level                           collectives between and inside nodes
"""

from typing import TYPE_CHECKING

from stretto.collectives.algorithm import Algorithm, algorithm
from stretto.collectives.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToNext,
    Broadcast,
    Buffer,
    Collective,
    Reduce,
    ReduceScatter,
)
from stretto.collectives.compiler import CompileError, compile_program
from stretto.collectives.language import Program, ProgramError, Reference, chunk, parallelize, trace
from stretto.collectives.schedule import PROTOCOLS, RankProgram, Schedule, Step, StepType, ThreadBlock
from stretto.collectives.verifier import Race, Verification, verify
from stretto.collectives.xml import ScheduleFileError, from_xml, read_schedule, to_xml, write_schedule
from stretto.lazy import attach

if TYPE_CHECKING:  # these need torch, and the rest here does not
    from stretto.collectives.backend.api import (
        call_counts,
        install,
        install_folder,
        monitored_barrier,
        run_collective,
        set_two_level,
        uninstall,
    )
    from stretto.collectives.selection import add_candidate

__all__ = [
    "PROTOCOLS",
    "Algorithm",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AllToNext",
    "Broadcast",
    "Buffer",
    "Collective",
    "CompileError",
    "Program",
    "ProgramError",
    "Race",
    "RankProgram",
    "Reduce",
    "ReduceScatter",
    "Reference",
    "Schedule",
    "ScheduleFileError",
    "Step",
    "StepType",
    "ThreadBlock",
    "Verification",
    "add_candidate",
    "algorithm",
    "call_counts",
    "chunk",
    "compile_program",
    "from_xml",
    "install",
    "install_folder",
    "monitored_barrier",
    "parallelize",
    "read_schedule",
    "run_collective",
    "set_two_level",
    "to_xml",
    "trace",
    "uninstall",
    "verify",
    "write_schedule",
]

__getattr__, __dir__ = attach(__name__)
