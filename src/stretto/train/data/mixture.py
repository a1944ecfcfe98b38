# SPDX-License-Identifier: Apache-2.0
"""Mixes data sets by weights: each is packed into sequences by itself, and sequences alternate."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.dataset import SequenceDataset
from stretto.train.data.hashing import key_of
from stretto.train.data.sampler import Sampler, SequenceOrder


@dataclass(frozen=True)
class MixedSampler(SequenceOrder):
    """The order in which the sequences of several data sets are trained on: any part of it has them in their shares.

    lengths: sequences of each data set, which are numbered one data set after another. Item j of a data set with share
    w is due at (j + 1/2) / w, and the order is that of these times: among the first n sequences, a data set has w * n,
    give or take as many as there are data sets. Each data set has an order of its own (`Sampler`), and begins another
    epoch when it is used up. A part of the order depends only on its position and the seed, and takes memory and time
    for itself alone.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    batch: int
    seed: int
    until: Callable[[int], int] | None = None

    def take(self, first: int, count: int) -> NDArray[np.int64]:
        margin, largest = len(self.weights) + 1, max(self.weights)
        total = math.fsum(weight / largest for weight in self.weights)
        times, numbers, sources, before = [], [], [], 0
        for source, weight in enumerate(self.weights):
            share = weight / largest / total
            # All that is due before these times comes before `first`, whatever the rounding: the margin is wide.
            start = max(0, math.ceil(share * (first - margin) - 0.5))
            stop = max(start, math.ceil(share * (first + count + margin) - 0.5))
            due = np.arange(start, stop, dtype=np.uint64)
            before += start
            numbers.append(due)
            times.append((due.astype(np.float64) + 0.5) / share)
            sources.append(np.full(len(due), source))
        number, source_of = np.concatenate(numbers), np.concatenate(sources)
        order = np.lexsort((source_of, np.concatenate(times)))[first - before : first - before + count]
        number, source_of = number[order], source_of[order]
        indices = np.empty(count, dtype=np.int64)
        offset = 0
        for source, length in enumerate(self.lengths):
            chosen = source_of == source
            if chosen.any():
                own = Sampler(length, 1, int(key_of(self.seed, source)[0] >> np.uint64(1)))
                indices[chosen] = offset + own.at(number[chosen])
            offset += length
        return indices


class MixedDataset(SequenceDataset):
    """Several data sets of sequences of one length, one after another; `MixedSampler` gives their order."""

    def __init__(self, parts: Sequence[SequenceDataset], weights: Sequence[float]) -> None:
        self.parts, self.weights = tuple(parts), tuple(map(float, weights))
        self.seq_len = parts[0].seq_len
        self.vocab_size = max(part.vocab_size for part in parts)
        self.has_ignored_targets = any(part.has_ignored_targets for part in parts)
        self.has_documents = any(part.has_documents for part in parts)
        self.notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        self._ends = np.cumsum([len(part) for part in parts])

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(" ".join(part.fingerprint for part in self.parts).encode(), digest_size=16).hexdigest()

    def description(self) -> dict[str, Any]:
        files = {name: found for part in self.parts for name, found in part.description().get("files", {}).items()}
        return {"weights": list(self.weights), "lengths": [len(part) for part in self.parts]} | (
            {"files": files} if files else {}
        )

    def order(
        self, batch: int, seed: int, *, count: int | None = None, until: Callable[[int], int] | None = None
    ) -> MixedSampler:
        if count not in (None, len(self)):
            raise ValueError(f"mixed data sets are trained on as a whole: {len(self)} sequences, not {count}")
        return MixedSampler(tuple(len(part) for part in self.parts), self.weights, batch, seed, until)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int | np.integer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        part, own = self._locate(index)
        return part.read(own)

    def read_places(self, index: int | np.integer) -> NDArray[np.int64]:
        part, own = self._locate(index)
        return part.read_places(own)

    def num_targets(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        located = map(self._locate, indices)
        return sum(part.num_targets([own]) for part, own in located)

    def _locate(self, index: int | np.integer) -> tuple[SequenceDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} is not one of 0 to {len(self) - 1}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], int(index) - int(self._ends[number]) + len(self.parts[number])
