# SPDX-License-Identifier: Apache-2.0
"""Text files as tokens: their bytes, or the ids of a Hugging Face tokenizer."""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from stretto.cluster import read_bounded, reading
from stretto.huggingface.folder import load_tokenizer_of
from stretto.train.data.cache import cached_file
from stretto.train.data.files import cut_short, file_size, read_head
from stretto.train.data.stream import Segment, TokenStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

BYTE_VOCAB = 256
HEAD_BYTES = 1 << 16
# A tokenizer needs a few hundred bytes of memory for each byte of text, so it is given pieces of the text.
PIECE_BYTES = 1 << 18
PIECES_AT_ONCE = 8
MAX_TOKENIZER_BYTES = 1 << 28


def open_bytes(files: Sequence[Path]) -> TokenStream:
    """Open files as streams of bytes, one token each, without copying them. Raises ValueError for a non-text file."""
    for file in files:
        zero = read_head(file, HEAD_BYTES).find(b"\x00")
        if zero >= 0:
            raise ValueError(f"{file}: is not text in UTF-8 or an 8-bit encoding: byte {zero} is zero")
    return TokenStream(Segment(file, "|u1", file_size(file)) for file in files)


def open_tokenized(files: Sequence[Path], tokenizer_path: Path) -> tuple[TokenStream, int]:
    """Tokenize files with a tokenizer.json, or with the tokenizer of a Hugging Face model's folder.

    Returns the ids and the vocabulary size, which every id is below.

    No special tokens are added between files or at their ends. The ids are computed once and cached under a key made
    from the text's and the tokenizer's content. Raises ValueError for a file that is not valid UTF-8, for a file that
    is not a tokenizer, and if the package tokenizers is missing.
    """
    text = open_bytes(files)
    tokenizer, description = load_any_tokenizer(tokenizer_path)
    vocab = vocab_of(tokenizer)
    dtype = "<u2" if vocab <= 1 << 16 else "<u4"

    def write_ids(output: BinaryIO) -> None:
        logger.info("tokenizing %d bytes of text with %s, once", text.tokens, tokenizer_path)
        for segment in text.segments:
            pieces = _decoded_pieces(segment.path, segment.tokens)
            while batch := list(islice(pieces, PIECES_AT_ONCE)):
                for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                    output.write(np.array(encoding.ids, dtype=dtype).tobytes())
        if output.tell() == 0:
            raise ValueError(f"{files[0]}: {tokenizer_path} makes no tokens of its text")

    cached = cached_file(f"tokens/{cache_key(text, description)}.bin", write_ids)
    return TokenStream([Segment(cached, dtype, file_size(cached) // np.dtype(dtype).itemsize)], made_of=files[0]), vocab


def vocab_of(tokenizer: "Tokenizer") -> int:
    """The vocabulary size: every id is below it."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


def load_tokenizer(path: Path) -> tuple["Tokenizer", bytes]:
    """Load a tokenizer.json, without its padding and truncation. Returns the tokenizer and the file's content."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            f"tokenizer={str(path)!r} needs the package tokenizers: pip install 'stretto[tokenizers]', "
            "or set tokenizer to 'bytes'"
        ) from error
    file_size(path)  # refuses a missing or empty one
    with reading(path):
        content = read_bounded(path, MAX_TOKENIZER_BYTES, "a tokenizer.json")
    try:
        description = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not a tokenizer.json: {error}") from error
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise ValueError(f"{path}: is not a tokenizer.json of Hugging Face tokenizers: it has no table 'model'")
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises no other
        raise ValueError(f"{path}: is not a tokenizer.json of Hugging Face tokenizers: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, content


def load_any_tokenizer(path: Path) -> tuple["Tokenizer", bytes]:
    """Load a tokenizer.json, or the tokenizer of a model's folder, as `load_tokenizer`; and what describes it."""
    if not path.is_dir():
        return load_tokenizer(path)
    from tokenizers import Tokenizer

    description = load_tokenizer_of(path).backend_tokenizer.to_str()
    tokenizer = Tokenizer.from_str(description)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer, description.encode()


def cache_key(text: TokenStream, tokenizer: bytes) -> str:
    """A key for the ids of a text, made from its content and from what describes the tokenizer."""
    key = hashlib.blake2b(text.fingerprint.encode(), digest_size=16)
    for segment in text.segments:
        # The fingerprint of a large text samples it; the modification time reveals changes between the samples.
        with reading(segment.path):
            key.update(f"{segment.tokens} {segment.path.stat().st_mtime_ns} ".encode())
    key.update(tokenizer)
    key.update(f"{PIECE_BYTES} {importlib.metadata.version('tokenizers')}".encode())
    return key.hexdigest()


def _decoded_pieces(path: Path, size: int) -> Iterator[str]:
    """Yield the text in pieces of about PIECE_BYTES. Raises ValueError with the position of an invalid UTF-8 byte.

    Also if the file does not give `size` bytes: its ids would be cached as those of the whole file.
    """
    position = 0
    with reading(path), path.open("rb") as file:
        text = file.read(PIECE_BYTES)
        while following := file.read(PIECE_BYTES):
            cut = cut_piece(text)
            yield _decode(text[:cut], path, position)
            position += cut
            text = text[cut:] + following
        if position + len(text) != size:
            raise cut_short(path, position + len(text), size)
        yield _decode(text, path, position)


def cut_piece(text: bytes) -> int:
    """Choose the end of a piece: after the last line end between two words, where tokenizers split, too.

    Text without such a line end is split before its last character, which may be incomplete.
    """
    newline = text.rfind(b"\n", 1, len(text) - 1)
    while newline > 0:
        if text[newline - 1] not in b" \t\n" and text[newline + 1] not in b" \t\r\n":
            return newline + 1
        newline = text.rfind(b"\n", 1, newline)
    cut = len(text) - 1
    while cut > len(text) - 4 and text[cut] & 0xC0 == 0x80:
        cut -= 1
    return max(cut, 0)


def _decode(piece: bytes, path: Path, position: int) -> str:
    """Decode a piece. position: of its first byte, for the message."""
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {position + error.start} is not valid UTF-8 ({error.reason}), which "
            "a tokenizer needs: convert the file, or set tokenizer to 'bytes'"
        ) from error
