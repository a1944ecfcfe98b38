# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the API reference: one for each package that has `__all__`, with an entry for each name in it.

Sources are parsed, not imported, so neither torch nor a GPU is needed.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stretto"


def find_public_names() -> dict[str, dict[str, str]]:
    """The public names of each public package, by the package's dotted name, and the dotted name of what each is.

    The latter is where the package imports it from: a package may have a module of the same name.
    """
    found = {}
    for path in sorted(SOURCE.rglob("__init__.py")):
        package = ".".join(path.parent.relative_to(SOURCE.parent).parts)
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = sorted(ast.literal_eval(node.value), key=lambda name: (name.lower(), name))
                found[package] = {name: imported.get(name, f"{package}.{name}") for name in names}
    return {
        package: {name: _follow(origin, found) for name, origin in names.items()} for package, names in found.items()
    }


def _follow(origin: str, packages: dict[str, dict[str, str]]) -> str:
    """Follow an import from a package to what that package imports."""
    package, _, name = origin.rpartition(".")
    known = packages.get(package, {}).get(name, origin)
    return origin if known == origin else _follow(known, packages)


def write_page(package: str, packages: dict[str, dict[str, str]]) -> str:
    """Write a package's page, for mkdocstrings: its docstring, then an entry for each name.

    What an inner package exports too has its entry on that package's page, and a link here.
    """
    options = "    options:\n      show_root_heading: true\n      show_root_toc_entry: true\n"
    pieces = [f"# {package}\n", f"::: {package}\n    options:\n      members: false\n"]
    for name, origin in packages[package].items():
        homes = [other for other, names in packages.items() if origin in names.values()]
        home = max(homes, key=lambda other: (other.count("."), other))
        if home == package:
            pieces.append(f"::: {origin}\n{options}      heading: {name}\n")
        else:
            pieces.append(f"## {name}\n\nSee [`{home}.{name}`]({home}.md#{origin}).\n")
    return "\n".join(pieces)


def write_index(packages: dict[str, dict[str, str]]) -> str:
    """Write the page that lists all packages, with the first line of each one's docstring."""
    rows = ["| package | what it has |", "|---|---|"]
    for package in packages:
        path = SOURCE.parent / package.replace(".", "/") / "__init__.py"
        summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        rows.append(f"| [`{package}`]({package}.md) | {summary} |")
    head = "# API reference\n\nLook up what a public function or class takes, returns and raises. "
    head += "Every name that a package exports is here; what is not here may change without notice.\n\n"
    return head + "\n".join(rows) + "\n"
