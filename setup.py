# SPDX-License-Identifier: Apache-2.0
"""Gives the package its README, with links that work on a package index; pyproject.toml has everything else.

A package index shows the README without the repository's files, so that relative links and pictures lead nowhere there.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def make_links_absolute(text: str, source: str, version: str) -> str:
    """Make a page's relative links lead to a version's files at `source`, the repository's address."""

    def replace(match: re.Match[str]) -> str:
        mark, label, path = match.groups()
        return f"{mark}[{label}]({source}/{'raw' if mark else 'blob'}/v{version}/{path})"

    return LINK.sub(replace, text)


def read_version() -> str:
    """The version, without importing the package."""
    text = (ROOT / "src" / "stretto" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None, "src/stretto/__init__.py has no line __version__"
    return match[1]


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    setup(
        long_description=make_links_absolute(
            (ROOT / "README.md").read_text(), project["urls"]["Source"], read_version()
        ),
        long_description_content_type="text/markdown",
    )
