# SPDX-License-Identifier: Apache-2.0
"""Numbers that papers have published, in a TOML file a paper with their figures and tables."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_paper(name: str) -> dict[str, Any]:
    """The entries of `lab/papers/NAME.toml`."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())


def by_number(entries: dict[str, float]) -> dict[int, float]:
    """The entries of a table whose keys are numbers, which TOML has as text."""
    return {int(key): value for key, value in entries.items()}
