# SPDX-License-Identifier: Apache-2.0
"""A flipped bit of a checkpoint is found before it is used, by file and tensor, and the checkpoint before is taken."""

import contextlib
import io
import json
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.conftest import Ranks
from tests.train import runs

from stretto.train.checkpoint import (
    checkpoint_path,
    find_checkpoint,
    load_checkpoint,
    load_state,
    newest_checkpoint,
    training_state,
)
from stretto.train.checkpoint.integrity import DamagedCheckpointError, DamagedError
from stretto.train.checkpoint.metadata import CheckpointMetadata, TensorEntry, read_metadata
from stretto.train.checkpoint.pieces import check_container
from stretto.train.checkpoint.storage import read_tensor

MakeRanks = Callable[[int], Ranks]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensor_at(metadata: CheckpointMetadata, file: str, byte: int) -> str:
    """The name of the tensor to which a byte of a shard file belongs."""
    (name,) = (
        name
        for name, entry in metadata.tensors.items()
        for chunk in entry.chunks
        if chunk.file == file and chunk.start <= byte < chunk.start + chunk.bytes
    )
    return name


# --- checksums


def test_each_piece_has_zlibs_checksum_of_its_bytes(saved: Path) -> None:
    path = checkpoint_path(saved, 2)
    for entry in read_metadata(path).tensors.values():
        for chunk in entry.chunks:
            content = (path / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.bytes]
            assert chunk.checksum == f"crc32:{zlib.crc32(content):08x}"


# --- a flipped bit is found


@pytest.mark.parametrize("version", [1, 2])
def test_a_flipped_bit_of_a_shard_is_found_by_file_and_tensor(copy: Path, version: int, seed: random.Random) -> None:
    path = checkpoint_path(copy, 2)
    if version == 1:
        runs.as_format_1(path)
    file, metadata, model = path / "__0_0.distcp", read_metadata(path), runs.make_gpt()
    load_checkpoint(path, model)
    weights = [name for name in metadata.tensors if name.startswith("model.")]
    for name in seed.sample(weights, 8):
        (chunk,) = metadata.tensors[name].chunks
        first, stop = chunk.start, chunk.start + chunk.bytes
        if version == 1:  # what is around torch's records has no checksum
            first += file.read_bytes()[first:stop].index(b"ctorch._utils")
            stop = first + 100
        bit = seed.randrange(8 * first, 8 * stop)
        runs.flip_bit(file, bit)
        with pytest.raises(DamagedCheckpointError) as caught:
            load_checkpoint(path, model)
        message = str(caught.value)
        assert message.startswith(f"the checkpoint {path} cannot be read: on rank 0, __0_0.distcp, {name}, bytes ")
        assert caught.value.path == path
        with pytest.raises(DamagedError, match=rf"step-00000002 is damaged: __0_0\.distcp, {name}, bytes "):
            read_tensor(path, metadata.tensors[name], name)
        runs.flip_bit(file, bit)
    load_checkpoint(path, model)


def test_the_message_has_the_bytes_and_both_checksums(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    (chunk,) = read_metadata(path).tensors["model.norm.weight"].chunks
    runs.flip_bit(path / chunk.file, 8 * chunk.start + 3)
    content = (path / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.bytes]
    with pytest.raises(DamagedCheckpointError) as caught:
        load_checkpoint(path, runs.make_gpt())
    assert str(caught.value).endswith(
        f"__0_0.distcp, model.norm.weight, bytes {chunk.start} to {chunk.start + chunk.bytes}: the checksum differs: "
        f"{chunk.checksum} expected, crc32:{zlib.crc32(content):08x} found"
    )


def test_a_flipped_bit_of_the_index_is_found_wherever_it_is(copy: Path, seed: random.Random) -> None:
    path = checkpoint_path(copy, 2)
    file = path / "metadata.json"
    size = 8 * file.stat().st_size
    head = range(8 * 60)  # its checksum, and its format
    for bit in [*head, *(seed.randrange(size) for _ in range(200)), size - 1]:
        runs.flip_bit(file, bit)
        with pytest.raises(DamagedError, match=r"metadata\.json .*damaged"):
            read_metadata(path)
        runs.flip_bit(file, bit)
    read_metadata(path)


def test_white_space_added_to_the_index_is_found(copy: Path) -> None:
    file = checkpoint_path(copy, 2) / "metadata.json"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(DamagedError, match=r"its checksum differs: crc32:\w+ expected, crc32:\w+ found"):
        read_metadata(file.parent)


def test_only_what_is_needed_is_read_and_checked(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    damage(path, "model.norm.weight")
    model = runs.make_gpt()
    others = {name: state for name, state in training_state(model, None).items() if name != "model.norm.weight"}
    load_state(path, read_metadata(path), others)
    with pytest.raises(DamagedCheckpointError):
        load_state(path, read_metadata(path), training_state(model, None))


# --- torch's container


def container_of(value: Any) -> bytearray:
    file = io.BytesIO()
    torch.save(value, file)
    return bytearray(file.getvalue())


CONTAINERS = {
    "vector": torch.arange(5.0),
    "number": torch.tensor(3.0),
    "nothing": torch.empty(0),
    "matrix in bfloat16": torch.ones(3, 4, dtype=torch.bfloat16),
    "objects": {"a": torch.ones(3), "b": [1, "two"]},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_torchs_files_are_checked_by_their_crcs(name: str) -> None:
    assert check_container(memoryview(container_of(CONTAINERS[name]))) == (None, True)


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["vector", "nothing"])
def test_a_flipped_bit_of_a_container_is_found_or_changes_no_number(name: str, step: int) -> None:
    content, found = container_of(CONTAINERS[name]), 0
    for bit in range(0, 8 * len(content), step):
        content[bit // 8] ^= 1 << bit % 8
        fault, _ = check_container(memoryview(content))
        if fault is None:
            with contextlib.suppress(RuntimeError):  # torch refuses it
                assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), CONTAINERS[name]), f"bit {bit}"
        found += fault is not None
        content[bit // 8] ^= 1 << bit % 8
    assert found > len(content) // step


def test_a_container_that_is_cut_short_is_found() -> None:
    content = container_of(torch.arange(5.0))
    for length in range(0, len(content), 50):
        assert check_container(memoryview(content)[:length])[0] is not None, length


def test_another_programs_container_is_checked_by_its_records_crcs() -> None:
    source, file = container_of(torch.arange(5.0)), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as records, zipfile.ZipFile(file, "w") as rewritten:
        for name in records.namelist():
            rewritten.writestr(name, records.read(name))
    content = bytearray(file.getvalue())
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), torch.arange(5.0))
    assert check_container(memoryview(content)) == (None, True)
    content[content.index(torch.arange(5.0).numpy().tobytes())] ^= 1
    fault, _ = check_container(memoryview(content))
    assert fault is not None
    assert "archive/data/0" in fault


def test_a_container_whose_records_overlap_is_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as container:
        container.writestr("data", bytes(1000))
        container.filelist *= 1000
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda _: pytest.fail("it was read"))
    fault, _ = check_container(memoryview(file.getvalue()))
    assert fault is not None
    assert "overlap" in fault


def test_every_flipped_bit_of_another_programs_container_is_a_fault_or_harmless() -> None:
    """Also the bit that says that a record is encrypted, for which zipfile raises RuntimeError."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as container:
        container.writestr("archive/data/0", bytes(range(100)))
    content = bytearray(file.getvalue())
    reasons = set()
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        fault, _ = check_container(memoryview(content))
        reasons.add(fault or "")
        content[bit // 8] ^= 1 << bit % 8
    assert any("is encrypted" in reason for reason in reasons)


def test_a_record_beyond_what_can_be_addressed_is_a_fault() -> None:
    name, content = b"archive/data/0", b"x" * 100
    # An entry of the central directory whose record begins at byte 2^64 - 1, by a zip64 extra field.
    sizes = struct.pack("<III", zlib.crc32(content), len(content), len(content))
    entry = struct.pack("<4sHHHHHH", b"PK\1\2", 45, 45, 0, 0, 0, 0) + sizes
    entry += struct.pack("<HHHHHII", len(name), 12, 0, 0, 0, 0, 0xFFFFFFFF) + name
    entry += struct.pack("<HHQ", 1, 8, 2**64 - 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(content), 0)
    fault, _ = check_container(memoryview(content + entry + end))
    assert fault is not None
    assert "archive/data/0" in fault


def test_a_container_without_crcs_is_reported_as_unchecked() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        content = container_of(torch.arange(5.0))
    finally:
        torch.serialization.set_crc32_options(True)
    assert check_container(memoryview(content)) == (None, False)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_bytes_that_no_checksum_covers_are_damaged_whatever_torch_makes_of_them(
    tmp_path: Path, seed: random.Random
) -> None:
    """As of a folder that was written without CRCs: torch's unpickler raises errors of many classes."""
    file = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(6.0), file)
    finally:
        torch.serialization.set_crc32_options(True)
    whole = file.getvalue()
    start, stop = whole.index(b"ctorch._utils"), whole.index(b"PK\7\x08")
    place = {"offsets": (0,), "sizes": (6,), "file": "__0_0.distcp", "start": 0, "bytes": len(whole)}
    entry = TensorEntry.model_validate({"shape": (6,), "dtype": "float32", "chunks": [place]})
    messages = []
    for _ in range(300):
        content = bytearray(whole)
        content[seed.randrange(start, stop)] = seed.randrange(256)
        (tmp_path / "__0_0.distcp").write_bytes(content)
        try:
            read_tensor(tmp_path, entry, "weight")
        except DamagedError as error:  # any other error fails the test
            messages.append(str(error))
    assert len(messages) > 30
    assert all("weight, bytes 0 to" in message for message in messages)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: ...")])
def test_a_lack_of_memory_is_not_taken_for_damage(
    copy: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `latest` would go back to an older checkpoint, and set this one aside."""
    path = checkpoint_path(copy, 2)
    entry = read_metadata(path).tensors["model.norm.weight"]

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(type(error)) as raised:
        read_tensor(path, entry, "model.norm.weight")
    assert raised.value is error


# --- the checkpoint before it


def damage(path: Path, name: str = "model.norm.weight") -> None:
    (chunk, *_) = read_metadata(path).tensors[name].chunks
    runs.flip_bit(path / chunk.file, 8 * (chunk.start + chunk.bytes // 2))


@pytest.fixture(scope="module")
def trained(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of two ranks with checkpoints of steps 2, 4 and 6, and its losses."""
    out = tmp_path_factory.mktemp("trained") / "run"
    config = runs.configure(out, "grid.x=2", "train.checkpoint_every=2", "train.keep_checkpoints=5")
    Ranks(pool, 2).run(runs.train_quietly, config)
    return out, [line["loss"] for line in runs.metrics_of(out)]


def resumed(out: Path, resume: object, *overrides: str) -> Any:
    return runs.configure(out, "grid.x=2", "train.checkpoint_every=2", f"train.resume={resume}", *overrides)


@pytest.mark.long
@pytest.mark.parametrize("state", ["fp32", pytest.param("host", marks=pytest.mark.exhaustive)])
def test_latest_takes_the_previous_checkpoint_and_warns_once(
    ranks: MakeRanks, trained: tuple[Path, list[float]], tmp_path: Path, state: str
) -> None:
    out = shutil.copytree(trained[0], tmp_path / "run")
    damage(checkpoint_path(out, 6), "optimizer.norm.weight.exp_avg_sq")  # read last
    damage(checkpoint_path(out, 4))
    options = (f"train.optimizer_state={state}", "train.keep_checkpoints=5")
    first, second = ranks(2).run(runs.train_and_listen, resumed(out, "latest", *options), timeout=120)
    assert second == []
    assert [text.partition(" of an earlier run")[0] for text in first[2:]] == ["checkpoints"]  # set aside
    for text, step, before, name in zip(first, (6, 4), (4, 2), ("exp_avg_sq", "model.norm.weight"), strict=False):
        assert (
            f"damaged, and taking {checkpoint_path(out, before)}: the checkpoint {checkpoint_path(out, step)} " in text
        )
        assert name in text
    losses = [line["loss"] for line in runs.metrics_of(out)]
    assert losses == pytest.approx(trained[1], rel=1e-6)


@pytest.mark.long
def test_a_damaged_index_that_one_rank_reads_is_passed_over_by_all(
    ranks: MakeRanks, trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    out = shutil.copytree(trained[0], tmp_path / "run")
    messages = ranks(2).run(
        runs.train_with_a_bad_index, resumed(out, "latest"), checkpoint_path(out, 6), 1, timeout=120
    )
    assert messages[1] == []
    assert f"taking {checkpoint_path(out, 4)}" in messages[0][0]
    assert "on rank 1, " in messages[0][0]
    assert [line["step"] for line in runs.metrics_of(out)] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_that_is_named_is_refused_and_the_one_before_is_named(
    ranks: MakeRanks, trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    out = shutil.copytree(trained[0], tmp_path / "run")
    newest, before = checkpoint_path(out, 6), checkpoint_path(out, 4)
    damage(newest)
    config = resumed(tmp_path / "other", newest)
    for messages in ranks(2).run(runs.train_and_listen, config, timeout=120):
        (error,) = messages
        assert error.startswith(f"DamagedCheckpointError: the checkpoint {newest} cannot be read: on rank ")
        assert "model.norm.weight" in error
        assert error.endswith(f"; the checkpoint before it is {before}: continue with --set train.resume={before}")
    runs.flip_bit(newest / "metadata.json", 800)
    with pytest.raises(DamagedError, match=f"is damaged: .*; the checkpoint before it is {before}"):
        find_checkpoint(tmp_path, newest)


@pytest.mark.long
def test_latest_is_refused_if_all_checkpoints_are_damaged(
    ranks: MakeRanks, trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    out = shutil.copytree(trained[0], tmp_path / "run")
    for step in (2, 4, 6):
        damage(checkpoint_path(out, step))
    for messages in ranks(2).run(runs.train_and_listen, resumed(out, "latest"), timeout=120):
        assert "step-00000002 cannot be read" in messages[-1]
        assert messages[-1].endswith(
            "there is no checkpoint before it; train.resume='none' starts anew, and sets it aside"
        )
    assert len(list((out / "checkpoints").iterdir())) == 3


def test_a_damaged_checkpoint_is_mentioned_once(
    copy: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRETTO_PRINTED_CHECKPOINTS", raising=False)
    (checkpoint_path(copy, 2) / "__0_0.distcp").unlink()
    for _ in range(3):
        assert newest_checkpoint(copy) == checkpoint_path(copy, 1)
    assert caplog.text.count("passing over") == 1
    monkeypatch.setenv("RANK", "1")  # a rank of torchrun's, which has not inherited rank 0's state
    monkeypatch.delenv("STRETTO_PRINTED_CHECKPOINTS")
    newest_checkpoint(copy)
    assert caplog.text.count("passing over") == 1


# --- files that lie


@pytest.mark.parametrize(
    "value",
    [
        "",
        "crc32:",
        "crc32:1234567",
        "crc32:123456789",
        "crc32:ABCDEF01",
        "md5:12345678",
        "crc32:12345678\n",
        5,
        None,
        [],
    ],
)
def test_a_checksum_that_is_none_is_refused(copy: Path, value: Any) -> None:
    path = checkpoint_path(copy, 2)
    runs.edit_index(path, lambda index: index["tensors"]["model.norm.weight"]["chunks"][0].update(checksum=value))
    with pytest.raises(DamagedError, match=r"metadata\.json is damaged: .*model\.norm\.weight"):
        read_metadata(path)


def test_a_wrong_checksum_of_right_bytes_is_refused(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    runs.edit_index(
        path, lambda index: index["tensors"]["model.norm.weight"]["chunks"][0].update(checksum="crc32:00000000")
    )
    with pytest.raises(DamagedCheckpointError, match=r"model\.norm\.weight, .*crc32:00000000 expected"):
        load_checkpoint(path, runs.make_gpt())


@pytest.mark.parametrize("digits", [12, 19, 30, 5000])
@pytest.mark.parametrize("field", ["start", "bytes", "sizes", "offsets"])
def test_huge_numbers_are_refused_before_anything_is_allocated(copy: Path, field: str, digits: int) -> None:
    path = checkpoint_path(copy, 2)
    text = (path / "metadata.json").read_text()
    content = json.loads(text)
    chunk = content["tensors"]["model.norm.weight"]["chunks"][0]
    chunk[field] = "HUGE" if field in ("start", "bytes") else ["HUGE"]
    content["format"] = 1
    del content["checksum"], content["files"]
    (path / "metadata.json").write_text(json.dumps(content).replace('"HUGE"', "9" * digits))
    with pytest.raises(DamagedError, match=r"is damaged|truncated"):
        read_metadata(path)


def test_other_files_than_torchs_index_are_refused(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    runs.edit_index(path, lambda index: index["files"].update({"../../x": index["files"][".metadata"]}))
    with pytest.raises(DamagedError, match=r"metadata\.json is damaged: files"):
        read_metadata(path)


# --- writing


@pytest.mark.parametrize("threads", [1, 3])
def test_a_checkpoint_is_written_by_threads_of_a_thread_with_a_separate_group(
    ranks: MakeRanks, tmp_path: Path, threads: int
) -> None:
    ranks(2).run(runs.save_in_a_thread, tmp_path, threads)
    path = checkpoint_path(tmp_path, 1)
    metadata = read_metadata(path)
    files = {chunk.file for entry in metadata.tensors.values() for chunk in entry.chunks}
    assert files == {f"__{rank}_{number or ''}0.distcp" for rank in range(2) for number in range(threads)}
    for name, entry in metadata.tensors.items():
        read_tensor(path, entry, name)
    assert set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata) == set(metadata.tensors)
