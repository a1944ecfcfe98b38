# SPDX-License-Identifier: Apache-2.0
"""Finds the files that a data path means, detects their format, and checks that they can be of that format."""

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from stretto.cluster import read_bounded, reading
from stretto.suggestions import did_you_mean, did_you_mean_file

FORMATS = ("auto", "text", "chat", "jsonl", "parquet", "arrow", "nanogpt", "megatron")
OF_DOCUMENTS = ("jsonl", "parquet", "arrow")
SUFFIXES = {
    "nanogpt": ".bin",
    "megatron": ".idx",
    "chat": ".jsonl",
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "arrow": ".arrow",
}
MAX_FILES = 1_000_000  # in one folder; more indicate a wrong path, such as "/"
FIRST_LINE_BYTES = 1 << 16  # of a .jsonl file, in which a conversation is searched
DATASET_STATE = "state.json"  # of datasets.Dataset.save_to_disk
MAX_STATE_BYTES = 1 << 26
HELD_OUT = ("val", "valid", "validation", "test")

# The first bytes of files that are neither text nor raw token ids.
SIGNATURES = {
    b"\x89PNG\r\n": "a PNG image",
    b"\xff\xd8\xff\xe0": "a JPEG image",
    b"\xff\xd8\xff\xe1": "a JPEG image",
    b"GIF87a": "a GIF image",
    b"GIF89a": "a GIF image",
    b"%PDF-": "a PDF document",
    b"PK\x03\x04": "a zip archive (or a torch checkpoint)",
    b"\x1f\x8b\x08\x00": "compressed by gzip",
    b"\x1f\x8b\x08\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"BZh91AY&SY": "compressed by bzip2",
    b"\x7fELF": "a program",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x93NUMPY": "a numpy .npy file",
    b"PAR1\x15": "a Parquet file",
    b"ARROW1\x00\x00": "an Arrow file",
    b"SQLite format 3": "an SQLite database",
    b"MMIDIDX\x00": "a Megatron-LM index",
    b"TNTIDX\x00\x00": "an index of Megatron-LM's old format",
}


class DataFile:
    """An open file of known size and time of modification (`modified_at`), read by position.

    A memory map would end the process by SIGBUS where the file has been cut short since, or give zeros up to the end of
    its last page. This raises. ValueError if the file does not have `size` bytes when it is opened, and when it is read
    after it was written to or another file took its place: a look of a microsecond at each read.
    """

    def __init__(self, path: Path, size: int, modified: int) -> None:
        self.path, self.size, self._modified = path, size, modified
        with reading(path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._descriptor).st_size
        if found != size:
            raise ValueError(f"{path}: has {found} bytes, and had {size} when it was opened")

    def read(self, offset: int, count: int) -> bytes:
        """Read `count` bytes at `offset`. Raises ValueError, with both sizes, if the file has been cut short."""
        parts = []
        with reading(self.path):
            now = os.fstat(self._descriptor)
            is_replaced = now.st_nlink == 0 and self.path.exists()  # a file that is only deleted can still be read
            if is_replaced or (now.st_mtime_ns != self._modified and now.st_size >= self.size):
                raise ValueError(
                    f"{self.path}: was {'replaced' if is_replaced else 'written to'} after this run had opened it, so "
                    "that the rest of the run would see other data: put the old file back, and resume"
                )
            while count:
                part = os.pread(self._descriptor, count, offset)  # may return less, of large reads
                if not part:
                    raise cut_short(self.path, os.fstat(self._descriptor).st_size, self.size)
                parts.append(part)
                offset, count = offset + len(part), count - len(part)
        return b"".join(parts)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def cut_short(path: Path, size: int, expected: int) -> ValueError:
    """The error for a file that has `size` bytes now, or gave so many, and had `expected` when it was opened."""
    how = "was cut short" if size < expected else "has changed"
    return ValueError(
        f"{path}: {how} while it was read: it has {size} bytes, and had {expected} when it was opened; put the whole "
        "file back, and resume"
    )


def find_files(paths: Sequence[str], format: str) -> tuple[str, list[Path]]:
    """Find the data files that `paths` mean, in order, and their format.

    A path is a file, a folder (searched recursively and sorted by path; hidden and empty files and links to folders are
    skipped) or, for Megatron-LM, the common prefix of a .bin and an .idx file; either of the two also means both, and
    the .bin is returned. Raises ValueError for a path that is missing, empty or not a regular file, for a file that is
    named twice, and if `format` is "auto" and the files have several formats.
    """
    if format not in FORMATS:
        near = did_you_mean(format, FORMATS)
        raise ValueError(f"format={format!r} is not one of {', '.join(FORMATS)}{near}")
    if not paths or not all(paths):
        raise ValueError(f"the data path {list(paths)!r} is empty: name at least one file or folder")
    files = [file for path in paths for file in _expand(Path(os.path.expanduser(path)), format)]
    if format == "auto":
        format = _common_format(files)
    if format == "megatron":
        files = [_megatron_data_file(file) for file in files]
    seen = set[Path]()
    for file in files:
        file_size(file)
        if file.resolve() in seen:
            raise ValueError(f"{file}: the data path names it twice: name each file once")
        seen.add(file.resolve())
    return format, files


def modified_at(path: Path) -> int:
    """Read when a file was last written to, in nanoseconds of its file system's clock."""
    with reading(path):
        return path.stat().st_mtime_ns


def file_size(path: Path) -> int:
    """The size of a file in bytes. Raises ValueError if it is missing, empty or not a regular file."""
    with reading(path):
        status = path.stat() if path.exists() else None
    if status is None:
        raise ValueError(f"{path}: no such file or folder{did_you_mean_file(path)}")
    if not stat.S_ISREG(status.st_mode):
        # Opening a pipe or a device could block forever.
        raise ValueError(f"{path}: is not a regular file")
    if status.st_size == 0:
        raise ValueError(f"{path}: is empty")
    return status.st_size


def read_head(path: Path, count: int) -> bytes:
    """Read the first `count` bytes of a file. Raises ValueError if they belong to a known other type of file."""
    with reading(path), path.open("rb") as file:
        head = file.read(count)
    for signature, name in SIGNATURES.items():
        if head.startswith(signature):
            raise ValueError(f"{path}: is {name}: data must be text or token ids")
    return head


def _expand(path: Path, format: str) -> list[Path]:
    with reading(path):
        if format in ("auto", "arrow") and ((path / DATASET_STATE).is_file() or (path / "dataset_dict.json").is_file()):
            return _files_of_saved_dataset(path)
        if path.is_dir():
            return _files_of_folder(path, format)
        if format in ("auto", "megatron") and not path.exists():
            index = path.with_name(f"{path.name}.idx")
            return [index if index.exists() else path]
    return [path]


def _files_of_folder(folder: Path, format: str) -> list[Path]:
    """List the folder's files that `format` reads, neither hidden nor empty, sorted by the parts of their paths."""
    files = list[Path]()
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
        if len(files) > MAX_FILES:
            raise ValueError(f"{folder}: holds more than {MAX_FILES} files: name a smaller folder")
    if format in SUFFIXES:
        files = [file for file in files if file.suffix == SUFFIXES[format]]
    elif format == "auto":  # the .bin of an index is in the list, too
        files = [file for file in files if file.suffix != ".idx" or not file.with_suffix(".bin").exists()]
    files = sorted((file for file in files if file.stat().st_size > 0), key=lambda file: file.parts)
    if not files:
        kind = f"{SUFFIXES[format]} file" if format in SUFFIXES else "file"
        raise ValueError(f"{folder}: the folder holds no {kind} that is neither hidden nor empty")
    for file in files:
        is_held_out = len(files) > 1 and file.stem.lower() in HELD_OUT
        if is_held_out and (file.suffix in (".bin", ".idx") or _detect(file) in ("chat", *OF_DOCUMENTS)):
            raise ValueError(
                f"{file}: by its name it is held out, but its folder is given to be trained on: "
                f"name the files to train on, such as {file.with_name(f'train{file.suffix}')}"
            )
    return files


def _refuse(error: OSError) -> None:
    raise error


def _common_format(files: Sequence[Path]) -> str:
    """Detect the format that all files have. Raises ValueError if there are several."""
    first_of = dict[str, Path]()
    for file in files:
        first_of.setdefault(_detect(file), file)
    if len(first_of) > 1:
        found = ", ".join(f"{file} ({format})" for format, file in first_of.items())
        raise ValueError(
            f"the data path holds files of several formats: {found}: name files of one format, or set format"
        )
    return next(iter(first_of))


def _detect(file: Path) -> str:
    match file.suffix:
        case ".idx":
            return "megatron"
        case ".bin":
            return "megatron" if file.with_suffix(".idx").exists() else "nanogpt"
        case ".parquet" | ".arrow":
            return file.suffix[1:]
        case ".jsonl":
            return _detect_json(file)
        case _:
            return "text"


def _detect_json(file: Path) -> str:
    if not file.is_file():
        return "text"  # `file_size` will report it
    with reading(file), file.open("rb") as lines:
        first = lines.readline(FIRST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()  # a byte order mark
    if not first.startswith(b"{"):
        return "text"
    return "chat" if b'"messages"' in first else "jsonl"


def _files_of_saved_dataset(folder: Path) -> list[Path]:
    """List the files of a folder that `datasets` has saved, in their order. ValueError for one of several splits."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{DATASET_STATE}"))
        raise ValueError(
            f"{folder}: holds the splits {', '.join(splits) or 'of a DatasetDict'}: name one of them, such as "
            f"{folder / (splits or ['train'])[0]}"
        )
    with reading(folder):
        content = read_bounded(folder / DATASET_STATE, MAX_STATE_BYTES, "the state of a data set")
    try:
        names = [entry["filename"] for entry in json.loads(content)["_data_files"]]
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError(f"its files are {names}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / DATASET_STATE}: is not of a data set that datasets has saved: {error}") from error
    return [folder / name for name in names]


def _megatron_data_file(file: Path) -> Path:
    if file.suffix not in (".bin", ".idx"):
        file_size(file)  # a missing file is the likelier mistake
        raise ValueError(f"{file}: Megatron-LM's data is a .bin with its .idx: name one of them or their prefix")
    return file.with_suffix(".bin")
