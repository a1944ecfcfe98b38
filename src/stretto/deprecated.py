# SPDX-License-Identifier: Apache-2.0
"""Old names of renamed things, which go on working for one release with a DeprecationWarning."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def alias(module: str, old_to_new: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's `__getattr__` that still finds renamed things by their old names, and warns.

    old_to_new: an old name to the new one, in the same module, or dotted ("stretto.parallel.Grid") if it is elsewhere.
    Write `__getattr__ = alias(__name__, {"OldName": "NewName"})` at the module's end.
    """

    def find(name: str) -> Any:
        new = old_to_new.get(name)
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        owner, _, attribute = new.rpartition(".")
        owner = owner or module
        warnings.warn(f"{module}.{name} is now {owner}.{attribute}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(owner), attribute)

    return find
