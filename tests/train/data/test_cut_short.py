# SPDX-License-Identifier: Apache-2.0
"""Data files that are cut short while they are in use: named, with both sizes, and never a dead process or zeros."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.conftest import Ranks
from tests.recommendation.test_data import ONE, ROWS, line
from tests.train import model_folders, runs
from tests.train.data.test_token_files import write_megatron, write_nanogpt
from tests.train.data.test_tokenizer import TEXT

from stretto.recommendation.data import CriteoClicks
from stretto.recommendation.data import criteo as criteo_module
from stretto.train.config import TrainConfig
from stretto.train.data import Sampler, open_dataset
from stretto.train.data import text as text_module
from stretto.train.data.token_files import MEGATRON_HEADER

Read = Callable[[], Any]
IDS = [number % 250 for number in range(40_000)]  # several pages of memory


def cached(folder: Path, ending: str) -> Path:
    (found,) = folder.rglob(f"*{ending}")
    return found


def open_text(folder: Path, cache: Path) -> tuple[Path, Read]:
    (folder / "a.txt").write_text(TEXT * 10)
    dataset = open_dataset(str(folder / "a.txt"), seq_len=1)
    return folder / "a.txt", lambda: dataset.read(len(dataset) - 1)


def open_ids(folder: Path, code: str, dtype: str) -> tuple[Path, Read]:
    file = write_nanogpt(folder / "a.bin", IDS, code)
    dataset = open_dataset(str(file), seq_len=1, vocab=256, token_dtype=dtype)
    return file, lambda: dataset.read(len(dataset) - 1)


def open_megatron(folder: Path, cache: Path) -> tuple[Path, Read]:
    file = write_megatron(folder / "a", [IDS[:20_000], IDS[20_000:]])
    dataset = open_dataset(str(file), seq_len=1, vocab=256)
    return file, lambda: dataset.read(len(dataset) - 1)


def open_tokenized(folder: Path, cache: Path) -> tuple[Path, Read]:
    model_folders.write_tokenizer(folder / "model")
    (folder / "a.txt").write_text(TEXT * 10)
    dataset = open_dataset(str(folder / "a.txt"), tokenizer=str(folder / "model" / "tokenizer.json"), seq_len=1)
    return cached(cache, ".bin"), lambda: dataset.read(len(dataset) - 1)


def open_chat(folder: Path, cache: Path) -> tuple[Path, Read]:
    model_folders.write_tokenizer(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    turns = [("What is a fugue?", TEXT[:900])] * 20
    path = model_folders.write_chat(folder / "a.jsonl", turns)
    dataset = open_dataset(path, model_folder=folder / "model", seq_len=64)
    return cached(cache, ".chat"), lambda: dataset.read(len(dataset) - 1)


def open_criteo(folder: Path, cache: Path) -> tuple[Path, Read]:
    (folder / "logs").mkdir()
    (folder / "logs" / "a.txt").write_text("".join(line(number % 2) + "\n" for number in range(200)))
    clicks = CriteoClicks(str(folder / "logs"), ROWS, ONE)
    return cached(cache, ".records"), lambda: clicks.read(np.array([3, 199]))


KINDS = {
    "text": open_text,
    "uint16": lambda folder, cache: open_ids(folder, "H", "uint16"),
    "uint32": lambda folder, cache: open_ids(folder, "I", "uint32"),
    "int64": lambda folder, cache: open_ids(folder, "q", "int64"),
    "megatron": open_megatron,
    "tokenized": open_tokenized,
    "chat": open_chat,
    "criteo": open_criteo,
}


@pytest.mark.parametrize("left", ["all but a byte", "half", "nothing"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_short_after_it_was_opened_is_named_with_its_sizes(
    tmp_path: Path, cache: Path, kind: str, left: str
) -> None:
    """Half: whole pages are gone, which ends a process that reads a map. All but a byte: a map would have a zero."""
    (tmp_path / "model").mkdir()
    file, read = KINDS[kind](tmp_path, cache)
    read()
    size = file.stat().st_size
    now = {"all but a byte": size - 1, "half": size // 2, "nothing": 0}[left]
    if kind == "chat" and left == "all but a byte":
        now = size // 3 * 2  # the last bytes hold no ids
    os.truncate(file, now)
    with pytest.raises(ValueError, match=rf"{file.name}: was cut short .* has {now} bytes, and had {size} when it was"):
        read()


@pytest.mark.parametrize("how", ["written to", "replaced"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "criteo"])
def test_a_file_whose_bytes_change_after_it_was_opened_is_named(
    tmp_path: Path, cache: Path, kind: str, how: str
) -> None:
    """As many bytes: only the time of modification, or the file's own number, tells. Also before it is first read."""
    (tmp_path / "model").mkdir()
    file, read = KINDS[kind](tmp_path, cache)
    if how == "replaced":
        read()
        (tmp_path / "other").write_bytes(file.read_bytes()[::-1])
        os.replace(tmp_path / "other", file)
    else:
        with file.open("r+b") as opened:
            opened.write(b"\1\0")
        os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))  # file systems' clocks may tick every 10 ms
    with pytest.raises(ValueError, match=rf"{file.name}: was {how} after this run had opened it"):
        read()


def test_a_file_that_is_deleted_can_still_be_read(tmp_path: Path) -> None:
    file = write_nanogpt(tmp_path / "a.bin", IDS)
    dataset = open_dataset(str(file), seq_len=16, vocab=256)
    file.unlink()
    assert dataset[0].tolist() == IDS[:17]


def test_a_part_that_is_still_there_can_be_read(tmp_path: Path, cache: Path) -> None:
    file = write_nanogpt(tmp_path / "a.bin", IDS)
    dataset = open_dataset(str(file), seq_len=16, vocab=256)
    os.truncate(file, 2 * 20_000)
    assert dataset[0].tolist() == IDS[:17]


def test_a_cached_conversation_file_that_is_damaged_is_to_be_deleted(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model").mkdir()
    file, _ = open_chat(tmp_path, cache)
    content = file.read_bytes()
    for size in (len(content) - 8, len(content) // 2, 3):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match=rf"{file.name}: is cut short or damaged: delete it"):
            open_dataset(str(tmp_path / "a.jsonl"), model_folder=tmp_path / "model", seq_len=64)


def cut_at_first_call(function: Callable[..., Any], file: Path, size: int) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        os.truncate(file, min(size, file.stat().st_size))
        return function(*arguments, **options)

    return call


def test_a_text_that_is_cut_short_while_it_is_tokenized_is_not_cached_as_a_whole(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model").mkdir()
    model_folders.write_tokenizer(tmp_path / "model")
    file = tmp_path / "a.txt"
    file.write_text(TEXT * 10)
    size = file.stat().st_size
    with (
        mock.patch.object(text_module, "PIECE_BYTES", 1 << 10),
        mock.patch.object(text_module, "_decode", cut_at_first_call(text_module._decode, file, size // 2)),
        pytest.raises(ValueError, match=rf"a\.txt: was cut short .* has \d+ bytes, and had {size} when"),
    ):
        open_dataset(str(file), tokenizer=str(tmp_path / "model" / "tokenizer.json"), seq_len=16)
    assert list(cache.rglob("*.bin")) == []


@pytest.mark.parametrize("at", ["in a line", "after a line"])
def test_conversations_that_are_cut_short_while_they_are_tokenized_are_named(
    tmp_path: Path, cache: Path, at: str
) -> None:
    (tmp_path / "model").mkdir()
    model_folders.write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    file = Path(model_folders.write_chat(tmp_path / "a.jsonl", [("What is a fugue?", TEXT[:900])] * 500))
    size = file.stat().st_size
    lines = file.read_bytes().splitlines(keepends=True)
    left = sum(map(len, lines[:300])) + (50 if at == "in a line" else 0)
    from stretto.train.data import chat

    with (
        mock.patch.object(chat, "_parse", cut_at_first_call(chat._parse, file, left)),
        pytest.raises(ValueError, match=rf"a\.jsonl: was cut short .* has {left} bytes, and had {size} when"),
    ):
        open_dataset(str(file), model_folder=tmp_path / "model", seq_len=64)


def test_logs_that_are_cut_short_while_they_are_parsed_are_named(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = folder / "a.txt"
    file.write_text("".join(line(number % 2) + "\n" for number in range(200)))
    size, left = file.stat().st_size, len(line(0) + "\n") * 120
    with (
        mock.patch.object(criteo_module, "PIECE_BYTES", 1 << 10),
        mock.patch.object(criteo_module, "parse_lines", cut_at_first_call(criteo_module.parse_lines, file, left)),
        pytest.raises(ValueError, match=rf"a\.txt: was cut short .* has \d+ bytes, and had {size} when"),
    ):
        CriteoClicks(str(folder), ROWS, ONE)
    assert list(cache.rglob("*.records")) == []


def test_an_index_that_is_cut_short_while_it_is_checked_is_named(tmp_path: Path) -> None:
    file = write_megatron(tmp_path / "a", [[1, 2, 3]] * 50)
    index = file.with_suffix(".idx")
    size = index.stat().st_size
    with (
        mock.patch.object(np, "fromfile", cut_at_first_call(np.fromfile, index, MEGATRON_HEADER.size + 60)),
        pytest.raises(ValueError, match=rf"a\.idx: was cut short .* has 94 bytes, and had {size} when"),
    ):
        open_dataset(str(file), seq_len=2, vocab=9)


def train_and_cut(config: TrainConfig, file: Path) -> None:
    """Train; the data file loses its second half when step 3 chooses its rows."""
    indices = Sampler.indices

    def choose(sampler: Sampler, number: int) -> Any:
        if number == 2:
            os.truncate(file, 100)
        return indices(sampler, number)

    with mock.patch.object(Sampler, "indices", choose):
        runs.train_quietly(config)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return runs.configure(tmp_path / "run", "grid.data=2")


def test_a_run_whose_data_is_cut_short_ends_with_the_files_name(
    ranks: Callable[[int], Ranks], tmp_path: Path, config: TrainConfig
) -> None:
    file = tmp_path / "text.txt"
    size = len(runs.TEXT)
    with pytest.raises(ValueError, match=rf"{file}: was cut short .* it has 100 bytes, and had {size} when"):
        ranks(2).run(train_and_cut, config, file)
    assert [line["step"] for line in runs.metrics_of(config.out)] == [1, 2]
