# SPDX-License-Identifier: Apache-2.0
"""Imports a package's public names on first use, so that importing the package does not import torch or matplotlib."""

import ast
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package, from what it imports for type checkers and editors.

        if TYPE_CHECKING:
            from stretto.report.loss_plot import plot_loss

        __getattr__, __dir__ = attach(__name__)

    Its source is read when the first such name is used: Triton reads its kernels' source, too.
    """

    @functools.cache
    def homes() -> dict[str, str]:
        loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]  # it was imported
        tree = ast.parse(loader.get_source(package))
        blocks = [each for each in tree.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"]
        imports = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
        return {name.asname or name.name: each.module or "" for each in imports for name in each.names}

    def find(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes()[name] == package:  # a module of the package, which the import makes an attribute of it
            return import_module(f"{package}.{name}")
        value = getattr(import_module(homes()[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it at once
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]).get("__all__", ()), *homes()})

    return find, names
