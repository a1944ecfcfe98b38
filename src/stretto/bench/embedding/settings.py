# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench embedding` and `stretto tune embedding`: shapes of tables, peers."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, Rounds, Tuning, require_known
from stretto.cluster.host_memory import check_room
from stretto.quantities import MAX_COUNT, MAX_REPEATS, require_least

MLPERF = "mlperf"
PEERS = ("bags", "batched", "chunked")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LookupShape:
    """The shape of an embedding look-up: global batch, tables of each rank, dim, and average indices a bag.

    tables 0 stands for MLPerf's 26 tables, distributed over all ranks.
    """

    batch: int
    tables: int
    dim: int
    pooling: int

    @classmethod
    def parse(cls, text: str) -> "LookupShape":
        """Parse "1024x64x256x70", "mlperf", or "mlperf:8192" with another batch. Raises ValueError for others."""
        name, _, batch = text.partition(":")
        parts = [batch or "65536", "0", "128", "8"] if name == MLPERF else text.split("x")
        if len(parts) != 4 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"a case is BATCHxTABLESxDIMxPOOLING or {MLPERF}, not {text!r}")
        case = cls(*(int(part) for part in parts))
        if min(case.batch, case.pooling) < 1 or (name != MLPERF and case.tables < 1):
            raise ValueError(f"a case has at least 1 sample, table and row a bag, not {text!r}")
        if case.dim % 4 or case.dim < 4:
            raise ValueError(f"a case has a dim that is a multiple of 4, not {text!r}")
        return case

    def __str__(self) -> str:
        """The form that `parse` reads."""
        if self.tables == 0:
            return MLPERF if self.batch == 65536 else f"{MLPERF}:{self.batch}"
        return f"{self.batch}x{self.tables}x{self.dim}x{self.pooling}"


@dataclass(frozen=True)
class LookupShapes:
    """Look-ups, the rows of each table (an upper bound for MLPerf's) and their dtype."""

    cases: Annotated[
        tuple[LookupShape, ...], Option("BATCHxTABLESxDIMxPOOLING (tables of each rank) or mlperf, with commas.")
    ] = (
        LookupShape(256, 16, 256, 70),
        LookupShape(1024, 64, 256, 70),
        LookupShape(4096, 64, 128, 70),
        LookupShape(65536, 7, 128, 8),
        LookupShape.parse(MLPERF),
    )
    rows: Annotated[int, Option("Rows of each table; of MLPerf's, at most.", least=1, most=MAX_COUNT)] = 100_000
    dtype: Annotated[str, Option("float32, float16 or bfloat16.")] = "float32"
    is_jagged: Annotated[
        bool, Option("Bags of 0 to twice the pooling, not of exactly that.", "--jagged/--no-jagged")
    ] = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is float32, float16 or bfloat16, not {self.dtype!r}")
        require_least(1, rows=self.rows)

    def check_room(self, ranks: int) -> None:
        """Raise ValueError if the tables of the processes of a CPU need more memory than this machine has."""
        largest = max(case.tables * case.dim for case in self.cases)
        size = 4 if self.dtype == "float32" else 2
        check_room(size * self.rows * largest, ranks, f"a case with tables of {self.rows:,} rows", "--rows")


@dataclass(frozen=True)
class EmbeddingTuning(Tuning, LookupShapes):
    """Settings of `stretto tune embedding`."""

    def problems(self, ranks: int) -> list[str]:
        """Names of the look-ups that are measured."""
        return [f"{case} {self.dtype}" for case in self.cases]


@dataclass(frozen=True)
class EmbeddingSetting(LookupShapes):
    """Settings of `stretto bench embedding`: look-ups and peers."""

    is_graph: Annotated[bool, Option("Time CUDA graphs, not eager calls.", "--graph/--no-graph")] = False
    has_backward: Annotated[bool, Option("Measure the backward pass too.", "--backward/--no-backward")] = True
    skip: Annotated[tuple[str, ...], Option("Peers to leave out: bags, batched, chunked, with commas.")] = ()
    rounds: Rounds = 2
    replays: Annotated[int, Option("Timed rows of calls in a round.", most=MAX_REPEATS)] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("peer", self.skip, PEERS)
        require_least(1, rounds=self.rounds, replays=self.replays)
