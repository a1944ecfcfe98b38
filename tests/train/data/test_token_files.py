# SPDX-License-Identifier: Apache-2.0
"""nanoGPT's and Megatron-LM's files, written here with struct from the formats' definitions."""

import pickle
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.train.data import TokenDataset, open_dataset

MEGATRON_CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def write_nanogpt(path: Path, ids: list[int], code: str = "H") -> Path:
    path.write_bytes(struct.pack(f"<{len(ids)}{code}", *ids))
    return path


def write_megatron(
    prefix: Path,
    sequences: list[list[int]],
    code: int = 8,
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    sizes: list[int] | None = None,
    pointers: list[int] | None = None,
    documents: list[int] | None = None,
    counts: tuple[int, int] | None = None,
) -> Path:
    """A .bin and its .idx; each part of the index can be replaced by a wrong one."""
    ids = [token for sequence in sequences for token in sequence]
    letter = MEGATRON_CODES.get(code, "H")
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    sizes = [len(sequence) for sequence in sequences] if sizes is None else sizes
    if pointers is None:
        pointers = [sum(sizes[:number]) * struct.calcsize(letter) for number in range(len(sizes))]
    documents = list(range(len(sizes) + 1)) if documents is None else documents
    index = magic + struct.pack("<QB", version, code)
    index += struct.pack("<QQ", *(counts or (len(sizes), len(documents))))
    index += struct.pack(f"<{len(sizes)}i", *sizes)
    index += struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(documents)}q", *documents)
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix.with_suffix(".bin")


def ids_of(dataset: TokenDataset) -> list[int]:
    assert dataset.seq_len == 1
    return [int(dataset[0][0]), *(int(sequence[1]) for sequence in dataset)]


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, 50256), min_size=2, max_size=200), code=st.sampled_from("HI"))
def test_nanogpt_ids_are_read_back(tmp_path_factory: pytest.TempPathFactory, ids: list[int], code: str) -> None:
    file = write_nanogpt(tmp_path_factory.mktemp("tokens") / "train.bin", ids, code)
    dtype = {"H": "uint16", "I": "uint32"}[code]
    dataset = open_dataset(str(file), seq_len=1, vocab=50257, token_dtype=dtype)
    assert ids_of(dataset) == ids
    assert dataset.vocab_size == 50257


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=20),
    code=st.sampled_from(sorted(MEGATRON_CODES)),
    named_by=st.sampled_from(["", ".bin", ".idx"]),
)
def test_megatron_sequences_are_read_back_as_one_stream(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], code: int, named_by: str
) -> None:
    sequences = [[1, 2], *sequences]
    prefix = tmp_path_factory.mktemp("tokens") / "corpus_text_document"
    write_megatron(prefix, sequences, code)
    dataset = open_dataset(f"{prefix}{named_by}", seq_len=1, vocab=128)
    assert ids_of(dataset) == [token for sequence in sequences for token in sequence]


def test_shards_in_a_folder_are_one_stream(tmp_path: Path) -> None:
    write_megatron(tmp_path / "b", [[4], [5, 6]])
    write_megatron(tmp_path / "a", [[1, 2], [3]])
    for options in ({}, {"format": "megatron"}):
        assert ids_of(open_dataset(str(tmp_path), seq_len=1, **options)) == [1, 2, 3, 4, 5, 6]  # type: ignore[arg-type]
    (tmp_path / "raw").mkdir()
    write_nanogpt(tmp_path / "raw" / "001.bin", [3, 4])
    write_nanogpt(tmp_path / "raw" / "000.bin", [1, 2])
    assert ids_of(open_dataset(str(tmp_path / "raw"), seq_len=1)) == [1, 2, 3, 4]


def test_the_fingerprint_is_of_the_ids_and_not_of_how_they_are_stored(tmp_path: Path) -> None:
    seed = 7
    print(f"seed={seed}")
    ids = np.random.default_rng(seed).integers(1, 50257, 100_000).tolist()
    one = write_nanogpt(tmp_path / "one.bin", ids)
    wide = write_nanogpt(tmp_path / "wide.bin", ids, "I")
    parts = [write_nanogpt(tmp_path / "p.bin", ids[:777]), write_nanogpt(tmp_path / "q.bin", ids[777:])]
    megatron = write_megatron(tmp_path / "megatron", [ids[:5], ids[5:]], 4)
    changed = write_nanogpt(tmp_path / "changed.bin", [*ids[:-1], ids[-1] ^ 1])
    shorter = write_nanogpt(tmp_path / "shorter.bin", ids[:-1])

    expected = open_dataset(str(one), seq_len=8).fingerprint
    same = [
        open_dataset(str(one), seq_len=100, vocab=60000),
        open_dataset(str(wide), seq_len=8, vocab=50257, token_dtype="uint32"),
        open_dataset([str(part) for part in parts], seq_len=8),
        open_dataset(str(megatron), seq_len=8, vocab=50257),
    ]
    assert {dataset.fingerprint for dataset in same} == {expected}
    for other in (changed, shorter):
        assert open_dataset(str(other), seq_len=8, vocab=65536).fingerprint != expected


def test_a_huge_file_opens_at_once_and_is_read_anywhere(tmp_path: Path) -> None:
    huge = tmp_path / "huge.bin"
    with huge.open("wb") as file:
        file.truncate(1 << 36)
        file.seek((1 << 36) - 6)
        file.write(struct.pack("<3H", 7, 8, 9))
    begin = time.process_time()
    dataset = open_dataset(str(huge), seq_len=2, vocab=10)
    assert dataset.fingerprint
    assert time.process_time() - begin < 20  # to read all of it takes longer
    assert dataset.tokens == 1 << 35
    assert dataset[len(dataset) - 1].tolist() == [0, 7, 8]
    assert open_dataset(str(huge), seq_len=1, vocab=10)[(1 << 35) - 2].tolist() == [8, 9]


def test_a_pickled_data_set_carries_no_content(tmp_path: Path) -> None:
    dataset = open_dataset(str(write_nanogpt(tmp_path / "a.bin", [5] * 100_000)), seq_len=8)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    assert pickle.loads(pickled)[3].tolist() == [5] * 9


def test_sequences_outside_the_data_are_an_index_error(tmp_path: Path) -> None:
    dataset = open_dataset(str(write_nanogpt(tmp_path / "a.bin", list(range(9)))), seq_len=4)
    assert len(list(dataset)) == 2
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sequence {index} is not one of 0 to 1"):
            dataset[index]


def test_an_id_outside_the_vocabulary_is_found_on_opening_in_what_is_sampled(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "a.bin", [1] * 50)
    write_nanogpt(tmp_path / "b.bin", [1, 2, 3, 500, 600])
    message = r"b\.bin: token 500 at position 3 of 5 is outside the vocabulary, 0 to 99, as 2 of 55 sampled ids "
    message += "are: the file is of a tokenizer with more ids: set vocab to at least 601"
    with pytest.raises(ValueError, match=message):
        open_dataset([str(tmp_path / "a.bin"), str(tmp_path / "b.bin")], seq_len=2, vocab=100)


def test_few_ids_outside_the_vocabulary_are_damage_and_no_reason_for_a_larger_one(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "a.bin", [1] * 5000 + [60000] + [1] * 5000)
    message = (
        r"token 60000 at position 5000 of 10001 .* 1 of 10,001 sampled ids are: the file is probably damaged there"
    )
    with pytest.raises(ValueError, match=message):
        open_dataset(str(tmp_path / "a.bin"), seq_len=2, vocab=100)


def test_an_id_outside_the_vocabulary_between_the_samples_is_found_when_it_is_read(tmp_path: Path) -> None:
    ids = np.ones(256 * 16384 * 2 + 1, dtype="<u2")
    ids[16384 * 3] = 70
    ids.tofile(tmp_path / "a.bin")
    sampled = [open_dataset(str(tmp_path / "a.bin"), seq_len=16384, vocab=vocab) for vocab in (71, 2)]
    assert sampled[0][3][0] == 70
    assert sampled[1][5].max() == 1
    with pytest.raises(ValueError, match=f"token 70 at position {16384 * 3} of {len(ids)} is outside"):
        sampled[1][3]


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    file = write_megatron(tmp_path / "a", [[1, 2, -3]], 4)
    with pytest.raises(ValueError, match=r"a\.bin: token -3 at position 2 of 3 is outside"):
        open_dataset(str(file), seq_len=1, vocab=10)


def test_int64_ids_are_read_as_such(tmp_path: Path) -> None:
    ids = np.arange(3000)
    ids.astype("<i8").tofile(tmp_path / "a.bin")
    dataset = open_dataset(str(tmp_path / "a.bin"), seq_len=2999, vocab=3000, token_dtype="int64")
    assert dataset[0].tolist() == ids.tolist()


def test_the_vocabulary_is_what_16_bits_bound_and_must_be_given_for_wider_ids(tmp_path: Path) -> None:
    narrow = write_nanogpt(tmp_path / "a.bin", [1, 65535])
    assert open_dataset(str(narrow), seq_len=1).vocab_size == 65536
    wide = write_nanogpt(tmp_path / "b.bin", [1, 65535], "I")
    with pytest.raises(ValueError, match=r"b\.bin: uint32 ids do not bound the vocabulary: set vocab"):
        open_dataset(str(wide), seq_len=1, token_dtype="uint32")


@pytest.mark.parametrize(
    ("content", "dtype", "message"),
    [
        (b"", "uint16", r"a\.bin: is empty"),
        (b"12345", "uint16", r"has 5 bytes, not a multiple of the 2 bytes .* \(whole ids take 4\)"),
        (b"123456", "uint32", r"has 6 bytes, not a multiple of the 4 bytes"),
        (b"123456", "uint8", "token_dtype='uint8' is not one of uint16, uint32, int64"),
        (b"PK\x03\x04" + bytes(60), "uint16", "is a zip archive"),
        (b"\x93NUMPY" + bytes(60), "uint16", "is a numpy .npy file"),
        (struct.pack("<256i", 20240520, 1, *[0] * 254) + bytes(20), "uint16", "begins with llm.c's header"),
        (struct.pack("<2000I", *range(1, 2001)), "uint16", "every second id is 0.*set token_dtype to 'uint32'"),
        (struct.pack("<2000q", *range(1, 2001)), "uint16", "every second id is 0.*set token_dtype to 'int64'"),
        (struct.pack("<2000q", *range(1, 2001)), "uint32", "every second id is 0.*set token_dtype to 'int64'"),
        (struct.pack("<2000I", *range(1, 128000, 64)), "uint16", "or hardly more.*set token_dtype to 'uint32'"),
        (struct.pack("<2000q", *range(1, 128000, 64)), "uint16", "or hardly more.*set token_dtype to 'int64'"),
        (struct.pack("<2000I", *range(1, 2001)), "int64", "the file is damaged, or of another token type"),
    ],
)
def test_a_nanogpt_file_that_is_none_is_refused(tmp_path: Path, content: bytes, dtype: str, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_dataset(str(tmp_path / "a.bin"), seq_len=1, vocab=50257, token_dtype=dtype)


GOOD = [[1, 2, 3], [4], [5, 6]]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"magic": b"NOTMAGIC\x00"}, r"a\.idx: is not a Megatron-LM index: it begins with b'NOTMAGIC.*set format"),
        ({"magic": b"TNTIDX\x00\x00\x00"}, r"a\.idx: is of Megatron-LM's old format"),
        ({"version": 2}, r"a\.idx: is of version 2; the known version is 1"),
        ({"code": 9}, r"a\.idx: dtype code 9 is unknown; the codes are 1 to 8"),
        ({"code": 0}, r"a\.idx: dtype code 0 is unknown"),
        ({"code": 6}, r"dtype code 6 means float64; token ids are integers"),
        ({"code": 7}, r"dtype code 7 means float32; token ids are integers"),
        ({"sizes": [3, -1, 4]}, r"a\.idx: sequence 1 has -1 tokens"),
        ({"pointers": [0, 7, 8]}, r"a\.idx: sequence 1 begins at byte 7, but the one before it ends at 6"),
        ({"sizes": [3, 1, 200]}, r"a\.bin: truncated: has 12 bytes, but by its index the first 3 of 3 .* take 408"),
        ({"sizes": [3, 1, 1]}, r"a\.bin: has 12 bytes, but its index describes 10"),
        ({"sizes": [], "documents": [0]}, r"a\.idx: describes no sequences"),
        ({"counts": (2**64 - 1, 4)}, r"a\.idx: truncated: has 102 bytes, but 18446744073709551615 sequences"),
        ({"counts": (3, 2**63)}, r"a\.idx: truncated"),
        ({"counts": (3, 5)}, r"a\.idx: truncated: has 102 bytes, .* take 110"),
        ({"counts": (3, 3)}, r"a\.idx: followed by something else: has 102 bytes, .* take 94"),
        ({"counts": (4, 2)}, r"a\.idx: multimodal: has 102 bytes, but 4 sequences .* take 98"),  # and a mode each
        ({"documents": [0, 2, 1]}, r"a\.idx: document index 2 is 1; they rise from 0 to 3"),
        ({"documents": [0, 4]}, r"a\.idx: document index 1 is 4; they rise from 0 to 3"),
        ({"documents": [-1, 3]}, r"a\.idx: document index 0 is -1"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, parts: dict[str, object], message: str) -> None:
    file = write_megatron(tmp_path / "a", GOOD, **parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        open_dataset(str(file), seq_len=1, vocab=100)


def test_every_truncation_of_an_index_is_refused(tmp_path: Path) -> None:
    file = write_megatron(tmp_path / "a", GOOD)
    index = file.with_suffix(".idx").read_bytes()
    for size in range(len(index)):
        file.with_suffix(".idx").write_bytes(index[:size])
        with pytest.raises(ValueError, match=r"a\.idx: (is empty|truncated|is not a Megatron-LM index)"):
            open_dataset(str(file), seq_len=1)


def test_every_truncation_of_megatron_data_is_refused(tmp_path: Path) -> None:
    file = write_megatron(tmp_path / "a", GOOD)
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"a\.bin: (is empty|truncated: has \d+ bytes)"):
            open_dataset(str(file), seq_len=1)
    file.write_bytes(content + b"\0\0")
    with pytest.raises(ValueError, match=r"a\.bin: has 14 bytes, but its index describes 12"):
        open_dataset(str(file), seq_len=1)


def test_half_of_a_megatron_pair_is_refused(tmp_path: Path) -> None:
    file = write_megatron(tmp_path / "a", GOOD)
    file.unlink()
    for named in ("a.idx", "a", ""):
        with pytest.raises(ValueError, match=r"a\.bin: no such file"):
            open_dataset(str(tmp_path / named), seq_len=1)
    write_nanogpt(tmp_path / "b.bin", [1, 2])
    with pytest.raises(ValueError, match=r"b\.idx: no such file"):
        open_dataset(str(tmp_path / "b.bin"), format="megatron", seq_len=1)


def test_an_index_of_more_than_one_chunk_is_checked_to_its_end(tmp_path: Path) -> None:
    count = (1 << 20) + 3
    np.ones(count, dtype="<u2").tofile(tmp_path / "a.bin")

    def write_index(pointers: np.ndarray) -> None:
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, 2)
        tables = [np.ones(count, dtype="<i4"), pointers, np.array([0, count])]
        (tmp_path / "a.idx").write_bytes(header + b"".join(table.tobytes() for table in tables))

    pointers = np.arange(count, dtype="<i8") * 2
    write_index(pointers)
    assert open_dataset(str(tmp_path / "a"), seq_len=1).tokens == count
    pointers[-1] += 1
    write_index(pointers)
    with pytest.raises(ValueError, match=f"sequence {count - 1} begins at byte {2 * count - 1}"):
        open_dataset(str(tmp_path / "a"), seq_len=1)


def test_ambiguous_formats_raise(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(ValueError, match=r"several formats: .*notes\.txt \(text\).*train\.bin \(nanogpt\).*set format"):
        open_dataset(str(tmp_path), seq_len=1)
    assert open_dataset(str(tmp_path), format="nanogpt", seq_len=1).tokens == 3
    (tmp_path / "train.idx").write_text("notes")
    with pytest.raises(ValueError, match=r"train\.idx: is not a Megatron-LM index.*set format to 'nanogpt'"):
        open_dataset(str(tmp_path / "train.bin"), seq_len=1)
    assert open_dataset(str(tmp_path / "train.bin"), format="nanogpt", seq_len=1).tokens == 3


def test_a_folder_with_held_out_tokens_is_refused(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    write_nanogpt(tmp_path / "val.bin", [4, 5, 6])
    for format in ("auto", "nanogpt"):
        with pytest.raises(ValueError, match=r"val\.bin: by its name it is held out.*train\.bin"):
            open_dataset(str(tmp_path), format=format, seq_len=1)
    assert open_dataset(str(tmp_path / "val.bin"), seq_len=1)[0].tolist() == [4, 5]


def test_a_tokenizer_for_tokens_is_refused(tmp_path: Path) -> None:
    file = write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    with pytest.raises(ValueError, match=r"tokenizer='x.json' is for text, but .*train\.bin holds nanogpt tokens"):
        open_dataset(str(file), tokenizer="x.json", seq_len=1)
