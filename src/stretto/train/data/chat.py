# SPDX-License-Identifier: Apache-2.0
"""Chat files: conversations in JSON lines, written out by a tokenizer's chat template, one to a sequence.

The loss covers the assistant's messages, if the template marks them with `{% generation %}`; otherwise all
tokens. The ids are computed once and cached, each with a bit that says whether it is a target.
"""

import importlib.metadata
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stretto.cluster import reading
from stretto.execution import IGNORED_TARGET
from stretto.huggingface.folder import load_tokenizer_of
from stretto.train.data.cache import cached_file
from stretto.train.data.dataset import SequenceDataset
from stretto.train.data.files import cut_short, file_size
from stretto.train.data.stream import Segment, TokenStream
from stretto.train.data.text import cache_key, open_bytes, vocab_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_IS_TARGET = np.uint32(1 << 31)
_ID = np.uint32((1 << 31) - 1)
_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")


def open_chat(files: Sequence[Path], folder: Path, *, seq_len: int) -> "ChatDataset":
    """Open conversations, written out by the chat template of the tokenizer in a Hugging Face model's folder.

    A line is an object with `messages`, a list of objects with `role` and `content`, and maybe `tools`. Raises
    ValueError, with the file and the line, for another; for a template that cannot write a conversation out; and if
    there is none, or nothing in it is a target.
    """
    text = open_bytes(files)
    tokenizer = load_tokenizer_of(folder)
    if importlib.util.find_spec("jinja2") is None:
        raise ValueError("chat templates need the package jinja2: pip install 'stretto[huggingface]'")
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise ValueError(f"{folder}: its tokenizer has no chat template, which chat files need") from error
    marks_assistant = _MARKS_ASSISTANT.search(template) is not None

    def write_ids(output: BinaryIO) -> None:
        logger.info("tokenizing %d bytes of conversations with %s, once", text.tokens, folder)
        lengths, firsts = [], []
        for segment in text.segments:
            for ids, is_target in _conversations(segment, tokenizer, marks_assistant):
                output.write((ids | np.where(is_target, _IS_TARGET, np.uint32(0))).tobytes())
                lengths.append(len(ids))
                # The first id is never a target, for there is nothing before it.
                firsts.append(1 + int(np.argmax(is_target[1:])) if is_target[1:].any() else len(ids))
        output.write(np.array([lengths, firsts], dtype="<i8").tobytes())
        output.write(np.array(len(lengths), dtype="<i8").tobytes())

    versions = f"{importlib.metadata.version('transformers')} conversations, version 1"
    description = "\n".join((tokenizer.backend_tokenizer.to_str(), template, versions))
    cached = cached_file(f"tokens/{cache_key(text, description.encode())}.chat", write_ids)
    return ChatDataset(
        cached, seq_len=seq_len, vocab_size=vocab_of(tokenizer.backend_tokenizer), marks_assistant=marks_assistant
    )


class ChatDataset(SequenceDataset):
    """Conversations, each the beginning of a sequence of seq_len inputs and targets whose rest is ignored.

    Longer ones are truncated. Ones without a target after that are skipped.
    """

    has_ignored_targets = True

    def __init__(self, cached: Path, *, seq_len: int, vocab_size: int, marks_assistant: bool) -> None:
        """cached: the file that `open_chat` writes. vocab_size: every id is below it."""
        self.seq_len, self.vocab_size = seq_len, vocab_size
        lengths, firsts = _read_table(cached)
        count = len(lengths)
        self._stream = TokenStream([Segment(cached, "<u4", file_size(cached) // 4)], made_of=cached)
        starts = np.cumsum(lengths) - lengths
        is_used = firsts <= np.minimum(seq_len, lengths - 1)
        if not is_used.any():
            raise ValueError(
                f"none of the {count} conversations has a target in its first {seq_len + 1} tokens: the chat template "
                "gives the assistant none of them, or train.seq_len is too small"
            )
        self._starts, self._lengths = starts[is_used], np.minimum(lengths, seq_len + 1)[is_used]
        self.notes = tuple(_notes(count, int((lengths[is_used] > seq_len + 1).sum()), is_used, seq_len))
        if not marks_assistant:
            self.notes += (
                "the chat template does not mark what the assistant says with {% generation %}: the loss is taken over "
                "all tokens",
            )

    @property
    def fingerprint(self) -> str:
        return self._stream.fingerprint

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int | np.integer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        words = self._words(index)
        inputs, targets = np.zeros(self.seq_len, np.int64), np.full(self.seq_len, IGNORED_TARGET, np.int64)
        ids = words & _ID
        inputs[: len(ids) - 1] = ids[:-1]
        targets[: len(ids) - 1] = np.where(words[1:] & _IS_TARGET, ids[1:], IGNORED_TARGET)
        return inputs, targets

    def num_targets(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        return sum(int(np.count_nonzero(self._words(index)[1:] & _IS_TARGET)) for index in indices)

    def _words(self, index: int | np.integer) -> NDArray[np.int64]:
        """The ids of a conversation with their bits, as far as they are used."""
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} is not one of 0 to {len(self) - 1}")
        start = int(self._starts[index])
        words = self._stream.read(start, start + int(self._lengths[index]))
        if (words & _ID).max() >= self.vocab_size:
            (segment,) = self._stream.segments
            raise ValueError(f"{segment.path}: this cached file is damaged: delete it, and it is written again")
        return words


def _read_table(cached: Path) -> NDArray[np.int64]:
    """Read each conversation's length and first target, int64 [2, conversations], from the end of `open_chat`'s file.

    Raises ValueError for a file that cannot be whole: the sizes of its parts must add up to its own.
    """
    size = file_size(cached)
    with reading(cached), cached.open("rb") as file:
        file.seek(max(0, size - 8))
        count = int.from_bytes(file.read(8), "little")
        if 8 + 16 * count <= size:
            file.seek(size - 8 - 16 * count)
            read = file.read(16 * count)
            if len(read) == 16 * count:
                table = np.frombuffer(read, dtype="<i8").reshape(2, -1)
                if 4 * int(table[0].sum()) + 8 + 16 * count == size:
                    return table
    raise ValueError(f"{cached}: is cut short or damaged: delete it, and it is written again")


def _notes(count: int, cut: int, is_used: NDArray[np.bool_], seq_len: int) -> Iterator[str]:
    if left_out := count - int(is_used.sum()):
        yield (
            f"{left_out} of {count} conversations have no target in their first {seq_len + 1} tokens, and are left out"
        )
    if cut:
        yield f"{cut} of {count} conversations are longer than {seq_len + 1} tokens, and are cut there"


def _conversations(
    segment: Segment, tokenizer: "PreTrainedTokenizerBase", marks_assistant: bool
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_]]]:
    """Yield the ids of each conversation of a file, and which of them are targets.

    Raises ValueError if the file's size has changed since it was opened.
    """
    file, size = segment.path, 0
    with reading(file), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            size += len(line)
            if size < segment.tokens and not line.endswith(b"\n"):
                raise cut_short(file, size, segment.tokens)
            if not line.strip():
                continue
            where = f"{file}: line {number}"
            messages, tools = _parse(line, where)
            try:
                found: Any = tokenizer.apply_chat_template(
                    messages, tools=tools, return_dict=True, return_assistant_tokens_mask=marks_assistant
                )
            except Exception as error:  # a template may raise any exception
                raise ValueError(f"{where}: the chat template cannot write it out: {error}") from error
            ids = np.array(found["input_ids"], dtype=np.uint32)
            mask = found["assistant_masks"] if marks_assistant else np.ones(len(ids))
            yield ids, np.array(mask, dtype=bool)
    if size != segment.tokens:
        raise cut_short(file, size, segment.tokens)


def _parse(line: bytes, where: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Read a line's messages and tools. Raises ValueError unless they are a conversation."""
    try:
        conversation = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where} is no conversation: it must be an object with a list "messages"')
    for message in messages:
        is_said = isinstance(message, dict) and (isinstance(message.get("content"), str) or message.get("tool_calls"))
        if not is_said or not isinstance(message.get("role"), str):
            raise ValueError(f'{where}: {message!r} is no message: it must have the texts "role" and "content"')
    tools = conversation.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{where}: tools is {tools!r}, but must be a list")
    return messages, tools
