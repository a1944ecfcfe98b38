# SPDX-License-Identifier: Apache-2.0
"""Read a run's configuration from TOML and `--set key=value`, and write it back as TOML."""

import json
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from stretto.cluster import check_depth, read_bounded
from stretto.suggestions import did_you_mean, did_you_mean_file
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.messages import describe_problems
from stretto.train.config.options import AnyConfig, GridConfig, JobConfig, Section
from stretto.train.kinds import KINDS, config_type

MAX_FILE_BYTES = 1 << 20
MAX_LINE = 8192  # bytes; tomllib's time grows with the square of the number of parts of a dotted key


class ConfigError(ValueError):
    """A configuration that cannot be used. The message has a line for each problem: key, value, rule, what would do."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read the configuration of a TOML file and apply `key.sub=value` overrides in order.

    A value is read as TOML (`2`, `true`, `"text"`, `["a", "b"]`) and otherwise as text. Raises ConfigError.
    """
    path = Path(path)
    if not path.is_file():  # also refuses pipes and devices, which may never end
        raise ConfigError(f"there is no configuration file {path}{did_you_mean_file(path, ('.toml',))}")
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
    """Check a configuration given as a nested mapping, as a TOML file holds it. Raises ConfigError naming `source`.

    Returns the class of the mapping's `model.kind` (`stretto.train.kinds`): TrainConfig (a GPT) by default.
    """
    merged: dict[str, Any] = {}
    for origin, given in [(source, values), *((f"--set {each}", _parse_override(each)) for each in overrides)]:
        try:
            check_depth(given, origin)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _merge(merged, given, origin)
    kind = _kind_of(merged, source)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        messages = describe_problems(error, options_by_key(kind))
        raise ConfigError("\n".join([f"{source} cannot be used:", *messages]).replace("\n", "\n  ")) from error


def _kind_of(values: dict[str, Any], source: str) -> type[JobConfig]:
    """Find the class for `model.kind`. A GPT's file need not have the key, and its configuration drops it."""
    model = values.get("model")
    name = model.get("kind", "gpt") if isinstance(model, dict) else "gpt"
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(
            f"{source} cannot be used:\n  model.kind is {name!r}, but must be one of {', '.join(KINDS)}"
            f"{did_you_mean(name, KINDS)}"
        )
    if name == "gpt" and isinstance(model, dict):
        model.pop("kind", None)
    return config_type(name)


def job_from_json(text: str) -> JobConfig:
    """Read the configuration that `model_dump_json` wrote."""
    values = json.loads(text)
    return config_type(values["model"].get("kind", "gpt")).model_validate_json(text)


def on_grid(config: AnyConfig, grid: GridConfig) -> AnyConfig:
    """The same run on another grid, and on as many ranks. Raises ValueError for options that contradict that grid."""
    values = config.model_dump(mode="json") | config.grid_options(grid)
    try:
        return type(config).model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError("; ".join(describe_problems(error, options_by_key(type(config))))) from None


def config_to_toml(config: JobConfig) -> str:
    """Write the configuration as TOML that `load_config` reads back to an equal value."""
    lines: list[str] = []
    for key, value in _plain(config):
        lines.append(f"{key} = {_toml_value(value)}")
    for name, section in config:
        if isinstance(section, Section):
            lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in _plain(section))]
    return "\n".join(lines) + "\n"


def options_by_key(kind: type[JobConfig] = TrainConfig) -> dict[str, FieldInfo]:
    """List every option's field by its dotted key, in the file's order."""
    fields: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= {f"{name}.{sub}": inner for sub, inner in field.annotation.model_fields.items()}
        else:
            fields[name] = field
    return fields


# --- overrides


def _parse_override(text: str) -> dict[str, Any]:
    """Parse `grid.x=2` into {"grid": {"x": 2}}."""
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
    fields = [field for name in KINDS if (field := options_by_key(config_type(name)).get(key)) is not None]
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
    for key, value in source.items():
        if not isinstance(value, Mapping):
            target[key] = value
            continue
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{origin}: {prefix}{key} is {inner!r}, a value, and has no options of its own")
        _merge(inner, value, origin, f"{prefix}{key}.")


# --- writing


def _plain(section: Section) -> Iterator[tuple[str, Any]]:
    """The options of a section to write: no subsections, and None only where it is not the default."""
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
