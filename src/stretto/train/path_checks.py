"""A run's folder and its data must not lie in one another."""

import os
from pathlib import Path

PYTHON_DOCS = "python-docs"  # names no folder


def check_apart(run_folder: Path, data: str | list[str], *, reads_all: bool = True) -> None:
    """Refuse a run's folder inside a folder of data: what the run writes would be taken for data when it resumes.

    `reads_all`: data is every file of its folder; otherwise those of certain names, of which a run has none.
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
