"""Read a run's configuration from TOML and `--set key=value`, say what is wrong with it, and write it back.

config = load_config("run.toml", ["grid.x=2", "out=runs/mine"])
config = make_config({"out": "runs/mine", "model": {...}, "data": {...}, "train": {...}})
"""

import json
import math
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from stretto.cluster import read_bounded
from stretto.train.config.dlrm import DLRMTrainConfig
from stretto.train.config.options import DataConfig, GridConfig, JobConfig, ModelConfig, RunConfig, Section, TrainConfig

__all__ = [
    "ConfigError",
    "DLRMTrainConfig",
    "DataConfig",
    "GridConfig",
    "JobConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "config_to_toml",
    "job_from_json",
    "load_config",
    "make_config",
    "options_by_key",
]

KINDS: dict[str, type[JobConfig]] = {"gpt": TrainConfig, "dlrm": DLRMTrainConfig}  # by `model.kind`
MAX_FILE_BYTES = 1 << 20
MAX_LINE = 8192  # bytes: tomllib's time grows with the square of a dotted key's parts


class ConfigError(ValueError):
    """A configuration that cannot be used: a line a problem, with key, value, rule, and what would do."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration in a TOML file, with `key.sub=value` overrides applied in order.

    A value is read as TOML (`2`, `true`, `"text"`, `["a", "b"]`) and otherwise as text. Raises ConfigError.
    """
    path = Path(path)
    if not path.is_file():  # also says no to pipes and devices, which may never end
        raise ConfigError(f"there is no configuration file {path}{_similar_file(path)}")
    try:
        content = read_bounded(path, MAX_FILE_BYTES, "a configuration")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if any(len(line) > MAX_LINE for line in content.splitlines()):
        raise ConfigError(f"{path} is no configuration: a line is longer than {MAX_LINE} bytes")
    try:
        values = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # bad TOML, bad UTF-8, numbers of thousands of digits, deep nesting
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return make_config(values, overrides, source=str(path))


def make_config(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "the configuration"
) -> JobConfig:
    """The configuration in a nested mapping, as a TOML file holds it. Raises ConfigError naming `source`.

    A TrainConfig, for a GPT, or what `KINDS` has for the mapping's `model.kind`.
    """
    merged: dict[str, Any] = {}
    _merge(merged, values, source)
    for override in overrides:
        _merge(merged, _parse_override(override), f"--set {override}")
    kind = _kind_of(merged, source)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        options = options_by_key(kind)
        first_of_key: dict[str, ErrorDetails] = {}  # a union reports each of its branches
        for detail in error.errors():
            first_of_key.setdefault(_known_key(detail["loc"], options), detail)
        messages = [_explain(key, detail, options) for key, detail in first_of_key.items()]
        raise ConfigError("\n".join([f"{source} cannot be used:", *messages]).replace("\n", "\n  ")) from error


def _kind_of(values: dict[str, Any], source: str) -> type[JobConfig]:
    """The class for `model.kind`, which a GPT's need not say and does not keep."""
    model = values.get("model")
    name = model.get("kind", "gpt") if isinstance(model, dict) else "gpt"
    if not isinstance(name, str) or name not in KINDS:
        near = get_close_matches(str(name), KINDS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{source} cannot be used:\n  model.kind is {name!r}, but must be one of {', '.join(KINDS)}; "
            f"did you mean {near!r}?"
        )
    if name == "gpt" and isinstance(model, dict):
        model.pop("kind", None)
    return KINDS[name]


def job_from_json(text: str) -> JobConfig:
    """The configuration that `model_dump_json` has written."""
    values = json.loads(text)
    return KINDS[values["model"].get("kind", "gpt")].model_validate_json(text)


def config_to_toml(config: JobConfig) -> str:
    """The configuration as TOML that `load_config` reads back to an equal value."""
    lines: list[str] = []
    for key, value in _plain(config):
        lines.append(f"{key} = {_toml_value(value)}")
    for name, section in config:
        if isinstance(section, Section):
            lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in _plain(section))]
    return "\n".join(lines) + "\n"


def options_by_key(kind: type[JobConfig] = TrainConfig) -> dict[str, FieldInfo]:
    """Every option's field under its dotted key, in the file's order."""
    fields: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= {f"{name}.{sub}": inner for sub, inner in field.annotation.model_fields.items()}
        else:
            fields[name] = field
    return fields


# --- overrides


def _parse_override(text: str) -> dict[str, Any]:
    """`grid.x=2` as {"grid": {"x": 2}}."""
    key, separator, raw = (part.strip() for part in text.partition("="))
    if not separator or not key or not all(key.split(".")):
        raise ConfigError(f"--set {text!r} is not of the form key=value, for example --set train.steps=100")
    value: Any = raw
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--set {text!r} is not valid UTF-8") from None
    try:
        parsed = tomllib.loads(f"value = {raw}")
        if parsed.keys() == {"value"}:  # a line break in `raw` could have made more keys
            value = parsed["value"]
    except (ValueError, RecursionError):
        pass
    fields = [field for kind in KINDS.values() if (field := options_by_key(kind).get(key)) is not None]
    if not isinstance(value, str | list) and any(_takes_text(field.annotation) for field in fields):
        value = raw  # `--set out=2024` names a folder
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_takes_text(argument) for argument in get_args(annotation))
    return annotation in (str, Path)


def _merge(target: dict[str, Any], source: Mapping[str, Any], origin: str, prefix: str = "") -> None:
    """Write `source` over `target`, sections within sections."""
    for key, value in source.items():
        if not isinstance(value, Mapping):
            target[key] = value
            continue
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{origin}: {prefix}{key} is {inner!r}, a value, and has no options of its own")
        _merge(inner, value, origin, f"{prefix}{key}.")


# --- messages


def _explain(key: str, detail: ErrorDetails, options: Mapping[str, FieldInfo]) -> str:
    """One problem that pydantic found, in the words of the file: key, value, rule, what would do."""
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
            near = get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
            return f"{key} is {value!r}, but must be one of {', '.join(choices)}; did you mean {near!r}?"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            (name, bound) = next(iter(context.items()))
            words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}[name]
            return f"{key} is {value!r}, but must be {words} {bound}; {_inside(name, bound, default)} would do"
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
    return f"{key} is {value!r}, but must be {rule}{_instead(value, rule, default)}"


def _known_key(location: tuple[int | str, ...], options: Mapping[str, FieldInfo]) -> str:
    """The option's key: pydantic adds the branch of a union and the place in a list behind it."""
    parts = [str(part) for part in location]
    return next((key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in options), ".".join(parts))


def _nearest(key: str, known_keys: Iterable[str]) -> str:
    """The known key that looks most like `key`, or that has its last name in another section."""
    leaf = key.rpartition(".")[2]

    def likeness(known: str) -> float:
        whole = SequenceMatcher(None, key, known).ratio()
        return max(whole, 0.9 * SequenceMatcher(None, leaf, known.rpartition(".")[2]).ratio())

    return max(known_keys, key=likeness)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]


def _inside(name: str, bound: float, default: Any) -> Any:
    """The nearest number on the right side of a bound. A fraction has none next to an open one: the default."""
    if name in ("ge", "le"):
        return bound
    if isinstance(default, int) and not isinstance(default, bool):
        return bound + 1 if name == "gt" else bound - 1
    return default if default is not None else 0.1


def _for_example(default: Any) -> str:
    return "" if default is None else f", for example {default!r}"


def _instead(value: Any, rule: str, default: Any) -> str:
    """How to write what was probably meant: numbers and truth values without quotes, texts with them."""
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


def _similar_file(path: Path) -> str:
    near = get_close_matches(path.name, [file.name for file in path.parent.glob("*.toml") if file.is_file()], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


# --- writing


def _plain(section: Section) -> Iterator[tuple[str, Any]]:
    """Options to write: sections come later, and None only where it is not the default."""
    for key, value in section:
        if not isinstance(value, Section) and not (value is None and type(section).model_fields[key].default is None):
            yield key, value


def _toml_value(value: Any) -> str:
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list() if all(isinstance(item, int) for item in value):
            return str(value)
        case list():
            return "[\n" + "".join(f"    {_toml_value(item)},\n" for item in value) + "]"
        case _:  # JSON's escapes are TOML's, except that TOML wants DEL escaped too
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
