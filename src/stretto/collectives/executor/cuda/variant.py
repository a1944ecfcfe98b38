# SPDX-License-Identifier: Apache-2.0
"""Variants of collectives' CUDA kernels: dtype, reduction and protocol, as macros before their sources."""

from dataclasses import dataclass
from importlib.resources import files

from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace
from stretto.collectives.schedule import Schedule

ELEMENTS = {
    "float64": "double",
    "float32": "float",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
}
OPERATIONS = {"sum": "SUM", "avg": "SUM", "max": "MAX", "min": "MIN", "prod": "PROD"}
PROTOCOLS = {"LL": "LL", "LL128": "LL128", "Simple": "SIMPLE"}
DATA_BYTES = {"LL": 8, "LL128": 15, "Simple": 16}
"""The data bytes in every 16 bytes of a mailbox; the rest are flags."""
MAX_THREADS = 512


@dataclass(frozen=True)
class Variant:
    """The compile-time properties of a kernel. unroll: 16-byte vectors per thread and iteration."""

    dtype: str
    reduction: str
    protocol: str
    unroll: int = 1

    @property
    def is_16_bit_float(self) -> bool:
        """True if sums are made in fp32 and rounded to 16 bits."""
        return self.dtype in ("float16", "bfloat16")


def write_macros(variant: Variant, world_size: int, rank: int | None = None) -> str:
    """The definitions that the C++ sources expect. rank: None for a source that is the same on all ranks."""
    macros = {
        "ELEMENT": ELEMENTS[variant.dtype],
        "OPERATION": OPERATIONS[variant.reduction],
        "IS_AVERAGE": int(variant.reduction == "avg"),
        "PROTOCOL": PROTOCOLS[variant.protocol],
        "WORLD": world_size,
        "UNROLL": variant.unroll,
    } | ({} if rank is None else {"RANK": rank})
    return "".join(f"#define {name} {value}\n" for name, value in macros.items())


def read_sources(*names: str) -> str:
    """The CUDA C++ files of this package, by their paths below its folder."""
    folder = files("stretto.collectives.executor.cuda")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def require_runnable(
    schedule: Schedule, workspace: CollectiveWorkspace, variant: Variant, *, puts: bool = False
) -> None:
    """Raise ValueError for a schedule for another number of ranks, or a protocol that these links do not support.

    puts: whether its kernel puts to other nodes.
    """
    if workspace.nodes and not puts:
        raise ValueError(
            f"{schedule.name}: the group's ranks are on {len(set(workspace.nodes))} nodes, between which the "
            "interpreter alone puts: install the schedule, or make an InterpretedSchedule"
        )
    if schedule.collective.ranks != workspace.world_size:
        raise ValueError(
            f"the schedule {schedule.name} is made for {schedule.collective.ranks} ranks, the group has "
            f"{workspace.world_size}"
        )
    workspace.require_lines_for(variant.protocol, schedule.name)
