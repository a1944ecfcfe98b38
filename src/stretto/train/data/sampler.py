# SPDX-License-Identifier: Apache-2.0
"""Chooses the sequences of each step: a shuffle of the data set that is computed on demand and never stored."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.hashing import mix

# Pairs of Feistel rounds. Four rounds make a strong pseudorandom permutation of a large domain (Luby and Rackoff,
# 1988); it takes about sixteen until all orders of five or six sequences are equally likely. Changing this changes the
# order of the data in every run.
ROUND_PAIRS = 8


class SequenceOrder(ABC):
    """The order in which the sequences of a data set are trained on, without an end.

    Attributes: `batch`, the sequences of a step; `until`, where batches differ, those of the first so many steps.
    """

    batch: int
    until: Callable[[int], int] | None

    @abstractmethod
    def take(self, first: int, count: int) -> NDArray[np.int64]:
        """The indices of the `count` sequences from position `first` of the order on, int64 [count]."""

    def indices(self, step: int) -> NDArray[np.int64]:
        """The indices of the sequences of step `step` (the first is 0), int64 [batch], the same on every rank."""
        last_step = ((1 << 63) - self.batch) // self.batch
        if not 0 <= step < last_step:
            raise ValueError(f"step={step} must be at least 0 and below {last_step}")
        first, last = (each * self.batch if self.until is None else self.until(each) for each in (step, step + 1))
        return self.take(first, last - first)


@dataclass(frozen=True)
class Sampler(SequenceOrder):
    """The order in which `dataset_length` sequences are trained on, a global batch of `batch` of them in each step.

    Each epoch is another permutation of all sequences, and batches continue across the ends of epochs. A step's batch
    depends only on (seed, step), so a run resumes at any step, on any number of ranks. Memory and time depend on the
    batch, not on the length of the data set.
    """

    dataset_length: int
    batch: int
    seed: int
    until: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.dataset_length < 1 << 62:
            raise ValueError(f"dataset_length={self.dataset_length} must be at least 1 and below 2**62")
        if not 1 <= self.batch < 1 << 31:
            raise ValueError(f"batch={self.batch} must be at least 1 and below 2**31")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} must be at least 0 and below 2**63")

    def take(self, first: int, count: int) -> NDArray[np.int64]:
        return self.at(np.arange(first, first + count, dtype=np.uint64))

    def at(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The indices of the sequences at these positions of the order, int64 of the same shape, [n]."""
        epoch, offset = np.divmod(positions, np.uint64(self.dataset_length))
        key = mix(mix(np.full(len(positions), self.seed, dtype=np.uint64)) ^ epoch)
        # Cycle walking: the Feistel network permutes slightly more than dataset_length values. It is applied again to
        # values that are too large; the cycle returns to the range because it started there.
        indices = self._permute(offset, key)
        while (outside := indices >= self.dataset_length).any():
            indices[outside] = self._permute(indices[outside], key[outside])
        return indices.astype(np.int64)

    def _permute(self, values: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute range(rows * columns), by another permutation for each key; values and key are uint64 [n].

        A Feistel network over two digits instead of two halves of bits (Black and Rogaway, Ciphers with
        arbitrary finite domains, 2002): each round adds a hash of one digit to the other.
        """
        # About the square root, and even: with two odd radices, no round is an odd permutation.
        rows = 2 * (math.isqrt(self.dataset_length - 1) // 2 + 1)
        columns = -(-self.dataset_length // rows)
        column, row = np.divmod(values, np.uint64(rows))
        for _ in range(ROUND_PAIRS):
            key = mix(key)
            row = (row + mix(column ^ key) % np.uint64(rows)) % np.uint64(rows)
            key = mix(key)
            column = (column + mix(row ^ key) % np.uint64(columns)) % np.uint64(columns)
        return column * np.uint64(rows) + row


def rank_rows(batch: int, coordinate: int, parts: int) -> slice:
    """The rows of the global batch that the ranks at batch coordinate `coordinate` of `parts` (data * z) train on.

    Raises ValueError, with the nearest batch sizes that would do, if `parts` does not divide the batch.
    """
    if not 0 <= coordinate < parts:
        raise ValueError(f"batch coordinate {coordinate} is not one of 0 to {parts - 1}")
    if batch < 1 or batch % parts:
        below, above = batch // parts * parts, (batch // parts + 1) * parts
        nearest = f"{below} and {above} are the nearest that are" if below > 0 else f"{above} is the nearest that is"
        raise ValueError(f"batch={batch} is not divisible by data * z = {parts}: {nearest}")
    rows = batch // parts
    return slice(coordinate * rows, (coordinate + 1) * rows)
