# SPDX-License-Identifier: Apache-2.0
"""Documents as sequences: tokenized once and cached, file by file, and packed one after another without a gap.

A cached file has a word for each token: its id, and a bit that is set where a document begins. A checksum of each
64 KiB follows, so that damage is named wherever it is. A file is cached when it is whole: tokenizing that is killed
goes on at the file at which it was.
"""

import hashlib
import importlib.metadata
import logging
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stretto.cluster import reading
from stretto.execution import IGNORED_TARGET
from stretto.train.data.cache import cached_file
from stretto.train.data.dataset import TokenDataset
from stretto.train.data.files import file_size
from stretto.train.data.records import Document, read_documents
from stretto.train.data.stream import Segment, TokenStream
from stretto.train.data.text import BYTE_VOCAB, PIECE_BYTES, PIECES_AT_ONCE, cut_piece, load_any_tokenizer, vocab_of

logger = logging.getLogger(__name__)

_BEGINS = np.uint32(1 << 31)
_ID = np.uint32((1 << 31) - 1)
_BLOCK_WORDS = 1 << 14  # for each of which there is a checksum
_END = struct.Struct("<8sQII")  # magic, tokens, checksum of the checksums, 1 + the largest id
_MAGIC = b"STRDOCS1"
_END_BYTES = 1 << 16  # of a file, at either end, that its cache's key is made of
_CHECKS_IN_DESCRIPTION = 16
_FILES_IN_DESCRIPTION = 1000
_SAMPLED, _SAMPLED_FILES = 1000, 20  # documents, and files, of a sample of lengths

Encode = Callable[[list[str]], Iterable[Sequence[int] | NDArray[Any]]]


def open_documents(
    files: Sequence[Path], format: str, *, field: str, tokenizer: Path | None, separator: str | None
) -> tuple["DocumentStream", int]:
    """Tokenize the documents of files. Returns the stream of tokens and the vocabulary size, which every id is below.

    tokenizer: a tokenizer.json or a model's folder; None for bytes. separator: text whose tokens end each document.
    Raises ValueError for files, records or tokenizers that cannot be read, with their places.
    """
    encode, vocab, description = _encoder(tokenizer)
    ending = [] if separator is None else list(next(iter(encode([separator]))))
    if separator is not None and len(ending) != 1 and tokenizer is not None:
        logger.warning("data.separator=%r is %d tokens of %s", separator, len(ending), tokenizer)
    key = b"\0".join((description, repr((format, field, separator, _BLOCK_WORDS, 1)).encode()))

    def write(output: BinaryIO, file: Path) -> None:
        logger.info("tokenizing %s, once", file)
        _write_words(output, _words(read_documents(file, format, field), encode, ending))

    found = [
        _open_cached(file, cached_file(f"tokens/{_key(file, key)}.docs", partial(write, file=file))) for file in files
    ]
    return DocumentStream(found), max(vocab, *(each.vocab for each in found))


def sample_lengths(
    files: Sequence[Path], format: str, *, field: str, tokenizer: Path | None, separator: str | None
) -> list[int]:
    """Tokens of some documents of the first files, as `open_documents` would cut them: without empty ones."""
    encode = _encoder(tokenizer)[0]
    ending = 0 if separator is None else len(next(iter(encode([separator]))))
    lengths: list[int] = []
    for file in files[:_SAMPLED_FILES]:
        count = -(-_SAMPLED // min(len(files), _SAMPLED_FILES))
        for is_first, ids in _encoded(islice(read_documents(file, format, field), count), encode):
            if is_first:
                lengths.append(ending)
            lengths[-1] += len(ids)
    return [length for length in lengths if length > ending]


def _encoder(path: Path | None) -> tuple[Encode, int, bytes]:
    """Open what turns texts into ids; returns it, the vocabulary size, and a description for the cache's key."""
    if path is None:
        return (lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]), BYTE_VOCAB, b"bytes"
    tokenizer, description = load_any_tokenizer(path)
    version = importlib.metadata.version("tokenizers").encode()

    def encode(texts: list[str]) -> Iterable[Sequence[int]]:
        return (found.ids for found in tokenizer.encode_batch(texts, add_special_tokens=False))

    return encode, vocab_of(tokenizer), b"\0".join((description, version, str(PIECE_BYTES).encode()))


def _key(file: Path, description: bytes) -> str:
    """A key for a file's tokens, of its size, its time of modification, and its first and last bytes."""
    size = file_size(file)
    with reading(file), file.open("rb") as opened:
        key = hashlib.blake2b(f"{size} {file.stat().st_mtime_ns} ".encode(), digest_size=16)
        key.update(opened.read(_END_BYTES))
        opened.seek(max(0, size - _END_BYTES))
        key.update(opened.read(_END_BYTES))
    key.update(description)
    return key.hexdigest()


def _words(documents: Iterator[Document], encode: Encode, ending: list[int]) -> Iterator[NDArray[np.uint32]]:
    """Yield the words of the documents, in pieces. Documents without a token are left out."""
    is_begun = begins = False
    for is_first, ids in _encoded(documents, encode):
        if is_first:
            if is_begun and ending:
                yield np.array(ending, np.uint32)
            is_begun, begins = False, True
        if len(ids):
            words = np.array(ids, dtype=np.uint32)
            if begins:
                words[0] |= _BEGINS
            is_begun, begins = True, False
            yield words
    if is_begun and ending:
        yield np.array(ending, np.uint32)


def _encoded(documents: Iterable[Document], encode: Encode) -> Iterator[tuple[bool, Sequence[int] | NDArray[Any]]]:
    """Yield the ids of pieces of documents, and whether each is its document's first. Encodes many texts at once."""
    for batch in _batches(piece for document in documents for piece in _pieces(document.value)):
        texts = iter(encode([value for _, value in batch if isinstance(value, str)]))
        for is_first, value in batch:
            yield is_first, next(texts) if isinstance(value, str) else value


def _batches(pieces: Iterable[tuple[bool, str | list[int]]]) -> Iterator[list[tuple[bool, str | list[int]]]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= PIECES_AT_ONCE * PIECE_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _pieces(value: str | list[int]) -> Iterator[tuple[bool, str | list[int]]]:
    """Cut a long document as long texts are cut, since a tokenizer needs hundreds of bytes for each of its own."""
    if isinstance(value, list) or len(value) * 4 <= PIECE_BYTES:
        if value:
            yield True, value
        return
    data, start = value.encode(), 0
    while len(data) - start > PIECE_BYTES:
        cut = cut_piece(data[start : start + PIECE_BYTES])
        yield start == 0, data[start : start + cut].decode()
        start += cut
    yield start == 0, data[start:].decode()


def _write_words(output: BinaryIO, pieces: Iterator[NDArray[np.uint32]]) -> None:
    """Write words, checksums and the file's end."""
    checks: list[int] = []
    tokens = top = 0
    block = bytearray()

    def write_blocks(least: int) -> None:
        while len(block) >= least:
            part = bytes(block[: 4 * _BLOCK_WORDS])
            del block[: 4 * _BLOCK_WORDS]
            checks.append(zlib.crc32(part))
            output.write(part)

    for words in pieces:
        tokens += len(words)
        top = max(top, 1 + int((words & _ID).max()))
        block += words.astype("<u4").tobytes()
        write_blocks(4 * _BLOCK_WORDS)
    write_blocks(1)
    table = np.array(checks, "<u4").tobytes()
    output.write(table + _END.pack(_MAGIC, tokens, zlib.crc32(table), top))


@dataclass(frozen=True)
class CachedDocuments:
    """The tokens of the file `source`. checks: of the blocks of words, uint32 [blocks]. vocab: every id is below it."""

    source: Path
    segment: Segment
    checks: NDArray[np.uint32]
    vocab: int


def _open_cached(source: Path, cached: Path) -> CachedDocuments:
    """Open the file that `_write_words` wrote. Raises ValueError unless it is whole but for its words."""
    size = file_size(cached)
    with reading(cached), cached.open("rb") as file:
        file.seek(max(0, size - _END.size))
        end = file.read(_END.size)
        magic, tokens, check, vocab = _END.unpack(end) if len(end) == _END.size else (b"", 0, 0, 0)
        blocks = -(-tokens // _BLOCK_WORDS)
        at = max(0, size - _END.size)
        if magic == _MAGIC and size == 4 * (tokens + blocks) + _END.size:
            file.seek(at := 4 * tokens)
            table = file.read(4 * blocks)
            if zlib.crc32(table) == check:
                return CachedDocuments(source, Segment(cached, "<u4", tokens), np.frombuffer(table, "<u4"), vocab)
    raise ValueError(
        f"{cached}: is cut short, or damaged from byte {at} on (the tokens of {source}): delete it, and it is written "
        "again"
    )


class DocumentStream(TokenStream):
    """The words of the documents of several files: `read` gives ids, with a bit where a document begins.

    Each block of words is compared with its checksum whenever some of it is read.
    """

    def __init__(self, cached: Sequence[CachedDocuments]) -> None:
        super().__init__([each.segment for each in cached], made_of=cached[0].source)
        self._cached = tuple(cached)

    @cached_property
    def fingerprint(self) -> str:
        """A hexadecimal hash of all ids and of where documents begin."""
        digest = hashlib.blake2b(str(self.tokens).encode(), digest_size=16)
        for each in self._cached:
            digest.update(each.checks.tobytes())
        return digest.hexdigest()

    def describe_files(self) -> dict[str, list[int]]:
        """Each file's tokens, and a checksum of each of 16 equal parts of its blocks; none of very many files."""
        return {
            str(each.source): [each.segment.tokens, *(zlib.crc32(part.tobytes()) for part in _cut_evenly(each.checks))]
            for each in self._cached
            if len(self._cached) <= _FILES_IN_DESCRIPTION
        }

    def _file_bytes(self, index: int) -> int:
        return 4 * (self.segments[index].tokens + len(self._cached[index].checks)) + _END.size

    def _read_part(self, index: int, offset: int, count: int) -> NDArray[Any]:
        cached, segment, size = self._cached[index], self.segments[index], 4 * _BLOCK_WORDS
        first, last = offset // _BLOCK_WORDS, -(-(offset + count) // _BLOCK_WORDS)
        found = self._file(index).read(first * size, 4 * min(last * _BLOCK_WORDS, segment.tokens) - first * size)
        for block in range(first, last):
            start = (block - first) * size
            if zlib.crc32(found[start : start + size]) != cached.checks[block]:
                raise ValueError(
                    f"{segment.path}: is damaged at byte {block * size} or up to {size} bytes after it (the tokens of "
                    f"{cached.source} from {block * _BLOCK_WORDS} on): delete it, and it is written again"
                )
        return np.frombuffer(found, "<u4")[offset - first * _BLOCK_WORDS :][:count]


class DocumentDataset(TokenDataset):
    """Documents packed into sequences, one after another: what a sequence cuts off begins the next one.

    masks: whether tokens are to attend to their own document alone, whose first token then is no target; otherwise
    boundaries count for nothing.
    """

    def __init__(self, stream: DocumentStream, *, seq_len: int, vocab_size: int, masks: bool) -> None:
        self._documents, self.has_ignored_targets, self.has_documents = stream, masks, masks
        super().__init__(stream, seq_len=seq_len, vocab_size=vocab_size)

    def _check_samples(self) -> None:
        return  # there are checksums of all

    def description(self) -> dict[str, Any]:
        return {"files": files} if (files := self._documents.describe_files()) else {}

    def read(self, index: int | np.integer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        words = self._words(index)
        ids = words & _ID
        return ids[:-1], np.where(words[1:] & _BEGINS, IGNORED_TARGET, ids[1:]) if self.has_documents else ids[1:]

    def read_places(self, index: int | np.integer) -> NDArray[np.int64]:
        places = np.arange(self.seq_len)
        if not self.has_documents:
            return places
        return places - np.maximum.accumulate(np.where(self._words(index)[:-1] & _BEGINS, places, 0))

    def num_targets(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        if not self.has_documents:
            return super().num_targets(indices)
        return sum(int(np.count_nonzero(self._words(index)[1:] & _BEGINS == 0)) for index in indices)

    def __getitem__(self, index: int | np.integer) -> NDArray[np.int64]:
        return self._words(index) & _ID

    def _words(self, index: int | np.integer) -> NDArray[np.int64]:
        return self._documents.read(*self._span(index))


def _cut_evenly(blocks: NDArray[Any]) -> list[NDArray[Any]]:
    return np.array_split(blocks, _CHECKS_IN_DESCRIPTION)


def find_changes(before: Any, now: dict[str, list[int]]) -> list[str]:
    """Name the files whose tokens have changed, and from which token on.

    now: of `describe_files`. before: the same of a checkpoint, which may be anything.
    """
    before = before if isinstance(before, dict) else {}
    found = [f"{name} is not trained on any more" for name in before if name not in now]
    for name, (tokens, *checks) in now.items():
        old = before.get(name)
        if not isinstance(old, list) or len(old) != 1 + len(checks):
            found.append(f"{name} is new")
        elif old != [tokens, *checks]:
            first = next((at for at, pair in enumerate(zip(old[1:], checks, strict=True)) if pair[0] != pair[1]), 0)
            parts = _cut_evenly(np.arange(-(-tokens // _BLOCK_WORDS)))
            at = _BLOCK_WORDS * int(parts[first][0]) if old[0] == tokens and len(parts[first]) else 0
            found.append(f"{name} has changed from token {at} on: it had {old[0]} tokens, and has {tokens}")
    return found
