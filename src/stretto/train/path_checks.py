# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's folder before anything is created: it is writable, and not inside the data's folder."""

import os
from pathlib import Path

from stretto.atomic_files import require_writable_folder

PYTHON_DOCS = "python-docs"  # a data path that names no folder


def check_folder(out: Path) -> None:
    """Raise ValueError if the run's folder cannot be made or written to. Nothing of it is made yet."""
    require_writable_folder(out, "out")
    if (checkpoints := out / "checkpoints").exists() and not checkpoints.is_dir():
        raise ValueError(f"out is {str(out)!r}, but {checkpoints} is not a folder: checkpoints would go there")
    for file in (out / name for name in ("config.toml", "metrics.jsonl", "summary.json")):
        if file.exists() and not file.is_file():  # a pipe would never be opened
            raise ValueError(f"out is {str(out)!r}, but {file} is not a regular file: the run would write it")


def check_outside_data(run_folder: Path, data: str | list[str], *, reads_all: bool = True) -> None:
    """Raise ValueError if the run's folder is in a data folder: a resumed run would read its own files as data.

    reads_all: the data format reads every file of a folder. Other formats read only files of certain names, which a
    run's folder does not have.
    """
    if not reads_all:
        return
    out = Path(os.path.realpath(run_folder))
    for path in [data] if isinstance(data, str) else data:
        folder = Path(os.path.realpath(os.path.expanduser(path)))
        if path == PYTHON_DOCS or not folder.is_dir() or not out.is_relative_to(folder):
            continue
        if not any(part.startswith(".") for part in out.relative_to(folder).parts):  # hidden folders are not read
            raise ValueError(
                f"out is {str(run_folder)!r}, which lies in the folder of data {path!r}: the run's files would be "
                f"taken for data; out={str(folder.with_name(f'{folder.name}-run'))!r} would do"
            )
