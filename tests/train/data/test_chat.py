# SPDX-License-Identifier: Apache-2.0
"""Conversations as sequences: what is an input, what is a target, what is cut or left out, what is refused."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.train import model_folders
from transformers import AutoTokenizer

from stretto.train.data import SequenceDataset, open_dataset

TURNS = ("What is a stretto?", "An overlap of voices.", "In what?", "In a fugue.")
WRITTEN = (
    "<|user|>What is a stretto?<|end|><|assistant|>An overlap of voices.<|end|>"
    "<|user|>In what?<|end|><|assistant|>In a fugue.<|end|>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    model_folders.write_tokenizer(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def open_turns(path: Path, folder: Path, *conversations: tuple[str, ...], seq_len: int = 128) -> SequenceDataset:
    return open_dataset(model_folders.write_chat(path, conversations), model_folder=folder, seq_len=seq_len)


def text_of(folder: Path, ids: np.ndarray) -> str:
    return AutoTokenizer.from_pretrained(folder).decode(ids[ids != model_folders.IGNORED])


def test_the_targets_are_the_assistants_messages_and_their_end(tmp_path: Path, folder: Path) -> None:
    dataset = open_turns(tmp_path / "chat.jsonl", folder, TURNS)
    inputs, targets = dataset.read(0)
    length = len(AutoTokenizer.from_pretrained(folder)(WRITTEN)["input_ids"])
    assert inputs.shape == targets.shape == (128,)
    assert text_of(folder, inputs[: length - 1]) == WRITTEN.removesuffix("<|end|>")
    assert text_of(folder, targets) == "An overlap of voices.<|end|>In a fugue.<|end|>"
    is_target = targets != model_folders.IGNORED
    assert np.array_equal(inputs[1:][is_target[:-1]], targets[:-1][is_target[:-1]])
    assert set(targets[length - 1 :]) == {model_folders.IGNORED}
    assert dataset.num_targets([0]) == is_target.sum()
    assert dataset.notes == ()


def test_long_conversations_are_truncated_and_those_without_a_target_skipped(tmp_path: Path, folder: Path) -> None:
    """Both are counted, for the user to read."""
    short, long, late = ("a", "b"), ("a", "b" * 40), ("a" * 40, "b")
    dataset = open_turns(tmp_path / "chat.jsonl", folder, short, long, late, short, seq_len=20)
    assert len(dataset) == 3
    inputs, targets = dataset.read(1)
    assert text_of(folder, inputs) == "<|user|>a<|end|><|assistant|>" + "b" * 16
    assert text_of(folder, targets) == "b" * 17
    assert [dataset.num_targets([index]) for index in range(3)] == [2, 17, 2]
    assert dataset.num_targets([0, 1, 2]) == 21
    assert [note.partition(" conv")[0] for note in dataset.notes] == ["1 of 4", "1 of 4"]
    with pytest.raises(ValueError, match=r"none of the 1 conversations has a target in its first 21 tokens"):
        open_turns(tmp_path / "late.jsonl", folder, late, seq_len=20)


def test_a_template_without_marks_makes_all_tokens_targets_with_a_note(tmp_path: Path) -> None:
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    model_folders.write_tokenizer(tmp_path, template)
    dataset = open_turns(tmp_path / "chat.jsonl", tmp_path, TURNS)
    assert text_of(tmp_path, dataset.read(0)[1]) == WRITTEN.removeprefix("<|user|>")
    assert "does not mark what the assistant says" in dataset.notes[0]


def test_ids_are_computed_once_per_template(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_turns(tmp_path / "chat.jsonl", folder, TURNS)
    plain = tmp_path / "plain"
    model_folders.write_tokenizer(plain, model_folders.CHAT_TEMPLATE.replace("<|end|>", ""))
    other = open_dataset(str(tmp_path / "chat.jsonl"), model_folder=plain, seq_len=128)
    assert other.fingerprint != first.fingerprint
    monkeypatch.setattr("stretto.train.data.chat._conversations", lambda *_: pytest.fail("tokenized again"))
    assert open_dataset(str(tmp_path / "chat.jsonl"), model_folder=folder, seq_len=64).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON"),
        ("[" * 100_000, r"line 2 is not JSON"),
        ('{"text": "hello"}', r'line 2 is no conversation: it must be an object with a list "messages"'),
        ('{"messages": []}', r"line 2 is no conversation"),
        ('{"messages": [{"role": "user"}]}', r'is no message: it must have the texts "role" and "content"'),
        ('{"messages": [{"content": "hello"}]}', r"is no message"),
        ('{"messages": ["hello"]}', r"'hello' is no message"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": 3}', r"line 2: tools is 3, but must be a list"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"line 2: the chat template cannot .*: a robot"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_conversation_is_refused_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    refusing = "{% if messages[0].role == 'robot' %}{{ raise_exception('a robot') }}{% endif %}"
    model_folders.write_tokenizer(tmp_path, refusing + model_folders.CHAT_TEMPLATE)
    chat = Path(model_folders.write_chat(tmp_path / "chat.jsonl", [TURNS]))
    chat.write_text(chat.read_text() + line)
    with pytest.raises(ValueError, match=rf"chat\.jsonl: {message}" if message.startswith("line") else message):
        open_dataset(str(chat), model_folder=tmp_path, seq_len=64)


def test_conversations_are_recognized_by_their_first_line(tmp_path: Path, folder: Path) -> None:
    chat = model_folders.write_chat(tmp_path / "chat.jsonl", [TURNS])
    raw = open_dataset(chat, format="text", seq_len=16)
    assert raw.vocab_size == 256
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"text": "hello " * 20}))
    assert open_dataset(str(lines), model_folder=folder, seq_len=16).has_documents
    for options, message in (
        ({}, "train one, or set format='text' for the raw lines"),
        ({"tokenizer": "bytes"}, "leave the tokenizer out and train one"),
        ({"model_folder": folder, "vocab": 299, "seq_len": 64}, "vocab=299 is less than the 300 ids"),
    ):
        with pytest.raises(ValueError, match=message):
            open_dataset(chat, **{"seq_len": 16} | options)


def test_a_folder_with_a_file_that_is_held_out_is_not_trained_on(tmp_path: Path, folder: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        model_folders.write_chat(tmp_path / name, [TURNS])
    with pytest.raises(ValueError, match=r"test\.jsonl: by its name it is held out, .*train\.jsonl"):
        open_dataset(str(tmp_path), model_folder=folder, seq_len=16)


def test_without_a_template_or_a_package_the_message_names_what_is_missing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = model_folders.write_chat(tmp_path / "chat.jsonl", [TURNS])
    bare = tmp_path / "bare"
    model_folders.write_tokenizer(bare, None)
    with pytest.raises(ValueError, match=r"bare: its tokenizer has no chat template"):
        open_dataset(chat, model_folder=bare, seq_len=16)
    for package in ("jinja2", "transformers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ValueError, match=rf"the package {package}: pip install 'stretto\[huggingface\]'"):
                open_dataset(chat, model_folder=folder, seq_len=16)
