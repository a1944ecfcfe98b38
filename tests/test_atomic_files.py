# SPDX-License-Identifier: Apache-2.0
"""Files are written whole or not at all, by every command that writes some."""

import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.atomic_files import require_writable, require_writable_folder, write_atomically
from tests.cli.test_commands import stretto_command
from tests.full_disk import no_room_beyond
from tests.report.test_timeline import gpu_trace, product
from tests.train import runs

STEP = ["--model", "gpt2-small", "--cluster", "dgx-h100", "--gpus", "4", "--batch", "8", "--seq-len", "256"]
# Of a command line, {out} is the file that it writes, which exists; `trace.json` and `script.py` are its inputs.
WRITERS = {
    "compile.xml": "collective compile ring-all-reduce --ranks 4 -o {out}",
    "import.xml": "collective import-msccl --yes script.py -o {out}",
    "show.png": "collective show ring-all-reduce --ranks 4 -o {out}",
    "show.svg": "pipeline show 1f1b --pipe 4 --micro-batches 8 -o {out}",
    "show.csv": "pipeline show 1f1b --pipe 4 --micro-batches 8 --csv {out}",
    "step.json": f"simulate step {' '.join(STEP)} --trace {{out}}",
    "step.png": f"simulate step {' '.join(STEP)} --picture {{out}}",
    "step.0.et": "simulate export trace.json step",
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_cluster(path: Path) -> None:
    from stretto.cluster import Cluster

    Cluster.preset("perlmutter").save(path)


def write_a_result(path: Path) -> None:
    from stretto.bench.harness import Column, write_result

    write_result(path.parent, path.stem, [Column("a", "a")], [{"a": 1}])


def write_a_summary(path: Path) -> None:
    from stretto.train.observe.metrics import write_summary

    write_summary(path.parent, {"loss": list(range(100))})


def write_a_ledger(path: Path) -> None:
    from tests.stress.harness.ledger import Ledger

    path.unlink()
    ledger = Ledger(path)
    ledger.begin(2, 1)
    path.write_text("old")
    ledger.write()


FUNCTIONS: dict[str, Callable[[Path], None]] = {
    "cluster.toml": write_cluster,
    "bench.json": write_a_result,
    "summary.json": write_a_summary,
    "ledger.json": write_a_ledger,
}
SCRIPT = """
from msccl.language.collectives import AllGather
from msccl.language import *
from msccl.topologies import fully_connected
with MSCCLProgram("swap", fully_connected(2), AllGather(2, 1, True), 1):
    for rank in range(2):
        chunk(rank, Buffer.input, 0).copy(1 - rank, Buffer.output, rank)
    XML()
"""


@pytest.mark.parametrize("name", [*WRITERS, *FUNCTIONS])
def test_a_full_disk_leaves_old_files_whole_and_nothing_beside_them_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "script.py").write_text(SCRIPT)
    if name == "step.0.et":
        (tmp_path / "trace.json").write_text(json.dumps(gpu_trace(product(0, 40), product(50, 70))))
    (tmp_path / name).write_text("old")
    if name in WRITERS:
        arguments = WRITERS[name].format(out=name).split()
        status, text = stretto_command(*arguments)
        assert status == 0, text  # so that what is written once, such as a cache, is there
        for path in tmp_path.glob("*.et"):
            path.unlink()
        for written in files_of(tmp_path).keys() - {"script.py", "trace.json"}:
            if not written.startswith("cache"):
                (tmp_path / written).write_text("old")
    before = files_of(tmp_path)
    with no_room_beyond(10):
        if name in WRITERS:
            status, text = stretto_command(*arguments)
        else:
            with pytest.raises(OSError, match="too large") as caught:
                FUNCTIONS[name](tmp_path / name)
            status, text = 2, str(caught.value)
    assert status == 2, text
    assert name in text
    assert "too large" in text
    assert files_of(tmp_path) == before


@pytest.mark.long
def test_a_checkpoint_is_exported_whole_or_not_at_all(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(runs.save_trained, runs.make_gpt, {}, tmp_path / "run")
    (tmp_path / "model.safetensors").write_text("old")
    before = files_of(tmp_path)
    for options in ([], ["--max-file-gigabytes", "5e-6"]):
        with no_room_beyond(3000):
            status, text = stretto_command("export", tmp_path / "run", "--to", tmp_path / "model.safetensors", *options)
        assert status == 2
        assert re.search(r"model(-\d+-of-\d+)?\.safetensors: File too large", text), text
        assert files_of(tmp_path) == before


def test_what_is_replaced_keeps_its_permissions_and_its_links(tmp_path: Path) -> None:
    write_atomically(new := tmp_path / "new", "text")
    (plain := tmp_path / "plain").write_text("text")
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    new.chmod(0o640)
    (link := tmp_path / "link").symlink_to("new")
    (dangling := tmp_path / "dangling").symlink_to("later")
    write_atomically(link, b"bytes")
    write_atomically(dangling, lambda file: file.write(b"more"))
    assert link.is_symlink()
    assert new.read_bytes() == b"bytes"
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert (tmp_path / "later").read_bytes() == b"more"
    write_atomically(tmp_path / ("n" * 250), "a long name")
    assert len(list(tmp_path.iterdir())) == 6


def test_new_text_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    code = "import pathlib, stretto.atomic_files as files; files.create_atomically(pathlib.Path('new'), chr(0x201c))"
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | ascii_alone, cwd=tmp_path, check=True)
    assert (tmp_path / "new").read_text(encoding="utf-8") == chr(0x201C)


def test_devices_and_pipes_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, "through")
    reader.join()
    assert read == [b"through"]
    assert pipe.is_fifo()
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_atomically(Path("/dev/full"), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_an_error_of_the_writer_changes_nothing(tmp_path: Path) -> None:
    def fail(file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("no more")

    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError, match="no more"):
        write_atomically(tmp_path / "file", fail)
    assert files_of(tmp_path) == {"file": b"old"}


def test_what_cannot_be_written_is_refused_and_what_can_leaves_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path / "file", "--out")
    require_writable_folder(tmp_path / "new" / "folder", "--out")
    require_writable(Path("/dev/null"), "--out")
    assert list(tmp_path.iterdir()) == []
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "file", "no is not a folder")):
        with pytest.raises(ValueError, match=words):
            require_writable(path, "--out")
    for path in (Path("/proc/file"), Path("/dev/null/file")):
        with pytest.raises(ValueError, match=r"--out is '/.*/file'"):
            require_writable(path, "--out")
        with pytest.raises(ValueError, match=r"--out is '/.*/file'"):
            require_writable_folder(path, "--out")


def test_no_other_code_writes_files_in_place() -> None:
    """Those that do write into a folder that is renamed or removed, or append. Benches and ranks have their own."""
    source = Path(__file__).parents[1] / "src/stretto"
    writes = re.compile(r"\.write_(text|bytes)\(|\.savefig\((?!out)|open\([^)]*[\"'][wx]b?[\"']")
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if writes.search(path.read_text()) and path.relative_to(source).parts[0] != "bench"
    }
    in_folders = {"train/checkpoint/writing.py", "train/checkpoint/export.py", "train/observe/tracing.py"}
    assert {name for name in found if not name.startswith("launch/")} == in_folders | {
        "atomic_files.py",
        "native_code.py",
        "simulator/chakra/files.py",
    }
