# SPDX-License-Identifier: Apache-2.0
"""Converts cluster files to checked, frozen dataclasses, and back.

Each field's metadata declares what kind of value it holds (`figure`). Reading, checking and writing follow these
declarations, so that a new figure is one new line in `model.py`.
"""

import math
import reprlib
from collections.abc import Iterator
from dataclasses import MISSING, Field, field, fields
from enum import Enum
from typing import Any, TypeVar

from stretto.suggestions import did_you_mean

LARGEST_COUNT = 10**9
LARGEST_QUANTITY = 1e24
LONGEST_TEXT = 1000
MAX_ROWS = 4096

T = TypeVar("T")


class Kind(Enum):
    """Kind of a field's content; the value is the rule in words, for error messages."""

    COUNT = f"a whole number from 1 to {LARGEST_COUNT}"
    QUANTITY = f"a finite number greater than 0 and at most {LARGEST_QUANTITY:g}"
    TEXT = f"printable text of 1 to {LONGEST_TEXT} characters"
    TABLE = "a table"
    ROWS = f"a list of at most {MAX_ROWS} tables"
    NOTES = "a table of texts"


def figure(kind: Kind, unit: str = "", *, of: type | None = None) -> dict[str, Any]:
    """The metadata of a dataclass field: its kind, its unit, and the dataclass of its table or rows (`of`)."""
    return {"kind": kind, "unit": unit, "of": of}


def quantity(unit: str) -> Any:
    """A dataclass field of a quantity, None where it is unknown."""
    return field(default=None, metadata=figure(Kind.QUANTITY, unit))


def build(cls: type[T], table: dict[str, Any], where: str, prefix: str = "") -> T:
    """Make a `cls` from a parsed TOML table.

    `where` (the file) and `prefix` (the dotted keys of the enclosing tables) locate errors. Raises ValueError for an
    unknown or missing key and for a value that breaks its field's rule.
    """
    known = {declared.name: declared for declared in fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: unknown key {prefix + key!r}; {suggest(key, known)}")
    values = {}
    for name, declared in known.items():
        if name in table:
            values[name] = _convert(declared, table[name], where, prefix + name)
        elif declared.default is MISSING and declared.default_factory is MISSING:
            rule = declared.metadata["kind"].value
            raise ValueError(f"{where}: {prefix + name} is missing; it must be {rule}")
    try:
        return cls(**values)
    except ValueError as error:  # __post_init__ checks rules between figures, and does not know the file
        raise ValueError(f"{where}: {prefix}{error}") from None


class Checked:
    """Base of dataclasses whose fields are `figure`s. ValueError unless each value satisfies its field's rule.

    So values given from Python are checked like those of a file.
    """

    def __post_init__(self) -> None:
        for declared in fields(self):  # type: ignore[arg-type]  # its classes are dataclasses
            value, kind = getattr(self, declared.name), declared.metadata["kind"]
            if value is None and declared.default is None:
                continue
            if kind in (Kind.COUNT, Kind.QUANTITY, Kind.TEXT):
                check_value(value, kind, f"{type(self).__name__}.{declared.name}")


def check_value(value: object, kind: Kind, where: str) -> None:
    """Raise ValueError, which names place, value, rule and a valid value, unless the value satisfies the rule."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case Kind.COUNT:
            is_kept = is_number and isinstance(value, int) and 1 <= value <= LARGEST_COUNT
        case Kind.QUANTITY:
            # NaN fails every comparison, and comparing never converts a huge int to a float.
            is_kept = is_number and 0 < value <= LARGEST_QUANTITY  # type: ignore[operator]
        case _:
            is_kept = isinstance(value, str) and 1 <= len(value) <= LONGEST_TEXT and value.isprintable()
    if not is_kept:
        raise ValueError(f"{where} = {_shown(value)}: must be {kind.value}{_remedy(value, kind)}")


def _shown(value: object) -> str:
    """A value for an error message, short whatever the file holds."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest ones
    return reprlib.repr(value)


def _remedy(value: object, kind: Kind) -> str:
    """The end of an error message: a value that would be valid in place of a refused one."""
    if kind is Kind.TEXT:
        return ""
    if isinstance(value, str):
        return "; write it as a bare number, without quotes or unit, such as 25e9 for 25 GB/s"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < 0 and -value <= LARGEST_COUNT and kind is Kind.COUNT:
            return f"; {max(1, round(-value))} would do"
        if -LARGEST_QUANTITY <= value < 0 and kind is Kind.QUANTITY:
            return f"; {-value:g} would do"
        if kind is Kind.COUNT and 0 < value <= LARGEST_COUNT:
            return f"; {max(1, round(value))} would do"
    return "; leave the key out if the figure is not known"


def suggest(key: str, known: Any) -> str:
    """The end of an error message: the nearest known key, and all of them."""
    near = did_you_mean(key, known).removeprefix("; ")
    return f"{near} Known here: {', '.join(known)}".lstrip()


def _convert(declared: Field[Any], value: Any, where: str, key: str) -> Any:
    kind, of = declared.metadata["kind"], declared.metadata["of"]
    match kind:
        case Kind.TABLE:
            _check_shape(isinstance(value, dict), value, kind, f"{where}: {key}")
            return build(of, value, where, f"{key}.")
        case Kind.ROWS:
            is_list = isinstance(value, list) and len(value) <= MAX_ROWS
            is_rows = is_list and all(isinstance(row, dict) for row in value)
            _check_shape(is_rows, value, kind, f"{where}: {key}")
            return tuple(build(of, row, where, f"{key}[{i}].") for i, row in enumerate(value))
        case Kind.NOTES:
            _check_shape(isinstance(value, dict), value, kind, f"{where}: {key}")
            return dict(_notes(value, f"{where}: {key}"))
        case _:
            check_value(value, kind, f"{where}: {key}")
            return float(value) if kind is Kind.QUANTITY else value


def _check_shape(is_kept: bool, value: object, kind: Kind, where: str) -> None:
    if not is_kept:
        raise ValueError(f"{where} = {_shown(value)}: must be {kind.value}")


def _notes(table: dict[str, Any], where: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and texts of a table; TOML reads an unquoted `gpu.memory = "..."` as nested tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _notes(value, where, f"{prefix}{key}.")
        else:
            check_value(value, Kind.TEXT, f"{where}.{prefix}{key}")
            yield prefix + key, value


def dotted_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield every key of a dataclass's file, tables included: `gpu`, `gpu.name`, `gpu.peak_flops`, ..."""
    for declared in fields(cls):
        yield prefix + declared.name
        if declared.metadata["kind"] is Kind.TABLE:
            yield from dotted_keys(declared.metadata["of"], f"{prefix}{declared.name}.")


def to_toml(instance: Any, header: str = "") -> str:
    """TOML that `build` converts to an equal instance; the unit of a figure is a comment behind it."""
    lines, tables = [], []
    for declared in fields(instance):
        value, kind = getattr(instance, declared.name), declared.metadata["kind"]
        if value is None:
            continue
        match kind:
            case Kind.TABLE:
                tables.append(to_toml(value, f"{header}.{declared.name}".lstrip(".")))
            case Kind.NOTES if value:
                notes = (f"{_literal(key)} = {_literal(text)}" for key, text in value.items())
                tables.append("\n".join([f"[{declared.name}]", *notes]) + "\n")
            case Kind.ROWS if value:
                lines.append(f"{declared.name} = [\n" + "".join(f"    {_inline(row)},\n" for row in value) + "]")
            case Kind.COUNT | Kind.QUANTITY | Kind.TEXT:
                unit = declared.metadata["unit"]
                lines.append(f"{declared.name} = {_literal(value)}" + (f"  # {unit}" if unit else ""))
    own = "\n".join([f"[{header}]"] * bool(header) + lines) + "\n" if lines else ""
    return "\n".join(part for part in [own, *tables] if part)


def _inline(row: Any) -> str:
    return "{ " + ", ".join(f"{f.name} = {_literal(getattr(row, f.name))}" for f in fields(row)) + " }"


def _literal(value: str | int | float) -> str:
    if isinstance(value, str):
        # Only printable text gets here, so quotes and backslashes are all that needs escaping.
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, float) and value >= 1000:
        # 312e12 reads better than 312000000000000.0, and is written only where it is the same number.
        exponent = math.floor(math.log10(value) / 3) * 3
        short = f"{value / 10.0**exponent:.12g}e{exponent}"
        return short if float(short) == value else repr(value)
    return repr(value)
