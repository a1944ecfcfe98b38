# SPDX-License-Identifier: Apache-2.0
"""Decides whether pictures are drawn: matplotlib, which draws them, is an optional dependency (the extra `plots`)."""

import sys
from functools import cache
from importlib.util import find_spec

HOW_TO_GET = "matplotlib is not installed: pip install 'stretto[plots]'"


def can_draw() -> bool:
    """Whether pictures can be drawn. If not, says on stderr, once in a process, how to get them.

    Ask before a module that imports matplotlib is imported.
    """
    if _has_matplotlib():
        return True
    _say_how_to_get()
    return False


def require_drawing() -> None:
    """Raise ValueError that says how to get pictures, if they cannot be drawn."""
    if not _has_matplotlib():
        raise ValueError(f"pictures are drawn by matplotlib: {HOW_TO_GET}")


def _has_matplotlib() -> bool:
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # something has put another object in its place in sys.modules
        return False


@cache
def _say_how_to_get() -> None:
    print(f"stretto: no pictures are drawn: {HOW_TO_GET}", file=sys.stderr, flush=True)
