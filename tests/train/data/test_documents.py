# SPDX-License-Identifier: Apache-2.0
"""Documents in JSON Lines, Parquet and saved data sets: packed, cached, kept apart, and named where damaged."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet
from tests.train import model_folders

from stretto.train.data import documents, open_dataset, records
from stretto.train.data.documents import DocumentDataset, find_changes

TEXTS = [f"Document {number} says ü. " * (number % 5) for number in range(400)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    columns = {"text": texts, "id": list(range(len(texts)))}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=150, write_page_checksum=True, compression="none")
    return path


def write_saved(path: Path, texts: list[str]) -> Path:
    Dataset.from_dict({"text": texts}).save_to_disk(str(path), num_shards=3)
    return path


def write_arrow(path: Path, texts: list[str]) -> Path:
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=150)
    return path


WRITERS = {"a.jsonl": write_jsonl, "a.parquet": write_parquet, "a.arrow": write_arrow, "saved": write_saved}


def packed(texts: list[str], seq_len: int, ending: bytes = b"") -> list[tuple[list[int], list[int], list[int]]]:
    """Inputs, targets and places of the sequences of bytes, written plainly."""
    ids, firsts = [], []
    for text in filter(None, texts):
        firsts += [True] + [False] * (len(text.encode() + ending) - 1)
        ids += text.encode() + ending
    found = []
    for start in range(0, len(ids) - seq_len, seq_len):
        place, places = 0, []
        for at in range(start, start + seq_len):
            place = 0 if firsts[at] or at == start else place + 1
            places.append(place)
        targets = [-100 if firsts[at] else ids[at] for at in range(start + 1, start + seq_len + 1)]
        found.append((ids[start : start + seq_len], targets, places))
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_documents_are_packed_one_after_another(tmp_path: Path, name: str) -> None:
    with mock.patch.object(documents, "_BLOCK_WORDS", 1000), mock.patch.object(documents, "PIECE_BYTES", 40):
        path = WRITERS[name](tmp_path / name, TEXTS)
        dataset = open_dataset(str(path), seq_len=32, separator="\n")
        found = [
            tuple(each.tolist() for each in (*dataset.read(index), dataset.read_places(index)))
            for index in range(len(dataset))
        ]
        num_targets = dataset.num_targets([0, 3])
    expected = packed(TEXTS, 32, b"\n")
    assert found == expected
    assert num_targets == sum(target != -100 for at in (0, 3) for target in expected[at][1])
    plain = open_dataset(path, seq_len=32, document_mask=False)
    assert not plain.has_ignored_targets
    assert (
        bytes(np.concatenate([plain[at][:-1] for at in range(len(plain))]).astype(np.uint8))
        == ("".join(TEXTS).encode()[: 32 * len(plain)])
    )


def test_tokenizers_and_token_ids_make_the_same_documents(tmp_path: Path) -> None:
    model_folders.write_tokenizer(tmp_path / "model")
    named = tmp_path / "model" / "tokenizer.json"
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, "content")
    with mock.patch.object(documents, "PIECES_AT_ONCE", 0):
        dataset = open_dataset(str(path), field="content", seq_len=16, tokenizer=named, separator="<|end|>")
    of_folder = open_dataset(
        str(path), field="content", seq_len=16, model_folder=tmp_path / "model", separator="<|end|>"
    )
    assert of_folder.fingerprint == dataset.fingerprint
    tokenizer, _ = documents.load_any_tokenizer(tmp_path / "model")
    ids = [[*tokenizer.encode(text, add_special_tokens=False).ids, 0] for text in TEXTS if text]
    parquet.write_table(pyarrow.table({"ids": ids}), tmp_path / "ids.parquet")
    other = open_dataset(str(tmp_path / "ids.parquet"), field="ids", seq_len=16, vocab=dataset.vocab_size)
    assert other.fingerprint == dataset.fingerprint
    assert len(dataset) == len(other) == (sum(map(len, ids)) - 1) // 16


def test_files_are_tokenized_once_and_a_changed_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        write_jsonl(folder / f"{number}.jsonl", TEXTS[100 * number : 100 * number + 100])
    with mock.patch.object(documents, "_BLOCK_WORDS", 100):
        before = open_dataset(str(folder), seq_len=16)
        with mock.patch.object(documents, "_write_words", side_effect=AssertionError("again")):
            assert open_dataset(str(folder), seq_len=8).fingerprint == before.fingerprint
        write_jsonl(folder / "2.jsonl", [text.replace("299", "298") for text in TEXTS[200:300]])
        write_jsonl(folder / "4.jsonl", TEXTS[:1] * 9)
        (folder / "0.jsonl").unlink()
        after = open_dataset(str(folder), seq_len=16)
        described = before.description()["files"], after.description()["files"]
        assert after.fingerprint != before.fingerprint
        gone, changed, new = find_changes(*described)
    assert gone == f"{folder / '0.jsonl'} is not trained on any more"
    assert new == f"{folder / '4.jsonl'} is new"
    of_file = "".join(TEXTS[200:300]).encode()
    at = int(re.search(r"2.jsonl has changed from token (\d+) on", changed).group(1))
    assert at <= of_file.index(b"299") < at + 200 + len(of_file) // 16
    assert find_changes({str(folder / "2.jsonl"): "damaged"}, described[1])


def tokenize_and_die(path: str, dies_at: int) -> None:
    count = 0

    def read(*args: object) -> object:
        nonlocal count
        for document in records.read_documents(*args):  # type: ignore[arg-type]
            count += 1
            if count == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield document

    with mock.patch.object(documents, "read_documents", read):
        open_dataset(path, seq_len=16)


def test_a_process_killed_while_it_tokenizes_loses_nothing_but_the_file_at_which_it_is(
    tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        write_parquet(folder / f"{number}.parquet", TEXTS[100 * number : 100 * number + 100])
    process = os.fork()
    if not process:
        tokenize_and_die(str(folder), 250)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert len(list(cache.rglob("*.docs"))) == 2
    written = mock.Mock(side_effect=documents._write_words)
    with mock.patch.object(documents, "_write_words", written):
        resumed = open_dataset(str(folder), seq_len=16)
    assert written.call_count == 2
    assert not list(cache.rglob("*.partial"))
    assert [resumed.read(index)[0].tolist() for index in range(len(resumed))] == [each[0] for each in packed(TEXTS, 16)]


def cut(file: Path, size: int) -> None:
    os.truncate(file, size if size > 0 else file.stat().st_size + size)


def flip(file: Path, at: int, count: int = 8) -> None:
    data = bytearray(file.read_bytes())
    for place in range(at, at + count):
        data[place] ^= 0xDA  # no longer ASCII
    file.write_bytes(data)


def replace(old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(file.read_bytes().replace(old, new, 1)) and None


def place_of(file: Path, what: bytes) -> int:
    return file.read_bytes().index(what)


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("a.jsonl", lambda file: cut(file, -10), r"line 400 \(byte \d+\) is not JSON.*cut short"),
    ("a.jsonl", lambda file: cut(file, 1000), r"line \d+ \(byte \d+\) is not JSON.*cut short"),
    ("a.jsonl", lambda file: flip(file, 5000), r"line \d+ \(byte \d+\)"),
    ("a.jsonl", replace(b'"text"', b'"txet"'), r"line 1 \(byte 0\): has no field 'text'.*'id', 'txet'"),
    ("a.jsonl", replace(b"Document 7", b"Document \xff"), r"line 8 \(byte \d+\): byte \d+ is not valid UTF-8"),
    ("a.jsonl", replace(b'"Document 9', b'7, "x": "Docu'), r"line 10 \(byte \d+\): field 'text' is '7'"),
    ("a.jsonl", replace(b'"Document 9', b'"\\ud800'), r"line 10 \(byte \d+\): field 'text' is not Unicode"),
    ("a.jsonl", replace(b'{"id": 1, "text": ""}', b"[]"), r"line 1 \(byte 0\) is no object"),
    ("a.jsonl", replace(b'{"id": 1', b'{"id": ' + b"[" * 10**5), r"line 1 \(byte 0\)"),
    ("a.jsonl", lambda file: file.write_bytes(b"\x1f\x8b\x08\x00" + file.read_bytes()), r"compressed by gzip"),
    ("a.parquet", lambda file: cut(file, -1), r"the index at its end \(byte \d+\)"),
    ("a.parquet", lambda file: cut(file, 3000), r"the index at its end \(byte 2992\)"),
    ("a.parquet", lambda file: flip(file, file.stat().st_size - 8, 4), r"the index at its end"),
    ("a.parquet", lambda file: flip(file, file.stat().st_size - 200, 40), r"the index|row group|no field"),
    ("a.parquet", lambda file: flip(file, place_of(file, b"Document 7 ")), r"row group 0 of 3 \(byte \d+\) cannot"),
    ("a.parquet", lambda file: flip(file, place_of(file, b"Document 399")), r"row group 2 of 3 \(byte \d+\) cannot"),
    ("a.parquet", lambda file: write_parquet(file, [*TEXTS[:99], None]), r"row group 0 of 1 \(byte 4\), row 99: fi"),  # type: ignore[list-item]
    ("a.parquet", lambda file: parquet.write_table(pyarrow.table({"x": [1]}), file), r"has no field 'text'.*'x'"),
    ("saved/data-00001-of-00003.arrow", lambda file: cut(file, 2000), r"batch at byte \d+ \(row \d+\)"),
    ("saved/data-00002-of-00003.arrow", lambda file: flip(file, 0, 40), r"batch at byte 0 \(row 0\)"),
    ("saved/data-00000-of-00003.arrow", lambda file: flip(file, place_of(file, b"Document 7 ")), r"the batch at byte"),
    ("saved/data-00000-of-00003.arrow", Path.unlink, r"no such file"),
    ("saved/state.json", lambda file: cut(file, -20), r"is not of a data set that datasets has saved"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damaged_files_are_named_with_the_place(tmp_path: Path, number: int) -> None:
    named, damage, place = DAMAGES[number]
    name = named.partition("/")[0]
    WRITERS[name](tmp_path / name, TEXTS)
    damage(tmp_path / named)
    with pytest.raises(ValueError, match=f"(?s){re.escape(str(tmp_path / named))}.*{place}"):
        open_dataset(str(tmp_path / name), seq_len=16, format="auto" if "/" in named else Path(name).suffix[1:])


def read_all(path: Path) -> None:
    dataset = open_dataset(str(path), seq_len=16)
    for index in range(len(dataset)):
        dataset.read(index)


def test_a_damaged_cached_file_is_named_at_whichever_byte(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with mock.patch.object(documents, "_BLOCK_WORDS", 1000):
        dataset = open_dataset(str(path), seq_len=16)
        (cached,) = cache.rglob("*.docs")
        whole = cached.read_bytes()
        for at in range(0, len(whole) - 4, 7001):
            flip(cached, at, 1)
            with pytest.raises(
                ValueError, match=rf"{re.escape(str(cached))}.*damaged.*{re.escape(str(path))}"
            ) as error:
                read_all(path)
            byte = int(re.search(r"byte (\d+)", str(error.value)).group(1))
            assert byte <= at < byte + 4096
            cached.write_bytes(whole)
        cut(cached, -100)
        with pytest.raises(ValueError, match="cut short"):
            open_dataset(str(path), seq_len=16)
        with pytest.raises(ValueError, match="when it was opened"):
            dataset.read(0)


def test_a_file_that_is_written_to_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    reader = records.read_documents(path, "jsonl", "text")
    next(reader)
    with path.open("a") as file:
        file.write(json.dumps({"text": "late"}) + "\n")
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}: was written to while it was read"):
        list(reader)


def test_folders_of_documents_name_what_they_cannot_read(tmp_path: Path) -> None:
    DatasetDict({"test": Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match=r"holds the splits test: name one of them, such as .*splits/test"):
        open_dataset(str(tmp_path / "splits"), seq_len=4)
    assert isinstance(open_dataset(str(tmp_path / "splits" / "test"), seq_len=4), DocumentDataset)
    write_parquet(tmp_path / "a.parquet", TEXTS)
    with mock.patch("importlib.util.find_spec", return_value=None), pytest.raises(ValueError, match=r"stretto\[data\]"):
        open_dataset(str(tmp_path / "a.parquet"), seq_len=4)
    with pytest.raises(ValueError, match=r"^(?!.*\.docs).*: the data has 0 tokens"):
        open_dataset(str(write_jsonl(tmp_path / "e.jsonl", ["", ""])), seq_len=4)
    (tmp_path / "n.jsonl").write_text('{"text": [3, -1]}')
    with pytest.raises(ValueError, match=r"token ids are from -1 to 3"):
        open_dataset(str(tmp_path / "n.jsonl"), seq_len=4)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.parquet file"):
        open_dataset(str(tmp_path / "none"), format="parquet", seq_len=4)
