# SPDX-License-Identifier: Apache-2.0
"""Messages for a configuration that is refused: the key, its value, the rule, and the nearest value that would do."""

import math
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from stretto.suggestions import did_you_mean


def describe_problems(error: ValidationError, options: Mapping[str, FieldInfo]) -> list[str]:
    """Describe each option that pydantic refused, once. `options`: all options by their dotted keys."""
    first_of_key: dict[str, ErrorDetails] = {}  # pydantic reports each branch of a union
    for detail in error.errors():
        first_of_key.setdefault(_known_key(detail["loc"], options), detail)
    return [_explain(key, detail, options) for key, detail in first_of_key.items()]


def _explain(key: str, detail: ErrorDetails, options: Mapping[str, FieldInfo]) -> str:
    """Describe one problem that pydantic found: key, value, rule, and what would do."""
    value, context = detail["input"], detail.get("ctx", {})
    field = options.get(key)
    default = None if field is None or field.is_required() else field.default
    match detail["type"]:
        case "value_error":
            return str(context["error"])
        case "missing":
            what = f": {field.description}" if field else ", a section"
            return f"{key} is missing{what}"
        case "extra_forbidden":
            if isinstance(value, Mapping):
                sections = {known.partition(".")[0] for known in options if "." in known}
                return f"{key} is an unknown section; did you mean {_nearest(key, sections)}?"
            return f"{key} is an unknown option; did you mean {_nearest(key, options)}?"
        case "literal_error":
            choices = _choices(field.annotation) if field else []
            near = did_you_mean(value, choices)
            return f"{key} is {_toml(value)}, but must be one of {', '.join(choices)}{near}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            (name, bound) = next(iter(context.items()))
            words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}[name]
            return f"{key} is {value!r}, but must be {words} {bound}; {_inside(name, bound, default)} would do"
        case "multiple_of":
            divisor = context["multiple_of"]
            near = max(1, round(value / divisor)) * divisor
            return f"{key} is {value!r}, but must be a multiple of {divisor}; {near} would do"
        case "finite_number":
            return f"{key} is {value!r}, but must be a finite number{_for_example(default)}"
        case "int_type" if isinstance(value, float) and math.isfinite(value):
            return f"{key} is {value!r}, but must be a whole number; {round(value)} would do"
    rule = {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "a text or a list of texts" if key in ("data.path", "data.evaluation_path") else "a text",
        "list_type": "a list of whole numbers",
        "path_type": "a text",
        "model_type": "a section with options of its own",
        "model_attributes_type": "a section with options of its own",
    }.get(detail["type"], detail["msg"])
    if isinstance(value, bool) and rule == "a text" and field is not None:
        off = "leave it out for none" if default is None else f'the default is "{default}"'
        return f"{key} is {_toml(value)}, but must be a text ({field.description}); {off}"
    return f"{key} is {_toml(value)}, but must be {rule}{_instead(value, rule, default)}"


def _known_key(location: tuple[int | str, ...], options: Mapping[str, FieldInfo]) -> str:
    """Find the option's key in pydantic's location, which may also name a union's branch and a place in a list."""
    parts = [str(part) for part in location]
    return next((key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in options), ".".join(parts))


def _nearest(key: str, known_keys: Iterable[str]) -> str:
    """Find the known key that is most similar to `key`, as a whole or in its last part (another section's option)."""
    leaf = key.rpartition(".")[2]

    def likeness(known: str) -> float:
        whole = SequenceMatcher(None, key, known).ratio()
        return max(whole, 0.9 * SequenceMatcher(None, leaf, known.rpartition(".")[2]).ratio())

    return max(known_keys, key=likeness)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice).lower() if choice is False else str(choice) for choice in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]


def _inside(name: str, bound: float, default: Any) -> Any:
    """Find the nearest number inside a bound. Next to an open bound fractions have none: returns the default."""
    if name in ("ge", "le"):
        return bound
    if isinstance(default, int) and not isinstance(default, bool):
        return bound + 1 if name == "gt" else bound - 1
    return default if default is not None else 0.1


def _toml(value: Any) -> str:
    """A value as a configuration file has it, as far as that differs from Python's: true, not True."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _for_example(default: Any) -> str:
    return "" if default is None else f", for example {_toml(default)}"


def _instead(value: Any, rule: str, default: Any) -> str:
    """Suggest how to write the value that was probably meant: numbers and booleans without quotes, texts with them."""
    if isinstance(value, str) and "number" in rule:
        try:
            number = float(value)
        except ValueError:
            return _for_example(default)
        return f"; {int(number) if number.is_integer() else number} (a number, without quotes) would do"
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return f"; {value.lower()} (without quotes) would do"
    if "text" in rule and not isinstance(value, list | dict):
        return f'; "{value}" (in quotes) would do'
    return _for_example(default if isinstance(default, bool | int | float) else None)
