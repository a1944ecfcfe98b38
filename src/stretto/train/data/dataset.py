# SPDX-License-Identifier: Apache-2.0
"""Data sets of sequences of one length, and the one of a token stream that is split into them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.sampler import Sampler, SequenceOrder
from stretto.train.data.stream import TokenStream


class SequenceDataset(ABC):
    """Sequences of `seq_len` inputs with as many targets. Every id is below `vocab_size`.

    has_ignored_targets: whether some targets are IGNORED_TARGET, which no loss counts. has_documents: whether sequences
    have several documents, to which attention is to keep; `read_places` gives their places. notes: what a user should
    know of the data.
    """

    seq_len: int
    vocab_size: int
    has_ignored_targets: bool = False
    has_documents: bool = False
    notes: tuple[str, ...] = ()

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hexadecimal hash of the data, which a checkpoint keeps."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int | np.integer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Read the inputs and the targets of sequence `index` of [0, len), int64 [seq_len] each."""

    def read_places(self, index: int | np.integer) -> NDArray[np.int64]:
        """Read the place of each input of a sequence in its document, or in this sequence's part of it, [seq_len]."""
        return np.arange(self.seq_len)

    def order(
        self, batch: int, seed: int, *, count: int | None = None, until: Callable[[int], int] | None = None
    ) -> SequenceOrder:
        """The order in which a run trains on the first `count` sequences (None: all), as `SequenceOrder` says."""
        return Sampler(len(self) if count is None else count, batch, seed, until)

    def description(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data besides its fingerprint, in JSON's types."""
        return {}

    def num_targets(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        """Count the targets of these sequences that a loss counts."""
        return len(indices) * self.seq_len


class TokenDataset(SequenceDataset):
    """Sequences of seq_len + 1 ids that start seq_len ids apart, so that each id is a target once.

    The remaining ids at the end are not used. Every id is below `vocab_size`.
    """

    def __init__(self, stream: TokenStream, *, seq_len: int, vocab_size: int) -> None:
        if stream.tokens < seq_len + 1:
            remedy = f"set seq_len to at most {stream.tokens - 1}" if stream.tokens > 1 else "give it more text"
            raise ValueError(
                f"{stream.source}: the data has {stream.tokens} tokens, but a sequence of "
                f"seq_len={seq_len} takes {seq_len + 1}, the last one as a target: {remedy}"
            )
        self._stream = stream
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self._check_samples()

    def _check_samples(self) -> None:
        """Check a bounded sample of the ids. Raises ValueError, as reading does."""
        for start, stop in self._stream.sampled_blocks():
            self._stream.read_checked(start, stop, self.vocab_size)

    @property
    def tokens(self) -> int:
        """The number of ids in the data, including the unused ones at the end."""
        return self._stream.tokens

    @property
    def fingerprint(self) -> str:
        """A hexadecimal hash of the number of ids and of a bounded sample of them.

        It does not depend on how the ids are split into files, on the format, or on the sequence length.
        """
        return self._stream.fingerprint

    def __len__(self) -> int:
        return (self.tokens - 1) // self.seq_len

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int | np.integer) -> NDArray[np.int64]:
        """Read sequence `index` of [0, len), int64 [seq_len + 1]: inputs [:-1] and targets [1:].

        Raises ValueError with file and position for an id outside the vocabulary.
        """
        return self._stream.read_checked(*self._span(index), self.vocab_size)

    def _span(self, index: int | np.integer) -> tuple[int, int]:
        """The ids of a sequence in the stream: from the first to after the last."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} is not one of 0 to {len(self) - 1}")
        start = int(index) * self.seq_len
        return start, start + self.seq_len + 1

    def read(self, index: int | np.integer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = self[index]
        return ids[:-1], ids[1:]
