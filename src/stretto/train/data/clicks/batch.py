"""Samples of a recommendation model: numbers, bags of rows of tables, and whether there was a click."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ClickBatch:
    """Some samples.

    dense: float32 [samples, numbers]. labels: float32 [samples], 0 or 1. indices: int64 [total], rows of the first
    table for all samples, then those of the second, and so on. offsets: int64 [tables x samples + 1], where each bag
    begins in `indices`.
    """

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]


class ClickDataset(Protocol):
    """Samples that are read in any order."""

    @property
    def fingerprint(self) -> str:
        """Identity of the samples, in hexadecimal."""

    def __len__(self) -> int: ...

    def read(self, samples: NDArray[np.int64]) -> ClickBatch:
        """These samples, each a number of [0, len)."""


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each bag begins, and the last one's end: int64 [n + 1] of lengths [n]."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths.reshape(-1), out=offsets[1:])
    return offsets
