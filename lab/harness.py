# SPDX-License-Identifier: Apache-2.0
"""A bench of the lab in one file: settings, rows with their columns, what is measured, and pictures.

A file `lab/FOLDER/FILE.py` (or `lab/FILE.py`) that ends in `BENCH = Bench(...)` is a command of `python -m lab`; no
other file lists it. Ranks, timing and results themselves are `stretto.bench`'s, which users' benches share.

Listing the commands imports no bench: `find_benches` reads the declaration from the file's text. So the first two
arguments are literals, `needs` is written `Needs.NAME`, and settings and plots are names of the file. Its `--help`, and
input that the settings refuse, do not import torch: `Declaration.load_settings` executes only those statements of the
file that the settings' class refers to. A plot imports matplotlib and `stretto.report.style` itself: benches run
without them.
"""

import ast
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stretto.bench.settings import Needs

if TYPE_CHECKING:
    from stretto.bench.harness import Column
    from stretto.cli.settings_command import BenchApp

LAB = Path(__file__).parent
ANY_CPU = {"devices": "any CPU"}
"""The machine of results that are computed, and the same everywhere."""
_DECLARATION = "\nBENCH = Bench("
Plot = Callable[[dict[str, Any], Path], None]
Columns: TypeAlias = "type[Any] | Sequence[Column]"
"""A dataclass of rows, or columns that are known only when the bench runs."""


def column(heading: str, form: str = "{}", default: Any = MISSING) -> Any:
    """A field of a row that is a column of the table: its heading (with the unit), and the format of a value.

    Fields without a column are in the JSON alone. A column in which all rows have None is left out.
    """
    return field(default=default, metadata={"heading": heading, "form": form})


def columns_of(row: "Columns") -> tuple["Column", ...]:
    """The columns of a row's class, in the order of its fields; or the columns that were given."""
    from stretto.bench.harness import Column  # imports torch

    if not isinstance(row, type):
        return tuple(row)
    return tuple(
        Column(each.name, each.metadata["heading"], each.metadata["form"])
        for each in fields(row)
        if "heading" in each.metadata
    )


@dataclass(frozen=True)
class Table:
    """Rows under a title: instances of a dataclass with `column`s, or dicts of which `row` has the columns.

    A row with the key `error` has failed: its error is in the table's last column. key: of the rows in the JSON.
    """

    title: str
    rows: Sequence[Any]
    row: "Columns | None" = None
    key: str = "rows"

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows as JSON has them."""
        return [asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row) for row in self.rows]

    def columns(self) -> tuple["Column", ...]:
        """The columns in which a row has a value, and that of errors if a row has one."""
        from stretto.bench.harness import Column, used_columns

        if not self.rows:
            return ()
        rows = self.as_dicts()
        row = type(self.rows[0]) if is_dataclass(self.rows[0]) else self.row
        assert row is not None, "rows that are dicts need `row`"
        columns = columns_of(row)
        if not any(each.key == "error" for each in columns):
            columns += (Column("error", "error"),)
        return used_columns(columns, rows)


def keep_rows(out: Path, name: str, row: "Columns", about: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Write the rows that a rank has measured so far, so that a run that is cut off keeps them."""
    from stretto.bench.harness import write_result

    table = Table(name, rows, row)
    write_result(out, name, table.columns(), table.as_dicts(), **about)


@dataclass(frozen=True)
class Measured:
    """Rows with what else the result says: `about` joins the JSON, `lines` follow the tables.

    tables: printed and written after the rows' own. name, title, row: of the file, its table and its columns, where
    they are not the bench's.
    """

    rows: Sequence[Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    name: str | None = None
    title: str | None = None
    row: "Columns | None" = None


def setting_of(setting: Any) -> dict[str, Any]:
    """All settings, as a result says them unless its bench has an `about` of its own."""
    return {"setting": asdict(setting)}


@dataclass(frozen=True)
class Bench:
    """A command of `python -m lab`, and the file `NAME.json` that it writes, with tables and a picture beside it.

    settings: a frozen dataclass whose fields are options (`stretto.bench.settings.Option`). A field `ranks` that is
    None becomes the machine's GPUs where the bench needs GPUs or ranks. run: takes the settings (and the output folder,
    if it has a second parameter), and yields rows, or returns `Measured`, or yields several of them, each of which is
    written when it comes (again, where the name is the same). row: their dataclass, whose fields are `column`s; rows
    may also be dicts with these keys. title: of the table; takes the settings where it depends on them. plot: draws a
    result's JSON into a picture; a dict of several, by patterns of files' names. about: what the JSON says besides
    rows, made of the settings. shares_gpus: whether it takes more ranks than there are GPUs.
    """

    name: str
    summary: str
    settings: type[Any]
    run: Callable[..., Iterable[Any] | Measured]
    row: Columns
    title: str | Callable[[Any], str]
    plot: Plot | Mapping[str, Plot] | None = None
    needs: Needs = Needs.NO_GPU
    about: Callable[[Any], Mapping[str, Any]] = setting_of
    shares_gpus: bool = False

    def __call__(self, setting: Any, out: Path) -> dict[str, Any]:
        """Measure, print the tables, and write JSON, tables and pictures to `out`. Returns what `--json` prints."""
        takes_out = len(signature(self.run).parameters) > 1
        found = self.run(setting, out) if takes_out else self.run(setting)
        if isinstance(found, Measured):
            return self._write(found, setting, out)
        rows: list[Any] = []
        said: dict[str | None, dict[str, Any]] = {}
        for each in found:
            if isinstance(each, Measured):
                said[each.name] = self._write(each, setting, out)
            else:
                rows.append(each)
        if rows or not said:
            said[None] = self._write(Measured(rows), setting, out)
        if None in said or len(said) == 1:
            return said.get(None) or next(iter(said.values()))
        return {"rows": [row for each in said.values() for row in each["rows"]]}

    def _write(self, measured: Measured, setting: Any, out: Path) -> dict[str, Any]:
        from lab.pictures import draw_result
        from stretto.atomic_files import write_atomically
        from stretto.bench.harness import markdown_table, print_table, write_result

        title = measured.title or (self.title if isinstance(self.title, str) else self.title(setting))
        main = Table(title, measured.rows, measured.row or self.row)
        tables = [main, *measured.tables]
        shown = [(each.title, each.columns(), each.as_dicts()) for each in tables if each.rows]
        for each in shown:
            print_table(*each)
        for line in measured.lines:
            print(line)
        name, rows = measured.name or self.name, main.as_dicts()
        others = {each.key: each.as_dicts() for each in measured.tables}
        about = {**self.about(setting), **measured.about}
        result = write_result(out, name, main.columns(), rows, **about, **others)
        parts = ["\n".join(markdown_table(columns, rows)) for _, columns, rows in shown]
        if len(shown) > 1:
            parts = [f"{title}:\n\n{part}" for (title, _, _), part in zip(shown, parts, strict=True)]
        head = result.with_suffix(".md").read_text().partition("\n\n")[0]
        write_atomically(result.with_suffix(".md"), "\n\n".join([head, *parts, *measured.lines]) + "\n")
        write_atomically(result.with_suffix(".csv"), _csv(main.columns(), rows))
        plots = self.plot if isinstance(self.plot, Mapping) else {self.name: self.plot}
        if any(plot and fnmatch(name, pattern) for pattern, plot in plots.items()):
            draw_result(result)
        return {"rows": rows, **others, **measured.about}


def _csv(columns: Sequence["Column"], rows: Iterable[Mapping[str, Any]]) -> str:
    """The table's columns, named by their keys, with values in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [each.key for each in columns], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@dataclass(frozen=True)
class Declaration:
    """A bench as its file declares it, read without importing it."""

    name: str
    summary: str
    settings: str
    plots: tuple[tuple[str, str], ...]
    needs: Needs
    shares_gpus: bool
    module: str

    def load_settings(self) -> type[Any]:
        """The settings' class, from the statements of the file that it refers to, directly or through others."""
        path = LAB.parent / Path(*self.module.split(".")).with_suffix(".py")
        body = ast.parse(path.read_text()).body
        defined = {name: statement for statement in body for name in _defined_names(statement)}
        needed: dict[ast.stmt, set[str]] = {}
        names = [self.settings]
        while names:
            name = names.pop()
            if (statement := defined.get(name)) is None or name in needed.get(statement, ()):
                continue
            needed.setdefault(statement, set()).add(name)
            names += [each.id for each in ast.walk(statement) if isinstance(each, ast.Name)]
        for statement, wanted in needed.items():
            if isinstance(statement, ast.Import | ast.ImportFrom):
                statement.names = [each for each in statement.names if _imported_name(each) in wanted]
        scope: dict[str, Any] = {"__name__": self.module}
        part = ast.Module([each for each in body if each in needed], type_ignores=[])
        exec(compile(part, path, "exec"), scope)  # of this checkout's own file
        return scope[self.settings]


def _imported_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _defined_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Import(names) | ast.ImportFrom(names=names):
            return [_imported_name(each) for each in names]
        case ast.Assign(targets):
            return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        case ast.AnnAssign(ast.Name(name)) | ast.ClassDef(name) | ast.FunctionDef(name):
            return [name]
    return []


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
    plots = dict(zip(plot.keys, plot.values, strict=True)) if isinstance(plot, ast.Dict) else {name: plot}
    known = {
        key.value: draw.id
        for key, draw in plots.items()
        if isinstance(key, ast.Constant) and isinstance(draw, ast.Name)
    }
    if (plot is not None and len(known) < len(plots)) or not isinstance(needs, ast.Attribute | None):
        raise ValueError(
            f"{path}: BENCH has the name of a function (or a dict of them) as plot, and Needs.NAME as needs"
        )
    shares = given.get("shares_gpus")
    return Declaration(
        str(name.value),
        str(summary.value),
        settings.id,
        tuple((str(pattern), draw) for pattern, draw in known.items()),
        Needs[needs.attr] if needs else Needs.NO_GPU,
        isinstance(shares, ast.Constant) and bool(shares.value),
        ".".join(path.relative_to(LAB.parent).with_suffix("").parts),
    )


def add_commands(benches: "BenchApp") -> None:
    """Make a command of each declared bench; its file is imported when all that was given has been checked."""
    for found in find_benches():
        benches.command(found.name, found.load_settings, needs=found.needs)(_make_run(benches, found))


def _make_run(benches: "BenchApp", found: Declaration) -> Callable[[Any, Path], Any]:
    def run(setting: Any, out: Path) -> Any:
        if found.needs in (Needs.RANKS, Needs.TWO_GPUS) and hasattr(setting, "ranks"):
            count = benches.count_ranks if found.needs is Needs.RANKS else benches.count_gpus
            count = benches.count_ranks_on_gpus if found.shares_gpus else count
            setting = replace(setting, ranks=count(setting.ranks))
        bench: Bench = import_module(found.module).BENCH
        return bench(bench.settings(**{each.name: getattr(setting, each.name) for each in fields(setting)}), out)

    run.__doc__ = found.summary
    return run


def list_plots() -> dict[str, str]:
    """The function that draws each declared bench's results, by the files' names."""
    return {f"{pattern}.json": f"{found.module}:{draw}" for found in find_benches() for pattern, draw in found.plots}
