# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto stress`, checked without torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from stretto.atomic_files import require_writable
from stretto.bench.settings import require_least
from stretto.bench.stress.catalogue import CATALOGUES, known_names, select_names
from stretto.bench.stress.ledger import Ledger
from stretto.cluster.detection import count_gpus

MAX_RANKS = 64


@dataclass(frozen=True)
class StressSetting:
    """Settings of `stretto stress`. Raises ValueError for impossible settings, patterns that match nothing, and a file
    to resume from that is not a stress result.

    minutes: no batch begins later. only: patterns of configurations' names. seed: None for a new one. results: the run
    ends when each configuration has this many. resume: a file whose results the run continues. limit: seconds that a
    batch may take (None: the defaults). calls: of a batch (None: by the number of ranks). stops_at_first: end at the
    first finding. late_warps: insert random sleeps into the kernels, so that warps drift apart; needs a GPU.
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
    late_warps: bool = False

    def __post_init__(self) -> None:
        require_least(2, ranks=self.ranks)
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks is {self.ranks}, but must be at most {MAX_RANKS}")
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes is {self.minutes}, but must be more than 0")
        if self.results is not None:
            require_least(1, results=self.results)
        if self.seed is not None:
            require_least(0, seed=self.seed)
        if self.resume is not None:
            require_writable(self.resume, "--resume")
        if self.late_warps and not count_gpus():
            raise ValueError("warps are late on a GPU only, and torch finds none here")
        Ledger(self.resume)  # raises for a file of another kind
        if self.only is not None and self.catalogues == CATALOGUES:
            select_names(known_names(), self.only)
