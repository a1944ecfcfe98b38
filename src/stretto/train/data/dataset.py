"""A data set: a token stream cut into sequences of one length."""

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
    tokenizer: str = "bytes",
    seq_len: int,
    vocab: int | None = None,
    token_dtype: str = "uint16",
) -> "TokenDataset":
    """Open text or token files as sequences of `seq_len` inputs and their targets.

    `path` names files or folders; their tokens are one stream, in that order. `format` is "text", "nanogpt",
    "megatron", or "auto": a .bin with an .idx beside it is Megatron-LM's, another .bin is nanoGPT's, and the
    rest is text. `tokenizer` is "bytes" or the path of a tokenizer.json, for text. `token_dtype` is that of a
    nanoGPT file, "uint16", "uint32" or "int64". `vocab` is the model's vocabulary, which every id must be below.

    Costs the same for any size of file, except that a tokenizer reads all text once and that a Megatron-LM
    index is checked as a whole. Raises ValueError, with the file, the value and the rule, for what cannot be
    trained on; ids are checked here in a bounded sample, and each again when it is read.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1")
    if vocab is not None and vocab < 1:
        raise ValueError(f"vocab={vocab} must be at least 1")
    format, files = find_files([path] if isinstance(path, str) else path, format)
    if format != "text" and tokenizer != "bytes":
        raise ValueError(f"tokenizer={tokenizer!r} is for text, but {files[0]} holds {format} tokens")
    if format != "nanogpt" and token_dtype != "uint16":
        raise ValueError(f"token_dtype={token_dtype!r} is for nanogpt files, but {files[0]} is {format}")

    match format:
        case "text" if tokenizer == "bytes":
            stream, vocab_size = open_bytes(files), _check_vocab(vocab, BYTE_VOCAB, tokenizer)
        case "text":
            stream, tokenizer_vocab = open_tokenized(files, Path(os.path.expanduser(tokenizer)))
            vocab_size = _check_vocab(vocab, tokenizer_vocab, tokenizer)
        case "nanogpt":
            stream = open_nanogpt(files, token_dtype)
            vocab_size = vocab or _vocab_of_storage(stream)
        case _:
            stream = open_megatron(files)
            vocab_size = vocab or _vocab_of_storage(stream)
    return TokenDataset(stream, seq_len=seq_len, vocab_size=vocab_size)


class TokenDataset:
    """Sequences of seq_len + 1 ids that begin seq_len ids apart, so that each id is a target once.

    Ids left over at the end are not read. Every id is below `vocab_size`.
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
        """Number of ids in the data, those left over included."""
        return self._stream.tokens

    @property
    def fingerprint(self) -> str:
        """Identity of the ids, in hexadecimal, from their number and a bounded sample of them.

        The same for the same ids in other files, of another format or cut to another sequence length.
        """
        return self._stream.fingerprint

    def __len__(self) -> int:
        return (self.tokens - 1) // self.seq_len

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int | np.integer) -> NDArray[np.int64]:
        """Sequence `index` of [0, len), int64 [seq_len + 1]: inputs [:-1] and targets [1:].

        Raises ValueError with file and position for an id outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} is not one of 0 to {len(self) - 1}")
        start = int(index) * self.seq_len
        return self._stream.read_checked(start, start + self.seq_len + 1, self.vocab_size)


def _check_vocab(vocab: int | None, known: int, tokenizer: str) -> int:
    if vocab is not None and vocab < known:
        raise ValueError(f"vocab={vocab} is less than the {known} ids of tokenizer={tokenizer!r}: set it to {known}")
    return known


def _vocab_of_storage(stream: TokenStream) -> int:
    """What the ids' type bounds them to: token files do not say more."""
    widest = max((np.iinfo(segment.dtype) for segment in stream.segments), key=lambda info: info.max)
    if widest.max >= 1 << 16:
        raise ValueError(f"{stream.segments[0].path}: {widest.dtype} ids do not bound the vocabulary: set vocab")
    return int(widest.max) + 1
