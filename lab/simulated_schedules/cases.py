# SPDX-License-Identifier: Apache-2.0
"""The measurements that simulated schedules are held against: committed results of other benches, as cases."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RING_OF = {
    "allreduce": "ring-all-reduce",
    "allgather": "ring-all-gather",
    "reducescatter": "ring-reduce-scatter",
    "alltoall": "direct-all-to-all",
}
"""The schedules that represent NCCL's collectives. According to MSCCLang, section 7.1.1, its all-reduce is a ring."""
_ABLATED = {
    "ring-all-reduce": {"ranks": 4},
    "two-shot-all-reduce": {"ranks": 4},
    "hierarchical-all-reduce": {"nodes": 2, "gpus": 2},
    "two-step-all-to-all": {"nodes": 2, "gpus": 2},
}


@dataclass(frozen=True)
class MeasuredSchedule:
    """One measured time of a schedule.

    contest: the cases of one name compete with each other; executor: of the machine's costs; protocol: "" for the
    fastest of the executor's; parameters: of the algorithm; seconds: measured.
    """

    contest: str
    algorithm: str
    executor: str
    protocol: str
    parameters: tuple[tuple[str, int], ...]
    num_bytes: int
    mode: str
    dtype: str
    seconds: float
    tile_bytes: int | None = None
    instances: int = 1

    @property
    def ranks(self) -> int:
        return math.prod(value for _, value in self.parameters)

    @property
    def is_fitted(self) -> bool:
        """True if parameters are fitted to it: to every second size.

        Of GPUs, these are 1 KB, 16 KB, ... of 1 KB, 4 KB, 16 KB, ...; of processes, sizes double from one to the next.
        """
        power = round(math.log2(self.num_bytes))
        return power % 2 == 0 if self.executor == "sockets" else power // 2 % 2 == 1


def read_gpu_cases(results: Path) -> list[MeasuredSchedule]:
    """The cases of `lab/results/collectives`, `lab/results/collectives-2-gpus` and `lab/results/ablations`."""
    cases: list[MeasuredSchedule] = []
    for folder in ("collectives", "collectives-2-gpus"):
        data = _read(results / folder / "collectives.json")
        for row in data["rows"]:
            cases += _of_collectives(row, data["ranks"])
    for row in _read(results / "ablations" / "composition.json")["rows"]:
        cases += _of_composition(row)
    data = _read(results / "ablations" / "pipelining.json")
    for row in data["rows"]:
        cases += _of_pipelining(row, data["instances"])
    return cases


def _of_collectives(row: dict[str, Any], ranks: int) -> Iterator[MeasuredSchedule]:
    contest = f"{row['collective']}, {ranks} ranks, {row['dtype']}, {row['mode']}, {row['size']}"

    def case(algorithm: str, executor: str, protocol: str, microseconds: float) -> MeasuredSchedule:
        parameters = (("ranks", ranks),)
        return MeasuredSchedule(
            contest, algorithm, executor, protocol, parameters, row["bytes"], row["mode"], row["dtype"],
            microseconds * 1e-6,
        )  # fmt: skip

    yield case(RING_OF[row["collective"]], "nccl", "", row["nccl"])
    if row["way"] != "NCCL":
        algorithm, protocol = row["way"].split()[:2]
        yield case(algorithm, "copy-engine" if protocol == "Copy" else "fused", protocol, row["stretto"])


def _of_composition(row: dict[str, Any]) -> Iterator[MeasuredSchedule]:
    contest = f"composition, {row['algorithm'].rpartition('-all-')[2]}, {row['mode']}, {row['size']}"
    for key, executor, protocol, instances in (
        ("kernel", "fused", "LL128", 1),
        ("interpreted", "interpreter", "LL128", 16),
    ):
        if row.get(key) is not None:
            yield MeasuredSchedule(
                contest, row["algorithm"], executor, protocol, tuple(_ABLATED[row["algorithm"]].items()), row["bytes"],
                row["mode"], "bf16", row[key] * 1e-6, 64 << 10 if executor == "interpreter" else None, instances,
            )  # fmt: skip


def _of_pipelining(row: dict[str, Any], instances: int) -> Iterator[MeasuredSchedule]:
    tiles = {"whole": row["bytes"]} | {key: int(key[5:]) for key in row if key.startswith("tile ")}
    for key, tile_bytes in tiles.items():
        if row.get(key) is not None:
            yield MeasuredSchedule(
                f"pipelining, {row['mode']}, {row['size']}", row["algorithm"], "interpreter", "LL128",
                tuple(_ABLATED[row["algorithm"]].items()), row["bytes"], row["mode"], "bf16", row[key] * 1e-6,
                tile_bytes, instances,
            )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
