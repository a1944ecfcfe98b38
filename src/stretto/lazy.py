# SPDX-License-Identifier: Apache-2.0
"""Imports a package's public names on first use, so that importing the package does not import torch or matplotlib."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, homes: Mapping[str, str], *, submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__`, as the package lazy_loader's function of this name does.

        __getattr__, __dir__ = attach(__name__, {"plot_loss": "stretto.report.loss_plot"})

    homes: the module of each public name. submodules: names that are modules of the package. Also import the names
    under TYPE_CHECKING, for type checkers and editors.
    """

    def find(name: str) -> Any:
        if name in homes:
            value = getattr(import_module(homes[name]), name)
        elif name in submodules:
            return import_module(f"{package}.{name}")  # the import makes it an attribute of the package
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # the next use finds it at once
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]).get("__all__", ()), *homes, *submodules})

    return find, names
