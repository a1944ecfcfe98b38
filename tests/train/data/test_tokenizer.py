# SPDX-License-Identifier: Apache-2.0
"""Text through a Hugging Face tokenizer: ids, the cache, what is refused."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
from tests.train import model_folders
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from stretto.train.data import open_dataset
from stretto.train.data import text as text_module

TEXT = "The voices enter one after another.\nBefore the last has finished, the first begins again.\n\n" * 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 300 ids with what must not matter: padding, truncation, a BOS template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(max_length=16)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def ids_of(path: str, tokenizer: Path) -> list[int]:
    """All ids of a text, as the one sequence that it is long."""
    tokens = open_dataset(path, tokenizer=str(tokenizer), seq_len=1).tokens
    return open_dataset(path, tokenizer=str(tokenizer), seq_len=tokens - 1)[0].tolist()


def encode(text: str, tokenizer: Path) -> list[int]:
    """The ids that the tokenizer gives to a whole text at once."""
    plain = Tokenizer.from_file(str(tokenizer))
    plain.no_padding()
    plain.no_truncation()
    return plain.encode(text, add_special_tokens=False).ids


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_the_ids_are_the_tokenizers_without_what_it_adds(tmp_path: Path, tokenizer: Path) -> None:
    file = write(tmp_path / "a", TEXT)
    assert ids_of(file, tokenizer) == encode(TEXT, tokenizer)
    assert open_dataset(file, tokenizer=str(tokenizer), seq_len=1).vocab_size == 300


@pytest.mark.parametrize("text", [TEXT, TEXT[:-2], TEXT.replace("\n", "\r\n"), "one\n" * 2000])
def test_pieces_end_where_the_tokenizer_cuts_as_well(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(text_module, "PIECE_BYTES", 300)
    assert ids_of(write(tmp_path / "a", text), tokenizer) == encode(text, tokenizer)


@pytest.mark.parametrize("text", ["é" * 701, "€" * 700 + "x", "words " * 400, "\r\n" * 999, "\n" * 600])
@pytest.mark.parametrize("piece", [7, 300])
def test_a_text_that_offers_no_good_place_to_cut_is_all_there(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, text: str, piece: int
) -> None:
    monkeypatch.setattr(text_module, "PIECE_BYTES", piece)
    ids = ids_of(write(tmp_path / "a", text), tokenizer)
    assert Tokenizer.from_file(str(tokenizer)).decode(ids, skip_special_tokens=False) == text


def test_files_are_one_stream(tmp_path: Path, tokenizer: Path) -> None:
    for name, text in [("a", "The voices"), ("b", " enter\n"), ("c", "one")]:
        write(tmp_path / name, text)
    ids = ids_of(str(tmp_path), tokenizer)
    assert Tokenizer.from_file(str(tokenizer)).decode(ids) == "The voices enter\none"


def test_a_vocabulary_of_more_than_16_bits_is_kept_whole(tmp_path: Path) -> None:
    vocab = {f"w{number}": number for number in range(70_000)}
    wide = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    wide.pre_tokenizer = pre_tokenizers.Whitespace()
    wide.save(str(tmp_path / "tokenizer.json"))
    text = write(tmp_path / "a", "w1 w69999 w65536 other")
    assert ids_of(text, tmp_path / "tokenizer.json") == [1, 69999, 65536, 0]
    assert open_dataset(text, tokenizer=str(tmp_path / "tokenizer.json"), seq_len=1).vocab_size == 70_000


def test_a_text_is_tokenized_once_and_again_only_when_it_or_the_tokenizer_changes(
    tmp_path: Path, tokenizer: Path, cache: Path
) -> None:
    def cached() -> set[str]:
        return {path.name for path in (cache / "tokens").glob("*.bin")}

    file = write(tmp_path / "a", TEXT)
    first = open_dataset(file, tokenizer=str(tokenizer), seq_len=4).fingerprint
    (only,) = cached()
    written = (cache / "tokens" / only).stat().st_mtime_ns
    assert open_dataset(file, tokenizer=str(tokenizer), seq_len=8).fingerprint == first
    assert (cache / "tokens" / only).stat().st_mtime_ns == written
    write(tmp_path / "a", TEXT.replace("voices", "VOICES"))
    assert open_dataset(file, tokenizer=str(tokenizer), seq_len=4).fingerprint != first
    assert len(cached()) == 2
    other = Tokenizer.from_file(str(tokenizer))
    other.add_tokens(["VOICES"])
    other.save(str(tmp_path / "other.json"))
    assert open_dataset(file, tokenizer=str(tmp_path / "other.json"), seq_len=4).vocab_size == 301
    assert len(cached()) == 3
    assert not list((cache / "tokens").glob("*.partial"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other.json"]


def _fingerprint(path: str, tokenizer: str) -> tuple[int, str]:
    return os.getpid(), open_dataset(path, tokenizer=tokenizer, seq_len=4).fingerprint


@pytest.mark.exhaustive
def test_processes_that_open_a_text_at_once_tokenize_it_once(tmp_path: Path, tokenizer: Path, cache: Path) -> None:
    file = write(tmp_path / "a", TEXT * 20)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.starmap(_fingerprint, [(file, str(tokenizer))] * 2, chunksize=1)
    assert len({fingerprint for _, fingerprint in results}) == 1
    assert len(list((cache / "tokens").glob("*.bin"))) == 1
    assert not list((cache / "tokens").glob("*.partial"))


@pytest.mark.parametrize("before", [0, 3, 299, 300, 301, 999])
def test_a_byte_that_is_not_utf8_is_named(
    tmp_path: Path, tokenizer: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(text_module, "PIECE_BYTES", 300)
    file = write(tmp_path / "a", b"x" * before + b"\xff and more\n" * 3)
    with pytest.raises(ValueError, match=f"a: byte {before} is not valid UTF-8 .* set tokenizer to 'bytes'"):
        open_dataset(file, tokenizer=str(tokenizer), seq_len=4)
    assert [path.suffix for path in (cache / "tokens").iterdir()] == [".lock"]


def test_a_text_that_ends_within_a_character_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    file = write(tmp_path / "a", "abc\nné".encode()[:-1])
    with pytest.raises(ValueError, match="a: byte 5 is not valid UTF-8"):
        open_dataset(file, tokenizer=str(tokenizer), seq_len=1)


def test_text_goes_through_the_tokenizer_of_a_models_folder_unless_another_is_named(
    tmp_path: Path, tokenizer: Path
) -> None:
    folder = tmp_path / "model"
    model_folders.write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    file = write(tmp_path / "a", TEXT)
    expected = AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    found = open_dataset(file, model_folder=folder, seq_len=len(expected) - 1)
    assert found[0].tolist() == expected
    assert expected != encode(TEXT, tokenizer)
    named = open_dataset(file, tokenizer=str(tokenizer), model_folder=folder, seq_len=1)
    assert named.tokens == len(encode(TEXT, tokenizer))
    assert open_dataset(file, tokenizer="bytes", model_folder=folder, seq_len=1).tokens == len(TEXT)


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"blank: .*tokenizer\.json makes no tokens of its text"):
        open_dataset(write(tmp_path / "blank", " \n " * 9), tokenizer=str(tmp_path / "tokenizer.json"), seq_len=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "is not a tokenizer.json: Expecting"),
        ("[]", ".*it has no table 'model'"),
        (json.dumps({"tokenizer_class": "GPT2Tokenizer"}), ".*it has no table 'model'"),
        ('{"model": {"type": "BPE"}}', "is not a tokenizer.json of Hugging Face tokenizers: "),
        ("[" * 300_000, "is not a tokenizer.json: .*recursion"),
        (b"\xff\xfe\xff", "is not a tokenizer.json: .*decode"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    named = write(tmp_path / "tokenizer.json", content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: {message}"):
        open_dataset(write(tmp_path / "a", TEXT), tokenizer=named, seq_len=1)


def test_a_tokenizer_larger_than_any_is_refused_before_it_is_read(tmp_path: Path) -> None:
    named = tmp_path / "tokenizer.json"
    named.touch()
    os.truncate(named, (1 << 28) + 1)
    with pytest.raises(ValueError, match=r"tokenizer\.json: is larger than 268435456 bytes"):
        open_dataset(write(tmp_path / "a", TEXT), tokenizer=str(named), seq_len=1)


def test_a_missing_tokenizer_and_a_folder_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a", TEXT)
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        open_dataset(file, tokenizer=str(tmp_path / "tokenizer.json"), seq_len=1)
    with pytest.raises(ValueError, match=r"is a folder: name the file, .*tokenizer\.json"):
        open_dataset(file, tokenizer=str(tmp_path), seq_len=1)


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(ValueError, match="vocab=299 is less than the 300 ids"):
        open_dataset(write(tmp_path / "a", TEXT), tokenizer=str(tokenizer), seq_len=1, vocab=299)


def test_without_the_package_the_message_names_what_to_install(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install 'stretto\[tokenizers\]'"):
        open_dataset(write(tmp_path / "a", TEXT), tokenizer=str(tokenizer), seq_len=1)


def test_a_cache_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a", TEXT)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"cannot be written: .*set STRETTO_CACHE"):
        open_dataset(file, tokenizer=str(tokenizer), seq_len=1)
