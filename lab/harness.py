# SPDX-License-Identifier: Apache-2.0
"""A bench of the lab in one file: settings, rows with their columns, what is measured, and a picture.

A file `lab/FOLDER/FILE.py` (or `lab/FILE.py`) that ends in `BENCH = Bench(...)` is a command of `python -m lab`; no
other file lists it. Ranks, timing and results themselves are `stretto.bench`'s, which users' benches share.

Listing the commands imports no bench: `find_benches` reads the declaration from the file's text. So the first two
arguments are literals, `needs` is written `Needs.NAME`, and settings and plot are names of the file. A plot imports
matplotlib and `stretto.report.style` itself: benches run without them.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.cli.settings_command import BenchApp, Needs

LAB = Path(__file__).parent
_DECLARATION = "\nBENCH = Bench("


def column(heading: str, form: str = "{}") -> Any:
    """A field of a row that is a column of the table: its heading (with the unit), and the format of a value.

    Fields without a column are in the JSON alone.
    """
    return field(metadata={"heading": heading, "form": form})


def columns_of(row: type[Any]) -> tuple[Any, ...]:
    """The columns of a row's class, in the order of its fields."""
    from stretto.bench.harness import Column  # imports torch

    return tuple(
        Column(each.name, each.metadata["heading"], each.metadata["form"])
        for each in fields(row)
        if "heading" in each.metadata
    )


@dataclass(frozen=True)
class Measured:
    """Rows with what else the result says: `about` joins the JSON, `lines` follow the table on the terminal."""

    rows: list[Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def setting_of(setting: Any) -> dict[str, Any]:
    """All settings, as a result says them unless its bench has an `about` of its own."""
    return {"setting": asdict(setting)}


@dataclass(frozen=True)
class Bench:
    """A command of `python -m lab`, and the file `NAME.json` that it writes, with a table and a picture beside it.

    settings: a frozen dataclass whose fields are options (`stretto.bench.settings.Option`). run: measures; takes the
    settings, and yields rows or returns `Measured`. row: their dataclass, whose fields are `column`s. title: of the
    table; takes the settings where it depends on them. plot: draws a result into a picture. about: what the JSON says
    besides rows, made of the settings.
    """

    name: str
    summary: str
    settings: type[Any]
    run: Callable[[Any], Iterable[Any] | Measured]
    row: type[Any]
    title: str | Callable[[Any], str]
    plot: Callable[[Path, Path], None] | None = None
    needs: Needs = Needs.NO_GPU
    about: Callable[[Any], Mapping[str, Any]] = setting_of

    def __call__(self, setting: Any, out: Path) -> list[dict[str, Any]]:
        """Measure, print the table, and write the JSON, the table and the picture to `out`. Returns the rows."""
        from lab.pictures import draw_result
        from stretto.bench.harness import print_table, write_result

        found = self.run(setting)
        measured = found if isinstance(found, Measured) else Measured(list(found))
        rows, columns = [asdict(row) for row in measured.rows], columns_of(self.row)
        print_table(self.title if isinstance(self.title, str) else self.title(setting), columns, rows)
        for line in measured.lines:
            print(line)
        result = write_result(out, self.name, columns, rows, **self.about(setting), **measured.about)
        if self.plot is not None:
            draw_result(result)
        return rows


@dataclass(frozen=True)
class Declaration:
    """A bench's names as its file declares them, read without importing it, and its module."""

    name: str
    summary: str
    settings: str
    plot: str | None
    needs: Needs
    module: str


@cache
def find_benches() -> tuple[Declaration, ...]:
    """Read the declarations of all benches in the lab's files."""
    return tuple(_read(path, text) for path, text in _texts() if _DECLARATION in text)


def _texts() -> Iterator[tuple[Path, str]]:
    for path in sorted([*LAB.glob("*.py"), *LAB.glob("*/*.py")]):
        if path != Path(__file__):
            yield path, path.read_text()


def _read(path: Path, text: str) -> Declaration:
    """Parse `BENCH = Bench(...)` alone. Raises ValueError where the listing could not show it."""
    rest = text[text.index(_DECLARATION) :]
    end = rest.find("\n)\n")
    statement = ast.parse(rest if end < 0 else rest[: end + 3]).body[0]
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.Call)
    call = statement.value
    given = {each.name: value for each, value in zip(fields(Bench), call.args, strict=False)}
    given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
    name, summary, settings, plot = (given.get(key) for key in ("name", "summary", "settings", "plot"))
    needs = given.get("needs")
    if not (isinstance(name, ast.Constant) and isinstance(summary, ast.Constant) and isinstance(settings, ast.Name)):
        raise ValueError(f"{path}: BENCH starts with a literal name and summary and the name of its settings' class")
    if not isinstance(plot, ast.Name | None) or not isinstance(needs, ast.Attribute | None):
        raise ValueError(f"{path}: BENCH has the name of a function as plot, and Needs.NAME as needs")
    return Declaration(
        str(name.value),
        str(summary.value),
        settings.id,
        plot.id if plot else None,
        Needs[needs.attr] if needs else Needs.NO_GPU,
        ".".join(path.relative_to(LAB.parent).with_suffix("").parts),
    )


def add_commands(benches: BenchApp) -> None:
    """Make a command of each declared bench; its file is imported when the command is used."""
    for found in find_benches():

        def run(setting: Any, out: Path, module: str = found.module) -> list[dict[str, Any]]:
            bench: Bench = import_module(module).BENCH
            return bench(setting, out)

        run.__doc__ = found.summary
        run.__annotations__["setting"] = found.settings
        benches.command(found.name, found.module, needs=found.needs)(run)


def list_plots() -> dict[str, str]:
    """The function that draws each declared bench's result, by the file's name."""
    return {f"{found.name}.json": f"{found.module}:{found.plot}" for found in find_benches() if found.plot}
