"""Samples that are computed, with a signal to learn: no file is needed, and any number of them is there."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.clicks.batch import ClickBatch, offsets_of
from stretto.train.data.hashing import Words, key_of, mix, uniform

# Some rows are looked up far more often than others, as in real logs: row = rows x u^SKEW of a uniform u.
SKEW = 3.0
# Standard deviations of a logit's two parts. The best that a model can reach with them is an AUC of about 0.88.
FROM_TABLES, FROM_NUMBERS = 2.0, 1.0
LABEL, LENGTHS, NUMBERS, ROWS, TASTE, WEIGHTS = range(6)  # what is drawn, so that no two draws agree


class SyntheticClicks:
    """`samples` samples, each a function of `seed` and its number.

    rows and pooling, by table: how many rows it has and how many are in a bag. Where `is_jagged`, a bag has from none
    to twice as many, as many on average. Every row has a hidden taste, every number a hidden weight; the sum of a
    sample's is the logit of its label.
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
        """Identity of the samples, in hexadecimal; the first of a longer data set of the same kind are the same."""
        about = (self._rows, self._pooling, self._dense, self._seed, self._is_jagged)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._samples

    def read(self, samples: NDArray[np.int64]) -> ClickBatch:
        """These samples, each a number of [0, len)."""
        batch, _ = self.read_with_logits(samples)
        return batch

    def read_with_logits(self, samples: NDArray[np.int64]) -> tuple[ClickBatch, NDArray[np.float64]]:
        """The samples, and the logits that their labels were drawn by."""
        keys = mix(mix(samples.astype(np.uint64)) ^ key_of(self._seed))
        # Exponential, as the logarithms of counts are, roughly; of mean and deviation 1.
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
        """Words [samples, count], others for everything that is drawn."""
        return mix(keys[:, None] ^ mix(np.arange(count, dtype=np.uint64) ^ key_of(what, table)))
