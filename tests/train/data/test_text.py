# SPDX-License-Identifier: Apache-2.0
"""Text as bytes, from files and folders."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.train.data import TokenDataset, open_dataset


def content(dataset: TokenDataset) -> bytes:
    """The text that a data set of seq_len 1 holds, put together from its sequences."""
    first = bytes(dataset[0][:1].tolist())
    return first + bytes(int(dataset[index][1]) for index in range(len(dataset)))


def test_a_text_is_cut_into_sequences_that_share_one_token(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 12)))
    dataset = open_dataset(str(file), seq_len=4)
    assert (len(dataset), dataset.tokens, dataset.vocab_size) == (2, 11, 256)
    assert [sequence.tolist() for sequence in dataset] == [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9]]
    assert dataset[0].dtype == np.int64


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.text("abc é\n", min_size=1, max_size=40).map(str.encode), min_size=1), seq_len=st.integers(1, 7)
)
def test_sequences_run_across_files(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], seq_len: int) -> None:
    folder = tmp_path_factory.mktemp("text")
    paths = [folder / f"{number:03}" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part)
    text = b" " + b"".join(parts) + b" " * seq_len
    (folder / "first").write_bytes(b" ")
    (folder / "last").write_bytes(b" " * seq_len)
    listed = [str(path) for path in (folder / "first", *paths, folder / "last")]
    dataset = open_dataset(listed, format="text", seq_len=seq_len)
    assert len(dataset) == (len(text) - 1) // seq_len
    for index in range(len(dataset)):
        assert bytes(dataset[index].tolist()) == text[index * seq_len : index * seq_len + seq_len + 1]


def test_folders_are_read_in_the_order_of_their_paths_without_hidden_and_empty_files(tmp_path: Path) -> None:
    for name, text in [("b/z", "3"), ("b/a", "2"), ("a", "1"), ("c", "4"), (".hidden", "x"), (".git/y", "x")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bb").touch()
    assert content(open_dataset(str(tmp_path), seq_len=1)) == b"1234"


def test_paths_of_a_list_are_read_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in [("folder/a", "one"), ("z", "two"), ("b", "three")]:
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in ("z", "folder", "b")]
    assert content(open_dataset(paths, seq_len=1)) == b"twoonethree"


def test_more_files_than_a_process_keeps_mapped_are_read(tmp_path: Path) -> None:
    for number in range(600):
        (tmp_path / f"{number:04}").write_text(f"{number:04}")
    dataset = open_dataset(str(tmp_path), seq_len=4)
    for index in [0, 598, 300, 1, 597]:
        assert bytes(dataset[index][:4].tolist()) == f"{index:04}".encode()


def test_bytes_need_not_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes("Grüße".encode("latin-1"))
    assert content(open_dataset(str(tmp_path / "latin1"), seq_len=1)) == "Grüße".encode("latin-1")


def png(path: Path) -> Path:
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    return path


def test_a_png_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"picture\.txt: is a PNG image"):
        open_dataset(str(png(tmp_path / "picture.txt")), seq_len=4)


def test_a_binary_file_in_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(b"some text\x00")
    with pytest.raises(ValueError, match=r"sub/data: is not text .* byte 9 is zero"):
        open_dataset(str(tmp_path), seq_len=4)


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(ValueError, match=r"corpsu\.txt: no such file or folder; did you mean .*corpus\.txt"):
        open_dataset(str(tmp_path / "corpsu.txt"), seq_len=2)
    with pytest.raises(ValueError, match=r"nowhere/x: no such file or folder$"):
        open_dataset(str(tmp_path / "nowhere" / "x"), seq_len=2)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt: is empty"):
        open_dataset(str(tmp_path / "empty.txt"), seq_len=2)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(ValueError, match="holds no file that is neither hidden nor empty"):
        open_dataset(str(tmp_path), seq_len=2)


@pytest.mark.parametrize(
    ("text", "message"), [("12345678", r"has 8 tokens, .* seq_len=8 takes 9, .* at most 7"), ("1", "more text")]
)
def test_less_than_one_sequence_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "short").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_dataset(str(tmp_path / "short"), seq_len=8)


def test_other_than_regular_files_raise_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "socket"):
            with pytest.raises(ValueError, match=f"{name}: is not a regular file"):
                open_dataset(str(tmp_path / name), seq_len=2)


def test_errors_of_the_system_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: File name too long"):
        open_dataset(str(tmp_path / ("x" * 300)), seq_len=2)
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match="broken: cannot be read: No such file"):
        open_dataset(str(tmp_path), seq_len=2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_and_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(ValueError, match="secret: cannot be read: Permission denied"):
        open_dataset(str(tmp_path / "secret"), seq_len=2)
    (tmp_path / "folder").mkdir(mode=0)
    with pytest.raises(ValueError, match=r"folder.*: cannot be read: Permission denied"):
        open_dataset(str(tmp_path / "folder"), seq_len=2)


def test_a_file_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    with pytest.raises(ValueError, match="a: the data path names it twice"):
        open_dataset([str(tmp_path), str(tmp_path / "a")], seq_len=2)


@pytest.mark.parametrize("path", ["", [], [""]])
def test_an_empty_path_is_refused(path: str | list[str]) -> None:
    with pytest.raises(ValueError, match="is empty: name at least one file"):
        open_dataset(path, seq_len=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"vocab": 0}, "vocab=0 must be at least 1"),
        ({"vocab": 255}, "vocab=255 is less than the 256 ids of tokenizer='bytes': set it to 256"),
        ({"format": "megtron"}, "format='megtron' is not one of .*; did you mean 'megatron'"),
        ({"format": "megatron"}, "Megatron-LM's data is a .bin with its .idx"),
        ({"token_dtype": "uint32"}, "token_dtype='uint32' is for nanogpt files, but .* is text"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    (tmp_path / "a").write_text("some text")
    with pytest.raises(ValueError, match=message):
        open_dataset(str(tmp_path / "a"), **({"seq_len": 2} | options))  # type: ignore[arg-type]


def test_a_file_that_changed_its_size_after_opening_is_noticed(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}").write_text("text")
    dataset = open_dataset(str(tmp_path), seq_len=4)
    (tmp_path / "000").write_text("longer")  # its map has been given up for those of later files
    with pytest.raises(ValueError, match="000: has 6 bytes, and had 4 when it was opened"):
        dataset[0]
