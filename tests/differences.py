# SPDX-License-Identifier: Apache-2.0
"""The largest of some differences."""

from math import isnan
from typing import Any


def largest(*values: Any, **default: Any) -> Any:
    """As `max`, but NaN if one is NaN: `max` drops a NaN that is not the first, and a limit never sees it.

    Not in a file `numbers.py`, which would hide Python's from scripts of this folder.
    """
    return max(*values, **default, key=lambda value: (isnan(value), value))
