# SPDX-License-Identifier: Apache-2.0
"""Synthetic samples with a signal to learn: any number of them, computed on demand without a file."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.recommendation.data.batch import ClickBatch, offsets_of
from stretto.train.data.hashing import Words, key_of, mix, uniform

# Row popularity is skewed, as in real logs: row = rows x u^SKEW, where u is uniform.
SKEW = 3.0
# Standard deviations of a logit's two parts. The best possible AUC with them is about 0.88.
FROM_TABLES, FROM_NUMBERS = 2.0, 1.0
LABEL, LENGTHS, NUMBERS, ROWS, TASTE, WEIGHTS = range(6)  # streams of random numbers


class SyntheticClicks:
    """A data set of `samples` samples, each a function of `seed` and its number.

    rows, pooling: of each table, its number of rows and the rows of a bag. is_jagged: a bag has 0 to 2 x pooling rows,
    on average pooling. Every row has a hidden value and every dense feature a hidden weight; a label's logit is the sum
    of those of its sample.
    """

    def __init__(
        self,
        samples: int,
        rows: Sequence[int],
        pooling: Sequence[int],
        *,
        dense: int,
        seed: int,
        is_jagged: bool = False,
    ) -> None:
        if samples < 1:
            raise ValueError(f"{samples} samples are too few: give at least 1")
        self._samples, self._dense, self._seed, self._is_jagged = samples, dense, seed, is_jagged
        self._rows, self._pooling = tuple(rows), tuple(pooling)
        signs = uniform(mix(np.arange(dense, dtype=np.uint64) ^ key_of(seed, WEIGHTS))) - 0.5
        self._weights = np.sign(signs) * FROM_NUMBERS / dense**0.5

    @property
    def fingerprint(self) -> str:
        """A hexadecimal hash of what determines the samples. It does not depend on their number."""
        about = (self._rows, self._pooling, self._dense, self._seed, self._is_jagged)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._samples

    def read(self, samples: NDArray[np.int64]) -> ClickBatch:
        """Read samples by their numbers in [0, len)."""
        batch, _ = self.read_with_logits(samples)
        return batch

    def read_with_logits(self, samples: NDArray[np.int64]) -> tuple[ClickBatch, NDArray[np.float64]]:
        """Read samples, and the logits from which their labels were drawn."""
        keys = mix(mix(samples.astype(np.uint64)) ^ key_of(self._seed))
        # Exponential with mean and standard deviation 1, roughly as the logarithms of counts.
        numbers = -np.log1p(-uniform(self._draw(keys, NUMBERS, self._dense)))
        logits = (numbers - 1) @ self._weights
        parts, lengths = [], []
        for table, (rows, size) in enumerate(zip(self._rows, self._pooling, strict=True)):
            of_table = self._lengths(keys, table, size)
            widest = int(of_table.max(initial=0))
            there = np.arange(widest) < of_table[:, None]
            bags = (rows * uniform(self._draw(keys, ROWS, widest, table)) ** SKEW).astype(np.int64)
            taste = (uniform(mix(bags.astype(np.uint64) ^ key_of(self._seed, TASTE, table))) - 0.5) * 12**0.5
            share = FROM_TABLES / len(self._rows) ** 0.5
            logits += share * (taste * there).sum(axis=1) / np.maximum(of_table, 1) ** 0.5
            parts.append(bags[there])
            lengths.append(of_table)
        labels = uniform(self._draw(keys, LABEL, 1))[:, 0] < 1 / (1 + np.exp(-logits))
        batch = ClickBatch(
            numbers.astype(np.float32),
            labels.astype(np.float32),
            np.concatenate(parts),
            offsets_of(np.concatenate(lengths)),
        )
        return batch, logits

    def _lengths(self, keys: Words, table: int, size: int) -> NDArray[np.int64]:
        if not self._is_jagged:
            return np.full(len(keys), size, dtype=np.int64)
        return (uniform(self._draw(keys, LENGTHS, 1, table))[:, 0] * (2 * size + 1)).astype(np.int64)

    def _draw(self, keys: Words, what: int, count: int, table: int = 0) -> Words:
        """Draw random words [samples, count] from the stream `what` of a table."""
        return mix(keys[:, None] ^ mix(np.arange(count, dtype=np.uint64) ^ key_of(what, table)))
