# SPDX-License-Identifier: Apache-2.0
"""A stream of token ids in one or many files, read by position."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.quantities import MAX_VOCAB
from stretto.train.data.files import DataFile, modified_at

# The sample that represents a whole stream of any size: 256 blocks of 16 Ki tokens.
SAMPLE_BLOCKS = 256
BLOCK_TOKENS = 1 << 14
# Linux allows a process 1024 open files by default, and a folder of text may have more files than that.
MAX_OPEN_FILES = 256
FEW = 0.01  # share of ids outside the vocabulary up to which a damaged file is likelier than another tokenizer


@dataclass(frozen=True)
class Segment:
    """The part of a stream in one file: `tokens` ids of numpy dtype `dtype` ("<u2"), from byte 0."""

    path: Path
    dtype: str
    tokens: int


class TokenStream:
    """The concatenated ids of all segments. A file is opened when it is first read, and must not change from now on.

    made_of: the first of the files of which the segments were made, and can be made again.
    """

    def __init__(self, segments: Iterable[Segment], *, made_of: Path | None = None) -> None:
        self.segments, self._is_cache = tuple(segments), made_of is not None
        self.source = made_of or self.segments[0].path
        self._modified = [modified_at(segment.path) for segment in self.segments]
        self._ends = np.cumsum([segment.tokens for segment in self.segments], dtype=np.int64)
        self._files: dict[int, DataFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}  # an open file cannot be pickled

    @property
    def tokens(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Read ids [start, stop) as int64 [stop - start].

        Raises ValueError, with both sizes, if a file's size has changed before it was read, or it is cut short then.
        """
        ids = np.empty(stop - start, dtype=np.int64)
        position = start
        while position < stop:
            index, offset = self._locate(position)
            part = self._read_part(index, offset, min(stop - position, self.segments[index].tokens - offset))
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
        segment = self.segments[index]
        raise ValueError(
            f"{segment.path}: token {ids[at]} at position {offset} of {segment.tokens} is outside the vocabulary, 0 to "
            f"{vocab - 1}{self._explain_outside(vocab, ids)}"
        )

    def _explain_outside(self, vocab: int, found: NDArray[np.int64]) -> str:
        """Say how many ids are outside the vocabulary in a sample of the stream and in `found`, and what that means."""
        if self._is_cache:
            return ": this cached file is damaged: delete it, and it is written again"
        with suppress(ValueError):  # a file may have been cut short
            sampled = np.concatenate([self.read(*block) for block in self.sampled_blocks()])
            is_known = sampled.max() >= vocab or sampled.min() < 0
            found = sampled if is_known else np.concatenate([sampled, found])
        outside = found[(found >= vocab) | (found < 0)]
        counts = f", as {len(outside):,} of {len(found):,} sampled ids are: "
        if outside.min() < 0 or outside.max() >= MAX_VOCAB:
            return counts + "the file is damaged, or of another token type"
        enough = f"set vocab to at least {outside.max() + 1}"
        if len(outside) < FEW * len(found):
            return counts + f"the file is probably damaged there; if its tokenizer has such ids, {enough}"
        return counts + f"the file is of a tokenizer with more ids: {enough}"

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

    def _read_part(self, index: int, offset: int, count: int) -> NDArray[Any]:
        dtype = np.dtype(self.segments[index].dtype)
        return np.frombuffer(self._file(index).read(offset * dtype.itemsize, count * dtype.itemsize), dtype)

    def _file_bytes(self, index: int) -> int:
        """The size that a segment's file must have."""
        segment = self.segments[index]
        return segment.tokens * np.dtype(segment.dtype).itemsize

    def _file(self, index: int) -> DataFile:
        if index not in self._files:
            if len(self._files) == MAX_OPEN_FILES:
                del self._files[next(iter(self._files))]
            self._files[index] = DataFile(self.segments[index].path, self._file_bytes(index), self._modified[index])
        return self._files[index]
