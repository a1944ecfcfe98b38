# SPDX-License-Identifier: Apache-2.0
"""A stream of token ids in one or many files, read by position."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.train.config.options import MAX_VOCAB
from stretto.train.data.files import DataFile

# The sample that represents a whole stream of any size: 256 blocks of 16 Ki tokens.
SAMPLE_BLOCKS = 256
BLOCK_TOKENS = 1 << 14
# Linux allows a process 1024 open files by default, and a folder of text may have more files than that.
MAX_OPEN_FILES = 256


@dataclass(frozen=True)
class Segment:
    """The part of a stream in one file: `tokens` ids of numpy dtype `dtype` ("<u2"), from byte 0."""

    path: Path
    dtype: str
    tokens: int


class TokenStream:
    """The concatenated ids of all segments. A file is opened when it is first read."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = tuple(segments)
        self._ends = np.cumsum([segment.tokens for segment in self.segments], dtype=np.int64)
        self._files: dict[int, DataFile] = {}

    def __reduce__(self) -> tuple[type["TokenStream"], tuple[tuple[Segment, ...]]]:
        # An open file cannot be pickled.
        return TokenStream, (self.segments,)

    @property
    def tokens(self) -> int:
        """The number of ids in the stream."""
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Read ids [start, stop) as int64 [stop - start].

        Raises ValueError, with both sizes, if a file's size has changed before it was read, or it is cut short then.
        """
        ids = np.empty(stop - start, dtype=np.int64)
        position = start
        while position < stop:
            index, offset = self._locate(position)
            segment = self.segments[index]
            dtype, count = np.dtype(segment.dtype), min(stop - position, segment.tokens - offset)
            read = self._file(index).read(offset * dtype.itemsize, count * dtype.itemsize)
            part = np.frombuffer(read, dtype)
            ids[position - start : position - start + len(part)] = part
            position += len(part)
        return ids

    def read_checked(self, start: int, stop: int, vocab: int) -> NDArray[np.int64]:
        """Read ids as `read` does. Raises ValueError with file and position if an id is not in [0, vocab)."""
        ids = self.read(start, stop)
        if ids.max() < vocab and ids.min() >= 0:
            return ids
        at = int(np.flatnonzero((ids >= vocab) | (ids < 0))[0])
        index, offset = self._locate(start + at)
        segment, found = self.segments[index], int(ids[at])
        is_id = 0 <= found < MAX_VOCAB
        remedy = f"set vocab to at least {found + 1}" if is_id else "the file may be of another token type"
        raise ValueError(
            f"{segment.path}: token {found} at position {offset} of {segment.tokens} "
            f"is outside the vocabulary, 0 to {vocab - 1}: {remedy}"
        )

    def sampled_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of evenly spaced blocks, including the first and the last; all blocks if they are few."""
        blocks = -(-self.tokens // BLOCK_TOKENS)
        chosen = min(blocks, SAMPLE_BLOCKS)
        for number in range(chosen):
            block = number * (blocks - 1) // max(chosen - 1, 1)
            yield block * BLOCK_TOKENS, min((block + 1) * BLOCK_TOKENS, self.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A hexadecimal hash of the number of ids and of the sampled blocks.

        It does not depend on names, on how the stream is split into files, or on the stored dtype.
        """
        digest = hashlib.blake2b(str(self.tokens).encode(), digest_size=16)
        for start, stop in self.sampled_blocks():
            digest.update(self.read(start, stop).astype("<i8").tobytes())
        return digest.hexdigest()

    def _locate(self, position: int) -> tuple[int, int]:
        """Find the segment that holds a position of the stream, and the position inside it."""
        index = int(np.searchsorted(self._ends, position, side="right"))
        return index, position - int(self._ends[index]) + self.segments[index].tokens

    def _file(self, index: int) -> DataFile:
        if index not in self._files:
            if len(self._files) == MAX_OPEN_FILES:
                del self._files[next(iter(self._files))]
            segment = self.segments[index]
            self._files[index] = DataFile(segment.path, segment.tokens * np.dtype(segment.dtype).itemsize)
        return self._files[index]
