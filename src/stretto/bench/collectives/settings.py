# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench collectives` and `stretto tune collectives`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stretto.bench.settings import LargestBytes, Modes, Option, Step, Tuning, list_sizes, require_known

MODES = ("graph", "eager")
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall")
DTYPES = ("bf16", "fp32")
PROTOCOLS = ("LL", "LL128", "Simple")
TABLE_VARIABLE = "STRETTO_COLLECTIVES_TABLE"


@dataclass(frozen=True)
class CollectiveSizes:
    """Collectives, dtypes, and sizes in bytes of the whole array. Raises ValueError for unknown names."""

    collectives: Annotated[tuple[str, ...], Option("Collectives, with commas.", "--only")] = COLLECTIVES
    dtypes: Annotated[tuple[str, ...], Option("bf16, fp32, with commas.")] = DTYPES
    smallest: Annotated[int, Option("Bytes of the whole array.")] = 1024
    largest: LargestBytes = 1 << 30
    step: Step = 4

    def __post_init__(self) -> None:
        require_known("collective", self.collectives, COLLECTIVES)
        require_known("dtype", self.dtypes, DTYPES)
        list_sizes(self.smallest, self.largest, self.step)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of whole arrays."""
        return list_sizes(self.smallest, self.largest, self.step)


@dataclass(frozen=True)
class CollectivesSetting(CollectiveSizes):
    """Settings of `stretto bench collectives`, and in which modes.

    table: the file with the times by which algorithms are selected (None: the store).
    """

    modes: Modes = MODES
    table: Annotated[
        Path | None,
        Option("File whose times select algorithms (default: the cache).", metavar="FILE", envvar=TABLE_VARIABLE),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("mode", self.modes, MODES)
        if self.table is not None:
            from stretto.tuning import read_times

            read_times(self.table)  # refuses another kind of file


@dataclass(frozen=True)
class CollectivesTuning(Tuning, CollectiveSizes):
    """Settings of `stretto tune collectives`. table: the file that keeps the times (None: the store).

    schedules: a folder of schedules that are measured, too; None for none.
    """

    table: Annotated[
        Path | None,
        Option("File in which the times are kept (default: the cache).", metavar="FILE", envvar=TABLE_VARIABLE),
    ] = None
    schedules: Annotated[
        Path | None,
        Option(
            "Folder whose MSCCL XML files for so many ranks are measured, too.",
            metavar="FOLDER",
            envvar="STRETTO_SCHEDULES",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedules is not None and not any(self.schedules.glob("*.xml")):
            raise ValueError(f"{self.schedules} is no folder with schedules: it has no file *.xml")
        if self.table is not None and self.table.exists():
            from stretto.tuning import read_times

            read_times(self.table)  # another kind of file must not be overwritten

    def problems(self, ranks: int) -> list[str]:
        return [f"{name} {dtype} {size}" for name in self.collectives for dtype in self.dtypes for size in self.sizes]
