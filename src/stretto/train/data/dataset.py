# SPDX-License-Identifier: Apache-2.0
"""A data set of tokens: a token stream split into sequences of one length."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.files import find_files
from stretto.train.data.stream import TokenStream
from stretto.train.data.text import BYTE_VOCAB, open_bytes, open_tokenized
from stretto.train.data.token_files import open_megatron, open_nanogpt


def open_dataset(
    path: str | list[str],
    *,
    format: str = "auto",
    tokenizer: str | None = None,
    model_folder: Path | None = None,
    seq_len: int,
    vocab: int | None = None,
    token_dtype: str = "uint16",
) -> "TokenDataset":
    """Open text or token files as sequences of `seq_len` inputs and their targets.

    path: files or folders; their tokens form one stream, in that order. format: "text", "nanogpt", "megatron", or
    "auto": a .bin file with an .idx file is Megatron-LM's, any other .bin is nanoGPT's, and everything else is text.
    tokenizer: for text, "bytes" (the default) or the path of a tokenizer.json. model_folder: a Hugging Face folder,
    whose tokenizer is the default then. token_dtype: a nanoGPT file's, "uint16", "uint32" or "int64". vocab: the
    model's vocabulary size; every id must be below it.

    The time does not depend on the files' size, except that a tokenizer reads all text once and that a Megatron-LM
    index is checked as a whole. Raises ValueError, with the file, the value and the rule, for files that cannot be
    trained on. A bounded sample of ids is checked here, and every id again when it is read.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1")
    if vocab is not None and vocab < 1:
        raise ValueError(f"vocab={vocab} must be at least 1")
    format, files = find_files([path] if isinstance(path, str) else path, format)
    if format != "text" and tokenizer not in (None, "bytes"):
        raise ValueError(f"tokenizer={tokenizer!r} is for text, but {files[0]} holds {format} tokens")
    if format != "nanogpt" and token_dtype != "uint16":
        raise ValueError(f"token_dtype={token_dtype!r} is for nanogpt files, but {files[0]} is {format}")

    match format:
        case "text" if tokenizer == "bytes" or tokenizer is model_folder is None:
            stream, vocab_size = open_bytes(files), _check_vocab(vocab, BYTE_VOCAB, "bytes")
        case "text":
            named = model_folder if tokenizer is None else _tokenizer_file(tokenizer)
            assert named is not None
            stream, tokenizer_vocab = open_tokenized(files, named)
            vocab_size = _check_vocab(vocab, tokenizer_vocab, str(named))
        case "nanogpt":
            stream = open_nanogpt(files, token_dtype)
            vocab_size = vocab or _vocab_of_storage(stream)
        case _:
            stream = open_megatron(files)
            vocab_size = vocab or _vocab_of_storage(stream)
    return TokenDataset(stream, seq_len=seq_len, vocab_size=vocab_size)


class TokenDataset:
    """Sequences of seq_len + 1 ids that start seq_len ids apart, so that each id is a target once.

    The remaining ids at the end are not used. Every id is below `vocab_size`.
    """

    def __init__(self, stream: TokenStream, *, seq_len: int, vocab_size: int) -> None:
        if stream.tokens < seq_len + 1:
            remedy = f"set seq_len to at most {stream.tokens - 1}" if stream.tokens > 1 else "give it more text"
            raise ValueError(
                f"{stream.segments[0].path}: the data has {stream.tokens} tokens, but a sequence of "
                f"seq_len={seq_len} takes {seq_len + 1}, the last one as a target: {remedy}"
            )
        self._stream = stream
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        for start, stop in stream.sampled_blocks():
            stream.read_checked(start, stop, vocab_size)

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
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} is not one of 0 to {len(self) - 1}")
        start = int(index) * self.seq_len
        return self._stream.read_checked(start, start + self.seq_len + 1, self.vocab_size)

    def read(self, index: int | np.integer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Read the inputs and the targets of a sequence, int64 [seq_len] each."""
        ids = self[index]
        return ids[:-1], ids[1:]


def _tokenizer_file(name: str) -> Path:
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        raise ValueError(f"tokenizer={name!r} is a folder: name the file, {path / 'tokenizer.json'}")
    return path


def _check_vocab(vocab: int | None, known: int, tokenizer: str) -> int:
    if vocab is not None and vocab < known:
        raise ValueError(f"vocab={vocab} is less than the {known} ids of tokenizer={tokenizer!r}: set it to {known}")
    return known


def _vocab_of_storage(stream: TokenStream) -> int:
    """The vocabulary size that the ids' dtype implies, since token files do not store one."""
    widest = max((np.iinfo(segment.dtype) for segment in stream.segments), key=lambda info: info.max)
    if widest.max >= 1 << 16:
        raise ValueError(f"{stream.segments[0].path}: {widest.dtype} ids do not bound the vocabulary: set vocab")
    return int(widest.max) + 1
