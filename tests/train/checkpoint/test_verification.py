# SPDX-License-Identifier: Apache-2.0
"""`stretto checkpoint verify`, and safetensors files whose tensors have checksums."""

import builtins
import errno
import io
import json
import os
import random
import resource
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cli.test_commands import stretto_command
from tests.conftest import Ranks
from tests.faults.flips import FlipsSetting
from tests.train import runs
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from stretto.cli.checkpoint import app as checkpoint_app
from stretto.models import GPT
from stretto.train.checkpoint import checkpoint_path, newest_checkpoint, verification
from stretto.train.checkpoint import metadata as metadata_module
from stretto.train.checkpoint.export import export_safetensors
from stretto.train.checkpoint.file_tensors import CheckedTensor
from stretto.train.checkpoint.integrity import DamagedError
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.safetensors_checksums import BLOCK, digits_of, make_header, read_header
from stretto.train.checkpoint.torch_format import read_index
from stretto.train.checkpoint.verification import verify
from stretto.train.checkpoint.weights import import_safetensors

MakeRanks = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def saved(saved: Path) -> Path:
    export_safetensors(checkpoint_path(saved, 2), saved / "one.safetensors")
    export_safetensors(checkpoint_path(saved, 2), saved / "several.safetensors", max_file_bytes=6000)
    return saved


def damages(path: Path) -> list[str]:
    return [str(damage) for found in verify(path) for damage in found.damages]


# --- verify


def test_written_files_are_complete_to_the_last_byte(saved: Path) -> None:
    for found in (
        *verify(saved),
        *verify(saved / "one.safetensors"),
        *verify(saved / "several.safetensors.index.json"),
    ):
        assert (found.damages, found.unverified) == ([], [])
        assert found.tensors == len(read_metadata(checkpoint_path(saved, 2)).tensors)
    path = checkpoint_path(saved, 2)
    assert verify(path)[0].bytes == sum(file.stat().st_size for file in path.iterdir())
    assert verify(saved / "one.safetensors")[0].bytes == (saved / "one.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "__0_0.distcp"])
def test_a_flipped_bit_is_found_in_each_file_of_a_checkpoint(copy: Path, name: str, seed: random.Random) -> None:
    file = checkpoint_path(copy, 2) / name
    for _ in range(20):
        bit = seed.randrange(8 * file.stat().st_size)
        runs.flip_bit(file, bit)
        (damage,) = damages(copy)  # the other checkpoint is whole
        assert damage.startswith(name), bit
        runs.flip_bit(file, bit)


def test_files_that_are_missing_cut_short_or_too_long_are_found(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    shard, size = path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size
    with open(shard, "ab") as file:
        file.write(b"more")
    assert damages(path) == [f"__0_0.distcp, bytes {size} to {size + 4}: the index has no piece there"]
    with open(shard, "r+b") as file:
        file.truncate(size - 1)
    (damage,) = damages(path)
    assert damage.endswith(f"the file ends at byte {size - 1}")
    shard.unlink()
    assert damages(path) == [f"__0_0.distcp, bytes 0 to {size}: the file is missing"]
    (path / ".metadata").unlink()
    assert ".metadata, bytes 0 to" in damages(path)[0]
    (path / "metadata.json").unlink()
    (path / ".metadata").touch()
    assert "the checkpoint is not complete" in damages(path)[0]


def test_pieces_that_overlap_are_named_and_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_path(copy, 2)

    def repeat(index: dict[str, Any]) -> None:
        index["tensors"]["model.again"] = index["tensors"]["model.norm.weight"]

    runs.edit_index(path, repeat)
    monkeypatch.setattr(verification, "read_range", lambda *_: pytest.fail("it was read"))
    (damage,) = damages(path)
    assert "two pieces overlap" in damage


def test_the_indices_of_format_1_are_said_to_have_no_checksums(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    runs.as_format_1(path)
    (found,) = verify(path)
    assert found.damages == []
    assert found.unverified == ["metadata.json and .metadata, of which format 1 has no checksums"]


def test_a_folder_of_torchs_is_verified_with_its_objects(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"weight": torch.ones(4), "state": {"epoch": [1, "two"]}}, checkpoint_id=tmp_path / "folder")
    (found,) = verify(tmp_path / "folder")
    assert (found.damages, found.unverified) == ([], [".metadata, of which torch writes no checksum"])
    file = tmp_path / "folder" / "__0_0.distcp"
    assert found.bytes == file.stat().st_size
    content = file.read_bytes()
    runs.flip_bit(file, 8 * content.index(b"two"))
    (damage,) = damages(tmp_path / "folder")
    assert damage.startswith("__0_0.distcp, state.epoch, bytes ")


@pytest.mark.parametrize("value", [b"", b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR.", b"garbage"])
def test_an_index_of_torchs_that_is_none_is_damaged_and_runs_no_code(tmp_path: Path, value: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(value)
    assert "is no index of torch.distributed.checkpoint" in damages(tmp_path)[0]


def test_the_command_names_what_is_damaged_and_exits_with_1(copy: Path) -> None:
    status, output = stretto_command("checkpoint", "verify", copy)
    assert (status, output.count("whole (format 2")) == (0, 2)
    runs.flip_bit(checkpoint_path(copy, 1) / "__0_0.distcp", 8 * 100)
    status, output = stretto_command("checkpoint", "verify", copy)
    assert status == 1
    assert "step-00000001: DAMAGED" in output
    assert "damaged: __0_0.distcp, model." in output
    status, output = stretto_command("checkpoint", "verify", copy, "--json")
    found = json.loads(output)
    assert (status, found["is_damaged"]) == (1, True)
    (damage,) = found["verified"][0]["damages"]
    assert damage["file"] == "__0_0.distcp"
    assert damage["start"] <= 100 < damage["stop"]
    assert damage["expected"] != damage["found"]


def test_list_and_show_print_the_available_checkpoints(copy: Path) -> None:
    (checkpoint_path(copy, 1) / "__0_0.distcp").unlink()
    status, output = stretto_command("checkpoint", "list", copy, "--json")
    first, second = json.loads(output)["checkpoints"]
    assert (status, second["step"], second["format"], second["fault"]) == (0, 2, 2, None)
    assert "is missing its file __0_0.distcp" in first["fault"]
    status, output = stretto_command("checkpoint", "show", copy, "--tensors")
    numbers = [parameter.numel() for parameter in runs.make_gpt().parameters()]
    assert status == 0
    assert f"model: {len(numbers)} tensors, {sum(numbers):,} numbers, {4 * sum(numbers) / 1e6:,.1f} MB" in output
    assert "model.norm.weight [16] float32" in output


# --- safetensors


def test_others_read_what_has_checksums(saved: Path) -> None:
    path = checkpoint_path(saved, 2)
    weights = load_file(saved / "one.safetensors")
    assert {f"model.{name}" for name in weights} == set(read_metadata(path).tensors)


@pytest.mark.parametrize("name", ["one.safetensors", "several.safetensors.index.json"])
def test_a_flipped_bit_of_exported_weights_is_found_on_import(copy: Path, name: str, seed: random.Random) -> None:
    model = runs.make_gpt()
    files = [copy / name] if name.startswith("one") else [copy / name, *copy.glob("several-*")]
    for _ in range(40):
        file = seed.choice(files)
        header = 0 if file.suffix == ".json" else 8 + int.from_bytes(file.read_bytes()[:8], "little")
        bit = seed.randrange(8 * (seed.choice([header, 0]) or file.stat().st_size))
        runs.flip_bit(file, bit)
        with pytest.raises(DamagedError) as caught:
            import_safetensors(model, copy / name)
        assert file.name in str(caught.value), bit
        assert any(damage.startswith(file.name) for damage in damages(copy / name)), bit
        runs.flip_bit(file, bit)
    import_safetensors(model, copy / name)


def test_every_bit_of_a_header_counts(copy: Path) -> None:
    file = copy / "one.safetensors"
    length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for bit in range(0, 8 * length, 13):
        runs.flip_bit(file, bit)
        with pytest.raises(DamagedError, match=r"one\.safetensors"):
            read_header(file)
        runs.flip_bit(file, bit)


def test_the_damaged_tensor_and_its_block_are_named(copy: Path) -> None:
    file = copy / "one.safetensors"
    stored = read_header(file)["norm.weight"]
    runs.flip_bit(file, 8 * stored.start)
    with pytest.raises(
        DamagedError, match=rf"norm\.weight, bytes {stored.start} to {stored.stop}: the checksum differs: "
    ):
        import_safetensors(runs.make_gpt(), file)


def test_a_rank_checks_what_it_reads(copy: Path, ranks: MakeRanks) -> None:
    file = copy / "one.safetensors"
    runs.flip_bit(file, 8 * read_header(file)["embedding.weight"].start)
    messages = ranks(2).run(runs.import_and_listen, {"x": 2}, file)
    assert any("embedding.weight, bytes" in text for text in messages)


def write(file: Path, tensors: dict[str, torch.Tensor], checksums: dict[str, str] | None = None) -> None:
    """Write a safetensors file with checksums, right ones by default."""
    entries, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    contents = [tensor.flatten().view(torch.uint8).numpy().data for tensor in tensors.values()]
    digits = checksums or {name: digits_of(content) for name, content in zip(tensors, contents, strict=True)}
    file.write_bytes(make_header(entries, digits) + b"".join(contents))


def test_boxes_are_read_across_blocks_and_rows(tmp_path: Path, seed: random.Random) -> None:
    whole = torch.randn(4, 700, 1024)  # rows of which none begins where a block does
    write(tmp_path / "model.safetensors", {"first": torch.ones(5), "weight": whole})
    stored = read_header(tmp_path / "model.safetensors")["weight"]
    assert len(stored.checksums or ()) == 3
    tensor = CheckedTensor(None, stored)
    for _ in range(8):
        offsets = [seed.randrange(size) for size in whole.shape]
        sizes = [seed.randint(1, size - offset) for size, offset in zip(whole.shape, offsets, strict=True)]
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assert torch.equal(tensor.read(offsets, sizes), whole[box])
    runs.flip_bit(tmp_path / "model.safetensors", 8 * (stored.start + BLOCK + 5))
    assert torch.equal(tensor.read([3, 5, 0], [1, 7, 1024]), whole[3:, 5:12])  # another block
    with pytest.raises(DamagedError, match=rf"weight, bytes {stored.start + BLOCK} to {stored.start + 2 * BLOCK}"):
        tensor.read([1, 0, 0], [1, 1, 1])


@pytest.mark.parametrize("digits", ["", "1234567", "g" * 8, "0" * 16])
def test_checksums_that_are_none_are_refused(tmp_path: Path, digits: str) -> None:
    write(tmp_path / "model.safetensors", {"weight": torch.ones(4)}, {"weight": digits})
    with pytest.raises(DamagedError, match=r"model\.safetensors cannot be read as safetensors"):
        read_header(tmp_path / "model.safetensors")


def test_a_header_of_any_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for length in (0, 1, 3, 1 << 40, (1 << 64) - 1):
        file.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(DamagedError, match=rf"would have {length} bytes"):
            read_header(file)


def test_files_of_other_libraries_are_imported_and_reported_as_unverified(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, other = GPT(runs.GPT_CONFIG), GPT(runs.GPT_CONFIG)
    save_file({name: value.detach() for name, value in model.named_parameters()}, tmp_path / "model.safetensors")
    import_safetensors(other, tmp_path / "model.safetensors")
    assert all(torch.equal(value, other.get_parameter(name)) for name, value in model.named_parameters())
    (found,) = verify(tmp_path)
    assert (found.damages, found.bytes) == ([], 0)
    assert "has no checksums" in found.unverified[0]
    assert "not verified" in found.describe()


def test_the_export_of_a_run_takes_the_checkpoint_before_and_one_that_is_named_is_refused(
    copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest, before = checkpoint_path(copy, 2), checkpoint_path(copy, 1)
    (chunk,) = read_metadata(newest).tensors["model.norm.weight"].chunks
    runs.flip_bit(newest / chunk.file, 8 * chunk.start)
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / "model.safetensors"
    with pytest.raises(DamagedError, match=rf"model\.norm\.weight, bytes .*; the checkpoint before it is {before}"):
        export_safetensors(newest, file, max_file_bytes=6000)
    assert list(file.parent.iterdir()) == []
    export_safetensors(copy, file)
    assert caplog.text.count(f"passing over a checkpoint that is damaged, and taking {before}") == 1
    runs.flip_bit(newest / chunk.file, 8 * chunk.start)
    export_safetensors(newest, tmp_path / "whole.safetensors")  # both steps have the same weights
    assert file.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


# --- all formats


@pytest.mark.long
def test_flips_are_found_in_every_format_and_place(ranks: MakeRanks, tmp_path: Path) -> None:
    (result,) = ranks(1).run(runs.flip_in_a_group, FlipsSetting(flips=24), tmp_path)
    assert "failure" not in result, result
    assert sum(row["verified"] for row in result["rows"]) == 24


# --- disks that fail, runs that go on, and files that are none


def fail_to_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have a disk that cannot read the files of a name: an input/output error when they are opened."""
    real = builtins.open

    def open_or_fail(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | Path) and Path(file).name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", open_or_fail)
    monkeypatch.setattr(io, "open", open_or_fail)


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "__0_0.distcp"])
def test_a_file_that_the_disk_cannot_read_is_named_as_damaged(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_read(monkeypatch, name)
    for found in verify(copy):
        assert {damage.file for damage in found.damages} == {name}
        assert all("Input/output error" in damage.reason for damage in found.damages)


def test_an_index_that_the_disk_cannot_read_is_passed_over(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = metadata_module.read_bounded

    def read_or_fail(path: Path, *args: Any) -> bytes:
        if path.parent == checkpoint_path(copy, 2):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *args)

    monkeypatch.setattr(metadata_module, "read_bounded", read_or_fail)
    assert newest_checkpoint(copy) == checkpoint_path(copy, 1)
    with pytest.raises(DamagedError, match=r"step-00000002/metadata\.json cannot be read: Input/output error"):
        read_metadata(checkpoint_path(copy, 2))


def test_a_checkpoint_that_the_run_deletes_while_it_is_verified_is_not_damaged(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of the moments at which `verify` looks at the disk."""
    first = checkpoint_path(copy, 1)
    for name in ("read_bounded", "file_checksum", "read_range", "parse_metadata", "check_piece"):
        kept = shutil.copytree(first, copy / "kept")
        real = getattr(verification, name)

        def delete_first(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            shutil.rmtree(first, ignore_errors=True)
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(verification, name, delete_first)
            oldest, newest = verify(copy)
        assert oldest.damages == [], name
        assert newest.damages == []
        assert newest.bytes > 0
        assert "deleted meanwhile" in oldest.describe() or name == "check_piece"
        kept.rename(first)


def test_an_incomplete_checkpoint_is_damaged_whatever_path_leads_to_it(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_path(copy, 2)
    (path / "metadata.json").unlink()
    (copy / "link").symlink_to(path)
    monkeypatch.chdir(path)
    for each in (path, copy / "link", Path()):
        (damage,) = damages(each)
        assert "the checkpoint is not complete" in damage, each
        with pytest.raises(ValueError, match=r"is not a complete checkpoint: it has no metadata\.json"):
            read_index(each)


def test_the_length_of_other_programs_files_is_verified(tmp_path: Path) -> None:
    file = tmp_path / "theirs.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2)}, file)
    content = file.read_bytes()
    assert damages(file) == []
    file.write_bytes(content[:-5])
    assert damages(file) == [
        f"theirs.safetensors, b, bytes {len(content) - 5} to {len(content)}: the file ends at byte {len(content) - 5}"
    ]
    file.write_bytes(content + b"more")
    assert damages(file) == [
        f"theirs.safetensors, b, bytes {len(content)} to {len(content) + 4}: the header has no tensor there"
    ]
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert damages(file) == []
    file.write_bytes(struct.pack("<Q", 2) + b"{}" + b"more")
    (found,) = verify(file)
    assert [str(each) for each in found.damages] == [
        "theirs.safetensors, bytes 10 to 14: the header has no tensor there"
    ]
    assert found.bytes == 0


def test_a_tensor_that_ends_at_a_missing_block_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    content = bytes(2 * BLOCK)
    entries = {"a": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    file.write_bytes(make_header(entries, {"a": digits_of(content)}) + content)
    stored = read_header(file)["a"]
    with open(file, "r+b") as opened:
        opened.truncate(stored.stop - BLOCK)
    with pytest.raises(DamagedError, match=f"a: the file ends at byte {stored.stop - BLOCK}"):
        stored.read(0, 2 * BLOCK)
    assert len(stored.read(0, BLOCK)) == BLOCK


def test_other_than_regular_files_raise_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match=r"pipe\.safetensors is no folder and no regular file"):
        verify(tmp_path / "pipe.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x04K\x01r" + struct.pack("<I", 1 << 26) + b".", id="number of an object"),
        pytest.param(b"\x80\x05\x96" + struct.pack("<Q", 1 << 30) + b"abc.", id="array of bytes"),
        pytest.param(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.", id="bytes"),
    ],
)
def test_an_index_of_torchs_cannot_demand_more_memory_than_it_has_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "no index of torch.distributed.checkpoint" in damages(tmp_path)[0]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 100_000  # kB


def test_a_checkpoint_that_cannot_be_read_is_a_line_of_the_list_and_not_its_end(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = metadata_module.read_bounded

    def refuse(path: Path, *args: Any) -> bytes:
        if path.parent == checkpoint_path(copy, 1):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *args)

    monkeypatch.setattr(metadata_module, "read_bounded", refuse)
    monkeypatch.setattr(verification, "read_bounded", refuse)
    result = CliRunner().invoke(checkpoint_app, ["list", str(copy)])
    assert result.exit_code == 0
    assert "step-00000001/metadata.json cannot be read: Permission denied" in result.output
    assert "step-00000002" in result.output
    with pytest.raises(PermissionError):  # what may not be read is not damaged
        verify(copy)
