# SPDX-License-Identifier: Apache-2.0
"""Settings of `ablations` and `backend`."""

import math
from dataclasses import dataclass
from typing import Annotated

from stretto.bench.collectives.settings import COLLECTIVES, MODES, PROTOCOLS
from stretto.bench.settings import LargestBytes, Modes, Option, Step, list_sizes, require_known, require_least

ABLATIONS = ("pipelining", "composition")
BACKEND_PARTS = ("alone", "beside", "ddp")


@dataclass(frozen=True)
class AblationsSetting:
    """The ablations to measure, with array and tile sizes (bytes), protocol and schedule instances.

    Raises ValueError for unknown names.
    """

    ablations: Annotated[tuple[str, ...], Option("pipelining, composition, with commas.", "--only")] = ABLATIONS
    protocol: Annotated[str, Option("Simple, LL or LL128.")] = "LL128"
    instances: Annotated[int, Option("Instances of the interpreted schedules; each has its own thread blocks.")] = 16
    tiles: Annotated[tuple[int, ...], Option("Bytes of tiles, with commas.")] = (16 << 10, 64 << 10, 256 << 10)
    smallest: Annotated[int, Option("Bytes of the whole array; sizes are multiples of it.")] = 1 << 20
    largest: LargestBytes = 256 << 20
    step: Step = 4
    modes: Modes = MODES

    def __post_init__(self) -> None:
        require_known("mode", self.modes, MODES)
        require_known("ablation", self.ablations, ABLATIONS)
        require_known("protocol", (self.protocol,), PROTOCOLS)
        list_sizes(self.smallest, self.largest, self.step)
        if not self.tiles or min(self.tiles) < 480:
            raise ValueError("ablations take one size of tiles or more, and tiles of at least 480 bytes")
        if self.instances < 1:
            raise ValueError(f"a schedule has at least 1 instance, not {self.instances}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of whole arrays."""
        return list_sizes(self.smallest, self.largest, self.step)


@dataclass(frozen=True)
class BackendSetting:
    """Settings of `python -m lab backend`: calls of torch.distributed alone, overlapped with products, and by DDP.

    Sizes are bytes of the whole array. work: duration of the products that overlap a collective, in multiples of the
    collective's own by NCCL. Raises ValueError for unknown names and impossible sizes.
    """

    parts: Annotated[tuple[str, ...], Option("alone, beside, ddp, with commas.")] = BACKEND_PARTS
    collectives: Annotated[tuple[str, ...], Option("Collectives, with commas.", "--only")] = COLLECTIVES
    smallest: Annotated[int, Option("Bytes of the whole array.")] = 16 << 10
    largest: LargestBytes = 256 << 20
    step: Step = 4
    work: Annotated[
        float, Option("Time of the products that overlap a collective, in multiples of the collective's by NCCL.")
    ] = 1.5
    width: Annotated[int, Option("Width of DDP's linear layers.")] = 4096
    layers: Annotated[int, Option("Number of DDP's linear layers.")] = 8
    rows: Annotated[int, Option("Rows of DDP's batch on each rank.")] = 8192
    bucket_mb: Annotated[tuple[float, ...], Option("Sizes of DDP's buckets in MiB, with commas.")] = (25.0, 100.0)

    def __post_init__(self) -> None:
        require_known("part", self.parts, BACKEND_PARTS)
        require_known("collective", self.collectives, COLLECTIVES)
        list_sizes(self.smallest, self.largest, self.step)
        require_least(1, width=self.width, layers=self.layers, rows=self.rows)
        for name, number in (("--work", self.work), ("--bucket-mb", min(self.bucket_mb))):
            if not 0 < number < math.inf:
                raise ValueError(f"{name} is {number:g}, but must be a finite number above 0")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of whole arrays."""
        return list_sizes(self.smallest, self.largest, self.step)
