# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m tests.stress`, checked without torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from tests.stress.harness.catalogue import CATALOGUES
from tests.stress.harness.ledger import Ledger

from stretto.atomic_files import require_writable
from stretto.cluster.local_ranks import name_node, require_declared
from stretto.quantities import require_least

MAX_RANKS = 64


@dataclass(frozen=True)
class StressSetting:
    """Settings of a stress run. Raises ValueError for impossible settings, patterns that match nothing, and a file
    to resume from that is not a stress result.

    minutes: no batch begins later. only: patterns of configurations' names. seed: None for a new one. results: the run
    ends when each configuration has this many. resume: a file whose results the run continues. limit: seconds that a
    batch may take (None: the defaults). calls: of a batch (None: by the number of ranks). stops_at_first: end at the
    first finding. prepare: a module whose `install` ranks call before all else, such as tests.stress.late_warps. nodes:
    the nodes that the ranks are declared to be on, as STRETTO_NODES says it, which then run what puts between them.
    """

    ranks: int
    minutes: float
    only: str | None = None
    seed: int | None = None
    results: int | None = None
    resume: Path | None = None
    catalogues: tuple[str, ...] = CATALOGUES
    limit: float | None = None
    calls: int | None = None
    stops_at_first: bool = False
    prepare: str = ""
    nodes: str = ""

    def __post_init__(self) -> None:
        require_least(2, ranks=self.ranks)
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks is {self.ranks}, but must be at most {MAX_RANKS}")
        if self.nodes:
            require_declared([name_node(0, self.ranks, {"STRETTO_NODES": self.nodes})])
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes is {self.minutes}, but must be more than 0")
        if self.results is not None:
            require_least(1, results=self.results)
        if self.seed is not None:
            require_least(0, seed=self.seed)
        if self.resume is not None:
            require_writable(self.resume, "--resume")
        Ledger(self.resume)  # raises for a file of another kind
