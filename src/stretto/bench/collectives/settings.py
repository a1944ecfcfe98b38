# SPDX-License-Identifier: Apache-2.0
"""Settings of the benches of collectives: `stretto bench collectives`, `ablations` and `compile`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stretto.bench.settings import LargestBytes, Modes, Option, Step, list_sizes, require_known

MODES = ("graph", "eager")
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall")
DTYPES = ("bf16", "fp32")
PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass(frozen=True)
class CollectivesSetting:
    """Which collectives are measured, in which dtypes, sizes (bytes of the whole array) and modes.

    tunes: time every algorithm and protocol first, and store the times in the file `table`, else in the tuning store.
    table: the file with the times by which algorithms are selected (None: the store). Raises ValueError for unknown
    names.
    """

    collectives: Annotated[tuple[str, ...], Option("Collectives, with commas.", "--only")] = COLLECTIVES
    dtypes: Annotated[tuple[str, ...], Option("bf16, fp32, with commas.")] = DTYPES
    smallest: Annotated[int, Option("Bytes of the whole array.")] = 1024
    largest: LargestBytes = 1 << 30
    step: Step = 4
    modes: Modes = MODES
    tunes: Annotated[
        bool,
        Option("Time every algorithm and protocol first, and keep the times for this machine.", "--tune/--no-tune"),
    ] = False
    table: Annotated[
        Path | None,
        Option(
            "File in which --tune keeps the times, and whose times select (default: the cache).",
            metavar="FILE",
            envvar="STRETTO_COLLECTIVES_TABLE",
        ),
    ] = None

    def __post_init__(self) -> None:
        require_known("collective", self.collectives, COLLECTIVES)
        require_known("dtype", self.dtypes, DTYPES)
        require_known("mode", self.modes, MODES)
        list_sizes(self.smallest, self.largest, self.step)
        if self.table is not None and (self.table.exists() or not self.tunes):
            from stretto.tuning import read_times

            read_times(self.table)  # refuses another kind of file, which must not be used or overwritten

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of whole arrays."""
        return list_sizes(self.smallest, self.largest, self.step)
