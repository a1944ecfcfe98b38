"""Samples of a recommendation model: numbers, bags of rows of tables, and whether there was a click."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.hashing import key_of, mix


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


def make_bags(
    first: NDArray[np.int64], rows: Sequence[int], pooling: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices and offsets of bags whose first row is `first` [tables, samples]; the others follow from it.

    As in MLPerf's DLRM-v2, a category always brings the same other rows along, drawn evenly from its table.
    """
    samples = first.shape[1]
    parts = []
    for table, (count, size) in enumerate(zip(rows, pooling, strict=True)):
        bags = np.empty((samples, size), dtype=np.int64)
        bags[:, 0] = first[table]
        if size > 1:
            places = mix(np.arange(1, size, dtype=np.uint64) ^ key_of(table))
            bags[:, 1:] = mix(mix(first[table].astype(np.uint64))[:, None] ^ places) % np.uint64(count)
        parts.append(bags.reshape(-1))
    lengths = np.repeat(np.asarray(pooling, dtype=np.int64), samples)
    return np.concatenate(parts), offsets_of(lengths)


class BatchPrefetcher:
    """`read(step)` returns what `make(step)` does, and has a thread make the next step's, up to step `last`."""

    def __init__(self, make: Callable[[int], ClickBatch], *, last: int) -> None:
        self._make, self._last = make, last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-samples")
        self._next: tuple[int, Future[ClickBatch]] | None = None

    def read(self, step: int) -> ClickBatch:
        """A step's samples. Raises what making them did."""
        expected, self._next = self._next, None
        batch = expected[1].result() if expected is not None and expected[0] == step else self._make(step)
        if step < self._last:
            self._next = step + 1, self._thread.submit(self._make, step + 1)
        return batch

    def close(self) -> None:
        """End the thread, once it has made what it is at."""
        self._thread.shutdown(cancel_futures=True)
