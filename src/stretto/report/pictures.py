# SPDX-License-Identifier: Apache-2.0
"""Decides whether pictures are drawn: matplotlib, which draws them, is an optional dependency (the extra `plots`)."""

import sys
from functools import cache
from importlib.util import find_spec

MAX_BOXES = 50_000
HOW_TO_GET = "matplotlib is not installed: pip install 'stretto[plots]'"


def can_draw() -> bool:
    """True if pictures can be drawn. If not, says on stderr, once in a process, how to get them.

    Ask before a module that imports matplotlib is imported.
    """
    if _has_matplotlib():
        return True
    _explain_how_to_install()
    return False


def require_drawing() -> None:
    """Raise ValueError that says how to get pictures, if they cannot be drawn."""
    if not _has_matplotlib():
        raise ValueError(f"pictures are drawn by matplotlib: {HOW_TO_GET}")


def require_few_boxes(boxes: int) -> None:
    """Raise ValueError for more actions of a pipeline than a picture has room for."""
    if boxes > MAX_BOXES:
        raise ValueError(f"{boxes} actions are too many for a picture (at most {MAX_BOXES}): show fewer micro-batches")


def _has_matplotlib() -> bool:
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # something has put another object in its place in sys.modules
        return False


@cache
def _explain_how_to_install() -> None:
    print(f"stretto: no pictures are drawn: {HOW_TO_GET}", file=sys.stderr, flush=True)
