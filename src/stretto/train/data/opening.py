# SPDX-License-Identifier: Apache-2.0
"""Opens a data set: finds the files that a path means, and reads them as their format says."""

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from stretto.train.data.chat import open_chat
from stretto.train.data.dataset import SequenceDataset, TokenDataset
from stretto.train.data.documents import DocumentDataset, open_documents
from stretto.train.data.files import OF_DOCUMENTS, find_files
from stretto.train.data.mixture import MixedDataset
from stretto.train.data.stream import TokenStream
from stretto.train.data.text import BYTE_VOCAB, open_bytes, open_tokenized
from stretto.train.data.token_files import open_megatron, open_nanogpt


def open_dataset(
    path: str | Path | Sequence[str | Path],
    *,
    weights: Sequence[float] | None = None,
    format: str = "auto",
    field: str = "text",
    tokenizer: str | Path | None = None,
    separator: str | None = None,
    document_mask: bool = True,
    model_folder: Path | None = None,
    seq_len: int,
    vocab: int | None = None,
    token_dtype: str = "uint16",
) -> SequenceDataset:
    """Open text, documents, conversations or token files as sequences of `seq_len` inputs and their targets.

    path: files or folders; their tokens form one stream, in that order. weights: of the paths, which then are data sets
    of their own, mixed in these shares of sequences (`MixedDataset`). format: "text", "chat", "jsonl", "parquet",
    "arrow" (a folder that the package datasets has saved), "nanogpt", "megatron", or "auto": a .bin file with an .idx
    file is Megatron-LM's, any other .bin is nanoGPT's, a .jsonl file of objects is chat if its first line is a
    conversation, else documents, .parquet and .arrow are documents, and all others are text.
    tokenizer: for text and documents, "bytes" (the default) or the path of a tokenizer.json. model_folder: a Hugging
    Face folder, whose tokenizer is the default then. field, separator: of documents, the field of a record that has its
    text or its token ids, and text that ends each. document_mask: whether tokens are to attend to their own document
    alone (`read_places`). token_dtype: a nanoGPT file's, "uint16", "uint32" or "int64". vocab: the model's vocabulary
    size; every id must be below it.

    The time does not depend on the files' size, except that documents, and text of a tokenizer, are read once, and that
    a Megatron-LM index is checked as a whole. Raises ValueError, with the file, the value and the rule, for files that
    cannot be trained on. A bounded sample of ids is checked here, and every id again when it is read.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1")
    if vocab is not None and vocab < 1:
        raise ValueError(f"vocab={vocab} must be at least 1")
    paths = [str(each) for each in ([path] if isinstance(path, str | Path) else path)]
    if weights is not None:
        _check_weights(weights, len(paths))
        each = partial(
            open_dataset, format=format, field=field, tokenizer=tokenizer, separator=separator, seq_len=seq_len,
            document_mask=document_mask, model_folder=model_folder, vocab=vocab, token_dtype=token_dtype,
        )  # fmt: skip
        return MixedDataset([each(one) for one in paths], weights)
    format, files = find_files(paths, format)
    if format == "chat" and tokenizer is not None:
        raise ValueError(
            f"tokenizer={tokenizer!r}, but conversations such as {files[0]} need the chat template of a Hugging Face "
            "model: leave the tokenizer out and train one, or set format='text' for the raw lines"
        )
    if format not in ("text", *OF_DOCUMENTS) and tokenizer not in (None, "bytes"):
        raise ValueError(f"tokenizer={tokenizer!r} is for text, but {files[0]} holds {format} tokens")
    if format != "nanogpt" and token_dtype != "uint16":
        raise ValueError(f"token_dtype={token_dtype!r} is for nanogpt files, but {files[0]} is {format}")

    match format:
        case "chat":
            if model_folder is None:
                raise ValueError(
                    f"{files[0]} holds conversations, which need the chat template of a Hugging Face model: train one, "
                    "or set format='text' for the raw lines"
                )
            chat = open_chat(files, model_folder, seq_len=seq_len)
            _check_vocab(vocab, chat.vocab_size, str(model_folder))
            return chat
        case "jsonl" | "parquet" | "arrow":
            is_bytes = tokenizer == "bytes" or tokenizer is model_folder is None
            named = None if is_bytes else model_folder if tokenizer is None else _tokenizer_file(tokenizer)
            documents, known = open_documents(files, format, field=field, tokenizer=named, separator=separator)
            vocab_size = _check_vocab(vocab, known, "bytes" if named is None else str(named))
            return DocumentDataset(documents, seq_len=seq_len, vocab_size=vocab_size, masks=document_mask)
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


def _check_weights(weights: Sequence[float], paths: int) -> None:
    if len(weights) != paths or not all(isinstance(each, int | float) and 0 < each < math.inf for each in weights):
        raise ValueError(f"weights={list(weights)} must be {paths} numbers above 0, one for each path")


def _tokenizer_file(name: str | Path) -> Path:
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        raise ValueError(f"tokenizer={str(name)!r} is a folder: name the file, {path / 'tokenizer.json'}")
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
