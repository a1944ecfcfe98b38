# SPDX-License-Identifier: Apache-2.0
"""The modules that a script for msccl-tools imports, made of what is here."""

import dataclasses
import enum
import functools
import heapq
import json
import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

from stretto.collectives.msccl import conditions, program, topologies, values

_LANGUAGE: dict[str, Any] = {
    "Buffer": values.MscclBuffer,
    "Check": program.Check,
    "Chunk": values.MscclChunk,
    "Json": program.Json,
    "MSCCLProgram": program.MSCCLProgram,
    "ReduceChunk": values.ReduceChunk,
    "Ref": program.Ref,
    "ThreadblockPolicy": values.ThreadblockPolicy,
    "XML": program.XML,
    "chunk": program.chunk,
    "create_scratch": program.create_scratch,
    # What else `from msccl.language import *` gives, and scripts have come to use.
    "Enum": enum.Enum,
    "dataclass": dataclasses.dataclass,
    "defaultdict": defaultdict,
    "field": dataclasses.field,
    "functools": functools,
    "heapq": heapq,
    "json": json,
    "sys": sys,
}
_COLLECTIVES: dict[str, Any] = {
    "AllGather": conditions.AllGather,
    "AllReduce": conditions.AllReduce,
    "AllToAll": conditions.AllToAll,
    "Collective": conditions.MscclCollective,
    "ReduceScatter": conditions.ReduceScatter,
}
_TOPOLOGIES = {
    name: getattr(topologies, name)
    for name in (
        "Topology",
        "amd4",
        "amd8",
        "binarize_topology",
        "dgx1",
        "dgx_a100",
        "distributed_fully_connected",
        "distributed_hub_and_spoke",
        "fully_connected",
        "hub_and_spoke",
        "line",
        "nvlink_only",
        "reverse_topology",
        "ring",
        "star",
    )
}


def allgather_ring_inplace(gpus: int, gpu_offset: int = 0, index_offset: int = 0, ch: int = 0) -> None:
    """A ring all-gather among `gpus` ranks from `gpu_offset` on; the first one's chunk goes to `index_offset`."""
    for position in range(gpus):
        reference = program.chunk(gpu_offset + position, values.MscclBuffer.input, 0)
        for step in range(1, gpus):
            assert reference is not None
            following = gpu_offset + (gpu_offset + position + step) % gpus
            reference = reference.copy(following, values.MscclBuffer.output, index_offset + position, ch=ch)


def allreduce_ring_inplace(gpus: int, gpu_offset: int = 0, index_offset: int = 0, ch: int = 0) -> None:
    """A ring all-reduce of `gpus` chunks from `index_offset` on, among `gpus` ranks from `gpu_offset` on."""
    for position in range(gpus):
        index = index_offset + position

        def member(step: int, position: int = position) -> int:
            return gpu_offset + (gpu_offset + position + step) % gpus

        total = program.chunk(gpu_offset + position, values.MscclBuffer.input, index)
        for step in range(1, gpus):
            following = program.chunk(member(step), values.MscclBuffer.input, index)
            assert following is not None
            assert total is not None
            total = following.reduce(total, ch=ch)
        for step in range(gpus - 1):
            assert total is not None
            total = total.copy(member(step), values.MscclBuffer.input, index, ch=ch)


def make_modules() -> dict[str, ModuleType]:
    """Stand-ins for msccl and those of its modules that a script may import, by name."""
    language = _LANGUAGE
    contents: dict[str, dict[str, Any]] = {
        "msccl": {},
        "msccl.collectives": {},
        "msccl.language": language,
        "msccl.language.buffer": {"Buffer": values.MscclBuffer, "BufferSlice": values.ScratchBuffer},
        "msccl.language.chunk": {"Chunk": values.MscclChunk, "ReduceChunk": values.ReduceChunk},
        "msccl.language.collectives": language | _COLLECTIVES,
        "msccl.language.ir": {"Buffer": values.MscclBuffer, "ThreadblockPolicy": values.ThreadblockPolicy},
        "msccl.language.routines": language
        | _COLLECTIVES
        | _TOPOLOGIES
        | {"allgather_ring_inplace": allgather_ring_inplace, "allreduce_ring_inplace": allreduce_ring_inplace},
        "msccl.topologies": _TOPOLOGIES,
        "msccl.topologies.amd": _TOPOLOGIES,
        "msccl.topologies.distributed": _TOPOLOGIES,
        "msccl.topologies.generic": _TOPOLOGIES,
        "msccl.topologies.nvidia": _TOPOLOGIES,
        "msccl.topologies.topology": _TOPOLOGIES,
    }
    modules = {name: _module(name, names) for name, names in contents.items()}
    for name, module in modules.items():
        package, _, last = name.rpartition(".")
        if package and last not in contents[package]:
            # `msccl.language.chunk` is the function, as there, and a module for `from` alone.
            setattr(modules[package], last, module)
        if any(other.startswith(f"{name}.") for other in modules):
            # A package without a place on disk: what is not here is not found elsewhere.
            module.__path__ = []
    return modules


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    def refuse(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise AttributeError(f"{name}.{attribute} is not supported (see docs/collectives.md#msccl-programs)")

    module = ModuleType(name, "A stand-in, for the length of one run.")
    module.__dict__.update(names, __getattr__=refuse, __all__=list(names))
    return module
