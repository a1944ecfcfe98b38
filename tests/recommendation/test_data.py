# SPDX-License-Identifier: Apache-2.0
"""Samples of recommendation models: what is computed is repeatable and can be learned; what is read was written."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from stretto.recommendation import DLRMConfig
from stretto.recommendation.data import ClickBatch, CriteoClicks, SyntheticClicks
from stretto.recommendation.data import criteo as criteo_module
from stretto.recommendation.data.criteo import parse_lines

ROWS = (10, 1, 1000, *[50] * 23)
ONE = (1,) * 26


def line(label: object = 0, numbers: list[object] | None = None, categories: list[object] | None = None) -> str:
    fields = [label, *(numbers or range(13)), *(categories or [f"{n:08x}" for n in range(26)])]
    return "\t".join(map(str, fields))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def bag(batch: ClickBatch, table: int, sample: int) -> list[int]:
    start = table * len(batch.labels) + sample
    return batch.indices[batch.offsets[start] : batch.offsets[start + 1]].tolist()


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("".join(text + end for text in lines))
    return path


def test_numbers_are_logarithms_and_those_absent_or_negative_are_zero(logs: Path) -> None:
    write(logs / "a.txt", line(1, [5, "", -3, *range(10)]), line(0, [2**31 - 1, -(2**31), *range(11)]))
    batch = CriteoClicks(str(logs), ROWS, ONE).read(np.array([1, 0]))
    assert batch.labels.tolist() == [0.0, 1.0]
    assert batch.dense.dtype == np.float32
    np.testing.assert_allclose(batch.dense[1, :5], np.log1p([5, 0, 0, 0, 1]), rtol=1e-6)
    np.testing.assert_allclose(batch.dense[0, :2], [np.log(2.0**31), 0], rtol=1e-6)


def test_equal_categories_share_a_row_and_those_absent_have_the_first(logs: Path) -> None:
    one = ["68fd1e64", *["00000000"] * 25]
    other = ["68FD1E64", "", "", *["ffffffff"] * 23]
    write(logs / "a.txt", line(0, None, one), line(0, None, other), line(0, None, one))
    batch = CriteoClicks(str(logs), ROWS, ONE).read(np.arange(3))
    for table, rows in enumerate(ROWS):
        bags = [bag(batch, table, sample) for sample in range(3)]
        assert bags[0] == bags[2]
        assert all(len(found) == 1 and 0 <= found[0] < rows for found in bags)
    assert bag(batch, 0, 0) == bag(batch, 0, 1), "upper and lower case are one number"
    assert bag(batch, 2, 0) != [0]
    assert bag(batch, 2, 1) == [0]


def test_bags_of_several_rows_follow_from_the_category(logs: Path) -> None:
    write(logs / "a.txt", *[line(0, None, [f"{value:x}"] * 26) for value in (7, 8, 7)])
    pooling = (3, 2, 100, *[1] * 23)
    multi = CriteoClicks(str(logs), ROWS, pooling).read(np.arange(3))
    single = CriteoClicks(str(logs), ROWS, ONE).read(np.arange(3))
    for table, size in enumerate(pooling):
        for sample in range(3):
            found = bag(multi, table, sample)
            assert len(found) == size
            assert found[:1] == bag(single, table, sample)
            assert all(0 <= row < ROWS[table] for row in found)
        assert bag(multi, table, 0) == bag(multi, table, 2)
    assert len(set(bag(multi, 2, 0))) > 90


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_files_are_read_in_order_packed_or_not_and_in_pieces(
    logs: Path, monkeypatch: pytest.MonkeyPatch, end: str, is_packed: bool
) -> None:
    monkeypatch.setattr(criteo_module, "PIECE_BYTES", 700)
    numbers = range(57)
    texts = ["".join(line(n % 2, [n] * 13) + end for n in part) for part in (numbers[:40], numbers[40:])]
    texts[1] = texts[1].removesuffix(end)  # the last line's end may be absent
    for name, text in zip("ab", texts, strict=True):
        (logs / name).write_bytes(gzip.compress(text.encode()) if is_packed else text.encode())
    clicks = CriteoClicks(str(logs), ROWS, ONE)
    assert len(clicks) == 57
    batch = clicks.read(np.arange(57))
    np.testing.assert_allclose(batch.dense[:, 12], np.log1p(np.arange(57)), rtol=1e-6)
    assert batch.labels.tolist() == [n % 2 for n in numbers]


def test_text_is_parsed_once_and_again_when_it_has_changed(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(
        criteo_module, "parse_lines", lambda text, path, number: parsed.append(1) or parse_lines(text, path, number)
    )
    write(logs / "a.txt", line())
    first = CriteoClicks(str(logs), ROWS, ONE)
    assert CriteoClicks(str(logs / "a.txt"), ROWS, ONE).fingerprint == first.fingerprint
    assert len(parsed) == 1
    write(logs / "a.txt", line(), line(1))
    second = CriteoClicks(str(logs), ROWS, ONE)
    assert (len(second), len(parsed)) == (2, 2)
    assert second.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line(2), "line 3: the label must be 0 or 1, but is '2'"),
        (line(""), "line 3: the label must be 0 or 1, but is ''"),
        (
            line(0, [*range(12), "x1"]),
            "line 3: number 13 of 13 must be a whole number of 32 bits, .*, but is 'x1'",
        ),
        (line(0, ["-", *range(12)]), "line 3: number 1 of 13 must be .*, but is '-'"),
        (line(0, [2**31, *range(12)]), "line 3: number 1 of 13 must be .*, but is '2147483648'"),
        (line(0, [-(2**31) - 1, *range(12)]), "line 3: number 1 of 13 must be .*, but is '-2147483649'"),
        (line(0, [1.5, *range(12)]), r"line 3: number 1 of 13 must be .*, but is '1\.5'"),
        (line(0, None, [*"abcdefabcdefabcdefabcdefa", "g0"]), "line 3: category 26 of 26 must be .*, but is 'g0'"),
        (line(0, None, ["123456789", *"a" * 25]), "line 3: category 1 of 26 must be .*, but is '123456789'"),
        (line() + "\t1", "line 3 has 41 columns, but must have 40"),
        (line().split("\t", 1)[1], "line 3 has 39 columns, but must have 40: .*without labels cannot be trained on"),
        ("", "line 3 has 1 column, but must have 40"),
        ("a,b\n" + line(2), "line 3 has 1 column"),
    ],
)
def test_the_first_bad_line_is_named(logs: Path, cache: Path, text: str, words: str) -> None:
    write(logs / "a.txt", line(), line(1), text, line(3), "x")
    with pytest.raises(ValueError, match=rf"a\.txt: {words}"):
        CriteoClicks(str(logs), ROWS, ONE)
    assert not list(cache.rglob("*.records"))


def test_a_bad_line_is_counted_over_pieces(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_module, "PIECE_BYTES", 700)
    write(logs / "a.txt", *[line()] * 20, line(5))
    with pytest.raises(ValueError, match="line 21: the label"):
        CriteoClicks(str(logs), ROWS, ONE)


def test_a_packed_file_that_is_truncated_or_damaged_raises_with_the_last_valid_line(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_module, "PIECE_BYTES", 1000)
    random = np.random.default_rng(0)
    lines = [line(0, None, [f"{n:x}" for n in random.integers(0, 1 << 32, 26)]) for _ in range(500)]
    packed = gzip.compress(("\n".join(lines) + "\n").encode())
    (logs / "a.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"a\.gz: is cut short or damaged after line 2\d\d"):
        CriteoClicks(str(logs), ROWS, ONE)
    (logs / "a.gz").write_bytes(packed[:-8] + b"\0" * 8)
    with pytest.raises(ValueError, match=r"a\.gz: is cut short or damaged after line 49\d: CRC check failed"):
        CriteoClicks(str(logs), ROWS, ONE)


def test_files_that_are_not_there_or_empty_and_other_tables_are_refused(logs: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        CriteoClicks(str(logs / "b.txt"), ROWS, ONE)
    (logs / "a.txt").touch()
    with pytest.raises(ValueError, match="is empty"):
        CriteoClicks(str(logs / "a.txt"), ROWS, ONE)
    (logs / "a.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=r"a\.gz: holds no line"):
        CriteoClicks(str(logs / "a.gz"), ROWS, ONE)
    with pytest.raises(ValueError, match=r"26 categories, but model\.rows has 25 tables"):
        CriteoClicks(str(logs), ROWS[1:], ONE[1:])


def synthetic(samples: int = 5000, *, seed: int = 0, is_jagged: bool = False) -> SyntheticClicks:
    config = DLRMConfig.preset("small")
    return SyntheticClicks(samples, config.rows, config.pooling, dense=13, seed=seed, is_jagged=is_jagged)


def test_a_sample_depends_on_the_seed_and_its_number_alone() -> None:
    together, alone = synthetic().read(np.arange(100)), synthetic(200).read(np.array([40]))
    assert together.labels[40] == alone.labels[0]
    np.testing.assert_array_equal(together.dense[40], alone.dense[0])
    for table in range(8):
        assert bag(together, table, 40) == bag(alone, table, 0)
    assert not np.array_equal(synthetic(seed=1).read(np.arange(100)).dense, together.dense)


@pytest.mark.parametrize("is_jagged", [False, True])
def test_bags_have_the_pooling_in_every_sample_or_on_average(is_jagged: bool) -> None:
    config = DLRMConfig.preset("small")
    batch = synthetic(is_jagged=is_jagged).read(np.arange(5000))
    lengths = np.diff(batch.offsets).reshape(8, 5000)
    if not is_jagged:
        assert (lengths == np.array(config.pooling)[:, None]).all()
    np.testing.assert_allclose(lengths.mean(axis=1), config.pooling, rtol=0.1)
    assert (lengths.min() == 0) == is_jagged
    rows = np.repeat(np.array(config.rows), lengths.sum(axis=1))
    assert (batch.indices < rows).all()
    assert (batch.indices >= 0).all()


def test_labels_follow_a_logit_that_a_model_can_learn() -> None:
    batch, logits = synthetic(20000).read_with_logits(np.arange(20000))
    clicks = batch.labels == 1
    chance = np.searchsorted(np.sort(logits[~clicks]), logits[clicks]).mean() / (~clicks).sum()
    assert 0.85 < chance < 0.9, "the best AUC that is possible"
    assert 0.3 < clicks.mean() < 0.7


def test_mlperfs_bags_are_made_with_capped_tables() -> None:
    config = DLRMConfig.preset("mlperf-v2").capped(100)
    batch = SyntheticClicks(10, config.rows, config.pooling, dense=13, seed=0).read(np.arange(10))
    assert len(batch.indices) == 2140
    assert batch.indices.max() < 100
