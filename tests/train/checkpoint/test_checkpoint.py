# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not there, for any grid, and never code."""

import itertools
import logging
import multiprocessing
import os
import pickle
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from tests.processes import LIMIT
from tests.train import runs
from tests.train.saving import check_checkpoint
from torch.distributed.checkpoint import FileSystemReader

from stretto.models import GPT
from stretto.parallel import gather
from stretto.train.checkpoint import (
    checkpoint_path,
    find_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    prepare_folder,
)
from stretto.train.checkpoint.metadata import TensorEntry, read_metadata
from stretto.train.checkpoint.storage import read_tensor

MakeRanks = Callable[[int], Ranks]


# --- another grid


def check_grids(ranks: MakeRanks, tmp_path: Path, make: Any, *grids: dict[str, int]) -> None:
    """Assert that what four ranks save, these grids read and write again."""
    weights = ranks(4).run(runs.save_trained, make, {"x": 2, "z": 2}, tmp_path / "first")[0]
    first = checkpoint_path(tmp_path / "first", 2)
    entries = read_metadata(first).tensors
    for name, weight in weights.items():
        assert torch.equal(read_tensor(first, entries[f"model.{name}"]), weight), name
        assert entries[f"optimizer.{name}.exp_avg"].shape == weight.shape
        assert not torch.equal(read_tensor(first, entries[f"optimizer.{name}.average"]), weight), name
    for number, grid in enumerate(grids):
        out = tmp_path / f"again-{number}"
        loaded = ranks(prod(grid.values())).run(runs.load_and_save, make, grid, first, out)[0]
        again = checkpoint_path(out, 2)
        entries_again = read_metadata(again).tensors
        assert entries_again.keys() == entries.keys()
        for name, weight in weights.items():
            assert torch.equal(loaded[name], weight), (grid, name)
        for name, entry in entries.items():
            assert torch.equal(read_tensor(again, entries_again[name]), read_tensor(first, entry)), (grid, name)


@pytest.mark.long
def test_another_grid_reads_and_writes_the_same_numbers(ranks: MakeRanks, tmp_path: Path) -> None:
    check_grids(ranks, tmp_path, runs.make_gpt, {}, {"y": 2})


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [runs.make_gpt, runs.make_hugging_face_gpt2])
def test_many_grids_read_and_write_the_same_numbers(ranks: MakeRanks, tmp_path: Path, make: Any) -> None:
    check_grids(ranks, tmp_path, make, {}, {"y": 2}, {"x": 2, "z": 2}, {"data": 2, "x": 2})


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [runs.make_gpt, runs.make_hugging_face_gpt2])
def test_grids_of_eight_read_and_write_the_same_numbers(ranks: MakeRanks, tmp_path: Path, make: Any) -> None:
    check_grids(ranks, tmp_path, make, {"x": 4, "z": 2}, {"data": 2, "x": 2, "y": 2})


@pytest.mark.long
def test_replicated_state_is_written_once(ranks: MakeRanks, tmp_path: Path) -> None:
    weights = ranks(4).run(runs.save_trained, runs.make_gpt, {"data": 2, "y": 2}, tmp_path)[0]
    written = sum(
        chunk.bytes
        for name, entry in read_metadata(checkpoint_path(tmp_path, 2)).tensors.items()
        if name.startswith("model.")
        for chunk in entry.chunks
    )
    numbers = sum(weight.numel() * 4 for weight in weights.values())
    per_entry = 2048  # what torch.save adds to each
    assert numbers <= written <= numbers + per_entry * 2 * len(weights)


# --- whole or not there


class Crash:
    """Ends the process, without any clean-up, at the `count`-th change that it makes to the file system."""

    def __init__(self, count: int) -> None:
        self.left = count
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os._exit(9)
            return function(*args, **kwargs)

        return call


def crash_at_each_change(folder: Path) -> None:
    """Save step 1, then step 2 in its place, in one process after another; the n-th crashes at its n-th change.

    Processes are forked from this one, which has no threads, until one has come to its end.
    """
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA cannot be used in a forked process
    runs.sharded(runs.make_gpt, {}, seed=1)  # imports, once, what each child would import
    torch.distributed.destroy_process_group()
    for count in itertools.count(1):
        out = folder / str(count)
        out.mkdir()
        child = os.fork()
        if child == 0:
            Crash(count)
            runs.save_steps(out, [1, 2], keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        (out / "exit").write_text(str(os.waitstatus_to_exitcode(status)))
        if os.waitstatus_to_exitcode(status) != 9:
            break


@pytest.mark.exhaustive
def test_a_crash_at_any_change_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=crash_at_each_change, args=(tmp_path,))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0
    outs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert [(out / "exit").read_text() for out in outs] == ["9"] * (len(outs) - 1) + ["0"]
    assert len(outs) > 15, "the crashes did not reach into the writing"
    newest = 0
    for out in outs:
        visible = {path.name for path in (out / "checkpoints").glob("step-*")}
        for name in visible:
            for entry in read_metadata(out / "checkpoints" / name).tensors.values():
                read_tensor(out / "checkpoints" / name, entry)
        step = max((int(name.removeprefix("step-")) for name in visible), default=0)
        # The later the crash, the newer the checkpoint that it leaves: none is ever taken away before the next is
        # there.
        assert step >= newest, f"crash {out.name}"
        newest = step
        prepare_folder(out, step)
        assert {path.name for path in (out / "checkpoints").glob("*")} == visible, f"crash {out.name} left something"
    assert newest == 2


def test_only_the_newest_checkpoints_are_kept(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(1).run(runs.save_steps, tmp_path, [5, 9, 10, 100], keep=2)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000010", "step-00000100"}


def test_checkpoints_after_the_start_of_a_new_run_are_set_aside(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare_folder(copy, 1)
    assert find_checkpoint(copy, "latest") == checkpoint_path(copy, 1)
    aside = copy / "checkpoints" / "earlier-run-1" / "step-00000002"
    assert read_metadata(aside).step == 2
    assert str(aside.parent) in caplog.text


# --- which checkpoint


def test_latest_is_the_newest_and_none_where_there_is_none(saved: Path, tmp_path: Path) -> None:
    assert find_checkpoint(saved, "latest") == checkpoint_path(saved, 2)
    assert find_checkpoint(saved, None) is None
    assert find_checkpoint(tmp_path, "latest") is None


def test_a_path_is_a_checkpoint_or_a_run(saved: Path, tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, str(checkpoint_path(saved, 1))) == checkpoint_path(saved, 1)
    assert find_checkpoint(tmp_path, str(saved)) == checkpoint_path(saved, 2)


def test_latest_does_not_start_over_when_no_checkpoint_can_be_used(copy: Path) -> None:
    for step in (1, 2):
        (checkpoint_path(copy, step) / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints .*step-00000002 is missing its file .*'none'"):
        find_checkpoint(copy, "latest")
    assert newest_checkpoint(copy) is None


def test_an_older_checkpoint_than_the_newest_is_found(saved: Path) -> None:
    assert newest_checkpoint(saved, before=checkpoint_path(saved, 2)) == checkpoint_path(saved, 1)
    assert newest_checkpoint(saved, before=checkpoint_path(saved, 1)) is None


def test_latest_skips_an_incomplete_checkpoint_with_a_warning(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (checkpoint_path(copy, 2) / "__0_0.distcp").unlink()
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(copy, "latest") == checkpoint_path(copy, 1)
    assert "step-00000002 is missing its file __0_0.distcp" in caplog.text


# --- errors


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no checkpoint at .*step-7"):
        find_checkpoint(tmp_path, tmp_path / "step-7")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"the run in .* has no complete checkpoint"):
        find_checkpoint(tmp_path, tmp_path)


def test_a_missing_shard_file_is_named(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"step-00000002 is missing its file __0_0\.distcp"):
        check_checkpoint(path, runs.GPT_CONFIG)


def test_a_truncated_shard_file_is_named_with_its_sizes(copy: Path) -> None:
    file = checkpoint_path(copy, 2) / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(ValueError, match=rf"__0_0\.distcp is truncated: {size - 1} bytes of {size}"):
        check_checkpoint(file.parent, runs.GPT_CONFIG)


def test_an_index_that_is_cut_short_is_named(copy: Path) -> None:
    file = checkpoint_path(copy, 2) / "metadata.json"
    os.truncate(file, 100)
    with pytest.raises(ValueError, match=r"metadata\.json is damaged"):
        check_checkpoint(file.parent, runs.GPT_CONFIG)


def test_an_index_of_thousands_of_brackets_is_damaged(copy: Path) -> None:
    file = checkpoint_path(copy, 2) / "metadata.json"
    file.write_text("[" * 300_000)
    with pytest.raises(ValueError, match=r"metadata\.json is damaged: .*recursion"):
        read_metadata(file.parent)


def test_an_index_larger_than_any_is_refused_before_it_is_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = checkpoint_path(copy, 2) / "metadata.json"
    os.truncate(file, (1 << 28) + 1)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(
        ValueError, match=r"metadata\.json: is larger than 268435456 bytes, the most a checkpoint's index"
    ):
        read_metadata(file.parent)


def test_an_index_that_could_not_be_read_again_is_not_written(ranks: MakeRanks, tmp_path: Path) -> None:
    message = ranks(1).run(runs.save_with_a_small_index, tmp_path, 100)[0]
    assert "could not be written" in message
    assert "one of more than 100 is not read" in message
    assert find_checkpoint(tmp_path, "latest") is None


def test_another_format_version_is_refused(copy: Path) -> None:
    path = checkpoint_path(copy, 2)
    runs.edit_index(path, lambda content: content.update(format=99))
    with pytest.raises(ValueError, match=r"has checkpoint format 99, and this version of Stretto reads 1 and 2$"):
        check_checkpoint(path, runs.GPT_CONFIG)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"layers": 3}, r"blocks\.2\.attention_norm\.weight is missing"),
        ({"layers": 1}, r"blocks\.1\.[a-z_.]+ is unexpected"),
        ({"vocab": 62}, r"embedding\.weight has shape \[61, 16\] there, and the model's is \[62, 16\]"),
    ],
)
def test_an_old_checkpoint_that_does_not_name_its_model_is_refused_by_the_first_parameter_that_differs(
    copy: Path, change: dict[str, Any], difference: str
) -> None:
    runs.edit_index(checkpoint_path(copy, 2), lambda content: content.update(model={}))
    check_checkpoint(checkpoint_path(copy, 2), runs.GPT_CONFIG)
    with pytest.raises(ValueError, match=rf"is of another model: {difference}"):
        check_checkpoint(checkpoint_path(copy, 2), replace(runs.GPT_CONFIG, **change))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"layers": 3}, "model.layers is 2 there and 3 here; model.layers=2 would do"),
        ({"heads": 16, "kv_heads": 8}, "model.heads is 8 there and 16 here"),  # all shapes agree
        ({"kv_heads": None}, "model.kv_heads is 4 there and 8 here"),
        ({"norm": "rmsnorm"}, "model.norm is 'layernorm' there and 'rmsnorm' here"),
        ({"positions": "rotary"}, "model.positions is 'learned' there"),
        ({"activation": "swiglu"}, "model.activation is 'gelu' there"),
        ({"max_seq_len": 8}, "positions.weight has shape"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_the_first_option_that_differs(
    saved: Path, change: dict[str, Any], difference: str
) -> None:
    with pytest.raises(ValueError, match="is of another model: " + difference.replace(".", r"\.")):
        check_checkpoint(checkpoint_path(saved, 2), replace(runs.GPT_CONFIG, **change))


def test_the_model_that_is_loaded_into_is_compared_too(saved: Path) -> None:
    other = GPT(replace(runs.GPT_CONFIG, heads=16, kv_heads=8))
    with pytest.raises(ValueError, match=r"is of another model: model\.heads is 8 there and 16 here"):
        load_checkpoint(checkpoint_path(saved, 2), other)


def test_dropout_and_another_way_to_write_the_same_model_are_no_difference(saved: Path) -> None:
    check_checkpoint(checkpoint_path(saved, 2), replace(runs.GPT_CONFIG, dropout=0.5, ffn=64))


def test_a_checkpoint_of_another_optimizer_is_refused(saved: Path) -> None:
    check_checkpoint(checkpoint_path(saved, 2), runs.GPT_CONFIG, "adamw")
    with pytest.raises(ValueError, match=r"was written with adamw, and train.optimizer is 'sgd'"):
        check_checkpoint(checkpoint_path(saved, 2), runs.GPT_CONFIG, "sgd")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", "../../secret"),
        ("file", "/etc/passwd"),
        ("file", "__0_0.distcp\n"),
        ("offsets", [-1, 0]),
        ("offsets", [1, 0]),
        ("sizes", [60, 16]),
        ("sizes", [61]),
        ("bytes", 5),
        ("start", -1),
    ],
)
def test_an_incorrect_index_raises(copy: Path, field: str, value: Any) -> None:
    path = checkpoint_path(copy, 2)

    def change(content: dict[str, Any]) -> None:
        content["tensors"]["model.embedding.weight"]["chunks"][0][field] = value

    runs.edit_index(path, change)
    with pytest.raises(ValueError, match=r"metadata\.json is damaged"):
        read_metadata(path)


def entry_of(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorEntry:
    """A tensor with boxes (offsets, sizes) that each have bytes of their own."""
    chunks = [
        {"offsets": offsets, "sizes": sizes, "file": "__0_0.distcp", "start": 0, "bytes": 8 * prod(sizes)}
        for offsets, sizes in boxes
    ]
    return TensorEntry.model_validate({"shape": shape, "dtype": "float64", "chunks": chunks})


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4,), [((0,), (2,)), ((0,), (2,))]),  # one twice, and another is missing
        ((4,), [((0,), (2,)), ((1,), (2,))]),
        ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))]),
        ((3, 3), [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((0, 2), (1, 1))]),
        ((10**20, 2), [((0, 0), (10**20, 1)), ((0, 0), (10**20, 1))]),
    ],
)
def test_pieces_that_add_up_to_a_shape_but_overlap_in_it_are_refused(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Otherwise numbers that no piece has would be whatever the memory held before."""
    assert entry_of(shape, *boxes).fault() == "is not whole: its pieces overlap"


def test_pieces_that_cut_a_tensor_in_any_way_are_accepted() -> None:
    number = random.randrange(1 << 32)
    print(f"seed {number}")
    generator = random.Random(number)
    for shape in ((), (0,), (7,), (3, 0, 2), (5, 6), (4, 3, 5)):
        boxes = [((0,) * len(shape), shape)]
        for _ in range(10):  # cut one of the boxes in two
            offsets, sizes = boxes.pop(generator.randrange(len(boxes)))
            wide = [dim for dim, size in enumerate(sizes) if size > 1]
            if not wide:
                boxes.append((offsets, sizes))
                continue
            dim = generator.choice(wide)
            cut = generator.randrange(1, sizes[dim])
            first, rest = list(sizes), list(sizes)
            first[dim], rest[dim] = cut, sizes[dim] - cut
            moved = list(offsets)
            moved[dim] += cut
            boxes += [(offsets, tuple(first)), (tuple(moved), tuple(rest))]
        assert entry_of(shape, *boxes).fault() is None, boxes


def test_pieces_that_share_bytes_of_a_file_are_refused(copy: Path) -> None:
    path = checkpoint_path(copy, 2)

    def change(content: dict[str, Any]) -> None:
        tensors = content["tensors"]
        tensors["model.copy"] = tensors["model.embedding.weight"]

    runs.edit_index(path, change)
    with pytest.raises(ValueError, match=r"metadata\.json is damaged: pieces in __0_0\.distcp overlap"):
        read_metadata(path)


# --- no code


class Malice:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one rank, here."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_pickled_index_is_never_opened(copy: Path, tmp_path: Path, one_rank: None) -> None:
    path, mark = checkpoint_path(copy, 2), tmp_path / "ran"
    (path / ".metadata").write_bytes(pickle.dumps(Malice(mark)))
    with pytest.raises(AttributeError):  # the malice works: torch's own reader runs it
        FileSystemReader(path).read_metadata()
    assert mark.exists()
    mark.rmdir()
    model, optimizer, _ = runs.sharded(runs.make_gpt, {}, seed=2)
    load_checkpoint(path, model, optimizer)
    weight = read_tensor(path, read_metadata(path).tensors["model.norm.weight"])
    assert torch.equal(gather(model.get_parameter("norm.weight")), weight)
    assert not mark.exists()


def test_a_shard_that_holds_code_is_refused_and_not_run(copy: Path, tmp_path: Path, one_rank: None) -> None:
    path, mark = checkpoint_path(copy, 2), tmp_path / "ran"
    file = path / "__0_0.distcp"
    start = file.stat().st_size
    with open(file, "ab") as shard:
        torch.save(Malice(mark), shard)

    def point_at_malice(content: dict[str, Any]) -> None:
        chunk = content["tensors"]["model.norm.weight"]["chunks"][0]
        malice = file.read_bytes()[start:]
        chunk.update(start=start, bytes=len(malice), checksum=f"crc32:{zlib.crc32(malice):08x}")

    runs.edit_index(path, point_at_malice)
    model, optimizer, _ = runs.sharded(runs.make_gpt, {}, seed=2)
    with pytest.raises(
        ValueError, match=r"cannot be read: on rank 0, .*__0_0\.distcp is damaged: .*norm\.weight.*what is no tensor$"
    ):
        load_checkpoint(path, model, optimizer)
    with pytest.raises(ValueError, match=r"is damaged: .*a shard holds what is no tensor$"):
        read_tensor(path, read_metadata(path).tensors["model.norm.weight"])
    assert not mark.exists()


def test_one_process_loads_without_a_process_group_or_a_warning(saved: Path) -> None:
    model = runs.make_gpt()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_checkpoint(checkpoint_path(saved, 2), model)
    entries = read_metadata(checkpoint_path(saved, 2)).tensors
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, read_tensor(checkpoint_path(saved, 2), entries[f"model.{name}"])), name


def test_torchs_own_tools_read_a_checkpoint(saved: Path) -> None:
    names = FileSystemReader(checkpoint_path(saved, 2)).read_metadata().state_dict_metadata
    assert names.keys() == read_metadata(checkpoint_path(saved, 2)).tensors.keys()
