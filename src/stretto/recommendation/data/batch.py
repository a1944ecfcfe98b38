# SPDX-License-Identifier: Apache-2.0
"""Batches of samples for recommendation models: their format, the bags of rows in them, and their prefetching."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.hashing import key_of, mix


@dataclass(frozen=True)
class ClickBatch:
    """A batch of samples.

    dense: float32 [samples, features]. labels: float32 [samples], 1 for a click, else 0. indices: int64 [total], rows
    of the first table for all samples, then those of the second table, and so on. offsets: int64
    [tables x samples + 1], the start of each bag in `indices`.
    """

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]


class ClickDataset(Protocol):
    """A data set of samples with random access."""

    @property
    def fingerprint(self) -> str:
        """A hexadecimal hash that identifies the samples."""

    def __len__(self) -> int: ...

    def read(self, samples: NDArray[np.int64]) -> ClickBatch:
        """Read samples by their numbers in [0, len)."""


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute the start of each bag and the end of the last one, int64 [n + 1], from lengths [n]."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths.reshape(-1), out=offsets[1:])
    return offsets


def make_bags(
    first: NDArray[np.int64], rows: Sequence[int], pooling: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Make bags whose first row is `first` [tables, samples], and whose other rows are a function of it.

    As in MLPerf's DLRM-v2, a category always has the same other rows, drawn uniformly from its table. Returns indices
    and offsets.
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
    """Makes the next step's batch in a thread while the current one is trained on.

    `read(step)` returns `make(step)`, and starts making the batch of `step + 1`, up to step `last`.
    """

    def __init__(self, make: Callable[[int], ClickBatch], *, last: int) -> None:
        self._make, self._last = make, last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stretto-samples")
        self._next: tuple[int, Future[ClickBatch]] | None = None

    def read(self, step: int) -> ClickBatch:
        """Return a step's batch. Raises what `make` raised."""
        expected, self._next = self._next, None
        batch = expected[1].result() if expected is not None and expected[0] == step else self._make(step)
        if step < self._last:
            self._next = step + 1, self._thread.submit(self._make, step + 1)
        return batch

    def close(self) -> None:
        """Stop the thread after the batch that it is making."""
        self._thread.shutdown(cancel_futures=True)
